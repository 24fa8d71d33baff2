"""`audit`: counts the memory accesses of operators on modelled GPUs and compares them with bounds."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def audit(
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="A modelled GPU, built in or from a file; can be repeated."),
    ] = None,
    match: Annotated[
        str, typer.Option(metavar="REGEX", help="Only cases whose title contains it, or whose family is it.")
    ] = "",
    size: Annotated[str, typer.Option("--bytes", metavar="SIZE", help="Size of a float32 operand.")] = "64MiB",
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all as JSON; - is stdout.")] = "",
    markdown: Annotated[str, typer.Option(metavar="FILE", help="Write the report in Markdown (docs/audit.md).")] = "",
    list_only: Annotated[bool, typer.Option("--list", help="Only list what would run.")] = False,
) -> None:
    """Run operators on modelled GPUs, without hardware, and compare their memory accesses with bounds.

    The exit code is 0 if all bounds hold except for known exceptions, 1 if a bound is exceeded or a result is wrong,
    and 2 if the audit cannot run.
    """
    from rich.console import Console

    from torch_backplane.audit.driver import LANGUAGE
    from torch_backplane.audit.processes import AuditError
    from torch_backplane.cli.console import check_writable, fail, write_json, write_text
    from torch_backplane.drivers.base import SettingError
    from torch_backplane.drivers.sizes import parse_size
    from torch_backplane.interpreter.language import NoCompiler
    from torch_backplane.kernels.modelled import SHIPPED, read_target

    console = Console(stderr=json_file == "-", highlight=False)
    names = target or list(SHIPPED)
    try:
        modelled = [read_target(one) for one in names]
        pattern = re.compile(match)
        nbytes = parse_size(size, "--bytes")
        chosen = _titles(pattern)
        if len({one.name for one in modelled}) < len(modelled):
            raise ValueError("two targets have the same name")
        if any(not one.target.simt for one in modelled):
            raise ValueError("the audit models GPUs only: a target whose work items do not run in lockstep is no GPU")
        if nbytes < 1 << 16:
            raise ValueError(f"--bytes {size} is less than 64 KiB, the minimum")
        LANGUAGE.compiler()
    except re.error as error:
        fail(f"malformed --match {match!r}: {error}")
    except (ValueError, SettingError, NoCompiler) as error:
        fail(str(error))
    if not chosen:
        fail(f"no case of the audit matches {match!r}")
    if list_only:
        print(*(f"{family}: {title}" for title, family in chosen.items()), sep="\n")
        return
    for file in filter(lambda one: one not in ("", "-"), (json_file, markdown)):
        check_writable(file)
    try:
        results = _run(list(chosen), names, nbytes, console)
    except AuditError as error:
        fail(f"the audit could not start: {error}")
    from torch_backplane.audit import report

    summary = report.summary(results, [one.name for one in modelled], nbytes)
    if json_file:
        write_json(summary | {"results": results}, json_file)
    if markdown:
        write_text(markdown, report.page(results, modelled, nbytes))
    _show(summary, results, console)
    raise typer.Exit(0 if summary["ok"] else 1)


def _titles(pattern: re.Pattern[str]) -> dict[str, str]:
    from torch_backplane.audit.cases import cases

    return {
        title: one.family for title, one in cases().items() if pattern.search(title) or pattern.fullmatch(one.family)
    }


def _run(titles: list[str], targets: list[str], nbytes: int, console: Console) -> list[dict[str, Any]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from torch_backplane.audit.run import run

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("starting", total=len(titles))

        def begins(title: str) -> None:
            progress.update(bar, completed=titles.index(title), description=title)

        return list(run(titles, targets, nbytes, begins))


def _show(summary: dict[str, Any], results: list[dict[str, Any]], console: Console) -> None:
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    table = Table("case", "target", box=SIMPLE, padding=0)
    for title in ("launches", "groups", "fill", "chain", "traffic", "fused", "sectors", "banks", "ms", "ideal"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in results:
        figures = one["figures"]
        if figures is None:
            continue
        fused = [each["traffic"] for each in one["fused"]]
        table.add_row(
            escape(one["case"]), escape(one["target"].partition(" (")[0]),
            f"{figures['launches']}", f"{figures['groups']:,}",
            f"{figures['fill']:.2f}", f"{figures['chain']:,}", f"{figures['traffic']:.2f}",
            f"{max(fused):.2f}" if fused else "",
            f"{figures['coalescing']:.2f}", f"{figures['conflicts']:.2f}", f"{figures['seconds'] * 1e3:.3f}",
            f"{figures['ideal_seconds'] * 1e3:.3f}",
        )  # fmt: skip
    console.print(table)
    for title in ("wrong", "unknown", "known"):
        for line in summary[title]:
            console.print(f"{title}: {escape(line)}")
    counts = {title: len(summary[title]) for title in ("wrong", "unknown", "known")}
    console.print(
        f"{summary['cases']} cases on {len(summary['targets'])} targets, {summary['bytes'] >> 20} MiB: "
        f"{counts['wrong']} wrong, bounds exceeded: {counts['unknown']}, known exceptions: {counts['known']}"
    )
