"""bp tensors sent to other processes with torch.multiprocessing. Those sent by handles: test_optional_groups.py."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torch_backplane import _C

on_host = pytest.mark.skipif(not _C.uses_host_memory(0), reason="only host devices use shared memory")
ERROR = "bp memory belongs to the process that allocated it"


def run(function: Callable[..., None], *arguments: Any, method: str = "spawn") -> Any:
    """Starts a process that calls function(connection, *arguments), and returns it and the other end."""
    context = mp.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=function, args=(there, *arguments))
    process.start()
    there.close()
    return process, here


def finish(process: Any) -> None:
    process.join(60)
    assert process.exitcode == 0


# --- what the processes do: they are imported by name


def add_ten_when_told(connection: Any, x: Tensor) -> None:
    connection.recv()
    x += 10
    connection.send(x.sum().item())


def describe(connection: Any, *given: Tensor) -> None:
    connection.send([(type(x).__name__, str(x.device), x.requires_grad, x.is_leaf, x.tolist()) for x in given])


def share_views(connection: Any) -> None:
    views = [connection.recv(), *connection.recv()]
    storages = {view.untyped_storage()._cdata for view in views}
    views[0].fill_(7)
    connection.send((len(storages), [view.tolist() for view in views]))


def answer_with_new_tensors(connection: Any) -> None:
    x = torch.arange(4.0, device="bp")
    connection.send((x, x[2:]))
    connection.recv()
    connection.send(x.tolist())


def hold(connection: Any, x: Tensor) -> None:
    connection.send(x.sum().item())
    connection.recv()  # until it is killed, or gets something
    connection.send(x.sum().item())


def double(x: Tensor) -> Tensor:
    return x * 2


def train(rank: int, model: nn.Module, x: Tensor) -> None:
    for _ in range(20):
        loss = (model(x) - 1).square().mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad


def use_bp(connection: Any, x: Tensor) -> None:
    try:
        connection.send((x + 1).tolist())
    except RuntimeError as error:
        connection.send(str(error))


def put_all(connection: Any, count: int) -> None:
    connection.send(sum(int(connection.recv().sum().item()) for _ in range(count)))


# --- host devices


@on_host
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_writes_are_seen_in_both_processes(method: str) -> None:
    x = torch.arange(3.0, device="bp")
    process, connection = run(add_ten_when_told, x, method=method)
    x += 1  # after the process was started
    connection.send(None)
    assert connection.recv() == 36
    assert x.tolist() == [11, 12, 13]
    finish(process)
    x += 1  # the memory stays
    assert x.tolist() == [12, 13, 14]


@on_host
def test_devices_dtypes_and_leaves() -> None:
    parameter = nn.Parameter(torch.ones(2, device="bp:1"))
    given = (
        torch.tensor([1, 2], device="bp"),
        parameter,
        nn.Parameter(torch.tensor(3, device="bp"), requires_grad=False),
        torch.ones(1, device="bp", requires_grad=True),
        torch.empty(0, 2, device="bp:1"),
        torch.tensor(True, device="bp"),
    )
    process, connection = run(describe, *given)
    assert connection.recv() == [
        ("Tensor", "bp:0", False, True, [1, 2]),
        ("Parameter", "bp:1", True, True, [1, 1]),
        ("Parameter", "bp:0", False, True, 3),
        ("Tensor", "bp:0", True, True, [1]),
        ("Tensor", "bp:1", False, True, []),
        ("Tensor", "bp:0", False, True, True),
    ]
    finish(process)
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor which requires_grad"):
        ForkingPickler.dumps(parameter * 2)


@on_host
def test_views_share_a_storage() -> None:
    process, connection = run(share_views)
    base = torch.zeros(3, 2, device="bp")
    connection.send(base[1])
    connection.send((base, base.t()[0]))  # another message
    assert connection.recv() == (1, [[7, 7], [[0, 0], [7, 7], [0, 0]], [0, 7, 0]])
    assert base.tolist() == [[0, 0], [7, 7], [0, 0]]
    finish(process)


@on_host
def test_a_tensor_that_comes_back_is_the_same() -> None:
    x = torch.ones(4, device="bp")
    again = pickle.loads(ForkingPickler.dumps(x[1:]))
    assert again.untyped_storage()._cdata == x.untyped_storage()._cdata
    again.fill_(3)
    assert x.tolist() == [1, 3, 3, 3]


@on_host
def test_tensors_of_the_other_process() -> None:
    process, connection = run(answer_with_new_tensors)
    x, tail = connection.recv()
    assert (x.device.type, x.tolist(), tail.tolist()) == ("bp", [0, 1, 2, 3], [2, 3])
    tail += 5
    connection.send(None)
    assert connection.recv() == [0, 1, 7, 8]
    finish(process)
    assert (x.sum() + tail.sum()).item() == 31  # the sender has ended


@on_host
@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_the_sender_frees_first(strategy: str) -> None:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy(strategy)
    try:
        x = torch.full((1000,), 2.0, device="bp")
        process, connection = run(hold, x)
        assert connection.recv() == 2000
        del x
        others = [torch.zeros(1000, device="bp") for _ in range(10)]  # do not get its memory
        connection.send(None)
        assert connection.recv() == 2000
        finish(process)
        assert all(other.sum().item() == 0 for other in others)
    finally:
        mp.set_sharing_strategy(before)


def mappings() -> int:
    return sum("/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())


@on_host
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs Linux's /proc")
def test_a_killed_receiver_leaks_nothing() -> None:
    files, mapped, allocated = set(os.listdir("/dev/shm")), mappings(), torch.accelerator.memory_allocated()
    x = torch.ones(1000, device="bp")
    process, connection = run(hold, x)
    assert connection.recv() == 1000
    assert mappings() == mapped + 1
    assert torch.accelerator.memory_allocated() == allocated  # shared memory is not the allocator's
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    x += 1
    assert x.sum().item() == 2000
    del x
    assert mappings() == mapped
    assert {name for name in set(os.listdir("/dev/shm")) - files if name.startswith("torch_")} == set()


@on_host
def test_pending_work_is_done_before_a_send() -> None:
    stream = torch.Stream("bp")
    x = torch.zeros(1000, device="bp")
    torch.bp.synchronize()
    with stream:
        _C.sleep(200)
        x += 1
    again = pickle.loads(ForkingPickler.dumps(x))
    assert again.sum().item() == 1000
    with stream:
        _C.sleep(200)
        x += 1
    ForkingPickler.dumps(x)  # moved already
    assert again.sum().item() == 2000
    with stream:
        _C.sleep(200)
        x += 1
        del x, again  # the memory must outlive the addition
    stream.synchronize()


@on_host
def test_moved_storages() -> None:
    x = torch.arange(4.0, device="bp")
    view, lazy = x[1:], torch._lazy_clone(x)
    ForkingPickler.dumps(x)
    view += 1
    assert (x.tolist(), lazy.tolist()) == ([0, 2, 3, 4], [0, 1, 2, 3])
    with pytest.raises(RuntimeError, match="not resizable"):
        x[:].resize_(100)
    x.record_stream(torch.Stream("bp"))
    y = x.clone()
    assert y.resize_(100).shape == (100,)
    ForkingPickler.dumps(lazy)
    lazy.zero_()
    assert x.tolist() == [0, 2, 3, 4]
    assert torch.equal(x.cpu(), x.to("bp:1").cpu())


@on_host
def test_pools_queues_and_spawn() -> None:
    with mp.get_context("spawn").Pool(1) as pool:
        found = pool.map(double, [torch.full((2,), float(i), device="bp:1") for i in range(3)])
    assert [x.tolist() for x in found] == [[0, 0], [2, 2], [4, 4]]
    assert {x.device for x in found} == {torch.device("bp:1")}
    queue = mp.get_context("spawn").Queue()
    x = torch.ones(2, device="bp")
    queue.put(x)
    assert queue.get(timeout=60).add_(1).tolist() == [2, 2]
    assert x.tolist() == [2, 2]
    torch.manual_seed(0)
    model, data = nn.Linear(3, 1).to("bp"), torch.randn(16, 3, device="bp")
    before = (model(data) - 1).square().mean().item()
    mp.spawn(train, (model.share_memory(), data), nprocs=2)
    assert (model(data) - 1).square().mean().item() < before / 2


@on_host
def test_many_tensors() -> None:
    process, connection = run(put_all, 300)
    for i in range(300):
        connection.send(torch.full((3,), i, device="bp"))
    assert connection.recv() == 3 * sum(range(300))
    finish(process)


def test_a_forked_process_cannot_use_them() -> None:
    x = torch.ones(2, device="bp")
    process, connection = run(use_bp, x, method="fork")
    assert "Cannot re-initialize bp in forked subprocess" in connection.recv()
    finish(process)


@on_host
def test_malformed_calls() -> None:
    x, owner = torch.ones(2, device="bp"), torch.empty(8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="8 bytes at offset 4 do not fit in 8"):
        _C.tensor_in(0, owner, 4, 8)
    for wrong in (owner[:4].clone(), x.view(torch.uint8)):
        with pytest.raises(RuntimeError, match="memory of bp:0 cannot move"):
            _C.move_to(x, wrong)
    assert _C.owner_of(x) is None
    assert x.tolist() == [1, 1]


# --- all devices


@pytest.mark.skipif(_C.uses_host_memory(0), reason="host devices use shared memory")
def test_other_devices_refuse() -> None:
    x = torch.ones(2, device="bp")
    with pytest.raises(NotImplementedError, match=ERROR):
        ForkingPickler.dumps(x)
    queue = mp.get_context("spawn").Queue()
    queue.put(x.cpu())
    assert queue.get(timeout=60).tolist() == [1, 1]


def test_other_device_types_are_sent_as_before() -> None:
    x = torch.ones(3)
    again = pickle.loads(ForkingPickler.dumps(x))
    assert again.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert pickle.loads(ForkingPickler.dumps(torch.empty(3, device="meta"))).device.type == "meta"
    with pytest.raises(RuntimeError, match="Cannot pickle meta storage"):
        ForkingPickler.dumps(torch.empty(3, device="meta").untyped_storage())


# --- DataLoader


class Numbers(Dataset[dict[str, Tensor]]):
    def __init__(self, device: str) -> None:
        self.device = device

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((2,), float(index), device=self.device)}


def total_on_bp(batch: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([item["x"] for item in batch]).to("bp").sum(1)


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_with_pinned_memory(method: str) -> None:
    assert torch.ones(2, device="bp").sum().item() == 2  # bp is in use
    loader = DataLoader(Numbers("cpu"), 4, num_workers=2, pin_memory=True, multiprocessing_context=method)
    found = []
    for batch in loader:
        assert batch["x"].is_pinned()
        found += batch["x"].to("bp", non_blocking=True).sum(1).tolist()
    assert found == [0, 2, 4, 6, 8, 10, 12, 14]


@on_host
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("device", ["bp:1", "cpu"])
def test_workers_that_make_bp_tensors(method: str, device: str) -> None:
    collate = {"collate_fn": total_on_bp} if device == "cpu" else {}
    loader = DataLoader(Numbers(device), 4, num_workers=1, multiprocessing_context=method, **collate)
    batches = list(loader)
    sums = batches if device == "cpu" else [batch["x"].sum(1) for batch in batches]
    assert {one.device for one in sums} == {torch.device("bp:0" if device == "cpu" else device)}
    assert torch.cat(sums).tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
