"""A training program that calls every entry point of CUDA that the driver uses. Each fails once: test_cuda_faults.py.

Runs in a process with emulated devices. Prints a line of JSON for each part of the program and each function that it
calls: the names of both, what the program said when the call failed, and what it says afterwards.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from torch_backplane import _C, drivers

LIBCUDA = ctypes.CDLL(os.environ["TORCH_BACKPLANE_CUDA_LIBRARY"])
MANY = 1 << 22  # elements: more than what the allocator's cache has

COUNTS = {"sizes": 2, "kernels": 0}  # so that each run has other ones

KERNEL = """
extern "C" __global__ void scaled(float* x) {
  extern __shared__ float all[];
  all[threadIdx.x] = x[threadIdx.x];
  x[threadIdx.x] = 2 * all[threadIdx.x];
}
"""


def transfers() -> None:
    """Copies in all directions, pinned memory, streams, events, growth of the cache."""
    x = torch.arange(12.0).view(3, 4).pin_memory().to("bp", non_blocking=True)
    side = torch.bp.Stream(priority=-1)
    side.wait_stream(torch.bp.current_stream())
    with side:
        y = (x * 2).sin()
    side.record_event().synchronize()
    side.query()
    start, end = (torch.bp.Event(enable_timing=True) for _ in range(2))
    start.record()
    z = torch.zeros(3, 4, device="bp").copy_(y)
    overlapping = torch.arange(20.0, device="bp")
    overlapping[1:].copy_(overlapping[:-1].clone())
    end.record()
    while not end.query():
        pass
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    torch.bp.mem_get_info()
    torch.bp._sleep(1)
    assert torch.allclose(z.cpu(), (torch.arange(12.0).view(3, 4) * 2).sin())
    other = z.to("bp:1")
    assert torch.allclose((other + 1).cpu(), z.cpu() + 1)
    big = torch.ones(MANY, device="bp")
    assert big[-1].item() == 1
    del big
    torch.bp.empty_cache()


def training() -> None:
    """Steps of a small network, which run in a graph."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to("bp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(32, 8, device="bp"), torch.randn(32, 1, device="bp")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    first = step().item()
    graph = torch.bp.Graph()
    torch.bp.synchronize()
    with torch.bp.graph(graph):
        loss = step()
        noise = torch.rand_like(x)
        copied = torch.zeros_like(noise)
        copied.copy_(noise)
    for _ in range(3):
        graph.replay()
    assert loss.item() < first
    assert torch.equal(copied.cpu(), noise.cpu())


def library_calls() -> None:
    """A graph with products and transforms, whose plans are made in the capture."""
    COUNTS["sizes"] += 1
    x, w = torch.randn(4, 8, device="bp"), torch.randn(8, 2 * COUNTS["sizes"], device="bp")
    torch.bp.synchronize()
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        y = (x @ w).relu()
        result = torch.fft.irfft(torch.fft.rfft(y), y.shape[1])
    graph.replay()
    assert torch.allclose(result.cpu(), (x.cpu() @ w.cpu()).relu(), rtol=1e-4, atol=1e-4)
    matrix = torch.eye(4, device="bp") * 4
    assert torch.allclose(torch.linalg.cholesky_ex(matrix)[0].cpu(), torch.eye(4) * 2)


def kernels() -> None:
    """Kernels from text and from binaries, with launch attributes."""
    COUNTS["kernels"] += 1
    text = f"// {COUNTS['kernels']}\n{KERNEL}"
    kernel = _C.CompiledKernel(0, text, "scaled", "test", ["output"])
    x = torch.arange(64.0, device="bp")
    _C.launch(kernel, [x], [64], [64], dynamic_shared_memory=256)
    assert torch.equal(x.cpu(), 2 * torch.arange(64.0))
    device = drivers.device(0)
    loaded = device.compile(text, "scaled")
    assert device.kernel_resources(loaded).registers > 0
    binary = device._compiler.get(text, lambda program: program)
    from_binary = _C.CompiledKernel(0, binary, "scaled", "test", ["output"])
    _C.launch(from_binary, [x], [64], [64], dynamic_shared_memory=60 << 10)  # more than kernels have by default
    assert torch.equal(x.cpu(), 4 * torch.arange(64.0))


def segments() -> None:
    """Memory of address ranges, in the allocator."""
    torch.bp.memory._set_allocator_settings("expandable_segments:True")
    try:
        x = torch.ones(MANY, device="bp")
        assert x[-1].item() == 1
        del x
        torch.bp.empty_cache()
    finally:
        torch.bp.memory._set_allocator_settings("expandable_segments:False")


def device_methods() -> None:
    """What the runtime calls only at first uses, or in rare cases."""
    device, peer = drivers.device(0), drivers.device(1)
    assert device.can_access_peer(peer)
    memory = bytearray(8192)
    pinned = device.pin(memoryview(memory))
    device.unpin(pinned)
    first, second = (device.allocate(64) for _ in range(2))
    stream = device.create_stream(0)
    try:
        device.copy_in(first, 0, memoryview(memory)[:64], stream)
        device.copy(second, 0, first, 0, 64, stream)
        device.copy_out(second, 0, memoryview(memory)[:64], stream)
        device.synchronize_stream(stream)
        assert device.query_stream(stream)
        device.adopt_stream(stream.handle)
    finally:
        device.destroy_stream(stream)
        device.free(first)
        device.free(second)
    assert device.memory_info()[0] > 0


class CCommand(ctypes.Structure):
    """`command_t` of docs/driver-contract.md."""

    _fields_ = (
        ("kind", ctypes.c_uint64), ("after", ctypes.c_void_p), ("after_count", ctypes.c_uint64),
        ("kernel", ctypes.c_void_p), ("items", ctypes.c_uint64 * 3), ("group", ctypes.c_uint64 * 3),
        ("arguments", ctypes.c_void_p), ("argument_count", ctypes.c_uint64),
        ("to", ctypes.c_void_p), ("to_offset", ctypes.c_uint64), ("from_", ctypes.c_void_p),
        ("from_offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("value", ctypes.c_int),
        ("function", ctypes.c_void_p), ("argument", ctypes.c_void_p),
    )  # fmt: skip


COPY, FILL, HOST_CALLBACK, CAPTURED = 1, 2, 3, 4
NOTHING = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


def graphs_of_the_contract() -> None:
    """Graphs with commands that the runtime's graphs of CUDA devices do not have, or do not change."""
    device = drivers.device(0)
    functions = device.native_launcher.functions

    def call(name: str, *arguments: Any) -> None:
        status = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p for _ in arguments))(functions[name])(*arguments)
        if status != 0:
            raise device.native_error(name, status)

    a, b, c = (torch.zeros(32, dtype=torch.uint8, device="bp") for _ in range(3))
    torch.bp.synchronize()

    def captured(value: int) -> int | None:
        queue, made = ctypes.c_void_p(), ctypes.c_void_p()
        call("begin_capture", ctypes.byref(queue))
        try:
            call("fill", queue, c.data_ptr(), 0, 32, value)
        finally:
            call("end_capture", queue, ctypes.byref(made))
        return made.value

    def commands(value: int, offset: int) -> ctypes.Array[CCommand]:
        function = ctypes.cast(NOTHING, ctypes.c_void_p).value
        return (CCommand * 4)(
            CCommand(kind=FILL, to=a.data_ptr(), bytes=32, value=value),
            CCommand(kind=COPY, to=b.data_ptr() + offset, from_=a.data_ptr(), bytes=8),
            CCommand(kind=HOST_CALLBACK, function=function),
            CCommand(kind=CAPTURED, argument=captured(value)),
        )

    graph, updated, stream = ctypes.c_void_p(), ctypes.c_int(), device.create_stream(0)
    call("fill", stream.handle, a.data_ptr(), 0, 32, 5)
    call("graph_create", commands(3, 0), 4, ctypes.byref(graph))
    try:
        call("graph_launch", graph, stream.handle)
        call("graph_update", graph, commands(4, 8), 4, ctypes.byref(updated))
    finally:
        device.synchronize_stream(stream)
        call("graph_destroy", graph)
        device.destroy_stream(stream)
    assert a.unique().tolist() == c.unique().tolist() == [3]
    assert updated.value == 1


def serve(connection: Any) -> None:
    """In the other process: answer tensors and events with others."""
    while True:
        given = ForkingPickler.loads(connection.recv_bytes())
        if given is None:
            return
        x, handle = given
        torch.bp.Event.from_ipc_handle(x.device, handle).wait()
        answer = x + 1
        event = torch.bp.Event(interprocess=True)
        event.record()
        connection.send_bytes(ForkingPickler.dumps((answer, event.ipc_handle())))
        connection.recv_bytes()  # until then, the tensor is there
        del x, answer, event


class Neighbour:
    """A process that shares tensors and events."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()

    def sharing(self) -> None:
        """Sends a tensor and an event to another process, which answers with others."""
        x = torch.arange(8.0, device="bp")
        event = torch.bp.Event(interprocess=True)
        event.record()
        self.connection.send_bytes(ForkingPickler.dumps((x, event.ipc_handle())))
        given = self.connection.recv_bytes()
        try:
            y, handle = ForkingPickler.loads(given)
            torch.bp.Event.from_ipc_handle(y.device, handle).wait()
            assert torch.equal(y.cpu(), x.cpu() + 1)
            del y
        finally:
            gc.collect()
            self.connection.send_bytes(b"done")

    def end(self) -> None:
        self.connection.send_bytes(ForkingPickler.dumps(None))
        self.process.join(60)


# --- faults ----------------------------------------------------------------------------------------------------------

ERROR = 304  # CUDA_ERROR_OPERATING_SYSTEM, after which the context is as before


def calls() -> dict[str, int]:
    """Return how often each function of libcuda was called."""
    text = ctypes.create_string_buffer(1 << 16)
    LIBCUDA.emulator_calls(text, ctypes.c_size_t(len(text)))
    return {name: int(count) for name, count in map(str.split, text.value.decode().splitlines())}


def attempt(part: Callable[[], None]) -> list[str]:
    """Run a part. Return its exception, its warnings, and those of PyTorch's destructors, as text."""
    said = []
    with warnings.catch_warnings(record=True) as warned, tempfile.TemporaryFile("w+") as output:
        warnings.simplefilter("always")
        kept = os.dup(2)
        os.dup2(output.fileno(), 2)
        try:
            part()
            torch.bp.synchronize()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        gc.collect()
        os.dup2(kept, 2)
        os.close(kept)
        output.seek(0)
        said += [f"{one.category.__name__}: {one.message}" for one in warned]
        return said + [line for line in output.read().splitlines() if "Warning:" in line]


def main() -> None:
    """Let each call of each part fail once. Print what was said, and what a run of the part says afterwards."""
    neighbour = Neighbour()
    parts = [
        transfers, training, library_calls, kernels, segments, device_methods, graphs_of_the_contract, neighbour.sharing
    ]  # fmt: skip
    for part in parts:
        assert attempt(part) == [], attempt(part)
        before = calls()
        assert attempt(part) == []
        used = [name for name, count in calls().items() if count > before.get(name, 0) and name.startswith("cu")]
        for name in used:
            LIBCUDA.emulator_inject_fault(name.encode(), ctypes.c_long(1), ERROR)
            count = calls()[name]
            said = attempt(part)
            if calls()[name] > count:  # not every run calls it
                print(json.dumps([part.__name__, name, said, attempt(part)]), flush=True)
            LIBCUDA.emulator_inject_fault(name.encode(), ctypes.c_long(0), 0)
    neighbour.end()


if __name__ == "__main__":
    main()
