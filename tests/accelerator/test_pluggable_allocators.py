"""Pluggable allocators: for memory pools, and for all memory of bp devices."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import paths
import pytest
import torch

from torch_backplane import _C
from torch_backplane.accelerator.pluggable import PluggableAllocator

SOURCE = paths.SUPPORT / "pluggable_allocator.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("library") / "allocator.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(SOURCE), "-o", str(made)], check=True)
    return str(made)


class Memory:
    """Allocation functions in Python that record their calls."""

    def __init__(self, skew: int = 0) -> None:
        self.buffers: dict[int, Any] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.skew, self.full = skew, False

    def allocate(self, nbytes: int, device: int, stream: int) -> int | None:
        self.calls.append(("allocate", nbytes, device))
        if self.full:
            return None
        buffer = ctypes.create_string_buffer(nbytes + 64)
        address = (ctypes.addressof(buffer) + 63) // 64 * 64 + self.skew
        self.buffers[address] = buffer
        return address

    def free(self, address: int, nbytes: int, device: int, stream: int) -> None:
        self.calls.append(("free", nbytes, device))
        del self.buffers[address]

    def holds(self, tensor: torch.Tensor) -> bool:
        return any(start <= tensor.data_ptr() < start + len(buffer) for start, buffer in self.buffers.items())


def test_a_pool_allocates_and_frees_its_segments_through_a_library(library: str) -> None:
    allocator = torch.bp.memory.PluggableAllocator(library, "take", "put")
    counts = ctypes.CDLL(library)
    before = torch.bp.memory_reserved()
    pool = torch.bp.MemPool(allocator.allocator())
    assert pool.allocator is allocator
    with torch.bp.use_mem_pool(pool):
        x = torch.arange(1 << 20, device="bp", dtype=torch.float32)
        y = x * 2 + 1
    outside = torch.ones(1 << 20, device="bp")
    assert counts.bytes_out() >= 8 << 20
    assert torch.bp.memory_reserved() - before >= counts.bytes_out()
    assert sum(one["total_size"] for one in pool.snapshot()) == counts.bytes_out()
    assert y.sum().item() == pytest.approx(2 * sum(range(1 << 20)) + (1 << 20), rel=1e-5)
    given = counts.times_given()
    del x
    with torch.bp.use_mem_pool(pool):
        torch.zeros(1 << 20, device="bp")  # reuses the memory of x
    assert counts.times_given() == given
    del y, pool
    gc.collect()
    torch.bp.empty_cache()
    assert counts.bytes_out() == 0
    assert outside.sum().item() == 1 << 20


def test_a_failed_allocation_raises_out_of_memory(library: str) -> None:
    pool = torch.bp.MemPool(PluggableAllocator(library, "take", "put"))
    with torch.bp.use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError):
        torch.empty(100 << 20, dtype=torch.uint8, device="bp")
    with torch.bp.use_mem_pool(pool):
        assert torch.ones(1 << 20, device="bp").sum().item() == 1 << 20


def test_python_functions() -> None:
    memory = Memory()
    pool = torch.bp.MemPool(PluggableAllocator.from_functions(memory.allocate, memory.free))
    x = torch.ones(1000, device="bp")
    with torch.bp.use_mem_pool(pool):
        y = torch.full((1 << 20,), 3.0, device="bp")
    assert (memory.holds(x), memory.holds(y)) == (False, True)
    memory.full = True
    with torch.bp.use_mem_pool(pool), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 24, device="bp")
    assert y.unique().tolist() == [3]
    del y, pool
    gc.collect()
    torch.bp.empty_cache()
    allocated = [call[1:] for call in memory.calls if call[0] == "allocate"]
    freed = [call[1:] for call in memory.calls if call[0] == "free"]
    assert not memory.buffers
    assert set(freed) <= set(allocated)
    assert {device for _, device in freed} == {0}


def test_python_exceptions_become_a_warning_and_out_of_memory() -> None:
    def allocate(nbytes: int, device: int, stream: int) -> int:
        raise LookupError("nothing here")

    pool = torch.bp.MemPool(PluggableAllocator.from_functions(allocate, lambda *_: None))
    warned = pytest.warns(UserWarning, match="LookupError.*nothing here")
    with torch.bp.use_mem_pool(pool), warned, pytest.raises(torch.OutOfMemoryError):
        torch.empty(1000, device="bp")
    assert torch.ones(1000, device="bp").sum().item() == 1000


def test_misaligned_memory_is_freed() -> None:
    memory = Memory(skew=8)
    pool = torch.bp.MemPool(PluggableAllocator.from_functions(memory.allocate, memory.free))
    with torch.bp.use_mem_pool(pool), pytest.raises(RuntimeError, match="which is not a multiple of 16"):
        torch.empty(1000, device="bp")
    assert not memory.buffers
    assert [call[0] for call in memory.calls] == ["allocate", "free"]


def test_memory_is_freed_after_pending_work_completes() -> None:
    memory = Memory()
    pools = [torch.bp.MemPool(PluggableAllocator.from_functions(memory.allocate, memory.free))]
    pinned = torch.full((1 << 20,), 5.0).pin_memory()
    with torch.bp.use_mem_pool(pools[0]):
        x = torch.empty(1 << 20, device="bp")
    torch.bp.synchronize()
    gate = _C._StreamGate(0, 0)
    x.copy_(pinned, non_blocking=True)
    del x
    back = threading.Thread(target=pools.clear)  # dropping the last reference frees the pool's memory
    back.start()
    time.sleep(0.1)
    assert memory.buffers
    gate.open()
    back.join()
    assert not memory.buffers


def test_invalid_allocators_raise(library: str) -> None:
    with pytest.raises(OSError, match="nowhere"):
        PluggableAllocator("/nowhere/at/all.so", "take", "put")
    with pytest.raises(AttributeError, match="give"):
        PluggableAllocator(library, "give", "put")
    with pytest.raises(TypeError, match=r"PluggableAllocator, but got str"):
        torch.bp.MemPool("take")
    with pytest.raises(TypeError, match=r"PluggableAllocator, but got NoneType"):
        torch.bp.change_current_allocator(None)
    torch.ones(1, device="bp")
    torch.bp.reset_accumulated_memory_stats()
    with pytest.raises(RuntimeError, match="has already allocated memory"):
        torch.bp.change_current_allocator(PluggableAllocator(library, "take", "put"))


EVERYWHERE = """
import ctypes, sys, torch
library = sys.argv[1]
torch.bp.change_current_allocator(torch.bp.PluggableAllocator(library, "take", "put"))
counts = ctypes.CDLL(library)
model = torch.nn.Linear(300, 300).to("bp:1")
model(torch.randn(500, 300, device="bp:1")).sum().backward()
assert counts.bytes_out() == torch.bp.memory_reserved(1) > 0
del model
torch.bp.empty_cache()
"""

OUT_OF_REACH = """
import sys, pytest, torch
allocator = torch.bp.PluggableAllocator(sys.argv[1], "take", "put")
for use in (torch.bp.change_current_allocator, torch.bp.MemPool):
    with pytest.raises(NotImplementedError, match="accepts only memory of its driver"):
        use(allocator)
assert torch.ones(3, device="bp").tolist() == [1] * 3
"""


@pytest.mark.parametrize(
    ("program", "discrete"), [(EVERYWHERE, "0"), (OUT_OF_REACH, "1")], ids=["host memory", "discrete memory"]
)
def test_in_a_separate_process(program: str, discrete: str, library: str, run_python: Callable[..., Any]) -> None:
    code = f"import sys; sys.argv[1:] = [{library!r}]\n{program}"
    done = run_python(
        code, TORCH_BACKPLANE_DRIVERS="host", TORCH_BACKPLANE_HOST_DEVICES="2", TORCH_BACKPLANE_DISCRETE=discrete
    )
    assert done.returncode == 0, done.stderr
