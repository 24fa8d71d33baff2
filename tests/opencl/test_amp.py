"""Operators of torch.amp.GradScaler and of optimizers used with it."""

from __future__ import annotations

import math

import pytest
import torch
from agreement import DEVICE, agrees

from torch_backplane import _C


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [1.0, math.inf, -math.inf, math.nan])
def test_gradients_are_unscaled_and_checked_for_nonfinite_values(dtype: torch.dtype, value: float) -> None:
    gradients = [torch.randn(5, 3, dtype=dtype), torch.randn(0, dtype=dtype), torch.randn(9, dtype=dtype)[::2]]
    gradients[2][3] = value
    on_device = [one.to(DEVICE) for one in gradients]
    found, inverse = torch.zeros(1, device=DEVICE), torch.tensor([0.25], device=DEVICE)
    for _ in range(2):  # the second call differs only in values
        torch._amp_foreach_non_finite_check_and_unscale_(on_device, found, inverse)
        gradients = [one * 0.25 for one in gradients]
        assert found.item() == float(not math.isfinite(value))
        torch.testing.assert_close([one.cpu() for one in on_device], gradients, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_gradients_of_all_strides_are_unscaled_once(dtype: torch.dtype, order: int) -> None:
    whole = torch.arange(1.0, 9.0, dtype=dtype, device=DEVICE)
    gradients = [whole[:4].clone(), whole.clone()[::2], whole.view(2, 4).t().clone(), whole.clone()[::4]][::order]
    expected = [one.cpu() * 0.25 for one in gradients]
    found, inverse = torch.zeros(1, device=DEVICE), torch.tensor([0.25], device=DEVICE)
    for _ in range(2):
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
        torch.testing.assert_close([one.cpu() for one in gradients], expected, rtol=0, atol=0)
        expected = [one * 0.25 for one in expected]


def test_an_earlier_overflow_stays_recorded() -> None:
    found = torch.ones(1, device=DEVICE)
    torch._amp_foreach_non_finite_check_and_unscale_([found.clone()], found, torch.ones(1, device=DEVICE))
    assert found.item() == 1


@pytest.mark.parametrize("found", [0.0, 1.0])
@pytest.mark.parametrize("tracker", [0, 3])
@pytest.mark.parametrize("scale", [1024.0, 3e38])
def test_scale_update_depends_on_overflows(found: float, tracker: int, scale: float) -> None:
    agrees(
        lambda scale, tracker, found: torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 4),
        torch.tensor([scale]),
        torch.tensor([tracker], dtype=torch.int32),
        torch.tensor([found]),
    )


@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize("unscaled_before", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {"amsgrad": True}), ("AdamW", {})],
)
def test_fused_steps_under_a_scaler(
    optimizer: str, options: dict[str, float], unscaled_before: bool, overflow: bool
) -> None:
    before = sum(_C.fallback_counts().values())
    trained = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3).to(device)
        stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, fused=True, **options)
        scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=8.0)
        for step in range(4):
            x = torch.arange(8.0).view(2, 4) + step
            stepper.zero_grad()
            scaler.scale(model(x.to(device)).square().mean()).backward()
            if overflow and step == 2:
                model.weight.grad[1, 2] = math.inf
            if unscaled_before:
                scaler.unscale_(stepper)
            scaler.step(stepper)
            scaler.update()
        trained.append([one.detach().cpu() for one in model.parameters()] + [torch.tensor(scaler.get_scale())])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-5, atol=1e-6)
    assert sum(_C.fallback_counts().values()) == before


def test_a_scaled_training_step_stays_on_the_device() -> None:
    before = sum(_C.fallback_counts().values())
    model = torch.nn.Linear(4, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("bp", init_scale=4.0, growth_interval=2)
    x = torch.randn(8, 4, device=DEVICE)
    for _ in range(4):
        with torch.autocast("bp", dtype=torch.float16):
            loss = model(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 16.0
    assert sum(_C.fallback_counts().values()) == before
