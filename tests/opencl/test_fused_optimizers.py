"""Fused optimizer steps, with numbers and tensors as learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import agrees, had


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 4).to(dtype)


STEPS: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"maximize": True}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.2}),
    (torch.optim.Adagrad, {"maximize": True}),
]


@pytest.mark.parametrize("of_tensor", [None, "cpu", "device"])
@pytest.mark.parametrize(("kind", "options"), STEPS)
def test_fused_steps(kind: Callable[..., Any], options: dict[str, Any], of_tensor: str | None) -> None:
    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        params = [one.detach().clone().requires_grad_() for one in given]
        rate = torch.tensor(0.1, device=params[0].device if of_tensor == "device" else "cpu")
        optimizer = kind(params, fused=True, lr=rate if of_tensor else 0.1, **options)
        for step in range(3):
            for one in params:
                one.grad = one.detach() * 0.3 + step
            optimizer.step()
        return [one.detach() for one in params]

    agrees(run, numbers(5, 3), numbers(7), torch.zeros(0, 3))
    for dtype in had((torch.float64,)):
        agrees(run, numbers(5, 3, dtype=torch.bfloat16), numbers(2, dtype=dtype))
