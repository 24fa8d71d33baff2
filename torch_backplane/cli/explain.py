"""`explain`: runs a program and reports what torch.compile made of it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torch_backplane.cli.console import bytes_text, check_writable, write_json, write_text

if TYPE_CHECKING:
    from torch_backplane.compile_report import Compilation, Graph, Report, Step

WIDTH = 80


def explain(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="A script, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The program's arguments.")] = None,
    as_cuda: Annotated[bool, typer.Option("--as-cuda", help="As for `run`.")] = False,
    module: Annotated[bool, typer.Option("-m", help="PROGRAM is the name of a module.")] = False,
    html_file: Annotated[str, typer.Option("--html", metavar="FILE", help="Write a page that draws the graphs.")] = "",
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write all as JSON; - is stdout.")] = "",
) -> None:
    """Run a program as `run` does, then report what torch.compile made of it.

    For each compiled graph: its kernels with the operators that each fuses, the operators that run as in eager PyTorch,
    and the bytes that all of these read and write, with and without fusion. Also graph breaks, recompilations, and the
    time to compile. Graphs are compiled anew, without Inductor's cache of graphs.

    Options precede PROGRAM: what follows is the program's. The exit code is the program's, or 2 if it cannot be started
    or the report cannot be written. If the program fails, the report tells what was compiled until then. With --json -,
    the program's output and the text of the report go to stderr.
    """
    from dataclasses import asdict

    from torch_backplane.cli.run import execute, prepare
    from torch_backplane.compile_report import page

    for file in filter(lambda one: one not in ("", "-"), (json_file, html_file)):
        check_writable(file)
    prepare(program, arguments or [], module=module, as_cuda=as_cuda)
    from torch_backplane.compile_report import recorder

    report = recorder.start()
    try:
        with _output_to_stderr() if json_file == "-" else contextlib.nullcontext():
            execute(program, module=module)
    finally:
        sys.stdout.flush()
        typer.echo("\n".join(lines(report)), err=json_file == "-")
        if json_file:
            write_json(asdict(report), json_file)
        if html_file:
            write_text(html_file, page(report, Path(program).name))


@contextlib.contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Sends to stderr what the program, C libraries and child processes write to stdout."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report, in 80 columns except for long names."""
    compiled = [one for one in report.compilations if one.graphs or one.operators or one.failure]
    recompiled = [one for one in report.compilations if one.recompile_reason]
    graphs = sum(len(one.graphs) for one in compiled)
    yield ""
    if not graphs:
        yield "No graph was compiled."
    if report.compilations:
        seconds = sum(one.seconds for one in report.compilations)
        counts = {"graphs": graphs, "graph breaks": len(report.graph_breaks), "recompilations": len(recompiled)}
        yield ", ".join(f"{name}: {count}" for name, count in counts.items()) + f", compiled in {seconds:.1f} s"
    for one in compiled:
        yield from _compilation(one)
    if report.graph_breaks:
        yield from ("", "Graph breaks")
    for each in report.graph_breaks:
        yield f"  {each.file}:{each.line}" + (f" ({each.count} times)" if each.count > 1 else "")
        yield from _wrapped(each.reason, 4)
        yield from _wrapped(each.explanation, 4)
    if recompiled:
        yield from ("", "Recompilations")
    for one in recompiled:
        yield f"  {_title(one)}"
        yield from _wrapped(one.recompile_reason or "", 4)
    if report.templates:
        yield from ("", "Products and convolutions with elementwise operators")
    for text in report.templates:
        yield from _wrapped(text, 2)
    if report.problems:
        yield from ("", "Not recorded")
    for problem in report.problems:
        yield from _wrapped(problem, 2)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * indent)


def _title(one: Compilation) -> str:
    function = re.sub(r"^torch_dynamo_resume_in_(\w+)_at_(\d+)$", r"\1, continued at line \2", one.function)
    return f"{function} ({one.file}:{one.line}, compilation {one.id})" if function else f"compilation {one.id}"


def _compilation(one: Compilation) -> Iterator[str]:
    yield from ("", f"{_title(one)}: {one.seconds:.1f} s")
    if one.failure:
        yield from _wrapped(f"not compiled: {one.failure}", 2)
    elif not one.graphs:
        yield f"  operators: {one.operators}, no graph from Inductor"
    for graph in one.graphs:
        yield from _graph(graph)


def _graph(graph: Graph) -> Iterator[str]:
    kernels, operators = (sum(one.kind == kind for one in graph.steps) for kind in ("kernel", "operator"))
    devices = ", ".join(graph.devices)
    target = f", compiled for {graph.compiled_for}" if graph.compiled_for else ""
    compiled, unfused = graph.compiled_bytes, graph.unfused_bytes
    more = f" ({unfused / compiled:.1f} times)" if compiled else ""
    yield ""
    yield f"  {graph.kind} graph on {devices}{target}; launches: {kernels}, eager operators: {operators}"
    yield f"  bytes per call: {bytes_text(compiled)}, without fusion: {bytes_text(unfused)}{more}"
    yield f"{'reads':>70}{'writes':>10}"
    by_name: dict[str, list[Step]] = {}
    for step in graph.steps:
        if step.kind != "none":
            by_name.setdefault(step.name, []).append(step)
    for steps in by_name.values():
        yield from _calls(steps)


def _calls(steps: list[Step]) -> Iterator[str]:
    """The lines about the launches of one kernel, or the calls of one operator."""
    reads = bytes_text(sum(count for one in steps for count in one.reads.values()))
    writes = bytes_text(sum(count for one in steps for count in one.writes.values()))
    times = f" ×{len(steps)}" if len(steps) > 1 else ""
    head = f"  {'kernel' if steps[0].kind == 'kernel' else 'eager':8}{steps[0].name}{times}"
    yield from (f"{head:60}{reads:>10}{writes:>10}",) if len(head) < 60 else (head, f"{reads:>70}{writes:>10}")
    operators = dict.fromkeys(name.removeprefix("aten.") for one in steps for name in one.operators)
    yield from _wrapped(", ".join(operators), 10)
