"""Sizes and strides of dynamic-shape plans, compared with PyTorch's.

They are computed from integers, and from symbols that are then evaluated at sizes other than the traced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_dynamic_shape_tape import Instructions

from torch_backplane import _C
from torch_backplane.planning import strides, views
from torch_backplane.planning.strides import number_now
from torch_backplane.planning.symbols import Tape, Untraceable, quantity

Layout = tuple[list[int], list[int]]


@st.composite
def layouts(draw: st.DrawFn, ranks: st.SearchStrategy[int] | None = None, elements: bool = False) -> Layout:
    """Sizes and strides: dense in any order, with gaps, expanded, or arbitrary; 0 and 1 included."""
    rank = draw(st.integers(0, 5) if ranks is None else ranks)
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4] if elements else [0, 1, 1, 2, 2, 3, 4]), min_size=rank, max_size=rank)
    )
    order = list(range(rank - 1, -1, -1)) if draw(st.booleans()) else draw(st.permutations(range(rank)))
    if rank in strides.CHANNELS_LAST and draw(st.integers(0, 3)) == 0:
        order = strides.CHANNELS_LAST[rank]
    steps, step = [1] * rank, draw(st.sampled_from([1, 1, 1, 2]))
    for dim in order:
        steps[dim] = step
        step *= max(1, sizes[dim]) * draw(st.sampled_from([1, 1, 1, 1, 2]))
    for dim in range(rank):
        change = draw(st.integers(0, 9))
        if change == 0:
            steps[dim] = 0
        elif change == 1:
            steps[dim] = draw(st.integers(0, 7))
    return sizes, steps


def meta(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(*layout, device="meta")


def ranks_of(*ranks: int) -> st.SearchStrategy[int]:
    return st.sampled_from(ranks)


def outcome_of(function: Callable[[], Any]) -> Any:
    """Returns the result of `function`, tensors as lists; "refused" if it raises."""
    try:
        found = function()
    except (RuntimeError, IndexError, ValueError, ZeroDivisionError):
        return "refused"
    if isinstance(found, torch.Tensor):
        return list(found.shape), list(found.stride()), found.storage_offset()
    return found


class Shapes:
    """The part of a trace that views use: `make` returns a View."""

    def make(self, memory: Any, sizes: Any, steps: Any, offset: Any, dtype: Any, device: Any) -> Any:
        return View(sizes, steps, offset)


class View:
    dtype, device, memory = torch.float32, torch.device("meta"), None

    def __init__(self, sizes: Any, steps: Any, offset: Any = 0) -> None:
        self.shape, self._steps, self._offset = list(sizes), list(steps), offset

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def stride(self, dim: int | None = None) -> Any:
        return self._steps if dim is None else self._steps[dim]

    def storage_offset(self) -> Any:
        return self._offset

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> Any:
        count: Any = 1
        for size in self.shape:
            count = count * size
        return count


def viewed(name: str, layout: Layout, *arguments: Any) -> Any:
    """Computes a view of integer sizes with our handler."""
    overload = getattr(torch.ops.aten, name.partition(".")[0])
    overload = getattr(overload, name.partition(".")[2] or "default")

    def made() -> Any:
        found = views.HANDLERS[overload](Shapes(), View(*layout), *arguments)
        return found.shape, list(found.stride()), found.storage_offset()

    return outcome_of(made)


# --- predicates


@settings(max_examples=200, deadline=None)
@given(layout=layouts())
def test_predicates_match_tensors(layout: Layout) -> None:
    tensor = meta(layout)
    assert strides.is_contiguous(*layout) == tensor.is_contiguous()
    assert strides.contiguous(layout[0]) == list(torch.empty(layout[0], device="meta").stride())
    assert strides.is_dense(*layout) == torch.ops.aten.is_non_overlapping_and_dense(tensor)
    assert strides.like(*layout) == list(torch.empty_like(torch.empty_strided(*layout)).stride())  # not on "meta"


@settings(max_examples=200, deadline=None)
@given(layout=layouts(ranks_of(4, 4, 5)))
def test_channels_last_matches_tensors(layout: Layout) -> None:
    tensor = meta(layout)
    format_ = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    assert strides.is_channels_last(*layout) == tensor.is_contiguous(memory_format=format_)
    suggested = torch.ops.aten.is_strides_like_format(tensor, format_)
    assert strides.has_channels_last_strides(*layout) == suggested
    made = torch.empty(layout[0], device="meta", memory_format=format_)
    assert strides.laid_out(layout[0], format_) == list(made.stride())


# --- results


@st.composite
def operands(draw: st.DrawFn) -> tuple[list[int], list[Layout]]:
    """A shape, and layouts that broadcast to it."""
    shape = draw(layouts(elements=True))[0]
    found = []
    for _ in range(draw(st.integers(1, 3))):
        sizes, steps = draw(layouts(st.just(len(shape)), elements=True))
        sizes = [size if draw(st.integers(0, 5)) else 1 for size in shape]
        alike = draw(st.integers(0, 3))
        if found and alike == 0 and len(found[0][1]) == len(steps):
            steps = found[0][1]
        elif alike == 1:
            steps = strides.contiguous(sizes)
        missing = draw(st.integers(0, len(shape))) if draw(st.integers(0, 4)) == 0 else 0
        found.append((sizes[missing:], steps[missing:]))
    return list(torch.broadcast_shapes(*(sizes for sizes, _ in found))), found


def kernels_result(given: list[Layout]) -> torch.Tensor:
    """The result of PyTorch's C++ meta kernel."""
    tensors = [meta(one) for one in given]
    if len(tensors) == 1:
        return _C.structured_meta("aten::neg", *tensors)[0]
    if len(tensors) == 2:
        return _C.structured_meta("aten::mul.Tensor", *tensors)[0]
    return _C.structured_meta("aten::addcmul", *tensors, 1)[0]


@settings(max_examples=150, deadline=None)
@given(operands())
def test_results_have_the_strides_of_tensor_iterator(case: tuple[list[int], list[Layout]]) -> None:
    shape, layouts_of = case
    expected = kernels_result(layouts_of)
    assert list(expected.shape) == shape
    assert list(strides.broadcast_shapes([sizes for sizes, _ in layouts_of])) == shape
    assert strides.iterator(shape, layouts_of) == list(expected.stride())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=3))
def test_shapes_broadcast_like_pytorch(shapes: list[list[int]]) -> None:
    assert outcome_of(lambda: list(strides.broadcast_shapes(shapes))) == outcome_of(
        lambda: list(torch.broadcast_shapes(*shapes))
    )


# --- views


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    """A layout and other sizes, usually with the same number of elements."""
    layout = draw(layouts())
    count = 1
    for size in layout[0]:
        count *= size
    wanted: list[int] = []
    left = count
    while left > 1 and len(wanted) < 4:
        factor = draw(st.sampled_from([one for one in (1, 2, 3, 4, 6, left) if left % one == 0]))
        wanted.append(factor)
        left //= factor
    wanted += [left] if left != 1 or draw(st.booleans()) else []
    if not draw(st.integers(0, 9)):
        wanted.append(draw(st.integers(0, 3)))
    if count and wanted and draw(st.booleans()):
        wanted[draw(st.integers(0, len(wanted) - 1))] = -1
    return layout, wanted


@settings(max_examples=150, deadline=None)
@given(regrouped())
@example((([1], [0]), [1]))
@example((([5, 1], [1, 7]), [5, 1]))
def test_views_have_pytorchs_strides_or_are_refused(case: tuple[Layout, list[int]]) -> None:
    layout, wanted = case
    assert viewed("view", layout, wanted) == outcome_of(lambda: meta(layout).view(wanted))


@settings(max_examples=150, deadline=None)
@given(layouts(), st.lists(st.integers(-1, 4), max_size=6))
def test_expand(layout: Layout, wanted: list[int]) -> None:
    if layout[0] or min(wanted, default=0) >= 0:  # otherwise PyTorch accepts -1 as a size
        assert viewed("expand", layout, wanted) == outcome_of(lambda: meta(layout).expand(wanted))
    grown = [size if size != 1 else 3 for size in layout[0]]
    assert viewed("expand", layout, [2, *grown]) == outcome_of(lambda: meta(layout).expand([2, *grown]))


positions = st.none() | st.integers(-6, 6) | st.just(2**63 - 1)


@settings(max_examples=150, deadline=None)
@given(layouts(st.integers(1, 4)), st.integers(-4, 3), st.integers(-5, 5), positions, positions, st.integers(-1, 3))
def test_select_and_slice(layout: Layout, dim: int, index: int, start: int | None, end: int | None, step: int) -> None:
    tensor = meta(layout)
    if not -tensor.dim() <= dim < tensor.dim():
        return
    assert viewed("select.int", layout, dim, index) == outcome_of(lambda: torch.ops.aten.select.int(tensor, dim, index))
    expected = outcome_of(lambda: torch.ops.aten.slice.Tensor(tensor, dim, start, end, step))
    assert viewed("slice.Tensor", layout, dim, start, end, step) == expected


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(-4, 4), st.data())
def test_permute_squeeze_unsqueeze_and_transpose(layout: Layout, dim: int, data: st.DataObject) -> None:
    tensor, rank = meta(layout), len(layout[0])
    order = data.draw(st.permutations(range(rank)))
    assert viewed("permute", layout, order) == outcome_of(lambda: tensor.permute(order))
    assert viewed("squeeze", layout) == outcome_of(tensor.squeeze)
    if -rank - 1 <= dim <= rank:
        assert viewed("unsqueeze", layout, dim) == outcome_of(lambda: tensor.unsqueeze(dim))
    if -max(1, rank) <= dim < max(1, rank):
        assert viewed("squeeze.dim", layout, dim) == outcome_of(lambda: tensor.squeeze(dim))
        assert viewed("transpose.int", layout, dim, -1) == outcome_of(lambda: tensor.transpose(dim, -1))
        chosen = [one for one in (0, dim % max(1, rank)) if one < max(1, rank)]
        if len(set(chosen)) == len(chosen):
            assert viewed("squeeze.dims", layout, chosen) == outcome_of(lambda: tensor.squeeze(chosen))


# --- symbols


def of_symbols(function: Callable[..., Any], made_of: list[int], others: list[int]) -> tuple[Any, Any]:
    """Returns (results of the tape at `others`, None if it does not hold; results of `function` at `others`)."""
    instructions = Instructions()
    tape = Tape(instructions)
    found = function(*(tape.size(index, value) for index, value in enumerate(made_of)))
    slots = _C.run_tape(list(instructions), others)
    if slots is None:
        return None, None

    def then(one: Any) -> Any:
        known = quantity(one)
        return slots[known[1]] if isinstance(known, tuple) else known

    assert [number_now(one) for one in found] == list(function(*made_of))
    return [then(one) for one in found], list(function(*others))


def functions_of(ranks: list[int], wanted: int) -> dict[str, Callable[..., list[Any]]]:
    """Functions of consecutive numbers: the sizes and strides of operands of these ranks, then further sizes."""

    def parts(numbers: tuple[Any, ...]) -> tuple[list[tuple[list[Any], list[Any]]], list[Any]]:
        given, at = [], 0
        for rank in ranks:
            given.append(([*numbers[at : at + rank]], [*numbers[at + rank : at + 2 * rank]]))
            at += 2 * rank
        return given, [*numbers[at:]]

    def truth(question: Callable[..., bool]) -> Callable[..., list[Any]]:
        return lambda *numbers: [int(bool(question(*parts(numbers)[0][0])))]

    def iterated(*numbers: Any) -> list[Any]:
        given, _ = parts(numbers)
        shape = strides.broadcast_shapes([sizes for sizes, _ in given])
        return [*shape, *strides.iterator(shape, given)]

    def view(name: str, arguments: Sequence[Any] | None = None) -> Callable[..., list[Any]]:
        overload = getattr(torch.ops.aten, name.partition(".")[0])
        overload = getattr(overload, name.partition(".")[2] or "default")

        def made(*numbers: Any) -> list[Any]:
            given, more = parts(numbers)
            found = views.HANDLERS[overload](
                Shapes(), View(*given[0]), *(arguments if arguments is not None else [more])
            )
            return [*found.shape, *found.stride(), found.storage_offset()]

        return made

    return {
        "is_contiguous": truth(strides.is_contiguous), "is_dense": truth(strides.is_dense),
        "is_channels_last": truth(strides.is_channels_last),
        "like": lambda *numbers: strides.like(*parts(numbers)[0][0]), "iterator": iterated,
        "view": view("view"), "expand": view("expand"), "squeeze": view("squeeze", []),
        "select": view("select.int", [0, -1]), "slice": view("slice.Tensor", [0, 1, -1, 2]),
    }  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_symbolic_layouts_match_or_do_not_hold(data: st.DataObject) -> None:
    given_now = data.draw(st.lists(layouts(st.integers(0, 4)), min_size=1, max_size=2))
    ranks = [len(sizes) for sizes, _ in given_now]
    wanted_now = data.draw(st.lists(st.integers(1, 6), max_size=4))
    given_then = [data.draw(layouts(st.just(rank))) for rank in ranks]
    if data.draw(st.booleans()):  # change only the sizes or only the strides
        keep = data.draw(st.integers(0, 1))
        given_then = [
            tuple(now[i] if i == keep else then[i] for i in (0, 1))
            for now, then in zip(given_now, given_then, strict=True)
        ]  # type: ignore[misc]
    wanted_then = data.draw(st.lists(st.integers(-1, 6), min_size=len(wanted_now), max_size=len(wanted_now)))
    now, then = (
        [number for sizes, steps in given for number in (*sizes, *steps)] + wanted
        for given, wanted in ((given_now, wanted_now), (given_then, wanted_then))
    )
    for name, function in functions_of(ranks, len(wanted_now)).items():
        try:
            function(*now)
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError, Untraceable):
            continue
        try:
            found, expected = of_symbols(function, now, then)
        except (RuntimeError, IndexError, ValueError, ZeroDivisionError, Untraceable):
            # The tape holds for a call that the function rejects.
            raise AssertionError(f"the tape of {name} for {now} holds for {then}, which {name} rejects") from None
        assert found == expected, f"{name} of {now} at {then}"
