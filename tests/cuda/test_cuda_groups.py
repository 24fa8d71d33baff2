"""Tests graphs, launch attributes, address ranges and sharing between processes on emulated CUDA devices."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., str]
Result = Callable[..., "subprocess.CompletedProcess[str]"]

GRAPH = """
import torch
x = torch.arange(6.0, device="bp")
graph = torch.bp.Graph()
torch.bp.synchronize()
with torch.bp.graph(graph):
    y = torch.zeros_like(x)
    y.add_(x)
    z = y.clone() * 2 + torch.rand_like(x)
seen = []
for step in range(3):
    x.fill_(step)
    graph.replay()
    z.cpu()
    noise = z.cpu() - 2 * step
    seen.append(noise)
    assert ((noise >= 0) & (noise < 1)).all(), noise
assert not torch.equal(seen[0], seen[1])
print("works")
"""


@pytest.mark.slow
def test_graphs_are_cudas_and_updated_in_place(result: Result) -> None:
    """The calls of the graph's functions are seen by their faults: the second instantiation would fail."""
    finished = result(GRAPH)
    assert finished.stdout == "works\n", finished.stderr
    finished = result(GRAPH, CUDA_EMULATOR_FAULTS="cuGraphInstantiateWithFlags:2:999,cuGraphDestroy:1:999")
    assert finished.stdout == "works\n", finished.stderr
    for call, number in {"cuGraphLaunch": 3, "cuGraphExecKernelNodeSetParams": 1}.items():
        finished = result(GRAPH, CUDA_EMULATOR_FAULTS=f"{call}:{number}:999")
        assert "CUDA_ERROR_UNKNOWN (999)" in finished.stderr


def test_a_graph_that_cannot_be_updated_is_made_again(result: Result) -> None:
    finished = result(GRAPH, CUDA_EMULATOR_FAULTS="cuGraphExecKernelNodeSetParams:1:910")
    assert finished.stdout == "works\n", finished.stderr
    failed = result(GRAPH, CUDA_EMULATOR_FAULTS="cuGraphExecKernelNodeSetParams:1:910,cuGraphInstantiateWithFlags:2:2")
    assert "launching a graph: cuGraphInstantiateWithFlags answered" in failed.stderr
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in failed.stderr


def test_launch_attributes(run: Run) -> None:
    out = run("""
import torch
from torch_backplane import _C
TEXT = '''
extern "C" __global__ void reversed(float* x) {
  extern __shared__ float all[];
  all[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}
'''
kernel = _C.CompiledKernel(0, TEXT, "reversed", "test", ["output"])
x = torch.arange(64.0, device="bp")
_C.launch(kernel, [x], [64], [64], dynamic_shared_memory=256)
print(torch.equal(x.cpu(), torch.arange(63.0, -1, -1)))
for one in ({"cooperative": True}, {"dynamic_shared_memory": 49 << 10}, {"cluster": [2]}):
    try:
        _C.launch(kernel, [x], [128], [64], **{"dynamic_shared_memory": 256, **one})
        torch.bp.synchronize()
        print("launched")
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
""")
    lines = out.splitlines()
    assert lines[0] == "True"
    assert "has 49152 (Target.local_memory)" in lines[2]
    assert lines[1] == "launched"


def test_expandable_segments(run: Run) -> None:
    out = run(
        """
import torch
x = [torch.full((1 << 20,), float(i), device="bp") for i in range(8)]
assert [one[-1].item() for one in x] == [float(i) for i in range(8)]
segments = torch.bp.memory_snapshot()
print([one["is_expandable"] for one in segments], torch.bp.memory_reserved() >= 32 << 20)
moved = x[3].to("bp:1")
assert moved[0].item() == 3
del x, moved
torch.bp.empty_cache()
print(torch.bp.memory_reserved(), torch.bp.mem_get_info()[0] == torch.bp.mem_get_info()[1])
try:
    torch.empty(1 << 34, dtype=torch.uint8, device="bp")
except torch.OutOfMemoryError:
    print("out of memory")
""",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert out == "[True] True\n0 True\nout of memory\n"


SHARING = """
import torch, torch.multiprocessing as mp

def child(queue, answers):
    x, handle = queue.get()
    torch.bp.Event.from_ipc_handle(x.device, handle).wait(torch.bp.current_stream(x.device))
    x += 1
    torch.bp.synchronize()
    answers.put((x.sum().item(), x.device.index, str(x.dtype)))
    del x
    answers.get()

if __name__ == "__main__":
    context = mp.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=child, args=(queue, answers))
    process.start()
    x = torch.arange(1000.0, device="bp:1")[10:20]
    event = torch.bp.Event(interprocess=True)
    with torch.bp.device(1):
        event.record()
    queue.put((x, event.ipc_handle()))
    print(answers.get())
    print(x.sum().item())
    answers.put(None)
    process.join()
    print(process.exitcode)
"""


def test_memory_and_events_are_sent_to_other_processes(
    emulator: dict[str, str], tmp_path: Any, run: Run
) -> None:
    script = tmp_path / "sharing.py"
    script.write_text(SHARING)
    out = run(f"import runpy, sys; sys.argv = [{str(script)!r}]; runpy.run_path({str(script)!r}, run_name='__main__')")
    assert ast.literal_eval(out.splitlines()[0]) == (155.0, 1, "torch.float32")
    assert out.splitlines()[1:] == ["155.0", "0"]
