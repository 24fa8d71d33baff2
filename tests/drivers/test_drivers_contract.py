"""Tests the contract between the runtime and Python drivers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import forked
import paths
import pytest
import torch
from driver_packages import MINIMAL, install

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]

# A driver that records its calls in `calls` of its module.
NOTING = MINIMAL + '''
calls = []

def noting(name, method):
    def wrapper(self, *args):
        calls.append((name, *args))
        return method(self, *args)
    return wrapper

for name in ("allocate", "free", "copy_in", "copy_out", "copy", "fill", "copy_from_peer"):
    setattr(MinimalDevice, name, noting(name, getattr(MinimalDevice, name)))
'''

IN_HOST_MEMORY = MINIMAL.replace("1 << 26", "1 << 26, address_space='host'") + '''
import ctypes, mmap

MinimalDevice.allocate = lambda self, nbytes: mmap.mmap(-1, nbytes)
MinimalDevice.address = lambda self, handle: ctypes.addressof(ctypes.c_char.from_buffer(handle))
'''

TWO = "return [MinimalDevice(), MinimalDevice()]"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Returns run(code, source), which installs the source as the driver `test` and runs code with only this driver."""

    def call(code: str, source: str = MINIMAL, cls: str = "MinimalDriver", **env: str) -> Result:
        install(tmp_path, "test", source, cls)
        return forked.run(code, tmp_path, **{"TORCH_BACKPLANE_DRIVERS": "test", "TORCH_BACKPLANE_DISCRETE": "0"} | env)

    return call


def succeeds(result: Result) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- synchronous drivers -----------------------------------------------------------------------------------------


def test_minimal_driver_runs_programs(run: Run) -> None:
    code = """
import torch
from torch_backplane import _C
_C.set_fallback_policy(_C.FallbackPolicy.silent)
model = torch.nn.Linear(3, 2).to("bp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, target = torch.randn(8, 3, device="bp"), torch.randn(8, 2, device="bp")
losses = []
for _ in range(5):
    optimizer.zero_grad()
    loss = (model(x) - target).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True), losses

y = torch.arange(6.0, device="bp")
z = torch.empty_like(y).copy_(y)       # within the device, through the host
assert z.tolist() == [0, 1, 2, 3, 4, 5]

stream = torch.Stream("bp")
start, end = torch.Event("bp", enable_timing=True), torch.Event("bp", enable_timing=True)
with stream:
    start.record()
    y.add_(1)
    end.record()
stream.synchronize()
assert stream.query() and end.query()
assert start.elapsed_time(end) > 0
torch.accelerator.synchronize()
free, total = torch.accelerator.get_memory_info()
assert total == 1 << 26 and free == total - torch.accelerator.memory_reserved()
"""
    succeeds(run(code))


def test_allocations_do_not_exceed_total_memory(run: Run) -> None:
    code = """
import torch
x = torch.ones(1 << 20, device="bp")
try:
    torch.empty(1 << 25, device="bp")
except torch.OutOfMemoryError as error:
    print(error)
else:
    raise SystemExit("no error")
assert torch.zeros(10, device="bp").sum().item() == 0
import driver_test_module
sizes = [call[1] for call in driver_test_module.calls if call[0] == "allocate"]
assert sum(sizes) <= 1 << 26, sizes
"""
    assert "Tried to allocate 128.00 MiB" in succeeds(run(code, NOTING))


def test_memory_error_empties_the_cache_and_retries(run: Run) -> None:
    source = NOTING.replace("return bytearray(nbytes)", "return full(nbytes)") + '''
held = 0
def full(nbytes):
    global held
    if held + nbytes > 40 << 20:
        raise MemoryError("the hardware has less than it said")
    held += nbytes
    return bytearray(nbytes)
def free(self, handle):
    global held
    held -= len(handle)
MinimalDevice.free = free
'''
    code = """
import torch
x = torch.ones(8 << 20, dtype=torch.uint8, device="bp")
del x                                                          # cached: 20 MiB
y = torch.ones(36 << 20, dtype=torch.uint8, device="bp")       # fits after the cache is released
try:
    torch.ones(8 << 20, dtype=torch.uint8, device="bp")
except torch.OutOfMemoryError:
    print("out of memory")
assert y[-1].item() == 1
"""
    assert succeeds(run(code, source)) == "out of memory\n"


def test_allocations_do_not_exceed_the_largest_allocation(run: Run) -> None:
    code = """
import torch
from torch_backplane.accelerator import memory
memory._record_memory_history("all", context=None)
kept = torch.empty(20 << 18, device="bp")
del kept                                                        # a request that cannot succeed keeps the cache
for size in (25 << 20, 80 << 20, 1 << 50):
    try:
        torch.empty(size, dtype=torch.uint8, device="bp")
    except torch.OutOfMemoryError as error:
        print(str(error).split(". ")[1], "|", "allocates at most 20.00 MiB at a time" in str(error))
    x = torch.ones(20 << 18, device="bp")  # exactly the largest allocation
    assert x[-1].item() == 1
    del x
statistics = torch.bp.memory_stats()
print(statistics["num_ooms"], statistics["num_device_alloc"])
print([entry["size"] >> 20 for entry in memory._snapshot()["device_traces"][0] if entry["action"] == "oom"])
"""
    source = MINIMAL.replace("1 << 26", "1 << 26, largest_allocation=20 << 20")
    assert succeeds(run(code, source)).splitlines() == [
        "Tried to allocate 26.00 MiB | True",
        "Tried to allocate 80.00 MiB | True",
        "Tried to allocate 1048576.00 GiB | True",
        "3 1",
        f"[25, 80, {1 << 30}]",
    ]


# Reserved address space is a bytearray; MAPPED records its mapped pages.
RESERVING = NOTING + '''
MAPPED, MOST = {}, 24 << 20

def reserve(self, nbytes):
    handle = bytearray(nbytes)
    MAPPED[id(handle)] = {}
    return handle

def map(self, handle, offset, nbytes):
    if sum(sum(parts.values()) for parts in MAPPED.values()) + nbytes > MOST:
        raise MemoryError("no more")
    MAPPED[id(handle)][offset] = nbytes

def unmap(self, handle, offset, nbytes):
    assert MAPPED[id(handle)].pop(offset) == nbytes
    handle[offset : offset + nbytes] = bytes(nbytes)

def unreserve(self, handle):
    assert not MAPPED.pop(id(handle))

def has_memory(method):
    def checking(self, handle, offset, host_memory, stream):
        parts, end = MAPPED[id(handle)], offset + len(host_memory)
        assert any(at <= offset < at + size for at, size in parts.items()), "no memory is mapped there"
        assert any(at < end <= at + size for at, size in parts.items()), "no memory is mapped there"
        return method(self, handle, offset, host_memory, stream)
    return checking

for name in ("copy_in", "copy_out"):
    setattr(MinimalDevice, name, has_memory(getattr(MinimalDevice, name)))
for one in (reserve, map, unmap, unreserve):
    setattr(MinimalDevice, one.__name__, noting(one.__name__, one))
'''


def test_expandable_segments_map_memory_in_pages(run: Run) -> None:
    code = """
import torch
import driver_test_module as driver
torch.empty(0, device="bp")
def names():
    found = [name for name, *_ in driver.calls if name in ("allocate", "reserve", "map", "unmap", "unreserve")]
    driver.calls.clear()
    return found

for _ in range(2):
    small = [torch.full((1 << 18,), i, dtype=torch.uint8, device="cpu").to("bp") for i in range(20)]
    assert names() == ["reserve"] + ["map"] * 3, "5 MiB in pages of 2"
    assert [one[-1].item() for one in small] == list(range(20))
    del small[4:]
    torch.bp.empty_cache()
    assert names() == ["unmap"] * 2
    small += [torch.full((1 << 18,), i, dtype=torch.uint8).to("bp") for i in range(4, 20)]
    assert [one[-1].item() for one in small] == list(range(20))
    assert names() == ["map"] * 2
    try:
        torch.empty(30 << 20, dtype=torch.uint8, device="bp")
    except torch.OutOfMemoryError as error:
        assert "Tried to allocate" in str(error)
    else:
        raise AssertionError("more than there is")
    assert [one[-1].item() for one in small] == list(range(20)), "what was there stays"
    del small
    torch.bp.empty_cache()
    assert names()[-1] == "unreserve"
    assert not driver.MAPPED
"""
    succeeds(run(code, RESERVING, PYTORCH_ALLOC_CONF="expandable_segments:True", TORCH_BACKPLANE_FALLBACK="silent"))


def test_driver_with_only_some_address_space_methods_is_skipped(run: Run) -> None:
    source = MINIMAL + "MinimalDevice.reserve = lambda self, nbytes: bytearray(nbytes)\n"
    result = run("import torch; print(torch.bp.device_count())", source)
    assert succeeds(result) == "0\n"
    assert "overrides reserve; a device that reserves address space also needs unreserve, map, unmap" in result.stderr


def test_addresses_are_converted_to_handles_and_offsets(run: Run) -> None:
    code = """
import torch, driver_test_module
x = torch.arange(1024).to(torch.uint8).to("bp")
y = torch.arange(1024).to(torch.uint8).to("bp")
calls = driver_test_module.calls
(handle,) = {id(call[1]) for call in calls if call[0] == "copy_in"}     # one segment holds both
del calls[:]
assert y[100:103].tolist() == [100, 101, 102]
(call,) = calls
assert call[0] == "copy_out" and id(call[1]) == handle
assert call[2] == y.data_ptr() - x.data_ptr() + 100 and len(call[3]) == 3 and not call[3].readonly
del calls[:]
host = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)    # must outlive its memoryview
y[5:9].copy_(host)
(call,) = calls
assert call[0] == "copy_in" and call[2] == y.data_ptr() - x.data_ptr() + 5 and call[3].tolist() == [1, 2, 3, 4]
assert call[3].readonly
del calls[:]
y[:4].copy_(x[4:8])
(call,) = [call for call in calls if call[0] == "copy"]
assert (call[2] - call[4], call[5]) == (y.data_ptr() - x.data_ptr() - 4, 4)
"""
    succeeds(run(code, NOTING))


def test_copies_between_devices_try_copy_from_peer_first(run: Run) -> None:
    code = """
import torch, driver_test_module
from torch_backplane import _C
x = torch.arange(6.0).to("bp:0")
del driver_test_module.calls[:]
y = x.to("bp:1")
assert y.tolist() == [0, 1, 2, 3, 4, 5]
print(" ".join(call[0] for call in driver_test_module.calls if call[0] != "allocate"), _C.can_access_peer(0, 1))
"""
    source = NOTING.replace("return [MinimalDevice()]", TWO)
    assert succeeds(run(code, source)) == "copy_from_peer copy_out copy_in copy_out False\n"


def test_a_peer_can_copy_directly(run: Run) -> None:
    source = NOTING.replace("return [MinimalDevice()]", TWO).replace("calls = []", '''calls = []
def copy_from_peer(self, dst_handle, dst_offset, peer, src_handle, src_offset, nbytes, stream):
    assert peer is not self and type(peer) is MinimalDevice
    dst_handle[dst_offset:dst_offset + nbytes] = src_handle[src_offset:src_offset + nbytes]
    return True
MinimalDevice.copy_from_peer = copy_from_peer
MinimalDevice.can_access_peer = lambda self, peer: True
''')
    code = """
import torch, driver_test_module
from torch_backplane import _C
x = torch.arange(6.0).to("bp:0")
del driver_test_module.calls[:]
y = x[2:].to("bp:1")
print(" ".join(call[0] for call in driver_test_module.calls if call[0] != "allocate"), _C.can_access_peer(0, 1))
assert y.tolist() == [2, 3, 4, 5]
"""
    assert succeeds(run(code, source)) == "copy_from_peer True\n"


PAGE = (paths.DOCS / "write-a-driver.md").read_text()
PARTS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(DOCUMENTED,) = [part for part in PARTS if part.startswith("# my_driver.py\n")]


@pytest.mark.parametrize("part", ["", "def copy("])
def test_documented_driver_works(run: Run, part: str) -> None:
    source = DOCUMENTED
    if part:  # optional methods of the page
        (methods,) = [one for one in PARTS if part in one]
        source += f"\nclass More(MyDevice):\n{methods}\nMyDriver.devices = lambda self: [More()]\n"
    code = """
import torch
model = torch.nn.Linear(3, 2).to("bp")
model(torch.randn(5, 3, device="bp")).sum().backward()
assert model.weight.grad.device == torch.device("bp:0")
assert torch.zeros(3, device="bp").clone().tolist() == [0, 0, 0]
try:
    torch.zeros(3, dtype=torch.float64, device="bp")
except TypeError as error:
    print(error)
"""
    assert succeeds(run(code, source, "MyDriver")).startswith("bp:0 (My accelerator) does not support Double; ")


def test_documented_asynchronous_driver_works(run: Run) -> None:
    (queues,) = [part for part in PARTS if "(MyDevice)" in part]
    source = f"{DOCUMENTED}\n{queues}\nMyDriver.devices = lambda self: [MyAsynchronousDevice()]\n"
    code = """
import torch
x = torch.arange(6.0).to("bp")
stream = torch.Stream("bp")
start, end = torch.Event("bp", enable_timing=True), torch.Event("bp", enable_timing=True)
start.record()
with stream:
    stream.wait_event(start)
    y = (x * 2).cumsum(0)
    end.record()
end.synchronize()
assert end.query() and start.elapsed_time(end) > 0
assert y.tolist() == [0, 2, 6, 12, 20, 30]
"""
    succeeds(run(code, source, "MyDriver"))


# --- host-accessible memory --------------------------------------------------------------------------------------


def test_host_accessible_memory_is_used_in_place(run: Run) -> None:
    source = IN_HOST_MEMORY + NOTING[len(MINIMAL):]
    code = """
import ctypes, torch, driver_test_module
x = torch.arange(6.0).to("bp")
del driver_test_module.calls[:]
y = (x * 2).cumsum(0)
assert [call[0] for call in driver_test_module.calls if call[0] != "allocate"] == []
assert list((ctypes.c_float * 6).from_address(y.data_ptr())) == [0, 2, 6, 12, 20, 30]
"""
    succeeds(run(code, source))


def test_cpu_calls_start_no_new_threads(run: Run) -> None:
    code = """
import os, torch
from torch_backplane.planning import call_on_cpu
torch.set_num_threads(4)
x = torch.randint(9, (500, 500), device="bp").float()  # integers: sums are exact in any order
out = torch.empty_like(x)
seen = []
for _ in range(4):
    call_on_cpu(torch.ops.aten.mm.out, x, x, out=out)
    seen.append(set(os.listdir("/proc/self/task")))
print([len(after - before) for before, after in zip(seen, seen[1:])], torch.equal(out.cpu(), x.cpu() @ x.cpu()))
"""
    assert run(code, IN_HOST_MEMORY).stdout == "[0, 0, 0] True\n"


def test_host_accessible_memory_can_be_hidden(run: Run) -> None:
    source = IN_HOST_MEMORY + NOTING[len(MINIMAL):]
    code = """
import torch, driver_test_module
from torch_backplane import _C
_C.set_fallback_policy(_C.FallbackPolicy.silent)
x = torch.arange(6.0).to("bp")
assert not _C.device_properties(0).host_accessible
assert (x * 2).cumsum(0).tolist() == [0, 2, 6, 12, 20, 30]
assert "copy_out" in [call[0] for call in driver_test_module.calls]
"""
    succeeds(run(code, source, TORCH_BACKPLANE_DISCRETE="1"))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_host_devices_can_be_discrete(conf: str, tmp_path: Path) -> None:
    code = """
import ctypes, os, torch
from torch_backplane import _C
_C.set_fallback_policy(_C.FallbackPolicy.silent)
assert not _C.device_properties(0).host_accessible and _C.can_access_peer(0, 1)
x = torch.arange(3 << 20, device="bp:0").float()
y = x.view(3, -1)[1:, ::7].to("bp:1").mul_(2)
assert y.cpu().equal(torch.arange(3 << 20).float().view(3, -1)[1:, ::7] * 2)
host = torch.ones(5).pin_memory()
with torch.Stream("bp:0") as stream:
    _C.sleep(50)
    x[100:105].copy_(host, non_blocking=True)
stream.synchronize()
assert x[99:106].tolist() == [99, 1, 1, 1, 1, 1, 105]
del y
torch.accelerator.empty_cache()
address = x.data_ptr()
child = os.fork()
if child == 0:
    ctypes.string_at(address, 4)
    os._exit(0)
assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
"""
    settings = {"TORCH_BACKPLANE_DISCRETE": "1", "TORCH_BACKPLANE_HOST_DEVICES": "2", "PYTORCH_ALLOC_CONF": conf}
    succeeds(forked.run(code, tmp_path, TORCH_BACKPLANE_DRIVERS="host", **settings))


def test_addresses_must_be_aligned(run: Run) -> None:
    source = IN_HOST_MEMORY.replace("from_buffer(handle))", "from_buffer(handle)) + 64")
    result = run('import torch; torch.empty(1, device="bp")', source)
    assert "driver test: address() returned" in result.stderr
    assert "segments start at multiples of 512" in result.stderr


# --- errors ------------------------------------------------------------------------------------------------------

RAISING = MINIMAL + '''
class LinkDown(Exception):
    pass

def copy_out(self, *args):
    if broken:
        raise LinkDown("cable 7")
    working(self, *args)
broken = False
working = MinimalDevice.copy_out
MinimalDevice.copy_out = copy_out
'''


def test_driver_exceptions_reach_the_caller_unchanged(run: Run) -> None:
    code = """
import torch, traceback, driver_test_module as module
from torch_backplane import _C
_C.set_fallback_policy(_C.FallbackPolicy.silent)
x = torch.ones(3, device="bp", requires_grad=True)
y = (x * x).sum()
module.broken = True
for use in (lambda: x.tolist(), lambda: x + 1, lambda: y.item(), lambda: x.cpu(), y.backward):
    try:
        use()
    except module.LinkDown as error:
        assert error.args == ("cable 7",)
        assert "in copy_out" in traceback.format_exc()
    else:
        raise SystemExit("no error")
module.broken = False
assert (x * x).sum().item() == 3
"""
    succeeds(run(code, RAISING))


def test_other_errors_in_allocate_are_not_out_of_memory(run: Run) -> None:
    source = MINIMAL.replace("return bytearray(nbytes)", "raise RuntimeError('firmware crashed')")
    result = run('import torch; torch.empty(1, device="bp")', source)
    assert result.stderr.strip().endswith("RuntimeError: firmware crashed")


def test_errors_in_destructors_are_printed(run: Run) -> None:
    source = MINIMAL + "\nMinimalDevice.destroy_event = lambda self, event: 1 / 0\n"
    code = """
import torch
event = torch.Event("bp")
event.record()
del event
try:
    event = torch.Event("bp")
    event.record()
    raise KeyError("kept")        # the event is destroyed while this error is handled
except KeyError as error:
    del event
    assert error.args == ("kept",)
print("alive")
"""
    result = run(code, source)
    assert succeeds(result) == "alive\n"
    assert result.stderr.count("ZeroDivisionError") == 2


def test_external_stream_rejects_invalid_handles(run: Run) -> None:
    code = """
import torch
from torch_backplane import _C
try:
    _C.external_stream(0, 12345)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    message = succeeds(run(code))
    assert "an external stream must be made from the bp_stream of a stream of bp:0, but got 12345" in message


@pytest.mark.parametrize(
    "how", ["", "import sys; sys.exit(0)", "import threading; threading.Thread(target=use).start()"]
)
def test_process_exit_prints_nothing(how: str, tmp_path: Path, run_python: Run) -> None:
    from driver_packages import python_path

    install(tmp_path, "test", MINIMAL, "MinimalDriver")
    code = f"""
import torch
kept = torch.ones(3, device="bp")
torch.kept = torch.ones(3, device="bp")     # outlives this module
torch.kept_event = torch.Event("bp"); torch.kept_event.record()
torch.kept_stream = torch.Stream("bp")
pinned = torch.ones(3).pin_memory()
kept.copy_(pinned, non_blocking=True)       # pinned memory is freed during interpreter shutdown
def use():
    for _ in range(20):
        (kept + 1).sum().item()
{how}
"""
    result = run_python(
        code, PYTHONPATH=python_path(tmp_path), TORCH_BACKPLANE_DRIVERS="test", PYTHONWARNINGS="ignore"
    )
    assert (result.returncode, result.stderr) == (0, "")


# --- asynchronous devices ----------------------------------------------------------------------------------------

ASYNCHRONOUS = (paths.SUPPORT / "asynchronous_driver.py").read_text()


def test_streams_run_asynchronously(run: Run) -> None:
    code = """
import torch
from torch_backplane import _C
x = torch.zeros(1000, device="bp")
import driver_test_module as driver
host = torch.ones(1000).pin_memory()
torch.accelerator.synchronize()
stream, event = torch.Stream("bp"), torch.Event("bp")
with stream:
    _C.sleep(60_000)
    x.copy_(host, non_blocking=True)
    event.record()
assert not stream.query() and not event.query()
driver.awake.set()
torch.accelerator.current_stream().wait_event(event)
y = torch.empty(1000).pin_memory()
y.copy_(x, non_blocking=True)
torch.accelerator.current_stream().synchronize()
assert event.query() and y.sum().item() == 1000
driver.awake.clear()
start, end = torch.Event("bp", enable_timing=True), torch.Event("bp", enable_timing=True)
start.record(); _C.sleep(20); end.record(); end.synchronize()
assert start.elapsed_time(end) >= 20
"""
    succeeds(run(code, ASYNCHRONOUS, "AsynchronousDriver"))


def test_fallback_waits_for_its_arguments(run: Run) -> None:
    code = """
import torch
from torch_backplane import _C
_C.set_fallback_policy(_C.FallbackPolicy.silent)
host = torch.arange(100.0).pin_memory()
x = torch.zeros(100, device="bp:0")
_C.sleep(100)
x.copy_(host, non_blocking=True)
assert (x + 1).sum().item() == host.sum().item() + 100
_C.sleep(100)
x.add_(1)
assert x.to("bp:1").cpu().equal(host + 1)
"""
    succeeds(run(code, ASYNCHRONOUS, "AsynchronousDriver"))


def test_threads_do_not_deadlock(run: Run) -> None:
    code = """
import gc, sys, threading, torch
from torch_backplane import _C
_C.set_fallback_policy(_C.FallbackPolicy.silent)
sys.setswitchinterval(1e-5)      # switches threads within every call of the driver
errors = []
def work(index):
    try:
        for step in range(15):
            stream = torch.Stream(f"bp:{index % 2}")
            with stream:
                x = torch.full((50,), float(index), device=f"bp:{index % 2}", requires_grad=True)
                (x * x).sum().backward()
                assert x.grad.unique().tolist() == [2.0 * index]
                moved = x.detach().to(f"bp:{(index + 1) % 2}")
                assert moved[7].item() == index
                event = torch.Event(f"bp:{index % 2}")
                event.record()
            if step % 5 == 0:
                torch.accelerator.empty_cache()
                gc.collect()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
print("done")
"""
    assert succeeds(run(code, ASYNCHRONOUS, "AsynchronousDriver")) == "done\n"


# --- pinned host memory ------------------------------------------------------------------------------------------

# Records pinned memory by device, and raises MemoryError for more than `most` bytes.
PINNING = ASYNCHRONOUS + """
import ctypes

class Pin:
    def __init__(self, memory):
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.size = len(memory)

calls, most = [], {}

def pin(self, host_memory):
    assert not host_memory.readonly and len(host_memory) % 4096 == 0
    made = Pin(host_memory)
    assert made.start % 4096 == 0
    name = self.properties.name[-1]
    if made.size > most.get(name, 1 << 40):
        raise MemoryError("no more")
    self.__dict__.setdefault("pins", []).append(made)
    calls.append(("pin", name, made.size))
    return made

def unpin(self, handle):
    self.pins.remove(handle)
    calls.append(("unpin", self.properties.name[-1], handle.size))

AsynchronousDevice.pin, AsynchronousDevice.unpin = pin, unpin
"""

Unpins = pytest.mark.skipif(
    not hasattr(torch.accelerator, "empty_host_cache"), reason="torch 2.12 and later can empty the cache of host memory"
)

PINNED = """
import gc, os, torch, threading
from torch_backplane import _C, drivers
torch.accelerator.device_count()
import driver_test_module as driver

def calls():
    found = list(driver.calls)
    driver.calls.clear()
    return found

def is_pinned_by(index, tensor):
    pins = drivers.device(index).__dict__.get("pins", [])
    return any(one.start <= tensor.data_ptr() < one.start + one.size for one in pins)

def pinned(size): return torch.ones(size, dtype=torch.uint8).pin_memory()
def give_back():
    if not hasattr(torch.accelerator, "empty_host_cache"):
        os._exit(0)  # torch 2.11 keeps blocks pinned, so the rest of a program does not apply
    gc.collect()
    torch.accelerator.empty_host_cache()
"""


def test_host_blocks_are_pinned_for_devices_in_use(run: Run) -> None:
    succeeds(run(PINNED + """
early = pinned(5000)
assert early.is_pinned() and calls() == []  # no device has been used
x = torch.empty(5000, dtype=torch.uint8, device="bp:0")
assert calls() == [("pin", "0", 8192)] and is_pinned_by(0, early)
x.copy_(early, non_blocking=True)
torch.bp.synchronize()
assert x.sum().item() == 5000
more = [pinned(10) for _ in range(3)]
assert calls() == [("pin", "0", 4096)] * 3
y = torch.empty(10, device="bp:1")
assert sorted(calls()) == [("pin", "1", 4096)] * 3 + [("pin", "1", 8192)]
address = more.pop().data_ptr()
assert more[0].data_ptr() != address
again = pinned(10)
assert again.data_ptr() == address and calls() == []  # reuses the pinned block
assert is_pinned_by(0, again) and is_pinned_by(1, again)
del early, more, again
give_back()
assert sorted(calls()) == sorted(("unpin", i, n) for i in "01" for n in (4096, 4096, 4096, 8192))
assert not drivers.device(0).pins and not drivers.device(1).pins
""", PINNING, "AsynchronousDriver"))  # fmt: skip


@Unpins
def test_blocks_are_unpinned_after_their_streams_complete(run: Run) -> None:
    succeeds(run(PINNED + """
x = torch.zeros(1 << 20, dtype=torch.uint8, device="bp:0")
host = pinned(1 << 20)
torch.bp.synchronize()
calls()
_C.sleep(60_000)
x.copy_(host, non_blocking=True)
del host
give_back()
assert calls() == []  # the copy is pending
driver.awake.set()
torch.bp.synchronize()
give_back()
assert calls() == [("unpin", "0", 1 << 20)]
assert x.sum().item() == 1 << 20
""", PINNING, "AsynchronousDriver"))  # fmt: skip


def test_pin_failure_is_out_of_memory_and_smaller_blocks_succeed(run: Run) -> None:
    succeeds(run(PINNED + """
x, y = torch.empty(1, device="bp:0"), torch.empty(1, device="bp:1")
driver.most["1"] = 1 << 20
for _ in range(2):
    try:
        pinned(1 << 21)
    except torch.OutOfMemoryError as error:
        said = "bp out of memory. Tried to pin 2097152 bytes of host memory for Asynchronous 1: no more"
        assert str(error).startswith(said), error
    else:
        raise AssertionError("no error")
    assert calls() == [("pin", "0", 1 << 21), ("unpin", "0", 1 << 21)]
    small = pinned(1 << 20)
    assert is_pinned_by(0, small) and is_pinned_by(1, small)
    assert torch.equal(small.to("bp:1").cpu(), torch.ones(1 << 20, dtype=torch.uint8))
    del small
    give_back()
    calls()
""", PINNING, "AsynchronousDriver"))  # fmt: skip


def test_pin_failure_of_older_blocks_gives_one_warning(run: Run) -> None:
    result = run(PINNED + """
older = [pinned(1 << 21), pinned(1 << 21), pinned(100)]
driver.most["0"] = 1 << 20
x = older[0].to("bp:0")
assert x.sum().item() == 1 << 21
assert [is_pinned_by(0, one) for one in older] == [False, False, True]
del older
give_back()
assert calls() == [("pin", "0", 4096), ("unpin", "0", 4096)]
""", PINNING, "AsynchronousDriver")  # fmt: skip
    succeeds(result)
    text = "host memory that was pinned before Asynchronous 0 was used is not pinned for it: bp out of memory. Tried to"
    assert result.stderr.count(text) == 1


@Unpins
def test_pin_errors_are_raised_and_unpin_errors_printed(run: Run) -> None:
    result = run(PINNED + """
older = pinned(100)
fine = driver.AsynchronousDevice.pin
def broken(self, host_memory): raise KeyError("cable 7")
driver.AsynchronousDevice.pin = broken
def fails(call):
    try:
        call()
    except KeyError as error:
        assert error.args == ("cable 7",)
    else:
        raise AssertionError("no error")
fails(lambda: torch.empty(1, device="bp:0"))  # pins the older block
x = torch.empty(1, device="bp:0")
fails(lambda: pinned(100))
driver.AsynchronousDevice.pin = fine
host = pinned(100)
assert is_pinned_by(0, host) and host.to("bp:0").sum().item() == 100
driver.AsynchronousDevice.unpin = lambda self, handle: 1 / 0
del host, older
give_back()
again = pinned(100)
assert is_pinned_by(0, again)
""", PINNING, "AsynchronousDriver")  # fmt: skip
    succeeds(result)
    assert result.stderr.count("ZeroDivisionError") >= 1


@Unpins
def test_lost_device_does_not_unpin(run: Run) -> None:
    source = PINNING + """
from torch_backplane.drivers import DeviceError
def copy_out(self, *arguments): raise DeviceError("it caught fire", lost=True)
def break_one(device): device.copy_out = lambda *arguments: copy_out(device)
"""
    succeeds(run(PINNED + """
x, y = torch.ones(4).to("bp:0"), torch.ones(4).to("bp:1")
host = pinned(100)
driver.break_one(drivers.device(0))
try:
    x.cpu()
except torch.AcceleratorError as error:
    assert "was lost" in str(error)
calls()
del host
give_back()
assert calls() == [("unpin", "1", 4096)]
other = pinned(5000)
assert calls() == [("pin", "1", 8192)]
assert torch.equal(other.to("bp:1").cpu(), other)
""", source, "AsynchronousDriver"))  # fmt: skip


@Unpins
def test_a_forked_child_pins_and_unpins_nothing(run: Run) -> None:
    succeeds(run(PINNED + """
import os
x, host = torch.ones(4).to("bp:0"), pinned(100)
calls()
child = os.fork()
if child == 0:
    own = pinned(100)
    assert own.sum().item() == 100 and host.sum().item() == 100
    del host, own
    give_back()
    os._exit(0 if calls() == [] else 1)
assert os.waitpid(child, 0)[1] == 0
assert is_pinned_by(0, host) and calls() == []
""", PINNING, "AsynchronousDriver"))  # fmt: skip


def test_blocks_freed_during_a_driver_call_are_unpinned_later(run: Run) -> None:
    source = PINNING + """
inside, held = [], []
fill = AsynchronousDevice.copy_in
def copy_in(self, *arguments):
    inside.append(True)
    held.clear()
    fill(self, *arguments)
    inside.pop()
AsynchronousDevice.copy_in = copy_in
def checked_unpin(self, handle):
    assert not inside
    unpin(self, handle)
AsynchronousDevice.unpin = checked_unpin
"""
    settings = {"PYTORCH_ALLOC_CONF": "pinned_max_cached_size_mb:1"}  # larger blocks are not cached
    result = run(PINNED + """
x = torch.empty(4, device="bp:0")
driver.held.append(pinned(2 << 20))
calls()
x.copy_(torch.ones(4))
assert calls() == []
small = pinned(10)
assert calls() == [("unpin", "0", 2 << 20), ("pin", "0", 4096)]
""", source, "AsynchronousDriver", **settings)  # fmt: skip
    if "Unrecognized key" in result.stderr:
        pytest.skip("pinned_max_cached_size_mb is new in torch 2.13")
    succeeds(result)
    assert not result.stderr


@Unpins
def test_threads_that_pin_and_unpin_do_not_deadlock(run: Run) -> None:
    code = """
import sys
sys.setswitchinterval(1e-5)
errors = []
def work(index):
    try:
        for step in range(20):
            host = torch.full((3000 + 1000 * step,), index, dtype=torch.uint8).pin_memory()
            x = host.to(f"bp:{index % 2}", non_blocking=True)
            del host
            torch.accelerator.empty_host_cache()
            assert x[7].item() == index
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
torch.bp.synchronize(0), torch.bp.synchronize(1)
give_back()
assert not drivers.device(0).pins and not drivers.device(1).pins
"""
    succeeds(run(PINNED + code, PINNING, "AsynchronousDriver"))


@pytest.mark.parametrize("discrete", ["0", "1"])
def test_driver_with_host_memory_pins_whether_hidden_or_not(run: Run, discrete: str) -> None:
    source = IN_HOST_MEMORY + PINNING[len(ASYNCHRONOUS) :].replace("AsynchronousDevice", "MinimalDevice")
    succeeds(run(PINNED + """
x, host = torch.empty(100, dtype=torch.uint8, device="bp"), pinned(100)
assert len(calls()) == 1 and is_pinned_by(0, host)
assert x.copy_(host, non_blocking=True).cpu().sum().item() == 100
del host
give_back()
assert len(calls()) == 1
""", source, TORCH_BACKPLANE_DISCRETE=discrete))  # fmt: skip


@pytest.mark.parametrize(("one", "other"), [("pin", "unpin"), ("unpin", "pin")])
def test_driver_with_only_one_pinning_method_is_skipped(run: Run, one: str, other: str) -> None:
    source = MINIMAL + f"MinimalDevice.{one} = lambda self, argument: None\n"
    result = run("import torch; print(torch.bp.device_count())", source)
    assert succeeds(result) == "0\n"
    assert f"overrides {one}; a device that pins host memory also needs {other}" in result.stderr


def test_process_exit_with_pinned_memory_prints_nothing(tmp_path: Path, run_python: Run) -> None:
    from driver_packages import python_path

    install(tmp_path, "test", PINNING, "AsynchronousDriver")
    code = """
import torch
x = torch.ones(3, device="bp")
torch.kept = torch.ones(3).pin_memory()  # outlives this module
x.copy_(torch.kept, non_blocking=True)
other = torch.ones(3).pin_memory()
x.copy_(other, non_blocking=True)
"""
    result = run_python(
        code, PYTHONPATH=python_path(tmp_path), TORCH_BACKPLANE_DRIVERS="test", PYTHONWARNINGS="ignore"
    )
    assert (result.returncode, result.stderr) == (0, "")
