"""Fake quantization: values, masks, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees, on_device

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 10).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_tensor(dtype: torch.dtype) -> None:
    def run(x: torch.Tensor, *rest: float) -> object:
        return aten.fake_quantize_per_tensor_affine_cachemask(x, *rest)

    for rest in ((0.1, 0, 0, 255), (0.37, 7, -8, 7), (3.0, -100, -128, 127)):
        agrees(lambda x: run(x, *rest), numbers(5, 33, dtype=dtype))  # noqa: B023
    agrees(lambda x: run(x, 0.1, 0, 0, 255), torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 0.55], dtype=dtype))
    agrees(lambda x: run(x.t(), 0.1, 0, 0, 255), numbers(4, 5, dtype=dtype))
    agrees(lambda x: run(x, 0.1, 0, 0, 255), torch.zeros(0, 3, dtype=dtype))


@pytest.mark.parametrize("zero_dtype", [torch.int32, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("enabled", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_per_tensor_of_tensors(dtype: torch.dtype, enabled: int, zero_dtype: torch.dtype) -> None:
    def run(*tensors: torch.Tensor) -> object:
        return aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(*tensors, -8, 7)

    given = torch.tensor([0.37]), torch.tensor([3]).to(zero_dtype), torch.tensor([enabled])
    agrees(run, numbers(5, 33, dtype=dtype), *given)
    agrees(run, torch.tensor(2.3, dtype=dtype), *given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_per_channel(dtype: torch.dtype) -> None:
    for axis, count in ((0, 5), (1, 3), (2, 4)):
        scale, zero = torch.rand(count) + 0.1, torch.arange(count, dtype=torch.int32)
        agrees(
            lambda *t: aten.fake_quantize_per_channel_affine_cachemask(*t, axis, -8, 7),  # noqa: B023
            numbers(5, 3, 4, dtype=dtype),
            scale,
            zero,
        )


def test_gradients() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 0, 63).pow(2).sum().backward()
        assert x.grad is not None
        return x.grad

    agrees(run, numbers(50).detach())


BAD: dict[str, tuple[Callable[..., object], torch.Tensor]] = {
    "zero point": (lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 300, 0, 255), numbers(3)),
    "range": (lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, 5, 2), numbers(3)),
    "integers": (lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 3, 0, 255), numbers(3).long()),
    "zero points": (
        lambda x: aten.fake_quantize_per_channel_affine_cachemask(
            x, torch.ones(3, device=x.device), torch.full((3,), 9, dtype=torch.int32, device=x.device), 0, 0, 7
        ),
        numbers(3),
    ),
    "scales": (
        lambda x: aten.fake_quantize_per_channel_affine_cachemask(
            x, torch.ones(2, device=x.device), torch.zeros(2, dtype=torch.int32, device=x.device), 0, 0, 7
        ),
        numbers(3),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_pytorchs(name: str) -> None:
    function, x = BAD[name]
    with pytest.raises(RuntimeError) as expected:
        function(x)
    with pytest.raises(type(expected.value)) as found:
        function(on_device(x))
    assert str(found.value).split("\n")[0] == str(expected.value).split("\n")[0]


def test_fake_quantize_module() -> None:
    from torch.ao.quantization import FakeQuantize

    layer, x = FakeQuantize(quant_min=0, quant_max=255).to(DEVICE), numbers(4, 5)
    expected = FakeQuantize(quant_min=0, quant_max=255)(x)
    torch.testing.assert_close(layer(x.to(DEVICE)).cpu(), expected)
