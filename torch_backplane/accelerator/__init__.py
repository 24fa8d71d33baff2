"""`torch.bp`: devices, streams, events, graphs, memory and random numbers of bp devices, with the API of `torch.cuda`.

Names, signatures and semantics are those of torch.cuda: programs replace `cuda` with `bp`. docs/torch-bp.md lists the
differences, tests/support/cuda_parity.py the status of every public name of torch.cuda.
"""

# ruff: noqa: F401 - PyTorch's own code looks up the names with an underscore

from __future__ import annotations

from typing import Any

from torch._C import AcceleratorError, OutOfMemoryError

from torch_backplane.accelerator import _utils, amp, graphs, legacy, memory, nvtx, random, streams, tunable
from torch_backplane.accelerator.devices import (
    _exchange_device,
    _maybe_exchange_device,
    _sleep,
    can_device_access_peer,
    current_device,
    device,
    device_count,
    device_of,
    get_device_capability,
    get_device_name,
    get_device_properties,
    get_sync_debug_mode,
    ipc_collect,
    is_available,
    native_context,
    set_device,
    set_sync_debug_mode,
    synchronize,
)
from torch_backplane.accelerator.dtypes import get_amp_supported_dtype, is_bf16_supported, is_tf32_supported
from torch_backplane.accelerator.graphs import (
    Graph,
    graph,
    graph_pool_handle,
    is_current_stream_capturing,
    make_graphed_callables,
)
from torch_backplane.accelerator.initialization import (
    DeferredBpCallError,
    _is_compiled,
    _is_in_bad_fork,
    _lazy_call,
    _lazy_init,
    init,
    is_initialized,
)
from torch_backplane.accelerator.memory import (
    MemPool,
    PluggableAllocator,
    caching_allocator_alloc,
    caching_allocator_delete,
    caching_allocator_disabled,
    caching_allocator_enable,
    change_current_allocator,
    empty_cache,
    get_allocator_backend,
    get_per_process_memory_fraction,
    host_memory_stats,
    host_memory_stats_as_nested_dict,
    list_gpu_processes,
    max_memory_allocated,
    max_memory_cached,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_cached,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_stats_as_nested_dict,
    memory_summary,
    memory_usage,
    reset_accumulated_host_memory_stats,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_max_memory_cached,
    reset_peak_host_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
    use_mem_pool,
    utilization,
)
from torch_backplane.accelerator.random import (
    _get_generator,
    _get_rng_state_offset,
    _set_rng_state_offset,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_backplane.accelerator.sensors import clock_rate, device_memory_used, power_draw, temperature
from torch_backplane.accelerator.streams import (
    Event,
    ExternalStream,
    Stream,
    StreamContext,
    _set_stream_by_id,
    current_stream,
    default_stream,
    get_stream_from_external,
    set_stream,
    stream,
)

__all__ = [
    "AcceleratorError",
    "DeferredBpCallError",
    "Event",
    "ExternalStream",
    "Graph",
    "MemPool",
    "OutOfMemoryError",
    "PluggableAllocator",
    "Stream",
    "StreamContext",
    "amp",
    "caching_allocator_alloc",
    "caching_allocator_delete",
    "caching_allocator_disabled",
    "caching_allocator_enable",
    "can_device_access_peer",
    "change_current_allocator",
    "clock_rate",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_memory_used",
    "device_of",
    "empty_cache",
    "get_allocator_backend",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_per_process_memory_fraction",
    "get_rng_state",
    "get_rng_state_all",
    "get_stream_from_external",
    "get_sync_debug_mode",
    "graph",
    "graph_pool_handle",
    "graphs",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "init",
    "initial_seed",
    "ipc_collect",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "is_tf32_supported",
    "list_gpu_processes",
    "make_graphed_callables",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_cached",
    "max_memory_reserved",
    "mem_get_info",
    "memory",
    "memory_allocated",
    "memory_cached",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "memory_summary",
    "memory_usage",
    "native_context",
    "nvtx",
    "power_draw",
    "random",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "set_sync_debug_mode",
    "stream",
    "streams",
    "synchronize",
    "temperature",
    "tunable",
    "use_mem_pool",
    "utilization",
]
__all__.extend(legacy.NAMES)


def __getattr__(name: str) -> Any:
    # torch.cuda assigns these when it is initialized.
    if name == "default_generators":
        return random._generators()
    if name == "_initialized":
        return is_initialized()
    if name in legacy.NAMES:
        return globals().setdefault(name, legacy.named(name))
    raise AttributeError(f"module 'torch.bp' has no attribute {name!r}")
