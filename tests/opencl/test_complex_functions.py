"""Kernels of complex functions, compared with complex128 (tests/kernels/test_kernels_complex.py: without a device)."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE
from complex_samples import arguments, errors, on_parts, parts, reference, samples

import torch_backplane
from torch_backplane import _C
from torch_backplane.kernels.special.complex_numbers import FUNCTIONS


def computed(name: str, *numbers: torch.Tensor) -> torch.Tensor:
    kernel = torch_backplane.elementwise(on_parts(name), name=f"complex_{name}")
    _C.reset_fallback_counts()
    real, imaginary = kernel(*(part.to(DEVICE) for part in parts(numbers)))
    assert _C.fallback_counts() == {}
    return torch.complex(real.cpu(), imaginary.cpu())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_are_accurate(name: str) -> None:
    """Errors are at most 5 units in the last place, or twice those of PyTorch's CPU kernel. OpenCL's own functions may
    be off by 4."""
    numbers = dict(arguments(name, samples(500)))
    given = tuple(torch.cat(z) for z in zip(*numbers.values(), strict=True))
    found, cpu = computed(name, *given), reference(name)(*given)
    exact = reference(name)(*(z.to(torch.complex128) for z in given))
    error, allowed = errors(found, exact), 2 * errors(cpu, exact)
    for i, label in enumerate(numbers):
        here = slice(500 * i, 500 * (i + 1))
        assert error[here].max() <= max(3e-7, allowed[here].max()), label
