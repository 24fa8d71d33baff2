"""PyTorch's warnings, compared with the CPU's.

Runs each sample of the database as it is, in place, and with `out=`, also of another shape. Each call runs three times,
because the first call records a plan and later ones replay it. Values are not compared, so any driver works.

    TORCH_BACKPLANE_DRIVERS=opencl python tests/sweeps/sweep_process.py warnings_sweep.py --match '^fft'
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import sweep_process
import torch
from torch.utils._pytree import tree_map_only

from torch_backplane.conformance.calls import _brief
from torch_backplane.conformance.check import _ARGUMENTS_STAY_ON_CPU, SEED
from torch_backplane.conformance.database import load
from torch_backplane.conformance.settings import OP_DB
from torch_backplane.conformance.transfer import Transfer, tensors

DEVICE, CPU = torch.device("bp", 0), torch.device("cpu")
# For these, the warnings of PyTorch's CPU kernels name the shape of an intermediate result.
OTHER_SHAPES = ("kthvalue",)
# The shape of the results depends on values.
OF_NUMBERS = ("masked_select", "nonzero")
DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)  # the first that an operator supports
OUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "out=": torch.ones_like,
    "out= of another shape": lambda one: torch.ones((*one.shape, 2), dtype=one.dtype),
    "out= of nothing": lambda one: torch.ones(0, dtype=one.dtype),
}
Arguments = tuple[Any, tuple[Any, ...], dict[str, Any]]


def warnings_of(function: Callable[..., Any], call: Arguments, device: torch.device) -> list[str] | None:
    """Returns the messages of the warnings of one call, or None if it raises."""
    torch.manual_seed(SEED)
    transfer = Transfer(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            given, rest = transfer(call[0]), transfer(call[1:])
        except NotImplementedError:  # of sparse tensors
            return None
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function(given, *rest[0], **rest[1])
            if device != CPU:
                torch.accelerator.synchronize(device)
        except Exception:
            return None
    return sorted(re.sub(r"\n.*| \(Triggered internally.*", "", str(one.message)) for one in caught)


def forms(op: Any, given: Arguments) -> Iterator[tuple[str, Callable[..., Any], Arguments]]:
    """Yields (form, function, arguments): as it is, in place, in place on an expanded tensor, with `out=`."""
    yield "", op.op, given
    if op.inplace_variant is not None:
        yield "in place", op.inplace_variant, given
        if isinstance(given[0], torch.Tensor) and given[0].dim() and given[0].shape[0] > 1:
            yield "in place, expanded", op.inplace_variant, (given[0][:1].expand(given[0].shape), *given[1:])
    if op.supports_out:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                result = op.op(*Transfer(CPU)([given[0], *given[1]]), **given[2])
            except Exception:
                return
        found = tensors((result,))
        whole = isinstance(result, torch.Tensor) or (
            isinstance(result, (list, tuple)) and len(found) == len(result) and found
        )
        if whole and all(one.layout == torch.strided for one in found):
            for name, make in OUTS.items():
                out = tree_map_only(torch.Tensor, make, result)
                out = out if isinstance(out, torch.Tensor) else tuple(out)
                yield name, op.op, (given[0], given[1], {**given[2], "out": out})


def sweep(op: Any, samples: int) -> None:
    dtype = next((dtype for dtype in DTYPES if dtype in op.dtypes), None)
    if dtype is None or op.full_name in _ARGUMENTS_STAY_ON_CPU:
        return
    random.seed(SEED)
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        examples = list(op.sample_inputs("cpu", dtype))
    for sample in random.sample(examples, min(samples, len(examples))):
        for name, function, call in forms(op, (sample.input, tuple(sample.args), dict(sample.kwargs))):
            warnings_of(function, call, CPU)  # issues the warnings that come once per process
            expected = warnings_of(function, call, CPU)
            if expected is None:
                continue
            words = [_brief(value) for value in (call[0], *call[1])]
            words += [f"{key}={_brief(value)}" for key, value in call[2].items()]
            text = f"{op.full_name}({', '.join(words)}), {name}"
            sweep_process.call(text)
            found = [warnings_of(function, call, DEVICE) for _ in range(3)]
            if None in found:
                continue  # other tests check errors
            found[0] = [one for one in found[0] or [] if "bp" not in one]  # a fallback warns once
            if any(one != expected for one in found):
                sweep_process.found(f"{text}: {found}; on the CPU {expected}")


def names(pattern: str) -> list[str]:
    left_out = (*OTHER_SHAPES, *OF_NUMBERS)
    return [name for name in load(OP_DB) if re.search(pattern, name) and name not in left_out]


if __name__ == "__main__":
    torch.set_warn_always(False)
    sweep_process.over_database(__doc__, sweep, samples=8)
