"""Complex inputs on which complex functions are hard to compute accurately, and PyTorch's reference functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels.special.complex_numbers import FUNCTIONS, Parts

BINARY = ("multiply", "divide", "power")
_PYTORCH = {"multiply": torch.mul, "divide": torch.div, "power": torch.pow, "sign": torch.sgn}


def reference(name: str) -> Callable[..., torch.Tensor]:
    """Returns PyTorch's function for a key of FUNCTIONS."""
    return _PYTORCH.get(name) or getattr(torch, name)


def samples(count: int, dtype: torch.dtype = torch.complex64) -> dict[str, torch.Tensor]:
    """Returns `count` numbers of each kind, all within the range of complex64."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    def between(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)

    def magnitudes(low: float, high: float) -> torch.Tensor:
        return 10.0 ** between(low, high) * torch.sign(normal())

    def around(centre: complex) -> torch.Tensor:
        return centre + torch.polar(torch.exp(between(-16, 0)), between(0, 2 * math.pi))

    one = torch.ones(count, dtype=torch.float64)
    found = {
        "normal": torch.complex(normal(), normal()),
        "imaginary": torch.complex(0 * one, 3 * normal()),
        "real": torch.complex(3 * normal(), 0 * one),
        "near the unit circle": torch.polar(1 + 1e-3 * normal(), between(-math.pi, math.pi)),
        "on the unit circle, near 1": torch.polar(one, torch.exp(between(-16, 0))),
        "on the unit circle around -1, near 0": torch.polar(one, torch.exp(between(-16, 0))) - 1,
        "any magnitude": torch.complex(magnitudes(-30, 30), magnitudes(-30, 30)),
        "small": torch.complex(magnitudes(-37, -30), magnitudes(-37, -30)),
        "large": torch.complex(magnitudes(30, 38.5), magnitudes(30, 38.5)),
        "where exp overflows": torch.complex(between(80, 100) * torch.sign(normal()), 3 * normal()),
    }
    for centre in (0, 1, -1, 1j, -1j, math.pi / 2, math.pi, 0.5j * math.pi, 1j * math.pi):
        found[f"around {centre:.3g}"] = around(centre)
    return {label: numbers.to(dtype) for label, numbers in found.items()}


def arguments(name: str, numbers: dict[str, torch.Tensor]) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
    """Yields labels and arguments for function `name`."""
    for label, z in numbers.items():
        if name == "power":  # exponents of moderate size
            yield label, (z, 4 * numbers["normal"])
        else:
            yield label, ((z, z.roll(7)) if name in BINARY else (z,))


def on_parts(name: str) -> Callable[..., tuple[Expression, ...]]:
    """Returns a formula over real and imaginary parts: two parameters for each complex parameter of `name`."""

    def unary(x: Expression, y: Expression) -> tuple[Expression, ...]:
        return FUNCTIONS[name](Parts(x, y))

    def binary(x: Expression, y: Expression, u: Expression, v: Expression) -> tuple[Expression, ...]:
        return FUNCTIONS[name](Parts(x, y), Parts(u, v))

    return binary if name in BINARY else unary


def parts(numbers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.contiguous() for z in numbers for part in (z.real, z.imag)]


def errors(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Relative errors |found - exact| / |exact|.

    0 where `exact` is not finite and normal in the dtype of `found`; infinite where only `found` is NaN.
    """
    limits = torch.finfo(found.real.dtype)
    usable = torch.view_as_real(exact).abs().amax(-1)
    usable = (usable > 2 * limits.tiny) & (usable < limits.max)
    error = (found.to(exact.dtype) - exact).abs() / exact.abs()
    return torch.where(usable, torch.nan_to_num(error, nan=math.inf), 0.0)
