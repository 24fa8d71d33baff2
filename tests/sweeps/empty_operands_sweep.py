"""PyTorch's operator database with empty operands, compared with the CPU: equal results, or errors of the same type.

In each sample, each size of each tensor in turn is set to 0, and each size in all tensors that have it. A kernel that
divides by a size ends this process, because faulthandler is enabled: the last call is the finding.

    TORCH_BACKPLANE_DRIVERS=opencl python tests/sweeps/sweep_process.py empty_operands_sweep.py --match '^nonzero'
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import warnings
from collections.abc import Iterator
from typing import Any

import sweep_process
import torch
from torch.utils._pytree import tree_map_only

from torch_backplane.conformance import child_processes, comparison
from torch_backplane.conformance.calls import _brief
from torch_backplane.conformance.check import _ARGUMENTS_STAY_ON_CPU, _UNINITIALIZED, SEED
from torch_backplane.conformance.database import load
from torch_backplane.conformance.settings import OP_DB
from torch_backplane.conformance.sizes import EITHER_ERROR, MAX_ELEMENTS, MAX_TENSORS
from torch_backplane.conformance.transfer import Transfer, tensors

DEVICE, CPU = torch.device("bp", 0), torch.device("cpu")
# PyTorch's CPU kernels do not write some empty results, or give them another shape than CUDA.
UNWRITTEN = ("nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss")
LEFT_OUT = {
    "nn.functional.embedding": "PyTorch's CPU kernel raises another IndexError for `max_norm` without rows",
    "nn.functional.pixel_unshuffle": "PyTorch's CPU kernel returns the shape of the operand",
    "svd_lowrank": "random", "pca_lowrank": "random",
}  # fmt: skip
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)  # the first that an operator supports

Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


def emptied(given: Arguments) -> Iterator[Arguments]:
    """Yields the arguments with a size set to 0: in all tensors that have the size, and in one tensor."""
    of_sample = tensors(given)
    if len(of_sample) > MAX_TENSORS or any(
        one.layout != torch.strided or one.numel() > MAX_ELEMENTS for one in of_sample
    ):
        return
    for size in sorted({size for one in of_sample for size in one.shape} - {0}):
        yield _without(given, size)
    for which, tensor in enumerate(of_sample[:4]):
        for dim in range(min(tensor.dim(), 4)):
            yield _reshaped(given, which, [*tensor.shape[:dim], 0, *tensor.shape[dim + 1 :]])


def _without(given: Arguments, size: int) -> Arguments:
    """Sets the size to 0 in all tensors."""
    return tree_map_only(  # type: ignore[no-any-return]
        torch.Tensor, lambda one: _filled(one, [0 if other == size else other for other in one.shape]), given
    )


def _reshaped(given: Arguments, which: int, shape: list[int]) -> Arguments:
    """Changes the shape of one tensor."""
    at = itertools.count()
    return tree_map_only(  # type: ignore[no-any-return]
        torch.Tensor, lambda one: _filled(one, shape) if next(at) == which else one, given
    )


def _filled(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return tensor if list(tensor.shape) == shape else torch.zeros(shape, dtype=tensor.dtype)


class Sweep:
    """One operator in one dtype."""

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        self.op, self.dtype = op, dtype

    def run(self, samples: int) -> None:
        random.seed(SEED)
        torch.manual_seed(SEED)
        calls: dict[str, Arguments] = {}
        examples = list(self.op.sample_inputs("cpu", self.dtype))
        for sample in random.sample(examples, min(samples, len(examples))):
            for arguments in emptied((sample.input, tuple(sample.args), dict(sample.kwargs))):
                calls.setdefault(self._describe(arguments), arguments)
        answers = child_processes.in_children(list(calls.values()), lambda call: self._outcome(call, CPU))
        for (text, call), expected in zip(calls.items(), answers, strict=True):
            if expected is not None:  # otherwise the CPU's process crashed
                sweep_process.call(text)
                if wrong := self._difference(expected, self._outcome(call, DEVICE)):
                    sweep_process.found(f"{text}: {wrong}")

    def _describe(self, call: Arguments) -> str:
        words = [_brief(value) for value in (call[0], *call[1])]
        words += [f"{name}={_brief(value)}" for name, value in call[2].items()]
        return f"{self.op.full_name}({', '.join(words)})"

    def _outcome(self, call: Arguments, device: torch.device) -> tuple[str, str, Any, bool]:
        """Returns (type of the error, its message, results, whether values cannot be compared)."""
        torch.manual_seed(SEED)
        before = torch.default_generator.get_state()
        transfer = Transfer(device)
        rest = Transfer(CPU) if self.op.full_name in _ARGUMENTS_STAY_ON_CPU else transfer
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = self.op.op(transfer(call[0]), *rest(call[1]), **rest(call[2]))
                if device != CPU:
                    torch.accelerator.synchronize(device)
        except Exception as error:
            with contextlib.suppress(Exception):  # pending work can raise, but not in the next call
                torch.accelerator.synchronize(DEVICE)
            return type(error).__name__, str(error).partition("\n")[0], None, False
        drawn = not torch.equal(before, torch.default_generator.get_state())
        return "", "", result, drawn or self.op.full_name in _UNINITIALIZED or self.op.full_name in UNWRITTEN

    def _difference(self, expected: tuple[str, str, Any, bool], actual: tuple[str, str, Any, bool]) -> str:
        if not expected[0] and not actual[0]:
            different = comparison.compare(expected[2], actual[2], DEVICE, values=not expected[3])
            return "; ".join(f"{kind}: {words}" for kind, words in different)
        if expected[0] == actual[0] or "not implemented for" in expected[1] or self.op.name in EITHER_ERROR:
            return ""
        if "MKL FFT error" in expected[1] or "sparse" in actual[1]:  # limits of one device
            return ""
        if not expected[0] and self.op.name.startswith(("_", "native_")):
            return ""  # internal operators get only valid arguments from their callers
        return f"{actual[:2] if actual[0] else 'no error'}; on the CPU {expected[:2] if expected[0] else 'no error'}"


def names(pattern: str) -> list[str]:
    return [name for name in load(OP_DB) if re.search(pattern, name) and name not in LEFT_OUT]


def sweep(op: Any, samples: int) -> None:
    dtype = next((dtype for dtype in DTYPES if dtype in op.dtypes), None)
    if dtype is not None:
        Sweep(op, dtype).run(samples)


if __name__ == "__main__":
    sweep_process.over_database(__doc__, sweep, samples=8)
