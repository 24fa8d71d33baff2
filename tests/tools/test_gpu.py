"""Tests `make gpu` without a GPU: its steps, limits and results; and the benchmarks that it runs, on the emulator."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmark_modules
import on_cuda
import paths
import pytest

FOLDER = paths.ROOT / "tools"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module tools/gpu.py, with its output in tmp_path. benchmarks/ has a module of the same name."""
    spec = importlib.util.spec_from_file_location("tools_gpu", FOLDER / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    gpu = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, gpu)
    spec.loader.exec_module(gpu)
    monkeypatch.setattr(gpu, "OUTPUT", tmp_path)
    monkeypatch.setattr(gpu, "GRACE", 1.0)
    monkeypatch.setattr(gpu, "LEAST", 0.5)
    monkeypatch.setattr(gpu, "machine", lambda settings: {"gpus": []})
    return gpu


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """run(*steps, minutes=1, options=()): runs steps; returns the exit code and the results file."""

    def run(*steps: Any, minutes: float = 1, options: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(gpu, "STEPS", steps)
        file = tmp_path / "results.json"
        given = ["--minutes", str(minutes), "--base", sys.executable, "--results", str(file), *options]
        return gpu.main(given), json.loads(file.read_text())

    return run


def python(code: str) -> str:
    """The command that runs code, which must have no single quotes."""
    return f"{sys.executable} -c '{code}'"


def statuses(found: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["status"] for one in found["steps"]}


def test_steps_run_in_order_and_results_are_written_after_each(gpu: ModuleType, run: Run, tmp_path: Path) -> None:
    seen = f'import json; print(len(json.load(open("{tmp_path}/results.json"))["steps"]))'
    steps = [gpu.Step(name, name.upper(), python(seen if name != "a" else "print(0)"), 0.5) for name in "abc"]
    code, found = run(*steps)
    assert code == 0
    assert statuses(found) == {"a": "passed", "b": "passed", "c": "passed"}
    assert [(tmp_path / one["log"]).read_text() for one in found["steps"]] == ["0\n", "1\n", "2\n"]
    assert found["steps"][1]["what"] == "B"
    assert found["minutes"] == 1


def test_a_failing_step_is_reported_and_the_others_run(
    gpu: ModuleType, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(
        gpu.Step("a", "A", python("import sys; sys.exit(3)"), 0.5),
        gpu.Step("b", "B", "/no/such/program", 0.5),
        gpu.Step("c", "C", python("print(1)"), 0.5),
    )
    assert code == 1
    assert statuses(found) == {"a": "failed", "b": "failed", "c": "passed"}
    assert found["steps"][0]["reason"] == "exit code 3"
    assert "/no/such/program" in found["steps"][1]["reason"]
    printed = capsys.readouterr().out
    assert "failed in 0 s, exit code 3" in printed


def test_without_the_setup_nothing_runs(gpu: ModuleType, run: Run) -> None:
    code, found = run(
        gpu.Step("setup", "A", python("import sys; sys.exit(1)"), 0.5), gpu.Step("b", "B", python("print(1)"), 0.5)
    )
    assert code == 1
    assert statuses(found) == {"setup": "failed", "b": "skipped"}
    assert found["steps"][1]["reason"] == "setup has failed"


CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
                          "time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def alive(process: int) -> bool:
    """Whether the process runs and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_the_limit_stops_a_step_and_its_children(gpu: ModuleType, run: Run, tmp_path: Path) -> None:
    program = tmp_path / "child.py"
    program.write_text(CHILD)
    began = time.monotonic()
    code, found = run(
        gpu.Step("a", "A", f"{sys.executable} {program}", 2 / 60), gpu.Step("b", "B", python("print(1)"), 0.5)
    )
    assert time.monotonic() - began < 30
    assert code == 1
    assert statuses(found) == {"a": "timed out", "b": "passed"}
    assert found["steps"][0]["reason"] == "stopped after 2 s"
    child = int((tmp_path / "a.log").read_text().split()[0])
    for _ in range(50):
        if not alive(child):
            break
        time.sleep(0.1)
    assert not alive(child)


def test_what_a_stopped_step_has_found_is_kept(gpu: ModuleType, run: Run, tmp_path: Path) -> None:
    program = tmp_path / "partial.py"
    program.write_text(
        "import json, sys, time\n"
        "json.dump({'results': [1, 2]}, open(sys.argv[1], 'w'))\n"
        "print('tests/a.py::test_one PASSED [ 10%]\\ntests/a.py::test_two FAILED [ 20%]', flush=True)\n"
        "time.sleep(600)\n"
    )
    step = gpu.Step("a", "A", f"{sys.executable} {program} {{report}}", 2 / 60, report="a.json")
    (tmp_path / "a.json").write_text("an earlier run's")
    _, found = run(step)
    assert found["steps"][0]["status"] == "timed out"
    assert found["steps"][0]["data"] == {"results": [1, 2]}
    assert found["steps"][0]["tests"] == {"passed": 1, "failed": 1}
    assert found["steps"][0]["failures"] == ["tests/a.py::test_two"]


def test_the_report_of_an_earlier_run_is_not_kept(gpu: ModuleType, run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"results": [1]}')
    _, found = run(gpu.Step("a", "A", python("print(1)"), 0.5, report="a.json"))
    assert found["steps"][0]["data"] is None


def test_the_total_limit_skips_the_rest_by_name(
    gpu: ModuleType, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [gpu.Step(name, name, python("import time; time.sleep(600)"), 1.0) for name in ("a", "b", "c")]
    code, found = run(*steps, minutes=3 / 60)
    assert code == 1
    assert statuses(found) == {"a": "timed out", "b": "skipped", "c": "skipped"}
    assert found["steps"][2]["reason"] == "the 0.05 minutes are over"
    assert "c                  skipped, the 0.05 minutes are over" in capsys.readouterr().out


def test_a_step_that_the_machine_lacks_is_skipped(gpu: ModuleType, run: Run) -> None:
    code, found = run(gpu.Step("a", "A", python("print(1)"), 0.5, lambda: "there is no tool"))
    assert code == 0
    assert (found["steps"][0]["status"], found["steps"][0]["reason"]) == ("skipped", "there is no tool")


def test_steps_get_the_gpus_library_and_not_the_emulators(
    gpu: ModuleType, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_BACKPLANE_CUDA_LIBRARY", raising=False)
    show = 'import os; print(*(os.environ["TORCH_BACKPLANE_" + one] for one in ("CUDA_LIBRARY", "DRIVERS")))'
    environment = {"TORCH_BACKPLANE_DRIVERS": "opencl"}
    run(gpu.Step("a", "A", python(show), 0.5), gpu.Step("b", "B", python(show), 0.5, environment=environment))
    assert (tmp_path / "a.log").read_text() == "libcuda.so.1 cuda\n"
    assert (tmp_path / "b.log").read_text() == "libcuda.so.1 opencl\n"


def test_steps_use_the_checkout(gpu: ModuleType, run: Run, tmp_path: Path) -> None:
    run(gpu.Step("a", "A", python("import torch_backplane; print(torch_backplane.__file__)"), 0.5))
    assert (tmp_path / "a.log").read_text() == f"{paths.ROOT}/torch_backplane/__init__.py\n"


def test_nvrtc_is_found_in_the_packages_of_the_base(gpu: ModuleType, tmp_path: Path) -> None:
    base = tmp_path / "python"
    packages = tmp_path / "site-packages"
    for number, name in ((12, "cuda_nvrtc"), (13, "cu13")):
        (packages / "nvidia" / name / "lib").mkdir(parents=True)
        (packages / "nvidia" / name / "lib" / f"libnvrtc.so.{number}").touch()
    base.write_text(f"#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} \"$@\"\n")
    base.chmod(0o755)
    found = gpu.gpu_environment(str(base))
    assert found["TORCH_BACKPLANE_NVRTC_LIBRARY"] == str(packages / "nvidia/cu13/lib/libnvrtc.so.13")


LOGS = {
    "one process": """
tests/opencl/test_a.py::test_one[x - y] PASSED                            [  1%]
tests/opencl/test_a.py::test_two SKIPPED (needs a GPU)                    [  2%]
tests/opencl/test_a.py::test_three FAILED                                 [  3%]
FAILED tests/opencl/test_a.py::test_three - AssertionError
""",
    "several processes": """
tests/opencl/test_a.py::test_one[x - y]
[gw0] [  1%] PASSED tests/opencl/test_a.py::test_one[x - y]
[gw1] [  2%] SKIPPED tests/opencl/test_a.py::test_two
[gw12] [100%] FAILED tests/opencl/test_a.py::test_three
FAILED tests/opencl/test_a.py::test_three - AssertionError
""",
}


@pytest.mark.parametrize("log", LOGS)
def test_outcomes_are_counted(gpu: ModuleType, log: str) -> None:
    counts, failures = gpu.outcomes(LOGS[log])
    assert counts == {"passed": 1, "skipped": 1, "failed": 1}
    assert failures == ["tests/opencl/test_a.py::test_three"]


def test_unknown_steps_are_refused(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        gpu.main(["--only", "smoke,fly"])
    assert raised.value.code == 2
    assert "--only: fly: no such step" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_gpu_lists_its_steps() -> None:
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}", "MINUTES=10", "ARGS=--dry-run"]
    listed = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=True).stdout
    steps = [line.partition(":")[0] for line in listed.splitlines()[1:] if not line.startswith("    ")]
    assert steps == [
        "setup", "doctor", "smoke", "tests", "conformance", "memcheck", "benchmarks", "racecheck", "predictions",
        "traffic", "opencl", "opencl benchmarks",
    ]  # fmt: skip
    assert f"tools/setup.sh {sys.executable} {paths.ROOT}/build/gpu/venv '' '' gpu" in listed
    assert "at most 240 s" in listed  # 0.4 of 10 minutes
    assert "--minutes 1.25" in listed  # conformance ends before its limit of 1.5 minutes


# --- on the emulator -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(bool(on_cuda.missing()), reason=on_cuda.missing())
def test_all_steps_on_the_emulator(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    options = ["--emulated", "--tiny", "--jobs", "1", "--minutes", "20", "--results", str(file)]
    finished = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), "--python", sys.executable, *options],
        env=os.environ | {"PYTHONPATH": str(paths.ROOT)}, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = json.loads(file.read_text())
    steps = {one["name"]: one for one in found["steps"]}
    assert found["emulated"] is True
    assert "setup" not in steps
    assert steps["smoke"]["tests"]["passed"] > 1
    assert steps["conformance"]["data"]["totals"]["passed"] == 2
    measured = steps["benchmarks"]["data"]
    assert measured["driver"] == "cuda"
    assert all(row["bp"] > 0 and not row["error"] for row in measured["results"])
    assert {row["group"] for row in measured["results"]} == {
        "issue", "bandwidth", "products", "convolutions", "attention"
    }  # fmt: skip
    cases = [row["case"] for row in steps["predictions"]["data"]["results"]]
    assert cases == ["copy", "add", "sum of rows"]


def run_benchmark(
    script: str, file: Path, *options: str, **env: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs a benchmark with --json; returns the finished process and what it has written to the file."""
    finished = subprocess.run(
        [sys.executable, str(paths.ROOT / "benchmarks" / script), *options, "--json", str(file)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return finished, json.loads(file.read_text()) if file.exists() else {}


def test_both_sides_are_measured(tmp_path: Path) -> None:
    options = ["--driver", "host", "--other", "cpu", "--size", "tiny", "--rounds", "1"]
    match = "a . b|copy|product of .* float32"
    finished, found = run_benchmark("gpu.py", tmp_path / "a.json", *options, "--match", match)
    assert finished.returncode == 0, finished.stderr
    assert [row["title"] for row in found["results"]] == ["a * b", "copy", "transposed copy", "product of 16³, float32"]
    assert [row["unit"] for row in found["results"]] == ["µs", "GB/s", "GB/s", "TFLOP/s"]
    for row in found["results"]:
        assert row["ratio"] == pytest.approx(row["other_ms"] / row["bp_ms"])
    issued, copied = found["results"][:2]
    assert issued["bp"] == pytest.approx(issued["bp_ms"] * 1e3)
    assert copied["bp"] == pytest.approx(8 * 1024 / 1e9 / (copied["bp_ms"] / 1e3))


@pytest.mark.parametrize(("failing", "measured"), [("bp", "other"), ("cpu", "bp"), ("both", "")])
def test_a_side_that_fails_is_reported_and_the_other_is_measured(failing: str, measured: str) -> None:
    import torch

    benchmark = benchmark_modules.load("gpu")

    def make(device: torch.device) -> Callable[[], object]:
        def body() -> object:
            if failing in (device.type, "both"):
                raise ValueError(f"no kernel for {device.type}\nlong text")
            return torch.ones(3, device=device)

        return body

    row = benchmark.Row("issue", "ones", make, "µs")
    result = benchmark.run(row, [benchmark.side_of("bp"), benchmark.side_of("cpu")], 2, 3)
    assert "ValueError: no kernel for" in result.error
    assert "long text" not in result.error
    assert {name for name in ("bp", "other") if getattr(result, name) is not None} == {measured} - {""}
    assert result.ratio is None
    assert benchmark.line(result).startswith("ones: ")


def test_without_cuda_only_bp_is_measured(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    options = ["--driver", "host", "--size", "tiny", "--rounds", "1", "--match", "^issue: sum"]
    finished, found = run_benchmark("gpu.py", tmp_path / "a.json", *options)
    assert finished.returncode == 0, finished.stderr
    assert "PyTorch has no CUDA here: only bp is measured" in finished.stdout
    (row,) = found["results"]
    assert (row["other"], row["ratio"], found["other"]) == (None, None, None)
    assert row["bp"] > 0


def test_predictions_follow_from_the_copy(tmp_path: Path) -> None:
    options = ["--driver", "host", "--elements", "4096", "--rounds", "1", "--match", "^add$"]
    finished, found = run_benchmark("predictions.py", tmp_path / "a.json", *options)
    assert finished.returncode == 0, finished.stderr
    copy, added = found["results"]
    bandwidth = copy["predicted_bytes"] / copy["measured_ms"] * 1e3
    assert copy["predicted_bytes"] == pytest.approx(8 * 4096)
    assert added["predicted_ms"] == pytest.approx(5e-3 + added["predicted_bytes"] / bandwidth * 1e3)
    assert added["ratio"] == pytest.approx(added["measured_ms"] / added["predicted_ms"])
    assert found["cases"] == 2


NCU = r"""#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
file=$2
shift 2
"$@" || exit
cat > "$file" <<'END'
==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Grid Size","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","byte","byte"
"0","1","bp_copy","(64, 1, 1)","9","9"
"1","1","bp_bitwise_not","(1, 1, 1)","7","7"
"2","1","bp_copy","(64, 1, 1)","16384","16,384"
"3","1","bp_bitwise_not","(1, 1, 1)","7","7"
"4","1","bp_sum","(64, 1, 1)","9","9"
"5","1","bp_bitwise_not","(1, 1, 1)","7","7"
"6","1","bp_sum_part(float const*)","(64, 1, 1)","20000","100"
"7","1","bp_sum(float const*)","(64, 1, 1)","100","0"
"8","1","bp_bitwise_not","(1, 1, 1)","7","7"
END
"""


def test_bytes_are_those_that_ncu_counts_between_markers(tmp_path: Path) -> None:
    ncu = tmp_path / "ncu"
    ncu.write_text(NCU)
    ncu.chmod(0o755)
    options = ["--driver", "host", "--elements", "4096", "--match", "^sum of all$", "--ncu"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    finished, found = run_benchmark("predictions.py", tmp_path / "a.json", *options, PATH=path)
    assert finished.returncode == 0, finished.stderr
    copy, summed = found["results"]
    assert copy == {"case": "copy", "predicted_bytes": 32768.0, "measured_bytes": 32768.0, "ratio": 1.0}
    assert (summed["case"], summed["measured_bytes"]) == ("sum of all", 20200.0)
    assert summed["ratio"] == pytest.approx(20200 / summed["predicted_bytes"])


def test_an_audit_without_the_target_is_refused(tmp_path: Path) -> None:
    finished, _ = run_benchmark("predictions.py", tmp_path / "a.json", "--driver", "host", "--target", "Voodoo")
    assert finished.returncode == 2
    assert "no prediction of 'copy' for 'Voodoo'" in " ".join(finished.stderr.replace("│", " ").split())


@pytest.mark.parametrize("results", [True, False])
def test_the_page_shows_the_results(
    results: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import results_pages

    monkeypatch.setattr(results_pages, "RESULTS", tmp_path)
    row = {"group": "issue", "title": "a * b", "unit": "µs", "bp": 2.5, "other": 5.0, "ratio": 2.0, "error": ""}
    prediction = {"case": "copy", "family": "copies", "traffic": 1.0, "predicted_ms": 1.0, "measured_ms": 1.5}
    predicted = {"cases": 1, "within_factor_2": 1, "median_ratio": 1.5, "results": [prediction | {"ratio": 1.5}]}
    step = {"status": "passed", "reason": "", "seconds": 3.0, "tests": {}, "data": None}
    steps = [
        step | {"name": "smoke", "what": "small kernels", "tests": {"passed": 3, "failed": 1}, "status": "failed"},
        step | {"name": "memcheck", "what": "accesses", "status": "skipped", "reason": "it is not installed"},
        step | {"name": "benchmarks", "what": "bp and torch.cuda",
                "data": {"driver": "cuda", "other": "cuda", "results": [row]}},
        step | {"name": "predictions", "what": "the audit", "data": predicted},
    ]  # fmt: skip
    machine = {"gpus": ["NVIDIA X"], "cpu": "C", "cores": 16, "system": "Debian", "torch": "2.11.0"}
    found = {"date": "2026-01-01", "commit": "abc", "machine": machine, "steps": steps}
    if results:
        (tmp_path / "gpu.json").write_text(json.dumps(found))
    text = "\n".join(results_pages.gpu())
    if not results:
        assert text == "Not run on a GPU."
        return
    assert "NVIDIA X; C, 16 cores" in text
    assert "| small kernels | failed | 3 passed, 1 failed | 3 |" in text
    assert "| accesses | skipped: it is not installed |  | 3 |" in text
    assert "| a * b | µs | 2.5 | 5 | 2 |  |" in text
    assert "| copy | 1 | 1 | 1.5 | 1.5 |  |" in text
    assert "Of 1 cases, 1 take between half and twice" in text
