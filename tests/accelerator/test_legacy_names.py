"""Legacy names of torch.cuda in torch.bp: typed tensors, typed storages, and torch.bp.amp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

DTYPES = {
    "Bool": torch.bool, "Byte": torch.uint8, "Char": torch.int8, "Short": torch.int16, "Int": torch.int32,
    "Long": torch.int64, "Half": torch.float16, "BFloat16": torch.bfloat16, "Float": torch.float32,
    "Double": torch.float64,
}  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_typed_tensor_classes(name: str) -> None:
    kind, dtype = getattr(torch.bp, f"{name}Tensor"), DTYPES[name]
    x = torch.ones(2, device="bp").to(dtype)
    assert isinstance(x, kind)
    assert not isinstance(x.cpu(), kind)
    assert not isinstance(x.to(torch.complex64), kind)
    assert x.type() == f"torch.bp.{name}Tensor"
    assert torch.ones(2).type(kind).dtype == dtype
    made = kind([1, 0])
    assert (made.device.type, made.dtype, made.tolist()) == ("bp", dtype, [1, 0])
    assert kind(2, 3).shape == (2, 3)
    assert kind(torch.Size([4])).shape == (4,)
    assert kind().shape == (0,)
    with pytest.raises(RuntimeError, match="legacy constructor expects device type: bp"):
        kind(2, device="cpu")


@pytest.mark.parametrize("name", [*DTYPES, "ComplexFloat", "ComplexDouble"])
def test_typed_storage_classes(name: str) -> None:
    kind = getattr(torch.bp, f"{name}Storage")
    dtype = kind.dtype
    x = torch.ones(2, device="bp").to(dtype)
    assert isinstance(x.storage(), kind)
    assert not isinstance(x.cpu().storage(), kind)
    made = kind([1, 0])
    assert (made.device.type, made.dtype, made.tolist()) == ("bp", dtype, [1, 0])
    assert kind(3).size() == 3
    with pytest.raises(RuntimeError, match="Not available for bp storage"):
        kind.from_buffer(b"12345678")


def test_amp_names_match_torch_amp() -> None:
    import torch.bp.amp  # type: ignore[import-not-found]

    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.bp.amp.custom_fwd(cast_inputs=torch.float32)
        def forward(ctx: object, x: Tensor) -> Tensor:
            assert x.dtype == torch.float32
            return x * 2

        @staticmethod
        @torch.bp.amp.custom_bwd
        def backward(ctx: object, gradient: Tensor) -> Tensor:
            return gradient * 2

    with torch.bp.amp.autocast(dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("bp")
        x = torch.ones(2, 2, device="bp", requires_grad=True)
        assert (x @ x).dtype == torch.bfloat16
        result = Twice.apply(x)
    result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2, 2], [2, 2]]
    scaler = torch.bp.amp.GradScaler(init_scale=8.0)
    assert scaler.scale(torch.ones(1, device="bp")).tolist() == [8]
    assert not torch.bp.amp.amp_definitely_not_available()
