"""Tests of the settings of torch.distributed on bp: the modelled link, the engine, a driver's own collectives."""

from __future__ import annotations

import json

import pytest
import ranks
from test_collectives import DEVICES

from torch_backplane import distributed
from torch_backplane.drivers.base import SettingError

LINK = """
import json
import time

start()
megabyte = filled(1.0, 1 << 18)
times = {}
for name, call in {
    "all_reduce": lambda: dist.all_reduce(megabyte),
    "broadcast": lambda: dist.broadcast(megabyte, 0),
    "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(size << 18, device="bp"), megabyte),
    "small": lambda: dist.all_reduce(megabyte[:1]),
}.items():
    call()
    dist.barrier()
    begin = time.perf_counter()
    call()
    times[name] = time.perf_counter() - begin
dist.destroy_process_group()
print(json.dumps(times))
"""


def test_collectives_take_as_long_as_over_the_link() -> None:
    output = ranks.run(LINK, 2, TORCH_BACKPLANE_HOST_LINK="10MiB/s,50ms", **DEVICES["host"])[0]
    times = json.loads(output.splitlines()[-1])
    # 1 MiB takes 100 ms. In a ring of two, all_reduce sends 2/2 of it, broadcast all, all_gather half of 2 MiB.
    assert times["small"] >= 0.05
    for name in ("all_reduce", "broadcast", "all_gather"):
        assert times[name] >= 0.15, times


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BACKPLANE_HOST_LINK", "1GiB/s,20us")
    assert distributed.host_link() == pytest.approx((20e-6, 1 << 30))
    monkeypatch.setenv("TORCH_BACKPLANE_HOST_LINK", "512 MiB/s")
    assert distributed.host_link() == (0.0, float(512 << 20))
    for wrong in ("", "1GiB", "fast/s", "1GiB/s,20", "0/s", "1GiB/s,20us,1"):
        monkeypatch.setenv("TORCH_BACKPLANE_HOST_LINK", wrong)
        with pytest.raises(SettingError, match="TORCH_BACKPLANE_HOST_LINK"):
            distributed.host_link()
    monkeypatch.delenv("TORCH_BACKPLANE_HOST_LINK")
    assert distributed.host_link() is None
    assert distributed.engine_name() == "gloo"
    monkeypatch.setenv("TORCH_BACKPLANE_COLLECTIVES", "nccl")
    with pytest.raises(SettingError, match="gloo, mpi, ucc"):
        distributed.engine_name()
    monkeypatch.setenv("TORCH_BACKPLANE_COLLECTIVES", "mpi")
    with pytest.raises(SettingError, match="built without mpi"):
        distributed.engine_name()


OWN = """
from torch_backplane import drivers

calls = []


def collectives(options):
    calls.append((options.group_rank, options.group_size))
    return dist.distributed_c10d.ProcessGroupGloo(options.store, options.group_rank, options.group_size)


real = drivers.device
drivers.device = lambda index: device if index == 0 else real(index)


class Own(drivers.Device):
    properties = property(lambda self: real(0).properties)
    collectives = staticmethod(collectives)


Own.__abstractmethods__ = frozenset()
device = Own()
start("backplane")
assert calls == [(rank, size)], calls
assert dist.group.WORLD._get_backend(torch.device("bp")).name() == "gloo"
dist.barrier()  # a rank that ends early breaks the connections of the others
dist.destroy_process_group()
os.environ["STORE"] += "2"
del Own.collectives
start("backplane")
assert dist.group.WORLD._get_backend(torch.device("bp")).name() == "backplane"
dist.barrier()
dist.destroy_process_group()
os.environ["STORE"] += "2"
try:
    start("backplane", pg_options=object())
except ValueError as error:
    assert "has no options" in str(error), str(error)
else:
    raise AssertionError("no error")
"""


def test_a_driver_can_bring_its_own_collectives() -> None:
    ranks.run(OWN, 2, **DEVICES["host"])


CHECKPOINT = """
import torch.distributed.checkpoint as checkpoint
from torch.distributed.fsdp import fully_shard

start()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)).to("bp")
whole = {name: value.clone() for name, value in model.state_dict().items()}
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("bp", (size,)))
folder = os.path.dirname(os.environ["STORE"]) + "/checkpoint"
checkpoint.save(model.state_dict(), checkpoint_id=folder)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
state = model.state_dict()
checkpoint.load(state, checkpoint_id=folder)
model.load_state_dict(state)
for name, value in model.state_dict().items():
    assert value.device.type == "bp"
    assert (value.full_tensor() == whole[name]).all(), name
dist.barrier()
if rank == 0:
    for file in os.listdir(folder):
        if file.endswith(".distcp"):
            os.truncate(os.path.join(folder, file), 100)
dist.barrier()
try:
    checkpoint.load(model.state_dict(), checkpoint_id=folder)
except checkpoint.CheckpointException as error:  # not an Exception
    assert "EOF" in str(error) or "zip" in str(error), str(error)
else:
    raise AssertionError("no error")
x = filled(1.0, 2)
dist.all_reduce(x)
assert x.tolist() == [size] * 2
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["host", "discrete-host"])
def test_sharded_checkpoints(name: str) -> None:
    ranks.run(CHECKPOINT, 2, **DEVICES[name])


PORT = """
import socket

taken = socket.socket()
taken.bind(("127.0.0.1", 0))
taken.listen()
try:
    dist.init_process_group(init_method=f"tcp://127.0.0.1:{taken.getsockname()[1]}", rank=0, world_size=1)
except RuntimeError as error:
    assert "EADDRINUSE" in str(error), str(error)
else:
    raise AssertionError("no error")
start()
dist.destroy_process_group()
"""


def test_a_port_in_use_is_pytorchs_error() -> None:
    ranks.run(PORT, 1, **DEVICES["host"])
