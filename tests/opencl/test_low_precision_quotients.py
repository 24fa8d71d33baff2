"""Rounded quotients of float16 and bfloat16: each step is rounded to the dtype, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE

LOW = [torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 6e-8, 3e-5, -6e-5, 65504.0, 0.1, 3.0]

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = torch.randn(2, 60_000) * torch.tensor([10.0, 1000.0]).repeat(30_000)
    special = torch.tensor(SPECIAL)
    pairs = torch.cartesian_prod(special, special)
    return torch.cat([a, pairs[:, 0]]).to(dtype), torch.cat([b / 300, pairs[:, 1]]).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_tensor_operands(name: str, dtype: torch.dtype) -> None:
    a, b = operands(dtype)
    same(OPERATORS[name](a.to(DEVICE), b.to(DEVICE)), OPERATORS[name](a, b))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_scalar_operands(name: str, dtype: torch.dtype) -> None:
    """A scalar divisor is not rounded to the dtype. A scalar dividend is."""
    a, b = operands(dtype)
    for number in (0.1, 3.0, -7.3, 1000.7):
        same(OPERATORS[name](a.to(DEVICE), number), OPERATORS[name](a, number))
    for number in (1000.7, 0.1):
        if name != "fmod":
            found, expected = (OPERATORS[name](torch.tensor(number), x) for x in (b.to(DEVICE), b))
            same(found, expected)


def test_bfloat16_example() -> None:
    one, tenth = (torch.tensor([x], dtype=torch.bfloat16, device=DEVICE) for x in (1.0, 0.1))
    assert torch.div(one, tenth, rounding_mode="trunc").item() == 10
    assert torch.div(one, tenth, rounding_mode="floor").item() == 9  # computed from the exact remainder


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ["addcdiv", "addcmul", "lerp", "add", "logaddexp"])
def test_other_multi_step_operators_round_once(name: str, dtype: torch.dtype) -> None:
    a, b, c = (x.to(dtype) for x in torch.rand(3, 20_000) + 0.5)
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "addcdiv": lambda a, b, c: torch.addcdiv(a, b, c, value=0.3),
        "addcmul": lambda a, b, c: torch.addcmul(a, b, c, value=0.3),
        "lerp": lambda a, b, c: torch.lerp(a, b, 0.3),
        "add": lambda a, b, c: torch.add(a, b, alpha=0.3),
        "logaddexp": lambda a, b, c: torch.logaddexp(a, b),
    }
    found = functions[name](*(x.to(DEVICE) for x in (a, b, c))).cpu()
    once = functions[name](*(x.float() for x in (a, b, c))).to(dtype)
    # The last bit of float32 decides the rounding of about one value in 10,000.
    assert (found != once).sum() < 10
