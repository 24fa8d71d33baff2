"""Templates, launched; and the words in which kernels report an index out of range or a refused value."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels.templates import errors
from torch_backplane.kernels.templates.source import Launch, LaunchSpec
from torch_backplane.kernels.templates.values import Check, check_values
from torch_backplane.planning import runtime
from torch_backplane.planning.launch import dialect_of, launch

_words: dict[int, torch.Tensor] = {}
_lock = threading.Lock()


def run_template(
    template: Callable[..., Launch | list[Launch]], device: torch.device, *arguments: Any, name: str, **options: Any
) -> None:
    """Makes the launches of `template(dialect of the device, *arguments, **options)`; `name` is the operator's, for
    errors.
    """
    made = template(dialect_of(device), *arguments, **options)
    for one in [made] if isinstance(made, Launch) else made:
        launch(one.kernel, one.tensors, one.numbers, [one.global_size], [one.group_size], name=name)


def run_kernel(
    name: str,
    body: str,
    *,
    items: int,
    outputs: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor] | None = None,
    integers: Mapping[str, int] | None = None,
    numbers: Mapping[str, tuple[torch.dtype, Any]] | None = None,
    value: torch.dtype,
    functions: str = "",
    constants: Mapping[str, int | str] | None = None,
    strided: Collection[str] = (),
) -> None:
    """Runs the statements `body`, C as in `kernels.templates.source`, for each `item` from 0 to `items`.

    Args:
        name: the operator's, for errors and for the kernel; a C identifier.
        outputs, inputs: tensors of one device, by the names that the text has for them. Outputs may be read, too.
        integers: sizes, strides and the like, as index_t; `items` is one of them.
        numbers: others, Python's or `Number`s, each with the dtype that it has in the text.
        value: the text's value_t.
        functions: text before the kernel.
        constants: #define lines; another value is another kernel to build.
        strided: the tensors whose strides the text knows, by `integers`. All others have to be contiguous.
    """
    if items == 0:
        return
    device = next(iter(outputs.values())).device
    made = LaunchSpec(
        name,
        dialect_of(device),
        outputs=outputs,
        inputs=inputs or {},
        integers=integers or {},
        numbers=numbers,
        body=body,
        items=items,
        value=value,
        functions=functions,
        constants=constants,
        strided=strided,
    ).launch()
    launch(made.kernel, made.tensors, made.numbers, [made.global_size], [made.group_size], name=name)


def error_words(device: torch.device) -> torch.Tensor:
    """The device's words for errors (kernels/templates/errors.py), for a kernel that a planner launches."""
    assert device.index is not None
    with _lock:
        if device.index not in _words:
            # In another thread, as what this one allocates may be recorded as part of a plan.
            thread = threading.Thread(target=_make_words, args=(device,))
            thread.start()
            thread.join()
    runtime.keep_in_plan(_words[device.index])
    return _words[device.index]


def error_report(device: torch.device, operator: str) -> errors.Report:
    """Where a kernel reports an error of the operator."""
    return errors.Report(error_words(device), operator)


def _make_words(device: torch.device) -> None:
    words = torch.zeros(errors.WORDS, dtype=torch.int32).to(device)  # waits for this thread's stream, and for no other
    _C.watch_error_words(words, errors.error)  # the runtime throws what they say at the next synchronization
    _words[device.index] = words


def expect_values(*checks: tuple[torch.Tensor, str, str]) -> None:
    """Has a RuntimeError raised at the next synchronization where the values in memory are not as they must be.

    Args:
        checks: (tensor, condition of each element x as in `kernels.templates.values`, words of the error).
    """
    looked_at = [Check(dense(tensor), holds, text) for tensor, holds, text in checks if tensor.numel()]
    if looked_at:
        device = looked_at[0].tensor.device
        run_template(check_values, device, looked_at, error_words(device), name="check_values")


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where its elements lie side by side, in any order of the dimensions, else a copy."""
    return tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.contiguous()


@contextmanager
def contiguous_result(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """A contiguous tensor to write what `out` shall hold to: itself, or one that is copied to it afterwards."""
    if out.is_contiguous():
        yield out
        return
    result = torch.empty_like(out, memory_format=torch.contiguous_format)
    yield result
    out.copy_(result)
