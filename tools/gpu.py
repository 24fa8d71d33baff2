"""Builds, tests and measures Backplane on a GPU, in a limited time and without a network: `make gpu`.

    python tools/gpu.py --minutes 25
    python tools/gpu.py --dry-run                       # list the steps, with their limits and commands
    python tools/gpu.py --only smoke,benchmarks --python .venv/bin/python

Steps are in the order of their value. Each is a process with a time limit, and has a log in build/gpu/. A step that
fails does not stop the others. results/gpu.json is written after every step; `tools/pages.py` makes a part of
docs/cuda.md from it. The exit code is 0 if no step has failed or run out of time, and 1 if not.

This file uses only the standard library: PyTorch is imported in the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import glob
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "build" / "gpu"
GRACE = 20.0  # seconds that a process has to write its results after SIGINT
LEAST = 5.0  # seconds: a step with less time is skipped

SMALL_KERNELS = "tests/opencl/test_small_kernels.py"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step. `Settings.command` fills in the words in braces.

    Args:
        share: the part of the total time after which the step is stopped.
        missing: returns why the step cannot run on this machine, or an empty string.
        tiny: the command with --tiny, by default the same.
        environment: additional variables.
        report: the JSON file that the command writes, in the output folder.
    """

    name: str
    what: str
    command: str
    share: float
    missing: Callable[[], str] = lambda: ""
    tiny: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    report: str = ""


def no_sanitizer() -> str:
    return "" if shutil.which("compute-sanitizer", path=search_path()) else "compute-sanitizer is not installed"


def no_ncu() -> str:
    return "" if shutil.which("ncu", path=search_path()) else "ncu (Nsight Compute) is not installed"


def no_nvidia_opencl() -> str:
    found = [one for one in glob.glob("/etc/OpenCL/vendors/*.icd") if "nvidia" in Path(one).read_text("utf-8").lower()]
    return "" if found else "NVIDIA's OpenCL is not installed (no ICD file in /etc/OpenCL/vendors)"


def search_path() -> str:
    """PATH, with the folders of CUDA toolkits."""
    return os.pathsep.join([os.environ.get("PATH", ""), *sorted(glob.glob("/usr/local/cuda*/bin"), reverse=True)])


PYTEST = "{python} -m pytest -v --tb=short -p no:cacheprovider"
CONFORMANCE = "{python} -W ignore -m torch_backplane conformance --driver {driver} --minutes {minutes} --json {report}"
BENCHMARK = "{python} -W ignore benchmarks/gpu.py --json {report}"
PREDICTIONS = "{python} -W ignore benchmarks/predictions.py --driver {driver} --json {report}"
TYPICAL = "^(add|gelu|transposed copy|sum of (all|rows|columns)|(softmax|layer norm|cumsum) of rows)$"
SANITIZE = "compute-sanitizer --error-exitcode 9 --target-processes all --tool"
OPENCL = {"TORCH_BACKPLANE_DRIVERS": "opencl"}

STEPS = (
    Step("setup", "installs what PYTHON lacks, and builds", "tools/setup.sh {base} {venv} '' '' gpu", 0.4),
    Step("doctor", "devices, and what is missing", "{python} -m torch_backplane doctor", 0.1),
    Step("smoke", "one small kernel of each kind", f"{PYTEST} --on cuda {SMALL_KERNELS}", 0.1,
         tiny=f"{PYTEST} --on cuda {SMALL_KERNELS} -k 'elementwise or sum'"),
    Step("tests", "the tests", f'{PYTEST} --on cuda --cover 1 -m "not slow" -n {{jobs}} --dist loadfile tests', 0.2,
         tiny=f"{PYTEST} --on cuda tests/accelerator/test_views.py -k memory_formats"),
    Step("conformance", "PyTorch's operator database, with gradients",
         f"{CONFORMANCE} --grad --samples 2 --jobs {{jobs}}", 0.15, report="conformance.json",
         tiny=f"{CONFORMANCE} --grad --samples 1 --jobs 1 --match '^(add|sum)$'"),
    Step("memcheck", "accesses of small kernels", f"{SANITIZE} memcheck {PYTEST} --on cuda {SMALL_KERNELS}", 0.08,
         no_sanitizer),
    Step("benchmarks", "bp and torch.cuda in the same process", f"{BENCHMARK} --driver {{driver}}", 0.2,
         report="benchmarks.json", tiny=f"{BENCHMARK} --driver {{driver}} --size tiny --rounds 1"),
    Step("racecheck", "races of small kernels", f"{SANITIZE} racecheck {PYTEST} --on cuda {SMALL_KERNELS}", 0.08,
         no_sanitizer),
    Step("predictions", "the audit's predictions and measured times", PREDICTIONS, 0.1, report="predictions.json",
         tiny=f"{PREDICTIONS} --rounds 1 --elements 1024 --match '^(add|sum of rows)$'"),
    Step("traffic", "the audit's predictions and measured bytes", f"{PREDICTIONS} --ncu --match '{TYPICAL}'", 0.1,
         no_ncu, report="traffic.json"),
    Step("opencl", "one small kernel of each kind, on the GPU's OpenCL",
         f"{PYTEST} --on opencl {SMALL_KERNELS}", 0.05, no_nvidia_opencl, environment=OPENCL),
    Step("opencl benchmarks", "the GPU's OpenCL and torch.cuda in the same process", f"{BENCHMARK} --driver opencl",
         0.1, no_nvidia_opencl, environment=OPENCL, report="opencl-benchmarks.json"),
)  # fmt: skip


@dataclasses.dataclass
class Settings:
    """What the steps have in common.

    Args:
        base: the Python whose torch is used.
        venv: the virtual environment that the step `setup` makes.
        python: the Python of the steps.
        minutes: the total time.
        environment: variables of all steps.
        is_tiny: whether steps have small sizes.
    """

    base: str
    venv: Path
    python: str
    minutes: float
    jobs: int
    environment: dict[str, str]
    is_tiny: bool = False

    def command(self, step: Step, limit: float) -> list[str]:
        """The command of a step that has `limit` seconds."""
        words = {
            "base": self.base,
            "venv": str(self.venv),
            "python": self.python,
            "driver": "cuda",
            "jobs": str(self.jobs),
            "minutes": f"{max(0.1, limit / 60 - 0.25):.2f}",  # time to write the results
            "report": str(OUTPUT / step.report),
        }
        text = step.tiny if self.is_tiny and step.tiny else step.command
        return [word.format(**words) for word in shlex.split(text)]


@dataclasses.dataclass
class Result:
    """The result of a step: `status` is passed, failed, timed out, or skipped."""

    name: str
    what: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    command: str = ""
    log: str = ""
    tests: dict[str, int] = dataclasses.field(default_factory=dict)  # by outcome
    failures: list[str] = dataclasses.field(default_factory=list)  # names of tests
    data: Any = None


def run(step: Step, settings: Settings, limit: float) -> Result:
    """Runs a step, and stops it and its children after `limit` seconds."""
    command = settings.command(step, limit)
    log = OUTPUT / f"{step.name.replace(' ', '-')}.log"
    result = Result(step.name, step.what, "passed", limit=round(limit, 1), command=shlex.join(command), log=log.name)
    report = OUTPUT / step.report if step.report else None
    if report is not None:
        report.unlink(missing_ok=True)
    environment = {**os.environ, **settings.environment, **step.environment, "PATH": search_path()}
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return dataclasses.replace(result, status="failed", reason=str(error))
        try:
            code = process.wait(limit)
            if code != 0:
                result.status, result.reason = "failed", f"exit code {code}"
        except subprocess.TimeoutExpired:
            result.status, result.reason = "timed out", f"stopped after {limit:.0f} s"
        finally:
            stop(process)
    result.seconds = round(time.monotonic() - began, 1)
    result.tests, result.failures = outcomes(log.read_text(encoding="utf-8", errors="replace"))
    if report is not None and report.exists():
        result.data = compact(json.loads(report.read_text(encoding="utf-8")))
    return result


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a process, so that it can print a summary, and then kills all processes of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# A line of `pytest -v`, in one process and in several.
OUTCOME = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] (?P<word>[A-Z]+) (?P<test>tests/\S.*?)"
    r"|(?P<test1>tests/\S.*?) (?P<word1>PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)\s*$",
    re.MULTILINE,
)


def outcomes(log: str) -> tuple[dict[str, int], list[str]]:
    """The number of tests by outcome, and the names of those that failed, from the output of `pytest -v`."""
    found = {one["test"] or one["test1"]: (one["word"] or one["word1"]).lower() for one in OUTCOME.finditer(log)}
    failures = [test for test, word in found.items() if word in ("failed", "error")]
    return dict(Counter(found.values())), failures


def compact(data: dict[str, Any]) -> dict[str, Any]:
    """The report of conformance without the operators that agree; other reports as they are."""
    if "entries" not in data:
        return data
    failures = [
        {"op": one["op"], "dtype": one["dtype"], "message": one["findings"][0]["message"].partition("\n")[0][:200]}
        for one in data["entries"]
        if one["status"] == "failed"
    ]
    return {"seconds": data["seconds"], "totals": data["totals"], "failures": failures}


def run_all(steps: tuple[Step, ...], settings: Settings, save: Callable[[list[Result]], None]) -> list[Result]:
    """Runs the steps in order, and calls `save` with the results after each."""
    results: list[Result] = []
    end = time.monotonic() + settings.minutes * 60
    for step in steps:
        limit = min(step.share * settings.minutes * 60, end - time.monotonic() - GRACE)
        failed = [one.name for one in results if one.name == "setup" and one.status not in ("passed", "skipped")]
        reason = step.missing() or (f"{failed[0]} has failed" if failed else "")
        if not reason and limit < LEAST:
            reason = f"the {settings.minutes:g} minutes are over"
        print(f"{step.name}: {step.what}", flush=True)
        result = Result(step.name, step.what, "skipped", reason) if reason else run(step, settings, limit)
        results.append(result)
        print(f"    {line(result)}", flush=True)
        save(results)
    return results


def line(result: Result) -> str:
    """The result of a step in one line."""
    parts = [f"{result.status} in {result.seconds:.0f} s" if result.status != "skipped" else "skipped", result.reason]
    parts += [f"{number} {word}" for word, number in result.tests.items()]
    totals = (result.data or {}).get("totals", {})
    parts += [f"{totals[word]} {word.replace('_', ' ')}" for word in ("passed", "failed", "left_out") if word in totals]
    return ", ".join(filter(None, parts))


# --- the machine -----------------------------------------------------------------------------------------------------


def output_of(*command: str, **environment: str) -> str:
    """What a command prints; an empty string if it fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def machine(settings: Settings) -> dict[str, Any]:
    """The GPU, NVIDIA's driver, and versions."""
    gpus = output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    release = Path("/etc/os-release")
    text = release.read_text(encoding="utf-8") if release.exists() else ""
    system = re.search(r'^PRETTY_NAME="?(.*?)"?$', text, re.MULTILINE)
    return {
        "gpus": gpus.splitlines(),
        "cpu": cpu[1] if cpu else "",
        "cores": os.cpu_count(),
        "system": system[1] if system else sys.platform,
        "python": output_of(settings.base, "-c", "import platform; print(platform.python_version())"),
        "torch": output_of(settings.base, "-c", "import torch; print(torch.__version__, torch.version.cuda)",
                           TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
    }  # fmt: skip


# cuda-bindings does not search the packages of the Python that the virtual environment takes torch from.
FIND_NVRTC = """
import glob, sys
found = [file for one in sys.path for file in glob.glob(one + "/nvidia/*/lib/libnvrtc.so.1[23]")]
print(max(found, key=lambda file: file.rpartition(".")[2], default=""))
"""


def gpu_environment(base: str) -> dict[str, str]:
    """The variables with which the steps use the GPU."""
    found = {"TORCH_BACKPLANE_CUDA_LIBRARY": os.environ.get("TORCH_BACKPLANE_CUDA_LIBRARY") or "libcuda.so.1"}
    if "TORCH_BACKPLANE_NVRTC_LIBRARY" not in os.environ and (nvrtc := output_of(base, "-c", FIND_NVRTC)):
        found["TORCH_BACKPLANE_NVRTC_LIBRARY"] = nvrtc
    return found


def emulator_environment(python: str) -> dict[str, str]:
    """The variables with which the steps use one emulated device.

    Raises:
        RuntimeError: the emulator cannot be built.
    """
    program = "import json, on_cuda; print(json.dumps(on_cuda.environment() | {'CUDA_EMULATOR_DEVICES': '1'}))"
    folders = [str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    text = output_of(python, "-c", program, PYTHONPATH=os.pathsep.join(filter(None, folders)))
    if not text:
        raise RuntimeError(f"{python} cannot build the CUDA emulator")
    return dict(json.loads(text))


# --- the program -----------------------------------------------------------------------------------------------------


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25, help="total time (default: 25)")
    parser.add_argument("--base", default="python3", help="the Python whose torch is used (default: python3)")
    parser.add_argument("--venv", type=Path, default=OUTPUT / "venv", help="where the step setup installs")
    parser.add_argument("--python", help="use this Python as it is, and leave out the step setup")
    parser.add_argument("--only", default="", metavar="NAMES", help="only these steps, comma-separated")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes of a step")
    parser.add_argument("--results", type=Path, help="default: gpu.json in results/, or build/gpu/ if emulated or tiny")
    parser.add_argument("--emulated", action="store_true", help="use the CUDA emulator, to test this program")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few tests, to test this program")
    parser.add_argument("--dry-run", action="store_true", help="only list the steps")
    given = parser.parse_args(arguments)
    known = [one.name for one in STEPS]
    unknown = [name for name in filter(None, given.only.split(",")) if name not in known]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}: no such step; there are {', '.join(known)}")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    python = given.python or str((given.venv / "bin" / "python").absolute())
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # not an installed Backplane
    environment = {"TORCH_BACKPLANE_DRIVERS": "cuda", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    settings = Settings(given.base, given.venv, python, given.minutes, given.jobs, environment, given.tiny)
    names = given.only.split(",") if given.only else [one.name for one in STEPS]
    steps = tuple(one for one in STEPS if one.name in names and not (one.name == "setup" and given.python))
    if given.dry_run:
        for step in steps:
            limit = step.share * given.minutes * 60
            missing = step.missing()
            print(f"{step.name}: {step.what}; at most {limit:.0f} s" + (f"; skipped: {missing}" if missing else ""))
            print(f"    {shlex.join(settings.command(step, limit))}")
        return 0
    OUTPUT.mkdir(parents=True, exist_ok=True)
    base = given.python or given.base
    environment |= emulator_environment(base) if given.emulated else gpu_environment(base)
    apart = given.emulated or given.tiny
    file = given.results or (OUTPUT if apart else ROOT / "results") / "gpu.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": output_of("git", "describe", "--always", "--dirty", "--exclude", "*"),
        "command": shlex.join(["tools/gpu.py", *(sys.argv[1:] if arguments is None else arguments)]),
        "emulated": given.emulated,
        "minutes": given.minutes,
        "machine": machine(dataclasses.replace(settings, base=base)),
    }

    def save(results: list[Result]) -> None:
        part = file.with_suffix(".part")
        listed = [dataclasses.asdict(one) for one in results]
        part.write_text(json.dumps(facts | {"steps": listed}, indent=1) + "\n", encoding="utf-8")
        part.replace(file)

    results = run_all(steps, settings, save)
    print(f"\nresults: {file}; logs: {OUTPUT}")
    for result in results:
        print(f"  {result.name:18} {line(result)}")
    return int(any(one.status in ("failed", "timed out") for one in results))


if __name__ == "__main__":
    sys.exit(main())
