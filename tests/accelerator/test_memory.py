"""torch.bp.memory: names, statistics, pools, and the snapshots that PyTorch's memory viewers read."""

from __future__ import annotations

import gc
import inspect
import itertools
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator

import cuda_parity
import pytest
import torch
import torch.cuda._memory_viz as memory_viz
import torch.cuda.memory

import torch_backplane  # noqa: F401
from torch_backplane import _C
from torch_backplane.accelerator import memory

MIB = 1 << 20
HAS_POOL_STATISTICS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.empty(1, device="bp")
    gc.collect()
    memory.empty_cache()
    yield
    memory._record_memory_history(None)


def empty(size: int, device: str = "bp") -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


# --- names -----------------------------------------------------------------------------------------------------------

ABSENT = {"CUDAPluggableAllocator"}  # PluggableAllocator in torch.bp


def test_names_match_torch_cuda() -> None:
    expected = set(torch.cuda.memory.__all__) - ABSENT
    assert expected <= set(memory.__all__)
    for name in memory.__all__:
        assert callable(getattr(memory, name))


def test_parameters_match_torch_cuda() -> None:
    private = {"_record_memory_history", "_snapshot", "_dump_snapshot", "_save_segment_usage", "_save_memory_usage"}
    for name in {*torch.cuda.memory.__all__, *private} - ABSENT:
        theirs = inspect.signature(getattr(torch.cuda.memory, name))
        ours = inspect.signature(getattr(memory, name))
        later = cuda_parity.LATER_PARAMETERS.get(name, set()) - {*theirs.parameters}
        assert [one for one in ours.parameters if one not in later] == list(theirs.parameters), name


def test_processes_are_not_reported() -> None:
    with pytest.raises(NotImplementedError, match="bp drivers do not report"):
        memory.list_gpu_processes()


def test_the_allocator_backend_is_native() -> None:
    """Also with pluggable allocators (test_pluggable_allocators.py)."""
    assert memory.get_allocator_backend() == "native"


# --- statistics ------------------------------------------------------------------------------------------------------


def documented_keys() -> set[str]:
    """The keys in the docstring of torch.cuda.memory_stats, with its braces expanded."""
    keys: set[str] = set()
    for text in re.findall(r'``"([^"]+)"``: *\n', inspect.getdoc(torch.cuda.memory_stats) or ""):
        parts = [part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^.{}]+", text)]
        keys.update(".".join(combination) for combination in itertools.product(*parts))
    return keys


def test_every_documented_statistic_exists() -> None:
    documented = documented_keys()
    assert len(documented) > 100
    # The docstring says "allocated" where the key is "allocation".
    renamed = {re.sub(r"^allocated\.", "allocation.", key) for key in documented}
    renamed.discard("reserved_bytes_by_private_pools")  # has separate keys for each pool
    statistics = memory.memory_stats()
    assert renamed <= set(statistics)
    assert list(statistics) == sorted(statistics)
    assert all(isinstance(value, int) for value in statistics.values())


def test_statistics_count() -> None:
    memory.reset_accumulated_memory_stats()
    memory.reset_peak_memory_stats()
    before = memory.memory_stats()
    small, large = empty(1000), empty(3 * MIB)
    del small
    after = memory.memory_stats()

    def change(key: str) -> int:
        return after[key] - before[key]

    assert change("allocation.all.allocated") == 2
    assert change("allocation.small_pool.freed") == 1
    assert change("allocated_bytes.all.current") == 3 * MIB
    assert change("allocated_bytes.all.peak") == 3 * MIB + 1024
    assert change("requested_bytes.small_pool.allocated") == 1000
    assert change("reserved_bytes.large_pool.current") == 20 * MIB
    assert change("inactive_split_bytes.large_pool.current") == 17 * MIB
    assert memory.memory_allocated() == after["allocated_bytes.all.current"]
    assert memory.max_memory_allocated() == after["allocated_bytes.all.peak"]
    assert memory.memory_reserved() == after["reserved_bytes.all.current"]
    assert memory.max_memory_reserved() == after["reserved_bytes.all.peak"]
    del large
    memory.reset_peak_memory_stats()
    assert memory.max_memory_allocated() == memory.memory_allocated()
    memory.reset_accumulated_memory_stats()
    assert memory.memory_stats()["allocation.all.allocated"] == 0


def test_torch_accelerator_reports_the_same() -> None:
    tensor = empty(5000)
    assert torch.accelerator.memory_allocated() == memory.memory_allocated() >= tensor.nbytes
    assert torch.accelerator.max_memory_reserved() == memory.max_memory_reserved()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_stats()["num_ooms"] == memory.memory_stats()["num_ooms"]


def test_statistics_before_the_first_use() -> None:
    code = (
        "import torch, torch_backplane; from torch_backplane import _C\n"
        "from torch_backplane.accelerator import memory\n"
        "assert memory.memory_stats() == {} and memory.host_memory_stats() == {} and memory.memory_allocated() == 0\n"
        "memory.empty_cache(); assert memory.memory_snapshot() == []\n"
        "assert not _C.is_discovered()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_deprecated_names_warn() -> None:
    with pytest.warns(FutureWarning, match="memory_reserved"):
        assert memory.memory_cached() == memory.memory_reserved()
    with pytest.warns(FutureWarning, match="max_memory_reserved"):
        assert memory.max_memory_cached() == memory.max_memory_reserved()
    with pytest.warns(FutureWarning, match="resets /all/ peak"):
        memory.reset_max_memory_allocated()
    with pytest.warns(FutureWarning, match="resets /all/ peak"):
        memory.reset_max_memory_cached()


def test_summary() -> None:
    text = memory.memory_summary()
    assert "PyTorch bp memory summary, device ID 0" in text
    assert "Allocated memory" in text
    assert "from large pool" in text
    assert len({len(line) for line in text.splitlines()}) == 1
    assert "from large pool" not in memory.memory_summary(abbreviated=True)


@pytest.mark.parametrize("function", ["memory_stats", "mem_get_info", "memory_summary", "reset_peak_memory_stats"])
def test_devices_are_checked(function: str) -> None:
    call = getattr(memory, function)
    for device in (None, 0, "bp", "bp:0", torch.device("bp"), torch.device("bp", 0)):
        call(device)
    with pytest.raises(RuntimeError, match="63"):
        call(63)
    with pytest.raises(ValueError, match="Expected a bp device, but got: cpu"):
        call("cpu")
    with pytest.raises(ValueError, match="must be >= 0"):
        call(-5)


def test_free_and_total() -> None:
    free, total = memory.mem_get_info()
    assert 0 <= free <= total
    tensor = empty(30 * MIB)
    assert memory.mem_get_info()[0] == free - 30 * MIB
    del tensor
    memory.empty_cache()
    assert memory.mem_get_info()[0] == free


def test_memory_fraction_is_checked() -> None:
    with pytest.raises(TypeError, match="must be `float`"):
        memory.set_per_process_memory_fraction(1)
    with pytest.raises(ValueError, match="Allowed range: 0~1"):
        memory.set_per_process_memory_fraction(1.5)
    memory.set_per_process_memory_fraction(1.0)
    assert memory.get_per_process_memory_fraction() == 1.0


def test_pinned_memory_is_counted() -> None:
    before = memory.host_memory_stats()["allocations.allocated"]
    tensor = torch.empty(3 * MIB, dtype=torch.uint8).pin_memory()
    statistics = memory.host_memory_stats()
    assert statistics["active_bytes.current"] >= tensor.nbytes
    assert statistics["allocations.allocated"] >= before
    memory.reset_peak_host_memory_stats()
    memory.reset_accumulated_host_memory_stats()
    assert memory.host_memory_stats()["num_host_alloc"] == 0


# --- pools -----------------------------------------------------------------------------------------------------------


def pool_segments(pool: memory.MemPool) -> list[int]:
    return [segment["address"] for segment in memory.memory_snapshot() if segment["segment_pool_id"] == pool.id]


def test_a_pool_has_its_own_segments() -> None:
    outside = empty(1000)
    pool = memory.MemPool()
    assert pool.use_count() == 1
    with memory.use_mem_pool(pool):
        assert pool.use_count() == 2
        inside = empty(1000)
    assert pool.use_count() == 1
    assert [segment["address"] for segment in pool.snapshot()] == pool_segments(pool)
    assert len(pool_segments(pool)) == 1
    key = f"reserved_bytes_by_private_pools.0_{pool.id[1]}.all"
    if HAS_POOL_STATISTICS:
        assert memory.memory_stats()[f"{key}.current"] == 2 * MIB
    address = inside.data_ptr()
    del inside, outside
    assert empty(1000).data_ptr() != address  # free, but still in the pool
    memory.empty_cache()
    assert len(pool_segments(pool)) == 1
    del pool
    if HAS_POOL_STATISTICS:
        assert memory.memory_stats()[f"{key}.current"] == 0
        assert memory.memory_stats()[f"{key}.peak"] == 2 * MIB


def test_tensors_can_outlive_their_pool() -> None:
    pool = memory.MemPool()
    pool_id = pool.id
    with memory.use_mem_pool(pool):
        tensor = torch.full((1000,), 3.0, device="bp")
    del pool
    assert float(tensor.sum().cpu()) == 3000.0
    del tensor
    memory.empty_cache()
    assert all(segment["segment_pool_id"] != pool_id for segment in memory.memory_snapshot())


def test_pools_nest() -> None:
    outer, inner = memory.MemPool(), memory.MemPool()
    with memory.use_mem_pool(outer):
        first = empty(1000)
        with memory.use_mem_pool(inner):
            second = empty(1000)
        third = empty(1000)
    assert len(pool_segments(outer)) == len(pool_segments(inner)) == 1
    inside = pool_segments(outer)[0]
    assert [inside <= tensor.data_ptr() < inside + 2 * MIB for tensor in (first, second, third)] == [True, False, True]


def test_the_use_of_a_pool_ends_on_an_exception() -> None:
    pool = memory.MemPool()
    with pytest.raises(ZeroDivisionError), memory.use_mem_pool(pool):
        raise ZeroDivisionError
    assert pool.use_count() == 1
    empty(1000)
    assert not pool_segments(pool)


def test_a_pool_with_no_split() -> None:
    pool = memory.MemPool(no_split=True)
    with memory.use_mem_pool(pool):
        tensors = [empty(1000), empty(1000)]
    assert len(pool_segments(pool)) == len(tensors)


def test_unknown_pools_are_errors() -> None:
    with pytest.raises(RuntimeError, match=r"memory pool \(7, 7\) is not in use"):
        _C._memory_release_pool(0, (7, 7))
    with pytest.raises(RuntimeError, match=r"memory pool \(7, 7\) is not being allocated to"):
        _C._memory_end_allocate_to_pool(0, (7, 7))


# --- snapshots and history -------------------------------------------------------------------------------------------

SEGMENT_KEYS = {
    "address",
    "total_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "allocated_size",
    "active_size",
    "blocks",
}


def allocate_for_history(size: int) -> torch.Tensor:
    return empty(size)


def test_the_snapshot_matches_the_statistics() -> None:
    tensors = [empty(1000), empty(5 * MIB), empty(300)]
    segments = [segment for segment in memory.memory_snapshot() if segment["device"] == torch.bp.current_device()]
    assert sum(segment["total_size"] for segment in segments) == memory.memory_reserved()
    assert sum(segment["allocated_size"] for segment in segments) == memory.memory_allocated()
    for segment in segments:
        assert set(segment) >= SEGMENT_KEYS
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
    states = {block["address"]: block["state"] for segment in segments for block in segment["blocks"]}
    assert all(states[tensor.data_ptr()] == "active_allocated" for tensor in tensors)


def test_history_records_actions_and_stacks() -> None:
    memory._record_memory_history(stacks="python", clear_history=True)
    kept = allocate_for_history(64 * MIB)  # larger than any free block that other tests can have left
    gone = allocate_for_history(64 * MIB + 1)
    address = gone.data_ptr()
    del gone
    snapshot = memory._snapshot()
    trace = snapshot["device_traces"][0]
    assert [entry["action"] for entry in trace] == [
        "segment_alloc",
        "alloc",
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
    ]
    allocation = trace[3]
    assert (allocation["addr"], allocation["size"]) == (address, 64 * MIB + 1)
    assert "allocate_for_history" in [frame["name"] for frame in allocation["frames"]]
    assert all(first["time_us"] <= second["time_us"] for first, second in itertools.pairwise(trace))
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    block = next(block for block in blocks if block["address"] == kept.data_ptr())
    assert block["frames"][0]["filename"]
    traceback = memory._allocation_traceback(kept.data_ptr())
    assert traceback is not None
    assert "allocate_for_history" in [frame["name"] for frame in traceback]


def test_history_can_be_limited() -> None:
    memory._record_memory_history("all", context=None, max_entries=4, clear_history=True)
    sizes = [512 * count for count in range(1, 8)]
    for size in sizes:
        empty(size)
    trace = memory._snapshot()["device_traces"][0]
    assert len(trace) == 4
    assert [entry["size"] for entry in trace if entry["action"] == "alloc"] == sizes[-1:]
    memory._record_memory_history(
        "all", context=None, clear_history=True, skip_actions=["free_requested", "segment_alloc"]
    )
    empty(1000)
    assert [entry["action"] for entry in memory._snapshot()["device_traces"][0]] == ["alloc", "free_completed"]
    memory._record_memory_history("state")
    tensor = allocate_for_history(1000)
    assert memory._allocation_traceback(tensor.data_ptr())
    assert len(memory._snapshot()["device_traces"][0]) <= 1
    memory._record_memory_history(None)
    assert memory._snapshot()["device_traces"][0] == []


def test_history_records_metadata_and_out_of_memory() -> None:
    memory._record_memory_history("all", context=None, clear_history=True)
    memory._set_memory_metadata("epoch 3")
    assert memory._get_memory_metadata() == "epoch 3"
    with pytest.raises(torch.OutOfMemoryError):
        empty(1 << 50)
    memory._set_memory_metadata("")
    entries = [entry for entry in memory._snapshot()["device_traces"][0] if entry["action"] == "oom"]
    assert [(entry["size"], entry["user_metadata"]) for entry in entries] == [(1 << 50, "epoch 3")]
    assert entries[0]["device_free"] == memory.mem_get_info()[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"enabled": "some"}, ValueError, "enabled must be None, 'state' or 'all', not 'some'"),
        ({"context": "none"}, ValueError, "context must be None, 'state', 'alloc' or 'all', not 'none'"),
        ({"stacks": "cpp"}, ValueError, "stacks must be 'python' or 'all', not 'cpp'"),
        ({"skip_actions": ["malloc"]}, ValueError, "unknown trace action 'malloc'; known actions are alloc, "),
        ({"global_record_annotations": True}, NotImplementedError, "hooks only for CUDA"),
        ({"record_pinned_host_memory": True}, NotImplementedError, "pinned host memory is not recorded"),
        ({"record_cuda": False}, NotImplementedError, "pinned host memory is not recorded"),
    ],
)
def test_history_arguments_are_checked(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        memory._record_memory_history(**arguments)  # type: ignore[arg-type]


def test_pytorchs_viewers_read_the_dump(tmp_path: pathlib.Path) -> None:
    memory._record_memory_history(clear_history=True)
    tensors = [torch.randn(100, 100, device="bp") @ torch.randn(100, 100, device="bp") for _ in range(3)]
    memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    assert memory_viz.segsum(snapshot)
    assert "a = " in memory_viz.trace(snapshot)
    assert "<html>" in memory_viz.trace_plot(snapshot)
    assert "<html>" in memory_viz.segment_plot(snapshot)
    assert len(tensors) == 3
