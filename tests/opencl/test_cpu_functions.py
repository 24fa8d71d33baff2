"""Functions that CPUs behind OpenCL get from us (kernels/dialects/cpu_functions.py), against float64."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import DEVICE

from torch_backplane.kernels.dialects.cpu_functions import CPU_FUNCTIONS

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e-39, 1.1754944e-38, 3.4028235e38]


@pytest.mark.parametrize("name", CPU_FUNCTIONS)
def test_is_right_to_the_last_bits_everywhere(name: str) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,)).to(torch.int32).view(torch.float32)  # every exponent, and NaN
    x = torch.cat([torch.tensor(SPECIAL), bits, torch.linspace(-110, 95, 1 << 16), torch.linspace(-1, 1, 1 << 16)])
    found = getattr(torch, name)(x.to(DEVICE)).cpu()
    expected = getattr(torch, name)(x.double()).float()
    torch.testing.assert_close(found, expected, rtol=5e-7, atol=1.5e-45, equal_nan=True)
