"""How exact sums are: every accumulating operator beside the CPU's, for 10² to 10⁷ summands, with float64 as judge.

The operator database has few elements for each result, so its samples say little about what rounding adds up to. Here
each case is run with more and more of them, drawn so that sums grow, cancel, or have means that are much larger than
their deviation. See accuracy_cases.py for the cases.
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
# An error may be this many times the CPU's, or this many times the dtype's epsilon, whichever is more: two sums of the
# same numbers in two orders err by chance. The largest of many errors is that of a large number, so it may be greater.
TIMES, EPSILONS, EPSILONS_OF_LARGEST = 2.0, 4.0, 8.0
# Where one draw of the inputs exceeds that, so many are judged together, as if they were one case of more results: of a
# few sums that cancel all but their last digits, one says nothing.
DRAWS = 16

DISTRIBUTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda normal: normal,
    "offset": lambda normal: normal + 1e4,
    "positive": lambda normal: torch.special.ndtr(normal.double()).float(),
}


class Draw:
    """Makes the inputs of a case on the CPU: `draw(*shape)` of the distribution, `draw.normal` of the standard normal
    one, `draw.positive` from 0 to 1, `draw.indices(below, *shape)`."""

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
    """A call with about `n` summands for each result.

    Attributes:
        make: the inputs for n, from a `Draw`.
        function: of these inputs; one tensor or several.
        most: the largest n, where a result needs more than n numbers.
        distributions: those of the numbers that are summed.
    """

    name: str
    make: Callable[[int, Draw], tuple[Any, ...]]
    function: Callable[..., Any]
    most: int = SIZES[-1]
    distributions: tuple[str, ...] = tuple(DISTRIBUTIONS)


def gradients(function: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The gradients of all floating-point inputs of `function`, for a fixed cotangent.

    Its numbers are bfloat16's, so that they are the same in every dtype.
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
    """Of one result, relative to the root mean square of what is right."""

    largest: float
    mean: float  # the root of the mean square


@dataclass(frozen=True)
class Measurement:
    """One case of one size, judged, of a draw or of several. `device`, `cpu` and `allowed` are the errors of the result
    that is worst."""

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
        """Of the error to the one that is allowed."""
        return max(self.device.largest / self.allowed.largest, self.device.mean / self.allowed.mean)

    @property
    def passed(self) -> bool:
        return not self.message and self.ratio <= 1


@dataclass
class AccuracyReport:
    device: str
    measurements: list[Measurement] = field(default_factory=list)
    not_on_cpu: list[str] = field(default_factory=list)  # what PyTorch's CPU has no kernel for

    @property
    def ok(self) -> bool:
        return bool(self.measurements) and all(one.passed for one in self.measurements)

    def worst(self) -> list[Measurement]:
        """One measurement for each case and dtype: the one whose error is largest beside what is allowed."""
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
    """Runs the cases with up to `most` summands; yields what was measured, or the name of what the CPU cannot run."""
    for case in cases:
        for dtype in dtypes:
            for elements in (size for size in SIZES if size <= min(most, case.most)):
                for distribution in case.distributions:
                    yield measure_one(torch.device(device), dtype, case, elements, distribution)


def measure_one(
    device: torch.device, dtype: torch.dtype, case: Case, elements: int, distribution: str
) -> Measurement | str:
    """Of one draw, and of DRAWS where that exceeds what is allowed."""
    name = str(dtype).replace("torch.", "")

    def judged(draws: Sequence[_Draw]) -> Measurement:
        return _judged(draws, partial(Measurement, case.name, name, elements, distribution))

    draws: list[_Draw] = []
    while True:
        drawn = _run(device, dtype, case, elements, distribution, len(draws))
        if drawn is None:
            return f"{case.name} ({name})"
        if isinstance(drawn, str):  # a case is not worth the others
            nothing = Error(math.inf, math.inf)
            return Measurement(case.name, name, elements, distribution, nothing, nothing, Error(1.0, 1.0), drawn)
        draws.append(drawn)
        if len(draws) == DRAWS or (len(draws) == 1 and judged(draws).passed):
            return judged(draws)


class _Draw(NamedTuple):
    """The results of one draw: the device's, the CPU's, and float64's."""

    found: list[torch.Tensor]
    cpu: list[torch.Tensor]
    exact: list[torch.Tensor]


def _run(
    device: torch.device, dtype: torch.dtype, case: Case, elements: int, distribution: str, number: int
) -> _Draw | str | None:
    """The draw of this number; the device's error; or None where the CPU cannot run it."""
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


def _judged(draws: Sequence[_Draw], measurement: Callable[..., Measurement]) -> Measurement:
    """All of the draws, each result of which counts as one of as many times the elements."""
    found, cpu, exact = (list(zip(*results, strict=True)) for results in zip(*draws, strict=True))
    judged = []
    for results in zip(found, cpu, exact, strict=True):
        ours, theirs, right = map(torch.stack, results)
        own, other = error_of(ours, right), error_of(theirs, right)
        judged.append(measurement(own, other, allowed_error(other, theirs.dtype), draws=len(draws)))
    return max(judged, key=lambda one: one.ratio)


def _each(inputs: tuple[Any, ...], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    return [change(one) if isinstance(one, torch.Tensor) else one for one in inputs]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _results(returned: Any) -> list[torch.Tensor]:
    tensors = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    return [one.detach() for one in tensors]


def allowed_error(cpu: Error, dtype: torch.dtype) -> Error:
    """The largest that passes beside the CPU's."""
    epsilon = torch.finfo(dtype).eps
    return Error(max(TIMES * cpu.largest, EPSILONS_OF_LARGEST * epsilon), max(TIMES * cpu.mean, EPSILONS * epsilon))


def error_of(found: torch.Tensor, exact: torch.Tensor) -> Error:
    """Of a result, by what float64 or complex128 has."""
    wide = torch.complex128 if exact.is_complex() else torch.float64
    found, exact = found.to(wide), exact.to(wide)
    difference = (found - exact).abs()
    # Where both are the same infinity, or both are no number, there is no error; where one is, it is infinite.
    same = (found == exact) | (found.isnan() & exact.isnan())
    difference = torch.where(same, 0.0, difference.nan_to_num(math.inf, math.inf))
    finite = exact[exact.isfinite()]
    scale = finite.abs().square().mean().sqrt().item() if finite.numel() else 1.0
    scale = scale or 1.0
    return Error(difference.max().item() / scale, difference.square().mean().sqrt().item() / scale)
