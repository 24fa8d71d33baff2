"""Large results at any alignment, and large copies, which all threads of a CPU device share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees, plans_from_the_start

from torch_backplane import plans

LARGE = 32 << 20  # bytes


def explained(function: Callable[..., object], *arguments: object, **keywords: object) -> str:
    with plans_from_the_start():
        return str(plans.explain(function, *arguments, **keywords))


@pytest.mark.parametrize("beyond", [0, 3])
@pytest.mark.slow
def test_element_counts_that_are_and_are_not_multiples_of_four(beyond: int) -> None:
    a, b = (torch.rand(LARGE // 4 + beyond) for _ in range(2))
    agrees(lambda a, b: a + b, a, b)
    agrees(lambda a, b: a.mul_(b), a, b)
    agrees(lambda a, out: torch.neg(a, out=out), a, torch.empty_like(a))


def test_plans_depend_on_the_alignment_of_the_result() -> None:
    count = LARGE // 4
    storage, b = torch.zeros(count + 8, device=DEVICE), torch.rand(count, device=DEVICE)
    for first in (0, 4, 1, 8, 2, 3):
        storage.zero_()
        torch.add(b, 1, out=storage[first : first + count])
        assert torch.equal(storage[first : first + count].cpu(), b.cpu() + 1)
        assert storage[:first].count_nonzero() == 0
        assert storage[first + count :].count_nonzero() == 0


COPIED = [torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.int64, torch.float64]


@pytest.mark.parametrize("dtype", [*COPIED, torch.complex64, torch.complex128, torch.float8_e4m3fn], ids=str)
def test_copies(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype == torch.bool else 100, ((1 << 20) + 16 * 7,), dtype=torch.uint8)
    source = bits.view(dtype).to(DEVICE)
    for _ in range(2):
        assert torch.equal(torch.empty_like(source).copy_(source).cpu().view(torch.uint8), bits)
        assert torch.equal(source.clone().cpu().view(torch.uint8), bits)


def test_only_strided_copies_launch_a_kernel() -> None:
    for count in (1 << 10, 1 << 18):
        x = torch.rand(count, device=DEVICE)
        assert "no operator with a planner" in explained(torch.empty_like(x).copy_, x)
        assert "launch bp_copy" in explained(torch.empty(count // 2, device=DEVICE).copy_, x[::2])


def test_copies_of_conjugated_and_transposed_views() -> None:
    z = torch.randn(512, 300, dtype=torch.complex64)
    for view in (lambda t: t.conj(), lambda t: t.t(), lambda t: t.t().conj(), lambda t: t.conj().imag):
        agrees(lambda a, b, view=view: view(a).copy_(view(b)), z, z.roll(1))


def test_copies_within_one_storage() -> None:
    count = 1 << 19
    values = torch.arange(2 * count, dtype=torch.float32)
    storage = values.to(DEVICE)
    storage[count:].copy_(storage[:count])
    assert torch.equal(storage.cpu(), torch.cat([values[:count], values[:count]]))
