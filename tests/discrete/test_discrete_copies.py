"""Tests copies to, from, within and between devices without host-accessible memory, and functions that read values."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu", "bp:0", "bp:1", "bp:2", "bp:3"]

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda base: base[:4, :6].contiguous(),
    "transposed": lambda base: base[:6, :4].t(),
    "slice": lambda base: base[1:5, 2:8],
    "strided": lambda base: base[::2, 1:12:2],
    "expanded": lambda base: base[0, :6].expand(4, 6),
    "offset": lambda base: base.view(-1)[7:31].view(4, 6),
}
WRITABLE = [name for name in LAYOUTS if name != "expanded"]


def base(device: str, dtype: torch.dtype = torch.float32, start: int = 0) -> Tensor:
    return torch.arange(start, start + 96, dtype=torch.int32).to(dtype).view(8, 12).to(device)


@pytest.mark.parametrize(
    ("source", "destination"), [pair for pair in itertools.product(DEVICES, DEVICES) if pair != ("cpu", "cpu")]
)
def test_copies_of_all_layouts_and_dtypes_between_all_devices(source: str, destination: str) -> None:
    dtypes = [
        (torch.float32, torch.float32), (torch.int64, torch.float16), (torch.float32, torch.uint8),
        (torch.complex64, torch.complex64), (torch.float32, torch.complex64),
    ]  # fmt: skip
    for (from_dtype, to_dtype), from_layout, to_layout in itertools.product(dtypes, LAYOUTS, WRITABLE):
        expected, got = base("cpu", to_dtype, 200), base(destination, to_dtype, 200)
        LAYOUTS[to_layout](expected).copy_(LAYOUTS[from_layout](base("cpu", from_dtype)))
        LAYOUTS[to_layout](got).copy_(LAYOUTS[from_layout](base(source, from_dtype)))
        assert torch.equal(got.cpu(), expected), (from_dtype, to_dtype, from_layout, to_layout)


@pytest.mark.parametrize("source", DEVICES)
@pytest.mark.parametrize("destination", ["bp:0", "bp:1", "bp:2"])
def test_broadcasts_empties_and_conjugates(source: str, destination: str) -> None:
    row = torch.arange(6.0)
    assert torch.zeros(4, 6, device=destination).copy_(row.to(source)).cpu().equal(row.expand(4, 6))
    assert torch.zeros(4, 6, device=destination).copy_(row.sum().to(source)).cpu().eq(15).all()
    assert torch.empty(0, 3, device=destination).copy_(torch.empty(0, 3, device=source)).shape == (0, 3)
    z = torch.randn(3, 4, dtype=torch.complex64)
    for view in (lambda t: t, torch.conj, lambda t: t.t().conj().t(), lambda t: t.conj().imag, lambda t: t.real):
        assert view(z.to(source)).to(destination).resolve_conj().resolve_neg().cpu().equal(
            view(z).resolve_conj().resolve_neg()
        )
        kept = view(torch.zeros_like(z, device=destination))
        kept.copy_(view(z.to(source)))
        assert kept.resolve_conj().resolve_neg().cpu().equal(view(z).resolve_conj().resolve_neg())


def test_pinned_memory_and_non_blocking_copies() -> None:
    host = torch.arange(1000.0).pin_memory()
    device = host.to("bp:0", non_blocking=True)
    back = torch.empty(1000).pin_memory()
    back.copy_(device * 2, non_blocking=True)
    torch.accelerator.synchronize(0)
    assert back.equal(host * 2)


@pytest.mark.parametrize("device", ["bp:0", "bp:1"])
def test_values_can_be_printed_and_read(device: str) -> None:
    x = torch.tensor([[1.5, -2.0], [float("inf"), 4.0]], device=device)
    assert repr(x) == f"tensor([[ 1.5000, -2.0000],\n        [    inf,  4.0000]], device='{device}')"
    long = repr(torch.arange(5000, device=device).float())
    assert long.startswith("tensor([0.0000e+00, 1.0000e+00, 2.0000e+00,  ...")
    assert repr(torch.tensor(3 + 1j, device=device)) == f"tensor(3.+1.j, device='{device}')"
    assert repr(torch.ones(2, device=device, requires_grad=True)) == (
        f"tensor([1., 1.], device='{device}', requires_grad=True)"
    )
    assert f"{x[0, 0]:.2f}" == "1.50"
    assert (x[1, 1].item(), int(x[1, 1]), x[0].tolist(), 4.0 in x) == (4.0, 4, [1.5, -2.0], True)
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()


def test_printing_uses_no_fallback_except_cat() -> None:
    from torch_backplane import _C

    x = torch.ones(3, device="bp:1")
    large = torch.ones(3000, device="bp:1")
    _C.reset_fallback_counts()
    repr(x)
    assert _C.fallback_counts() == {}
    repr(large)
    assert set(_C.fallback_counts()) <= {"aten::cat", "aten::cat.out"}  # concatenates the first and last elements


def test_saving_and_loading() -> None:
    x = torch.arange(12.0, device="bp:1").view(3, 4)
    file = io.BytesIO()
    torch.save({"x": x, "view": x[1:, ::2]}, file)
    for target in ("cpu", "bp:0", "bp:2", None):
        file.seek(0)
        loaded = torch.load(file, map_location=target, weights_only=True)
        assert loaded["x"].device == torch.device(target or "bp:1")
        assert loaded["x"].cpu().equal(x.cpu())
        loaded["x"].zero_()
        assert loaded["view"].sum().item() == 0, "the view no longer shares storage"
    assert pickle.loads(pickle.dumps(x)).cpu().equal(x.cpu())
    twin = copy.deepcopy(x)
    twin.add_(1)
    assert x[0, 0].item() == 0
    assert twin[0, 0].item() == 1


def test_storages() -> None:
    x = torch.arange(6.0, device="bp:0")
    storage = x.untyped_storage()
    storage.resize_(48)
    assert torch.empty(0, device="bp:0").set_(storage).tolist()[:6] == [0, 1, 2, 3, 4, 5]
    assert storage.cpu().tolist()[:24] == list(x.cpu().untyped_storage())[:24]
    clone = storage.clone()
    x.zero_()
    assert torch.tensor([], device="bp:0").set_(clone)[1].item() == 1
    storage.fill_(0)
    x.resize_(2, 2).fill_(3)
    assert x.sum().item() == 12


def test_cpu_access_to_device_addresses_crashes() -> None:
    import ctypes
    import os

    address = torch.ones(4, device="bp:0").data_ptr()
    child = os.fork()
    if child == 0:
        import faulthandler

        faulthandler.disable()
        ctypes.string_at(address, 4)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_out_of_memory_error_and_recovery() -> None:
    torch.accelerator.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1024\.00 MiB"):
        torch.empty(1 << 28, device="bp:1")
    held = []
    for _ in range(8):
        held.append(torch.empty(1 << 23, device="bp:1"))  # 256 MiB in blocks of 32 MiB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 23, device="bp:1")
    del held
    assert torch.ones(1 << 25, device="bp:1")[-1].item() == 1  # 128 MiB, after releasing the cached blocks of 32 MiB
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.accelerator.empty_cache()
