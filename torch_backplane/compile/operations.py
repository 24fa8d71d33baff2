"""Inductor's operations: each call writes statements to the kernel that is being generated (`V.kernel`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._inductor.codegen.common import IndentedBuffer, OpOverrides
from torch._inductor.utils import sympy_index_symbol
from torch._inductor.virtualized import V

from torch_backplane.compile.formulas import FORMULAS, TO_INTEGER
from torch_backplane.compile.variables import Variable
from torch_backplane.kernels.dialects.base import Value
from torch_backplane.kernels.dtypes import facts, value_dtype


class Operations(OpOverrides):
    """Inductor's operations on variables of a kernel. Each formula of FORMULAS is a method, too."""

    @staticmethod
    def constant(value: bool | float | int, dtype: torch.dtype) -> Variable:  # type: ignore[override]
        return V.kernel.number(value, value_dtype(dtype))

    @staticmethod
    def to_dtype(
        x: Variable, dtype: torch.dtype, src_dtype: torch.dtype | None = None, use_compute_types: bool = True
    ) -> Variable:
        kernel = V.kernel
        target = value_dtype(dtype)
        converted = kernel.cast(x, target)
        if target != dtype and not use_compute_types:  # rounds to float16 or bfloat16
            dialect = kernel.dialect
            return kernel.declare(dialect.decode(dialect.encode(str(converted), dtype), dtype), target)
        return converted

    @staticmethod
    def to_dtype_bitcast(x: Variable, dtype: torch.dtype, src_dtype: torch.dtype) -> Variable:
        kernel, dialect = V.kernel, V.kernel.dialect
        if facts(dtype).bits != facts(src_dtype).bits:
            raise NotImplementedError(f"a view of {src_dtype} as {dtype} in a kernel")
        if value_dtype(src_dtype) != src_dtype:  # float16 and bfloat16: registers hold float32
            x = kernel.declare(dialect.encode(str(x), src_dtype), torch.uint16)
            src_dtype = torch.uint16
        if value_dtype(dtype) != dtype:
            bits = kernel.cast(kernel.cast(x, src_dtype), torch.uint16)
            return kernel.declare(dialect.decode(str(bits), dtype), value_dtype(dtype))
        x = kernel.cast(x, src_dtype)
        if facts(dtype).bits < 32:
            return kernel.cast(x, dtype)
        return kernel.declare(dialect.bits(Value(str(x), src_dtype), dtype), dtype)

    @staticmethod
    def index_expr(expr: sympy.Expr, dtype: torch.dtype) -> Variable:
        return V.kernel.expression(V.kernel.prepare_indexing(expr), dtype)

    @staticmethod
    def value_expr(expr: sympy.Expr, dtype: torch.dtype) -> Variable:
        return Operations.index_expr(expr, dtype)

    def indirect_indexing(  # type: ignore[override]
        self, var: Variable, size: sympy.Expr | int, check: bool = True, wrap_neg: bool = True
    ) -> sympy.Symbol:
        return sympy_index_symbol(str(V.kernel.checked_index(var, size) if check else var))

    @staticmethod
    def masked(mask: Variable, body: Callable[[], Variable], other: Any) -> Variable:
        kernel = V.kernel
        inner = IndentedBuffer()
        with kernel.swap_buffers(inner):
            result = body()
        dtype = result.dtype
        otherwise = other if isinstance(other, Variable) else kernel.number(other, dtype)
        var = kernel.new_variable(dtype)
        kernel.compute.writeline(f"{kernel.dialect.type(dtype)} {var} = {kernel.cast(otherwise, dtype)};")
        kernel.compute.writeline(f"if ({mask}) {{")
        with kernel.compute.indent():
            kernel.compute.splice(inner)
            kernel.compute.writeline(f"{var} = {result};")
        kernel.compute.writeline("}")
        return var

    @staticmethod
    def rand(seed: Variable, offset: Variable) -> Variable:
        return V.kernel.random("uniform", seed, offset)

    @staticmethod
    def randn(seed: Variable, offset: Variable) -> Variable:
        return V.kernel.random("normal", seed, offset)

    @staticmethod
    def randint64(seed: Variable, offset: Variable, low: Variable, high: Variable) -> Variable:
        return V.kernel.random("integer", seed, offset, low, high)


def _formula_method(name: str) -> Callable[..., Any]:
    def method(*operands: Any) -> Any:
        return V.kernel.compute_formula(name, operands)

    method.__name__ = name
    return staticmethod(method)


def _rounding_method(name: str) -> Callable[..., Any]:
    def method(x: Variable, dtype: torch.dtype) -> Variable:
        return V.kernel.cast(V.kernel.compute_formula(TO_INTEGER[name], (x,)), dtype)

    method.__name__ = name
    return staticmethod(method)


for _name in FORMULAS:
    setattr(Operations, _name, _formula_method(_name))
for _name in TO_INTEGER:
    setattr(Operations, _name, _rounding_method(_name))
