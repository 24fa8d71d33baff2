"""Operands whose dimensions are in another order than the result's are read through tiles.

GPU targets keep tiles in local memory, CPU targets in registers.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, need, placed
from targets import target

from torch_backplane import plans
from torch_backplane.kernels import OpenCLC, Target
from torch_backplane.planning.geometry import pointwise_geometry

GPU = OpenCLC(Target())
DTYPES = (torch.bool, torch.int8, torch.float16, torch.int32, torch.float64, torch.complex64, torch.complex128)
TARGETS: dict[str, dict[str, Any]] = {
    "a processor": {"kind": "cpu"},
    "a GPU": {},
    "small groups": {"max_group_size": 16},
    "groups of no power of two": {"max_group_size": 48, "group_multiple": 24},
    "one item in a group": {"max_group_size": 1},
    "little local memory": {"local_memory": 2 << 10},
    "no local memory": {"local_memory": 0},
}


def tile(out: torch.Tensor, *inputs: torch.Tensor, dialect: OpenCLC = GPU) -> tuple[int, ...]:
    """(dimension, width, height) of the tile; () if there is none."""
    return pointwise_geometry([out], list(inputs), [], 4, dialect)[0][4]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool or dtype.is_complex:
        return torch.randn(shape).gt(0) if dtype == torch.bool else torch.randn(shape, dtype=dtype)
    return torch.randint(-99, 99, shape).to(dtype)


# --- calls that use tiles


@pytest.mark.parametrize(
    ("shape", "order", "dtype", "expected"),
    [
        ((100, 70), (1, 0), torch.float32, (1, 32, 32)),
        ((100, 70), (1, 0), torch.int8, (1, 64, 64)),
        ((100, 70), (1, 0), torch.float16, (1, 64, 64)),
        ((100, 70), (1, 0), torch.complex64, (1, 32, 32)),
        ((5, 3, 1000), (0, 2, 1), torch.float32, (1, 4, 256)),
        ((5, 1000, 3), (0, 2, 1), torch.float32, (1, 256, 4)),
        ((100, 20, 10), (0, 2, 1), torch.float32, (1, 32, 16)),
        ((40, 50, 60), (2, 1, 0), torch.float32, (2, 32, 32)),
        ((4, 5, 6, 40, 50), (4, 1, 3, 0, 2), torch.float32, (4, 8, 64)),
        ((1000, 8, 8), (0, 2, 1), torch.float32, ()),  # matrices of a few sectors
        ((100, 70), (0, 1), torch.float32, ()),
    ],
)
def test_tile_covers_both_fastest_dimensions(
    shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, expected: tuple[int, ...]
) -> None:
    source = torch.empty(shape, dtype=dtype).permute(order)
    out = torch.empty(source.shape, dtype=dtype)
    assert tile(out, source) == expected
    # On a CPU, transposing less than a square tile gains nothing.
    has_squares = bool(expected) and min(source.shape[-1], source.shape[source.dim() - 1 - expected[0]]) >= 16
    assert tile(out, source, dialect=OpenCLC(Target.of_kind("cpu"))) == ((expected[0], 32, 32) if has_squares else ())


def test_operands_that_gain_nothing_have_no_tile() -> None:
    out = torch.empty(100, 70)
    assert tile(out, torch.empty(100, 1)) == ()  # one element per row
    assert tile(out, torch.empty(70, 1600)[:, ::16].t()) == ()  # one element per sector, in any order
    assert tile(out, torch.empty(70, 100).t(), torch.empty(100, 70)) == (1, 32, 32)
    assert tile(out, *[torch.empty(70, 100).t()] * 4) == (1, 32, 32)
    assert tile(out, *[torch.empty(70, 100).t()] * 5) == (1, 16, 16)  # larger tiles do not fit
    assert tile(out, torch.empty(70, 100).t(), dialect=OpenCLC(Target(local_memory=2 << 10))) == (1, 16, 16)
    assert tile(out, torch.empty(70, 100).t(), dialect=OpenCLC(Target(local_memory=1 << 10))) == ()


def test_dialect_without_barriers_has_no_tiles() -> None:
    class Plain(OpenCLC):
        words = {one: text for one, text in OpenCLC.words.items() if one != "BARRIER"}  # noqa: RUF012

    assert tile(torch.empty(100, 70), torch.empty(70, 100).t(), dialect=Plain(Target())) == ()


# --- results


@pytest.mark.parametrize("figures", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_of_two_dimensions(dtype: torch.dtype, figures: str) -> None:
    with target(**{"kind": "gpu", **TARGETS[figures]}):
        for shape in ((70, 33), (129, 64), (2, 700), (700, 3), (31, 31), (9, 70), (70, 13)):
            agrees(lambda x: x.t().contiguous(), numbers(shape, dtype))


@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_copies_of_more_dimensions(dtype: torch.dtype, rank: int, kind: str) -> None:
    sizes = (3, 37, 2, 40, 5)[:rank]
    source = numbers(sizes, dtype)
    with target(kind):
        orders = [one for one in itertools.permutations(range(rank)) if one != tuple(range(rank))]
        for order in orders[:: max(1, len(orders) // 12)]:
            agrees(lambda x, order=order: x.permute(order).contiguous(), source)


@pytest.mark.parametrize("figures", TARGETS)
def test_formulas_with_operands_in_several_orders(figures: str) -> None:
    a, b, c = torch.randn(65, 70), torch.randn(70, 65), torch.randn(70, 1)
    with target(**{"kind": "gpu", **TARGETS[figures]}):
        agrees(lambda a, b: a + b.t(), a, b)
        agrees(lambda a, b: a.t() * b.t(), a, b.t())
        agrees(lambda a, b, c: torch.addcmul(b, a.t(), c), a, b, c)
        agrees(lambda a, b: torch.where(a.t() > 0, b, a.t()), a, b)
        agrees(lambda a, b, c: torch.lerp(a.t(), b, c.expand(70, 65)), a, b, c)
        agrees(lambda a: a.t().contiguous().tril(3) + a.t().tril(), a)  # positions are computed
        agrees(lambda a, b: torch.frexp(a.t() + b), a, b)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_formulas_of_several_dtypes(kind: str) -> None:
    need(torch.float64)
    with target(kind):
        agrees(lambda a, b: a.double() + b.t().to(torch.float16), torch.randn(65, 70), torch.randn(70, 65))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_copies_that_convert_dtypes(kind: str) -> None:
    with target(kind):
        for source, result in itertools.permutations((torch.bool, torch.int8, torch.bfloat16, torch.complex64), 2):
            if source.is_complex and not result.is_complex:
                continue
            agrees(lambda x, result=result: x.t().to(result).contiguous(), numbers((70, 45), source))
        agrees(lambda x: x.t().conj().resolve_conj().contiguous(), numbers((70, 45), torch.complex64))
        agrees(lambda x: torch.empty_like(x.t().contiguous()).copy_(x.t().conj()), numbers((70, 45), torch.complex64))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_out_variants_and_in_place_results(kind: str) -> None:
    a, b = torch.randn(65, 70), torch.randn(70, 65)
    with target(kind):
        agrees(lambda a, b: b.add_(a.t()), a, b)
        agrees(lambda a, b: a.t().add_(b), a, b)
        agrees(lambda a, b: torch.add(a, b.t(), out=torch.empty(70, 65, device=a.device).t()), a, b)
        agrees(lambda a, b: torch.mul(a, b.t(), out=torch.empty(65, 140, device=a.device)[:, ::2]), a, b)
        agrees(lambda a: torch.empty(70, 65, device=a.device).t().copy_(a), a)
        agrees(lambda a: a[:65, :65].add_(a[:65, :65].t().clone()), a)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_operands_with_gaps_offsets_and_overlaps(kind: str) -> None:
    x = torch.randn(5, 80, 90)
    with target(kind):
        agrees(lambda x: x[:, 3:, 5:].transpose(1, 2).contiguous(), x)
        agrees(lambda x: x[:, ::2, ::3].transpose(1, 2).contiguous(), x)
        agrees(lambda x: x[:1].expand(4, 80, 90).transpose(1, 2).contiguous(), x)
        agrees(lambda x: x[0].unfold(1, 40, 3).transpose(1, 2).contiguous(), x)  # overlapping windows
        agrees(lambda x: torch.cat([x[0, 0]]).as_strided((50, 40), (1, 1)).t().contiguous(), x)
        agrees(lambda x: x.transpose(1, 2) + x[:1, :1].transpose(1, 2), x)
    odd = placed(torch.randn(64, 64), "cpu", offset=7)
    with target(kind):
        agrees(lambda x: x.t().contiguous(), odd)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_stack_and_cat_that_interleave_elements(dtype: torch.dtype, kind: str) -> None:
    parts = [numbers((70, 9), dtype) for _ in range(8)]
    with target(kind):
        for count in (2, 3, 8):
            agrees(lambda *x: torch.stack(x, -1), *parts[:count])
            agrees(lambda *x: torch.stack([one.t() for one in x], 2), *parts[:count])
        agrees(lambda x, y: torch.cat([x[:, :1], y.t()[:, :0].reshape(0), y[:, 3:4], x[:, 8:]], 1), *parts[:2])
        agrees(lambda x, y: torch.stack([x, y], -1, out=x.new_empty(70, 9, 2)), *parts[:2])
        agrees(lambda x, y: torch.stack([x, y, x], 2)[..., 1:], *parts[:2])
        agrees(lambda *x: torch.cat([one[:, :1] for one in x] + [x[0]], 1), *parts[:3])  # not all have one column
        agrees(lambda x, y: torch.stack([x, y.to(torch.float32)], -1), *parts[:2])
        if dtype.is_complex:
            agrees(lambda x, y: torch.stack([x, y.conj()], -1), *parts[:2])


def test_interleaved_elements_are_written_by_one_launch() -> None:
    parts = [torch.ones(1000, device=DEVICE) for _ in range(3)]
    with target("gpu"):
        plan_text = plans.explain(torch.stack, parts, 1)
    assert plan_text.count("launch") == 1, plan_text


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_dynamic_shape_plan_serves_other_sizes_of_the_same_tile(kind: str) -> None:
    with target(kind):
        for shape in ((70, 90), (33, 65), (400, 41), (70, 90), (3, 999), (5, 1001), (128, 32)):
            x = torch.arange(shape[0] * shape[1]).reshape(shape)
            assert torch.equal(x.to(DEVICE).t().contiguous().cpu(), x.t().contiguous())
        stats = plans.stats()
    assert not [one["reasons_for_exact"] for one in stats.values() if one["reasons_for_exact"]]
    assert sum(one["dynamic_shape_replays"] for one in stats.values()) > 0


def test_indices_of_64_bits() -> None:
    far = torch.empty(0, dtype=torch.int8, device="meta").as_strided((64, 64), (1, 2**26))
    out = torch.empty(0, dtype=torch.int8, device="meta").as_strided((64, 64), (64, 1))
    found = pointwise_geometry([out], [far], [], 4, GPU)[0]
    assert found[2]
    assert found[4] == (1, 64, 64)
