"""A benchmark: properties of the device, events, and memory statistics."""

import torch
import torch.utils.benchmark
from torch.profiler import ProfilerActivity, profile

assert torch.cuda.is_available(), "this script needs CUDA"
device = torch.cuda.current_device()
properties = torch.cuda.get_device_properties(device)
print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}: {properties.total_memory / 2**20:.0f} MiB")
print("capability", torch.cuda.get_device_capability(device))
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
a = torch.randn(256, 256, device="cuda")
b = torch.randn(256, 256, device=torch.device("cuda", 0))
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for _ in range(3):
    a @ b
torch.cuda.synchronize()
start.record()
for _ in range(10):
    c = a @ b
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0
print("memory", torch.cuda.memory_allocated() - before, "peak", torch.cuda.max_memory_allocated() - before)
assert torch.cuda.max_memory_allocated() - before >= 3 * a.nbytes
free, total = torch.cuda.mem_get_info()
assert 0 < free <= total
assert "Allocated memory" in torch.cuda.memory_summary(device=None, abbreviated=False)
timer = torch.utils.benchmark.Timer("a + b; torch.cuda.synchronize()", globals={"a": a, "b": b, "torch": torch})
assert timer.timeit(3).mean > 0
torch.cuda.nvtx.range_push("region")
torch.cuda.nvtx.range_pop()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
    (a @ b).relu_()
    torch.cuda.synchronize()
assert "aten::mm" in prof.key_averages().table(sort_by="cuda_time_total", row_limit=10)
print("error", (c.cpu() - a.cpu() @ b.cpu()).abs().max().item() < 1e-3)
