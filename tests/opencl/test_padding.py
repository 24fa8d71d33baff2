"""Reflection and replication padding."""

from __future__ import annotations

import pytest
import torch
from agreement import agrees, refused_alike

SHAPES = {1: (2, 3, 6), 2: (2, 3, 5, 6), 3: (2, 2, 4, 5, 6)}
PADDINGS = {
    1: [(1, 2), (0, 5), (-2, 1)],
    2: [(1, 2, 3, 4), (0, 0, -1, 2)],
    3: [(1, 2, 3, 0, 2, 1), (-1, 1, 0, 2, 3, -2)],
}


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(("rank", "padding"), [(rank, one) for rank, many in PADDINGS.items() for one in many])
def test_forward_and_backward(mode: str, rank: int, padding: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y = torch.nn.functional.pad(x, padding, mode)
        weights = torch.linspace(0, 1, y.numel(), device=y.device).view(y.shape)
        return y.detach(), torch.autograd.grad((y * weights).sum(), x)[0]

    agrees(function, torch.randn(SHAPES[rank]))
    agrees(lambda x: torch.nn.functional.pad(x, padding, mode), torch.randn(SHAPES[rank]).transpose(0, 1)[1:])
    agrees(lambda x: torch.nn.functional.pad(x, padding, mode), torch.randn(SHAPES[rank]).half())


def test_replication_gradient_of_one_element() -> None:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(torch.nn.functional.pad(x, (2, 3), "replicate").sum(), x)[0]

    agrees(gradient, torch.ones(2, 1))


def test_channels_last_and_empty_tensors() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    agrees(lambda x: torch.nn.functional.pad(x, (1, 1, 2, 2), "reflect"), x)
    agrees(lambda x: torch.nn.functional.pad(x, (1, 1), "replicate"), torch.zeros(0, 3, 4))


def test_errors_are_pytorchs() -> None:
    with pytest.raises(RuntimeError, match="Padding size should be less than the corresponding input dimension"):
        torch.nn.functional.pad(torch.ones(1, 1, 3, device="bp:0"), (3, 0), "reflect")


@pytest.mark.parametrize("mode", ["reflection", "replication"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_invalid_ranks_and_padding_lists_are_errors(mode: str, rank: int) -> None:
    forward = getattr(torch.ops.aten, f"{mode}_pad{rank}d")
    backward = getattr(torch.ops.aten, f"{mode}_pad{rank}d_backward")
    for dims in range(7):
        refuses = refused_alike if not rank < dims <= rank + 2 else agrees
        refuses(forward, torch.ones((4,) * dims), [1] * 2 * rank)
    x = torch.randn(2, 3, *(4,) * rank)
    grad = torch.randn(2, 3, *(6,) * rank)
    agrees(backward, grad, x, [1] * 2 * rank)
    for count in (0, 2 * rank - 1, 2 * rank + 2):
        if mode == "reflection" and rank == 3 and torch.__version__ < "2.13":  # the CPU kernel reads out of bounds
            with pytest.raises(RuntimeError, match=f"padding size is expected to be 6, but got: {count}"):
                forward(x.to("bp:0"), [1] * count)
        else:
            refused_alike(forward, x, [1] * count)
        with pytest.raises(RuntimeError, match=f"padding size is expected to be {2 * rank}, but got: {count}"):
            backward(grad.to("bp:0"), x.to("bp:0"), [1] * count)
