"""Views on bp share the storage of their base, as on other devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda t: t.view(2, 12),
    "view_as": lambda t: t.view_as(torch.empty(8, 3)),
    "reshape": lambda t: t.reshape(3, 8),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "transpose": lambda t: t.transpose(0, 1),
    "mT": lambda t: t.mT,
    "permute": lambda t: t.permute(1, 0),
    "movedim": lambda t: t.movedim(0, 1),
    "select": lambda t: t[2],
    "select of an element": lambda t: t[1, 3],
    "slice": lambda t: t[1:, ::2],
    "narrow": lambda t: t.narrow(1, 2, 3),
    "diagonal": lambda t: t.diagonal(1),
    "expand": lambda t: t.unsqueeze(0).expand(3, 4, 6),
    "squeeze": lambda t: t.unsqueeze(1).squeeze(),
    "unfold": lambda t: t.unfold(1, 3, 2),
    "as_strided": lambda t: t.as_strided((3, 2), (2, 5), 1),
    "chunk": lambda t: t.chunk(3)[1],
    "split": lambda t: t.split([1, 3])[1],
    "tensor_split": lambda t: t.tensor_split(5, 1)[2],
    "hsplit": lambda t: t.hsplit(2)[1],
    "unbind": lambda t: t.unbind(1)[4],
    "swapaxes": lambda t: t.swapaxes(0, 1),
    "T": lambda t: t.T,
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "view of a dtype": lambda t: t.view(torch.int32),
    "view of a wider dtype": lambda t: t.view(torch.float64),
    "view of a narrower dtype": lambda t: t.view(torch.int16),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(4, 3, 2)),
    "positive": lambda t: +t,
    "real": lambda t: t.real,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_share_storage_and_match_cpu(name: str) -> None:
    base = torch.arange(24.0).view(4, 6)
    on_bp = base.to("bp")
    expected, view = VIEWS[name](base), VIEWS[name](on_bp)
    assert view.untyped_storage().data_ptr() == on_bp.untyped_storage().data_ptr()
    assert (view.shape, view.stride(), view.storage_offset()) == (
        expected.shape,
        expected.stride(),
        expected.storage_offset(),
    )
    assert torch.equal(view.cpu(), expected)
    on_bp.zero_()
    assert not view.any()


def test_views_of_complex_tensors() -> None:
    base = torch.randn(3, 4, dtype=torch.complex64, device="bp")
    for view in (torch.view_as_real(base), base.real, base.imag, base.conj(), base.conj().imag, base.mH):
        assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert base.conj().is_conj()
    assert base.conj().imag.is_neg()
    torch.testing.assert_close(base.conj().imag.cpu(), -base.cpu().imag)
    torch.testing.assert_close((base.mH @ base).cpu(), base.cpu().mH @ base.cpu())
    torch.testing.assert_close(torch.fft.fft(base.conj()).cpu(), torch.fft.fft(base.cpu().conj()))
    base.imag.zero_()
    assert torch.equal(torch.view_as_real(base)[..., 1].cpu(), torch.zeros(3, 4))


def test_writing_through_views() -> None:
    x = torch.zeros(3, 4, device="bp")
    x.t()[1] = 5
    x[:, 2].add_(1)
    x.diagonal().mul_(2)
    x[x == 5] = -1
    x.view(-1)[-1] = 9
    assert x.tolist() == [[0, -1, 1, 0], [0, 10, 1, 0], [0, -1, 2, 9]]


def test_reshape_copies_only_if_necessary() -> None:
    x = torch.arange(6.0, device="bp").view(2, 3)
    assert x.reshape(6).data_ptr() == x.data_ptr()
    assert x.t().reshape(6).data_ptr() != x.data_ptr()
    assert x.t().reshape(6).tolist() == [0, 3, 1, 4, 2, 5]
    assert x.contiguous() is x
    assert x.t().contiguous().stride() == (2, 1)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        x.t().view(6)


def test_errors_of_views_match_pytorch() -> None:
    x = torch.zeros(4, 6, device="bp")
    with pytest.raises(RuntimeError, match=r"shape '\[5, 5\]' is invalid for input of size 24"):
        x.view(5, 5)
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):
        x[4]
    with pytest.raises(RuntimeError, match="out of bounds for storage"):
        x.as_strided((100,), (1,))


def test_resize() -> None:
    x = torch.arange(4.0, device="bp")
    view = x[:2]
    x.resize_(2, 3)
    assert x.shape == (2, 3)
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()  # the storage grew in place
    before = x.data_ptr()
    x.resize_(1)
    assert x.data_ptr() == before
    assert x.untyped_storage().nbytes() == 24  # shrinking keeps the memory
    y = torch.empty(1, device="bp").resize_(2, 3, 4, 5, memory_format=torch.channels_last)
    assert y.stride() == (60, 1, 15, 3)
    with pytest.raises(RuntimeError, match="negative"):
        x.resize_(-1)
    with pytest.raises(RuntimeError, match="cannot resize variables that require grad"):
        torch.zeros(2, device="bp", requires_grad=True).resize_(3)
    assert torch.zeros(2, device="bp").resize_as_(torch.zeros(5, device="bp")).shape == (5,)


def test_set() -> None:
    x, y = torch.arange(4.0, device="bp"), torch.zeros(2, device="bp")
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    y.set_(x.untyped_storage(), 1, (2,), (2,))
    assert y.tolist() == [1, 3]
    y.set_()
    assert y.numel() == 0
    assert y.device.type == "bp"
    x.data = torch.ones(2, device="bp")
    assert x.tolist() == [1, 1]
    with pytest.raises(RuntimeError, match=r"different device|device"):
        torch.zeros(1, device="bp").set_(torch.zeros(1).untyped_storage())


def test_memory_formats() -> None:
    x = torch.randn(2, 3, 4, 5, device="bp")
    last = x.to(memory_format=torch.channels_last)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, x)
    assert (last * 2).is_contiguous(memory_format=torch.channels_last)
    assert torch.empty_like(last).stride() == last.stride()
    assert torch.zeros_like(last, memory_format=torch.contiguous_format).is_contiguous()
    assert last.clone().stride() == last.stride()
    assert last.cpu().stride() == last.stride()
    assert last.to("bp:1").stride() == last.stride()


def test_version_counter_is_shared_with_views() -> None:
    x = torch.zeros(2, 2, device="bp")
    view = x[0]
    before = x._version
    view.add_(1)
    assert x._version == before + 1
    assert view._base is x


def test_deterministic_fill_of_empty() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device="bp").isnan().all()
        assert (torch.empty(3, device="bp", dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
        assert torch.empty_strided((2,), (2,), device="bp").isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
