"""Calls of the libraries that a device's driver provides (`drivers.libraries`), for all families."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from torch_backplane import _C, drivers, preferences, tuning
from torch_backplane.drivers.libraries import FAMILIES, Allowed, Library, Routine, routines_of
from torch_backplane.kernels.dtypes import part_dtype, value_dtype
from torch_backplane.planning.queue_functions import QueueFunction, queue_api

_failed: set[tuple[int, str, str]] = set()  # (device index, family, library name)


def allowed(family: str, dtype: torch.dtype) -> Allowed:
    """What the user allows libraries to do with numbers of a dtype.

    Args:
        family: "products" or "convolutions".
        dtype: the dtype of operands and results.
    """
    is_float32 = dtype in (torch.float32, torch.complex64)
    found = Allowed.TF32 if is_float32 and preferences.float32_precision(family) == "tf32" else Allowed(0)
    if family == "products":
        sums = preferences.divided(dtype)
        if sums.reduced:
            found |= Allowed.ROUNDED_SUMS
        if sums.divides:
            found |= Allowed.DIVIDED_SUMS
        if dtype == torch.float16 and preferences.half_sums():
            found |= Allowed.HALF_SUMS
    return found


def computes_in_tf32(family: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a library of the device's driver may compute numbers of a dtype in TF32, which other libraries do not.

    Args:
        family: "products" or "convolutions".
    """
    routines = routines_of(drivers.device(device.index), {"products": "matmul", "convolutions": "convolution"}[family])
    return any(routine.tf32 for _, routine in routines) and Allowed.TF32 in allowed(family, dtype)


class LibraryFailed(torch.AcceleratorError):
    """The last library that accepts a call has failed, and is not used again for this family on this device."""


@dataclass(frozen=True)
class LibraryCall:
    """One call of a family's routine. The first library of the device's driver that accepts the call runs it.

    Args:
        device: the device.
        family: a key of `drivers.libraries.FAMILIES`.
        dtype: the dtype of the routine.
        integers: returns the routine's integers by their names; None if only device and dtype are known. Called only if
            a routine reads them, because each comparison of a size adds a guard to the plan.
        library: the key of the only library that may run the call; "" for any.
    """

    device: torch.device
    family: str
    dtype: torch.dtype
    integers: Callable[[], dict[str, int]] | None = None
    library: str = ""

    def why_not(self) -> str | None:
        """Returns None if a library accepts the call, else the reason, as a phrase that continues «it»."""
        reason = "is not available on this device"
        for library, routine in self._usable():
            refused = self._refusal(library, routine)
            if refused is None:
                return None
            reason = refused
        return reason

    def workspace(self) -> int:
        """Returns the bytes of workspace that the routine needs; 0 if no library accepts the call, or if it fails."""
        for _, routine in self._takers():
            try:
                return self._query(routine.workspace) or 0
            except torch.AcceleratorError:  # `run` reports it
                return 0
        return 0

    def cost(self) -> int | None:
        """Returns the cost relative to generated kernels, which cost 100; None if the library states none."""
        for _, routine in self._takers():
            return self._query(routine.cost)
        return None

    def forms(self) -> Iterator[tuple[str, int]]:
        """Yields the key of each library that accepts the call, and how many algorithms it has for it."""
        for library, routine in self._takers():
            count = self._query(routine.forms)
            yield library.key, 1 if count is None else count

    def run(self, memory: Sequence[torch.Tensor], numbers: Sequence[Any] = (), written: int = 1) -> None:
        """Runs the call with the first library that accepts it.

        If a library fails, a warning is given and the next one runs the call. The failed library is not used again for
        this family on this device.

        Args:
            memory, numbers: the routine's arguments in the order that the family lists.
            written: how many of `memory`, from the first on, the routine writes.

        Raises:
            LibraryFailed: the last library that accepts the call failed.
            torch.AcceleratorError: a library failed in a tuning trial, or the device is lost.
        """
        text = f"no library computes {FAMILIES[self.family].computes} on {self.device}"
        failure: Exception | None = None
        for library, routine in self._takers():
            try:
                self._call(library, routine, memory, numbers, written)
                return
            except torch.AcceleratorError as error:
                if tuning.is_trial() or _C.is_lost(self.device.index):
                    raise
                _failed.add((self.device.index, self.family, library.name))
                _C.advance_configuration_epoch()  # invalidates plans that call the library
                message = str(error).strip().partition("\n")[0]
                computes = FAMILIES[self.family].computes
                text = f"{computes} no longer use {library.name} on {self.device}, which failed: {message}"
                warnings.warn(text, stacklevel=2)
                failure = error
        raise LibraryFailed(text) from failure

    def _usable(self) -> Iterator[tuple[Library, Routine]]:
        if queue_api(self.device):
            for library, routine in routines_of(drivers.device(self.device.index), self.family):
                is_asked = self.library in ("", library.key)
                if is_asked and (self.device.index, self.family, library.name) not in _failed:
                    yield library, routine

    def _takers(self) -> Iterator[tuple[Library, Routine]]:
        return (one for one in self._usable() if self._refusal(*one) is None)

    def _refusal(self, library: Library, routine: Routine) -> str | None:
        if self.dtype not in routine.addresses:
            return f"({library.name}) has no {self.dtype}".replace("torch.", "")
        refused = self._query(routine.guard)
        return None if refused is None else f"({library.name}) {refused}"

    def _query(self, question: Callable[..., Any] | None) -> Any:
        return None if question is None or self.integers is None else question(self.dtype, **self.integers())

    def _call(
        self, library: Library, routine: Routine, memory: Sequence[torch.Tensor], numbers: Sequence[Any], written: int
    ) -> None:
        assert self.integers is not None
        given = self.integers()
        parts = [part for one in numbers for part in ((one.real, one.imag) if self.dtype.is_complex else (one,))]
        arguments = [*memory, *parts, *(given[name] for name in FAMILIES[self.family].integers)]
        if routine.workspace is not None:
            nbytes = routine.workspace(self.dtype, **given)
            # At least a byte, because a plan cannot refer to a tensor without memory.
            arguments += [torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device), nbytes]
        _function(library, self.family, self.dtype, written)(*arguments)


@cache
def _bound(name: str, address: int, parameters: tuple[Any, ...], explain: Callable[[int], str] | None) -> QueueFunction:
    return QueueFunction(name, address, *parameters, explain=explain)


def _function(library: Library, family: str, dtype: torch.dtype, written: int) -> QueueFunction:
    names, routine = FAMILIES[family], library.routines[family]
    parameters: list[Any] = ["output" if index < written else "input" for index in range(len(names.memory))]
    parameters += [part_dtype(value_dtype(dtype))] * len(names.numbers) * (2 if dtype.is_complex else 1)
    parameters += [torch.int64] * len(names.integers)
    if routine.workspace is not None:
        parameters += ["output", torch.int64]
    return _bound(f"{library.name} {family}", routine.addresses[dtype], tuple(parameters), library.explain)
