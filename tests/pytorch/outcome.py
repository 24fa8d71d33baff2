"""Records the outcome of a call on one device: results, strides, warnings and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_backplane.conformance.transfer import Transfer, tensors

# Warnings to compare. Others depend on the machine, or are emitted only once per process.
_ABOUT_THE_CALL = ("An output with one or more elements was resized", "Casting complex values to real discards")


def to_device(tree: Any, device: str) -> Any:
    return Transfer(torch.device(device))(tree)


@dataclass
class Outcome:
    """The outcome of one call.

    Args:
        results: the results on the CPU.
        strides: the strides of the results; None for results that are not strided tensors.
        warned: the warnings to compare.
        error: the type of the raised error, or None.
        text: the first line of the error's message.
    """

    results: list[torch.Tensor] = field(default_factory=list)
    strides: list[Any] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    error: type[BaseException] | None = None
    text: str = ""

    def __str__(self) -> str:
        shapes = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in self.results]
        raised = f"{self.error.__name__}: {self.text}" if self.error else "nothing"
        return f"{shapes} strides {self.strides} warned {self.warned} raised {raised}"


def outcome(function: Callable[..., Any], *arguments: Any, **options: Any) -> Outcome:
    """Calls `function(*arguments, **options)`, waits for the devices, and returns the outcome."""
    found = Outcome()
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        try:
            result = function(*arguments, **options)
            torch.accelerator.synchronize()  # kernels report invalid indices
        except Exception as error:  # all types: the type is compared
            found.error, found.text = type(error), str(error).splitlines()[0] if str(error) else ""
            result = ()
        finally:
            torch.set_warn_always(before)
    texts = [str(one.message) for one in record]
    found.warned = sorted({begin for begin in _ABOUT_THE_CALL for text in texts if text.startswith(begin)})
    for tensor in tensors(result):
        found.results.append(tensor.detach().cpu().resolve_conj().resolve_neg())
        found.strides.append(tensor.stride() if tensor.layout == torch.strided else None)
    return found


def samples_of(op: Any, dtype: torch.dtype, most: int, **options: Any) -> list[Any]:
    """Returns at most `most` of the operator's samples on the CPU, at regular intervals."""
    found = list(op.sample_inputs("cpu", dtype, **options))
    return found[:: max(1, -(-len(found) // most))] if found else []
