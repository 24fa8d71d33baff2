"""Registry of moves: functions that add lines to a program and are not described by the table of operators."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from fuzz.random_arguments import RandomArguments

_MOVES: dict[str, Callable[[RandomArguments], None]] = {}


def move(function: Callable[[RandomArguments], None]) -> Callable[[RandomArguments], None]:
    _MOVES[function.__name__] = function
    return function


def moves() -> dict[str, Callable[[RandomArguments], None]]:
    """Returns all moves by name."""
    for file in ("memory", "indexing", "networks", "graphs", "lists", "database"):
        importlib.import_module(f"fuzz.{file}")
    return {**_MOVES, "sample_again": _MOVES["sample"]}  # `sample` is twice as likely
