"""`ptxas`: compiles the kernels of many programs for NVIDIA's GPUs, without a GPU."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def ptxas(
    match: Annotated[str, typer.Option(metavar="REGEX", help="Only programs whose title contains it.")] = "",
    arch: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An architecture such as sm_90; can be repeated.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Compiling processes; 0 means one per core.")] = 0,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all as JSON; - is stdout.")] = "",
    list_only: Annotated[bool, typer.Option("--list", help="Only list what would run.")] = False,
) -> None:
    """Compile the kernels of many programs with NVRTC and ptxas, without a GPU, and look for spilled registers.

    The programs are the audit's cases, PyTorch's operator database and training steps of small models. Their kernels
    are recorded, not run. The exit code is 0 if kernels were compiled and nothing was found except for known
    exceptions, 1 if there are no kernels, or if one does not compile, spills registers, lacks instructions that its
    text means, or has groups that are too large, and 2 if the command cannot run.
    """
    import os

    from rich.console import Console

    from torch_backplane.audit.processes import AuditError
    from torch_backplane.cli.console import check_writable, fail, write_json
    from torch_backplane.ptxas.cases import programs
    from torch_backplane.ptxas.nvrtc import Missing, find, library
    from torch_backplane.ptxas.occupancy import ARCHITECTURES

    console = Console(stderr=json_file == "-", highlight=False)
    architectures = arch or list(ARCHITECTURES)
    try:
        pattern = re.compile(match)
        if unknown := [one for one in architectures if one not in ARCHITECTURES]:
            raise ValueError(f"unknown architecture {unknown[0]!r}; use one of {', '.join(ARCHITECTURES)}")
        library()
        find("*/bin/nvdisasm", "nvidia-cuda-nvdisasm")
    except re.error as error:
        fail(f"malformed --match {match!r}: {error}")
    except (ValueError, Missing) as error:
        fail(str(error))
    titles = [one for one in programs() if pattern.search(one)]
    if not titles:
        fail(f"no program matches {match!r}")
    if list_only:
        print(*titles, sep="\n")
        return
    if json_file not in ("", "-"):
        check_writable(json_file)
    try:
        result = _run(titles, architectures, jobs or os.cpu_count() or 1, console)
    except AuditError as error:
        fail(f"no program could run: {error}")
    if json_file:
        write_json(result, json_file)
    _show(result, architectures, console)
    raise typer.Exit(0 if result["ok"] else 1)


def _run(titles: list[str], architectures: list[str], jobs: int, console: Console) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from torch_backplane.ptxas.collect import collect
    from torch_backplane.ptxas.measure import measure_all
    from torch_backplane.ptxas.report import report

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("programs", total=len(titles))
        kernels, errors = collect(titles, lambda title: progress.advance(bar))
        measured = []
        bar = progress.add_task("kernels", total=len(kernels))
        for one in measure_all(kernels, architectures, jobs):
            measured.append(one)
            progress.advance(bar)
    return report(kernels, measured, len(titles), errors)


def _show(result: dict[str, Any], architectures: list[str], console: Console) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table("architecture", box=SIMPLE, padding=0)
    for title in ("kernels", "registers", "at most", "private memory", "spills", "occupancy", "at least"):
        table.add_column(title, justify="right")
    for name in architectures:
        rows = [one[name] for one in result["kernels"] if name in one]
        if not rows:
            continue
        registers, stacks, spilled, _, occupancies = zip(*rows, strict=True)
        table.add_row(
            name, f"{len(rows):,}",
            f"{sum(registers) / len(rows):.0f}", str(max(registers)), str(sum(map(bool, stacks))),
            str(sum(map(bool, spilled))), f"{sum(occupancies) / len(rows):.2f}", f"{min(occupancies):.2f}",
        )  # fmt: skip
    console.print(table)
    for title, error in result["early"].items():
        console.print(f"ended early: {escape(title)}: {escape(error)}")
    for one in result["findings"]:
        state = f"known ({one['reason']})" if one["reason"] else "found"
        place = f"{one['kernel']} ({one['case']}) on {one['architecture']}"
        console.print(f"{state}: {one['what']}: {escape(place)}: {escape(one['detail'])}")
