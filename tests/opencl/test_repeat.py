"""repeat_interleave."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, agrees


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0)).to(dtype) if dtype.is_complex else x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("repeats", [[3], [0], [1, 2, 3], [0, 0, 5, 0, 1], [0, 0], [], [2] * 3000, [0] * 3000])
def test_repeat_interleave(repeats: list[int], dtype: torch.dtype) -> None:
    given = torch.tensor(repeats, dtype=dtype)
    agrees(lambda r: torch.repeat_interleave(r), given)
    agrees(lambda r: torch.repeat_interleave(r, output_size=int(sum(repeats))), given)
    agrees(lambda x, r: x.repeat_interleave(r, 0), numbers((len(repeats), 3)), given)
    agrees(lambda r: torch.repeat_interleave(r[::2]), given)


def test_repeat_interleave_of_scalar_repeats_and_gradients() -> None:
    agrees(lambda x: x.repeat_interleave(3, 1), numbers((4, 5)))

    def gradient(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x.repeat_interleave(r, 1) ** 2).sum(), x)[0]

    agrees(gradient, numbers((4, 3)), torch.tensor([2, 0, 3]))


def test_repeat_interleave_rejects_negative_repeats() -> None:
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.repeat_interleave(torch.tensor([1, -1, 3], device=DEVICE))


def test_repeat_interleave_with_output_size_reports_errors_at_synchronization() -> None:
    torch.repeat_interleave(torch.tensor([3, -1, 1], device=DEVICE), output_size=3)
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.accelerator.synchronize(DEVICE)
    repeats = torch.tensor([1, 2], device=DEVICE)
    for size in (2, 4):
        torch.repeat_interleave(repeats, output_size=size)
        with pytest.raises(RuntimeError, match="allocated size does not match required size"):
            torch.accelerator.synchronize(DEVICE)
