"""Runs the examples as a user does, with small settings."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import paths
import pytest

EXAMPLES = paths.ROOT / "examples"


def run(script: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the example in a new interpreter with one CPU thread."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def run_and_read(out: pathlib.Path, script: str, *options: str) -> tuple[dict[str, Any], str]:
    """Runs the example; returns the report that it wrote to `out`, and its stdout."""
    finished = run(script, *options, "--out", str(out))
    assert finished.returncode == 0, finished.stderr
    return json.loads((out / "report.json").read_text()), finished.stdout


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, pathlib.Path]:
    out = tmp_path_factory.mktemp("gpt")
    small = ["--steps", "40", "--eval-every", "20", "--batch", "8", "--context", "32", "--layers", "2", "--heads", "2"]
    report, printed = run_and_read(out, "train_gpt.py", *small, "--width", "32", "--sample-length", "20")
    return report, printed, out


class TestTrainGPT:
    def test_learns(self, gpt: tuple[dict[str, Any], str, pathlib.Path]) -> None:
        report, _, _ = gpt
        assert report["device"].startswith("bp")
        assert report["first_loss"] == pytest.approx(4.56, abs=0.3)  # ln 96: untrained
        assert report["held_out_loss"] < report["first_loss"] - 0.5
        assert [step for step, _, _ in report["history"]] == [20, 40]

    def test_checkpoint_gives_the_same_loss(self, gpt: tuple[dict[str, Any], str, pathlib.Path]) -> None:
        report, _, _ = gpt
        assert report["reloaded_loss"] == pytest.approx(report["held_out_loss"], rel=1e-5)

    def test_same_losses_as_on_the_cpu(self, gpt: tuple[dict[str, Any], str, pathlib.Path]) -> None:
        report, _, _ = gpt
        assert report["speed"]["largest_loss_difference"] < 1e-4
        assert report["speed"]["tokens_per_second"] > 0
        assert report["speed"]["cpu_tokens_per_second"] > 0

    def test_report_has_the_figures(self, gpt: tuple[dict[str, Any], str, pathlib.Path]) -> None:
        report, printed, out = gpt
        # Training needs at least the weights, gradients and two moments in float32.
        assert report["peak_memory"] >= 16 * report["parameters"]
        assert isinstance(report["fallbacks"], dict)
        for line in ("held-out loss", "compared with the CPU", "peak memory", "fallbacks to the CPU"):
            assert line in printed
        assert len(report["sample"]) == len("\n    def ") + 20
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert (out / "sample.txt").exists()


class TestTrainDigits:
    def test_recognizes_digits(self, tmp_path: pathlib.Path) -> None:
        report, printed = run_and_read(tmp_path, "train_digits.py", "--epochs", "4")
        assert report["device"].startswith("bp")
        assert report["last_loss"] < report["first_loss"] / 4
        assert report["accuracy"] >= 0.95
        assert report["reloaded_accuracy"] == report["accuracy"]
        assert report["peak_memory"] >= 16 * report["parameters"]
        for line in ("test accuracy", "peak memory", "fallbacks to the CPU"):
            assert line in printed


@pytest.mark.parametrize("script", ["train_gpt.py", "train_digits.py"])
class TestBadInput:
    def test_unknown_device_gets_pytorchs_message(self, script: str) -> None:
        finished = run(script, "--device", "nonsense")
        assert finished.returncode != 0
        assert "Expected one of cpu, cuda" in finished.stderr
        assert "nonsense" in finished.stderr
        assert "Traceback" not in finished.stderr

    def test_device_index_out_of_range(self, script: str) -> None:
        finished = run(script, "--device", "bp:99")
        assert finished.returncode != 0
        assert "bp:99" in finished.stderr
        assert "Traceback" not in finished.stderr

    def test_says_what_to_do_without_bp(self, script: str) -> None:
        finished = run(script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
        assert finished.returncode != 0
        assert "No device type 'bp'" in finished.stderr
        assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in finished.stderr


def test_width_must_fit_the_heads() -> None:
    finished = run("train_gpt.py", "--width", "30", "--heads", "4")
    assert finished.returncode != 0
    assert "30 is not a multiple of 4" in finished.stderr


class TestText:
    @pytest.fixture(autouse=True)
    def _import(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(EXAMPLES)

    def test_characters_round_trip(self) -> None:
        import stdlib_text

        assert stdlib_text.decode(stdlib_text.encode(stdlib_text.ALPHABET)) == stdlib_text.ALPHABET
        assert stdlib_text.decode(stdlib_text.encode("a\tb é\r\n")) == "a b ??\n"

    def test_files_are_split_into_training_and_held_out_text(self) -> None:
        import stdlib_text

        train, held_out = stdlib_text.load()
        assert 0.01 < len(held_out) / len(train) < 0.15
        assert max(train.max(), held_out.max()) < len(stdlib_text.ALPHABET)
        again, _ = stdlib_text.load()
        assert again.equal(train)


class TestSimulatedCluster:
    SMALL = ("--devices", "3", "--memory", "48MiB", "--steps", "3", "--layers", "6")

    def test_recovers_from_out_of_memory_with_correct_losses(self) -> None:
        finished = run("simulated_cluster.py", *self.SMALL, "--batch", "100001")  # not a multiple of three
        assert finished.returncode == 0, finished.stdout + finished.stderr
        rows = [line.replace("│", " ").split() for line in finished.stdout.splitlines() if line.startswith("│")]
        assert [row[0] for row in rows] == ["0", "1", "2"]
        assert int(rows[0][-1]) > 0  # halved
        assert rows[1][-1] == rows[2][-1] == "0"
        assert "compared with the CPU: losses differ by" in finished.stdout

    def test_too_little_memory_is_an_error(self) -> None:
        finished = run("simulated_cluster.py", "--devices", "2", "--memory", "64KiB", "--batch", "64", "--steps", "1")
        assert finished.returncode != 0
        assert "64KiB is too little" in finished.stdout or "out of memory" in finished.stderr
