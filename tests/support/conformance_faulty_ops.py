"""Operators that are correct on the CPU and faulty on other devices, each in one way that the engine must detect.

Worker processes import this module through the engine's ``database`` setting, so it contains no tests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.common_dtype import floating_types
from torch.testing._internal.opinfo.core import ErrorInput, OpInfo, SampleInput

Operator = Callable[..., Any]


def two_samples(info: OpInfo, device: str, dtype: torch.dtype, requires_grad: bool, **_: Any) -> Iterator[SampleInput]:
    for shape in ((3, 4), (2, 1, 5)):
        tensor = torch.rand(shape, dtype=dtype, device=device) + 0.5
        yield SampleInput(tensor.requires_grad_(requires_grad))


def one_error_input(info: OpInfo, device: str, **_: Any) -> Iterator[ErrorInput]:
    sample = SampleInput(torch.ones(2, 3, device=device), args=(5,))
    yield ErrorInput(sample, error_type=IndexError, error_regex="Dimension out of range")


def is_wrong(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def on_device(wrong: Operator, right: Operator = torch.sin) -> Operator:
    """Calls ``right`` on the CPU and ``wrong`` on other devices."""

    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (wrong if is_wrong(tensor) else right)(tensor, *args, **kwargs)

    return call


def change_input(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.sin(tensor)
    with torch.no_grad():
        tensor.add_(1)
    return result


def raise_sparse(tensor: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(f"sparse tensors are not supported on {tensor.device.type}")


def raise_error(tensor: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel today")


class WrongGradient(torch.autograd.Function):
    """sin with a gradient that is correct on the CPU only."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.sin(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (tensor,) = ctx.saved_tensors
        return gradient * (torch.sin(tensor) if is_wrong(tensor) else torch.cos(tensor))


class GradientAsIfContiguous(torch.autograd.Function):
    """sin with a gradient that ignores the strides of its argument or of the cotangent, as `name` says."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        ctx.name = name
        return torch.sin(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        read = {"argument": ctx.saved_tensors[0], "cotangent": gradient}
        if is_wrong(gradient):
            wrong = read[ctx.name]
            contiguous = torch.empty(wrong.shape, device="meta").stride()
            read[ctx.name] = wrong.as_strided(wrong.shape, contiguous)
        return read["cotangent"] * torch.cos(read["argument"]), None


def rough_sin(tensor: torch.Tensor) -> torch.Tensor:
    """sin with an error of 1e-3 in the first row except in float64: a CPU kernel less accurate than the device's."""
    result = torch.sin(tensor)
    if tensor.dtype != torch.float64:
        result[0] += 1e-3
    return result


def sin_but_one(tensor: torch.Tensor) -> torch.Tensor:
    """sin with one wrong element: more accurate than rough_sin in total, but less accurate in that element."""
    result = torch.sin(tensor)
    result[1, 0] += 2e-5
    return result


def rubbish_out(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """sin that writes wrong values to a non-contiguous `out`."""
    if out is None:
        return torch.sin(tensor)
    if out.shape == tensor.shape and not out.is_contiguous():
        return out.copy_(torch.sin(tensor) * 1e30)
    return torch.sin(tensor, out=out)


def wrong_out(tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.sin(tensor) if out is None else torch.cos(tensor, out=out)


def swallow_error(tensor: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    return torch.sum(tensor, None if dim is None else dim % tensor.dim())


def hang(tensor: torch.Tensor) -> torch.Tensor:
    time.sleep(3600)
    return tensor


def abort(tensor: torch.Tensor) -> torch.Tensor:
    os.abort()


def unseeded_noise(tensor: torch.Tensor) -> torch.Tensor:
    return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(time.time_ns())).to(tensor)


def constant_noise(tensor: torch.Tensor) -> torch.Tensor:
    return torch.full_like(tensor, 0.5)


def there_and_back(first: float, then: float) -> Operator:
    """Returns a chain of correct operations whose first one rounds, with a larger error above 65536."""
    return lambda tensor: ((tensor + first) + then) / 3


def info(name: str, op: Operator, **more: Any) -> OpInfo:
    options: dict[str, Any] = {"supports_out": False, "dtypes": floating_types(), "sample_inputs_func": two_samples}
    return OpInfo(name, op=op, **{**options, **more})


# name → (operator, kind of the finding that must be reported)
FAULTS: dict[str, tuple[OpInfo, str]] = {
    op.name: (op, kind)
    for op, kind in [
        (info("wrong_values", on_device(torch.cos)), "values"),
        (info("wrong_dtype", on_device(lambda x: torch.sin(x).double())), "dtype"),
        (info("wrong_shape", on_device(lambda x: torch.sin(x)[None])), "shape"),
        (info("wrong_structure", on_device(lambda x: (torch.sin(x),))), "structure"),
        (info("wrong_layout", on_device(lambda x: torch.sin(x).mT.contiguous().mT)), "layout"),
        (info("wrong_device", on_device(lambda x: torch.sin(x.cpu()))), "device"),
        # Decided by a float64 reference: only a device result that is closer to it than the CPU's passes.
        (info("nearer", on_device(torch.sin, right=rough_sin)), "nearer"),
        (info("slightly_wrong", on_device(lambda x: torch.sin(x) * 1.0001)), "values"),
        (info("wrong_beside_a_rough_cpu", on_device(lambda x: rough_sin(x) + 2e-3, right=rough_sin)), "values"),
        (info("one_element_wrong", on_device(sin_but_one, right=rough_sin)), "values"),
        # Chains are also compared operation by operation.
        (info("carried", on_device(there_and_back(65536, -65536), right=there_and_back(-65536, 65536))), "carried"),
        (info("other_number", on_device(there_and_back(65536, -65537), right=there_and_back(-65536, 65536))), "values"),
        (info("other_wiring", on_device(lambda x: x.cos().sin(), right=lambda x: x.sin().cos())), "values"),
        (info("wrong_nan", on_device(lambda x: torch.sin(x) * float("nan"), right=rough_sin)), "values"),
        (info("rubbish_out_on_the_cpu", on_device(torch.sin, right=rubbish_out), supports_out=True), "cpu out="),
        (info("wrong_out", on_device(wrong_out, right=rubbish_out), supports_out=True), "mutation"),
        (info("changed_input", on_device(change_input)), "mutation"),
        (info("copy_not_view", on_device(torch.clone, right=lambda x: x.view(-1)[:2])), "shape"),
        (info("not_a_view", on_device(lambda x: x[:1].clone(), right=lambda x: x[:1])), "aliasing"),
        (info("raises", on_device(raise_error)), "error"),
        (info("refuses", on_device(raise_sparse)), "refused"),
        (info("wrong_gradient", WrongGradient.apply), "values"),
        (info("argument_as_if_contiguous", lambda x: GradientAsIfContiguous.apply(x, "argument")), "values"),
        (info("cotangent_as_if_contiguous", lambda x: GradientAsIfContiguous.apply(x, "cotangent")), "values"),
        (info("swallows_error", on_device(swallow_error, torch.sum), error_inputs_func=one_error_input), "no error"),
        (info("unseeded", on_device(unseeded_noise, right=torch.rand_like)), "random"),
        (info("constant_random", on_device(constant_noise, right=torch.rand_like)), "random"),
        (info("wrong_in_place", torch.sin, inplace_variant=on_device(torch.Tensor.cos_, torch.Tensor.sin_)), "values"),
        (info("not_returned", torch.sin, inplace_variant=on_device(torch.sin, torch.Tensor.sin_)), "aliasing"),
    ]
}

# For the worker pool: an operator that aborts, one that hangs, one that is wrong, and correct ones around them.
FATAL = [
    info("good_before", torch.sin),
    info("aborts", on_device(abort)),
    info("hangs", on_device(hang)),
    info("wrong_values", on_device(torch.cos)),
    info("good_after", torch.cos),
]
