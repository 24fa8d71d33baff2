"""Definitions of reductions: formulas from elements to a state, from two states to one, and from a state to results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.expression import Expression, Formula, Number, Program, constant, trace

# A work item reduces this many elements to a block, this many blocks to a part, and then the parts, because rounding
# errors grow with the longest chain of combinations.
BLOCK = 32


@dataclass(frozen=True)
class Reduction:
    """A reduction of elements to results through a state of one or more numbers.

    Args:
        state: dtypes of the state.
        identity: the state of zero elements; combining with it changes nothing.
        start: takes an element of each input, its position (int64) in the reduced dimensions, and the numbers of
            `scalars`; returns a state.
        combine: takes two states, all numbers of the first and then of the second; returns one. It must be associative
            and commutative, because states are not combined in the order of the elements.
        finish: takes a state, the number of elements (int64), and the numbers of `scalars`; returns a value for each
            output.
        add: a cheaper `combine` that can drop rounding errors, for states of at most BLOCK elements per lane; `combine`
            by default.
        scalars: dtypes of numbers that are kernel arguments, so that other values need no other kernel.

    Raises:
        ValueError: `identity` and `state` have different lengths.
        TypeError, OverflowError: a dtype of the state cannot hold its identity.
    """

    state: Sequence[torch.dtype]
    identity: Sequence[Number]
    start: Formula
    combine: Formula
    finish: Formula
    add: Formula | None = None
    scalars: Sequence[torch.dtype] = ()

    def __post_init__(self) -> None:
        if not self.state or len(self.state) != len(self.identity):
            raise ValueError(f"{len(self.identity)} numbers of identity for {len(self.state)} dtypes of state")
        for number, dtype in zip(self.identity, self.state, strict=True):
            constant(number, dtype)  # raises if the dtype cannot hold the number


class Programs(NamedTuple):
    """The formulas of a Reduction, traced."""

    start: Program
    combine: Program
    add: Program
    finish: Program | None


def programs(
    definition: Reduction,
    inputs: Sequence[torch.dtype],
    outputs: Sequence[torch.dtype] | None,
    compute: torch.dtype | None = None,
) -> Programs:
    """Traces the formulas of `definition`; `finish` only if there are `outputs`.

    Raises:
        TypeError: a formula does not accept these dtypes, or returns a wrong number of values.
    """
    state, numbers = list(definition.state), [torch.int64, *definition.scalars]
    seen_as = [compute or value_dtype(dtype) for dtype in inputs]
    combine = _program("combine", definition.combine, [*state, *state], state)
    return Programs(
        _program("start", definition.start, [*seen_as, *numbers], state),
        combine,
        combine if definition.add is None else _program("add", definition.add, [*state, *state], state),
        None if outputs is None else _program("finish", definition.finish, [*state, *numbers], outputs),
    )


def summation(
    dtype: torch.dtype,
    start: Formula,
    finish: Callable[..., Any] = lambda total, count, *scalars: total,
    scalars: Sequence[torch.dtype] = (),
) -> Reduction:
    """The reduction to the sum of the values that `start` returns; `finish` and `scalars` as in `Reduction`.

    For floating-point and complex dtypes the state holds a second number: the accumulated rounding errors of the
    additions of blocks, which Knuth's two-sum computes exactly. The error of the result is then that of a few
    additions, for any number of elements.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return Reduction([dtype], [0], start, lambda a, b: a + b, finish, scalars=scalars)

    def combine(a: Expression, lost_a: Expression, b: Expression, lost_b: Expression) -> tuple[Expression, Expression]:
        total, lost = two_sum(a, b)
        return total, lost_a + (lost + lost_b)

    def add(a: Expression, _: Expression, b: Expression, __: Expression) -> tuple[Expression, float]:
        return a + b, 0.0

    def with_nothing_lost(*elements: Expression) -> tuple[Any, float]:
        return start(*elements), 0.0

    def finish_whole(total: Expression, lost: Expression, *count_and_scalars: Expression) -> Any:
        return finish(whole(total, lost), *count_and_scalars)

    return Reduction([dtype] * 2, [0.0, 0.0], with_nothing_lost, combine, finish_whole, add, scalars)


def summations(
    dtype: torch.dtype,
    count: int,
    start: Callable[..., Sequence[Any]],
    finish: Formula,
    scalars: Sequence[torch.dtype] = (),
) -> Reduction:
    """The reduction to `count` sums of a real dtype, one for each value that `start` returns; see `summation`."""

    def combine(*states: Expression) -> tuple[Expression, ...]:
        a, b = states[: 2 * count], states[2 * count :]
        found = ((i, two_sum(a[i], b[i])) for i in range(0, 2 * count, 2))
        return tuple(one for i, (total, lost) in found for one in (total, a[i + 1] + (lost + b[i + 1])))

    def add(*states: Expression) -> tuple[Expression | float, ...]:
        a, b = states[: 2 * count], states[2 * count :]
        return tuple(one for i in range(0, 2 * count, 2) for one in (a[i] + b[i], 0.0))

    def with_nothing_lost(*elements: Expression) -> tuple[Any, ...]:
        return tuple(one for value in start(*elements) for one in (value, 0.0))

    def finish_whole(*state: Expression) -> Any:
        sums = (whole(state[i], state[i + 1]) for i in range(0, 2 * count, 2))
        return finish(*sums, *state[2 * count :])

    state, identity = [dtype] * (2 * count), [0.0] * (2 * count)
    return Reduction(state, identity, with_nothing_lost, combine, finish_whole, add, scalars)


def two_sum(a: Expression, b: Expression) -> tuple[Expression, Expression]:
    """a + b rounded, and its rounding error (Knuth). The error is NaN if the sum is infinite."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def whole(total: Expression, lost: Expression) -> Expression:
    """The sum `total` plus its rounding error `lost`, which is ignored if it is NaN."""
    if total.is_complex:
        return f.complex(whole(total.real, lost.real), whole(total.imag, lost.imag))
    return f.where(f.isnan(lost), total, total + lost)


def _program(part: str, formula: Formula, arguments: list[torch.dtype], results: Sequence[torch.dtype]) -> Program:
    program = trace(formula, arguments, value_dtype(results[0]))
    if len(program.results) != len(results):
        raise TypeError(f"{part} returned {len(program.results)} values, and {len(results)} are needed")
    return program
