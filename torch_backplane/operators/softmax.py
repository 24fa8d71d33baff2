"""softmax and log_softmax, with backward."""

from __future__ import annotations

import torch

from torch_backplane.kernels.templates.softmax import softmax, softmax_backward
from torch_backplane.planning import Call, RunOnCPU, contiguous_result, operator, run_template


def _forward(call: Call, self: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    (out,) = call.outputs()
    if not self.dtype.is_floating_point:
        raise RunOnCPU(f"softmax of {self.dtype}".replace("torch.", ""))
    if out.numel():
        with contiguous_result(out) as result:
            run_template(softmax, out.device, result, self.contiguous(), dim, log, name="softmax")
    return out


@operator("_softmax")
def _softmax(call: Call, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return _forward(call, self, dim, log=False)


@operator("_log_softmax")
def _log_softmax(call: Call, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return _forward(call, self, dim, log=True)


def _backward(call: Call, grad: torch.Tensor, output: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    (out,) = call.outputs()
    if out.numel():
        with contiguous_result(out) as result:
            arguments = (result, grad.contiguous(), output.contiguous(), dim, log)
            run_template(softmax_backward, out.device, *arguments, name="softmax_backward")
    return out


@operator("_softmax_backward_data")
def _softmax_backward_data(
    call: Call, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    return _backward(call, grad_output, output, dim, log=False)


@operator("_log_softmax_backward_data")
def _log_softmax_backward_data(
    call: Call, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    return _backward(call, grad_output, output, dim, log=True)
