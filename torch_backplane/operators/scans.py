"""Cumulative sums, products, extrema and log-sum-exps."""

from __future__ import annotations

import torch

from torch_backplane.kernels.templates.scan import accumulate, complex_products, extremum
from torch_backplane.planning import Call, RunOnCPU, contiguous_result, operator, run_template, socket


def _accumulate(out: torch.Tensor, self: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    if out.dtype == torch.bool:
        raise RunOnCPU("results of bool")
    if out.numel():
        with contiguous_result(out) as result:
            source = self.to(out.dtype).contiguous()
            if not out.is_complex():
                run_template(accumulate, out.device, result, source, dim, name, name=name)
            elif name == "cumprod":
                run_template(complex_products, out.device, result, source, dim, name=name)
            else:
                parts = (torch.view_as_real(one if one.dim() else one.view(1)) for one in (result, source))
                run_template(accumulate, out.device, *parts, dim % max(out.dim(), 1), name, name=name)
    return out


@operator("cumsum", dtypes="complex")
def cumsum(call: Call, self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    (out,) = call.outputs()
    socket.check_overlaps(call.written, [self])
    return _accumulate(out, self, dim, "cumsum")


@operator("cumprod", dtypes="complex")
def cumprod(call: Call, self: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    (out,) = call.outputs()
    socket.check_overlaps(call.written, [self])
    return _accumulate(out, self, dim, "cumprod")


@operator("_logcumsumexp")
def logcumsumexp(call: Call, self: torch.Tensor, dim: int) -> torch.Tensor:
    if not self.dtype.is_floating_point:
        raise RunOnCPU(f"logcumsumexp of {self.dtype}".replace("torch.", ""))  # where PyTorch's error is raised
    # PyTorch has no meta kernel for it; cumsum has the same result and the same errors.
    like = torch.empty(self.shape, dtype=self.dtype, device="meta").cumsum(dim)
    (out,) = call.outputs(like=[like])
    socket.check_overlaps(call.written, [self])
    return _accumulate(out, self, dim, "logcumsumexp")


@operator("_cummax_helper", "_cummin_helper", variants=False)
def cumulative_extremum(call: Call, self: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, dim: int) -> None:
    name = "cummax" if "cummax" in call.name else "cummin"
    if self.numel():
        with contiguous_result(values) as best, contiguous_result(indices) as places:
            run_template(extremum, self.device, best, places, self.contiguous(), dim, name, name=name)
