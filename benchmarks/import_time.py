"""Measures what `import torch_backplane` adds to `import torch`, in milliseconds.

    python benchmarks/import_time.py --rounds 20

Each measurement is a fresh interpreter. Programs with and without the import alternate, so that other load affects
both. PyTorch's autoloading is off, so the import is the only difference. The time of the import itself, measured inside
the process, is the most stable figure. The difference between whole processes also contains their shutdown.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

PROGRAM = """
import time
clock = [time.perf_counter()]
import torch
clock.append(time.perf_counter())
{then}
clock.append(time.perf_counter())
print(clock[1] - clock[0], clock[2] - clock[1])
"""
KINDS = {"import torch": "", "import torch; import torch_backplane": "import torch_backplane"}


def measure(then: str) -> tuple[float, float, float]:
    """Milliseconds of `import torch`, of the statement `then`, and of the whole process."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # cache bytecode, as in normal use
    start = time.perf_counter()
    program = [sys.executable, "-c", PROGRAM.format(then=then)]
    finished = subprocess.run(program, env=environment, capture_output=True, text=True)
    whole = time.perf_counter() - start
    if finished.returncode:
        sys.exit(f"`import torch; {then}` failed:\n{finished.stderr}")
    torch_seconds, then_seconds = map(float, finished.stdout.split())
    return 1e3 * torch_seconds, 1e3 * then_seconds, 1e3 * whole


def main(
    rounds: Annotated[int, typer.Option(min=1, help="interpreters per program")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measures what `import torch_backplane` adds to `import torch`."""
    for then in KINDS.values():  # one unmeasured run fills the page cache and writes bytecode
        measure(then)
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in KINDS}
    for _ in range(rounds):
        for name, then in KINDS.items():
            measured[name].append(measure(then))
    medians = {name: list(map(statistics.median, zip(*rows, strict=True))) for name, rows in measured.items()}
    without, with_backplane = medians.values()
    added_process = with_backplane[2] - without[2]
    if as_json:
        names = ("torch_ms", "backplane_ms", "process_ms")
        report = {name: dict(zip(names, row, strict=True)) for name, row in medians.items()}
        print(json.dumps({"rounds": rounds, "medians": report, "added_process_ms": added_process}, indent=2))
        return
    table = Table(title=f"Python {platform.python_version()}, median of {rounds} interpreters each")
    table.add_column("program")
    for heading in ("torch, ms", "torch_backplane, ms", "process, ms"):
        table.add_column(heading, justify="right")
    table.add_row("import torch", f"{without[0]:.1f}", "", f"{without[2]:.1f}")
    table.add_row("import torch; import torch_backplane", *(f"{value:.1f}" for value in with_backplane))
    table.add_section()
    table.add_row("added by torch_backplane", "", f"{with_backplane[1]:+.1f}", f"{added_process:+.1f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
