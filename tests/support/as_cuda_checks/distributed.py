"""torch.distributed: "nccl" means the backend of bp."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

assert dist.is_nccl_available()
for number, backend in enumerate(("nccl", "cpu:gloo,cuda:nccl", None)):
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    assert dist.group.WORLD._get_backend(torch.device("cuda")).name() == "backplane"
    model = DistributedDataParallel(torch.nn.Linear(4, 2).cuda(), device_ids=[0])
    model(torch.ones(3, 4, device="cuda")).sum().backward()
    assert model.module.bias.grad.tolist() == [3.0, 3.0]
    x = torch.full((2,), float(number), device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [number] * 2
    mesh = dist.device_mesh.init_device_mesh("cuda", (1,))
    assert mesh.size() == 1
    dist.destroy_process_group()
