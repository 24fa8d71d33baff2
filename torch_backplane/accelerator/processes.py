"""Sending bp tensors to other processes with torch.multiprocessing.

PyTorch's reducer of tensors sends a tensor as its storage and its view of it, so only storages need a way:

- Host devices: at the first send, the storage's contents move to shared memory, as those of a CPU storage do. Sender
  and receivers then use the same memory, which is freed when the last of them frees it or ends.
- Devices whose driver has the INTERPROCESS functions: the receiver opens the segment. The sender keeps the storage
  until no receiver uses it: each receiver holds the reading end of a pipe, which the system closes if the process is
  killed.
- All others: NotImplementedError.

A sender waits until its device has done all submitted work, so a receiver sees it. Later writes are unordered between
processes, as with CUDA.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from multiprocessing import context, reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

from torch_backplane import _C

ONE_PROCESS = (
    "bp memory belongs to the process that allocated it and cannot be shared with another process: "
    "send tensor.cpu(), or share a CPU tensor and copy it to bp in the other process"
)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _remember(key: Any, storage: torch.UntypedStorage) -> None:
    reductions.shared_cache[key] = reductions.StorageWeakRef(storage)


def _known(key: Any) -> torch.UntypedStorage | None:
    return reductions.storage_from_cache(torch.UntypedStorage, key)  # type: ignore[no-any-return]


# --- host devices ----------------------------------------------------------------------------------------------------


_moving = threading.Lock()  # each queue sends in a separate thread, and all must share the same memory


def _reduce_in_host_memory(storage: torch.UntypedStorage) -> Any:
    contents = _bytes_of(storage)
    with _moving:
        owner = _C.owner_of(contents)
        if owner is None:
            owner = _bytes_of(torch.UntypedStorage._new_shared(storage.nbytes())).copy_(contents)
            _C.move_to(contents, owner)
    shared = owner.untyped_storage()
    _remember((storage.device.index, shared._cdata), storage)
    return _rebuild_in_host_memory, (storage.device.index, shared)


def _rebuild_in_host_memory(index: int, shared: torch.UntypedStorage) -> torch.UntypedStorage:
    torch.bp.init()  # type: ignore[attr-defined]  # raises in a process that was forked from one that uses bp
    key = (index, shared._cdata)
    storage = _known(key)
    if storage is None:
        storage = _C.tensor_in(index, _bytes_of(shared), 0, shared.nbytes()).untyped_storage()
        _remember(key, storage)
    return storage


# --- drivers with interprocess handles -------------------------------------------------------------------------------

_sent: dict[int, torch.UntypedStorage] = {}  # by the pipe's writing end: what receivers may still use


def collect() -> None:
    """Drop the storages that no receiver uses any longer."""
    waiting = select.poll()
    for descriptor in list(_sent):  # a copy: other threads send, too
        waiting.register(descriptor, 0)  # POLLERR, always reported: every reading end is closed
    for descriptor, _ in waiting.poll(0):
        if _sent.pop(descriptor, None) is not None:
            os.close(descriptor)


def _pipe_to_receiver(storage: torch.UntypedStorage) -> Any:
    """Keep `storage` until the receiver of the returned object, and whoever it was copied to, closes it or ends."""
    reading, writing = os.pipe()
    _sent[writing] = storage
    sent = reduction.DupFd(reading)
    starting = context.get_spawning_popen()
    if starting is None:
        os.close(reading)  # DupFd has made a copy
    else:
        weakref.finalize(starting, os.close, reading)  # inherited by the process that is being started
    return sent


def _reduce_by_handle(storage: torch.UntypedStorage) -> Any:
    collect()
    index = storage.device.index
    handle, segment_bytes, offset, nbytes = _C.export_memory(_bytes_of(storage))
    _remember((index, handle, offset), storage)
    return _rebuild_by_handle, (index, handle, segment_bytes, offset, nbytes, _pipe_to_receiver(storage))


def _rebuild_by_handle(
    index: int, handle: bytes, segment_bytes: int, offset: int, nbytes: int, pipe: Any
) -> torch.UntypedStorage:
    descriptor = pipe.detach()
    try:
        storage = _known((index, handle, offset))
        if storage is not None:
            return storage  # which has its own pipe, or is the sent one
        segment = _known((index, handle))
        if segment is None:  # a handle can be opened only once
            segment = _C.import_memory(index, handle, segment_bytes, 0, segment_bytes).untyped_storage()
            _remember((index, handle), segment)
        storage = _C.tensor_in(index, _bytes_of(segment), offset, nbytes, descriptor).untyped_storage()
        descriptor = -1
        _remember((index, handle, offset), storage)
        return storage
    finally:
        if descriptor >= 0:
            os.close(descriptor)


# --- all storages ----------------------------------------------------------------------------------------------------


def _rebuild_empty(index: int) -> torch.UntypedStorage:
    return torch.UntypedStorage(0, device=f"bp:{index}")


def _reduce(storage: torch.UntypedStorage) -> Any:
    if storage.device.type != "bp":
        return reductions.reduce_storage(storage)
    index = storage.device.index
    torch.bp.synchronize(index)  # type: ignore[attr-defined]
    if storage.nbytes() == 0:
        return _rebuild_empty, (index,)
    if _C.uses_host_memory(index):
        return _reduce_in_host_memory(storage)
    if _C.shares_between_processes(index):
        return _reduce_by_handle(storage)
    raise NotImplementedError(ONE_PROCESS)


def install() -> None:
    """Register the reducer of storages, which is PyTorch's for all other devices."""
    reduction.register(torch.UntypedStorage, _reduce)
