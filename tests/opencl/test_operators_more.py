"""Operators of several families: reductions, factories, products, comparisons, random numbers."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import DEVICE, agrees, had, plans_from_the_start

from torch_backplane import plans


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_trace_count_nonzero_aminmax(dtype: torch.dtype) -> None:
    x = torch.tensor([[3, 0, 2, 1], [0, -4, 0, 1], [5, 6, 0, 0]]).to(dtype)
    if dtype not in (torch.bool, torch.bfloat16):
        agrees(lambda x: (x.trace(), x.t().trace()), x)
    agrees(lambda x: (x.count_nonzero(), x.count_nonzero(0), x.count_nonzero((0, 1))), x)
    agrees(lambda x: tuple(x.aminmax()), x)
    agrees(lambda x: tuple(x.aminmax(dim=1, keepdim=True)), x)


def test_aminmax_with_nan() -> None:
    agrees(lambda x: tuple(x.aminmax(dim=0)), torch.tensor([[1.0, math.nan, 3.0], [2.0, 1.0, -math.inf]]))
    agrees(lambda x: x.trace(), torch.zeros(1, 5))


@pytest.mark.parametrize("p", [1, 2, 2.5, math.inf])
def test_renorm(p: float) -> None:
    agrees(lambda x: x.renorm(p, 0, 1.5), torch.randn(4, 5, 6))
    agrees(lambda x: x.renorm_(p, -1, 0.5), torch.randn(4, 5))


def test_cross_product() -> None:
    agrees(torch.linalg.cross, torch.randn(4, 3), torch.randn(1, 3))
    for dtype in had((torch.float32, torch.float64)):
        agrees(lambda a, b: torch.linalg.cross(a, b, dim=0), torch.randn(3, 5).to(dtype), torch.randn(3, 5).to(dtype))
    a, b = torch.randn(4, 3, device=DEVICE), torch.randn(4, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        torch.linalg.cross(a, b, out=a)
    agrees(torch.linalg.cross, torch.randint(9, (4, 3)), torch.randint(9, (4, 3)))


def test_addbmm() -> None:
    c, a, b = torch.randn(3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    agrees(lambda c, a, b: torch.addbmm(c, a, b, beta=0.5, alpha=2), c, a, b)
    agrees(lambda c, a, b: c.addbmm_(a, b), c, a, b)
    agrees(torch.addbmm, torch.randn(5), a, b)
    agrees(torch.addbmm, c, a[:0], b[:0])


def test_logspace() -> None:
    for steps in (0, 1, 2, 9):
        agrees(lambda out: torch.logspace(-2, 3, steps, base=2.5, out=out), torch.empty(steps))  # noqa: B023


@pytest.mark.parametrize(
    ("rows", "columns", "offset"), [(3, 4, 0), (5, 3, 1), (4, 6, -2), (3, 3, 7), (3, 3, -7), (0, 3, 0)]
)
def test_triangle_indices(rows: int, columns: int, offset: int) -> None:
    for function in (torch.tril_indices, torch.triu_indices):
        for _ in range(2):
            found = function(rows, columns, offset, device=DEVICE)
            torch.testing.assert_close(found.cpu(), function(rows, columns, offset))


def test_equal() -> None:
    a = torch.randn(3, 4)
    agrees(torch.equal, a, a.clone())
    agrees(torch.equal, a, a + 1)
    agrees(torch.equal, a, a[:2])
    agrees(torch.equal, a.t(), a.t().contiguous())
    agrees(torch.equal, torch.tensor([math.nan]), torch.tensor([math.nan]))
    agrees(torch.equal, torch.zeros(0), torch.zeros(0))
    agrees(torch.equal, torch.tensor(1), torch.tensor(1))
    x, y = a.to(DEVICE), a.to(DEVICE)
    with plans_from_the_start():
        assert all(torch.equal(x, y) for _ in range(3))
        counts = plans.stats()["aten::equal"]
    assert counts["unplannable_calls"] == 3
    assert counts["reasons"] == ["it runs code on the CPU, or reads a value there"]


def test_normal_with_tensors_of_means_and_deviations() -> None:
    mean, std = torch.full((50, 400), 3.0, device=DEVICE), torch.full((400,), 0.5, device=DEVICE)

    def draw() -> list[torch.Tensor]:
        return [torch.normal(mean, std), torch.normal(mean, 0.5), torch.normal(3.0, std.expand(50, 400))]

    with plans_from_the_start():
        torch.manual_seed(3)
        first = [draw(), draw()]
        torch.manual_seed(3)
        again = [draw(), draw()]
        assert plans.stats()["aten::normal.Tensor_Tensor"]["replays"] == 3
    for one, other in zip([*first[0], *first[1]], [*again[0], *again[1]], strict=True):
        assert one.shape == (50, 400)
        assert torch.equal(one, other)
        assert abs(one.mean().item() - 3.0) < 0.03
        assert abs(one.std().item() - 0.5) < 0.03
    assert not torch.equal(first[0][0], first[1][0])
    generator = torch.Generator(DEVICE).manual_seed(5)
    state = torch.bp.get_rng_state(DEVICE)
    drawn = torch.normal(mean, std, generator=generator)
    assert torch.equal(drawn, torch.normal(mean, std, generator=generator.manual_seed(5)))
    assert torch.equal(torch.bp.get_rng_state(DEVICE), state)
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        torch.normal(mean, std[:3])


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="PyTorch's CPU kernels use fused multiply-add only if compiled for AVX2 or AVX512",
)
@pytest.mark.parametrize("name", ["hermite_polynomial_h", "hermite_polynomial_he", "legendre_polynomial_p"])
def test_polynomial_recurrences_round_as_on_the_cpu(name: str) -> None:
    """The terms cancel, so another rounding gives another result."""
    torch.manual_seed(0)
    x, n = torch.rand(2000) * 4 - 2, torch.randint(0, 20, (2000,)).float()
    function = getattr(torch.special, name)
    torch.testing.assert_close(function(x.to(DEVICE), n.to(DEVICE)).cpu(), function(x, n), rtol=0, atol=0)
