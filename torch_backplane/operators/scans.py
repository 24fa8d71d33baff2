"""Cumulative sums, products, extrema and log-sum-exps."""

from __future__ import annotations

import torch

from torch_backplane.kernels.templates.scan import accumulate, extremum
from torch_backplane.planning import Call, RunOnCPU, contiguous_result, operator, run_template


def _accumulate(out: torch.Tensor, self: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    if out.dtype == torch.bool:
        raise RunOnCPU("results of bool")
    if out.numel():
        with contiguous_result(out) as result:
            run_template(accumulate, out.device, result, self.to(out.dtype).contiguous(), dim, name, name=name)
    return out


@operator("cumsum")
def cumsum(call: Call, self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    return _accumulate(call.outputs()[0], self, dim, "cumsum")


@operator("cumprod")
def cumprod(call: Call, self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    return _accumulate(call.outputs()[0], self, dim, "cumprod")


# PyTorch has no meta kernel for these: logcumsumexp has checked what they are given, and made the result.


@operator("_logcumsumexp", variants=False)
def logcumsumexp(call: Call, self: torch.Tensor, dim: int) -> torch.Tensor:
    return _accumulate(torch.empty_like(self), self, dim, "logcumsumexp")


@operator("_logcumsumexp.out", variants=False)
def logcumsumexp_out(call: Call, self: torch.Tensor, dim: int) -> torch.Tensor:
    out = call.arguments[-1]
    if out.shape != self.shape or out.dtype != self.dtype:
        raise RunOnCPU("a result that is to be resized or converted")
    return _accumulate(out, self, dim, "logcumsumexp")


@operator("_cummax_helper", "_cummin_helper", variants=False)
def cumulative_extremum(call: Call, self: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, dim: int) -> None:
    name = "cummax" if "cummax" in call.name else "cummin"
    if self.numel():
        with contiguous_result(values) as best, contiguous_result(indices) as places:
            run_template(extremum, self.device, best, places, self.contiguous(), dim, name, name=name)
