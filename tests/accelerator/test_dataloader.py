"""Pinned memory, DataLoader workers, and copies that overlap with the stream's work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torch_backplane import _C

BUSY = 500  # milliseconds: longer than the lines after the sleep take on a loaded machine


class Squares(Dataset[dict[str, Tensor]]):
    """Items are dictionaries, so pinning has to traverse a nested structure."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"number": torch.tensor(index), "square": torch.full((2,), float(index**2))}


def test_is_pinned() -> None:
    x = torch.ones(10)
    pinned = x.pin_memory()
    assert not x.is_pinned()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert pinned.device.type == "cpu"
    assert torch.equal(pinned, x)
    assert pinned.pin_memory() is pinned
    assert not torch.ones(10, device="bp").is_pinned()
    assert not torch.empty(0).is_pinned()


@pytest.mark.filterwarnings("ignore:The argument 'device' of Tensor:DeprecationWarning")
def test_pin_memory_accepts_a_device() -> None:
    pinned = torch.ones(10).pin_memory("bp")
    assert pinned.is_pinned("bp")
    assert pinned.is_pinned()


def test_pinning_needs_no_device_argument() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("bp")
    assert torch.ones(2).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.zeros(3, pin_memory=True).is_pinned()
    assert torch.tensor([1, 2], pin_memory=True).is_pinned()
    assert torch.randn(3, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned()


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the default device of torch 2.12's method is CUDA")
def test_pinning_storages_needs_no_device_argument() -> None:
    assert torch.ones(3).untyped_storage().pin_memory().is_pinned()


def test_bp_tensors_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match=r"cannot pin .*bp.* only dense CPU tensors can be pinned"):
        torch.ones(2, device="bp").pin_memory()
    with pytest.raises(RuntimeError, match="Only dense CPU tensors can be pinned"):
        torch.empty(2, device="bp", pin_memory=True)


def test_pinned_memory_is_reused() -> None:
    first = torch.empty(1 << 16, pin_memory=True)
    address = first.data_ptr()
    del first
    assert torch.empty(1 << 16, pin_memory=True).data_ptr() == address


def test_pinned_memory_is_not_reused_while_copies_read_it() -> None:
    stream = torch.Stream("bp")
    pinned = torch.full((1 << 14,), 5.0).pin_memory()
    address = pinned.data_ptr()
    with stream:
        _C.sleep(BUSY)
        on_bp = pinned.to("bp", non_blocking=True)
    assert not stream.query()  # the copy is pending
    del pinned
    other = torch.empty(1 << 14, pin_memory=True)
    assert other.data_ptr() != address
    other.fill_(-1)
    stream.synchronize()
    assert torch.equal(on_bp.cpu(), torch.full((1 << 14,), 5.0))
    again = torch.empty(1 << 14, pin_memory=True)
    assert again.data_ptr() == address  # the copy has completed, so the block is reused


def test_non_blocking_copies_return_while_the_stream_is_busy() -> None:
    pinned = torch.full((1000,), 5.0).pin_memory()
    on_bp = torch.zeros(1000, device="bp")
    back = torch.zeros(1000).pin_memory()
    _C.sleep(BUSY)
    on_bp.copy_(pinned, non_blocking=True)
    back.copy_(on_bp, non_blocking=True)
    stream = torch.accelerator.current_stream()
    assert not stream.query()
    assert back.sum().item() == 0
    stream.synchronize()
    assert back.sum().item() == 5000


def test_blocking_copies_wait_for_the_stream() -> None:
    pinned = torch.full((1000,), 5.0).pin_memory()
    _C.sleep(30)
    on_bp = pinned.to("bp")
    assert torch.accelerator.current_stream().query()
    _C.sleep(30)
    assert on_bp.cpu().sum().item() == 5000
    assert torch.accelerator.current_stream().query()


def test_non_blocking_copy_between_devices_waits_for_the_source_stream() -> None:
    pinned = torch.full((1000,), 5.0).pin_memory()
    with torch.accelerator.device_index(0):
        _C.sleep(50)
        on_first = pinned.to("bp:0", non_blocking=True)
    on_second = on_first.to("bp:1", non_blocking=True)
    del on_first
    assert on_second.cpu().sum().item() == 5000


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device", [None, "bp"])
@pytest.mark.filterwarnings("ignore:.*pin_memory_device.*deprecated")
def test_data_loader_with_pinned_memory(workers: int, device: str | None) -> None:
    """Workers that do not use bp can be forked from a process that does; fork is DataLoader's default on Linux."""
    assert torch.ones(2, device="bp").sum().item() == 2
    loader = DataLoader(
        Squares(),
        batch_size=4,
        num_workers=workers,
        pin_memory=True,
        multiprocessing_context="fork" if workers else None,
        **({"pin_memory_device": device} if device else {}),
    )
    for _ in range(2):
        numbers: list[int] = []
        for batch in loader:
            assert batch["square"].is_pinned()
            moved = {name: value.to("bp", non_blocking=True) for name, value in batch.items()}
            assert torch.equal(moved["square"][:, 0], moved["number"].square().float())
            numbers += moved["number"].tolist()
        assert numbers == list(range(12))


class MakesBpTensors(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Tensor:
        return torch.ones(1, device="bp")


def test_a_forked_worker_that_uses_bp_raises() -> None:
    torch.ones(1, device="bp")
    with pytest.raises(RuntimeError, match="Cannot re-initialize bp in forked subprocess"):
        next(iter(DataLoader(MakesBpTensors(), num_workers=1, multiprocessing_context="fork")))
    assert torch.ones(1, device="bp").item() == 1


def test_datasets_on_bp() -> None:
    data = TensorDataset(torch.arange(6.0, device="bp"), torch.arange(6, device="bp"))
    generator = torch.Generator().manual_seed(0)
    batches = list(DataLoader(data, batch_size=2, shuffle=True, generator=generator))
    assert all(values.device.type == "bp" for values, _ in batches)
    assert sorted(torch.cat([values for values, _ in batches]).tolist()) == [0, 1, 2, 3, 4, 5]


def test_data_loader_with_a_default_device() -> None:
    with torch.device("bp"):
        loader = DataLoader(
            TensorDataset(torch.arange(6.0)), batch_size=2, shuffle=True, generator=torch.Generator(device="bp")
        )
        assert sorted(torch.cat([values for (values,) in loader]).tolist()) == [0, 1, 2, 3, 4, 5]
