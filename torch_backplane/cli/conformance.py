"""`conformance`: runs PyTorch's operator database on a device and shows the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from torch_backplane.conformance import Report, Settings

TIMEOUT = 120.0  # seconds
MAX_ROWS = 40  # rows of a table of findings
MAX_NAMES = 8  # operator names per row
EXAMPLES = 20  # fallbacks shown


def conformance(
    device: Annotated[str, typer.Option(help="Device under test.")] = "bp",
    cuda_dtypes: Annotated[
        bool, typer.Option("--cuda-dtypes", help="Instead of --dtypes: those that CUDA supports and the CPU does not.")
    ] = False,
    driver: Annotated[str, typer.Option(help="Sets TORCH_BACKPLANE_DRIVERS for the workers.")] = "",
    target: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Treat all devices as this modelled GPU.")
    ] = "",
    dtypes: Annotated[
        str, typer.Option(help="Comma-separated names of dtypes.", show_default="float32; with --numbers all")
    ] = "",
    match: Annotated[str, typer.Option(metavar="REGEX", help="Only operators whose full name matches.")] = "",
    grad: Annotated[bool, typer.Option("--grad/--no-grad", help="Also compare gradients.")] = False,
    forms: Annotated[
        bool, typer.Option("--forms", help="Instead, try wrong arguments, overlapping memory and all kinds of out=.")
    ] = False,
    sizes: Annotated[bool, typer.Option("--sizes", help="Instead, try sizes that do not match.")] = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="Use the kernel sanitizer: check bounds and races of every launch.")
    ] = False,
    samples: Annotated[int, typer.Option(min=0, help="Sample inputs per operator; 0 means all.")] = 0,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the report; - is stdout.")] = "",
    jobs: Annotated[int, typer.Option(min=0, help="Worker processes; 0 means one per core.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that one operator may take.")] = TIMEOUT,
    minutes: Annotated[float, typer.Option(min=0, help="Stop after this time; 0 means no limit.")] = 0,
    database: Annotated[str, typer.Option(metavar="MODULE:NAME", help="Another list of OpInfo.")] = "",
    accuracy: Annotated[bool, typer.Option("--accuracy", help="Instead, measure rounding errors of sums.")] = False,
    elements: Annotated[int, typer.Option(min=100, help="With --accuracy: maximum number of summands.")] = 10**7,
    list_only: Annotated[bool, typer.Option("--list", help="Only list what would run.")] = False,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Instead, try many numbers as Scalar arguments of every operator.")
    ] = False,
) -> None:
    """Run PyTorch's operator database on a device and compare the results with the CPU's.

    Operators run in worker processes: a crash or hang fails one operator, and the run continues. The exit code is 0 if
    something was compared and nothing failed, 1 if not, and 2 if the check cannot run.
    """
    from rich.console import Console

    from torch_backplane.cli.console import fail, write_json
    from torch_backplane.conformance import ConformanceError, Settings

    console = Console(stderr=json_file == "-", highlight=False)
    named = tuple(name.strip() for name in dtypes.split(",") if name.strip())
    try:
        if numbers and not dtypes:
            named = _dtypes_with_numbers()
        settings = Settings(
            device=device,
            dtypes=named if dtypes or numbers else ("float32",),
            match=match,
            grad=grad,
            samples=samples,
            forms=forms,
            sizes=sizes,
            timeout=timeout,
            minutes=minutes,
            cuda_dtypes=cuda_dtypes,
            driver=driver or None,
            target=target or None,
            sanitize=sanitize,
            **({"database": database} if database else {}),
        )
        kinds = {"--numbers": numbers, "--accuracy": accuracy, "--forms": forms, "--sizes": sizes}
        chosen = [name for name, is_set in kinds.items() if is_set]
        if len(chosen) > 1:
            raise ConformanceError(f"{chosen[0]} cannot be combined with {chosen[1]}")
        if numbers or accuracy:
            others = {
                "--sanitize": sanitize,
                "--grad": grad,
                "--samples": samples,
                "--timeout": timeout != TIMEOUT,
                "--minutes": minutes,
                "--cuda-dtypes": cuda_dtypes,
                "--jobs": accuracy and jobs,
            }
            for name in (name for name, is_set in others.items() if is_set):
                raise ConformanceError(f"{chosen[0]} cannot be combined with {name}")
        if numbers:
            raise typer.Exit(_try_numbers(settings, jobs, json_file, list_only))
        if list_only:
            _list(settings, accuracy)
            return
        if accuracy:
            raise typer.Exit(0 if _accuracy(settings, elements, json_file, console) else 1)
        report = _run(settings, jobs, console)
    except (ConformanceError, ValueError) as error:
        fail(str(error))
    if json_file:
        write_json(report.to_json(), json_file)
    show(report, console)
    raise typer.Exit(0 if report.ok else 1)


def _dtypes_with_numbers() -> tuple[str, ...]:
    from torch_backplane.conformance.numbers import DTYPES

    return tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)


def _try_numbers(settings: Settings, jobs: int, json_file: str, list_only: bool) -> int:
    """Run numbers.py in a new process, whose environment selects the driver; or only list the operators.

    Returns:
        The exit code.
    """
    import os
    import re
    import subprocess
    import sys

    from torch_backplane.conformance import ConformanceError
    from torch_backplane.conformance.database import named_dtype
    from torch_backplane.conformance.numbers import overloads

    for dtype in settings.dtypes:
        named_dtype(dtype)
    try:
        matches = re.compile(settings.match).search
    except re.error as error:
        raise ConformanceError(f"malformed --match {settings.match!r}: {error}") from error
    chosen = [name for one in overloads() if matches(name := one.name().removeprefix("aten::"))]
    if not chosen:
        raise ConformanceError(f"no operator with a Scalar argument matches {settings.match!r}")
    if list_only:
        print(*chosen, sep="\n")
        return 0
    processes = jobs or os.cpu_count() or 1
    given = [settings.device, ",".join(settings.dtypes), settings.match, str(processes), json_file]
    command = [sys.executable, "-m", "torch_backplane.conformance.numbers", *given]
    return subprocess.call(command, env={**os.environ, **settings.environment})


def _list(settings: Settings, accuracy: bool) -> None:
    if accuracy:
        from torch_backplane.conformance.accuracy_cases import chosen

        print(*(case.name for case in chosen(settings.match)), sep="\n")
        return
    from torch_backplane.conformance import WorkerPool

    with WorkerPool(settings, jobs=1) as pool:
        for op, dtype in pool.entries():
            print(op, dtype)


def _accuracy(settings: Settings, elements: int, json_file: str, console: Console) -> bool:
    """Measure in this process, which has not discovered devices yet, and print a Markdown table.

    Returns:
        Whether all measurements are within their limits.
    """
    import os

    import torch
    from rich.box import MARKDOWN
    from rich.table import Table

    from torch_backplane.cli.console import write_json
    from torch_backplane.conformance import ConformanceError
    from torch_backplane.conformance.accuracy import AccuracyReport, measure
    from torch_backplane.conformance.accuracy_cases import chosen
    from torch_backplane.conformance.database import named_dtype

    os.environ.update(settings.environment)
    cases, dtypes = chosen(settings.match), [named_dtype(name) for name in settings.dtypes]
    if not cases:
        raise ConformanceError(f"no --accuracy case matches {settings.match!r}")
    try:
        report = AccuracyReport(str(torch.empty(0, device=settings.device).device))
    except RuntimeError as error:
        raise ConformanceError(str(error)) from error
    for one in measure(settings.device, dtypes, cases, elements):
        if isinstance(one, str):
            report.not_on_cpu.append(one)
        else:
            report.measurements.append(one)
    if json_file:
        write_json(report.to_json(), json_file)
    table = Table("case", "dtype", "summands", "distribution", settings.device, "cpu", "", box=MARKDOWN)
    for worst in report.worst():
        errors = f"{worst.device.largest:.1e}", f"{worst.cpu.largest:.1e}"
        verdict = "" if worst.passed else worst.message.split("\n")[0] or "less accurate"
        table.add_row(worst.case, worst.dtype, f"{worst.elements:.0e}", worst.distribution, *errors, verdict)
    console.print(table)
    if report.not_on_cpu:
        console.print(f"Not supported on the CPU: {', '.join(dict.fromkeys(report.not_on_cpu))}")
    failed = sum(not one.passed for one in report.worst())
    console.print(f"{len(report.measurements)} measurements, {failed} of {len(report.worst())} cases less accurate")
    return report.ok


def _run(settings: Settings, jobs: int, console: Console) -> Report:
    """Run the check with a progress bar that counts failures."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from torch_backplane.conformance import EntryResult, run

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("[red]{task.fields[failed]} failed[/]  [dim]{task.fields[last]}[/]"),
    )  # fmt: skip
    failed = 0
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting workers", total=None, failed=0, last="")

        def on_result(result: EntryResult) -> None:
            nonlocal failed
            failed += result.status == "failed"
            progress.update(bar, advance=1, failed=failed, last=f"{result.op} {result.dtype}")

        return run(
            settings,
            jobs or None,
            on_start=lambda total: progress.update(bar, total=total, description=settings.device),
            on_result=on_result,
        )


def show(report: Report, console: Console) -> None:
    """Print failures by cause, other findings by cause, fallbacks and totals."""
    from torch_backplane.conformance.report import group_findings

    _show_groups("Failures by cause", group_findings(report.results), console)
    title = "Findings that are not failures, by cause"
    _show_groups(title, group_findings(report.results, failing=False), console)
    _show_fallbacks(report, console)
    _show_totals(report, console)


def _show_groups(title: str, groups: list, console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not groups:
        return
    table = Table("entries", "kind", "shortest message", "operators", title=title, title_justify="left")
    for group in groups[:MAX_ROWS]:
        names = list(dict.fromkeys(f"{result.op} ({result.dtype})" for result in group.entries))
        more = f" … {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        table.add_row(
            str(len(group.entries)), group.kind, escape(group.message), escape(", ".join(names[:MAX_NAMES]) + more)
        )
    console.print(table)
    if len(groups) > MAX_ROWS:
        console.print(f"… and {len(groups) - MAX_ROWS} more causes; use --json for all")


def _show_fallbacks(report: Report, console: Console) -> None:
    from rich.table import Table

    fallbacks = report.fallbacks()
    if not fallbacks:
        return
    title = f"ATen operators that fell back to the CPU: {len(fallbacks)}"
    table = Table("operator", "calls", "entries", title=title, title_justify="left")
    for name, counts in list(fallbacks.items())[:EXAMPLES]:
        table.add_row(name, str(counts["calls"]), str(counts["entries"]))
    console.print(table)
    if len(fallbacks) > EXAMPLES:
        console.print(f"… and {len(fallbacks) - EXAMPLES} more; use --json for all")


def _show_totals(report: Report, console: Console) -> None:
    totals = report.totals()
    environment = report.environment
    judged, left_out = totals["passed"] + totals["failed"], totals["left_out"]
    share = f" ({100 * totals['passed'] / judged:.2f} %)" if judged else ""
    name = environment["device_name"] or environment["device"]
    console.print(
        f"[bold]{name}[/], torch {environment['torch']}, {report.seconds:.0f} s, "
        f"{totals['compared_calls']} calls compared in {totals['entries']} entries (operator × dtype)"
    )
    console.print(
        f"  passed {totals['passed']} of {judged}{share} · failed {totals['failed']} · refused {totals['refused']} · "
        f"nothing to compare {totals['empty']}" + f" · left out, as the time was over {left_out}" * bool(left_out)
    )
    console.print(
        f"  passed without fallbacks {totals['without_fallback']} · different layout {totals['layout']} · "
        f"closer to float64 than the CPU {totals['nearer']} · each step right {totals['carried']} · "
        f"wrong out= on the CPU {totals['cpu_out']}"
    )
    if report.settings.get("sanitize"):
        console.print(
            f"  {totals['launches']:,} launches sanitized, {totals['accesses']:,} accesses to device memory · "
            f"out of bounds {totals['out_of_bounds']} · races {totals['race']} · barriers {totals['barrier']}"
        )
    console.print("[bold green]All passed.[/]" if report.ok else "[bold red]Not conformant.[/]")
