"""The runtime's state stays consistent when device calls fail, or when they start a garbage collection.

`torch_backplane.testing.faults` injects faults into host devices. Drivers in Python fail as the tests define them. Each
test runs in a separate process.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import driver_packages
import forked
import pytest
from driver_packages import MINIMAL

Run = Callable[..., subprocess.CompletedProcess[str]]

MIB = 1 << 20


def succeeds(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stderr


# --- the caching allocator, on host devices --------------------------------------------------------------------------

HOST = """
import torch
from torch_backplane import _C
from torch_backplane.testing import faults
faults.prepare()
MIB = 1 << 20
def empty(n): return torch.empty(n, dtype=torch.uint8, device="bp")
def fails(action, method):
    try: action()
    except RuntimeError as error: assert f"injected fault in {method}" in str(error), error
    else: raise AssertionError(f"{method} did not fail")
def nothing_is_left():
    torch.bp.synchronize()
    torch.bp.empty_cache()
    stats = torch.bp.memory_stats()
    left = {key: stats[f"{key}_bytes.all.current"] for key in ("active", "reserved", "allocated")}
    assert not any(left.values()), left
    free, total = torch.bp.mem_get_info()
    assert free == total, total - free
torch.bp.init()
"""


@pytest.fixture
def on_host(tmp_path: Path) -> Callable[..., str]:
    def run(code: str, **env: str) -> str:
        settings = {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_HOST_MEMORY": "1GiB"}
        return succeeds(forked.run(HOST + code, tmp_path, **settings | env))

    return run


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("method", ["create_event", "record_event"])
def test_a_block_is_not_lost_if_its_event_cannot_be_recorded(
    on_host: Callable[..., str], method: str, nth: int
) -> None:
    said = on_host(f"""
streams = [torch.bp.Stream() for _ in range(3)]
block = empty(1000)
for stream in streams:
    with torch.bp.stream(stream):
        torch.bp._sleep(200_000_000)
    block.record_stream(stream)
address = block.data_ptr()
faults.fail({method!r}, {nth})
del block
other = empty(1000)
assert other.data_ptr() != address      # the streams are still busy
del other
nothing_is_left()
""")
    assert "error while freeing bp memory: " in said
    assert f"injected fault in {method}" in said


@pytest.mark.parametrize("discrete", ["0", "1"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_expandable_segments_work_after_mapping_has_failed(
    on_host: Callable[..., str], nth: int, discrete: str
) -> None:
    on_host(
        f"""
faults.fail("map", {nth})
kept = [empty(3 * MIB)] if {nth} > 1 else []
fails(lambda: empty(120 * MIB), "map")
large = empty(120 * MIB).fill_(1)
assert torch.bp.memory_stats()["reserved_bytes.all.current"] <= 140 * MIB
assert int(large[-1]) == 1
del large, kept
nothing_is_left()
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
        TORCH_BACKPLANE_DISCRETE=discrete,
    )


def test_expandable_segments_work_after_unmapping_has_failed(on_host: Callable[..., str]) -> None:
    on_host(
        """
for method in ("unmap", "unreserve", "reserve"):
    large = empty(60 * MIB)
    del large
    torch.bp.empty_cache() if method == "reserve" else None
    faults.fail(method)
    fails((lambda: empty(60 * MIB)) if method == "reserve" else torch.bp.empty_cache, method)
    again = empty(60 * MIB)
    del again
torch.bp.empty_cache()
assert torch.bp.memory_stats()["reserved_bytes.all.current"] == 0
torch.bp.set_per_process_memory_fraction(0.1)
empty(90 * MIB)
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


def test_the_first_failure_is_raised_if_memory_is_not_unmapped(on_host: Callable[..., str]) -> None:
    """A range that has mapped memory cannot be unreserved either."""
    on_host(
        """
large = empty(60 * MIB)
del large
faults.fail("unmap")
faults.fail("unreserve")
fails(torch.bp.empty_cache, "unmap")
assert faults.failed() == 2
again = empty(60 * MIB)
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )


def test_segments_that_cannot_be_freed_are_not_counted(on_host: Callable[..., str]) -> None:
    on_host("""
blocks = [empty(30 * MIB) for _ in range(3)]
del blocks
faults.fail("free", 2)
fails(torch.bp.empty_cache, "free")
stats = torch.bp.memory_stats()
assert stats["reserved_bytes.all.current"] == 0 and stats["segment.all.current"] == 0
torch.bp.set_per_process_memory_fraction(0.1)  # limits the allocator's count of reserved bytes
empty(100 * MIB)
""")


@pytest.mark.parametrize("method", ["allocate", "memory_info"])
def test_a_private_pool_is_freed_after_failed_allocations(on_host: Callable[..., str], method: str) -> None:
    on_host(f"""
import threading
pool = torch.bp.MemPool()
failed = []
def work():
    with torch.bp.use_mem_pool(pool):
        for _ in range(50):
            try: empty(2000 * MIB)
            except RuntimeError as error: failed.append(error)
faults.fail({method!r}, 20)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(failed) == 200, len(failed)
del pool
nothing_is_left()
""")


# --- drivers in Python -----------------------------------------------------------------------------------------------


def run_driver(folder: Path, source: str, code: str, **env: str) -> str:
    driver_packages.install(folder, "test", source, "MinimalDriver")
    quiet = "from torch_backplane import _C\n_C.set_fallback_policy(_C.FallbackPolicy.silent)\n"
    return succeeds(forked.run(quiet + code, folder, **{"TORCH_BACKPLANE_DRIVERS": "test"} | env))


# Drivers implement all of these methods or none.
ORDER = (
    "create_stream", "query_stream", "synchronize_stream", "create_event", "record_event", "wait_event", "query_event",
    "synchronize_event", "elapsed_ms",
)  # fmt: skip

# All methods take one lock, like a driver of a library that is not thread-safe. copy_in starts a garbage collection.
COLLECTING = MINIMAL + f'''
import functools, gc, threading
lock = threading.Lock()
collecting = False
collected = []

def locked(method):
    @functools.wraps(method)
    def call(*arguments):
        if not lock.acquire(timeout=5):
            raise AssertionError(method.__name__ + " waits for its own thread")
        try:
            if collecting and method.__name__ == "copy_in":
                collected.append(gc.collect())
            return method(*arguments)
        finally:
            lock.release()
    return call

for name in ("allocate", "free", "copy_in", "copy_out", *{ORDER}):
    setattr(MinimalDevice, name, locked(getattr(MinimalDevice, name)))
'''

COLLECT = """
import gc, sys, torch
gc.disable()
class Cycle: pass
def in_a_cycle(tensor):
    cycle = Cycle()
    cycle.itself, cycle.tensor = cycle, tensor
target, source = torch.zeros(4, device="bp"), torch.ones(4)
driver = sys.modules["driver_test_module"]
def copy_and_collect():
    driver.collecting = True
    target.copy_(source)
    driver.collecting = False
    assert driver.collected and driver.collected[-1] > 0
"""

FREES = {
    "uncached": "torch.bp.caching_allocator_enable(False); in_a_cycle(torch.empty(1000, device='bp'))",
    "another stream's": "block = torch.empty(1000, device='bp'); block.record_stream(torch.bp.Stream())\n"
    "in_a_cycle(block); del block",
    "pinned": "block = torch.empty(1000).pin_memory(); block.to('bp', non_blocking=True)\nin_a_cycle(block); del block",
}


@pytest.mark.parametrize("case", FREES)
def test_garbage_collection_inside_a_driver_call(tmp_path: Path, case: str) -> None:
    code = f"""
{COLLECT}
{FREES[case]}
copy_and_collect()
assert target.tolist() == [1] * 4
torch.bp.caching_allocator_enable(True)
del target
torch.empty(1 << 21, device="bp")
torch.bp.synchronize()
torch.bp.empty_cache()
assert torch.bp.memory_stats()["active_bytes.all.current"] == 0
assert torch.bp.memory_reserved() == 0
free, total = torch.bp.mem_get_info()
assert free == total, total - free
again = torch.empty(1000).pin_memory()
"""
    assert not run_driver(tmp_path, COLLECTING, code)


def test_events_that_cannot_be_recorded_are_destroyed(tmp_path: Path) -> None:
    source = MINIMAL + f'''
from torch_backplane.drivers import DeviceError
for name in {ORDER}:
    setattr(MinimalDevice, name, lambda self, *arguments: True)
events = []
MinimalDevice.create_event = lambda self, timing: events.append(object()) or events[-1]
MinimalDevice.destroy_event = lambda self, event: events.remove(event)
def record_event(self, event, stream): raise DeviceError("no", code=1)
MinimalDevice.record_event = record_event
'''
    code = """
import sys, torch
for _ in range(3):
    event = torch.bp.Event()
    try: event.record()
    except torch.AcceleratorError as error: assert "recording an event: no" in str(error), error
    else: raise AssertionError("no error")
    del event
assert not sys.modules["driver_test_module"].events
"""
    assert not run_driver(tmp_path, source, code)


@pytest.mark.parametrize("address", ["3", "1 << 50", "'here'"])
def test_memory_with_an_invalid_address_is_freed(tmp_path: Path, address: str) -> None:
    source = MINIMAL.replace("1 << 26", "1 << 26, address_space='host'") + f'''
freed = []
MinimalDevice.address = lambda self, handle: {address}
MinimalDevice.free = lambda self, handle: freed.append(len(handle))
'''
    code = """
import sys, torch
from torch_backplane import _C
torch.bp.init()
for _ in range(40):  # of 2 MiB each; the device has 64 MiB
    try: torch.empty(3, device="bp")
    except torch.OutOfMemoryError: raise
    except (RuntimeError, TypeError): pass
    else: raise AssertionError("no error")
assert sys.modules["driver_test_module"].freed == [2 << 20] * 40
assert torch.bp.memory_reserved() == 0
"""
    assert not run_driver(tmp_path, source, code, TORCH_BACKPLANE_DISCRETE="0")


def test_other_segments_are_freed_if_one_cannot_be(tmp_path: Path) -> None:
    source = MINIMAL + '''
from torch_backplane.drivers import DeviceError
freed = []
def free(self, handle):
    freed.append(len(handle))
    if len(freed) == 1: raise DeviceError("not now", code=1)
MinimalDevice.free = free
'''
    code = """
import sys, torch
blocks = [torch.empty(11 << 20, dtype=torch.uint8, device="bp") for _ in range(3)]
del blocks
try: torch.bp.empty_cache()
except torch.AcceleratorError as error: assert "freeing memory: not now" in str(error), error
else: raise AssertionError("no error")
assert len(sys.modules["driver_test_module"].freed) == 3
assert torch.bp.memory_reserved() == 0
torch.bp.set_per_process_memory_fraction(0.5)
torch.empty(22 << 20, dtype=torch.uint8, device="bp")
"""
    assert not run_driver(tmp_path, source, code)


# --- OpenCL ----------------------------------------------------------------------------------------------------------

OPENCL = """
import sys, threading, torch, pyopencl as cl
from torch_backplane import _C, drivers
faulty = sys.modules["driver_faulty_module"] if torch.bp.device_count() else None
answers, streams = faulty.answers, faulty.streams
held = torch.ones(1000, device="bp:0")
torch.bp.synchronize(0)
def fails(action):
    try: action()
    except torch.AcceleratorError as error: return str(error)
    raise AssertionError("no error")
"""


@pytest.fixture
def on_opencl(platform: None, tmp_path: Path) -> Callable[..., str]:
    settings = {"TORCH_BACKPLANE_DRIVERS": "faulty,host", "TORCH_BACKPLANE_HOST_DEVICES": "1"}
    return driver_packages.opencl_runner(tmp_path, "faulty", OPENCL, **settings)


def test_a_stream_is_not_done_because_a_marker_failed(on_opencl: Callable[..., str]) -> None:
    on_opencl("""
gate = cl.UserEvent(drivers.device(0).context)
held.add_(1)  # builds the kernel
torch.bp.synchronize(0)
cl.enqueue_barrier(streams[0].queue, wait_for=[gate])  # the driver does not count it
held.add_(1)
answers["enqueue_marker"] = -5
fails(torch.bp.current_stream(0).query)
answers.clear()
assert not torch.bp.current_stream(0).query()
gate.set_status(cl.command_execution_status.COMPLETE)
assert held.sum().item() == 3000
assert torch.bp.current_stream(0).query()
""")


@pytest.mark.parametrize(
    ("function", "discrete"),
    [("enqueue_copy", "1"), ("enqueue_marker", "1"), ("enqueue_marker", "0")],  # the host reads this memory directly
)
def test_an_index_error_is_raised_after_a_device_error(
    on_opencl: Callable[..., str], function: str, discrete: str
) -> None:
    code = f"""
held.index_select(0, torch.tensor([5000], device="bp:0"))
answers[{function!r}] = -5
fails(lambda: torch.bp.synchronize(0))
answers.clear()
try: torch.bp.synchronize(0)
except IndexError: pass
else: raise AssertionError("no IndexError")
torch.bp.synchronize(0)
"""
    on_opencl(code, TORCH_BACKPLANE_DISCRETE=discrete)


def test_pinned_memory_is_freed_if_its_event_cannot_be_recorded(on_opencl: Callable[..., str]) -> None:
    on_opencl("""
import os
pinned = torch.ones(1 << 16).pin_memory()
held = pinned.to("bp:0", non_blocking=True)
address = pinned.data_ptr()
saved = os.dup(2)
answers["enqueue_marker"] = -5
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the warning
del pinned
os.dup2(saved, 2)
answers.clear()
torch.bp.synchronize(0)
again = torch.ones(1 << 16).pin_memory()
assert again.data_ptr() == address
assert held.sum().item() == 1 << 16
""")


def test_a_launch_that_waits_for_the_device_releases_the_gil(on_opencl: Callable[..., str]) -> None:
    """On PoCL, a wider launch of a kernel waits for narrower ones, which can wait for work in Python threads."""
    on_opencl("""
text = '''__kernel void twice(__global char *a, ulong offset) {
    ((__global float *)(a + offset))[get_global_id(0)] *= 2; }'''
twice = _C.compile_kernel(0, text, "twice", "twice")
def launch(items): _C.launch_kernel(0, twice, (items, 1, 1), (1, 1, 1), [held], keep_gil=True)
launch(10)
torch.bp.synchronize(0)
torch.bp._sleep(200_000_000)  # ended by a Python thread
launch(10)
threads = [threading.Thread(target=launch, args=(items,)) for items in (500, 800, 900)]
for thread in threads: thread.start()
launch(1000)
for thread in threads: thread.join(20)
assert not any(thread.is_alive() for thread in threads)
assert held[0].item() == 2 ** 6 and held[999].item() == 2
""")


@pytest.fixture
def on_pocl(on_opencl: Callable[..., str]) -> Callable[..., str]:
    if on_opencl("print(drivers.device(0).device.platform.name)").strip() != "Portable Computing Language":
        pytest.skip("only on PoCL do launches wait for each other")
    return on_opencl


def test_launches_of_growing_sizes_rarely_wait(on_pocl: Callable[..., str]) -> None:
    on_pocl("""
x = torch.ones(300, 2000, device="bp:0")
def grow(function):
    function(300)
    torch.bp.synchronize(0)
    before = faulty.counts["clFinish"]
    for size in range(300, 2000, 7): function(size)
    return faulty.counts["clFinish"] - before
for name, function in {
    "pointwise": lambda n: x[0, :n] + 1,
    "in rows": lambda n: x[:100, :n] + 1,
    "rows": lambda n: x[:, :n].softmax(0),
    "sum": lambda n: x[:, :n].sum(0),
    "product": lambda n: x[:, :n].T @ x[:, :16],
}.items():
    waits = grow(function)
    assert waits <= 8, (name, waits)  # for one or two queues, at each power of two
""")


def test_a_launch_waits_for_narrower_ones_on_all_devices(on_pocl: Callable[..., str]) -> None:
    """PoCL has one table of binaries for all devices."""
    on_pocl("""
small, large = torch.ones(64, device="bp:0"), torch.ones(100_000, device="bp:1")
small.mul_(3)
large[:64].mul_(3)  # builds the kernel
torch.bp.synchronize(0)
torch.bp.synchronize(1)
gate = cl.UserEvent(drivers.device(0).context)
cl.enqueue_barrier(streams[0].queue, wait_for=[gate])
small.mul_(3)
wide = threading.Thread(target=lambda: large.mul_(3))
wide.start()
wide.join(1)
assert wide.is_alive()
gate.set_status(cl.command_execution_status.COMPLETE)
wide.join()
assert small.sum().item() == 64 * 9 and large.sum().item() == 300_000 + 64 * 6
""")
