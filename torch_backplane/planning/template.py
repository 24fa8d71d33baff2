"""Launches of kernel templates, and the error words in which kernels report an invalid index or value."""

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
    """Launches what `template(dialect, *arguments, **options)` returns, with the device's dialect.

    Args:
        template: returns a launch, or a list of launches.
        device: the device.
        arguments, options: for the template.
        name: the operator's name, for errors.
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
    """Launches a kernel that runs the C statements `body` for each `item` in [0, items).

    Args:
        name: the operator's name, for errors and the kernel; a C identifier.
        body: statements as described in `kernels.templates.source`.
        items: the number of work items. Nothing is launched if it is 0.
        outputs, inputs: tensors of one device, by their names in the text. Outputs can be read, too.
        integers: sizes, strides and other integers of type index_t, by name. `items` is always defined.
        numbers: other Python numbers and `Number`s, by name, each with its dtype in the text.
        value: the dtype of value_t in the text.
        functions: text before the kernel.
        constants: values for #define lines. Another value builds another kernel.
        strided: names of tensors whose strides the text handles itself. All others must be contiguous.
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
    """Returns the device's error words (kernels/templates/errors.py), and keeps them alive in the planner's plan."""
    assert device.index is not None
    with _lock:
        if device.index not in _words:
            # In another thread, so that the allocation is not recorded in the plan of this thread's planner.
            thread = threading.Thread(target=_make_words, args=(device,))
            thread.start()
            thread.join()
    runtime.keep_in_plan(_words[device.index])
    return _words[device.index]


def error_report(device: torch.device, operator: str) -> errors.Report:
    """Returns the place where a kernel reports an error of the operator."""
    return errors.Report(error_words(device), operator)


def _make_words(device: torch.device) -> None:
    words = torch.zeros(errors.WORDS, dtype=torch.int32).to(device)  # only waits for this thread's stream
    _C.watch_error_words(words, errors.error)  # the runtime raises the reported error at the next synchronization
    _words[device.index] = words


def expect_values(*checks: tuple[torch.Tensor, str, str]) -> None:
    """Checks the values of tensors on the device. If a check fails, the next synchronization raises a RuntimeError.

    Args:
        checks: (tensor, condition on each element x as in `kernels.templates.values`, error message).
    """
    looked_at = [Check(dense(tensor), holds, text) for tensor, holds, text in checks if tensor.numel()]
    if looked_at:
        device = looked_at[0].tensor.device
        run_template(check_values, device, looked_at, error_words(device), name="check_values")


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if it is dense in any order of dimensions, else a contiguous copy."""
    return tensor if torch.empty_like(tensor, device="meta").stride() == tensor.stride() else tensor.contiguous()


@contextmanager
def contiguous_result(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """Context manager that yields a contiguous tensor to write the result to.

    That is `out` itself if it is contiguous, else a temporary tensor, which is copied to `out` on exit.
    """
    if out.is_contiguous():
        yield out
        return
    result = torch.empty_like(out, memory_format=torch.contiguous_format)
    yield result
    out.copy_(result)
