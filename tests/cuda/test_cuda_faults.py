"""Tests what happens when calls of CUDA fail: each is named, and the program continues or the device is lost."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_backplane
from torch_backplane import _C

Result = Callable[..., "subprocess.CompletedProcess[str]"]

# Uses pinned memory, two streams, events and a graph, until it works; prints the errors on the way.
PROGRAM = """
import torch

def step():
    x = torch.arange(12.0).view(3, 4).pin_memory().to("bp", non_blocking=True)
    side = torch.bp.Stream()
    side.wait_stream(torch.bp.current_stream())
    with side:
        y = (x * 2).sin()
    event = side.record_event()
    event.synchronize()
    start, end = torch.bp.Event(enable_timing=True), torch.bp.Event(enable_timing=True)
    start.record()
    z = torch.zeros(3, 4, device="bp").copy_(y)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    graph = torch.bp.Graph()
    torch.bp.synchronize()
    with torch.bp.graph(graph):
        w = z + 1
    graph.replay()
    torch.bp.mem_get_info()
    return w.cpu()

for attempt in range(ATTEMPTS):
    try:
        assert torch.allclose(step(), (torch.arange(12.0).view(3, 4) * 2).sin() + 1)
        print("works")
        break
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
"""

# The calls of the program, and an error that they can have.
CALLS = {
    "cuDevicePrimaryCtxRetain": 46,
    "cuMemHostRegister": 1,
    "cuMemAlloc": 999,
    "cuStreamCreateWithPriority": 304,
    "cuStreamSynchronize": 999,
    "cuLaunchKernel": 701,
    "cuMemcpyHtoDAsync": 1,
    "cuMemcpyDtoHAsync": 1,
    "cuMemcpyDtoDAsync": 1,
    "cuEventCreate": 304,
    "cuEventRecord": 400,
    "cuEventSynchronize": 999,
    "cuEventElapsedTime": 999,
    "cuStreamWaitEvent": 400,
    "cuGraphInstantiateWithFlags": 999,
    "cuGraphLaunch": 999,
    "cuMemGetInfo": 999,
}


def test_each_error_names_its_call_and_the_program_continues(result: Result) -> None:
    """Each call of CALLS fails once."""
    faults = ",".join(f"{call}:1:{error}" for call, error in CALLS.items())
    code = PROGRAM.replace("ATTEMPTS", str(2 * len(CALLS)))
    finished = result(code, CUDA_EMULATOR_FAULTS=faults)
    assert finished.returncode == 0, finished.stderr
    *errors, last = finished.stdout.splitlines()
    assert last == "works", finished.stdout
    said = errors + finished.stderr.splitlines()  # a failure to free pinned memory is a warning
    missing = [call for call, error in CALLS.items() if not any(call in one and f"({error})" in one for one in said)]
    assert missing == [], finished.stdout
    assert len(errors) <= len(CALLS)


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        ("cuModuleLoadData", 2, "cuModuleLoadData answered CUDA_ERROR_OUT_OF_MEMORY (2)"),
        ("cuModuleGetFunction", 999, "cuModuleGetFunction answered CUDA_ERROR_UNKNOWN (999)"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_leaves_others_usable(
    result: Result, call: str, error: int, named: str
) -> None:
    code = """
import torch
x = torch.arange(3.0).to("bp")
try:
    print(x.sin().tolist())
except Exception as error:
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
print((x + 1).tolist())
"""
    finished = result(code, CUDA_EMULATOR_FAULTS=f"{call}:1:{error}")
    assert finished.returncode == 0, finished.stderr
    failure, works = finished.stdout.splitlines()
    assert "while building the kernel bp_sin of sin" in failure
    assert named in failure
    assert works == "[1.0, 2.0, 3.0]"


def entry_points() -> set[str]:
    """Returns the functions of libcuda that the driver calls, in C++ and with cuda-bindings, without their versions."""
    sources = Path(torch_backplane.__file__).parent.joinpath("drivers", "cuda").rglob("*.py")
    with_bindings = re.findall(r"\bcuda\.(cu[A-Z]\w+)", "\n".join(one.read_text(encoding="utf-8") for one in sources))
    return {name.partition("_v")[0] for name in (*_C.cuda_functions(), *with_bindings)}


# Called once: at discovery, or when the context is made.
OF_DISCOVERY = (
    "cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetPCIBusId", "cuDeviceGetName",
    "cuDeviceTotalMem", "cuDeviceGetAttribute", "cuMemGetAllocationGranularity",
)  # fmt: skip
# Not called again in the program.
UNCHECKED = {
    "cuGetErrorString": "only after errors, whose message is then shorter",
    "cuDevicePrimaryCtxRetain": "only once; see CALLS",
    "cuUserObjectRelease": "only if cuGraphRetainUserObject has failed",
}
# What fails without a message.
QUIET = {
    "cuCtxPopCurrent": "a destructor makes the previous context current again",
    "cuEventDestroy": "destructors",
    "cuGraphDestroy": "destructors",
    "cuGraphExecDestroy": "destructors",
    "cuModuleUnload": "finalizers of kernels",
    "cuStreamDestroy": "destructors",
    "cuThreadExchangeStreamCaptureMode": "without it, the library's own call fails in a capture",
    "cuIpcCloseMemHandle": "destructors",
}


@pytest.mark.timeout(1000)
def test_every_call_fails_once(result: Result) -> None:
    """While a program trains, captures and shares memory. It says which call of CUDA has failed, and then continues."""
    folder = str(Path(__file__).parent)
    finished = result(f"import sys; sys.path.insert(0, {folder!r}); import every_call; every_call.main()", timeout=900)
    assert finished.returncode == 0, finished.stderr[-3000:]
    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    known = entry_points()
    seen = [line for line in lines if line[1] in known]
    assert known - {line[1] for line in seen} - set(OF_DISCOVERY) - set(UNCHECKED) == set()
    assert [line for line in seen if line[3] != []] == []
    answers = {(part, name): "\n".join(said) for part, name, said, _ in seen}
    words = r"{} answered CUDA_ERROR_OPERATING_SYSTEM \(304\): OS call failed"
    wrong = {
        which: said for which, said in answers.items()
        if not re.search(words.format(which[1]), said) and (said or which[1] not in QUIET)
    }  # fmt: skip
    assert wrong == {}


@pytest.mark.parametrize("call", OF_DISCOVERY)
def test_calls_of_discovery_fail_with_a_message(result: Result, call: str) -> None:
    finished = result("""
import torch
try:
    print(torch.ones(2, device="bp").tolist())
except Exception as error:
    print(error)
""", CUDA_EMULATOR_FAULTS=f"{call}:1:304")
    assert finished.returncode == 0, finished.stderr
    said = finished.stdout + finished.stderr
    assert f"{call} answered CUDA_ERROR_OPERATING_SYSTEM (304)" in said


@pytest.mark.parametrize(
    ("call", "error"),
    [("cuLaunchKernel", 719), ("cuStreamSynchronize", 709), ("cuMemcpyDtoHAsync", 700), ("cuGraphLaunch", 214)],
)
def test_a_lost_device_raises_the_same_error_at_every_use(result: Result, call: str, error: int) -> None:
    code = PROGRAM.replace("ATTEMPTS", "3") + "print((torch.ones(3, device='bp:1') + 1).tolist())"
    finished = result(code, CUDA_EMULATOR_FAULTS=f"{call}:1:{error}")
    assert finished.returncode == 0, finished.stderr
    *errors, other = finished.stdout.splitlines()
    assert other == "[2.0, 2.0, 2.0]"
    assert len(errors) == 3
    assert errors[0].startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) was lost while ")
    assert f"{call} answered " in errors[0]
    assert f"({error})" in errors[0]
    assert set(errors) == {errors[0]}


TRAINING = """
import gc, torch

torch.manual_seed(0)
x, y = torch.randn(64, 8), torch.randn(64, 1)
saved, losses = None, []

def train(device, steps):
    global saved
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)
    if saved is not None:
        model.load_state_dict(saved)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    a, b = x.to(device), y.to(device)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(a), b)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        saved = {name: one.cpu() for name, one in model.state_dict().items()}

errors = []
uses = [lambda: train("bp:0", 50), torch.bp.synchronize, lambda: torch.ones(3, device="bp:0"), torch.bp.empty_cache]
for use in uses:
    try:
        use()
    except torch.AcceleratorError as error:
        errors.append(str(error))
    gc.collect()
before = len(losses)
train("bp:1", 30)
print(errors[0].splitlines()[0])
print(len(errors), len(set(errors)), 2 < before < 50, losses[-1] < losses[before] < losses[0])
"""


def test_training_continues_on_another_device_after_a_sticky_error(result: Result) -> None:
    finished = result(TRAINING, CUDA_EMULATOR_FAULTS="(kernel):150:700")
    assert finished.returncode == 0, finished.stderr
    error, outcome = finished.stdout.splitlines()
    assert error.startswith("bp:0 (Emulated CUDA device 0) was lost while ")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in error
    assert outcome == "3 1 True True"


def test_an_illegal_access_loses_the_device(result: Result) -> None:
    finished = result("""
import struct, torch
from torch_backplane import _C
handle = _C.compile_kernel(
    0, 'extern "C" __global__ void far(float* x, unsigned long long by) { x[by] = 1.0f; }', "far", "test"
)
x = torch.ones(4, device="bp")
_C.launch_kernel(0, handle, (1, 1, 1), (1, 1, 1), [x, struct.pack("Q", 1 << 40)])
for attempt in range(2):
    try:
        torch.bp.synchronize()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
print((torch.ones(3, device="bp:1") + 1).tolist())
""")
    assert finished.returncode == 0, finished.stderr
    first, second, other = finished.stdout.splitlines()
    assert first == second
    assert first.startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) was lost while waiting for a stream: ")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in first
    assert "compute-sanitizer" in first
    assert other == "[2.0, 2.0, 2.0]"


def test_a_context_that_another_library_resets_is_named(result: Result) -> None:
    finished = result("""
import torch
from cuda.bindings import driver as cuda
x = torch.ones(4, device="bp")
torch.bp.synchronize()
cuda.cuDevicePrimaryCtxReset(0)
for attempt in range(2):
    try:
        print((x + 1).tolist())
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
print((torch.ones(3, device="bp:1") + 1).tolist())
""")
    assert finished.returncode == 0, finished.stderr
    first, second, other = finished.stdout.splitlines()
    assert first == second
    assert first.startswith("AcceleratorError: bp:0 (Emulated CUDA device 0) was lost while ")
    assert "another library has destroyed the primary context, for example with cudaDeviceReset" in first
    assert other == "[2.0, 2.0, 2.0]"


def test_out_of_memory_frees_the_cache_and_tries_again(result: Result) -> None:
    code = """
import torch
print(torch.ones(4, device="bp").tolist(), torch.bp.memory_stats()["num_alloc_retries"])
"""
    finished = result(code, CUDA_EMULATOR_FAULTS="cuMemAlloc:1:2")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "[1.0, 1.0, 1.0, 1.0] 1\n"
