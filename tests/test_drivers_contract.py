"""What the socket and a Python driver may expect of each other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import forked
import pytest
from driver_packages import MINIMAL, install

Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]

# A driver that writes down how it is called, in `calls` of its module.
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

IN_HOST_MEMORY = MINIMAL.replace("1 << 26", "1 << 26, host_accessible=True") + '''
import ctypes, mmap

MinimalDevice.allocate = lambda self, nbytes: mmap.mmap(-1, nbytes)
MinimalDevice.address = lambda self, handle: ctypes.addressof(ctypes.c_char.from_buffer(handle))
'''

TWO = "return [MinimalDevice(), MinimalDevice()]"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(code, source) with one driver, called `test`, and no other device."""

    def call(code: str, source: str = MINIMAL, cls: str = "MinimalDriver", **env: str) -> Result:
        install(tmp_path, "test", source, cls)
        return forked.run(code, tmp_path, **{"TORCH_BACKPLANE_DRIVERS": "test", "TORCH_BACKPLANE_DISCRETE": "0"} | env)

    return call


def succeeds(result: Result) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


# --- the smallest driver -----------------------------------------------------------------------------------------


def test_four_methods_make_a_device(run: Run) -> None:
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


def test_no_more_is_asked_for_than_there_is(run: Run) -> None:
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


def test_memory_error_means_out_of_memory_and_is_tried_again(run: Run) -> None:
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
y = torch.ones(36 << 20, dtype=torch.uint8, device="bp")       # fits when the cache is given back
try:
    torch.ones(8 << 20, dtype=torch.uint8, device="bp")
except torch.OutOfMemoryError:
    print("out of memory")
assert y[-1].item() == 1
"""
    assert succeeds(run(code, source)) == "out of memory\n"


def test_no_piece_is_larger_than_the_device_has_it(run: Run) -> None:
    code = """
import torch
for _ in range(2):
    try:
        torch.empty(25 << 20, dtype=torch.uint8, device="bp")
    except torch.OutOfMemoryError as error:
        print(error)
    x = torch.ones(20 << 18, device="bp")  # which is as much as there may be
    assert x[-1].item() == 1
    del x
"""
    source = MINIMAL.replace("1 << 26", "1 << 26, largest_allocation=20 << 20")
    refused = "bp out of memory. Tried to allocate 27262976 bytes, and Minimal has no more than 20971520 in one piece"
    assert succeeds(run(code, source)).splitlines() == [refused] * 2


# Address space is a bytearray, and its pages with memory are counted.
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


def test_memory_is_mapped_piecewise(run: Run) -> None:
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


def test_some_of_the_methods_for_address_space_are_too_few(run: Run) -> None:
    source = MINIMAL + "MinimalDevice.reserve = lambda self, nbytes: bytearray(nbytes)\n"
    result = run("import torch; print(torch.bp.device_count())", source)
    assert succeeds(result) == "0\n"
    assert "has its own reserve; a device that reserves address space also needs unreserve, map, unmap" in result.stderr


def test_addresses_become_handles_and_offsets(run: Run) -> None:
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
host = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)    # outlives the memoryview of it
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


def test_peers_are_offered_the_transfer_first(run: Run) -> None:
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


def test_the_driver_in_the_documentation_works(run: Run) -> None:
    page = (Path(__file__).parent.parent / "docs" / "write-a-driver.md").read_text()
    (source,) = re.findall(r"```python\n(# my_driver.py\n.*?)```", page, re.DOTALL)
    code = """
import torch
model = torch.nn.Linear(3, 2).to("bp")
model(torch.randn(5, 3, device="bp")).sum().backward()
assert model.weight.grad.device == torch.device("bp:0")
try:
    torch.zeros(3, dtype=torch.float64, device="bp")
except TypeError as error:
    print(error)
"""
    assert succeeds(run(code, source, "MyDriver")).startswith("bp:0 (My accelerator) does not support Double; ")


# --- host-accessible memory --------------------------------------------------------------------------------------


def test_host_accessible_memory_is_used_where_it_is(run: Run) -> None:
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


def test_what_a_driver_raises_comes_out_as_it_was(run: Run) -> None:
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


def test_an_error_in_allocate_is_no_memory_shortage(run: Run) -> None:
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
    raise KeyError("kept")        # the event goes while this is on its way
except KeyError as error:
    del event
    assert error.args == ("kept",)
print("alive")
"""
    result = run(code, source)
    assert succeeds(result) == "alive\n"
    assert result.stderr.count("ZeroDivisionError") == 2


def test_wrong_numbers_are_no_streams(run: Run) -> None:
    code = """
import torch
from torch_backplane import _C
try:
    _C.external_stream(0, 12345)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    message = succeeds(run(code))
    assert "an external stream is made from the bp_stream of a stream of bp:0, and 12345 is none" in message


@pytest.mark.parametrize(
    "how", ["", "import sys; sys.exit(0)", "import threading; threading.Thread(target=use).start()"]
)
def test_the_end_of_the_process_is_quiet(how: str, tmp_path: Path, run_python: Run) -> None:
    from driver_packages import python_path

    install(tmp_path, "test", MINIMAL, "MinimalDriver")
    code = f"""
import torch
kept = torch.ones(3, device="bp")
torch.kept = torch.ones(3, device="bp")     # outlives this module
torch.kept_event = torch.Event("bp"); torch.kept_event.record()
torch.kept_stream = torch.Stream("bp")
pinned = torch.ones(3).pin_memory()
kept.copy_(pinned, non_blocking=True)       # pinned memory goes after Python has begun to end
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

ASYNCHRONOUS = (Path(__file__).parent / "asynchronous_driver.py").read_text()


def test_streams_run_on_while_the_program_does(run: Run) -> None:
    code = """
import torch
from torch_backplane import _C
x = torch.zeros(1000, device="bp")
host = torch.ones(1000).pin_memory()
torch.accelerator.synchronize()
stream, event = torch.Stream("bp"), torch.Event("bp")
with stream:
    _C.sleep(300)
    x.copy_(host, non_blocking=True)
    event.record()
assert not stream.query() and not event.query()
torch.accelerator.current_stream().wait_event(event)
y = torch.empty(1000).pin_memory()
y.copy_(x, non_blocking=True)
torch.accelerator.current_stream().synchronize()
assert event.query() and y.sum().item() == 1000
start, end = torch.Event("bp", enable_timing=True), torch.Event("bp", enable_timing=True)
start.record(); _C.sleep(20); end.record(); end.synchronize()
assert start.elapsed_time(end) >= 20
"""
    succeeds(run(code, ASYNCHRONOUS, "AsynchronousDriver"))


def test_the_fallback_waits_for_its_arguments(run: Run) -> None:
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


def test_threads_do_not_lock_each_other_out(run: Run) -> None:
    code = """
import gc, sys, threading, torch
from torch_backplane import _C
_C.set_fallback_policy(_C.FallbackPolicy.silent)
sys.setswitchinterval(1e-5)      # the GIL changes hands inside every call of the driver
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
