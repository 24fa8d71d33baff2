"""Compares the compaction templates with PyTorch on the CPU, and compiles them as CUDA C++."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, processors, run

from torch_backplane.kernels.templates import compact


def mask_of(size: int, share: float) -> torch.Tensor:
    torch.manual_seed(size)
    return torch.rand(size) < share


def starts_of(processor: str, mask: torch.Tensor) -> torch.Tensor:
    starts = torch.full((compact.block_count(dialect(processor), mask) + 1,), -1)
    run(compact.count(dialect(processor), starts, mask))
    run(compact.sum_up(dialect(processor), starts))
    return starts


@processors
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1023, 1024, 1025, 2049, 70_000])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_positions_and_elements(processor, size, share):
    mask, x = mask_of(size, share), torch.arange(size, dtype=torch.int32)
    starts = starts_of(processor, mask)
    assert starts[-1] == mask.sum()
    out = torch.full((int(starts[-1]),), -1)
    run(compact.positions(dialect(processor), out, mask, starts))
    assert torch.equal(out, mask.nonzero()[:, 0])
    elements = torch.full((int(starts[-1]),), -1, dtype=torch.int32)
    run(compact.select(dialect(processor), elements, x, mask, starts))
    assert torch.equal(elements, x[mask])
    few = torch.full((int(starts[-1]) // 2,), -1)
    run(compact.positions(dialect(processor), few, mask, starts))
    assert torch.equal(few, mask.nonzero()[: len(few), 0])


@processors
@pytest.mark.parametrize("size", [1, 1025, 70_000])
def test_scatter(processor, size):
    mask, x, source = mask_of(size, 0.5), torch.zeros(size), torch.arange(1.0, size + 1)
    for length in (size, int(mask.sum()), int(mask.sum()) // 2, 0):
        out, errors = x.clone(), torch.zeros(4, dtype=torch.int32)
        run(compact.scatter(dialect(processor), out, mask, source[:length], starts_of(processor, mask), errors))
        written = mask.nonzero()[:length, 0]
        assert torch.equal(out, x.index_copy(0, written, source[: len(written)]))
        assert bool(errors[0]) == (length < mask.sum())


@processors
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.complex64], ids=str)
def test_non_zero_elements_are_counted(processor, dtype):
    x = torch.tensor([0.0, -0.0, 1.0, 0.5, -3.0, 0.0, 2.0]).to(dtype)
    if dtype.is_complex:
        x[5] = 1j
    assert starts_of(processor, x)[-1] == x.count_nonzero()


def test_cuda_compiles():
    for dtype in (torch.bool, torch.float16, torch.float32, torch.complex64):
        mask, starts, x = torch.ones(9, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.zeros(9)
        check_cuda(compact.count, starts, mask)
        check_cuda(compact.sum_up, starts)
        check_cuda(compact.positions, torch.zeros(9, dtype=torch.int64), mask, starts)
        check_cuda(compact.select, torch.zeros(9, dtype=dtype), torch.zeros(9, dtype=dtype), mask, starts)
        check_cuda(compact.scatter, x, mask, x, starts, torch.zeros(4, dtype=torch.int32))
