"""Sweeps over many calls, any of which may end its process: that is a finding then, and the sweep goes on behind it.

A sweep is a script that takes names of what to sweep as its arguments and says on its standard output what it begins,
calls and finds, by the functions `entry`, `call` and `found` here. All of it, with what is found at the end:

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
    """The next of the names."""
    _say("entry", name)


def call(text: str) -> None:
    """What is about to be called, in case it is the last."""
    _say("call", text)


def found(text: str) -> None:
    """What is wrong."""
    _say("found", text)


def over_database(description: str | None, sweep: Callable[[Any, int], None], samples: int) -> None:
    """Runs `sweep(operator, samples)` for each entry of PyTorch's operator database that the command line names."""
    import torch

    from torch_backplane.conformance.catalogue import load
    from torch_backplane.conformance.settings import OP_DB

    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=samples, help="of each operator, at most")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.empty(0, device="bp")  # which has to be there
    faulthandler.enable()  # after PoCL's own handler, which survives a division by zero
    database = load(OP_DB)
    for name in options.names:
        entry(name)
        sweep(database[name], options.samples)


def _say(kind: str, text: str) -> None:
    print(kind, " ".join(text.split()), flush=True)


def findings(
    script: str, names: Sequence[str], settings: Mapping[str, str], *options: str, seconds: float = 3600
) -> list[str]:
    """What the script of this folder finds of the names, in a process with these environment variables.

    Raises:
        RuntimeError: it did not begin with any of the names, or ended with an error of its own.
        subprocess.TimeoutExpired: after so many seconds in one process.
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
        said = [line.partition(" ")[::2] for line in run.stdout.splitlines()]
        all_found += [text for kind, text in said if kind == "found"]
        begun = [text for kind, text in said if kind == "entry"]
        if run.returncode > 0 or not begun:
            raise RuntimeError(f"{script} ended with status {run.returncode}:\n{run.stderr[-3000:]}")
        if run.returncode == 0:
            break
        last = next(text for kind, text in reversed(said) if kind in ("call", "entry"))
        all_found.append(f"{last}: the process died of {signal.Signals(-run.returncode).name}")
        left = left[left.index(begun[-1]) + 1 :]
    return all_found


def main() -> int:
    """Sweeps all that matches, and tells what it finds; ends with status 1 then."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("script", help="such as overloads_sweep.py")
    parser.add_argument("--match", default="", help="a regular expression of names")
    options, others = parser.parse_known_args()
    names = importlib.import_module(options.script.removesuffix(".py")).names(options.match)
    all_found = findings(options.script, names, {"TORCH_BACKPLANE_FALLBACK": "silent"}, *others)
    for text in all_found:
        print(f"FOUND {text}\n")
    print(f"{len(all_found)} findings in {len(names)} entries")
    return 1 if all_found else 0


if __name__ == "__main__":
    sys.exit(main())
