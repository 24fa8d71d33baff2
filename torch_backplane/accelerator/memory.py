"""`torch.bp.memory`: statistics, limits, pools and history of the caching allocator.

The names, arguments and results are those of `torch.cuda.memory`. `device` is always a torch.device, a string such as
"bp:1", an index, or None for the current device; sizes are in bytes.
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
    """The index that a device argument means; raises as the runtime does where there is no such device."""
    index = _get_device_index(device, optional=True)
    if index < 0:
        raise ValueError(f"a bp device index must be >= 0, and got {index}")
    return _C.checked_index(index)


# --- statistics ------------------------------------------------------------------------------------------------------


def memory_stats(device: DeviceLike = None) -> collections.OrderedDict[str, Any]:
    """The statistics of a device's allocator by name, sorted; empty before devices are first used.

    The keys are those that torch.cuda.memory_stats documents: `{allocation, segment, active, inactive_split,
    allocated_bytes, reserved_bytes, active_bytes, inactive_split_bytes, requested_bytes}.{all, large_pool, small_pool}.
    {current, peak, allocated, freed}`, `{oversize_allocations, oversize_segments}.{current, peak, allocated, freed}`,
    and the counts `num_alloc_retries`, `num_ooms`, `num_sync_all_streams`, `num_device_alloc`, `num_device_free`,
    `num_oom_rejections` (always 0 here), `max_split_size`. What a private pool has reserved is under
    `reserved_bytes_by_private_pools.0_1.all.current` and so on for the pool with id (0, 1).
    """
    return _flatten(memory_stats_as_nested_dict(device))


def memory_stats_as_nested_dict(device: DeviceLike = None) -> dict[str, Any]:
    """`memory_stats` as dicts of dicts."""
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
    """Set the `allocated` and `freed` totals and the event counts of a device to 0."""
    _C._memory_reset_accumulated_stats(_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Set the `peak` values of a device to what is current."""
    _C._memory_reset_peak_stats(_index(device))


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes that tensors occupy now."""
    return memory_stats(device).get("allocated_bytes.all.current", 0)


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes that tensors have occupied since the start or `reset_peak_memory_stats`."""
    return memory_stats(device).get("allocated_bytes.all.peak", 0)


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes that the allocator holds: in tensors and cached."""
    return memory_stats(device).get("reserved_bytes.all.current", 0)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The most bytes that the allocator has held since the start or `reset_peak_memory_stats`."""
    return memory_stats(device).get("reserved_bytes.all.peak", 0)


@deprecated("`torch.bp.memory_cached` has been renamed to `torch.bp.memory_reserved`", category=FutureWarning)
def memory_cached(device: DeviceLike = None) -> int:
    """The old name of `memory_reserved`."""
    return memory_reserved(device)


@deprecated("`torch.bp.max_memory_cached` has been renamed to `torch.bp.max_memory_reserved`", category=FutureWarning)
def max_memory_cached(device: DeviceLike = None) -> int:
    """The old name of `max_memory_reserved`."""
    return max_memory_reserved(device)


def _warn_reset(name: str) -> None:
    warnings.warn(
        f"torch.bp.{name} now calls torch.bp.reset_peak_memory_stats, which resets /all/ peak memory stats.",
        FutureWarning,
        stacklevel=3,
    )


def reset_max_memory_allocated(device: DeviceLike = None) -> None:
    """Call `reset_peak_memory_stats`, with a warning that it resets every peak."""
    _warn_reset("reset_max_memory_allocated")
    reset_peak_memory_stats(device)


def reset_max_memory_cached(device: DeviceLike = None) -> None:
    """Call `reset_peak_memory_stats`, with a warning that it resets every peak."""
    _warn_reset("reset_max_memory_cached")
    reset_peak_memory_stats(device)


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes of the device, as its driver tells them."""
    free, total = _C._memory_info(_index(device))
    return free, total


# --- pinned host memory ----------------------------------------------------------------------------------------------


def host_memory_stats() -> collections.OrderedDict[str, Any]:
    """The statistics of the pinned host allocator by name: `{allocations, allocated_bytes, active_requests,
    active_bytes}.{current, peak, allocated, freed}`, `{host_alloc_time, host_free_time}.{total, max, min, count, avg}`
    in microseconds, `num_host_alloc`, `num_host_free`. Empty before devices are first used.
    """
    return _flatten(host_memory_stats_as_nested_dict())


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """`host_memory_stats` as dicts of dicts."""
    return _C._memory_host_stats() if is_initialized() else {}


def reset_accumulated_host_memory_stats() -> None:
    """Set the totals of the pinned host allocator to 0."""
    _C._memory_reset_accumulated_host_stats()


def reset_peak_host_memory_stats() -> None:
    """Set the peaks of the pinned host allocator to what is current."""
    _C._memory_reset_peak_host_stats()


# --- memory, limits, settings ----------------------------------------------------------------------------------------


def caching_allocator_alloc(size: int, device: DeviceLike = None, stream: torch.Stream | int | None = None) -> int:
    """The address of `size` new bytes, to be given back with `caching_allocator_delete`.

    Args:
        size: bytes; 0 gives address 0.
        device: where.
        stream: the stream whose work may use the memory, or the driver's handle of it; by default the current one.

    Raises:
        torch.OutOfMemoryError: the device has not that much.
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
    """Give back what `caching_allocator_alloc` returned.

    Raises:
        RuntimeError: this is not the address of an allocation, for example because it was freed before.
    """
    if mem_ptr:
        _C._memory_free(mem_ptr)


def caching_allocator_enable(value: bool = True) -> None:
    """Switch caching on or off.

    While it is off, each allocation gets memory of its own from the driver, which goes back when it is freed: slow, and
    what memory checkers need.
    """
    if is_initialized():
        _C._memory_enable_caching(value)


@contextlib.contextmanager
def caching_allocator_disabled() -> Iterator[None]:
    """Allocate without caching inside the `with` block."""
    before = _C._memory_is_caching_enabled()
    caching_allocator_enable(False)
    try:
        yield
    finally:
        caching_allocator_enable(before)


def set_per_process_memory_fraction(fraction: float, device: DeviceLike = None) -> None:
    """Let this process have at most `fraction` (0 to 1) of a device's total memory; beyond that, out-of-memory errors.

    Raises:
        TypeError: `fraction` is not a float.
        ValueError: it is not from 0 to 1.
    """
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _C._memory_set_fraction(fraction, _index(device))


def get_per_process_memory_fraction(device: DeviceLike = None) -> float:
    """What `set_per_process_memory_fraction` or PYTORCH_ALLOC_CONF has set; 1.0 by default."""
    return _C._memory_get_fraction(_index(device))


def empty_cache() -> None:
    """Give every segment in which nothing is allocated back to the devices."""
    if is_initialized():
        _C._memory_empty_cache(ALL_POOLS)


def get_allocator_backend() -> str:
    """Always "native": torch.cuda's other one, cudaMallocAsync, is a feature of CUDA."""
    return "native"


def change_current_allocator(allocator: PluggableAllocator) -> None:
    """Takes the memory of all devices from an allocator, for the rest of the process; pools that have one keep theirs.

    Raises:
        RuntimeError: a device has given memory already.
        NotImplementedError: a device knows only its driver's memory, as all do that are not in host memory.
        TypeError: it is no `PluggableAllocator`.
    """
    _C._memory_set_source(*pluggable.checked(allocator).addresses)


def list_gpu_processes(device: DeviceLike = None) -> str:
    """Not possible: drivers see only their own process.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("bp drivers cannot tell which other processes use a device; mem_get_info() tells the sum")


def memory_usage(device: DeviceLike = None) -> int:
    """Not possible: how busy the memory is, drivers cannot tell.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("bp drivers cannot tell how much of the time a device's memory is being read or written")


def utilization(device: DeviceLike = None) -> int:
    """Not possible: how busy the device is, drivers cannot tell.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError("bp drivers cannot tell how much of the time a device is busy")


def _set_allocator_settings(env: str) -> None:
    """Change settings at run time; `env` is as in PYTORCH_ALLOC_CONF.

    Raises:
        ValueError: it is malformed, or names an unknown option. Nothing is changed then.
    """
    _C._memory_set_settings(env)


# --- private pools ---------------------------------------------------------------------------------------------------


class MemPool:
    """Memory of its own, which only allocations inside `use_mem_pool` use.

    Its segments go back to the device when neither this object nor a tensor needs them any more.

    Args:
        allocator: a `PluggableAllocator`, where its segments come from; None: the device.
        use_on_oom: its free blocks serve other allocations before an out-of-memory error would be raised.
        no_split: every allocation takes a whole segment or cached block.
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
        # At exit the module's globals may be gone, and the memory goes with the process anyway.
        if hasattr(self, "_id") and _C is not None and is_initialized():
            _C._memory_release_pool(self.device, self._id)
            _C._memory_empty_cache(self._id)

    @property
    def id(self) -> PoolId:
        """Identifies the pool in snapshots and statistics."""
        return self._id

    @property
    def allocator(self) -> PluggableAllocator | None:
        """Where its segments come from; None: the device."""
        return self._allocator

    def use_count(self) -> int:
        """How many users the pool has: this object, and each `use_mem_pool` that is under way."""
        return _C._memory_pool_use_count(self.device, self._id)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """The pool's segments, as `memory_snapshot` gives them."""
        return memory_snapshot(self._id, include_traces)


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: DeviceLike = None) -> Iterator[None]:
    """Take the allocations of this thread on one device from a pool.

    Other threads, autograd's included, allocate as before.
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
    """The segments of all devices, or of one pool, each with its blocks; see `_snapshot` for the format."""
    return _C._memory_snapshot(mempool_id or ALL_POOLS, include_traces)["segments"]


def _snapshot(device: DeviceLike = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    """All segments, and what has happened since `_record_memory_history`, of all devices.

    The format is that of torch.cuda.memory._snapshot, which documents it; torch.cuda._memory_viz and
    https://pytorch.org/memory_viz read it. `device` is ignored, as torch.cuda ignores it.
    """
    snapshot: Any = _C._memory_snapshot(ALL_POOLS, True)
    if augment_with_fx_traces:
        from torch._utils import _augment_memory_snapshot_stack_traces

        snapshot = _augment_memory_snapshot_stack_traces(snapshot)
    return snapshot


def _dump_snapshot(filename: str = "dump_snapshot.pickle", augment_with_fx_traces: bool = False) -> None:
    """Write `_snapshot()` to a file that https://pytorch.org/memory_viz opens."""
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
) -> None:
    """Start or stop recording what the allocators of all devices do.

    Args:
        enabled: None stops; "state" keeps where the present allocations come from; "all" keeps every event too. A bool
            means "all" or None.
        context: for what a stack is kept: None, "state" (present allocations), "alloc" (also past ones), "all" (also
            frees).
        stacks: "python", or "all" for C++ frames too.
        max_entries: how many events to keep; then the oldest are overwritten.
        device: ignored, as torch.cuda ignores it.
        clear_history: forget what was recorded before.
        compile_context, global_record_annotations: must be False.
        skip_actions: kinds of events not to record, by their names in the snapshot.

    Raises:
        ValueError: a word that is not among these.
        NotImplementedError: compile_context or global_record_annotations is asked for.
    """
    if compile_context or global_record_annotations:
        raise NotImplementedError(
            "compile_context and global_record_annotations are recorded by hooks that PyTorch offers only to torch.cuda"
        )
    if isinstance(enabled, bool):
        enabled = "all" if enabled else None
    _C._memory_record_history(enabled, context, stacks, max_entries, clear_history, list(skip_actions or ()))


def _allocation_traceback(data_ptr: int) -> list[dict[str, Any]] | None:
    """The frames where the allocation that starts at `data_ptr` was made; None where that was not recorded."""
    return _C._memory_allocation_traceback(data_ptr)


def _set_memory_metadata(metadata: str) -> None:
    """Attach a text to every event that is recorded from now on; "" for none."""
    _C._memory_set_metadata(metadata)


def _get_memory_metadata() -> str:
    """The text that `_set_memory_metadata` has set."""
    return _C._memory_get_metadata()


def _attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    """Call `observer(device index, bytes wanted, bytes allowed or in all, bytes free)` before each out-of-memory error.

    It stays attached for the life of the process.
    """
    _C._memory_attach_out_of_memory_observer(observer)


def _save_segment_usage(filename: str = "output.svg", snapshot: dict[str, Any] | None = None) -> None:
    """Write a flame graph of the segments as SVG (fetches PyTorch's script for it from the network)."""
    from torch.cuda._memory_viz import segments

    with open(filename, "w") as file:
        file.write(segments(snapshot or _snapshot()))


def _save_memory_usage(filename: str = "output.svg", snapshot: dict[str, Any] | None = None) -> None:
    """Write a flame graph of the allocations as SVG (fetches PyTorch's script for it from the network)."""
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
    """A printable table of `memory_stats`.

    Args:
        device: of which device.
        abbreviated: leave out the parts of the large and the small pool.
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
                # The parts are shown in the unit of the whole.
                cells.append(_format(value, scale.setdefault(column, value), unit))
            lines.append(" | ".join([f" {title if part is None else '     ' + part:<21}", *cells]).ljust(width))
    lines.append("=" * width)
    return "\n".join(f"|{line}|" for line in lines) + "\n"


def _format(value: int, scale_by: int, unit: str) -> str:
    """`value` in the unit in which `scale_by` has few digits, 10 characters wide."""
    base, names = UNITS[unit]
    limit = 768 * 1024 if base == 1024 else 750 * 1000
    step = 0
    while scale_by >= limit and step + 1 < len(names):
        scale_by //= base
        step += 1
    return f"{value // base**step:6d} {names[step]:<3}"
