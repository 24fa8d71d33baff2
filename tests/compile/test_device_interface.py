"""What Dynamo and Inductor ask about devices (`compile/device_interface.py`)."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo import device_interface
from torch._dynamo.device_interface import get_interface_for_device, get_registered_device_interfaces
from torch._inductor.runtime.hints import DeviceProperties

from torch_backplane.compile.device_interface import BpInterface
from torch_backplane.planning.launch import target_of

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def current_device_0() -> Iterator[None]:
    with torch.bp.device(0):
        yield


def test_it_is_registered_for_each_device() -> None:
    torch.bp.init()
    assert torch.bp.device_count() == 4
    for name in ("bp", "bp:0", "bp:1", "bp:2", "bp:3"):
        assert get_interface_for_device(name) is BpInterface
    assert get_interface_for_device(torch.device("bp", 2)) is BpInterface
    with pytest.raises(NotImplementedError):
        get_interface_for_device("bp:4")


def test_other_interfaces_are_pytorchs() -> None:
    others = {name: one for name, one in get_registered_device_interfaces() if not name.startswith("bp")}
    assert set(others) >= {"cpu", "cuda", "mps", "xpu"}
    assert all(one.__module__ == "torch._dynamo.device_interface" for one in others.values())


def test_it_has_everything_that_cudas_has() -> None:
    cuda = {name for name in vars(device_interface.CudaInterface) if not name.startswith("__")}
    cuda -= {"is_triton_capable"}  # the base class answers False
    assert cuda - set(vars(BpInterface)) <= {"get_device_properties"}  # the base class asks Worker
    worker = {name for name in vars(device_interface.CudaInterface.Worker) if not name.startswith("__")}
    assert worker <= set(vars(BpInterface.Worker))


@pytest.mark.usefixtures("current_device_0")
def test_the_current_device() -> None:
    assert BpInterface.is_available()
    assert BpInterface.device_count() == 4
    with BpInterface.device(2):
        assert BpInterface.current_device() == torch.bp.current_device() == 2
        assert BpInterface.exchange_device(1) == 2
        assert BpInterface.maybe_exchange_device(-1) == -1
        assert torch.bp.current_device() == 1
    assert BpInterface.current_device() == 0
    BpInterface.set_device(3)
    assert torch.bp.current_device() == 3
    with device_interface.DeviceGuard(BpInterface, 1):
        assert torch.bp.current_device() == 1
    assert torch.bp.current_device() == 3


@pytest.mark.usefixtures("current_device_0")
def test_streams_and_events() -> None:
    stream = BpInterface.Stream(1)
    with BpInterface.stream(stream):
        assert BpInterface.current_stream() == stream
        assert BpInterface.get_raw_stream(1) == stream.bp_stream
    assert BpInterface.get_raw_stream(1) == torch.bp.default_stream(1).bp_stream
    BpInterface.set_stream(stream)
    assert torch.bp.current_device() == 1
    default = torch.bp.default_stream(1)
    BpInterface._set_stream_by_id(default.stream_id, default.device_index, default.device_type)
    assert torch.bp.current_stream() == default
    start, end = BpInterface.Event(enable_timing=True), BpInterface.Event(enable_timing=True)
    start.record()
    end.record()
    BpInterface.synchronize("bp:1")
    assert start.elapsed_time(end) >= 0
    held = torch.empty(1 << 16, device="bp:1")
    assert BpInterface.memory_allocated("bp:1") == torch.bp.memory_allocated("bp:1") >= held.nbytes


def test_properties_are_those_of_the_target() -> None:
    for index in range(torch.bp.device_count()):
        given, target = torch.bp.get_device_properties(index), target_of(index)
        found = BpInterface.get_device_properties(torch.device("bp", index))
        assert (found.name, found.total_memory) == (given.name, given.total_memory)
        assert (found.major, found.minor) == torch.bp.get_device_capability(index)
        assert found.multi_processor_count == given.multi_processor_count
        assert found.max_threads_per_block == target.max_group_size
        assert found.L2_cache_size == target.cache_bytes
        read = DeviceProperties.create(torch.device("bp", index))
        assert read == DeviceProperties(
            type="bp",
            index=index,
            multi_processor_count=found.multi_processor_count,
            cc=BpInterface.get_compute_capability(index),
            major=found.major,
            max_threads_per_multi_processor=found.max_threads_per_multi_processor,
            max_threads_per_block=found.max_threads_per_block,
            warp_size=found.warp_size,
        )
        assert read.warp_size > 0
        assert read.max_threads_per_multi_processor > 0


def test_devices_as_arguments() -> None:
    expected = BpInterface.get_device_properties(1)
    for device in ("bp:1", torch.device("bp:1")):
        assert BpInterface.get_device_properties(device) is expected
        assert BpInterface.get_compute_capability(device) == expected.capability
    with torch.bp.device(1):
        for device in (None, "bp", torch.device("bp")):
            assert BpInterface.get_device_properties(device) is expected
    for device in ("cuda:0", torch.device("cpu")):
        with pytest.raises(ValueError, match="Expected a bp device"):
            BpInterface.get_device_properties(device)
    for index in (-1, 4):
        with pytest.raises(AssertionError, match=f"Invalid device id: {index}; the number of bp devices is 4"):
            BpInterface.get_device_properties(index)


def test_dtypes_are_those_of_the_current_device() -> None:
    for index in range(torch.bp.device_count()):
        with torch.bp.device(index):
            dtypes = torch.bp.get_device_properties().dtypes
            for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bits8):
                assert BpInterface.is_dtype_supported(dtype) == (dtype in dtypes)
            assert BpInterface.is_bf16_supported() == torch.bp.is_bf16_supported()


def test_triton_is_refused() -> None:
    assert not BpInterface.is_triton_capable("bp:0")
    with pytest.raises(RuntimeError, match="Triton templates do not support bp devices"):
        BpInterface.raise_if_triton_unavailable("bp:0")


DESCRIBE = """
import torch
from torch._dynamo.device_interface import get_interface_for_device

found = get_interface_for_device("bp").get_device_properties("bp:0")
assert not torch.bp.is_initialized()
print(found.capability, found.warp_size, found.max_threads_per_multi_processor, found.multi_processor_count)
"""


@pytest.mark.usefixtures("platform")
@pytest.mark.slow
def test_the_capability_identifies_the_target(run_forked: Run, run_python: Run) -> None:
    """It is the same in all processes, and differs between targets. Asking for it initializes no device."""

    def found(run: Run, driver: str, target: str | None = None) -> list[str]:
        done = run(DESCRIBE, TORCH_BACKPLANE_DRIVERS=driver, TORCH_BACKPLANE_TARGET=target)
        assert done.stderr == ""
        return done.stdout.split()

    host, cpu = found(run_forked, "host"), found(run_forked, "opencl")
    ada, rdna = found(run_forked, "opencl", "nvidia-ada"), found(run_forked, "opencl", "amd-rdna3")
    assert found(run_python, "opencl", "nvidia-ada") == ada
    assert len({host[0], cpu[0], ada[0], rdna[0]}) == 4
    assert host[1] == "32"
    assert ada[1:] == ["32", "2048", "128"]


WORKER = """
import torch
from torch._dynamo import device_interface
from torch._dynamo.device_interface import get_interface_for_device

interface = get_interface_for_device("bp")
device_interface.caching_worker_device_properties["bp"] = ["zero", "one"]  # recorded by the main process
assert interface.Worker.current_device() == 0
interface.Worker.set_device(1)
assert interface.Worker.current_device() == 1
assert interface.get_device_properties() == "one"
assert interface.get_device_properties("bp:0") == "zero"
assert not torch.bp.is_initialized()
from torch_backplane import _C
assert not _C.is_discovered()
"""


def test_compile_workers_use_what_the_main_process_recorded(run_forked: Run) -> None:
    done = run_forked(WORKER)
    assert done.stderr == ""
    assert done.returncode == 0


POOL = """
import torch
from torch._inductor.async_compile import AsyncCompile

if __name__ == "__main__":
    assert torch.bp.is_available()
    AsyncCompile.wait_pool_ready()
    asked = "__import__('torch_backplane')._C.is_discovered(), __import__('torch').bp.is_initialized()"
    jobs = [AsyncCompile.process_pool().submit(eval, f"(__import__('time').sleep(0.5), {asked})[1:]") for _ in range(2)]
    print([job.result() for job in jobs])
"""


def test_compile_workers_discover_no_devices(run_python: Run) -> None:
    done = run_python(POOL, TORCHINDUCTOR_COMPILE_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[(False, False), (False, False)]\n"


def test_properties_can_be_sent_to_compile_workers() -> None:
    found = BpInterface.get_device_properties("bp:0")
    assert pickle.loads(pickle.dumps(found)) == found


def test_importing_dynamo_discovers_no_device(run_forked: Run) -> None:
    done = run_forked(
        """
import torch
import torch._dynamo
from torch._dynamo.device_interface import get_interface_for_device, get_registered_device_interfaces
from torch_backplane import _C

assert get_interface_for_device("bp").__name__ == "BpInterface"
assert [name for name, _ in get_registered_device_interfaces() if name.startswith("bp")] == ["bp"]
assert not _C.is_discovered()
torch.ones(1, device="bp")
assert get_interface_for_device("bp:0").__name__ == "BpInterface"
"""
    )
    assert done.stderr == ""
    assert done.returncode == 0
