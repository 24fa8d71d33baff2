"""Tests the CUDA driver's devices on the emulator: context, memory, streams, peers, kernels."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., str]

PREAMBLE = """
import torch
from cuda.bindings import driver as cuda
from library_programs import raised

def checked(answer):
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]

def current():
    return int(checked(cuda.cuCtxGetCurrent()))

def enter(index=0):
    checked(cuda.cuCtxPushCurrent(torch.bp.native_context(index)))
"""


@pytest.fixture
def values(run: Run) -> Callable[..., Any]:
    """values(code, **env): runs code after PREAMBLE, and returns the value that it assigns to `found`."""
    return lambda code, **env: ast.literal_eval(run(f"{PREAMBLE}\n{code}\nprint(repr(found))", **env))


def test_properties_come_from_the_device(values: Callable[..., Any]) -> None:
    found = values(
        """
from torch_backplane import drivers
device = drivers.device(1)
target = device.properties.target
one = torch.bp.get_device_properties(1)
found = (
    torch.bp.device_count(), one.name, (one.major, one.minor), one.total_memory, one.multi_processor_count,
    target.subgroup_size, target.max_group_size, target.local_memory, target.subgroup_shuffles,
    device.properties.dlpack_device, device.properties.software.split(",")[0],
)
""",
        CUDA_EMULATOR_ARCHITECTURE="90",
        CUDA_EMULATOR_MEMORY=str(1 << 30),
        CUDA_EMULATOR_UNITS="7",
    )
    assert found == (
        *(4, "Emulated CUDA device 1", (9, 0), 1 << 30, 7),
        *(32, 1024, 48 << 10, True),
        *((2, 1), "CUDA 13.0"),
    )  # fmt: skip


def test_the_primary_context_is_made_at_first_use_and_shared(values: Callable[..., Any]) -> None:
    before, after, is_primary = values("""
torch.bp.device_count()
device = checked(cuda.cuDeviceGet(1))
states = [checked(cuda.cuDevicePrimaryCtxGetState(device))[1]]
torch.ones(3, device="bp:1")
states.append(checked(cuda.cuDevicePrimaryCtxGetState(device))[1])
found = *states, torch.bp.native_context(1) == int(checked(cuda.cuDevicePrimaryCtxRetain(device)))
""")
    assert (before, after, is_primary) == (0, 1, True)


def test_calls_restore_the_context_of_another_library(values: Callable[..., Any]) -> None:
    found = values("""
import threading
torch.bp.device_count()
other = checked(cuda.cuDevicePrimaryCtxRetain(checked(cuda.cuDeviceGet(2))))
seen = []
def use():
    seen.append(current())
    x = torch.arange(5.0, device="bp:0")
    seen.append(current())
    y = (x * 2).to("bp:1")
    y.cpu()
    torch.bp.synchronize(1)
    event = torch.bp.Event(); event.record(); event.synchronize()
    seen.append(current())
threading.Thread(target=use).start()
for thread in threading.enumerate():
    if thread is not threading.current_thread(): thread.join()
checked(cuda.cuCtxPushCurrent(other))
use()
found = [one == int(other) if one else one for one in seen]
""")
    assert found == [0, 0, 0, True, True, True]


@pytest.mark.slow
def test_addresses_are_cudas(values: Callable[..., Any]) -> None:
    found = values("""
x = torch.arange(24.0, device="bp:1").view(4, 6)[1:, ::2]
host = bytearray(4)
torch.bp.synchronize(1)
enter(1)
checked(cuda.cuMemcpyDtoH(host, x.data_ptr() + 4 * x.stride(0), 4))
described = x.__cuda_array_interface__
found = (
    torch.frombuffer(host, dtype=torch.float32).item(), x.cpu()[1, 0].item(), tuple(map(int, x.__dlpack_device__())),
    (described["shape"], described["strides"], described["typestr"], described["data"] == (x.data_ptr(), False)),
    torch.ones(2, device="bp").__cuda_array_interface__["strides"],
    torch.ones(0, device="bp").__cuda_array_interface__["data"],
    raised(lambda: torch.ones(2, device="bp", requires_grad=True).__cuda_array_interface__),
    hasattr(torch.ones(2), "__cuda_array_interface__"),
)
""")
    assert found == (
        *(12.0, 12.0, (2, 1)),
        ((3, 3), (24, 8), "<f4", True),
        *(None, (0, False)),
        "RuntimeError: __cuda_array_interface__ of a tensor that requires grad: use tensor.detach()",
        False,
    )


def test_pinned_memory_is_registered_once_for_all_devices(values: Callable[..., Any]) -> None:
    found = values("""
torch.ones(1, device="bp:0"), torch.ones(1, device="bp:1")
pinned = torch.arange(10.0).pin_memory()
enter()
again = cuda.cuMemHostRegister(pinned.data_ptr(), 4096, 0)[0]
copied = pinned.to("bp:1", non_blocking=True).cpu().tolist()
found = int(again), copied
""")
    assert found == (712, [float(i) for i in range(10)])


def test_out_of_memory(values: Callable[..., Any]) -> None:
    error, (free, total), works = values(
        """
x = torch.empty(40 << 20, dtype=torch.uint8, device="bp")
enter()
other = checked(cuda.cuMemAlloc(40 << 20))  # another library's
error = raised(lambda: torch.empty(40 << 20, dtype=torch.uint8, device="bp"))
free, total = torch.bp.mem_get_info()
checked(cuda.cuMemFree(other))
found = error, (free, total), torch.empty(40 << 20, dtype=torch.uint8, device="bp").shape[0]
""",
        CUDA_EMULATOR_MEMORY=str(100 << 20),
    )
    assert error.startswith("OutOfMemoryError: bp out of memory. Tried to allocate 40.00 MiB")
    assert (free, total) == (20 << 20, 100 << 20)
    assert works == 40 << 20


def test_native_streams(values: Callable[..., Any]) -> None:
    found = values("""
torch.ones(1, device="bp")
urgent, plain = torch.bp.Stream(priority=-1), torch.bp.Stream()
enter()
priorities = [checked(cuda.cuStreamGetPriority(one.native_handle)) for one in (urgent, plain)]
flags = checked(cuda.cuStreamGetFlags(plain.native_handle))
own = int(checked(cuda.cuStreamCreate(1)))
adopted = torch.bp.ExternalStream(own)
with adopted:
    y = torch.arange(4.0, device="bp") * 3
adopted.synchronize()
same = torch.bp.ExternalStream(own) == adopted
enter(1)
foreign = int(checked(cuda.cuStreamCreate(1)))
found = (
    priorities, int(flags), y.tolist(), same, raised(torch.bp.ExternalStream, foreign).replace(str(foreign), "N"),
    *(raised(torch.bp.ExternalStream, number) for number in (12345, 2, 1 << 20)),
    torch.bp.ExternalStream(1).native_handle,
)
del adopted
checked(cuda.cuStreamSynchronize(own))
""")
    assert found == (
        *([-1, 0], 1, [0.0, 3.0, 6.0, 9.0], True),
        "ValueError: the stream N does not belong to the primary context of Emulated CUDA device 0: create it in "
        "torch.bp.native_context()",
        *("ValueError: 12345 is not a CUDA stream", "ValueError: 2 is not a CUDA stream"),
        "ValueError: 1048576 is not a CUDA stream: cuStreamGetCtx answered CUDA_ERROR_INVALID_HANDLE (400): invalid "
        "resource handle",
        1,
    )


def test_streams_run_concurrently_and_events_order_them(values: Callable[..., Any]) -> None:
    found = values("""
import time
x = torch.zeros(1000, device="bp")
torch.bp.synchronize()
side = torch.bp.Stream()
start, end = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
begun = time.perf_counter()
with side:
    start.record()
    torch.bp._sleep(300_000_000)
    x += 1
    end.record()
issued, is_done = time.perf_counter() - begun, side.query()
torch.bp.current_stream().wait_event(end)
y = (x * 2).cpu()
found = issued < 0.25, is_done, y.sum().item(), start.elapsed_time(end) > 200
""")
    assert found == (True, False, 2000.0, True)


def test_waiting_lets_other_threads_run_python(values: Callable[..., Any]) -> None:
    found = values("""
import threading
x = torch.ones(3, device="bp")
torch.bp.synchronize()
def waits(wait):
    torch.bp._sleep(300_000_000)
    turns, done = [], threading.Event()
    def run():
        while not done.wait(0.01):
            turns.append(1)
    thread = threading.Thread(target=run)
    thread.start()
    wait()
    done.set()
    thread.join()
    return len(turns)
event = torch.bp.Event()
found = [
    waits(torch.bp.synchronize) > 3, waits(lambda: (event.record(), event.synchronize())) > 3, waits(x.cpu) > 3
]
""")
    assert found == [True, True, True]


@pytest.mark.parametrize("connected", ["1", "0"])
def test_copies_between_devices(values: Callable[..., Any], connected: str) -> None:
    found = values(
        """
x = torch.arange(100000, device="bp:0")
torch.bp._sleep(50_000_000)
y = (x + 1).to("bp:1") * 2
z = y.to("bp:0", non_blocking=True)
found = torch.bp.can_device_access_peer(0, 1), torch.equal(z.cpu(), (torch.arange(100000) + 1) * 2)
""",
        CUDA_EMULATOR_PEERS=connected,
    )
    assert found == (True, True)


def test_overlapping_copies_and_the_methods_of_transfers(values: Callable[..., Any]) -> None:
    found = values("""
from torch_backplane import drivers
x = torch.arange(10, device="bp")
x[1:].copy_(x[:-1].clone())
device = drivers.device(0)
stream, segment = device.create_stream(0), device.allocate(2 << 20)
device.copy_in(segment, 3, memoryview(b"abcdef"), stream)
device.copy(segment, 4, segment, 3, 6, stream)
got = memoryview(bytearray(7))
device.copy_out(segment, 3, got, stream)
device.synchronize_stream(stream)
device.destroy_stream(stream)
device.free(segment)
found = x.tolist(), bytes(got)
""")
    assert found == ([0, *range(9)], b"aabcdef")


KERNELS = """
from torch_backplane import _C
from torch_backplane.drivers.cuda.compiler import Compiler
TEXT = '''
extern "C" __global__ void scale(float* x, float by, unsigned count) {
  __shared__ float kept[64];
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  kept[threadIdx.x] = i < count ? x[i] : 0.0f;
  __syncthreads();
  if (i < count) x[i] = kept[threadIdx.x] * by;
}
'''
import struct
def launch(handle, x):
    numbers = struct.pack("f", 3.0), struct.pack("I", x.numel())
    _C.launch_kernel(0, handle, (128, 1, 1), (64, 1, 1), [x, *numbers])
    return x.tolist()
def compiled(code, entry="scale"):
    return _C.compile_kernel(0, code, entry, "test")
"""


def test_kernels_from_text_and_binaries(values: Callable[..., Any]) -> None:
    found = values(
        KERNELS
        + """
x = torch.ones(100, device="bp")
cubin, ptx = Compiler((8, 0), []).build(TEXT), Compiler((8, 0), ["--gpu-architecture=compute_80"])
ptx.architecture = "compute_80"
ptx._options = ["--gpu-architecture=compute_80"]
results = [set(launch(compiled(one), x)) for one in (TEXT, cubin, ptx.build(TEXT))]
newer = Compiler((9, 0), []).build(TEXT)
found = (
    results, raised(compiled, newer), raised(compiled, cubin, "missing"), raised(compiled, b"nonsense"),
)
"""
    )
    results, newer, missing, nonsense = found
    assert results == [{3.0}, {9.0}, {27.0}]
    assert "the binary is for " in newer
    assert "and Emulated CUDA device 0 is sm_80" in newer
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU (209)" in newer
    assert "it has no kernel missing: cuModuleGetFunction answered CUDA_ERROR_NOT_FOUND" in missing
    assert "the binary is for no GPU" in nonsense


def test_build_errors_have_the_compilers_log(values: Callable[..., Any]) -> None:
    found = values(
        KERNELS
        + """
x = torch.ones(100, device="bp")
handle = compiled(TEXT.replace("* by", "* nothing"))
found = raised(launch, handle, x)
"""
    )
    assert found.startswith("RuntimeError: the kernel scale of test could not be built for Emulated CUDA device 0")
    assert "NVRTC_ERROR_COMPILATION for --gpu-architecture=sm_80" in found
    assert "nothing" in found


def test_resources_of_kernels(values: Callable[..., Any]) -> None:
    registers, spilled, shared = values(
        KERNELS
        + """
from torch_backplane import drivers
one = drivers.device(0).kernel_resources(drivers.device(0).compile(TEXT, "scale"))
found = one.registers, one.spilled_bytes, one.static_shared_memory
"""
    )
    assert registers > 0
    assert spilled == 0
    assert shared == 256


def test_kernels_are_loaded_from_the_cache(values: Callable[..., Any], tmp_path: Any) -> None:
    code = """
from torch_backplane import drivers
from torch_backplane.drivers import builds
torch.ones(5, device="bp").exp().cpu()
builds.wait_for_all()
found = drivers.device(0).build_counts()
"""
    first, second = (values(code, TORCH_BACKPLANE_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert first["loaded"] == second["built"] == 0
    assert first["built"] == second["loaded"] > 0
