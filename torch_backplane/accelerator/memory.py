"""`torch.bp.memory`: statistics, limits, pools and history of the caching allocator.

The API is that of `torch.cuda.memory`. A `device` argument is a torch.device, a string such as "bp:1", an index, or
None for the current device. Sizes are in bytes.
"""

from __future__ import annotations

import collections
import contextlib
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import deprecated

from torch_backplane import _C
from torch_backplane.accelerator import pluggable
from torch_backplane.accelerator._utils import DeviceLike, _get_device_index
from torch_backplane.accelerator.initialization import is_initialized
from torch_backplane.accelerator.pluggable import PluggableAllocator
from torch_backplane.accelerator.sensors import memory_usage, utilization

__all__ = [
    "MemPool",
    "PluggableAllocator",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "caching_allocator_disabled",
    "caching_allocator_enable",
    "change_current_allocator",
    "empty_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "list_gpu_processes",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "memory_usage",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "use_mem_pool",
    "utilization",
]

PoolId: TypeAlias = "tuple[int, int]"

ALL_POOLS: PoolId = (0, 0)


def _index(device: DeviceLike) -> int:
    """The index of a device argument. Raises the runtime's error if there is no such device."""
    index = _get_device_index(device, optional=True)
    if index < 0:
        raise ValueError(f"a bp device index must be >= 0, but got {index}")
    return _C.checked_index(index)


# --- statistics ------------------------------------------------------------------------------------------------------


def memory_stats(device: DeviceLike = None) -> collections.OrderedDict[str, Any]:
    """Return the statistics of a device's caching allocator as a sorted dict; empty before torch.bp is initialized.

    The keys are those that torch.cuda.memory_stats documents:

    - `{allocation, segment, active, inactive_split, allocated_bytes, reserved_bytes, active_bytes,
      inactive_split_bytes, requested_bytes}.{all, large_pool, small_pool}.{current, peak, allocated, freed}`
    - `{oversize_allocations, oversize_segments}.{current, peak, allocated, freed}`
    - `num_alloc_retries`, `num_ooms`, `num_sync_all_streams`, `num_device_alloc`, `num_device_free`,
      `num_oom_rejections` (always 0 here), `max_split_size`
    - `reserved_bytes_by_private_pools.0_1.all.current` and so on, for the private pool with the id (0, 1)
    """
    return _flatten(memory_stats_as_nested_dict(device))


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    """Return the statistics of `memory_stats` as nested dicts."""
    return _C._memory_stats(_index(device)) if is_initialized() else {}


def _flatten(nested: dict[Any, Any]) -> collections.OrderedDict[str, Any]:
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if not isinstance(value, dict):
            flat[prefix] = value
            return
        for key, inner in value.items():
            name = "_".join(map(str, key)) if isinstance(key, tuple) else key
            visit(f"{prefix}.{name}" if prefix else name, inner)

    visit("", nested)
    return collections.OrderedDict(sorted(flat.items()))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Reset the totals (`allocated`, `freed`) and event counts of a device to 0."""
    _C._memory_reset_accumulated_stats(_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Reset the `peak` statistics of a device to the current values."""
    _C._memory_reset_peak_stats(_index(device))


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes that tensors occupy on a device."""
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the maximum bytes that tensors occupied since the start or the last `reset_peak_memory_stats`."""
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: DeviceLike = None) -> int:
    """Return the bytes that the caching allocator holds on a device, in tensors and in its cache."""
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the maximum bytes that the allocator held since the start or the last `reset_peak_memory_stats`."""
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


@deprecated("`torch.bp.memory_cached` has been renamed to `torch.bp.memory_reserved`", category=FutureWarning)
def memory_cached(device: DeviceLike = None) -> int:
    """Deprecated: use `memory_reserved`."""
    return memory_reserved(device)


@deprecated("`torch.bp.max_memory_cached` has been renamed to `torch.bp.max_memory_reserved`", category=FutureWarning)
def max_memory_cached(device: DeviceLike = None) -> int:
    """Deprecated: use `max_memory_reserved`."""
    return max_memory_reserved(device)


def _warn_reset(name: str) -> None:
    warnings.warn(
        f"torch.bp.{name} now calls torch.bp.reset_peak_memory_stats, which resets /all/ peak memory stats.",
        FutureWarning,
        stacklevel=3,
    )


def reset_max_memory_allocated(device: DeviceLike = None) -> None:
    """Deprecated: use `reset_peak_memory_stats`, which this calls after a warning that it resets all peaks."""
    _warn_reset("reset_max_memory_allocated")
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: DeviceLike = None) -> None:
    """Deprecated: use `reset_peak_memory_stats`, which this calls after a warning that it resets all peaks."""
    _warn_reset("reset_max_memory_cached")
    reset_peak_memory_stats(device)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return the (free, total) bytes of a device's memory, as its driver reports them."""
    free, total = _C._memory_info(_index(device))
    return free, total


# --- pinned host memory ----------------------------------------------------------------------------------------------


def host_memory_stats() -> collections.OrderedDict[str, Any]:
    """Return the statistics of the allocator of pinned host memory; empty before torch.bp is initialized.

    The keys are:

    - `{allocations, allocated_bytes, active_requests, active_bytes}.{current, peak, allocated, freed}`
    - `{host_alloc_time, host_free_time}.{total, max, min, count, avg}`, in microseconds
    - `num_host_alloc`, `num_host_free`
    """
    return _flatten(host_memory_stats_as_nested_dict())


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """Return the statistics of `host_memory_stats` as nested dicts."""
    return _C._memory_host_stats() if is_initialized() else {}


def reset_accumulated_host_memory_stats() -> None:
    """Reset the totals (`allocated`, `freed`) of the allocator of pinned host memory to 0."""
    _C._memory_reset_accumulated_host_stats()


def reset_peak_host_memory_stats() -> None:
    """Reset the `peak` statistics of the allocator of pinned host memory to the current values."""
    _C._memory_reset_peak_host_stats()


# --- memory, limits, settings ----------------------------------------------------------------------------------------


def caching_allocator_alloc(size: int, device: DeviceLike = None, stream: torch.Stream | int | None = None) -> int:
    """Allocate memory and return its address. Free it with `caching_allocator_delete`.

    Args:
        size: bytes. For 0 the address is 0.
        device: the device.
        stream: the stream that uses the memory, or the driver's handle of one; the current stream by default.

    Raises:
        torch.OutOfMemoryError: the device does not have enough memory.
        TypeError: `stream` is neither a stream nor a handle.
    """
    index = _index(device)
    if stream is None:
        stream_id = _C.current_stream(index)[0]
    elif isinstance(stream, torch.Stream):
        stream_id = stream.stream_id
    elif isinstance(stream, int):
        stream_id = _C.external_stream(index, stream)[0] if stream else 0
    else:
        raise TypeError(f"stream must be a torch.bp.Stream or an int (the driver's handle), not {stream!r}")
    return _C._memory_allocate(size, index, stream_id)


def caching_allocator_delete(mem_ptr: int) -> None:
    """Free memory that `caching_allocator_alloc` allocated.

    Args:
        mem_ptr: the address; 0 does nothing.

    Raises:
        RuntimeError: `mem_ptr` is not the address of an allocation, for example because it was freed before.
    """
    if mem_ptr:
        _C._memory_free(mem_ptr)


def caching_allocator_enable(value: bool = True) -> None:
    """Enable or disable the cache of the caching allocator.

    While it is disabled, each allocation gets its own memory from the driver, and returns it when it is freed. That is
    slow, but memory checkers need it. Does nothing before torch.bp is initialized.

    Args:
        value: whether to enable the cache.
    """
    if is_initialized():
        _C._memory_enable_caching(value)


@contextlib.contextmanager
def caching_allocator_disabled() -> Iterator[None]:
    """Context manager that disables the cache of the caching allocator."""
    before = _C._memory_is_caching_enabled()
    caching_allocator_enable(False)
    try:
        yield
    finally:
        caching_allocator_enable(before)


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Limit the memory of this process on a device to a fraction of the device's total memory.

    Allocations beyond the limit raise torch.OutOfMemoryError.

    Args:
        fraction: from 0 to 1.
        device: the device.

    Raises:
        TypeError: `fraction` is not a float.
        ValueError: `fraction` is not in [0, 1].
    """
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _C._memory_set_fraction(fraction, _index(device))


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """Return the limit set by `set_per_process_memory_fraction` or PYTORCH_ALLOC_CONF; 1.0 by default."""
    return _C._memory_get_fraction(_index(device))


def empty_cache() -> None:
    """Release all segments without allocations to the devices, so that other processes can use the memory."""
    if is_initialized():
        _C._memory_empty_cache(ALL_POOLS)


def get_allocator_backend() -> str:
    """Return "native". torch.cuda's other backend, cudaMallocAsync, is specific to CUDA."""
    return "native"


def change_current_allocator(allocator: PluggableAllocator) -> None:
    """Set the allocator from which all devices get their segments, for the rest of the process.

    Pools that were created with an allocator keep it.

    Args:
        allocator: the allocator.

    Raises:
        RuntimeError: a device has allocated memory already.
        NotImplementedError: a device does not support pluggable allocators; only devices in host memory do.
        TypeError: `allocator` is not a `PluggableAllocator`.
    """
    _C._memory_set_source(*pluggable.checked(allocator).addresses)


def list_gpu_processes(device: DeviceLike = None) -> str:
    """Not supported: drivers do not report other processes.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("bp drivers do not report other processes; mem_get_info() reports the memory of all")


def _set_allocator_settings(env: str) -> None:
    """Change settings of the caching allocator.

    Args:
        env: settings in the format of PYTORCH_ALLOC_CONF.

    Raises:
        ValueError: `env` is malformed or contains an unknown option. No setting is changed then.
    """
    _C._memory_set_settings(env)


# --- private pools ---------------------------------------------------------------------------------------------------


class MemPool:
    """A private memory pool of the current device, for allocations inside `use_mem_pool`.

    Its segments are released when neither this object nor a tensor uses them.

    Args:
        allocator: the `PluggableAllocator` that provides the segments; None for the device.
        use_on_oom: whether other allocations can use the pool's free blocks before an out-of-memory error is raised.
        no_split: whether each allocation gets a whole segment or cached block.

    Raises:
        TypeError: `allocator` is not a `PluggableAllocator`.
    """

    def __init__(
        self, allocator: PluggableAllocator | None = None, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        source = None if allocator is None else pluggable.checked(allocator)
        self._allocator = source
        self.device = _C.current_device()
        self._id: PoolId = _C._memory_new_pool_id(True)
        _C._memory_retain_pool(self.device, self._id)
        _C._memory_set_pool_options(self.device, self._id, use_on_oom, no_split)
        if source is not None:
            _C._memory_set_pool_source(self.device, self._id, *source.addresses)

    def __del__(self) -> None:
        # At exit the module's globals may be gone. The process then releases the memory.
        if hasattr(self, "_id") and _C is not None and is_initialized():
            _C._memory_release_pool(self.device, self._id)
            _C._memory_empty_cache(self._id)

    @property
    def id(self) -> PoolId:
        """The pool's id in snapshots and statistics."""
        return self._id

    @property
    def allocator(self) -> PluggableAllocator | None:
        """The allocator that provides the segments; None for the device."""
        return self._allocator

    def use_count(self) -> int:
        """Return the number of the pool's users: this object, and each active `use_mem_pool`."""
        return _C._memory_pool_use_count(self.device, self._id)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """Return the pool's segments in the format of `memory_snapshot`."""
        return memory_snapshot(self._id, include_traces)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: DeviceLike = None) -> Iterator[None]:
    """Context manager that allocates this thread's memory on a device from a pool.

    Other threads, including autograd's, are not affected.

    Args:
        pool: the pool.
        device: the device.
    """
    index = _index(device)
    _C._memory_begin_allocate_current_thread_to_pool(index, pool.id)
    try:
        yield
    finally:
        _C._memory_end_allocate_to_pool(index, pool.id)
        _C._memory_release_pool(index, pool.id)


# --- snapshots and history -------------------------------------------------------------------------------------------


def memory_snapshot(mempool_id: PoolId | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """Return the segments of all devices, or of one pool, with their blocks. `_snapshot` describes the format.

    Args:
        mempool_id: the id of a pool; None for all pools.
        include_traces: whether to include recorded stack traces.
    """
    return _C._memory_snapshot(mempool_id or ALL_POOLS, include_traces)["segments"]


def _snapshot(device: DeviceLike = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """Return all segments of all devices, and the events since `_record_memory_history`.

    The format is that of torch.cuda.memory._snapshot. torch.cuda._memory_viz and https://pytorch.org/memory_viz read
    it.

    Args:
        device: ignored, as in torch.cuda.
        augment_with_fx_traces: whether to add FX traces to the stack frames.
    """
    snapshot: Any = _C._memory_snapshot(ALL_POOLS, True)
    if augment_with_fx_traces:
        from torch._utils import _augment_memory_snapshot_stack_traces

        snapshot = _augment_memory_snapshot_stack_traces(snapshot)
    return snapshot


def _dump_snapshot(filename: str = "dump_snapshot.pickle", augment_with_fx_traces: bool = False) -> None:
    """Save `_snapshot()` in a file that https://pytorch.org/memory_viz opens."""
    with open(filename, "wb") as file:
        pickle.dump(_snapshot(augment_with_fx_traces=augment_with_fx_traces), file)


def _record_memory_history(
    enabled: str | bool | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: DeviceLike = None,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: Sequence[str] | None = None,
    record_pinned_host_memory: bool = False,
    record_cuda: bool = True,
) -> None:
    """Start or stop recording the history of the allocators of all devices.

    Args:
        enabled: None stops recording. "state" records the origin of present allocations, "all" also records every
            event. True means "all" and False means None.
        context: which stack traces to record: None for none, "state" for those of present allocations, "alloc" also for
            past allocations, "all" also for frees.
        stacks: "python" for Python frames, "all" for C++ frames, too.
        max_entries: maximum number of events. The oldest ones are overwritten.
        device: ignored, as in torch.cuda.
        clear_history: whether to delete the events recorded so far.
        compile_context, global_record_annotations: must be False.
        skip_actions: kinds of events not to record, by their names in snapshots.
        record_pinned_host_memory: must be False.
        record_cuda: whether to record the history of device memory: must be True. The name is torch.cuda's.

    Raises:
        ValueError: `enabled`, `context`, `stacks` or `skip_actions` is none of these.
        NotImplementedError: another argument has an unsupported value.
    """
    if compile_context or global_record_annotations:
        raise NotImplementedError(
            "compile_context and global_record_annotations are not supported: PyTorch has their hooks only for CUDA"
        )
    if record_pinned_host_memory or not record_cuda:
        raise NotImplementedError("the history of pinned host memory is not recorded, only that of device memory")
    if isinstance(enabled, bool):
        enabled = "all" if enabled else None
    _C._memory_record_history(enabled, context, stacks, max_entries, clear_history, list(skip_actions or ()))


def _allocation_traceback(data_ptr: int) -> list[dict[str, Any]] | None:
    """Return the stack frames of the allocation at address `data_ptr`; None if they were not recorded."""
    return _C._memory_allocation_traceback(data_ptr)


def _set_memory_metadata(metadata: str) -> None:
    """Attach a text to all events that are recorded from now on; "" for none."""
    _C._memory_set_metadata(metadata)


def _get_memory_metadata() -> str:
    """Return the text set by `_set_memory_metadata`."""
    return _C._memory_get_metadata()


def _attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Attach a function that is called before each out-of-memory error, for the rest of the process.

    Args:
        observer: called with the device index, the size of the requested segment, the memory limit (by default the
            device's total memory) and the free memory, all in bytes.
    """
    _C._memory_attach_out_of_memory_observer(observer)


def _save_segment_usage(filename: str = "output.svg", snapshot: dict[str, Any] | None = None) -> None:
    """Save a flame graph of the segments as SVG. Downloads PyTorch's script for flame graphs."""
    from torch.cuda._memory_viz import segments

    with open(filename, "w") as file:
        file.write(segments(snapshot or _snapshot()))


def _save_memory_usage(filename: str = "output.svg", snapshot: dict[str, Any] | None = None) -> None:
    """Save a flame graph of the allocations as SVG. Downloads PyTorch's script for flame graphs."""
    from torch.cuda._memory_viz import memory

    with open(filename, "w") as file:
        file.write(memory(snapshot or _snapshot()))


# --- the table -------------------------------------------------------------------------------------------------------

SUMMARY_ROWS = (  # statistic, title, unit
    ("allocated_bytes", "Allocated memory", "bytes"),
    ("active_bytes", "Active memory", "bytes"),
    ("requested_bytes", "Requested memory", "bytes"),
    ("reserved_bytes", "Reserved memory", "bytes"),
    ("inactive_split_bytes", "Non-releasable memory", "bytes"),
    ("allocation", "Allocations", "count"),
    ("active", "Active allocs", "count"),
    ("segment", "Reserved segments", "count"),
    ("inactive_split", "Non-releasable allocs", "count"),
    ("oversize_allocations", "Oversize allocations", "count"),
    ("oversize_segments", "Oversize segments", "count"),
)
SUMMARY_POOLS = (("all", None), ("large_pool", "from large pool"), ("small_pool", "from small pool"))
SUMMARY_COLUMNS = {"current": "Cur Usage", "peak": "Peak Usage", "allocated": "Tot Alloc", "freed": "Tot Freed"}
UNITS = {"bytes": (1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")), "count": (1000, ("", "K", "M"))}


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return a printable table of the statistics of `memory_stats`.

    Args:
        device: the device.
        abbreviated: whether to omit the statistics of the large and the small pool.
    """
    index = _index(device)
    stats = memory_stats(index)
    width = 75
    ooms = f"bp OOMs: {stats['num_ooms']}"
    retries = f"allocation retries: {stats['num_alloc_retries']}"
    lines = [
        "=" * width,
        f"PyTorch bp memory summary, device ID {index}".center(width),
        "-" * width,
        f"{ooms:^36} | {retries:^36}",
        "=" * width,
        " | ".join(["Metric".center(22), *(title.center(10) for title in SUMMARY_COLUMNS.values())]).ljust(width),
    ]
    for statistic, title, unit in SUMMARY_ROWS:
        lines.append("-" * width)
        by_pool = f"{statistic}.all.current" in stats
        scale: dict[str, int] = {}
        for pool, part in SUMMARY_POOLS if by_pool and not abbreviated else SUMMARY_POOLS[:1]:
            cells = []
            for column in SUMMARY_COLUMNS:
                value = stats[f"{statistic}.{pool}.{column}" if by_pool else f"{statistic}.{column}"]
                # Pools are shown in the unit of the total.
                cells.append(_format(value, scale.setdefault(column, value), unit))
            lines.append(" | ".join([f" {title if part is None else '     ' + part:<21}", *cells]).ljust(width))
    lines.append("=" * width)
    return "\n".join(f"|{line}|" for line in lines) + "\n"


def _format(value: int, scale_by: int, unit: str) -> str:
    """Formats `value` in 10 characters, in the unit that suits `scale_by`."""
    base, names = UNITS[unit]
    limit = 768 * 1024 if base == 1024 else 750 * 1000
    step = 0
    while scale_by >= limit and step + 1 < len(names):
        scale_by //= base
        step += 1
    return f"{value // base**step:6d} {names[step]:<3}"
