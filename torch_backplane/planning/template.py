"""Templates, launched; and the words in which kernels report an index out of range."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels.templates import errors
from torch_backplane.kernels.templates.source import Call
from torch_backplane.planning.launch import dialect_of, launch

_words: dict[int, torch.Tensor] = {}
_lock = threading.Lock()


def run_template(
    template: Callable[..., Call], device: torch.device, *arguments: Any, name: str, **options: Any
) -> None:
    """Launches `template(dialect of the device, *arguments, **options)`; `name` is the operator's, for errors."""
    call = template(dialect_of(device), *arguments, **options)
    launch(call.kernel, call.tensors, call.numbers, [call.items], [call.group], name=name)


def error_words(device: torch.device) -> torch.Tensor:
    """The device's words for errors (kernels/templates/errors.py), for a kernel that a planner launches."""
    assert device.index is not None
    with _lock:
        if device.index not in _words:
            # In another thread, as what this one allocates may be recorded as part of a plan.
            thread = threading.Thread(target=_make_words, args=(device,))
            thread.start()
            thread.join()
    _C.keep_in_plan(_words[device.index])
    return _words[device.index]


def _make_words(device: torch.device) -> None:
    words = torch.zeros(errors.WORDS, dtype=torch.int32).to(device)
    torch.accelerator.synchronize(device)
    _C.watch_error_words(words, errors.message)  # the socket throws what they say at the next synchronization
    _words[device.index] = words


@contextmanager
def contiguous_result(out: torch.Tensor) -> Iterator[torch.Tensor]:
    """A contiguous tensor to write what `out` shall hold to: itself, or one that is copied to it afterwards."""
    if out.is_contiguous():
        yield out
        return
    result = torch.empty_like(out, memory_format=torch.contiguous_format)
    yield result
    out.copy_(result)
