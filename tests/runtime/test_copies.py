"""Copies between the CPU and bp, within a device and between devices: all dtypes, layouts and conjugate bits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch
from dtypes import ALL_DTYPES
from torch import Tensor

from torch_backplane import _C


def sample(dtype: torch.dtype, *size: int) -> Tensor:
    """A tensor of any dtype whose elements differ where the dtype allows."""
    count = torch.Size(size).numel()
    values = torch.arange(count, dtype=torch.float32).reshape(size) % 100
    if dtype.is_complex:
        return torch.complex(values, -values).to(dtype)
    return values.to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, to compare dtypes without equality."""
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_round_trip(dtype: torch.dtype) -> None:
    original = sample(dtype, 3, 4)
    on_bp = original.to("bp")
    assert (on_bp.dtype, on_bp.shape, on_bp.stride()) == (dtype, original.shape, original.stride())
    assert torch.equal(bits(on_bp), bits(original))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool], ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.float16, torch.int32, torch.complex128, torch.bool], ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_dtype_conversion_in_all_directions(dtype: torch.dtype, target: torch.dtype) -> None:
    original = sample(dtype, 5)
    expected = original.to(target)
    assert torch.equal(original.to("bp").to(target).cpu(), expected)
    assert torch.equal(original.to("bp", target).cpu(), expected)
    assert torch.equal(original.to("bp").to("cpu", target), expected)
    assert torch.equal(original.to("bp:0").to("bp:1", target).cpu(), expected)


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "strided": lambda t: t[::2, 1::3],
    "offset": lambda t: t[2:, 3:],
    "expanded": lambda t: t[:1].expand(5, -1),
    "permuted": lambda t: t.reshape(3, 2, 8).permute(2, 0, 1),
    "scalar": lambda t: t[1, 1],
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("route", ["cpu to bp", "bp to cpu", "bp to bp", "bp:0 to bp:1"])
def test_strides(layout: str, route: str) -> None:
    source, _, destination = route.partition(" to ")
    base = sample(torch.float32, 6, 8)
    expected = LAYOUTS[layout](base)
    view = LAYOUTS[layout](base.to(source))
    moved = view.to(destination, copy=True)
    assert torch.equal(moved.cpu(), expected)
    assert moved.stride() == expected.to("cpu", copy=True).stride()
    into = torch.zeros(expected.shape[::-1], device=destination).permute(tuple(range(expected.dim()))[::-1])
    into.copy_(view)
    assert torch.equal(into.cpu(), expected)


@pytest.mark.parametrize("route", ["cpu to bp", "bp to cpu", "bp to bp", "bp:0 to bp:1"])
def test_conjugate_and_negative_views(route: str) -> None:
    source, _, destination = route.partition(" to ")
    base = sample(torch.complex64, 3, 4)
    on_source = base.to(source)
    for view, expected in [
        (on_source.conj(), base.conj()),
        (on_source.conj().imag, base.conj().imag),
        (on_source.mT.conj(), base.mT.conj()),
        (torch._neg_view(on_source), torch._neg_view(base)),
    ]:
        assert torch.equal(view.to(destination, copy=True).cpu(), expected)
        into = torch.empty_like(expected.resolve_conj().resolve_neg(), device=destination)
        assert torch.equal(into.copy_(view).cpu(), expected.resolve_conj().resolve_neg())
    into = torch.zeros(3, 4, dtype=torch.complex64, device=destination)
    into.conj().copy_(on_source)
    assert torch.equal(into.cpu(), base.conj().resolve_conj())
    into.imag.copy_(on_source.real)
    assert torch.equal(into.imag.cpu(), base.real)


@pytest.mark.parametrize("route", ["cpu to bp", "bp to cpu", "bp to bp", "bp:0 to bp:1"])
def test_broadcasting_copy(route: str) -> None:
    source, _, destination = route.partition(" to ")
    row = torch.arange(4.0, device=source)
    into = torch.zeros(3, 4, device=destination)
    into.copy_(row)
    assert into.cpu().tolist() == [[0, 1, 2, 3]] * 3
    with pytest.raises(RuntimeError, match=r"must match the size|expanded size"):
        into.copy_(torch.zeros(5, device=source))


def test_to_without_a_change_returns_the_same_tensor() -> None:
    x = torch.zeros(2, device="bp:1")
    assert x.to("bp:1") is x
    assert x.to(torch.float32) is x
    assert x.to("bp:1", copy=True) is not x
    with torch.accelerator.device_index(1):
        assert x.to("bp") is x


def test_a_bare_device_name_means_the_current_device() -> None:
    x = torch.zeros(2, device="bp:2")
    assert x.to("bp").device == torch.device("bp", torch.bp.current_device())
    assert torch.zeros(2).to("bp").device == torch.device("bp", torch.bp.current_device())


def test_copies_between_devices_are_copies() -> None:
    a = torch.arange(4.0, device="bp:0")
    b = a.to("bp:1")
    assert b.device == torch.device("bp:1")
    assert a.data_ptr() != b.data_ptr()
    a.zero_()
    assert b.tolist() == [0, 1, 2, 3]
    b.copy_(torch.ones(4, device="bp:3"))
    assert b.tolist() == [1, 1, 1, 1]


def test_copy_onto_itself_and_onto_an_overlapping_view() -> None:
    x = torch.arange(5.0, device="bp")
    assert x.copy_(x).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.zeros(1, device="bp").expand(3).copy_(torch.ones(3, device="bp"))


def test_a_pageable_source_can_change_after_a_non_blocking_copy() -> None:
    """Like cudaMemcpyAsync from pageable memory: the source can change immediately, even while the stream is busy."""
    stream = torch.Stream("bp")
    with stream:
        source = torch.ones(1000)
        _C.sleep(30)
        copied = source.to("bp", non_blocking=True)
        source.zero_()
    stream.synchronize()
    assert copied.sum().item() == 1000


def test_reading_values_waits_for_the_stream() -> None:
    pinned = torch.full((4,), 7.0).pin_memory()
    _C.sleep(30)
    x = pinned.to("bp", non_blocking=True)
    assert x[0].item() == 7
    _C.sleep(30)
    x = pinned.to("bp", non_blocking=True)
    assert x.tolist() == [7, 7, 7, 7]
    _C.sleep(30)
    x = pinned.to("bp", non_blocking=True)
    assert bool((x == 7).all())
    assert int(x[0]) == 7


def test_python_numbers_and_lists_make_bp_tensors() -> None:
    assert torch.tensor([[1, 2], [3, 4]], device="bp").tolist() == [[1, 2], [3, 4]]
    assert torch.as_tensor([1.5], device="bp").item() == 1.5
    assert torch.asarray([1, 2], device="bp").device.type == "bp"
    assert torch.tensor([True, False], device="bp").dtype == torch.bool
    assert torch.tensor(1 + 2j, device="bp").item() == 1 + 2j


def test_bp_method_of_tensors_and_modules() -> None:
    x = torch.ones(2)
    assert not x.is_bp
    y = x.bp()
    assert y.is_bp
    assert y.device == torch.device("bp", 0)
    assert x.bp(1).device == torch.device("bp:1")
    assert y.cpu().is_cpu
    assert torch.nn.Linear(2, 2).bp().weight.is_bp
    assert next(torch.nn.Linear(2, 2).to("bp:1").parameters()).device == torch.device("bp:1")
    storage = torch.ones(3).untyped_storage().bp()
    assert storage.device.type == "bp"
    assert storage.is_bp


def test_storages() -> None:
    x = torch.arange(4.0, device="bp")
    storage = x.untyped_storage()
    assert storage.device == torch.device("bp:0")
    assert storage.nbytes() == 16
    assert storage.cpu().nbytes() == 16
    clone = storage.clone()
    assert clone.data_ptr() != storage.data_ptr()
    x.zero_()
    assert torch.tensor([], dtype=torch.float32, device="bp").set_(clone).tolist() == [0, 1, 2, 3]
    storage.resize_(32)
    assert storage.nbytes() == 32
    assert x.tolist() == [0, 0, 0, 0]
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(16)
    assert x.fill_(3).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("source_device", ["bp", "cpu"])
@pytest.mark.parametrize("expand", [(4, 3), (3, 4, 3)])
def test_a_copy_to_expanded_memory_is_refused(expand: tuple[int, ...], source_device: str) -> None:
    for device in ("cpu", "bp"):
        place = torch.zeros(3, device=device)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
            place.expand(expand).copy_(torch.ones(expand, device=source_device))
        assert place.tolist() == [0, 0, 0]


def test_a_copy_to_an_overlapping_view_is_refused() -> None:
    for device in ("cpu", "bp"):
        x = torch.arange(6.0, device=device)
        for destination, source in ((x[1:], x[:-1]), (x[:-1], x[1:]), (x[1:], x.view(torch.int32)[:-1])):
            with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer"):
                destination.copy_(source)
        x.copy_(x)
        x[::2].copy_(x[1::2])  # interleaved, but disjoint
        assert x.tolist() == [1, 1, 3, 3, 5, 5]


GAPS = """
import resource, torch
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
memory = torch.empty(2**28, device="bp")
views = [memory.as_strided((2, 3), (2**28 - 8, 1), 1), memory.as_strided((64, 50), (2**22 - 3, 2), 5)]
torch.zeros(3, device="bp").add_(1).cpu()
before = peak()
for view in views:
    for dtype in (torch.float32, torch.float64):
        values = torch.rand(view.shape, dtype=dtype)
        view.copy_(values)
        assert torch.equal(view.cpu(), values.float())
        assert torch.equal(torch.zeros(view.shape, dtype=dtype).copy_(view), values.float().to(dtype))
    assert view[-1, -1].item() == values[-1, -1].float()
    linalg = torch.linalg.lu_factor_ex  # runs on the CPU
    assert torch.equal(linalg(view).LU.cpu(), linalg(values.float()).LU)
    view.normal_()
print(peak() - before)
"""


def test_gaps_between_elements_are_not_copied(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Views of 1 GiB of memory that the CPU cannot access. Copied gaps would show in the process's peak memory."""
    done = run_python(GAPS, TORCH_BACKPLANE_DISCRETE="1", TORCH_BACKPLANE_HOST_DEVICES="1", PYTHONWARNINGS="ignore")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500
