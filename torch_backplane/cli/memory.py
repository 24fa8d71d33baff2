"""`memory plot`: converts a memory snapshot to a self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

memory = typer.Typer(help="Show memory snapshots.", no_args_is_help=True)


@memory.callback()
def commands() -> None:
    """Show memory snapshots."""


@memory.command()
def plot(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="File written by `_dump_snapshot`.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file.")] = Path("memory.html"),
) -> None:
    """Write an HTML page that shows allocations over time and where the program made them.

    SNAPSHOT is written by torch.bp.memory._dump_snapshot(), after torch.bp.memory._record_memory_history(). The exit
    code is 2 if SNAPSHOT is no memory snapshot, or if a file cannot be read or written.
    """
    from torch_backplane.cli.console import fail
    from torch_backplane.memory_plot import page, read

    try:
        text = page(read(snapshot), snapshot.name)
    except (OSError, ValueError) as error:
        fail(str(error))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {output}: {error}")
    typer.echo(f"wrote {output} ({len(text) / 1024:.0f} KiB); open it in a browser")
