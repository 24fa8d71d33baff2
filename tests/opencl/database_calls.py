"""Collects the ATen calls that the samples of PyTorch's operator database make on the CPU, for sweeps over them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

_SAMPLES = 4


class Call(NamedTuple):
    """A call of an operator that mutates none of its arguments. All its tensors are strided."""

    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: tuple[Any, ...]


class _Listener(TorchDispatchMode):
    def __init__(self, wanted: Callable[[Call], bool], most: int) -> None:
        super().__init__()
        self._wanted, self._most = wanted, most
        self.found: dict[str, list[Call]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        results = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        name = function.name()
        calls = self.found.setdefault(name, [])
        if len(calls) < self._most and name.startswith("aten::") and not function._schema.is_mutable:
            call = Call(function, args, kwargs or {}, results)
            tensors = [one for one in (*args, *results) if isinstance(one, torch.Tensor)]
            if all(one.layout == torch.strided for one in tensors) and self._wanted(call):
                calls.append(call)
        return returned


def calls(wanted: Callable[[Call], bool], most: int = 1) -> list[Call]:
    """Returns the float32 calls for which `wanted` is true, at most `most` of each operator."""
    listener = _Listener(wanted, most)
    for op in op_db:
        try:
            for sample in islice(op.sample_inputs("cpu", torch.float32), _SAMPLES):
                with listener:
                    op(sample.input, *sample.args, **sample.kwargs)
        except Exception:  # no float32 samples, or not supported on the CPU
            continue
    return [call for found in listener.found.values() for call in found]
