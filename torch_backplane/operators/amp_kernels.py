"""Operators of torch.amp.GradScaler."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.operators.foreach import Set, run_sets
from torch_backplane.planning import Call, operator, run_pointwise


def unscaled(gradient: Any, inverse: Any) -> Any:
    """The gradient times the inverse scale. A scale of 1 leaves the gradient bitwise unchanged."""
    return f.where(inverse == 1.0, gradient, gradient * inverse)


@operator("_amp_foreach_non_finite_check_and_unscale_", variants=False)
def check_and_unscale(call: Call, self: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Sets found_inf to 1 if a gradient is infinite or NaN; multiplies the gradients by inv_scale."""
    gradients = [one for one in self if one.numel()]
    if not gradients:
        return
    largest = [torch.linalg.vector_norm(one, float("inf")).to(torch.float32) for one in gradients]  # propagates NaN
    run_pointwise(
        lambda found, most: f.where(f.isfinite(most), found, 1.0),
        [found_inf],
        [found_inf, torch.stack(largest).amax().expand(found_inf.shape)],
        key="found_inf",
        name="amp_non_finite_check",
    )
    sets: list[Set] = [([one], [inv_scale], []) for one in gradients]
    run_sets("amp_unscale", unscaled, sets, [[one] for one in gradients])


@operator(
    "_amp_update_scale_",
    passed_through=("scale_growth_factor", "scale_backoff_factor", "growth_interval"),
    variants=False,
)
def update_scale(
    call: Call,
    self: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    scale_growth_factor: Any,
    scale_backoff_factor: Any,
    growth_interval: Any,
) -> torch.Tensor:
    """The rule in the documentation of torch.amp.GradScaler: back off after an overflow, grow after steps without."""

    def step(scale: Any, tracker: Any, found: Any, growth: Any, backoff: Any, interval: Any) -> tuple[Any, Any]:
        overflow, steps = found != 0.0, tracker + 1
        grows = steps.to(torch.int64) == interval
        grown = f.where(f.isfinite(scale * growth), scale * growth, scale)
        after = f.where(overflow, scale * backoff, f.where(grows, grown, scale))
        return after, f.where(f.where(overflow, True, grows), 0, steps)

    numbers = [(one, value_dtype(self.dtype)) for one in (scale_growth_factor, scale_backoff_factor)]
    run_pointwise(
        step,
        [self, growth_tracker],
        [self, growth_tracker, found_inf],
        [*numbers, (growth_interval, torch.int64)],
        key="amp_update_scale",
        name="amp_update_scale",
    )
    return self
