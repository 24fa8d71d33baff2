"""Tests of data, sharded and tensor parallel training: losses do not depend on the number of ranks."""

from __future__ import annotations

import json

import on_opencl
import pytest
import ranks
from test_collectives import DEVICES

TRAIN = """
import json
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

if size > 1 or KIND != "single":
    start()
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1)).to("bp")
parallel = model
if KIND == "ddp":
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
elif KIND == "unused":
    model[1].unused = nn.Linear(4, 4).to("bp")
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, gradient_as_bucket_view=True)
elif KIND == "hook":
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    parallel = nn.parallel.DistributedDataParallel(model)
    parallel.register_comm_hook(None, default_hooks.allreduce_hook)
elif KIND == "fsdp":
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("bp", (size,))
    for part in model:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
elif KIND == "tp":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("bp", (size,))
    for block in model[1:3]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.02, foreach=KIND != "tp")  # tp mixes DTensors and tensors
data = torch.Generator().manual_seed(1)
losses = []
for step in range(6):
    x = torch.randn(8, 8, generator=data)
    y = x.sum(1, keepdim=True)
    share = slice(None) if KIND in ("tp", "single") else slice(rank * 8 // size, (rank + 1) * 8 // size)
    halves = x[share].to("bp").chunk(2), y[share].to("bp").chunk(2)
    optimizer.zero_grad()
    total = 0.0
    for number, (inputs, targets) in enumerate(zip(*halves)):
        last = number == len(halves[0]) - 1
        loss = nn.functional.mse_loss(parallel(inputs), targets) / len(halves[0])
        if KIND == "ddp" and not last:
            with parallel.no_sync():
                loss = nn.functional.mse_loss(parallel(inputs), targets) / len(halves[0])
                loss.backward()
        else:
            loss.backward()
        total += loss.detach()
    optimizer.step()
    if KIND not in ("tp", "single"):
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
    losses.append(total.item())
if dist.is_initialized():
    dist.destroy_process_group()
print(json.dumps(losses))
"""


def losses(kind: str, size: int, devices: dict[str, str]) -> list[float]:
    outputs = ranks.run(f"KIND = {kind!r}\n{TRAIN}", size, **devices)
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    assert all(one == pytest.approx(found[0], abs=1e-6) for one in found)
    return found[0]


@pytest.fixture(scope="module", params=["host", "discrete-host", "opencl"])
def single(request: pytest.FixtureRequest) -> tuple[dict[str, str], list[float]]:
    """The devices, and the losses of one process without torch.distributed."""
    if request.param == "opencl":
        on_opencl.require_platform()
    devices = DEVICES[request.param]
    return devices, losses("single", 1, devices)


@pytest.mark.parametrize("kind", ["ddp", "unused", "hook", "fsdp", "tp"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.slow
def test_losses_do_not_depend_on_the_number_of_ranks(
    single: tuple[dict[str, str], list[float]], kind: str, size: int
) -> None:
    devices, expected = single
    assert losses(kind, size, devices) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert expected[-1] < expected[0]


SYNC_BATCH_NORM = """
import copy

start()
torch.manual_seed(0)
for shape, dtype in (((8, 3), torch.float32), ((8, 3, 5, 4), torch.float32), ((8, 3, 6), torch.bfloat16)):
    x = torch.randn(shape)
    whole = torch.nn.BatchNorm1d(3) if len(shape) < 4 else torch.nn.BatchNorm2d(3)
    torch.nn.init.normal_(whole.weight)
    parts = torch.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)).to("bp")
    share = slice(0, 3) if rank == 0 else slice(3, None)  # ranks may have batches of different sizes
    inputs = [x.clone().requires_grad_(), x[share].to("bp", dtype).requires_grad_()]
    expected = whole(inputs[0])
    outputs = [expected[share], parts(inputs[1])]
    assert outputs[1].dtype == dtype
    close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=4e-2, atol=4e-2)
    torch.testing.assert_close(outputs[1].cpu().float(), outputs[0], **close)
    torch.testing.assert_close(parts.running_mean.cpu(), whole.running_mean, **close)
    torch.testing.assert_close(parts.running_var.cpu(), whole.running_var, **close)
    expected.pow(3).sum().backward()
    outputs[1].float().pow(3).sum().backward()
    if dtype == torch.float32:
        torch.testing.assert_close(inputs[1].grad.cpu(), inputs[0].grad[share], rtol=1e-3, atol=1e-4)
    for one, other in ((parts.weight, whole.weight), (parts.bias, whole.bias)):
        dist.all_reduce(one.grad)
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=max(close["rtol"], 1e-3), atol=0.1)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["host", "discrete-host", "opencl"])
@pytest.mark.slow
def test_batch_norm_over_all_ranks(name: str) -> None:
    if name == "opencl":
        on_opencl.require_platform()
    ranks.run(SYNC_BATCH_NORM, 2, **DEVICES[name])
