"""Optimizers, schedulers and gradient clipping on bp, compared with the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

Make = Callable[..., optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (optim.Adam, {"lr": 0.01}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    "AdamW": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adadelta": (optim.Adadelta, {}),
    "Adamax": (optim.Adamax, {}),
    "NAdam": (optim.NAdam, {"momentum_decay": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {}),
    "Rprop": (optim.Rprop, {}),
    "Adafactor": (optim.Adafactor, {}),
}
FUSED = ("SGD", "SGD momentum", "Adam", "Adam amsgrad", "AdamW", "Adagrad")
ON_CPU = ("step", "mu_product")  # state that PyTorch keeps on the CPU unless capturable or fused
STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 5, generator=generator), torch.randn(6, 2, generator=generator)


def train(device: str, make: Make, **options: Any) -> tuple[nn.Module, optim.Optimizer]:
    trained = model().to(device)
    optimizer = make(trained.parameters(), **options)
    for step in range(STEPS):
        inputs, targets = (tensor.to(device) for tensor in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(trained(inputs), targets).backward()
        optimizer.step()
    return trained, optimizer


def assert_same_parameters(on_bp: nn.Module, on_cpu: nn.Module) -> None:
    for mine, theirs in zip(on_bp.parameters(), on_cpu.parameters(), strict=True):
        assert mine.device.type == "bp"
        torch.testing.assert_close(mine.detach().cpu(), theirs.detach())


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_match_cpu(name: str, foreach: bool | None) -> None:
    make, options = OPTIMIZERS[name]
    on_bp, optimizer = train("bp", make, **options, foreach=foreach)
    on_cpu, _ = train("cpu", make, **options, foreach=False)
    assert_same_parameters(on_bp, on_cpu)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in ON_CPU:
                assert value.device.type == "bp", key


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_match_cpu(name: str) -> None:
    make, options = OPTIMIZERS[name]
    assert_same_parameters(train("bp", make, **options, fused=True)[0], train("cpu", make, **options)[0])


def test_fused_and_foreach_together_are_refused() -> None:
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        optim.Adam(model().to("bp").parameters(), fused=True, foreach=True)


def test_lbfgs() -> None:
    losses = []
    for device in ("bp", "cpu"):
        trained = model().to(device)
        inputs, targets = (tensor.to(device) for tensor in batch(0))
        optimizer = optim.LBFGS(trained.parameters(), max_iter=5)

        def closure(
            trained: nn.Module = trained,
            inputs: Tensor = inputs,
            targets: Tensor = targets,
            optimizer: optim.Optimizer = optimizer,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(trained(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
        losses.append(closure().item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["single", "foreach", "fused"])
def test_capturable_and_tensor_learning_rates(options: dict[str, Any]) -> None:
    on_cpu, _ = train("cpu", optim.Adam, lr=0.01)
    assert_same_parameters(train("bp", optim.Adam, lr=torch.tensor(0.01), capturable=True, **options)[0], on_cpu)


def test_optimizer_state_moves_with_load_state_dict() -> None:
    trained, optimizer = train("bp", optim.AdamW, lr=0.01)
    twin = copy.deepcopy(trained).cpu()
    on_cpu = optim.AdamW(twin.parameters(), lr=0.01)
    on_cpu.load_state_dict(optimizer.state_dict())
    assert all(state["exp_avg"].device.type == "cpu" for state in on_cpu.state.values())
    back = model().to("bp:1")
    on_other = optim.AdamW(back.parameters(), lr=0.01)
    on_other.load_state_dict(on_cpu.state_dict())
    assert all(state["exp_avg_sq"].device == torch.device("bp:1") for state in on_other.state.values())


def test_parameters_on_two_devices() -> None:
    a, b = (nn.Parameter(torch.ones(3, device=device)) for device in ("bp:0", "bp:1"))
    optimizer = optim.Adam([a, b], lr=0.5, foreach=True)
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    torch.testing.assert_close(a.detach().cpu(), b.detach().cpu())
    norm = nn.utils.clip_grad_norm_([a, b], 1.0)
    assert norm.item() == pytest.approx(6**0.5)
    assert b.grad.norm().item() == pytest.approx(0.5**0.5, rel=1e-3)


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: optim.lr_scheduler.StepLR(o, 2),
    "CosineAnnealingLR": lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "OneCycleLR": lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "LinearLR": lambda o: optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: optim.lr_scheduler.ExponentialLR(o, 0.5),
    "CosineAnnealingWarmRestarts": lambda o: optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "SequentialLR": lambda o: optim.lr_scheduler.SequentialLR(
        o, [optim.lr_scheduler.ConstantLR(o), optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str, tensor_lr: bool) -> None:
    rates = []
    for device in ("bp", "cpu"):
        parameter = nn.Parameter(torch.ones(2, device=device))
        lr = torch.tensor(0.1, device=device) if tensor_lr else 0.1
        optimizer = optim.SGD([parameter], lr=lr, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        seen = []
        for _ in range(STEPS):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            scheduler.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        rates.append([*seen, *parameter.tolist()])
    assert rates[0] == pytest.approx(rates[1])


def test_reduce_on_plateau_accepts_a_bp_loss() -> None:
    parameter = nn.Parameter(torch.ones(2, device="bp"))
    optimizer = optim.SGD([parameter], lr=1.0)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for _ in range(3):
        scheduler.step(torch.tensor(1.0, device="bp"))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clip_grad_norm(foreach: bool | None) -> None:
    gradients = [torch.full((3,), 4.0), torch.full((2, 2), 3.0)]
    results = []
    for device in ("bp", "cpu"):
        parameters = [nn.Parameter(torch.zeros_like(gradient, device=device)) for gradient in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(device, copy=True)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0, foreach=foreach)
        assert norm.device.type == device
        results.append([norm.cpu(), *(parameter.grad.cpu() for parameter in parameters)])
    torch.testing.assert_close(results[0], results[1])


def test_clip_grad_value_and_non_finite_norms() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="bp"))
    parameter.grad = torch.tensor([-5.0, 0.5, 5.0], device="bp")
    nn.utils.clip_grad_value_([parameter], 1.0)
    assert parameter.grad.tolist() == [-1, 0.5, 1]
    parameter.grad = torch.full((3,), torch.inf, device="bp")
    with pytest.raises(
        RuntimeError, match=r"The total norm of order 2.0 for gradients from `parameters` is non-finite"
    ):
        nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def test_parameter_utilities() -> None:
    twin = model().to("bp")
    vector = nn.utils.parameters_to_vector(twin.parameters())
    assert vector.device.type == "bp"
    nn.utils.vector_to_parameters(vector * 2, twin.parameters())
    torch.testing.assert_close(nn.utils.parameters_to_vector(twin.parameters()), vector * 2)
    averaged = optim.swa_utils.AveragedModel(twin)
    averaged.update_parameters(twin)
    assert next(averaged.parameters()).device.type == "bp"
