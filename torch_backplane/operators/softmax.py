"""softmax, log_softmax and their gradients."""

from __future__ import annotations

import torch

from torch_backplane.kernels.templates.softmax import softmax, softmax_backward
from torch_backplane.operators import split_rows
from torch_backplane.planning import Call, Refused, contiguous_result, operator, run_template


def _forward(call: Call, self: torch.Tensor, dim: int, half_to_float: bool, log: bool) -> torch.Tensor:
    if not self.dtype.is_floating_point:
        raise Refused(f"softmax of {self.dtype}".replace("torch.", ""))
    if half_to_float and self.dtype != torch.float16:
        raise Refused("half_to_float of another dtype than float16")
    (out,) = call.outputs()
    if out.numel():
        with contiguous_result(out) as result:
            if split_rows.divides_softmax(result, dim):
                split_rows.softmax(result, self.contiguous(), dim, log)
            else:
                run_template(softmax, out.device, result, self.contiguous(), dim, log, name="softmax")
    return out


@operator("_softmax")
def _softmax(call: Call, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return _forward(call, self, dim, half_to_float, log=False)


@operator("_log_softmax")
def _log_softmax(call: Call, self: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    return _forward(call, self, dim, half_to_float, log=True)


def _backward(call: Call, grad: torch.Tensor, output: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    if not grad.dtype.is_floating_point:
        raise Refused(f"the gradient of softmax of {grad.dtype}".replace("torch.", ""))
    (out,) = call.outputs()
    # PyTorch raises this error for softmax. For log_softmax it does not check, and reads out of bounds.
    torch._check(
        grad.shape == output.shape,
        lambda: "Expected tensor for argument #1 'grad' to have same size as tensor for argument #2 'output'; but "
        f"{list(grad.shape)} does not equal {list(output.shape)} (while checking arguments for log_softmax_backward)",
    )
    if out.numel():
        with contiguous_result(out) as result:
            arguments = (result, grad.contiguous(), output.contiguous(), dim, log)
            if split_rows.divides_softmax(result, dim):
                split_rows.softmax_backward(*arguments)
            else:
                run_template(softmax_backward, out.device, *arguments, name="softmax_backward")
    return out


@operator("_softmax_backward_data", one_dtype=["grad_output", "output"])
def _softmax_backward_data(
    call: Call, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    return _backward(call, grad_output, output, dim, log=False)


@operator("_log_softmax_backward_data", one_dtype=["grad_output", "output"])
def _log_softmax_backward_data(
    call: Call, grad_output: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype
) -> torch.Tensor:
    return _backward(call, grad_output, output, dim, log=True)


# Softmax of the elements that a mask leaves (true: left out)


def _whole_mask(self: torch.Tensor, mask: torch.Tensor, dim: int, shaped: int) -> torch.Tensor:
    """The mask, expanded to self's shape. It is (rows, columns) for `shaped` 0, (batch, columns) for 1, whole for 2."""
    shape = {0: self.shape[-2:], 1: (self.shape[0], self.shape[-1]), 2: self.shape} if self.dim() else {2: self.shape}
    if mask.dtype != torch.bool or mask.shape != shape.get(shaped) or (shaped == 0 and shape[0][0] != shape[0][1]):
        raise Refused("mask has another shape or is not bool")
    if shaped < 2 and self.dim() != 4:
        raise Refused("self is not four-dimensional")
    return (mask.view(mask.shape[0], 1, 1, mask.shape[1]) if shaped == 1 else mask).expand(self.shape)


@operator("_masked_softmax")
def _masked_softmax(
    call: Call, self: torch.Tensor, mask: torch.Tensor, dim: int | None, mask_type: int | None
) -> torch.Tensor:
    """Zero where the mask is true; NaN in rows in which it is true everywhere."""
    if not self.is_floating_point():
        raise Refused(f"softmax of {self.dtype}".replace("torch.", ""))
    dim = self.dim() - 1 if dim is None else dim
    mask = _whole_mask(self, mask, dim, 2 if mask_type is None else mask_type)
    (out,) = call.outputs(like=[torch.empty(self.shape, dtype=self.dtype, device="meta")])
    return torch.ops.aten._softmax.out(self.masked_fill(mask, -torch.inf), dim, False, out=out)


@operator("_masked_softmax_backward")
def _masked_softmax_backward(
    call: Call, grad_output: torch.Tensor, output: torch.Tensor, mask: torch.Tensor, dim: int | None
) -> torch.Tensor:
    grad = grad_output
    # PyTorch does not check the output, and reads out of bounds.
    torch._check(
        output.shape == grad.shape,
        lambda: f"expected output of the gradient's shape {list(grad.shape)}, but got {list(output.shape)}",
    )
    if grad.shape != mask.shape or mask.dtype != torch.bool or output.dtype != grad.dtype:
        raise Refused("mask has another shape or is not bool, or output has another dtype than the gradient")
    dim = grad.dim() - 1 if dim is None else dim
    shape = grad.shape or (1,)  # as in PyTorch's CPU kernel
    (out,) = call.outputs(like=[grad.new_empty(shape, device="meta")])
    left = (tensor.masked_fill(mask, 0.0) for tensor in (grad, output))
    found = torch.ops.aten._softmax_backward_data(*left, dim, grad.dtype)
    return out.copy_(found.masked_fill_(mask, 0.0))
