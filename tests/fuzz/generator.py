"""Generates random programs."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import torch

from fuzz import calls
from fuzz.lockstep import Lockstep
from fuzz.memory import view
from fuzz.moves import moves
from fuzz.operators import function, rows
from fuzz.programs import NAME, Finding, Step
from fuzz.random_arguments import RandomArguments

LINES = 30  # moves in a program; a move adds one or a few lines


def program(
    seed: int,
    device: str,
    other: str,
    report: Callable[[list[Finding]], None],
    announce: Callable[[Step], None],
    lines: int = LINES,
) -> Lockstep:
    """Draws a program and runs each line when it is drawn."""
    run = Lockstep(device, other)
    draw = RandomArguments(random.Random(seed), run, report, announce)
    table = [row for row in rows() if function(row.name) is not None]
    # A program uses few operators, so that each is called again with other arguments: planned, then replayed.
    few = [draw.one(table) for _ in range(4)]
    known = moves()
    kinds = draw.random.sample(sorted(known), 5)
    made: list[calls.Made] = []
    draw.new(draw.shape(), torch.float32)
    draw.new(draw.shape(), draw.dtype())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(lines):
            chance = draw.random.random()
            if chance < 0.32:
                made.append(calls.complete(draw, draw.one(few)))
                calls.call(draw, made[-1])
            elif chance < 0.6 and made:
                old = draw.one(made)
                if all(name in run.cpu for name in _names(old)):
                    new = calls.complete(draw, old.row, old)
                    calls.call(draw, new)
                    made.append(new)
            elif chance < 0.78:
                view(draw)
            elif chance < 0.97:
                known[draw.one(kinds)](draw)
            else:
                draw.new(draw.shape(), draw.dtype())
            draw.tidy()
    return run


def _names(made: calls.Made) -> list[str]:
    return [name for text in [*made.arguments, *made.keywords] for name in NAME.findall(text)]
