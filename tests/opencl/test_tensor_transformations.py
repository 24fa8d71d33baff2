"""roll, flip, channel_shuffle, pixel_shuffle, pixel_unshuffle, narrow_copy."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, on_device

X = torch.arange(60.0).view(3, 4, 5)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bool, torch.int64, torch.complex64, torch.complex128]
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = (X % 7).to(dtype)
    agrees(lambda x: (x.roll(2, 1), x.flip(0, 2), torch.native_channel_shuffle(x, 2)), x)


@pytest.mark.parametrize(
    ("shifts", "dims"),
    [(7, None), (-1, 0), ((1, -2), (0, 2)), ((1, 1), (1, 1)), (0, 1), (100, -1), ((1, 2, 3), (0, 1, 2))],
)
def test_roll(shifts: int | tuple[int, ...], dims: int | tuple[int, ...] | None) -> None:
    agrees(lambda x: x.roll(shifts, dims), X)
    agrees(lambda x: x.roll(shifts, dims), X.transpose(0, 2)[::2])


@pytest.mark.parametrize("dims", [(), (0,), (1, -1), (0, 1, 2)])
def test_flip(dims: tuple[int, ...]) -> None:
    agrees(lambda x: x.flip(dims), X)
    agrees(lambda x: x.flip(dims), X.transpose(0, 2)[::2])


def test_empty_and_zero_dimensional_tensors() -> None:
    for x in (torch.zeros(0, 3), torch.zeros(2, 0)):
        agrees(lambda x: (x.roll(1, 0), x.roll(2), x.flip(1)), x)
    agrees(lambda x: (x.flip(0), x.roll(1)), torch.tensor(3.0))
    agrees(lambda x: torch.native_channel_shuffle(x, 3), torch.randn(2, 6, 3, 3).to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex128], ids=str)
def test_pixel_shuffle_and_pixel_unshuffle(dtype: torch.dtype) -> None:
    x = torch.arange(2 * 18 * 4 * 6).view(2, 18, 4, 6).to(dtype)
    agrees(lambda x: torch.nn.functional.pixel_shuffle(x, 3), x)
    agrees(lambda x: torch.nn.functional.pixel_unshuffle(x, 2), x.transpose(2, 3)[:, :, 2:])
    agrees(lambda x: torch.nn.functional.pixel_shuffle(x, 1), x[0])
    agrees(lambda x: torch.nn.functional.pixel_unshuffle(x, 2), x.to(memory_format=torch.channels_last))
    agrees(lambda x: torch.nn.functional.pixel_shuffle(x, 2), torch.zeros(0, 4, 2, 2, dtype=dtype))
    for wrong, factor in ((torch.nn.functional.pixel_shuffle, 4), (torch.nn.functional.pixel_unshuffle, 3)):
        for tensor in (x, on_device(x)):
            with pytest.raises(RuntimeError, match="divisible"):
                wrong(tensor, factor)


def test_narrow_copy() -> None:
    agrees(lambda x: (torch.narrow_copy(x, 1, 1, 2), torch.narrow_copy(x.mT, -1, -3, 2)), X)
    agrees(lambda x: torch.narrow_copy(x, 0, 1, 0), X)
    # The CPU kernel writes to out= as if it were contiguous.
    contiguous = torch.contiguous_format
    agrees(lambda x: torch.narrow_copy(x, 0, 1, 2, out=torch.zeros_like(x[:2], memory_format=contiguous)), X.bfloat16())
