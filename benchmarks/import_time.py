"""What `import torch_backplane` adds to `import torch`, in milliseconds.

    python benchmarks/import_time.py --rounds 20

Each measurement is a fresh interpreter; the two kinds take turns, so that a busy moment hits both. PyTorch's
autoloading is off in both: the import is the only difference.
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

PROGRAM = "import time; start = time.perf_counter(); {imports}; print(time.perf_counter() - start)"
KINDS = {"import torch": "import torch", "import torch; import torch_backplane": "import torch; import torch_backplane"}


def measure(imports: str) -> tuple[float, float]:
    """Seconds that the imports took inside a fresh interpreter, and seconds from its start to its end."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    start = time.perf_counter()
    program = [sys.executable, "-c", PROGRAM.format(imports=imports)]
    finished = subprocess.run(program, env=environment, capture_output=True, text=True)
    whole = time.perf_counter() - start
    if finished.returncode:
        sys.exit(f"`{imports}` failed:\n{finished.stderr}")
    return float(finished.stdout), whole


def main(
    rounds: Annotated[int, typer.Option(min=1, help="fresh interpreters of each kind")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measures what `import torch_backplane` adds to `import torch`."""
    for imports in KINDS.values():  # once unmeasured: files into the page cache, bytecode written
        measure(imports)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for _ in range(rounds):
        for name, imports in KINDS.items():
            seconds[name].append(measure(imports))
    medians = {
        name: [1e3 * statistics.median(column) for column in zip(*measured, strict=True)]
        for name, measured in seconds.items()
    }
    without, with_backplane = medians.values()
    added = [after - before for before, after in zip(without, with_backplane, strict=True)]
    if as_json:
        report = {"rounds": rounds, "medians_ms": medians, "added_import_ms": added[0], "added_process_ms": added[1]}
        print(json.dumps(report, indent=2))
        return
    table = Table(title=f"Python {platform.python_version()}, median of {rounds} interpreters each")
    table.add_column("program")
    table.add_column("imports, ms", justify="right")
    table.add_column("whole process, ms", justify="right")
    for name, row in medians.items():
        table.add_row(name, *(f"{value:.1f}" for value in row))
    table.add_section()
    table.add_row("added by torch_backplane", *(f"{value:+.1f}" for value in added))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
