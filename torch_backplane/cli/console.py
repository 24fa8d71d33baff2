"""Output functions that the commands share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console


def fail(message: str) -> NoReturn:
    """Print an error on stderr and exit with code 2, as for a wrong option."""
    Console(stderr=True, highlight=False).print(f"[bold red]Error:[/] {_escaped(message)}")
    raise typer.Exit(2)


def write_json(data: Any, destination: str) -> None:
    """Write JSON to a file, or to stdout for ``-``."""
    text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
    if destination == "-":
        sys.stdout.write(text)
        return
    write_text(destination, text)


def write_text(file: str, text: str) -> None:
    """Write a file."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {file}: {error}")


def check_writable(file: str) -> None:
    """Fail before a command runs for minutes if its results could not be written."""
    try:
        there = Path(file).exists()
        with Path(file).open("a", encoding="utf-8"):
            pass
        if not there:
            Path(file).unlink()
    except OSError as error:
        fail(f"cannot write {file}: {error}")


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def bytes_text(count: int | None) -> str:
    """Format a number of bytes, for example ``1.5 GiB``; a dash for None."""
    if count is None:
        return "–"
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
