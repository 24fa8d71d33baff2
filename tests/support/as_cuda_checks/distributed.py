"""torch.distributed."""

import pytest
import torch
import torch.distributed as dist

available = dist.is_nccl_available()
assert available == ("bp" in dist.Backend.default_device_backend_map)
if not available:
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(NotImplementedError, match=backend):
            dist.init_process_group(backend)
    with pytest.raises(NotImplementedError, match="nccl"):
        dist.init_process_group(backend="nccl")
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
t = torch.ones(2)
dist.all_reduce(t)
dist.destroy_process_group()
