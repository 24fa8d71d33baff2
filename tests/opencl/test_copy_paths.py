"""Copies within a device, for every dtype and layout: elements arrive as on the CPU. A copy uses the same method (copy
of bytes or kernel) in a direct call, a plan and a dynamic-shape plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from agreement import DEVICE, had, plans_from_the_start
from torch import Tensor

from torch_backplane import plans
from torch_backplane.planning import Call, operator

LIBRARY = torch.library.Library("backplane_copies", "FRAGMENT")  # kept alive: planners are never undeclared
LIBRARY.define("copy(Tensor source, Tensor(a!) to, bool conjugate, bool negate) -> ()")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
COLUMNS = 4


def lazily(tensor: Tensor, conjugate: bool, negate: bool) -> Tensor:
    """Returns a view that is lazily conjugated or negated."""
    if not conjugate and not negate:
        return tensor
    tensor = torch.ops.aten.alias(tensor)
    torch._C._set_conj(tensor, conjugate)
    torch._C._set_neg(tensor, negate)
    return tensor


@operator("backplane_copies::copy", variants=False, dtypes="any")
def copy(call: Call, source: Tensor, to: Tensor, conjugate: bool, negate: bool) -> None:
    """A planner that copies, as many do. It makes lazy views itself: PyTorch resolves lazy conjugation before."""
    to.copy_(lazily(source, conjugate, negate))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.t(),
    "every other column": lambda x: x[:, ::2],
    "from the second row": lambda x: x[1:],
    "one row for all": lambda x: x[:1].expand(x.shape),
}
# (to, source) in the same memory of n rows.
PAIRS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "onto itself": lambda x: (x, x),
    "onto itself, with gaps": lambda x: (x[:, ::2], x[:, ::2]),
    "half to half": lambda x: x[: len(x) // 2 * 2].chunk(2),
    "between columns": lambda x: (x[:, 1::2], x[:, ::2]),
    "onto the next row": lambda x: (x[1:], x[:-1]),
    "onto an expanded row": lambda x: (x[:1].expand(x.shape), x),
}


def memory(dtype: torch.dtype, rows: int) -> Tensor:
    """Returns bytes that are numbers in every dtype: no NaN, and only 0 and 1 for bools."""
    count = rows * COLUMNS * dtype.itemsize
    return (torch.arange(count) % (2 if dtype == torch.bool else 61)).to(torch.uint8).view(dtype).view(rows, COLUMNS)


def bits(tensor: Tensor) -> Tensor:
    """Returns the tensor's bytes, for dtypes without comparison."""
    return tensor.cpu().contiguous().view(torch.uint8)


def cases(dtype: torch.dtype, rows: int) -> Iterator[tuple[str, Callable[[str], tuple[Tensor, Tensor]]]]:
    """Yields cases: a name, and a function that makes (to, source) on a device."""
    for to, source in itertools.product(list(LAYOUTS)[:-1], LAYOUTS):

        def apart(device: str, to: str = to, source: str = source) -> tuple[Tensor, Tensor]:
            return tuple(LAYOUTS[name](memory(dtype, rows).roll(at).to(device)) for at, name in ((5, to), (0, source)))

        yield f"{source} → {to}", apart
    for name, pair in PAIRS.items():
        yield name, lambda device, pair=pair: tuple(pair(memory(dtype, rows).to(device)))


def way(function: Callable[[], object]) -> str:
    """Returns what a call does: "copy" bytes, "launch" a kernel, or "nothing" that is planned."""
    plan_text = plans.explain(function)
    return "launch" if "→ launch" in plan_text else "copy" if "→ copy" in plan_text else "nothing"


def refused(function: Callable[[], object]) -> str | None:
    """Returns the error message; None if there is no error."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return None


def compare(make: Callable[[str], tuple[Tensor, Tensor]], conjugate: bool, negate: bool, what: str) -> None:
    (to, source), given, planned = make("cpu"), make(DEVICE), make(DEVICE)
    source = lazily(source, conjugate, negate)
    called: Callable[[], object] = lambda: given[0].copy_(lazily(given[1], conjugate, negate))  # noqa: E731
    by_planner: Callable[[], object] = lambda: torch.ops.backplane_copies.copy(  # noqa: E731
        planned[1], planned[0], conjugate, negate
    )
    refusal = refused(lambda: to.copy_(source))
    if refusal is not None:
        assert [refused(called), refused(by_planner)] == [refusal, refusal], what
        return
    eager, expected = way(called), way(by_planner)
    assert eager == ("launch" if expected == "launch" else "nothing"), what  # direct copies of bytes are not planned
    for name, one in (("called", given), ("planned", planned)):
        assert torch.equal(bits(one[0]), bits(to)), f"{what}, {name}"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_use_the_same_method_called_and_planned(dtype: torch.dtype) -> None:
    lazy = [(False, False)]
    if dtype.is_complex and dtype != torch.complex32:
        lazy += [(True, False), (False, True), (True, True)]
    elif dtype in (torch.float32, torch.float64):
        lazy += [(False, True)]
    with plans_from_the_start():
        plans.set_mode("check")  # compares dynamic-shape plans, used from the second call on, with the planner
        for conjugate, negate in lazy:
            for count in (6, 5, 70):
                for name, make in cases(dtype, count):
                    compare(make, conjugate, negate, f"{name}, {count} rows, {conjugate=}, {negate=}")
        counts = plans.stats()["backplane_copies::copy"]
        assert counts["dynamic_shape_classes"]
        assert all("share" in reason or "overlap itself" in reason for reason in counts["reasons_for_exact"]), counts


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental", "ignore:Casting complex values to real")
def test_dtypes_are_converted_as_on_the_cpu() -> None:
    with plans_from_the_start():
        plans.set_mode("check")
        for dtype, into in [*itertools.pairwise(had(DTYPES)), *((one, torch.float32) for one in had(DTYPES))]:
            for count in (5, 6, 9):
                numbers = torch.arange(count, dtype=torch.float32).to(dtype)
                expected = torch.zeros(count, dtype=into).copy_(numbers)
                for copied in (Tensor.copy_, lambda to, x: torch.ops.backplane_copies.copy(x, to, False, False)):
                    found = torch.zeros(count, dtype=into).to(DEVICE)
                    copied(found, numbers.to(DEVICE))
                    assert torch.equal(bits(found), bits(expected)), f"{dtype} to {into}"
