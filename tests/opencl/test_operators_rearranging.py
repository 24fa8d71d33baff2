"""roll, flip, channel_shuffle."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees

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


def test_nothing_and_no_dimensions() -> None:
    for x in (torch.zeros(0, 3), torch.zeros(2, 0)):
        agrees(lambda x: (x.roll(1, 0), x.roll(2), x.flip(1)), x)
    agrees(lambda x: (x.flip(0), x.roll(1)), torch.tensor(3.0))
    agrees(lambda x: torch.native_channel_shuffle(x, 3), torch.randn(2, 6, 3, 3).to(memory_format=torch.channels_last))
