"""Math functions that kernels for OpenCL CPU devices define themselves (kernels/cpu/functions.py), versus float64."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from agreement import DEVICE, need
from kernel_runners import launch, opencl
from targets import launch as launching

from torch_backplane.kernels import OpenCLC, Target, functions, geometry, pointwise
from torch_backplane.kernels.cpu.functions import BRANCHLESS, definitions, needs_float64
from torch_backplane.kernels.dialects.base import LIBRARY

# Operations by the names of library functions, and PyTorch's names of operations that differ from ours.
OPERATIONS = {library: operation for operation, library in LIBRARY.items()} | {"fmod": "fmod"}
TORCH_NAMES = {"power": "pow"}
BINARY = ("atan2", "hypot", "power", "fmod")
NAMES = [OPERATIONS[name] for name in BRANCHLESS]
# Largest errors in units in the last place. Correct rounding has 0.5; PyTorch's own functions have up to 1.9.
ERRORS = {"exp": 1.1, "log": 0.8}
USUAL_ERROR = 0.56

INF, NAN = math.inf, math.nan
SIZES = [0.0, 1.0, INF, 1e-45, 3e-39, 1.1754944e-38, 3.4028235e38, 0.5, 1.5, 2.0, 2.5, 3.0, 0.99999994, 1.0000001]
SIZES += [1 / 3, 8388608.5, 16777215.0, 16777216.0, 1e10, 0.78539813, 0.7853982]
# The floats nearest to multiples of π/2, and the ends of the intervals of the Payne-Hanek reduction.
SIZES += [16367173 * 2.0**72, 1.5707964, 3.1415927, 5.16e15, 2.0**53, 2.0**81, 2.0**109, 9007198717870080.0]
SPECIAL = [*SIZES, *(-size for size in SIZES), NAN]


def reference(operation: str, *numbers: torch.Tensor) -> torch.Tensor:
    function = getattr(torch, TORCH_NAMES.get(operation, operation))
    if operation != "fmod":
        return function(*(number.double() for number in numbers))
    # PyTorch's fmod is wrong for large quotients.
    values = zip(*(number.tolist() for number in numbers), strict=True)
    exact = [math.fmod(x, y) if math.isfinite(x) and y != 0 else NAN for x, y in values]
    return torch.tensor(exact, dtype=torch.float64)


def assert_accurate(operation: str, found: torch.Tensor, *numbers: torch.Tensor) -> None:
    """Asserts that finite results are within the error limit, and that infinity, NaN and signed zeros are exact."""
    exact = reference(operation, *numbers)
    rounded = exact.float()
    finite = rounded.isfinite() & found.isfinite()
    same = (found == rounded) | (found.isnan() & rounded.isnan())
    wrong = ~finite & ~same | (rounded == 0) & (found == 0) & (rounded.signbit() != found.signbit())
    assert not wrong.any(), [(*(n[wrong][0].item() for n in numbers), found[wrong][0].item(), exact[wrong][0].item())]
    unit = torch.exp2(exact.abs().clamp(min=2.0**-126).log2().floor() - 23)
    errors = torch.where(finite, (found.double() - exact).abs() / unit, 0.0)
    worst = int(errors.argmax())
    limit = ERRORS.get(operation, USUAL_ERROR)
    assert errors[worst] <= limit, (float(errors[worst]), [float(n[worst]) for n in numbers], float(found[worst]))


def samples(operation: str) -> list[torch.Tensor]:
    torch.manual_seed(0)

    def every_exponent() -> torch.Tensor:  # including NaN
        return torch.randint(-(2**31), 2**31, (1 << 17,)).to(torch.int32).view(torch.float32)

    special = torch.tensor(SPECIAL)
    if operation not in BINARY:
        ranges = [(-110, 95), (-1, 1), (0.999, 1.001)]
        return [torch.cat([special, every_exponent(), *(torch.linspace(*ends, 1 << 16) for ends in ranges)])]
    normal, size = torch.randn(1 << 16), torch.randn(1 << 16)
    whole = torch.randint(-60, 60, (1 << 16,)).float()
    pairs = [
        (special.repeat_interleave(len(special)), special.repeat(len(special))),
        (every_exponent(), every_exponent()),
        (normal, size * 20),
        (1 + normal * 1e-4, size * 1e6),
        (normal * 3, whole),
        (normal * 1e-40, size),
    ]
    first, second = zip(*pairs, strict=True)
    return [torch.cat(first), torch.cat(second)]


@pytest.mark.parametrize("operation", NAMES)
def test_functions_are_accurate_everywhere(operation: str) -> None:
    name = LIBRARY.get(operation, operation)
    if launching.dialect_of(torch.device(DEVICE)).library(name, torch.float32) != f"cpu_{name}":
        pytest.skip("the device's library computes the function")
    numbers = samples(operation)
    function = getattr(torch, TORCH_NAMES.get(operation, operation))
    assert_accurate(operation, function(*(number.to(DEVICE) for number in numbers)).cpu(), *numbers)


@pytest.mark.parametrize("operation", NAMES)
def test_functions_are_as_accurate_without_fused_multiply_add(operation: str) -> None:
    """Kernels do not contract multiplication and addition, as on processors without FMA instructions."""
    if needs_float64(LIBRARY.get(operation, operation)):
        need(torch.float64)
    numbers = samples(operation)
    found = torch.empty_like(numbers[0])
    where = geometry(found.shape, [found.stride()] * (1 + len(numbers)), width=1)
    dtypes = [torch.float32] * len(numbers)
    kernel = pointwise(
        "separate",
        lambda *values: functions.apply(operation, *values),
        inputs=dtypes,
        outputs=[torch.float32],
        layout=where.layout,
        dialect=OpenCLC(Target.of_kind("cpu", float64=opencl()[2])),
    )
    assert kernel.text.count("FP_CONTRACT ON") == 1
    kernel = dataclasses.replace(kernel, text=kernel.text.replace("FP_CONTRACT ON", "FP_CONTRACT OFF"))
    launch(kernel, where, where.count, [found, *numbers], [])
    assert_accurate(operation, found, *numbers)


def test_definitions_are_complete_ordered_and_branchless() -> None:
    for name in BRANCHLESS:
        text = "\n".join(definitions(f"x = cpu_{name}(y);"))
        defined = re.findall(r"^FUNCTION \w+ (cpu_\w+)\(", text, re.MULTILINE)
        assert defined[-1] == f"cpu_{name}"
        assert list(dict.fromkeys(re.findall(r"cpu_\w+", text))) == defined, "functions are defined before their use"
        assert not re.search(r"\b(if|for|while|switch|goto)\b", text)
    assert definitions("y = exp(x);") == []


def test_library_computes_functions_that_need_missing_float64() -> None:
    with_it, without = (OpenCLC(Target.of_kind("cpu", float64=has)) for has in (True, False))
    assert {name: without.library(name, torch.float32) == f"cpu_{name}" for name in BRANCHLESS} == {
        name: not needs_float64(name) for name in BRANCHLESS
    }
    assert all(with_it.library(name, torch.float32) == f"cpu_{name}" for name in BRANCHLESS)
    assert with_it.library("sin", torch.float64) == OpenCLC().library("sin", torch.float32) == "sin"
    assert needs_float64("sin")
    assert not needs_float64("exp")
