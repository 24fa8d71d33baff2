"""Powers."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.expression import Formula, Operand, same_dtype
from torch_backplane.operators.binary_ops import rounded
from torch_backplane.planning import Call, Number, RunOnCPU, check_fits, operator, plan_pointwise, run_pointwise
from torch_backplane.planning.declare import check_supported

# Common exponents for which a formula is faster and more accurate than the power function.
_POWERS: dict[float, Formula] = {
    0: lambda a: f.full_like(a, 1),
    1: lambda a: a,
    2: lambda a: a * a,
    3: lambda a: a * a * a,
    0.5: f.sqrt,
    -0.5: f.rsqrt,
    -1: lambda a: 1.0 / a,
    -2: lambda a: 1.0 / (a * a),
}


def power_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which powers of `dtype` are computed. It is complex128 for complex64, if the device supports it: the
    rounding error of exp(b log(a)) grows with the exponent.
    """
    if dtype == torch.complex64 and torch.complex128 in _C.device_properties(device.index).dtypes:
        return torch.complex128
    return value_dtype(dtype)


@operator("pow.Tensor_Scalar", by_value=["exponent"], static={"exponent": _POWERS}, dtypes="complex")
def power_of_number(call: Call, self: torch.Tensor, exponent: float) -> torch.Tensor:
    (out,) = call.outputs()
    result = call.meta(call.functional)[0].dtype
    check_supported(result)
    check_fits(result, exponent)
    if result in (torch.float16, torch.bfloat16):
        exponent = torch.tensor(exponent, dtype=result).item()
    dtype = value_dtype(result)
    formula = _POWERS.get(exponent) if dtype.is_floating_point or dtype.is_complex else None
    if formula is None:
        dtype = power_dtype(dtype, out.device)
        run_pointwise(f.power, [out], [self], [(exponent, dtype)], compute=dtype, key="pow", name="pow")
    else:
        run_pointwise(formula, [out], [self], compute=dtype, key=("pow", float(exponent.real)), name="pow")
    return out


@operator("pow.Tensor_Tensor", "pow.Scalar", dtypes="complex")
def power(call: Call, base: Any, exponent: Any) -> torch.Tensor:
    def formula(a: Operand, b: Operand) -> Expression:
        a, b = same_dtype("pow", (a, b))
        if not a.is_complex:
            return f.power(a, b)
        dtype = power_dtype(a.dtype, call.device)
        return f.power(a.to(dtype), b.to(dtype))

    (result,) = call.meta(call.functional)
    if isinstance(base, Number) and not all(torch.can_cast(result.dtype, given.dtype) for given in call.written):
        raise RunOnCPU("out has another dtype")  # PyTorch fills it if the base is 1, and raises an error otherwise
    base, exponent = (rounded(one, result.dtype, call.device) for one in (base, exponent))
    return plan_pointwise("pow", formula, call, (base, exponent), fitting="any")
