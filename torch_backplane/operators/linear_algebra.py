"""Matrix products, vector norms and cross products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torch_backplane import tuning
from torch_backplane.kernels import Expression, Reduction
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import part_dtype, value_dtype
from torch_backplane.kernels.reductions import summation, two_sum, whole
from torch_backplane.kernels.templates.fused_operations import Operations
from torch_backplane.kernels.templates.matmul import ProductParams, forms, matmul
from torch_backplane.operators import library_products
from torch_backplane.operators.reduce_ops import Dims, leave_nothing, list_of, reduce, sum_dtype
from torch_backplane.planning import (
    Activation,
    Call,
    Candidate,
    Candidates,
    Number,
    Refused,
    RunOnCPU,
    call_on_cpu,
    check_fits,
    costs,
    dialect_of,
    divided,
    host_sees_memory,
    operator,
    run_pointwise,
    run_reduction,
    run_template,
    runtime,
    try_library,
    workspace,
)
from torch_backplane.planning.call import elementwise_result

aten = torch.ops.aten

# If the host can access the device's memory, PyTorch's CPU kernels (the host's BLAS) compute products of these.
BLAS_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)
_WITHOUT_PRODUCTS = (torch.bool, torch.uint16, torch.uint32, torch.uint64)


@operator("mm", "bmm", dtypes="complex")
def mm(call: Call, self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    (out,) = call.outputs()
    return product(out, self, mat2)


@operator("_int_mm")
def int_mm(call: Call, self: torch.Tensor, mat2: torch.Tensor) -> torch.Tensor:
    """The int32 product of int8 matrices."""
    shape = (self.shape[0], mat2.shape[1])
    if any(one.shape != shape or one.dtype != torch.int32 or not one.is_contiguous() for one in call.written):
        raise Refused("out has another shape or dtype or is not contiguous")  # and PyTorch does not resize it
    (out,) = call.outputs()
    if not out.numel():
        return out
    if not self.shape[-1]:
        return out.zero_()
    if products.choose(out, self, mat2) == "host":
        # PyTorch's kernel misreads a single row whose strides are both 1.
        usual = (one.contiguous().view(-1).view(one.shape) if 1 in one.shape else one for one in (self, mat2))
        call_on_cpu(aten._int_mm.out, *usual, out=out)
    else:
        params = ProductParams(workspace=workspace())
        run_template(matmul, out.device, out, self, mat2, params=params, name="matmul")
    return out


@operator("addmm", "baddbmm", by_value=["beta"], static={"beta": (0,)}, dtypes="complex")
def addmm(call: Call, self: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    (out,) = call.outputs()
    return product(out, a, b, self.expand(out.shape), beta, alpha, library_products.finish(out, self, beta))


@operator("_addmm_activation", by_value=["beta", "alpha"])
def addmm_activation(
    call: Call, self: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: Any, alpha: Any, use_gelu: bool
) -> torch.Tensor:
    (out,) = call.outputs()
    finish = None if use_gelu else library_products.finish(out, self, beta, Activation.RELU)
    if finish is None:
        torch.addmm(self, a, b, beta=beta, alpha=alpha, out=out)
        return aten.gelu_(out) if use_gelu else out.relu_()
    return product(out, a, b, self.expand(out.shape), beta, alpha, finish)


@operator("addbmm", by_value=["beta", "alpha"], static={"beta": (0,)}, dtypes="complex")
def addbmm(
    call: Call, self: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, beta: Any, alpha: Any
) -> torch.Tensor:
    """Concatenates the batch along the inner dimension: a single product sums over it."""
    (out,) = call.outputs()
    runtime.check_overlaps(call.written, [self])
    if on_host(out) and self.dtype == batch1.dtype == batch2.dtype == out.dtype and out.numel():
        call_on_cpu(aten.addbmm.out, self, batch1, batch2, beta=beta, alpha=alpha, out=out)
        return out
    count, rows, inner = batch1.shape
    left = batch1.permute(1, 0, 2).reshape(rows, count * inner)
    right = batch2.reshape(count * inner, batch2.shape[2])
    return torch.addmm(self, left, right, beta=beta, alpha=alpha, out=out)


@operator(
    "addr", by_value=["beta", "alpha"], static={"beta": (0,)}, dtypes="complex", one_dtype=["self", "vec1", "vec2"]
)
def addr(call: Call, self: torch.Tensor, vec1: torch.Tensor, vec2: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    """beta * self + alpha * (outer product of two vectors). `self` is not read if beta is 0."""
    shape = torch.Size([*vec1.shape, *vec2.shape])
    if vec1.dim() != 1 or vec2.dim() != 1:
        raise Refused("vec1 or vec2 is not one-dimensional")
    if not (self.is_floating_point() or self.is_complex()):
        raise RunOnCPU("an outer product of integers")
    if call.is_in_place and self.shape != shape:
        raise Refused("self has another shape than the result in place")
    if any(isinstance(number, complex) for number in (beta, alpha)) and not self.is_complex():
        raise Refused("beta or alpha is complex and self is real")
    if any(isinstance(number, bool) for number in (beta, alpha)):
        raise Refused("beta or alpha is a bool")
    added = self.expand(shape)
    call.check_each_once()
    (out,) = call.outputs(like=[elementwise_result([added, vec1[:, None], vec2], self.dtype)])
    dtype = value_dtype(self.dtype)

    def formula(a: Expression, x: Expression, y: Expression, beta: Expression, alpha: Expression) -> Expression:
        return alpha * (x * y) if ignores else beta * a + alpha * (x * y)

    ignores = beta == 0
    factors = [(beta, dtype), (alpha, dtype)]
    run_pointwise(
        formula, [out], [added, vec1[:, None], vec2[None]], factors, compute=dtype, key=("addr", ignores), name="addr"
    )
    return out


@operator("addmv", by_value=["beta"], static={"beta": (0,)}, dtypes="complex")
def addmv(call: Call, self: torch.Tensor, mat: torch.Tensor, vec: torch.Tensor, beta: Any, alpha: Any) -> torch.Tensor:
    if mat.dim() == 2 and not mat.numel() and self.shape != mat.shape[:1]:
        raise Refused("self has another shape than an empty product")  # PyTorch does not expand self then
    (out,) = call.outputs()
    product(out.unsqueeze(1), mat, vec.unsqueeze(1), self.expand(out.shape).unsqueeze(1), beta, alpha)
    return out


@operator("mv", dtypes="complex")
def mv(call: Call, self: torch.Tensor, vec: torch.Tensor) -> torch.Tensor:
    (out,) = call.outputs()
    product(out.unsqueeze(1), self, vec.unsqueeze(1))
    return out


@operator("dot", dtypes="complex")
def dot(call: Call, self: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    (out,) = call.outputs()
    if self.dtype == tensor.dtype == out.dtype and out.is_floating_point() and self.shape == tensor.shape:
        compute = value_dtype(out.dtype)
        summed = summation(compute, lambda a, b, _: a * b)
        run_reduction(summed, [out], [self, tensor], [0], key=("dot", compute), compute=compute, name="dot")
        return out
    product(out.view(1, 1), self.unsqueeze(0), tensor.unsqueeze(1))
    return out


@operator("vdot", dtypes="complex")
def vdot(call: Call, self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return dot(call, self.conj(), other)


def host_refuses(out: torch.Tensor, *operands: torch.Tensor) -> str | None:
    """Why the host does not compute results like `out`, in words that follow «it»; None if it does."""
    if not host_sees_memory(out.device):
        return "cannot access the device's memory"
    if dialect_of(out.device).target.simt:
        return "supports only devices whose work items do not run in lockstep"
    of_bytes = (torch.int8, torch.int32) == (operands[0].dtype, out.dtype) if operands else False
    return None if out.dtype in BLAS_DTYPES or of_bytes else f"does not support {out.dtype}".replace("torch.", "")


def _forms(out: torch.Tensor, *operands: torch.Tensor) -> Sequence[str]:
    """Alternative forms of the generated kernel, for products that are computed by tiles."""
    dialect = dialect_of(out.device)
    by_tiles = not out.is_complex() and not (dialect.target.team_size > 1 and 1 in out.shape[-2:])
    return forms(dialect, out.dtype) if by_tiles else []


def _cost_on_host(
    out: torch.Tensor, a: torch.Tensor | None = None, b: torch.Tensor | None = None, finish: Any = None
) -> int:
    if a is None or out.is_complex() or 1 in out.shape[-2:]:  # kernels need several steps for the last two
        return costs.on_host("products", out.dtype)
    rows, columns = out.shape[-2:]
    kind = "products of few rows" if rows < _FEW or columns < _FEW else "products"
    return costs.on_host(kind, out.dtype, out.numel() * a.shape[-1])


_FEW = 8  # rows or columns

products = Candidates(
    "products",
    Candidate("host", host_refuses, cost=_cost_on_host),
    Candidate(
        "driver",
        library_products.why_not,
        library_products.forms,
        cost=library_products.cost,
        workspace=library_products.workspace,
        has_form=library_products.has_form,
    ),
    Candidate("generated", lambda out, *operands: None, _forms),
)


@tuning.trial("Product")
def _trial(operands: tuning.Operands) -> Callable[[], torch.Tensor]:
    """A two- or three-dimensional product, as `product` describes it."""
    a, b = operands.given("a"), operands.given("b")
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    if operands.has("bias"):
        bias = operands.given("bias")
        if operands.flag("relu"):
            return lambda: aten._addmm_activation.out(bias, a, b, out=out)
        return lambda: torch.addmm(bias, a, b, out=out) if a.dim() == 2 else torch.baddbmm(bias, a, b, out=out)
    if operands.flag("added"):
        added = torch.ones_like(out)
        return lambda: torch.addmm(added, a, b, out=out) if a.dim() == 2 else torch.baddbmm(added, a, b, out=out)
    return lambda: torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)


def on_host(out: torch.Tensor) -> bool:
    """Whether the host computes products with this result."""
    return products.choose(out) == "host"


def product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    beta: Any = 0,
    alpha: Any = 1,
    finish: library_products.Finish | None = None,
) -> torch.Tensor:
    """out = beta * c + alpha * a @ b. `c` is not read if beta is 0.

    Args:
        out: the result.
        a, b: the operands.
        c: what is added, expanded to the result.
        beta, alpha: the factors.
        finish: the bias that c was expanded from, and an activation, which is computed of the result.
    """
    dtypes = {out.dtype, a.dtype, b.dtype, *(() if c is None else (c.dtype,))}
    if len(dtypes) > 1 or out.dtype in _WITHOUT_PRODUCTS:
        raise Refused(f"matrix product of {' and '.join(sorted(map(str, dtypes)))}")
    if not out.numel():
        return out
    if c is not None:
        beta, alpha = factors(out.dtype, beta, alpha)
    # PyTorch's Conjugate dispatch key passes lazily conjugated tensors to products.
    a, b, c = a.resolve_conj(), b.resolve_conj(), None if c is None else c.resolve_conj()
    added = c is not None and beta != 0
    finished = {} if finish is None else {"bias": finish.bias, "relu": finish.activation == Activation.RELU}
    problem = partial(tuning.Problem.of, "Product", out.dtype, a=a, b=b, added=added, **finished)
    chosen = products.choose(out, a, b, finish, problem=problem if out.dim() <= 3 else None)
    library, _, form = chosen.partition("/")
    if library == "driver" and a.shape[-1]:
        described = library_products.Product(out, a, b, finish)
        if try_library(partial(library_products.multiply, described, c if added else None, beta, alpha, form)):
            return out
    if chosen == "host" and out.dim() <= 3:
        multiply_on_host(out, a, b, c, beta, alpha)
    elif out.is_complex():
        multiply_parts(out, a, b, None if beta == 0 else c, beta, alpha)
    elif dialect_of(out.device).target.team_size > 1 and 1 in out.shape[-2:]:
        multiply_vector(out, a, b, None if beta == 0 else c, beta, alpha)
    else:
        params = ProductParams(
            form if library == "generated" else "",
            workspace(),
            **divided(out.dtype)._asdict(),
            aligned=_aligned(out, {"a": a, "b": b}),
        )
        run_template(matmul, out.device, out, a, b, c if added else None, (alpha, beta), params, name="matmul")
    return out if finish is None else library_products.activate(out, finish)


def _aligned(out: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """`ProductParams.aligned`, which only matters for matrix instructions."""
    if out.dtype not in dialect_of(out.device).target.matrix_dtypes:
        return frozenset()
    return frozenset(name for name, one in stored.items() if runtime.is_aligned(one, 16))


def all_aligned(*tensors: torch.Tensor) -> bool:
    """Whether all tensors begin at multiples of 16 bytes, if the device has matrix instructions for the first's dtype;
    else False."""
    return len(_aligned(tensors[0], {str(i): one for i, one in enumerate(tensors)})) == len(tensors)


def takes_operations(a: torch.Tensor, b: torch.Tensor, device: torch.device) -> bool:
    """Whether `product_with_operations` accepts the operands."""
    sizes = (*a.shape, b.shape[-1])
    is_vector = dialect_of(device).target.team_size > 1 and 1 in (a.shape[-2], b.shape[-1])
    return 0 not in sizes and not is_vector and a.dtype in (torch.float32, torch.float16, torch.bfloat16)


def product_with_operations(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    scales: tuple[Any, Any],
    epilogue: Operations | None,
    prologues: Mapping[str, Operations],
) -> None:
    """Computes alpha * a @ b + beta * c. `scales` are alpha and beta.

    Args:
        out: the result. With an epilogue, which uses the results instead, only its sizes, dtype and device count.
        a, b: the operands. With a prologue, which computes the elements, only sizes, strides and dtype count.
        epilogue, prologues: as in `ProductParams`.
    """
    beta, alpha = factors(out.dtype, scales[1], scales[0])
    added = None if c is None or beta == 0 else c.expand(out.shape)
    stored = {name: one for name, one in (("a", a), ("b", b)) if name not in prologues}
    params = ProductParams(
        "",
        workspace(),
        **divided(out.dtype)._asdict(),
        epilogue=epilogue,
        prologues=prologues,
        aligned=_aligned(out, stored),
    )
    run_template(matmul, out.device, out, a, b, added, (alpha, beta), params, name="matmul")


def sizes_of_product(a: torch.Tensor, b: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with the sizes, dtype and device of a @ b. It is a view of an operand, or of one number if neither is on
    the device. The operands must not be empty."""
    known = next((one[..., :1, :1] for one in (a, b) if one.device == device), None)
    one = torch.empty((1,) * a.dim(), dtype=a.dtype, device=device) if known is None else known
    return one.expand(*a.shape[:-1], b.shape[-1])


def multiply_vector(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, beta: Any, alpha: Any
) -> None:
    """`product` with one row or column: each result is a separate reduction, which splits long sums."""
    shape = (*out.shape, a.shape[-1])
    operands = [a.unsqueeze(-2).expand(shape), b.mT.unsqueeze(-3).expand(shape)]
    is_float = out.is_floating_point()
    compute = value_dtype(out.dtype) if is_float else torch.int64
    alone = c is None and type(alpha) is int and alpha == 1
    total = out if alone else torch.empty(out.shape, dtype=compute, device=out.device)
    summed = dot_product(compute) if is_float else summation(compute, lambda x, y, _: x * y)
    run_reduction(
        summed, [total], operands, [out.dim()], key=("product", compute), compute=compute, name="product_of_a_vector"
    )
    if alone:
        return

    def formula(x: Expression, *rest: Expression) -> Expression:
        return rest[-1] * x if c is None else rest[1] * rest[0] + rest[-1] * x

    numbers = [(one, compute) for one in ([alpha] if c is None else [beta, alpha])]
    added = [total] if c is None else [total, c]
    key = ("product of a vector", c is None)
    run_pointwise(formula, [out], added, numbers, compute=compute, key=key, name="product_of_a_vector")


def dot_product(dtype: torch.dtype) -> Reduction:
    """The sum of products of two operands, compensated for the rounding errors of products and additions."""

    def start(x: Expression, y: Expression, _: Expression) -> tuple[Expression, Expression]:
        product = x * y
        return product, f.fma(x, y, -product)

    def add(a: Expression, lost_a: Expression, b: Expression, lost_b: Expression) -> tuple[Expression, Expression]:
        return a + b, lost_a + lost_b

    def combine(a: Expression, lost_a: Expression, b: Expression, lost_b: Expression) -> tuple[Expression, Expression]:
        total, lost = two_sum(a, b)
        return total, lost_a + (lost + lost_b)

    return Reduction([dtype] * 2, [0.0, 0.0], start, combine, lambda total, lost, _: whole(total, lost), add)


def factors(dtype: torch.dtype, beta: Any, alpha: Any) -> tuple[Any, Any]:
    """beta and alpha of a product of this dtype, checked as in PyTorch. For half precision they are float32."""
    fit = value_dtype(dtype) if dtype.is_floating_point else dtype
    check_fits(fit, beta)
    if isinstance(beta, complex) and not dtype.is_complex:
        beta = beta.real  # `check_fits` has checked that the imaginary part is 0
    return beta, alpha.fitting(fit) if isinstance(alpha, Number) else alpha


def multiply_parts(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, beta: Any, alpha: Any
) -> None:
    """A product of complex matrices, as four products of real matrices."""
    left, right = ([part.contiguous() for part in torch.view_as_real(one).unbind(-1)] for one in (a, b))
    real, imaginary = (torch.empty(out.shape, dtype=left[0].dtype, device=out.device) for _ in range(2))
    run = partial(run_template, matmul, out.device, name="matmul", params=ProductParams(workspace=workspace()))
    run(real, left[1], right[1])
    run(real, left[0], right[0], real, (1, -1))
    run(imaginary, left[0], right[1])
    run(imaginary, left[1], right[0], imaginary)

    def formula(x: Expression, y: Expression, *rest: Expression) -> Expression:
        product = times(rest[-1], f.complex(x, y))
        return product if c is None else times(rest[1], rest[0]) + product

    added = [] if c is None else [c]
    numbers = [(one, number_dtype(one, out.dtype)) for one in ([alpha] if c is None else [beta, alpha])]
    key = ("matmul", c is None, *(dtype for _, dtype in numbers))
    run_pointwise(formula, [out], [real, imaginary, *added], numbers, key=key, name="matmul")


def number_dtype(number: Any, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels receive a number, together with tensors of a complex dtype."""
    is_complex = number.dtype.is_complex if isinstance(number, Number) else isinstance(number, complex)
    return dtype if is_complex else part_dtype(dtype)


def times(number: Expression, a: Expression) -> Expression:
    """The product of a number and a complex `a`. A real number scales both parts separately."""
    return number * a if number.is_complex else f.complex(number * a.real, number * a.imag)


def multiply_on_host(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, beta: Any, alpha: Any
) -> None:
    """`product` by PyTorch's CPU kernels, in stream order."""
    batched = out.dim() == 3
    if c is None:
        call_on_cpu(aten.bmm.out if batched else aten.mm.out, a, b, out=out)
    else:
        call_on_cpu(aten.baddbmm.out if batched else aten.addmm.out, c, a, b, beta=beta, alpha=alpha, out=out)


@operator("_compute_linear_combination")
def _compute_linear_combination(call: Call, input: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """coefficients @ the slices of `input` along its first dimension. Like PyTorch, adds the result to `out=`.

    PyTorch reads out of bounds if there are fewer slices than coefficients in a row; here that is an error.
    """
    if coefficients.dim() != 2 or not input.dim():
        raise Refused("coefficients are not a matrix, or input is zero-dimensional")
    rows, count = coefficients.shape
    torch._check(count <= input.shape[0], lambda: f"expected {count} slices, but got {list(input.shape)}")
    if input.dtype != coefficients.dtype or not input.numel():
        raise Refused("input has another dtype than coefficients, or no elements")
    (out,) = call.outputs(like=[torch.empty((rows, *input.shape[1:]), dtype=input.dtype, device="meta")])
    slices = input.reshape(input.shape[0], math.prod(input.shape[1:]))
    result = (coefficients @ slices[:count]).view(out.shape)
    return out.add_(result) if call.written else out.copy_(result)


# Norms


def _summed(
    start: Callable[[Expression], Any], finish: Callable[[Expression], Any] = lambda total: total
) -> Callable[[torch.dtype], Reduction]:
    return lambda dtype: summation(dtype, lambda x, _: start(x), lambda total, _: finish(total))


def _square(x: Expression) -> Expression:
    return x.real * x.real + x.imag * x.imag if x.is_complex else x * x


# Orders of norms with a special formula, as reductions in the dtype of magnitudes.
NORMS: dict[float, Callable[[torch.dtype], Reduction]] = {
    0: _summed(lambda x: f.where(x != 0.0, f.full_like(x.real, 1.0), 0.0)),
    1: _summed(abs),
    2: _summed(_square, f.sqrt),
    math.inf: lambda dtype: Reduction([dtype], [0.0], lambda x, _: abs(x), f.maximum, lambda s, _: s),
    -math.inf: lambda dtype: Reduction([dtype], [math.inf], lambda x, _: abs(x), f.minimum, lambda s, _: s),
}


def _norm_of_order(dtype: torch.dtype) -> Reduction:
    """A norm of any order. Its scalars are the order and 1 / order."""
    return summation(
        dtype,
        lambda x, _, order, inverse: f.power(abs(x), order),
        lambda total, _, order, inverse: f.power(total, inverse),
        scalars=[dtype] * 2,
    )


def norm(order: float, dtype: torch.dtype) -> tuple[Callable[[torch.dtype], Reduction], list[float]]:
    """(reduction for the vector norm as torch.linalg.vector_norm defines it, its scalars). Complex numbers count by
    their magnitudes, which are computed in `dtype`.
    """
    definition, scalars = NORMS.get(order), []
    if definition is None:
        exponent = torch.tensor(order, dtype=dtype).item()  # can round to infinity or 0
        definition, scalars = _norm_of_order, [exponent, 1.0 / exponent if exponent else math.inf]
    return lambda seen: definition(part_dtype(seen)), scalars


@operator("linalg_vector_norm", by_value=("ord",), static={"ord": NORMS}, dtypes="complex")
def vector_norm(call: Call, self: torch.Tensor, ord: float, dim: Dims, keepdim: bool, dtype: torch.dtype | None) -> Any:
    if isinstance(ord, complex) or not (self.is_floating_point() or self.is_complex()):
        raise Refused("a complex order or a norm of integers")
    if ord < 0 or ord == math.inf:
        leave_nothing(self, dim)
    compute = sum_dtype(call)
    if self.is_complex():
        compute = torch.complex128 if compute == torch.float64 else torch.complex64
    if ord and self.numel() and (self.dim() == 0 or all(self.shape[one] == 1 for one in list_of(dim, self.dim()))):
        (out,) = call.outputs()
        alone = self.reshape(out.shape)
        run_pointwise(f.absolute, [out], [alone], compute=compute, key="norm of one", name="norm_of_one")
        return out
    order = float(ord) if self.numel() else 1.0  # every norm of no elements is 0
    key = ("norm", order if order in NORMS else "any")
    return reduce(call, self, dim, *norm(order, part_dtype(compute)), key=key, compute=compute)


@operator("norm.ScalarOpt_dim", by_value=("p",), static={"p": NORMS}, dtypes="complex")
def norm_of_dims(call: Call, self: torch.Tensor, p: float | None, dim: Dims, keepdim: bool) -> Any:
    return vector_norm(call, self, 2 if p is None else p, dim, keepdim, None)


@operator("norm.ScalarOpt_dim_dtype", by_value=("p",), static={"p": NORMS}, dtypes="complex")
def norm_of_dims_in(
    call: Call, self: torch.Tensor, p: float | None, dim: Dims, keepdim: bool, dtype: torch.dtype | None
) -> Any:
    if dtype is not None and (dtype.is_complex or torch.promote_types(self.dtype, dtype) != dtype):
        raise Refused("dtype is narrower than self's, or complex")
    return vector_norm(call, self, 2 if p is None else p, dim, keepdim, dtype)


# Cross products


def cross_product(
    a: Expression, b: Expression, c: Expression, x: Expression, y: Expression, z: Expression
) -> tuple[Expression, ...]:
    return b * z - c * y, c * x - a * z, a * y - b * x


@operator("linalg_cross", dtypes="complex", one_dtype=["self", "other"])
def linalg_cross(call: Call, self: torch.Tensor, other: torch.Tensor, dim: int) -> torch.Tensor:
    (out,) = call.outputs()
    call.check_apart()
    a, b = (tensor.expand(out.shape).unbind(dim) for tensor in (self, other))
    run_pointwise(cross_product, out.unbind(dim), [*a, *b], key="cross", name="cross")
    return out
