"""Mismatched sizes: changes one size of one tensor of a call. The device must refuse what the CPU refuses.

Compares whether there is an error, its type, and the shapes and dtypes of results. Values are not compared, because
PyTorch's CPU kernels may read out of bounds at such sizes. Some crash, so the CPU's calls run in child processes.
"""

from __future__ import annotations

import contextlib
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from torch_backplane.conformance import child_processes
from torch_backplane.conformance.calls import _brief
from torch_backplane.conformance.check import _ARGUMENTS_STAY_ON_CPU, SEED, _finish, is_refusal
from torch_backplane.conformance.report import EntryResult
from torch_backplane.conformance.settings import Settings
from torch_backplane.conformance.transfer import Transfer, tensors

_CPU = torch.device("cpu")
SAMPLES = 8  # per operator, unless the settings specify another number
TENSORS = 4  # tensors of a sample, and dimensions of a tensor, that are changed
MAX_ELEMENTS = 20_000  # of a tensor; samples with larger ones are skipped
MAX_TENSORS = 40  # of a sample; samples with more are skipped
MAX_CALLS = 400  # per operator
# For an index out of range, some of PyTorch's CPU kernels of these raise a RuntimeError, and others an IndexError.
EITHER_ERROR = {"index_add", "index_select"}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def misfits(arguments: Arguments, chosen: random.Random) -> Iterator[tuple[str, Arguments]]:
    """Yield (which size, arguments) with one size changed to 0, 1, one more, or more than twice as many."""
    for which, tensor in enumerate(tensors(arguments)[:TENSORS]):
        for dim, size in enumerate(tensor.shape[:TENSORS]):
            for other in chosen.sample(sorted({0, 1, size + 1, 2 * size + 3} - {size}), 2):
                shape = (*tensor.shape[:dim], other, *tensor.shape[dim + 1 :])
                yield f"tensor {which}, dimension {dim}", _replaced(arguments, which, shape)


def _replaced(arguments: Arguments, which: int, shape: Sequence[int]) -> Arguments:
    """Replace tensor `which` by one of another shape: zeros for integers, which can be indices, else random numbers."""
    position = -1

    def replaced(value: Any) -> Any:
        nonlocal position
        if isinstance(value, torch.Tensor):
            position += 1
            if position != which:
                return value
            numbers = torch.rand if value.is_floating_point() or value.is_complex() else torch.zeros
            return numbers(shape, dtype=value.dtype)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            items = [replaced(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        return value

    return replaced(arguments)


class SizesCheck:
    """Checks one operator in one dtype."""

    def __init__(
        self, op: Any, dtype: torch.dtype, settings: Settings, device: torch.device, announce: Callable[[str], None]
    ) -> None:
        self.op = op
        self.dtype = dtype
        self.settings = settings
        self.device = device
        self.announce = announce
        self.result = EntryResult(op.full_name, str(dtype).removeprefix("torch."))
        self.error = Exception()  # raised by the last call that failed

    def run(self) -> EntryResult:
        start = time.perf_counter()
        calls = list(islice(self._calls(), MAX_CALLS))
        for (which, call), expected in zip(calls, self._on_cpu([call for _, call in calls]), strict=True):
            if expected is None:  # the CPU's call crashed; the device's can crash this process, too, by a fallback
                self.result.both_raised += 1
            else:
                self._compare(which, call, expected, self._outcome(call, self.device))
        self.result.seconds = round(time.perf_counter() - start, 4)
        return self.result

    def _calls(self) -> Iterator[tuple[str, Arguments]]:
        random.seed(SEED)
        torch.default_generator.manual_seed(SEED)
        chosen, seen = random.Random(SEED), set()
        for sample in islice(self.op.sample_inputs("cpu", self.dtype), self.settings.samples or SAMPLES):
            arguments = ((sample.input, *sample.args), sample.kwargs)
            given = tensors(arguments)
            if len(given) > MAX_TENSORS or any(
                one.layout != torch.strided or one.numel() > MAX_ELEMENTS for one in given
            ):
                continue
            self.result.samples += 1
            for which, call in misfits(arguments, chosen):
                if (text := self._describe(call)) not in seen:
                    seen.add(text)
                    yield which, call

    def _describe(self, call: Arguments) -> str:
        words = [_brief(value) for value in call[0]]
        words += [f"{name}={_brief(value)}" for name, value in call[1].items()]
        return f"{self.op.full_name}({', '.join(words)})"

    def _outcome(self, call: Arguments, device: torch.device) -> list[Any]:
        """Return [type of the error, its text], or ["", shapes and dtypes of results]."""
        self.announce(self._describe(call) + (" (on the CPU)" if device == _CPU else ""))
        torch.manual_seed(SEED)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (first, *positional), named = call
                transfer = Transfer(device)
                rest = Transfer(_CPU) if self.op.full_name in _ARGUMENTS_STAY_ON_CPU else transfer
                found = self.op.op(transfer(first), *rest(positional), **rest(named))
                _finish(device)
        except Exception as error:
            self.error = error
            with contextlib.suppress(Exception):  # a second error of this call must not be reported by the next one
                _finish(device)
            return [type(error).__name__, next(iter(str(error).splitlines()), "")[:300]]
        return ["", [_brief(one) for one in tensors((found,))]]

    def _on_cpu(self, calls: Sequence[Arguments]) -> list[list[Any] | None]:
        """The outcomes on the CPU; None for a call that crashes its process."""
        return list(child_processes.in_children(calls, lambda call: self._outcome(call, _CPU)))

    def _compare(self, which: str, call: Arguments, expected: list[Any], actual: list[Any]) -> None:
        raised, refused = expected[0], actual[0]
        internal = self.op.name.startswith(("_", "native_"))  # called by other operators, with matching sizes
        note = lambda kind, text: self.result.add(kind, which, self._describe(call), text)  # noqa: E731
        if not raised and not refused:
            self.result.compared += 1
            if expected[1] != actual[1]:
                note("shape", f"{', '.join(actual[1])}; expected {', '.join(expected[1])}")
        elif not raised:
            clear = is_refusal(self.error, self.device, self.dtype)
            note("refused" if clear else "stricter" if internal else "error", f"{refused}: {actual[1]}")
        elif not refused:
            if raised != "NotImplementedError" and "not implemented for" not in expected[1]:
                note("no error", f"the CPU raised {raised}: {expected[1]}")
        elif raised == refused or self.op.name in EITHER_ERROR or is_refusal(self.error, self.device, self.dtype):
            self.result.both_raised += 1
        else:
            note("error type", f"{refused}: {actual[1]}; the CPU raised {raised}: {expected[1]}")


def check_sizes(
    op: Any, dtype: torch.dtype, settings: Settings, device: torch.device, announce: Callable[[str], None]
) -> EntryResult:
    """Call an operator (an `OpInfo`) in one dtype with mismatched sizes, and compare errors and shapes with the CPU's.

    Args:
        announce: called with a description of each call before it runs.
    """
    return SizesCheck(op, dtype, settings, device, announce).run()
