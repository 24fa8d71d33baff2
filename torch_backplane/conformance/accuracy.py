"""Measures rounding errors of accumulating operators for 10² to 10⁷ summands, compared with the CPU's errors.

Float64 is the reference. The samples of the operator database have few summands per result, so they do not show how
rounding errors accumulate. Here each case runs with increasing numbers of summands. They are drawn so that sums grow,
cancel, or have means much larger than their deviation. The cases are in accuracy_cases.py.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

SIZES = tuple(10**power for power in range(2, 8))
# The limit of the root mean square error is TIMES the CPU's or EPSILONS times the dtype's epsilon, whichever is larger:
# the errors of two orders of summation differ by chance. The limit of the largest error is TIMES the CPU's or
# EPSILONS_OF_LARGEST times epsilon, because the largest error is usually that of a large result.
TIMES, EPSILONS, EPSILONS_OF_LARGEST = 2.0, 4.0, 8.0
# If one draw of the inputs exceeds the limit, this many draws are judged together, as one case with more results. A
# single draw of a few sums that cancel almost completely proves nothing.
DRAWS = 16

DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda normal: normal,
    "offset": lambda normal: normal + 1e4,
    "positive": lambda normal: torch.special.ndtr(normal.double()).float(),
}


class Draw:
    """Draws the inputs of a case on the CPU.

    `draw(*shape)` draws from the case's distribution, `draw.normal` from the standard normal distribution,
    `draw.positive` uniformly from 0 to 1, and `draw.indices` integers from 0 to below `below`.
    """

    def __init__(self, seed: int, distribution: str, dtype: torch.dtype) -> None:
        self._generator = torch.Generator("cpu").manual_seed(seed)
        self._distribution, self._dtype = DISTRIBUTIONS[distribution], dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return self._distribution(self._normal(shape)).to(self._dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        return self._normal(shape).to(self._dtype)

    def positive(self, *shape: int) -> torch.Tensor:
        return DISTRIBUTIONS["positive"](self._normal(shape)).to(self._dtype)

    def indices(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=self._generator, device="cpu")

    def _normal(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device="cpu")


@dataclass(frozen=True)
class Case:
    """A call with about `n` summands per result.

    Attributes:
        make: makes the inputs for n, from a `Draw`.
        function: computes one or several tensors from these inputs.
        most: the largest n, for calls that need more than n numbers per result.
        distributions: the distributions of the summands.
    """

    name: str
    make: Callable[[int, Draw], tuple[Any, ...]]
    function: Callable[..., Any]
    most: int = SIZES[-1]
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)


def gradients(function: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that computes the gradients of all floating-point inputs of `function`.

    The cotangent is fixed. Its values are rounded to bfloat16, so that they are the same in every dtype.
    """

    def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
        given = [
            one.detach().requires_grad_() if isinstance(one, torch.Tensor) and one.is_floating_point() else one
            for one in inputs
        ]
        leaves = [one for one in given if isinstance(one, torch.Tensor) and one.requires_grad]
        out = function(*given)
        generator = torch.Generator("cpu").manual_seed(1)
        cotangent = torch.randn(out.shape, generator=generator, device="cpu").to(torch.bfloat16)
        return torch.autograd.grad(out, leaves, cotangent.to(out.device, out.dtype))

    return run


@dataclass(frozen=True)
class Error:
    """The error of one result, relative to the root mean square of the right result."""

    largest: float
    mean: float  # root mean square


@dataclass(frozen=True)
class Measurement:
    """The errors of one case with one number of summands, over one or several draws.

    `device`, `cpu` and `allowed` are the errors and the limit of the worst result.
    """

    case: str
    dtype: str
    elements: int
    distribution: str
    device: Error
    cpu: Error
    allowed: Error
    message: str = ""
    draws: int = 1

    @property
    def ratio(self) -> float:
        """The error divided by the limit."""
        return max(self.device.largest / self.allowed.largest, self.device.mean / self.allowed.mean)

    @property
    def passed(self) -> bool:
        return not self.message and self.ratio <= 1


@dataclass
class AccuracyReport:
    device: str
    measurements: list[Measurement] = field(default_factory=list)
    not_on_cpu: list[str] = field(default_factory=list)  # cases that PyTorch's CPU cannot run

    @property
    def ok(self) -> bool:
        return bool(self.measurements) and all(one.passed for one in self.measurements)

    def worst(self) -> list[Measurement]:
        """Return one measurement per case and dtype: the one with the largest error relative to the limit."""
        found: dict[tuple[str, str], Measurement] = {}
        for one in self.measurements:
            key = (one.case, one.dtype)
            if key not in found or (not one.passed, one.ratio) > (not found[key].passed, found[key].ratio):
                found[key] = one
        return list(found.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "not_on_cpu": self.not_on_cpu,
            "measurements": [asdict(one) | {"passed": one.passed} for one in self.measurements],
        }


def measure(
    device: torch.device | str, dtypes: Sequence[torch.dtype], cases: Sequence[Case], most: int = SIZES[-1]
) -> Iterator[Measurement | str]:
    """Run the cases with up to `most` summands.

    Yields:
        Measurements, and the names of cases that the CPU cannot run.
    """
    for case in cases:
        for dtype in dtypes:
            for elements in (size for size in SIZES if size <= min(most, case.most)):
                for distribution in case.distributions:
                    yield measure_one(torch.device(device), dtype, case, elements, distribution)


def measure_one(
    device: torch.device, dtype: torch.dtype, case: Case, elements: int, distribution: str
) -> Measurement | str:
    """Measure one draw, or DRAWS of them if the first exceeds the limit."""
    name = str(dtype).replace("torch.", "")

    def measured(draws: Sequence[_Draw]) -> Measurement:
        return _measured(draws, partial(Measurement, case.name, name, elements, distribution))

    draws: list[_Draw] = []
    while True:
        drawn = _run(device, dtype, case, elements, distribution, len(draws))
        if drawn is None:
            return f"{case.name} ({name})"
        if isinstance(drawn, str):  # the device raised: skip the other draws
            nothing = Error(math.inf, math.inf)
            return Measurement(case.name, name, elements, distribution, nothing, nothing, Error(1.0, 1.0), drawn)
        draws.append(drawn)
        if len(draws) == DRAWS or (len(draws) == 1 and measured(draws).passed):
            return measured(draws)


class _Draw(NamedTuple):
    """The results of one draw: the device's, the CPU's, and the CPU's in float64."""

    found: list[torch.Tensor]
    cpu: list[torch.Tensor]
    exact: list[torch.Tensor]


def _run(
    device: torch.device, dtype: torch.dtype, case: Case, elements: int, distribution: str, number: int
) -> _Draw | str | None:
    """Run the draw with this number. Returns the device's error as a string, or None if the CPU cannot run the case."""
    seed = zlib.crc32(f"{case.name} {elements} {distribution}".encode()) + number
    inputs = case.make(elements, Draw(seed, distribution, dtype))
    try:
        cpu = _results(case.function(*_each(inputs, lambda tensor: tensor.clone())))
    except (RuntimeError, NotImplementedError):
        return None
    exact = _results(case.function(*_each(inputs, _widened)))
    try:
        found = [one.cpu() for one in _results(case.function(*_each(inputs, lambda tensor: tensor.to(device))))]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _Draw(found, cpu, exact)


def _measured(draws: Sequence[_Draw], measurement: Callable[..., Measurement]) -> Measurement:
    """Judge all draws together: each result of the case is stacked over the draws."""
    found, cpu, exact = (list(zip(*results, strict=True)) for results in zip(*draws, strict=True))
    measured = []
    for results in zip(found, cpu, exact, strict=True):
        ours, theirs, right = map(torch.stack, results)
        own, other = error_of(ours, right), error_of(theirs, right)
        measured.append(measurement(own, other, allowed_error(other, theirs.dtype), draws=len(draws)))
    return max(measured, key=lambda one: one.ratio)


def _each(inputs: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    return [change(one) if isinstance(one, torch.Tensor) else one for one in inputs]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _results(returned: Any) -> list[torch.Tensor]:
    tensors = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    return [one.detach() for one in tensors]


def allowed_error(cpu: Error, dtype: torch.dtype) -> Error:
    """Return the limit for the device's error, given the CPU's error."""
    epsilon = torch.finfo(dtype).eps
    return Error(max(TIMES * cpu.largest, EPSILONS_OF_LARGEST * epsilon), max(TIMES * cpu.mean, EPSILONS * epsilon))


def error_of(found: torch.Tensor, exact: torch.Tensor) -> Error:
    """Return the error of a result relative to the exact one, in float64 or complex128."""
    wide = torch.complex128 if exact.is_complex() else torch.float64
    found, exact = found.to(wide), exact.to(wide)
    difference = (found - exact).abs()
    # The error is 0 if both are NaN or the same infinity, and infinite if only one is NaN or infinite.
    same = (found == exact) | (found.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, difference.nan_to_num(math.inf, math.inf))
    finite = exact[exact.isfinite()]
    scale = finite.abs().square().mean().sqrt().item() if finite.numel() else 1.0
    scale = scale or 1.0
    return Error(difference.max().item() / scale, difference.square().mean().sqrt().item() / scale)
