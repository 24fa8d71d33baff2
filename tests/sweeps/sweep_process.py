"""Runs sweeps over many calls, each of which can crash the process. A crash is a finding, and the sweep continues.

A sweep is a script that takes names as arguments, and reports on its standard output what it begins, calls and finds,
with the functions `entry`, `call` and `found`. A run over all names, which prints the findings at the end:

    TORCH_BACKPLANE_DRIVERS=opencl python tests/sweeps/sweep_process.py overloads_sweep.py --match ''
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def entry(name: str) -> None:
    """Reports the name that is swept next."""
    _say("entry", name)


def call(text: str) -> None:
    """Reports the next call, in case it is the last."""
    _say("call", text)


def found(text: str) -> None:
    """Reports a finding."""
    _say("found", text)


def over_database(description: str | None, sweep: Callable[[Any, int], None], samples: int) -> None:
    """Runs `sweep(operator, samples)` for each entry of PyTorch's operator database that the command line names."""
    import torch

    from torch_backplane.conformance.database import load
    from torch_backplane.conformance.settings import OP_DB

    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=samples, help="maximum per operator")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.empty(0, device="bp")  # discovers devices
    faulthandler.enable()  # replaces PoCL's handler, which survives a division by zero
    database = load(OP_DB)
    for name in options.names:
        entry(name)
        sweep(database[name], options.samples)


def _say(kind: str, text: str) -> None:
    print(kind, " ".join(text.split()), flush=True)


def findings(
    script: str, names: Sequence[str], settings: Mapping[str, str], *options: str, seconds: float = 3600
) -> list[str]:
    """Returns the findings of a script of this folder, run with these names and environment variables.

    Raises:
        RuntimeError: The script began with none of the names, or failed.
        subprocess.TimeoutExpired: A process took longer than `seconds`.
    """
    left, all_found = list(names), list[str]()
    while left:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", str(HERE / script), *options, *left],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        messages = [line.partition(" ")[::2] for line in run.stdout.splitlines()]
        all_found += [text for kind, text in messages if kind == "found"]
        begun = [text for kind, text in messages if kind == "entry"]
        if run.returncode > 0 or not begun:
            raise RuntimeError(f"{script} exited with status {run.returncode}:\n{run.stderr[-3000:]}")
        if run.returncode == 0:
            break
        last = next(text for kind, text in reversed(messages) if kind in ("call", "entry"))
        all_found.append(f"{last}: the process died of {signal.Signals(-run.returncode).name}")
        left = left[left.index(begun[-1]) + 1 :]
    return all_found


def main() -> int:
    """Sweeps all matching names and prints the findings. The exit status is 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("script", help="such as overloads_sweep.py")
    parser.add_argument("--match", default="", help="regular expression of names")
    options, others = parser.parse_known_args()
    names = importlib.import_module(options.script.removesuffix(".py")).names(options.match)
    all_found = findings(options.script, names, {"TORCH_BACKPLANE_FALLBACK": "silent"}, *others)
    for text in all_found:
        print(f"FOUND {text}\n")
    print(f"{len(all_found)} findings in {len(names)} entries")
    return 1 if all_found else 0


if __name__ == "__main__":
    sys.exit(main())
