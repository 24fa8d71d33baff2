"""Fused optimizers: a step for lists of parameters in few launches (torch._fused_adam_ and similar)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.operators.foreach import Set, check_lists, run_sets
from torch_backplane.planning import Call, Number, Refused, RunOnCPU, operator

FLOATS = ("beta1", "beta2", "weight_decay", "eps")


class Lists(NamedTuple):
    """The tensors that a step changes or reads: each list has one tensor for each parameter."""

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    state: Sequence[list[torch.Tensor]]
    steps: Sequence[torch.Tensor] = ()


def run_step(
    name: str,
    formula: Callable[..., Any],
    lists: Lists,
    rate: Any,
    numbers: list[Any],
    scaler_tensors: tuple[torch.Tensor | None, torch.Tensor | None],
    correction: Callable[..., tuple[Any, ...]] | None = None,
) -> None:
    """Updates `params` and `state` by `formula`.

    Args:
        formula: Takes (parameter, gradient, *state, *step, rate, *numbers); returns the new parameter and state.
        rate: The learning rate, a number or a tensor.
        scaler_tensors: GradScaler's grad_scale and found_inf. Gradients are divided by grad_scale in place. Nothing
            changes if found_inf is not 0.
        correction: Takes (step, rate, *numbers) and returns two numbers, which `formula` gets in place of the step.
            They are computed once for each parameter instead of once for each element.
    """
    (params, grads, state, steps), (grad_scale, found_inf) = lists, scaler_tensors
    for others in (grads, *state):  # PyTorch's kernels write out of bounds if shapes differ
        shapes = [(one.shape, param.shape) for one, param in zip(others, params, strict=False)]
        alike = all(one == other for one, other in shapes)
        torch._check(alike, lambda: "gradients and optimizer states must have the shapes of their parameters")
    torch._check(all(step.numel() == 1 for step in steps), lambda: "each step count must have exactly one element")
    check_lists([params, grads, *state])
    if any(step.dtype != torch.float32 for step in steps):
        raise RunOnCPU("its step counts are not float32")
    scaler = [one for one in (grad_scale, found_inf) if one is not None]
    scales, may_skip = grad_scale is not None, found_inf is not None
    count = 2 + len(state)
    rates = [rate] if isinstance(rate, torch.Tensor) else []
    if any(one.numel() != 1 for one in rates):
        raise Refused("the learning rate does not have exactly one element")
    if not rates:
        numbers = [rate, *numbers]

    def under_scaler(*values: Any) -> tuple[Any, ...]:
        old, rest = list(values[:count]), list(values[count:])
        gradient = old[1] / rest.pop(0) if scales else old[1]
        overflow = rest.pop(0) != 0.0 if may_skip else None
        changed = formula(old[0], gradient, *old[2:], *rest)
        first, *others = changed if isinstance(changed, tuple) else (changed,)
        new = [first, gradient, *others]
        return tuple(new if overflow is None else [f.where(overflow, a, b) for a, b in zip(old, new, strict=True)])

    kind = f"{name}_{bool(rates)}"
    singles = [[*steps[i : i + 1], *rates] for i in range(len(params))]
    if correction is not None and params:
        corrected = torch.empty(len(params), 2, 1, dtype=value_dtype(params[0].dtype), device=params[0].device)
        pairs = [list(pair) for pair in corrected]
        run_sets(
            f"{kind}_correction",
            lambda *values: correction(*values[2:]),
            [(pair, single, numbers) for pair, single in zip(pairs, singles, strict=True)],
            pairs,
        )
        singles = [[*pair, *rates] for pair in pairs]

    sets: list[Set] = []
    outputs = []
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        states = [one[i] for one in state]
        sets.append(([param, grad, *states], [*scaler, *singles[i]], numbers))
        outputs.append([param, grad, *states] if scaler else [param, *states])
    run_sets(f"{kind}_{scales}_{may_skip}", under_scaler if scaler else formula, sets, outputs)


def adam(decoupled: bool, amsgrad: bool, maximize: bool) -> Callable[..., Any]:
    """A step of Adam, or of AdamW if `decoupled`, as in the documentation of torch.optim."""

    def formula(p: Any, g: Any, m: Any, v: Any, *rest: Any) -> tuple[Any, ...]:
        top, (size, root, lr, beta1, beta2, decay, eps) = (rest[0], rest[1:]) if amsgrad else (None, rest)
        g = -g if maximize else g
        if decoupled:
            p = p * (1.0 - lr * decay)
        else:
            g = g + decay * p
        m = m + (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        top = f.maximum(top, v) if amsgrad else None
        denominator = f.sqrt(top if amsgrad else v) / root + eps
        p = p - size * (m / denominator)
        return (p, m, v, top) if amsgrad else (p, m, v)

    return formula


def corrections_of_bias(step: Any, lr: Any, beta1: Any, beta2: Any, *_: Any) -> tuple[Any, Any]:
    """(step size, divisor of the square root of the second moments)."""
    return lr / (1.0 - f.power(beta1, step)), f.sqrt(1.0 - f.power(beta2, step))


def _declare_adam(name: str, decoupled: bool) -> None:
    @operator(name, passed_through=(*FLOATS, "lr"), variants=False)
    @operator(f"{name}.tensor_lr", passed_through=FLOATS, variants=False)
    def plan(
        call: Call,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        exp_avgs: list[torch.Tensor],
        exp_avg_sqs: list[torch.Tensor],
        max_exp_avg_sqs: list[torch.Tensor],
        steps: list[torch.Tensor],
        lr: torch.Tensor | Number,
        beta1: Number,
        beta2: Number,
        weight_decay: Number,
        eps: Number,
        amsgrad: bool,
        maximize: bool,
        grad_scale: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> None:
        state = [exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
        formula = adam(decoupled, amsgrad, maximize)
        numbers = [beta1, beta2, weight_decay, eps]
        named = f"{name[1:-1]}_{amsgrad}_{maximize}"
        lists = Lists(params, grads, state, steps)
        run_step(named, formula, lists, lr, numbers, (grad_scale, found_inf), corrections_of_bias)


_declare_adam("_fused_adam_", decoupled=False)
_declare_adam("_fused_adamw_", decoupled=True)


def sgd(momentum: bool, nesterov: bool, maximize: bool, first_step: bool) -> Callable[..., Any]:
    """A step of stochastic gradient descent, as in the documentation of torch.optim."""

    def formula(p: Any, g: Any, *rest: Any) -> Any:
        buffer, (lr, decay, mass, dampening) = (rest[0], rest[1:]) if momentum else (None, rest)
        g = (-g if maximize else g) + decay * p
        if not momentum:
            return p - lr * g
        buffer = g if first_step else mass * buffer + (1.0 - dampening) * g
        return p - lr * (g + mass * buffer if nesterov else buffer), buffer

    return formula


_OF_MOMENTUM = ["momentum != 0 if momentum_buffer_list", "momentum == 0 if not momentum_buffer_list"]


@operator(
    "_fused_sgd_", passed_through=("weight_decay", "momentum", "lr", "dampening"), checks=_OF_MOMENTUM, variants=False
)
@operator(
    "_fused_sgd_.tensor_lr",
    passed_through=("weight_decay", "momentum", "dampening"),
    checks=_OF_MOMENTUM,
    variants=False,
)
def fused_sgd(
    call: Call,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    buffers: list[torch.Tensor],
    weight_decay: Number,
    momentum: Number,
    lr: torch.Tensor | Number,
    dampening: Number,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    formula = sgd(bool(buffers), nesterov, maximize, is_first_step)
    name = f"fused_sgd_{bool(buffers)}_{nesterov}_{maximize}_{is_first_step}"
    numbers = [weight_decay, momentum, dampening]
    lists = Lists(params, grads, [buffers] if buffers else [])
    run_step(name, formula, lists, lr, numbers, (grad_scale, found_inf))


def adagrad(maximize: bool) -> Callable[..., Any]:
    """A step of Adagrad, as in the documentation of torch.optim."""

    def formula(p: Any, g: Any, total: Any, *numbers: Any) -> Any:
        step, lr, lr_decay, decay, eps = numbers
        g = (-g if maximize else g) + decay * p
        total = total + g * g
        return p - lr / (1.0 + (step - 1.0) * lr_decay) * (g / (f.sqrt(total) + eps)), total

    return formula


@operator("_fused_adagrad_", passed_through=("lr", "lr_decay", "weight_decay", "eps"), variants=False)
@operator("_fused_adagrad_.tensor_lr", passed_through=("lr_decay", "weight_decay", "eps"), variants=False)
def fused_adagrad(
    call: Call,
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    sums: list[torch.Tensor],
    steps: list[torch.Tensor],
    lr: torch.Tensor | Number,
    lr_decay: Number,
    weight_decay: Number,
    eps: Number,
    maximize: bool,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    name, numbers = f"fused_adagrad_{maximize}", [lr_decay, weight_decay, eps]
    lists = Lists(params, grads, [sums], steps)
    run_step(name, adagrad(maximize), lists, lr, numbers, (grad_scale, found_inf))
