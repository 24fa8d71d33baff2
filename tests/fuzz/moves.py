"""Moves of programs that no table describes, by name; their files add them."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from fuzz.drawing import Drawer

_MOVES: dict[str, Callable[[Drawer], None]] = {}


def move(function: Callable[[Drawer], None]) -> Callable[[Drawer], None]:
    _MOVES[function.__name__] = function
    return function


def moves() -> dict[str, Callable[[Drawer], None]]:
    """All of them."""
    for file in ("memory", "places", "networks", "graphs", "lists", "database"):
        importlib.import_module(f"fuzz.{file}")
    return {**_MOVES, "sample_again": _MOVES["sample"]}  # which comes twice as often
