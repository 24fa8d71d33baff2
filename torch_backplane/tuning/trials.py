"""Trials: calls of an operator with generated operands, for timing its candidates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_backplane.tuning.problems import Problem

Body = Callable[[], Any]
TRIALS: dict[str, Callable[[Operands], Body]] = {}

ROUNDS = 5  # in each, every candidate is timed once; the median counts
_MARGIN = 0.9  # a candidate must take less than this fraction of the first candidate's time


def trial(operator: str) -> Callable[[Callable[[Operands], Body]], Callable[[Operands], Body]]:
    """Decorator that registers a function as the trial of `operator` (`Problem.operator`).

    The function takes `Operands` and returns a function that runs the call to time.
    """

    def add(make: Callable[[Operands], Body]) -> Callable[[Operands], Body]:
        TRIALS[operator] = make
        return make

    return add


class Operands:
    """Creates the operands of a problem for a trial, by the names of its parameters.

    Raises:
        ValueError: by the methods, if a parameter is missing or malformed.
    """

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem, self.dtype, self.device, self.nbytes = problem, problem.torch_dtype, device, 0
        self._values = problem.values
        self._generator = torch.Generator().manual_seed(0)  # does not advance the program's generator

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Creates the tensor with the sizes and strides of a parameter; None if the parameter is "-".

        Args:
            name: the parameter.
            dtype: the tensor's dtype; that of the problem by default.
        """
        text = self._text(name)
        if text == "-":
            return None
        sizes, colon, strides = text.partition(":")
        shape, steps = _integers(sizes), _integers(strides)
        if not colon or len(shape) != len(steps):
            raise ValueError(f"{name}={text} is not a tensor such as {name}=64x32:32x1")
        extent = sum((size - 1) * step for size, step in zip(shape, steps, strict=True)) + 1 if all(shape) else 0
        return self.vector(extent, dtype).as_strided(shape, steps)

    def vector(self, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Creates a vector of random numbers: from 0 to 1, or for integer dtypes 0, 1 and 2."""
        dtype = dtype or self.dtype
        if dtype.is_floating_point or dtype.is_complex:
            memory = torch.rand(size, generator=self._generator).to(dtype)
        else:
            memory = torch.randint(0, 3, (size,), generator=self._generator).to(dtype)
        self.nbytes += memory.nbytes
        return memory.to(self.device)

    def given(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Creates the tensor of a parameter that must not be "-"."""
        tensor = self.tensor(name, dtype)
        if tensor is None:
            raise ValueError(f"{name}=- is not a tensor such as {name}=64x32:32x1")
        return tensor

    def integers(self, name: str) -> list[int]:
        """The integers of a parameter."""
        return _integers(self._text(name))

    def integer(self, name: str) -> int:
        """The integer of a parameter."""
        (value,) = self.integers(name)
        return value

    def flag(self, name: str) -> bool:
        """The bool of a parameter, which is 0 or 1."""
        return bool(self.integer(name))

    def has(self, name: str) -> bool:
        """Whether the problem has a parameter of this name."""
        return name in self._values

    def _text(self, name: str) -> str:
        if name not in self._values:
            raise ValueError(f"the parameter {name} is missing; got {', '.join(self._values)}")
        return self._values[name]


def _integers(text: str) -> list[int]:
    return [int(one) for one in text.split("x")] if text else []


class Clock:
    """Times a problem's trial on a device.

    Args:
        problem: the problem.
        device: the device.
        milliseconds: maximum time for each candidate, in all rounds together.
        iterations: maximum number of calls for each candidate, in all rounds together. At least one call per round is
            timed.
        rotating: bytes. Copies of the operands are made up to this size and used in turns, so that they are not in the
            device's cache.
    """

    def __init__(
        self, problem: Problem, device: torch.device, milliseconds: float, iterations: int, rotating: int
    ) -> None:
        self._device, self._seconds, self._iterations = device, milliseconds / 1e3, iterations
        self._bodies: list[Body] = []
        nbytes, each = 0, 1
        while not self._bodies or (nbytes + each <= rotating and len(self._bodies) < 256):
            operands = Operands(problem, device)
            self._bodies.append(TRIALS[problem.operator](operands))
            each = max(1, operands.nbytes)
            nbytes += each

    def result(self) -> list[torch.Tensor]:
        """Runs the call once and returns its results on the CPU."""
        given = self._bodies[0]()
        found = given if isinstance(given, Sequence) else [given]
        return [one.cpu() for one in found if isinstance(one, torch.Tensor)]

    def milliseconds(self) -> float:
        """Measures the time of one call in one round, after two calls that are not timed."""
        for _ in range(2):
            self._bodies[0]()
        self._wait()
        once = self._time(1)
        most = max(1, int(self._seconds / ROUNDS / max(once, 1e-9)))
        return self._time(min(max(1, self._iterations // ROUNDS), most)) * 1e3

    def _time(self, count: int) -> float:
        start = time.perf_counter()
        for number in range(count):
            self._bodies[number % len(self._bodies)]()
        self._wait()
        return (time.perf_counter() - start) / count

    def _wait(self) -> None:
        torch.accelerator.synchronize(self._device)


def quickest(times: dict[str, list[float]]) -> str:
    """Returns the candidate with the least median time, if it is clearly faster than the first one, else the first.

    Clearly means faster in all rounds, and in the median by 10 %: times of the same call vary by nearly as much.
    """
    first = next(iter(times))
    name = min(times, key=lambda one: statistics.median(times[one]))
    ratios = [one / other for one, other in zip(times[name], times[first], strict=True)]
    return name if statistics.median(ratios) < _MARGIN and max(ratios) < 1 else first
