"""Tensors made of numbers or parts: eye, fill, complex, polar and randperm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import FACTS, integer_range
from torch_backplane.kernels.expression import Formula
from torch_backplane.kernels.templates.random import WORDS_PER_CALL, shuffle_equal
from torch_backplane.operators.distributions import EXACT
from torch_backplane.planning import (
    Call,
    Refused,
    check,
    check_same_dtype,
    operator,
    plan_pointwise,
    pointwise,
    random_numbers,
    run_pointwise,
    run_template,
)


@operator("eye", "eye.out", "eye.m", "eye.m_out", variants=False, dtypes="complex")
def eye(call: Call, *sizes: Any) -> Any:
    (out,) = call.outputs()
    run_pointwise(lambda: f.index(-2) == f.index(-1), [out], [], key="eye", name="eye")
    return out


pointwise("fill.Scalar", lambda self, value: value, dtypes="complex", fitting="stored", idempotent=True)
pointwise("zero", lambda self: False if self.dtype == torch.bool else 0, dtypes="complex", idempotent=True)


@operator("fill.Tensor", dtypes="complex")
def fill(call: Call, self: torch.Tensor, value: Any) -> torch.Tensor:
    zero_dim = not isinstance(value, torch.Tensor) or value.dim() == 0
    check(zero_dim, "the value has dimensions")  # the meta function of torch 2.11 does not check this
    return plan_pointwise("fill.Tensor", lambda self, value: value, call, (self, value), idempotent=True)


# Complex numbers


def polar(magnitude: Expression, angle: Expression) -> Expression:
    return f.complex(magnitude * f.cos(angle), magnitude * f.sin(angle))


def made_of_parts(name: str, formula: Formula, parts: Sequence[str]) -> None:
    @operator(name, dtypes="complex", one_dtype=parts)
    def plan(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype not in (torch.float16, torch.float32, torch.float64):
            raise Refused(f"parts of {a.dtype}".replace("torch.", ""))
        (result,) = call.meta(call.functional)
        check_same_dtype(call, result.dtype)
        return plan_pointwise(name, formula, call, (a, b), "inputs")


made_of_parts("complex", f.complex, ["real", "imag"])
made_of_parts("polar", polar, ["abs", "angle"])


# Permutations


@operator("randperm.generator_out", variants=False)
def randperm(call: Call, n: int, generator: Any) -> torch.Tensor:
    """Sorts random keys, and shuffles elements with equal keys."""
    (given,) = call.written
    dtype = given.dtype
    most = EXACT[dtype] + 1 if dtype in EXACT else integer_range(dtype)[1] if dtype in FACTS else 0
    if n < 0 or n > most or dtype == torch.bool:
        raise Refused("n is negative or exceeds the dtype")
    (out,) = call.outputs(like=[torch.empty(n, dtype=dtype, device="meta")])
    keys, order = torch.empty(n, dtype=torch.int32, device=out.device).random_(generator=generator).sort()
    if n > 1:
        run_template(shuffle_equal, out.device, order, keys, random_numbers(WORDS_PER_CALL), name="randperm")
    return out.copy_(order)
