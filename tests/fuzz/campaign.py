"""Runs programs for some time in child processes, which can crash, and collects the findings."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.known import reason_for

SESSION = Path(__file__).with_name("session.py")
SILENCE = 180.0  # seconds that a line can take, including kernel builds, before it counts as a hang
CRASH_TRIES = 25  # processes for shrinking a program that crashes


@dataclass
class Report:
    """The results of a campaign on devices of the driver `on`."""

    on: str
    programs: int = 0
    steps: int = 0
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    meant: dict[str, int] = field(default_factory=dict)  # by reason
    rounding: int = 0
    unrepeated: list[dict[str, Any]] = field(default_factory=list)

    def add(self, item: dict[str, Any]) -> bool:
        """Adds an example. Returns whether it is the first finding with its key."""
        key = item["finding"]
        if item["verdict"] == "excused":
            self.rounding += 1
            return False
        reason = reason_for(key, item["message"], [step["line"] for step in item["steps"]], self.on)
        if item["verdict"] == "the CPU's":
            reason = "PyTorch's CPU kernel crashes the process"
        if reason is not None:
            self.meant[reason] = self.meant.get(reason, 0) + 1
            return False
        if item["verdict"] != "repeats":
            self.unrepeated.append(item)
            return False
        self.counts[key] = self.counts.get(key, 0) + 1
        known = self.findings.get(key)
        if known is None or len(item["steps"]) < len(known["steps"]):
            self.findings[key] = item
        return known is None


def settings(on: str) -> dict[str, str]:
    """Returns the environment of a process whose bp:0 and bp:1 belong to this driver."""
    environment = {
        **os.environ,
        "TORCH_BACKPLANE_DRIVERS": on if on != "opencl" else "opencl,host",
        "OMP_NUM_THREADS": "1",
    }
    if on == "host":
        environment["TORCH_BACKPLANE_HOST_DEVICES"] = "2"
    if on == "opencl":
        environment.setdefault("POCL_DEVICES", "pthread pthread")
        environment["TORCH_BACKPLANE_HOST_DEVICES"] = "1"
    return environment


class Campaign:
    """Runs programs with consecutive seeds until a time or number limit.

    Args:
        on: the driver.
        first: the seed of the first program.
        seconds: the time limit.
        programs: the maximum number of programs.
        tell: called with the first example of each finding.
    """

    def __init__(
        self,
        on: str,
        first: int,
        seconds: float,
        programs: int = 1 << 40,
        tell: Callable[[dict[str, Any]], None] = lambda item: None,
    ) -> None:
        self.environment = settings(on)
        self.next = first
        self.last = first + programs
        self.end = time.monotonic() + seconds
        self.tell = tell
        self.report = Report(on)

    def run(self) -> Report:
        with tempfile.TemporaryDirectory() as folder:
            progress = os.path.join(folder, "lines")
            while time.monotonic() < self.end and self.next < self.last:
                self._process(progress)
        return self.report

    def _process(self, progress: str) -> None:
        """Runs one child process until it is done or crashes."""
        first = self.next
        task = {
            "first": first,
            "seconds": self.end - time.monotonic(),
            "programs": self.last - first,
            "progress": progress,
        }
        process = subprocess.Popen(
            [sys.executable, str(SESSION), json.dumps(task)],
            env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        words: list[str] = []
        errors = threading.Thread(target=lambda: words.extend(process.stderr or []), daemon=True)
        errors.start()
        done = False
        before = (self.report.programs, self.report.steps)
        for line in _lines(process, progress):
            item = json.loads(line)
            if "finding" in item:
                if self.report.add(item):
                    self.tell(item)
            elif "programs" in item:
                self.report.programs, self.report.steps = before[0] + item["programs"], before[1] + item["steps"]
                self.next = item["next"]
            done = done or "done" in item
        status = process.wait()
        errors.join()
        if done and status == 0:
            return
        lines = Path(progress).read_text().splitlines() if os.path.exists(progress) else []
        steps = [json.loads(line) for line in lines]
        if not steps:
            raise RuntimeError(f"no program could be run (status {status}):\n" + "".join(words[-30:]))
        kind = "hang" if status == -9 else f"crash (status {status})"
        item = {
            "finding": f"{kind}: {steps[-1]['operator']}", "message": "".join([*words[-1:], *words[-12:-1]]),
            "seed": self.next, "verdict": "repeats", "steps": steps, "program": "",
        }  # fmt: skip
        if kind != "hang":
            self._shrink_crash(item)
        item["program"] = item["program"] or "\n".join(step["line"] for step in item["steps"])
        if self.report.add(item):
            self.tell(item)
        self.next += 1

    def _shrink_crash(self, item: dict[str, Any]) -> None:
        from fuzz.programs import Finding, Step, as_program
        from fuzz.shrinking import shrink

        def ends(steps: list[Step]) -> bool:
            task = {"replay": [step.to_json() for step in steps]}
            done = subprocess.run(
                [sys.executable, str(SESSION), json.dumps(task)], env=self.environment, capture_output=True, timeout=300
            )
            return done.returncode != 0

        steps = [Step(**step) for step in item["steps"]]
        if not ends(steps):
            item["verdict"] = "does not repeat"
            return
        steps = shrink(steps, ends, CRASH_TRIES)
        item["steps"] = [step.to_json() for step in steps]
        kind, _, operator = item["finding"].partition(": ")
        around = {name: value for name, value in self.environment.items() if name.startswith("TORCH_BACKPLANE_")}
        devices = ("bp:0", "bp:1")
        item["program"] = as_program(steps, Finding(kind, operator, item["message"]), *devices, around, set())
        if _ends_on_cpu(item["program"], devices, self.environment):
            item["verdict"] = "the CPU's"


def _ends_on_cpu(program: str, devices: tuple[str, str], environment: dict[str, str]) -> bool:
    """Whether the program also crashes without its part on the devices."""
    on_devices = f'program("{devices[0]}", "{devices[1]}")'
    assert on_devices in program
    alone = program.replace(on_devices, "")
    done = subprocess.run([sys.executable, "-c", alone], env=environment, capture_output=True, timeout=300)
    return done.returncode < 0


def _lines(process: subprocess.Popen[str], progress: str) -> Any:
    """Yields the lines that the process prints. Kills the process if it makes no progress for SILENCE seconds."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout or []:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=5)
        except queue.Empty:
            if os.path.exists(progress) and time.time() - os.path.getmtime(progress) > SILENCE:
                process.kill()
            continue
        if line is None:
            return
        yield line
