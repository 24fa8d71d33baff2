"""Runs calls that can crash in child processes, and sends their results back.

Tensors are sent with their whole storages, and shared storages stay shared. `torch.save` cannot do this: it refuses
storages shared by tensors of different dtypes, and zero tensors without memory.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, TypeVar

import torch

CPU_SECONDS = 60  # limit for one call in a child

Call = TypeVar("Call")


def in_children(calls: Sequence[Call], answer: Callable[[Call], Any]) -> Iterator[Any]:
    """Yield answer(call) for each call, evaluated in child processes.

    A child evaluates the calls in order until it crashes. The call that it crashed in is tried once more in a new
    child. None is yielded if a call crashes a child as its first call, or if its answer cannot be read.
    """
    done = 0
    while done < len(calls):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a fork in a process with threads; the child uses only the CPU
            child = os.fork()
        if child == 0:
            try:
                os.close(reading)
                with os.fdopen(writing, "wb") as answers:
                    for call in calls[done:]:
                        signal.alarm(CPU_SECONDS)  # the parent has no timeout
                        send(answers, answer(call))
            finally:
                os._exit(0)
        os.close(writing)
        begin = done
        try:
            with os.fdopen(reading, "rb") as answers:
                while done < len(calls) and (found := received(answers)) is not None:
                    done += 1
                    yield found
        finally:
            os.waitpid(child, 0)
        if done == begin:
            done += 1
            yield None


def send(to: IO[bytes], tree: Any) -> None:
    """Write the length of the pickled tree, and the pickled tree."""
    memory = io.BytesIO()
    _Pickler(memory, protocol=pickle.HIGHEST_PROTOCOL).dump(tree)
    to.write(memory.tell().to_bytes(8, "little") + memory.getvalue())
    to.flush()


def received(begun: IO[bytes]) -> Any:
    """Read a tree. Returns None if the sender has ended, or sent corrupt tensors, overwritten by a faulty kernel."""
    length = int.from_bytes(begun.read(8), "little")
    content = begun.read(length) if length else b""
    try:
        return pickle.loads(content) if length and len(content) == length else None
    except Exception:
        return None


class _Memory:
    """A storage that is pickled once for all tensors that share it."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> Any:
        numbers = torch.empty(0, dtype=torch.uint8).set_(self.storage, 0, (self.storage.nbytes(),), (1,))
        return _restored, (numbers.numpy().tobytes(),)


class _Pickler(pickle.Pickler):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.memories: dict[int, _Memory] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        value = value.detach()
        if value.layout != torch.strided:
            saved = io.BytesIO()
            torch.save(value, saved)
            return _loaded, (saved.getvalue(),)
        shape = tuple(value.shape)
        if value._is_zerotensor():
            return _zeros, (shape, value.dtype)
        storage = value.untyped_storage()
        memory = self.memories.setdefault(storage._cdata, _Memory(storage))
        place = value.storage_offset(), shape, value.stride()
        return _tensor, (memory, value.dtype, *place, value.is_conj(), value.is_neg())


def _restored(content: bytes) -> _Memory:
    numbers = torch.empty(len(content), dtype=torch.uint8)
    if content:
        numbers.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return _Memory(numbers.untyped_storage())


def _tensor(
    memory: _Memory, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *lazy: bool
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(memory.storage, offset, shape, stride)
    conj, neg = lazy
    tensor = torch._conj(tensor) if conj else tensor
    return torch._neg_view(tensor) if neg else tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch._efficientzerotensor(shape, dtype=dtype)


def _loaded(content: bytes) -> Any:
    return torch.load(io.BytesIO(content))
