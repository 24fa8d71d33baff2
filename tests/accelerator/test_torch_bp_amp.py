"""torch.autocast("bp") and torch.amp.GradScaler("bp")."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_run_in_the_lower_precision_and_softmax_in_float32(dtype: torch.dtype) -> None:
    linear = torch.nn.Linear(8, 8, device="bp")
    conv = torch.nn.Conv1d(2, 2, 3, device="bp")
    with torch.autocast("bp", dtype=dtype):
        hidden = linear(torch.randn(4, 8, device="bp"))
        assert hidden.dtype == dtype
        assert conv(torch.randn(1, 2, 8, device="bp")).dtype == dtype
        assert (hidden @ hidden.T).dtype == dtype
        assert hidden.softmax(-1).dtype == torch.float32
        assert F.layer_norm(hidden, (8,)).dtype == torch.float32
        assert hidden.sum().dtype == torch.float32
        assert hidden.norm().dtype == torch.float32
        assert torch.relu(hidden).dtype == dtype  # in none of autocast's lists
        assert torch.addcmul(hidden, hidden.float(), hidden).dtype == torch.float32  # the widest input dtype
        with torch.autocast("bp", enabled=False):
            assert linear(torch.randn(4, 8, device="bp")).dtype == torch.float32
    assert linear(torch.randn(4, 8, device="bp")).dtype == torch.float32


def test_float16_is_the_default_and_the_results_are_close() -> None:
    assert torch.get_autocast_dtype("bp") == torch.float16
    assert torch.amp.is_autocast_available("bp")
    linear, inputs = torch.nn.Linear(16, 16, device="bp"), torch.randn(4, 16, device="bp")
    with torch.autocast("bp"):
        assert torch.is_autocast_enabled("bp")
        result = linear(inputs)
    torch.testing.assert_close(result.float(), linear(inputs), atol=1e-2, rtol=1e-2)


def test_cpu_operators_are_unchanged() -> None:
    with torch.autocast("bp"):
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


def test_an_unsupported_dtype_disables_autocast() -> None:
    with pytest.warns(UserWarning, match="target dtype is not supported"), torch.autocast("bp", dtype=torch.float64):
        assert not torch.is_autocast_enabled("bp")


def test_binary_cross_entropy_is_refused() -> None:
    chances = torch.full((4,), 0.5, device="bp")
    with torch.autocast("bp"):
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(chances, chances)
        assert F.binary_cross_entropy_with_logits(chances, chances).dtype == torch.float32


def test_custom_functions() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="bp", cast_inputs=torch.float32)
        def forward(ctx, x):
            assert not torch.is_autocast_enabled("bp")
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="bp")
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x = torch.ones(3, device="bp", dtype=torch.float16, requires_grad=True)
    with torch.autocast("bp"):
        y = Square.apply(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_scaled_step(make) -> None:
    model = torch.nn.Linear(4, 1, device="bp")
    optimizer = make(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("bp", init_scale=128.0, growth_interval=1)
    before = model.weight.detach().clone()
    with torch.autocast("bp", dtype=torch.float16):
        loss = model(torch.ones(2, 4, device="bp")).mean()
    scaler.scale(loss).backward()
    assert model.weight.grad.flatten().tolist() == [128.0] * 4
    scaler.unscale_(optimizer)
    assert model.weight.grad.flatten().tolist() == [1.0] * 4
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.weight, before)
    assert scaler.get_scale() == 256.0


def test_a_step_with_infinite_gradients_is_skipped() -> None:
    model = torch.nn.Linear(4, 1, device="bp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("bp", init_scale=128.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((2, 4), float("inf"), device="bp")).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 64.0


def test_a_scaler_is_saved_and_loaded() -> None:
    scaler = torch.amp.GradScaler("bp", init_scale=32.0)
    scaler.scale(torch.ones(1, device="bp"))
    other = torch.amp.GradScaler("bp")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 32.0
