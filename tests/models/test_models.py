"""The command of `make models`, on models that need no other library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import on_opencl
import paths
import pytest
import torch
from torch import nn

from models import expected, torch_models, worker
from models.__main__ import main
from models.check import check
from models.model import Model, without_dropout


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(paths.ROOT / "tests" / "models"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("driver", ["host", "opencl"])
@pytest.mark.parametrize("options", [[], ["--compile"]], ids=["eager", "compiled"])
def test_a_model_passes(driver: str, options: list[str]) -> None:
    if driver == "opencl":
        on_opencl.require_platform()
    finished = run("--driver", driver, "--json", *options, "--only", "torch/pointnet")
    assert finished.returncode == 0, finished.stderr
    found = json.loads(finished.stdout)
    (row,) = found["results"]
    assert (found["compiled"], row["model"], row["status"]) == (bool(options), "torch/pointnet", "passed")
    assert row["difference"] < 1e-3
    assert row["graphs"] == (2 if options else 0)
    assert "1 of 1 models pass" in finished.stderr


def test_unknown_names() -> None:
    for name, message in (("theano", "no library theano"), ("torch/bert", "torch has no model bert")):
        finished = run("--driver", "host", "--only", name)
        assert finished.returncode != 0
        assert message in finished.stderr


class Wrong(nn.Module):
    """Returns other numbers on bp."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.layer = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 1 + 0.01 * (x.device.type == "bp")
        if self.training:
            self.steps += 2 if self.part == "buffer" and factor > 1 else 1
        found = self.layer(x)
        if self.part == "gradient":
            return found.detach() + factor * (found - found.detach())
        return found * factor if self.part == "output" else found


@pytest.mark.parametrize(
    ("part", "message"),
    [("output", "output 0 of call 0"), ("gradient", "gradient of layer."), ("buffer", "buffer steps after step 0")],
)
def test_differences_are_found(part: str, message: str) -> None:
    model = Model(build=lambda: Wrong(part), inputs=lambda length: {"x": torch.randn(2, 3)})
    row = check(model, compiled=False)
    assert row["status"] == "failed"
    assert message in row["error"]


def test_recompiles_and_graph_breaks_are_counted() -> None:
    class Steps(nn.Module):
        """Is specialized on the length, and breaks the graph."""

        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return sum((one * k for k, one in enumerate(x)), self.factor)

    model = Model(build=Steps, inputs=lambda length: {"x": torch.ones(length)}, lengths=(2, 3, 4, 5))
    row = check(model, compiled=True)
    assert (row["status"], row["error"], row["recompiles"]) == ("failed", "3 recompiles for 4 lengths", 3)
    assert "torch._dynamo.graph_break()" in " ".join(row["graph_breaks"])


def test_dropout_is_off() -> None:
    parts = [nn.Dropout(0.5), nn.MultiheadAttention(4, 2, dropout=0.3), nn.LSTM(2, 2, 2, dropout=0.1)]
    without_dropout(nn.ModuleList(parts))
    assert [parts[0].p, parts[1].dropout, parts[2].dropout] == [0, 0, 0]


def test_a_worker_that_hangs_or_crashes() -> None:
    hung = worker.Worker("torch", compiled=False)
    with pytest.raises(RuntimeError, match="not done after 0 seconds"):
        hung.try_model("unet", 0)
    crashed = worker.Worker("torch", compiled=False)
    crashed._process.terminate()
    crashed._process.join()
    with pytest.raises(RuntimeError, match="the process ended with exit code -15"):
        crashed.try_model("unet", 60)
    crashed.close()
    assert list(torch_models.MODELS) == crashed.names


class FakeWorker:
    """In place of a process: models pass, fail, or end the process, by their names."""

    version, names = "1", ["good", "bad", "crash", "good, too"]

    def __init__(self, library: str, compiled: bool) -> None:
        pass

    def try_model(self, name: str, seconds: float) -> dict[str, Any]:
        if name == "crash":
            raise RuntimeError("the process ended with exit code -11")
        return {"status": "failed", "error": "no"} if name == "bad" else {"status": "passed"}

    def close(self) -> None:
        pass


def case(name: str) -> expected.Case:
    return expected.Case(f"torch/{name}", "host", False)


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("models.__main__.MODULES", {"theano": "models.theano_models"})
    monkeypatch.setattr(sys, "argv", ["models", "--driver", "host", "--json"])
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("models.__main__.Worker", missing)
    assert main() == 1
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["error"] == "its models cannot be loaded: the process ended with exit code 1"


def missing(library: str, compiled: bool) -> None:
    raise RuntimeError("the process ended with exit code 1")


@pytest.mark.parametrize(
    ("known", "code", "statuses"),
    [
        ([], 1, ["passed", "failed", "failed", "passed"]),
        (["bad", "crash"], 0, ["passed", "failed as expected", "failed as expected", "passed"]),
        (["good", "bad", "crash"], 1, ["unexpectedly passed", "failed as expected", "failed as expected", "passed"]),
    ],
)
def test_exit_code_and_expected_failures(
    known: list[str],
    code: int,
    statuses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("models.__main__.Worker", FakeWorker)
    monkeypatch.setattr(sys, "argv", ["models", "--driver", "host", "--json", "--only", "torch"])
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("models.__main__.EXPECTED_FAILURES", {case(name): "known" for name in known})
    assert main() == code
    assert [row["status"] for row in json.loads(capsys.readouterr().out)["results"]] == statuses
