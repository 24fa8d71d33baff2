"""Scenarios: how a program that uses bp can exit.

`python tests/exit_scenarios.py --runs 200` runs each scenario 200 times on a loaded machine and prints the outcomes.
`make test-exit` runs it; test_exit.py runs a sample.

A server process imports torch and forks for each run. The child runs the program as its main script and exits like any
interpreter, with finalization. The server does not discover devices, so a child is like a fresh interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 120.0  # seconds; a longer run counts as a hang

# Output of PoCL's compiler (clang). At SIGINT, LLVM's handler removes the files of a running build, which then fails in
# its own thread, while the program exits normally.
COMPILER = re.compile(r"\d+ errors? generated\.")

DRIVERS: Mapping[str, dict[str, str]] = {
    "host": {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_HOST_DEVICES": "2"},
    "opencl": {"TORCH_BACKPLANE_DRIVERS": "opencl"},
}

# Definitions for each program. An atexit function that is registered before torch is imported calls the functions in
# `early`.
PREAMBLE = """
import atexit, contextvars, os, signal, sys, threading, time
import torch
x = torch.randn(50, 64, device="bp", requires_grad=True)
context = contextvars.ContextVar("context", default=None)
context.set(object())

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.state = object()
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

def train(passes=20):
    for _ in range(passes):
        Doubled.apply(x).sum().backward()

def train_for_ever():
    while True:
        train(1)

def keep_streams_busy():
    kept = []
    pinned = torch.empty(1 << 18).pin_memory()
    for _ in range(3):
        with torch.bp.stream(torch.bp.Stream()):
            torch.bp._sleep(20_000_000)
            large = torch.randn(256, 256, device="bp")
            for _ in range(5):
                large = large @ large / 256
            pinned.to("bp", non_blocking=True)
            kept.append(torch.empty(256, 256, pin_memory=True).copy_(large, non_blocking=True))
    return kept

def build_kernels():
    return [torch.erfinv(x.detach()), torch.special.i1e(x.detach()), torch.lgamma(x.detach())]
"""


class Scenario(NamedTuple):
    program: str
    status: int = 0  # as in subprocess: negative for a signal
    error: str = ""  # the last line on stderr


SCENARIOS: Mapping[str, Scenario] = {
    "end of script": Scenario("train()"),
    # The main thread keeps the GIL after the last pass, so other threads get it late.
    "end of script, GIL kept": Scenario("sys.setswitchinterval(1000); train()"),
    "sys.exit(0)": Scenario("train(); sys.exit(0)"),
    "sys.exit(3)": Scenario("train(); sys.exit(3)", 3),
    "exception": Scenario("train(); raise KeyError('nothing')", 1, "KeyError: 'nothing'"),
    "os._exit(5)": Scenario("train(); os._exit(5)", 5),
    "SIGINT": Scenario(
        "train(); signal.raise_signal(signal.SIGINT); time.sleep(9)", -signal.SIGINT, "KeyboardInterrupt"
    ),
    "SIGTERM": Scenario("train(); signal.raise_signal(signal.SIGTERM); time.sleep(9)", -signal.SIGTERM),
    "nothing used": Scenario("x = None"),
    "a forked child that ends": Scenario(
        "train()\nchild = os.fork()\nif child:\n    assert os.waitpid(child, 0)[1] == 0, 'the child'\n    train(1)"
    ),
    "a forked child that exits immediately": Scenario(
        "train()\nif (child := os.fork()) == 0:\n    os._exit(0)\nassert os.waitpid(child, 0)[1] == 0, 'the child'"
    ),
    "a forked child of busy streams": Scenario(
        "train()\nkept = keep_streams_busy()\n"
        "if child := os.fork():\n    assert os.waitpid(child, 0)[1] == 0, 'the child'"
    ),
    "threads": Scenario("for _ in range(3): threading.Thread(target=train, args=(30,)).start()"),
    "daemon threads that wait": Scenario(
        "done = threading.Barrier(4)\n"
        "def work():\n    train(3); done.wait(); threading.Event().wait()\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "done.wait()"
    ),
    "busy streams": Scenario("train(); kept = keep_streams_busy()"),
    "busy streams, sys.exit": Scenario("kept = keep_streams_busy(); train(1); sys.exit(3)", 3),
    "kernels being built": Scenario("train(1); kept = build_kernels()"),
    "atexit functions": Scenario("atexit.register(train); atexit.register(keep_streams_busy); train()"),
    "atexit functions from before torch": Scenario("early.append(train); early.append(keep_streams_busy); train()"),
    "only atexit functions": Scenario("early.append(train); atexit.register(train, 1)"),
}

SERVER = """
import atexit, json, os, signal, sys, time
early = []
atexit.register(lambda: [function() for function in early])
import torch, torch_backplane
if "opencl" in sys.argv:
    import pyopencl, torch_backplane.operators
timeout = float(sys.argv[1])
assert not torch_backplane._C.is_discovered()
print("ready", flush=True)
while True:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    end = time.monotonic() + timeout
    while not (status := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.002)
    if not status[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(json.dumps(os.waitstatus_to_exitcode(status[1]) if status[0] else None), flush=True)
# PyTorch recreates its autograd engine when a forked child first uses it, without a lock: if threads use it
# concurrently, one destroys the engine that another waits for. Programs that are not forked have no such race.
torch.autograd.Variable._execution_engine.is_checkpoint_valid()
error = os.open(request["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(error, 1)
os.dup2(error, 2)
os.close(0)
signal.signal(signal.SIGINT, signal.default_int_handler)
exec(compile(request["program"], "<program>", "exec"))
"""


class Runner:
    """Runs programs with one driver's devices."""

    def __init__(self, driver: str, folder: Path, timeout: float = TIMEOUT) -> None:
        self.driver = driver
        self._stderr = folder / f"stderr-{driver}"
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(timeout), driver],
            env=os.environ | DRIVERS[driver],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdin is not None
        self._requests, self._answers = self._server.stdin, self._server.stdout
        assert self._answers.readline() == "ready\n", f"the server for {driver} did not start"

    def close(self) -> None:
        self._requests.close()
        self._server.wait()

    def run(self, scenario: Scenario) -> str:
        """Returns "good", or what was wrong."""
        request = {"program": PREAMBLE + scenario.program, "stderr": str(self._stderr)}
        print(json.dumps(request), file=self._requests, flush=True)
        status = json.loads(self._answers.readline())
        if status is None:
            return "hangs"
        output = self._stderr.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in output if not COMPILER.fullmatch(line)]
        last = lines[-1] if lines else ""
        if status != scenario.status:
            return f"status {status}: {last}"
        return "good" if last == scenario.error else f"stderr: {last}"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keeps `processes` CPUs busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="runs of each scenario (default: 200)")
    parser.add_argument("--driver", action="append", choices=DRIVERS, help="default: all")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="default: all")
    parser.add_argument("--load", type=int, default=os.cpu_count() or 1, help="number of busy processes")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="for the programs' output")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    bad = 0
    with busy(options.load):
        for driver in options.driver or DRIVERS:
            runner = Runner(driver, options.folder)
            for name in options.scenario or SCENARIOS:
                begin = time.monotonic()
                found = Counter(runner.run(SCENARIOS[name]) for _ in range(options.runs))
                seconds = (time.monotonic() - begin) / options.runs
                good = found.pop("good", 0)
                bad += sum(found.values())
                print(f"{driver:8} {name:36} {good:4} of {options.runs} good, {seconds:.2f} s each", flush=True)
                for what, times in found.most_common():
                    print(f"{'':10}{times} times: {what}", flush=True)
            runner.close()
    print("all good" if not bad else f"{bad} runs failed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
