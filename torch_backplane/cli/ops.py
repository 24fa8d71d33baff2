"""`ops`: how ATen's operators, or those of another library, are implemented on bp."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer


def ops(
    missing: Annotated[bool, typer.Option("--missing", help="List the required operators that fall back.")] = False,
    match: Annotated[str, typer.Option(metavar="REGEX", help="Only operators whose name matches.")] = "",
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", metavar="MODULE", help="Instead, import a module and list its operators; repeatable."),
    ] = None,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all as JSON; - is stdout.")] = "",
) -> None:
    """Show how the ATen operators are implemented on bp: native, decomposition or fallback to the CPU.

    Required operators are those that PyTorch's CPU backend implements and that have no composite kernel. With --import,
    operators of other libraries, one per line: --import torchvision. Those with kernels for neither bp nor the CPU are
    listed as none: they raise NotImplementedError.
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
        listed = coverage.operators_of(modules) if modules else coverage.operators()
    except (ImportError, RuntimeError, ValueError) as error:  # for example: there is no device
        fail(f"cannot list the operators: {error}" if modules else str(error))
    found = [operator for operator in listed if pattern.search(operator.name)]
    if not found:
        whose = " and ".join(modules) if modules else "ATen"
        fail(f"no operator of {whose} matches {match!r}" if match else f"{whose} registers no operators")
    counts = None if modules else coverage.count(found)
    if json_file:
        data = {} if counts is None else {"counts": counts}
        write_json({**data, "operators": [asdict(operator) for operator in found]}, json_file)
        return
    console = Console(highlight=False)
    if missing:
        for operator in found:
            if operator.required and operator.source == "fallback":
                console.print(operator.name, markup=False)
        return
    if counts is None:
        width = max(len(operator.name) for operator in found)
        for operator in found:
            console.print(f"{operator.name:{width}}  {operator.source}", markup=False, soft_wrap=True)
        return
    table = Table("ATen operators", *coverage.SOURCES, "total", "functions")
    for title, row in counts.items():
        table.add_row(title, *(str(row[column]) for column in (*coverage.SOURCES, "total", "functions")))
    console.print(table)
    console.print("functions: all overloads, in-place and out= variants of a function count once", style="dim")
