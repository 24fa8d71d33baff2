"""`memory plot`: a memory snapshot as a page that opens without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

memory = typer.Typer(help="Look at memory snapshots.", no_args_is_help=True)


@memory.callback()
def commands() -> None:
    """Look at memory snapshots."""


@memory.command()
def plot(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="What `_dump_snapshot` has written.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page.")] = Path("memory.html"),
) -> None:
    """Write a page of HTML that shows what memory held, when, and who allocated it.

    SNAPSHOT is written by torch.bp.memory._dump_snapshot(), after torch.bp.memory._record_memory_history(). The exit
    code is 2 where it is none.
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
    typer.echo(f"{output}: {len(text) / 1024:.0f} KiB, opens in any browser")
