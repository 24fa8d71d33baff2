"""torch.cuda and its submodules."""

import sys

import pytest
import torch
import torch.cuda.nccl
import torch.cuda.nvtx
from torch.cuda import CUDAGraph, Stream, device_count

assert device_count() == torch.cuda.device_count() == 2
assert torch.cuda.is_available()
assert CUDAGraph is torch.bp.Graph
assert Stream is torch.bp.Stream
assert torch.cuda.nvtx.mark is torch.bp.nvtx.mark
assert sys.modules["torch.cuda"] is torch.cuda
assert "Stream" in dir(torch.cuda)
assert torch.cuda.__name__ == "torch.cuda"
assert torch.Stream(device="cuda:1").device.type == "cuda"
assert torch.Event(device="cuda").device.type == "cuda"
with torch.cuda.device("cuda:1"):
    assert torch.cuda.current_device() == 1
assert torch.cuda.get_device_name("cuda:1") == torch.cuda.get_device_name(torch.device("cuda", 1))
assert torch.cuda.memory._record_memory_history is torch.bp.memory._record_memory_history
torch.cuda._sleep(10)
with pytest.raises(torch.cuda.OutOfMemoryError):
    raise torch.cuda.OutOfMemoryError("x")
assert issubclass(torch.cuda.CudaError, RuntimeError)

refused = {
    "torch.cuda.nccl.version": torch.cuda.nccl.version,
    "torch.cuda.cudart": torch.cuda.cudart,
    "torch.cuda.get_arch_list": torch.cuda.get_arch_list,
    "torch.cuda.comm.broadcast": torch.cuda.comm.broadcast,
    "torch.cuda.jiterator._create_jit_fn": lambda: torch.cuda.jiterator._create_jit_fn("code"),
    "torch.cuda.GreenContext": lambda: torch.cuda.GreenContext.create(2),
    "torch.cuda.profiler.start": torch.cuda.profiler.start,
    "torch.backends.cuda.preferred_rocm_fa_library": torch.backends.cuda.preferred_rocm_fa_library,
}
for name, function in refused.items():
    with pytest.raises(NotImplementedError, match=f"{name} has no counterpart on bp: [a-zA-Z]"):
        function()
with pytest.raises(AttributeError, match=r"torch.cuda.*missing"):
    torch.cuda.missing  # noqa: B018
assert not hasattr(torch.cuda, "missing")
real = torch.cuda.is_available
torch.cuda.is_available = lambda: False  # as tests do
assert not torch.cuda.is_available()
torch.cuda.is_available = real
with pytest.raises(NotImplementedError, match="DataParallel is not supported"):
    torch.nn.DataParallel(torch.nn.Linear(2, 2).cuda())
