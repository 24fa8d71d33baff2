"""Tests graphs with calls of cuBLAS and cuFFT on emulated CUDA devices: stream capture makes them CUDA graphs.

The emulated libraries refuse to prepare something during a capture, as a cudaMalloc() of NVIDIA's would be refused, and
a transform whose plan has been destroyed is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import paths
import pytest

Run = Callable[..., str]

PREAMBLE = f"""
import ctypes, os, sys, threading, warnings
import torch
sys.path.append({str(paths.SUPPORT)!r})
"""
PREAMBLE += """\
from torch_backplane import _C, drivers
warnings.simplefilter("error")
torch.manual_seed(0)
plan_cache = torch.backends.bp.fft_plan_cache

def called(library, *names):
    \"\"\"How often functions of a library were called.\"\"\"
    text = ctypes.create_string_buffer(1 << 16)
    of = ctypes.CDLL(os.environ[f"TORCH_BACKPLANE_{library}_LIBRARY"])
    of.emulator_calls(text, ctypes.c_size_t(1 << 16))
    counts = dict(line.split() for line in text.value.decode().splitlines())
    return [int(counts.get(name, 0)) for name in names]

def step(x, w):
    return torch.fft.irfft(torch.fft.rfft((x @ w).relu()) * 0.5, 8).sin()

def captured(function, *given, **options):
    function(*given)
    torch.bp.synchronize()
    graph = torch.bp.Graph(**options)
    with torch.bp.graph(graph):
        result = function(*given)
    return graph, result

def check(graph, result, x, w):
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(result.cpu(), step(x.cpu(), w.cpu()), rtol=1e-4, atol=1e-4)

def as_library(function):
    \"\"\"A library function. `function` gets the stream, and the number of the second argument.\"\"\"
    from c_argument import CArgument

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(CArgument), ctypes.c_uint64)
    def call(stream, given, count):
        with drivers.device(0).current():
            return function(stream, given[0].memory, ctypes.c_int64.from_address(given[1].data).value)

    return call

def defined(function, number):
    \"\"\"An operator that calls a library function with its result and a number.\"\"\"
    from torch_backplane.planning import QueueFunction, operator

    fragment = torch.library.Library("backplane_captures", "FRAGMENT")
    fragment.define("fills(Tensor x) -> Tensor")
    fills = QueueFunction("fills", function, "output", torch.int64)

    @operator("backplane_captures::fills", variants=False)
    def planner(call, x):
        result = torch.empty_like(x)
        fills(result, number())
        return result

    return fragment, torch.ops.backplane_captures.fills
"""


def test_a_graph_with_library_calls_is_one_cuda_graph(run: Run) -> None:
    code = """
x, w = torch.randn(4, 8, device="bp"), torch.randn(8, 8, device="bp")
graph, y = captured(step, x, w)
products, transforms = called("CUBLAS", "cublasGemmEx_64"), called("CUFFT", "cufftXtExec")
submitted = called("CUDA", "emulator_submit", "cuLaunchKernel")
for _ in range(3):
    graph.replay()
assert called("CUDA", "emulator_submit", "cuLaunchKernel") == submitted
check(graph, y, x, w)
assert (called("CUBLAS", "cublasGemmEx_64"), called("CUFFT", "cufftXtExec")) == (products, transforms)
print(*called("CUDA", "cuGraphInstantiateWithFlags", "cuGraphAddChildGraphNode", "cuGraphLaunch"))
"""
    assert run(PREAMBLE + code) == "1 3 6\n"


def test_graphs_on_devices_streams_and_threads(run: Run) -> None:
    """Also captures by several threads at the same time, of batched products and of branches."""
    code = """
failed = []

def branches(x, w):
    side = torch.bp.Stream(x.device)
    side.wait_stream(torch.bp.current_stream(x.device))
    with side:
        y = torch.bmm(x[None], w[None])[0]
    z = torch.fft.rfft(x).abs().sum(1, keepdim=True)
    torch.bp.current_stream(x.device).wait_stream(side)
    return y + z

def work(seed, device):
    try:
        with torch.bp.device(device):
            generator = torch.Generator().manual_seed(seed)
            w = torch.randn(8, 8, generator=generator).to(device)
            x = torch.randn(seed + 2, 8, generator=generator).to(device)
            for _ in range(3):
                graph, y = captured(branches, x, w, capture_error_mode="thread_local")
                for stream in (torch.bp.Stream(), torch.bp.current_stream()):
                    x.copy_(torch.randn(seed + 2, 8, generator=generator))
                    torch.bp.synchronize()
                    with stream:
                        graph.replay()
                        stream.synchronize()
                    expected = x.cpu() @ w.cpu() + torch.fft.rfft(x.cpu()).abs().sum(1, keepdim=True)
                    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-4)
                graph.reset()
    except BaseException as error:
        failed.append(error)

def captured(function, *given, capture_error_mode):
    function(*given)
    torch.bp.synchronize()
    graph = torch.bp.Graph()
    with torch.bp.graph(graph, stream=torch.bp.Stream(), capture_error_mode=capture_error_mode):
        result = function(*given)
    return graph, result

threads = [threading.Thread(target=work, args=(i, f"bp:{i % 3}")) for i in range(4)]
for one in threads:
    one.start()
for one in threads:
    one.join()
print(failed, *called("CUDA", "cuGraphInstantiateWithFlags", "cuGraphLaunch"))
"""
    assert run(PREAMBLE + code) == "[] 12 24\n"


def test_a_graph_keeps_its_plans_until_its_launches_are_complete(run: Run) -> None:
    code = """
x, w = torch.randn(4, 8, device="bp"), torch.randn(8, 8, device="bp")
graph, y = captured(step, x, w)
expected = step(x.cpu(), w.cpu())
plan_cache.clear()
for _ in range(2):
    graph.replay()
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-4)
torch.bp._sleep(5e8)
graph.replay()
graph.reset()
plan_cache.clear()
assert called("CUFFT", "cufftCreate", "cufftDestroy") == [2, 0]
torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-4)
plan_cache.clear()
print(*called("CUFFT", "cufftCreate", "cufftDestroy"))
"""
    assert run(PREAMBLE + code) == "2 2\n"


def test_plans_and_handles_are_made_outside_of_the_capture(run: Run) -> None:
    """They allocate memory, which a capture forbids."""
    code = """
x, w = torch.randn(4, 8, device="bp"), torch.randn(8, 8, device="bp")
graph, y = captured(step, x, w, keep_graph=True)
plan_cache.clear()
graph.instantiate()
check(graph, y, x, w)
print(*called("CUDA", "cuGraphLaunch"), *called("CUFFT", "cufftXtMakePlanMany"))

# The first call of cuBLAS on another device, in a capture.
from c_argument import CArgument
from cuda.bindings import driver as cuda
a, c, workspace = (torch.ones(2, 2, device="bp:1"), torch.zeros(2, 2, device="bp:1"),
                   torch.empty(4 << 20, dtype=torch.uint8, device="bp:1"))
torch.bp.synchronize(1)
(cublas, *_), launcher = drivers.device(1).libraries, drivers.device(1).native_launcher.functions
numbers = [ctypes.c_float(1), ctypes.c_float(0), *map(ctypes.c_int64, (1, 2, 2, 2, 2, 2, 2, 0, 0, 4, 4, 4, 8, 16, 0))]
size = ctypes.c_int64(workspace.numel())
memory = lambda tensor: CArgument(tensor.data_ptr(), 0, None, 0)
number = lambda value: CArgument(None, 0, ctypes.addressof(value), ctypes.sizeof(value))
arguments = [*map(memory, (c, a, a)), *map(number, numbers), memory(workspace), number(size)]
given = (CArgument * len(arguments))(*arguments)
function = lambda address, *types: ctypes.CFUNCTYPE(ctypes.c_int, *types)(address)
pointer = ctypes.c_void_p
queue, found = pointer(), pointer()
assert function(launcher["begin_capture"], pointer)(ctypes.addressof(queue)) == 0
handles = called("CUBLAS", "cublasCreate")
product = function(cublas.routines["matmul"].addresses[torch.float32], pointer, pointer, ctypes.c_uint64)
assert product(queue, ctypes.addressof(given), len(given)) == 0
assert function(launcher["end_capture"], pointer, pointer)(queue, ctypes.addressof(found)) == 0
assert called("CUBLAS", "cublasCreate") == [handles[0] + 1]
assert function(launcher["destroy_captured"], pointer)(found) == 0
assert not c.cpu().any()
"""
    assert run(PREAMBLE + code) == "3 4\n"


RANDOM = """
from cuda.bindings import driver as cuda
from torch_backplane.planning import random_numbers

@as_library
def fill(stream, memory, number):
    return int(cuda.cuMemsetD32Async(memory, number + 1, 8, stream)[0])

fragment, fills = defined(fill, lambda: random_numbers(1)[1])
x = torch.zeros(8, dtype=torch.int32, device="bp")
graph, result = captured(fills, x)
torch.manual_seed(0)
seen = []
for _ in range(4):
    graph.replay()
    seen.append(set(result.tolist()))
assert all(len(one) == 1 for one in seen) and len(set.union(*seen)) == 4, seen
print(*called("CUDA", "cuGraphInstantiateWithFlags", "cuGraphExecChildGraphNodeSetParams", "cuGraphLaunch"))
"""


@pytest.mark.parametrize(
    ("faults", "calls"), [("", "1 3 4"), ("cuGraphExecChildGraphNodeSetParams:2:1", "2 3 4")]
)
def test_a_library_call_with_other_arguments_is_updated_in_place(run: Run, faults: str, calls: str) -> None:
    """Or in a new CUDA graph, if CUDA refuses the update."""
    assert run(PREAMBLE + RANDOM, CUDA_EMULATOR_FAULTS=faults) == f"{calls}\n"


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ("cuGraphExecChildGraphNodeSetParams:1:999", "cuGraphExecChildGraphNodeSetParams answered CUDA_ERROR_UNKNOWN"),
        ("cuStreamBeginCapture:2:304", "fills: cuStreamBeginCapture answered"),
        ("cuStreamEndCapture:2:901", "fills: cuStreamEndCapture answered"),
    ],
)
def test_a_failing_update_is_an_error_and_later_replays_work(run: Run, faults: str, says: str) -> None:
    code = RANDOM.replace("for _ in range(4):", """
try:
    for _ in range(2):
        graph.replay()
except torch.AcceleratorError as error:
    print(error)
for _ in range(4):""")
    first = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS=faults).splitlines()[0]
    assert first.startswith("bp:0 (Emulated CUDA device 0) failed while ")
    assert says in first


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("cublasGemmEx_64:2:14", "capturing cuBLAS matmul for aten::mm: cuBLAS matmul answered 14, which is: CUBLAS_"),
        ("cufftXtExec:3:6", "capturing cuFFT fft for aten::_fft_r2c: cuFFT fft answered 6, which is: CUFFT_EXEC_FAIL"),
        ("cuStreamCreate:2:304", "for aten::_fft_r2c: cuStreamCreate answered CUDA_ERROR_OPER"),
        ("cuStreamBeginCapture:1:900", "for aten::mm: cuStreamBeginCapture answered CUDA_ERROR_STR"),
        ("cuStreamEndCapture:3:901", "for aten::_fft_c2r: cuStreamEndCapture answered CUDA_ERROR_S"),
        ("cuStreamDestroy:1:999", "for aten::mm: cuStreamDestroy answered CUDA_ERROR_UNKNOWN"),
        ("cuStreamGetCaptureInfo:3:906", "which is: cuStreamGetCaptureInfo answered CUDA_ERROR_STREAM_C"),
        ("cuUserObjectCreate:1:1", "which is: cuUserObjectCreate answered CUDA_ERROR_INVALID_VALUE (1)"),
        ("cuGraphRetainUserObject:2:1", "which is: cuGraphRetainUserObject answered CUDA_ERROR_INVALID_VALUE (1)"),
        ("cuGraphAddChildGraphNode:2:801", "creating a graph: cuGraphAddChildGraphNode answered CUDA_ERROR_NOT_SUP"),
        ("cuGraphInstantiateWithFlags:1:2", "answered CUDA_ERROR_OUT_OF_MEMORY (2)"),
    ],
)
def test_a_refusal_is_a_warning_and_commands_are_submitted_one_by_one(run: Run, fault: str, reason: str) -> None:
    """And nothing leaks."""
    code = """
x, w = torch.randn(4, 8, device="bp"), torch.randn(8, 8, device="bp")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    graph, y = captured(step, x, w)
print(*(one.message for one in caught), sep="\\n")
check(graph, y, x, w)
graph, y = captured(step, x, w)  # the next one is a CUDA graph
check(graph, y, x, w)
del graph
torch.bp.synchronize()
plan_cache.clear()
created, destroyed = called("CUFFT", "cufftCreate", "cufftDestroy")
begun, ended = called("CUDA", "cuStreamBeginCapture", "cuStreamEndCapture")
print(created == destroyed, begun - ended, *called("CUDA", "cuGraphLaunch"))
"""
    warning, leaks = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS=fault).splitlines()
    assert warning.startswith(
        "replays of this graph submit its commands one by one: bp:0 (Emulated CUDA device 0) failed while "
    )
    assert reason in warning
    assert leaks == f"True {int(fault.startswith('cuStreamBeginCapture'))} 3"


@pytest.mark.parametrize("call", ["cuStreamSynchronize(stream)", "cuMemAlloc(64)"])
def test_a_library_that_synchronizes_cannot_be_captured(run: Run, call: str) -> None:
    code = f"""
from cuda.bindings import driver as cuda

@as_library
def fill(stream, memory, number):
    cuda.{call}
    cuda.cuMemsetD32Async(memory, number, 8, stream)
    return 0

fragment, fills = defined(fill, lambda: 7)
x = torch.zeros(8, dtype=torch.int32, device="bp")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    graph, result = captured(fills, x)
result.zero_()
graph.replay()
print(*(one.message for one in caught), set(result.tolist()), *called("CUDA", "cuGraphLaunch"))
"""
    warning = run(PREAMBLE + code)
    assert "capturing fills for backplane_captures::fills: cuStreamEndCapture answered " in warning
    assert "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901)" in warning
    assert warning.endswith(" {7} 0\n")


def test_a_device_that_is_lost_in_a_capture_raises(run: Run) -> None:
    code = """
x, w = torch.randn(4, 8, device="bp"), torch.randn(8, 8, device="bp")
for _ in range(2):
    try:
        captured(step, x, w)
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
"""
    first, second = run(PREAMBLE + code, CUDA_EMULATOR_FAULTS="cuStreamEndCapture:1:719").splitlines()
    assert first.startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) was lost while capturing cuBLAS matmul ")
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in first
    assert second == first
