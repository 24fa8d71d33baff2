"""Adaptive and fractional max pooling, unpooling, gradients of pooling, and max pooling of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees, to_cpu

aten, F = torch.ops.aten, torch.nn.functional
DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return torch.randn(shape).to(dtype)


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    result = function(x)
    return [result.detach(), *torch.autograd.grad((result * result.detach()).sum(), x)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adaptive_max_pool(dtype: torch.dtype) -> None:
    for shape, sizes in (((2, 3, 8, 9), (3, 5)), ((3, 8, 9), (11, 10)), ((2, 3, 8, 9), (1, 1)), ((2, 3, 8, 9), (8, 9))):
        x = numbers(*shape, dtype=dtype)
        agrees(lambda x: F.adaptive_max_pool2d(x, sizes, return_indices=True), x)  # noqa: B023
        agrees(lambda x: gradient(lambda x: F.adaptive_max_pool2d(x, sizes), x), x)  # noqa: B023
    x = numbers(2, 3, 4, 5, 6, dtype=dtype)
    agrees(lambda x: F.adaptive_max_pool3d(x, (2, 3, 4), return_indices=True), x)
    agrees(lambda x: gradient(lambda x: F.adaptive_max_pool3d(x, (2, 7, 4)), x), x)
    agrees(lambda x: gradient(lambda x: F.adaptive_max_pool1d(x, 4), x), numbers(2, 3, 9, dtype=dtype))


def test_adaptive_max_pool_of_nan_channels_last_and_empty_tensors() -> None:
    x = numbers(2, 3, 8, 9)
    agrees(lambda x: F.adaptive_max_pool2d(torch.where(x > 1, torch.nan, x), 3, return_indices=True), x)
    agrees(lambda x: F.adaptive_max_pool2d(x.contiguous(memory_format=torch.channels_last), 3), x)
    agrees(lambda x: F.adaptive_max_pool2d(x, 3), numbers(0, 3, 8, 9))
    with pytest.raises(RuntimeError, match="non-zero size"):
        F.adaptive_max_pool2d(torch.zeros(2, 3, 0, 9, device=DEVICE), 3)


def test_adaptive_avg_pool_out_variants() -> None:
    agrees(lambda x, out: aten.adaptive_avg_pool2d(x, [3, 5], out=out), numbers(2, 3, 8, 9), torch.empty(2, 3, 3, 5))
    agrees(lambda x, out: aten.adaptive_avg_pool3d(x, [2, 3, 4], out=out), numbers(2, 3, 4, 5, 6), torch.empty(0))
    agrees(
        lambda grad, x, out: aten.adaptive_avg_pool3d_backward(grad, x, grad_input=out),
        numbers(2, 3, 2, 3, 4),
        numbers(2, 3, 4, 5, 6),
        torch.empty(2, 3, 4, 5, 6),
    )


def test_fractional_max_pool_of_bfloat16() -> None:
    """PyTorch computes window positions in bfloat16, so its windows differ. Values must still match their indices."""
    x, samples = numbers(2, 3, 6, 8, 9).bfloat16().to(DEVICE), torch.rand(2, 3, 3).bfloat16().to(DEVICE)
    values, indices = (one.cpu() for one in aten.fractional_max_pool3d(x, (2, 3, 2), (3, 4, 5), samples))
    assert torch.equal(x.cpu().flatten(2).gather(2, indices.flatten(2)).view_as(values), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_fractional_max_pool(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape, window, sizes in (((2, 3, 8, 9), (2, 3), (4, 5)), ((2, 3, 8, 9), (2, 2), (7, 1))):
        samples = torch.rand(2, 3, 2).to(dtype)
        x = numbers(*shape, dtype=dtype)
        agrees(lambda x, s: aten.fractional_max_pool2d(x, window, sizes, s), x, samples)  # noqa: B023
        grad, (_, indices) = numbers(2, 3, *sizes, dtype=dtype), aten.fractional_max_pool2d(x, window, sizes, samples)
        agrees(lambda *t: aten.fractional_max_pool2d_backward(*t[:2], window, sizes, t[2]), grad, x, indices)  # noqa: B023
    x, samples = numbers(2, 3, 6, 8, 9, dtype=dtype), torch.rand(2, 3, 3).to(dtype)
    agrees(lambda x, s: aten.fractional_max_pool3d(x, (2, 3, 2), (3, 4, 5), s), x, samples)
    grad, (_, indices) = (
        numbers(2, 3, 3, 4, 5, dtype=dtype),
        aten.fractional_max_pool3d(x, (2, 3, 2), (3, 4, 5), samples),
    )
    agrees(lambda *t: aten.fractional_max_pool3d_backward(*t[:2], (2, 3, 2), (3, 4, 5), t[2]), grad, x, indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_max_unpool(dtype: torch.dtype) -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        values, indices = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(values, indices, 2)

    agrees(lambda x: gradient(both, x), numbers(2, 3, 8, 10, dtype=dtype))
    agrees(lambda x: gradient(both, x), numbers(3, 8, 10, dtype=dtype))
    agrees(lambda x: both(x.contiguous(memory_format=torch.channels_last)), numbers(2, 3, 8, 10, dtype=dtype))
    values, indices = F.max_pool3d(numbers(2, 3, 4, 6, 8, dtype=dtype), 2, return_indices=True)
    agrees(lambda v, i: F.max_unpool3d(v, i, 2), values, indices)
    agrees(lambda v, i: F.max_unpool3d(v, i, 2, output_size=(5, 7, 9)), values, indices)


def test_max_unpool_raises_the_cpus_errors() -> None:
    x = numbers(2, 3, 4, 5)
    with pytest.raises(RuntimeError) as expected:
        aten.max_unpool2d(x, torch.zeros(2, 3, 4, 4, dtype=torch.int64), [8, 10])
    with pytest.raises(RuntimeError) as found:
        aten.max_unpool2d(x.to(DEVICE), torch.zeros(2, 3, 4, 4, dtype=torch.int64, device=DEVICE), [8, 10])
    assert str(found.value).split("\n")[0] == str(expected.value).split("\n")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("planes", [(1, 3), (5, 16), (64,)], ids=str)
def test_gradients_of_few_and_many_planes(planes: tuple[int, ...], dtype: torch.dtype) -> None:
    """A work item handles an image element, or the windows of a plane if there are enough planes."""
    poolings: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: F.max_pool2d(x, 3, 2),
        lambda x: F.max_pool2d(x, 2, 1, 1, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda x: F.avg_pool2d(x, (2, 3), divisor_override=5),
    ]
    for size in ((9, 12), (7, 7), (16, 33)):
        image = torch.randn(*planes, *size, dtype=dtype)
        for pooling in poolings:
            # The reference is in float64: in half precision, the CPU rounds each partial sum.
            here, there = image.to(torch.float64, copy=True).requires_grad_(), image.to(DEVICE).requires_grad_()
            result = pooling(here)
            gradient = torch.randn(result.shape, dtype=dtype)
            result.backward(gradient.double())
            pooling(there).backward(gradient.to(DEVICE))
            assert here.grad is not None
            torch.testing.assert_close(there.grad.cpu(), here.grad.to(dtype))


def test_max_pool_backward_ignores_indices_out_of_range() -> None:
    """The CPU kernel writes out of bounds, or reports corrupted memory."""
    image, gradient = torch.randn(64, 4, 4, device=DEVICE), torch.ones(64, 2, 2, device=DEVICE)
    for wrong in (-1, 16, 2**40):
        indices = torch.zeros(64, 2, 2, dtype=torch.int64, device=DEVICE)
        indices[:, 1, 1] = wrong
        arguments = (gradient, image, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
        found = torch.ops.aten.max_pool2d_with_indices_backward(*arguments)
        assert found.flatten(1)[:, 1:].eq(0).all()
        assert found.flatten(1)[:, 0].ge(1).all()


WINDOWS = [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 1), (2, 3, 1, 1), (3, 2, 1, 2), (1, 1, 0, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32], ids=str)
def test_max_pool_of_rows_of_every_length(dtype: torch.dtype) -> None:
    """Rows are computed in vectors, the last of which overlaps the one before. Results at the edges are scalar."""
    generator = torch.Generator().manual_seed(0)
    for width in (1, 2, 3, 5, 7, 8, 9, 14, 15, 16, 17, 28, 33):
        for window, stride, padding, dilation in WINDOWS:
            x = torch.randint(-3, 3, (2, 3, 4, width), generator=generator).to(dtype)  # with many ties
            if dtype.is_floating_point:
                x[:, :, 1:3, width // 2 :: 5] = torch.nan
            for ceil_mode in (False, True):
                arguments = ((1, window), (1, stride), (0, padding), (1, dilation), ceil_mode)
                if width + 2 * padding < dilation * (window - 1) + 1:
                    continue
                expected = F.max_pool2d(x, *arguments, return_indices=True)
                found = F.max_pool2d(x.to(DEVICE), *arguments, return_indices=True)
                message = f"{width} {arguments}"
                torch.testing.assert_close(to_cpu(found[0]), expected[0], equal_nan=True, msg=message)
                assert torch.equal(to_cpu(found[1]), expected[1]), message
