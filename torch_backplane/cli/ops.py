"""`ops`: counts the ATen operators that are native, decomposed, or fall back to the CPU."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer


def ops(
    missing: Annotated[bool, typer.Option("--missing", help="List the required operators that fall back.")] = False,
    match: Annotated[str, typer.Option(metavar="REGEX", help="Only operators whose name matches.")] = "",
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all as JSON; - is stdout.")] = "",
) -> None:
    """Show how the ATen operators are implemented on bp: native, decomposition or fallback to the CPU.

    Required operators are those that PyTorch's CPU backend implements and that have no composite kernel.
    """
    from rich.console import Console
    from rich.table import Table

    from torch_backplane.cli.console import fail, write_json
    from torch_backplane.conformance import coverage

    try:
        pattern = re.compile(match)
    except re.error as error:
        fail(f"malformed --match {match!r}: {error}")
    try:
        found = [operator for operator in coverage.operators() if pattern.search(operator.name)]
    except (RuntimeError, ValueError) as error:  # there is no device, or a variable is malformed
        fail(str(error))
    if not found:
        fail(f"no ATen operator matches {match!r}")
    counts = coverage.count(found)
    if json_file:
        write_json({"counts": counts, "operators": [asdict(operator) for operator in found]}, json_file)
        return
    console = Console(highlight=False)
    if missing:
        for operator in found:
            if operator.required and operator.source == "fallback":
                console.print(operator.name, markup=False)
        return
    table = Table("ATen operators", *coverage.SOURCES, "total", "functions")
    for title, row in counts.items():
        table.add_row(title, *(str(row[column]) for column in (*coverage.SOURCES, "total", "functions")))
    console.print(table)
    console.print("functions: all overloads, in-place and out= variants of a function count once", style="dim")
