"""Decompositions and linear systems: Cholesky, LU, triangular systems, eigenvalues of symmetric matrices.

A library of the device's driver computes them (the families cholesky, lu, lu_solve, triangular_solve and eigh); without
one, PyTorch's CPU kernels do. The steps are those of PyTorch's kernels, on which its gradients depend.

The library's matrices have contiguous columns, as most results have in PyTorch. Such a result is computed in place, and
in this file it is written as its transpose, `rows`, which is contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torch_backplane.kernels.templates import errors
from torch_backplane.planning import (
    Call,
    Candidate,
    Candidates,
    LibraryCall,
    MatrixOperation,
    Refused,
    RunOnCPU,
    contiguous_result,
    error_words,
    operator,
    part,
    run_kernel,
    runtime,
    try_library,
)

aten = torch.ops.aten


def _why_not(first: torch.Tensor, *calls: LibraryCall) -> str | None:
    """Why no library computes the calls, in words that follow «it»; None if one does."""
    return next(filter(None, (one.why_not() for one in calls)), None)


def _cost(first: torch.Tensor, *calls: LibraryCall) -> int | None:
    costs = [one.cost() for one in calls]
    return None if None in costs else max(one for one in costs if one is not None)


solvers = Candidates(
    "decompositions and solvers",
    Candidate("driver", _why_not, cost=_cost),
    Candidate("host", lambda first, *calls: None),
)


def choose_driver(first: torch.Tensor, *calls: LibraryCall) -> None:
    """Leaves the call to the CPU, unless a library of the driver computes it."""
    if solvers.choose(first, *calls) != "driver":
        why = _why_not(first, *calls)
        raise RunOnCPU(f"the driver's library {why or 'is not preferred, or has failed'}")


def compute(work: Callable[[], None]) -> None:
    """Runs library calls. Leaves the call to the CPU if the library fails."""
    if not try_library(work):
        raise RunOnCPU("the driver's library has failed")


def library_call(family: str, a: torch.Tensor, integers: Callable[[], dict[str, int]]) -> LibraryCall:
    """A call of the routine of a family for the matrices `a`; one without integers if they have no elements."""
    return LibraryCall(a.device, family, a.dtype, integers if a.numel() else None)


def check_matrices(a: torch.Tensor, square: bool = True) -> None:
    """Leaves the call to the CPU, whose kernel raises PyTorch's error, unless `a` is a batch of (square) matrices."""
    if a.dim() < 2 or (square and a.shape[-1] != a.shape[-2]):
        raise Refused("not a matrix, or not a square one")


def check_errors(info: torch.Tensor, name: str, a: torch.Tensor) -> None:
    """Waits for the device, and raises PyTorch's error if a decomposition of `a` has failed."""
    aten._linalg_check_errors(info, name, is_matrix=a.dim() == 2)


def broadcast(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape of `b` after its batch has been broadcast together with that of `a`."""
    try:
        return (*runtime.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *b.shape[-2:])
    except RuntimeError as error:
        raise Refused("batches that cannot be broadcast") from error


def count(shape: Sequence[int]) -> int:
    """The number of matrices of a batch."""
    return math.prod(shape[:-2])


# Cholesky


@operator("linalg_cholesky_ex", dtypes="complex")
def cholesky_ex(call: Call, self: torch.Tensor, upper: bool, check: bool) -> Any:
    check_matrices(self)
    library = library_call(
        "cholesky", self, lambda: {"upper": int(upper), "batch": count(self.shape), "n": self.shape[-1]}
    )
    choose_driver(self, library)
    factor, info = call.outputs()

    def work() -> None:
        with contiguous_result(factor.mT) as rows, contiguous_result(info) as status:
            rows.copy_(self.mT)
            library.run([rows, status], written=2)

    if not self.numel():
        info.zero_()
    else:
        compute(work)
        _ = factor.triu_() if upper else factor.tril_()
    if check:
        check_errors(info, "linalg.cholesky_ex", self)
    return factor, info


@operator("_cholesky_solve_helper", dtypes="complex", one_dtype=["self", "A"])
def cholesky_solve(call: Call, self: torch.Tensor, A: torch.Tensor, upper: bool) -> torch.Tensor:
    """The solution of l lᴴ x = self, or of uᴴ u x = self. PyTorch has broadcast the operands."""
    first, then = (A.mH, A) if upper else (A, A.mH)
    systems = [Triangular(one, self.shape, upper=at != 0) for at, one in enumerate((first, then))]
    choose_driver(self, *(one.library() for one in systems))
    (out,) = call.outputs(like=[with_columns(self)])

    def work() -> None:
        with contiguous_result(out.mT) as rows:
            rows.copy_(self.mT)
            for one in systems:
                one.solve(rows)

    compute(work)
    return out


# Triangular systems


def with_columns(like: torch.Tensor) -> torch.Tensor:
    """A meta tensor with the sizes and the dtype of `like`, and contiguous columns."""
    *batch, rows, columns = like.shape
    step = math.prod((rows, columns))
    strides = [step * math.prod(batch[at + 1 :]) for at in range(len(batch))]
    return runtime.empty_strided(like.shape, [*strides, 1, rows], like.dtype, "meta")


class _Layout(NamedTuple):
    """How a routine reads matrices. `operation` is applied to the matrices with contiguous columns that it sees."""

    is_copied: bool
    operation: MatrixOperation
    column: int  # elements from one column that it sees to the next
    step: int  # from one matrix to the next; 0 if all are the same


class Triangular:
    """Triangular systems a x = b, or x a = b.

    Args:
        a: square matrices; broadcast against b.
        shape: of b after broadcasting.
        upper: whether the upper triangle is read, and not the lower one.
        left: whether `a` is on the left.
        unit: whether the diagonal of `a` is not read but taken as 1.
    """

    def __init__(
        self, a: torch.Tensor, shape: Sequence[int], *, upper: bool, left: bool = True, unit: bool = False
    ) -> None:
        self._a, self._shape, self._upper, self._left, self._unit = a, shape, upper, left, unit

    def library(self) -> LibraryCall:
        """The library call. It can be described before the matrices are copied."""
        return LibraryCall(self._a.device, "triangular_solve", self._a.dtype, self._integers if self._sizes() else None)

    def solve(self, rows: torch.Tensor) -> None:
        """Solves in place. `rows` is bᵀ, contiguous."""
        if self._sizes():
            a = self._a
            if self._layout().is_copied:
                a = a.expand(*self._shape[:-2], *a.shape[-2:]).resolve_conj().contiguous()
            self.library().run([rows, a])

    def _sizes(self) -> int:
        return math.prod(self._shape)

    def _layout(self) -> _Layout:
        a = self._a
        n = a.shape[-1]
        is_one = count(a.shape) == 1
        step = 0 if is_one else n * n
        is_given = is_one or (a.shape[:-2] == self._shape[:-2] and (a.is_contiguous() or a.mT.is_contiguous()))
        if is_given and not a.is_conj() and a.stride(-2) == 1 and a.stride(-1) >= n:
            return _Layout(False, MatrixOperation.NONE, a.stride(-1), step)
        if is_given and not a.is_conj() and a.stride(-1) == 1 and a.stride(-2) >= n:
            return _Layout(False, MatrixOperation.TRANSPOSE, a.stride(-2), step)
        return _Layout(True, MatrixOperation.TRANSPOSE, n, step)

    def _integers(self) -> dict[str, int]:
        layout = self._layout()
        is_transposed = layout.operation != MatrixOperation.NONE
        batch, (rows, columns) = count(self._shape), self._shape[-2:]
        if self._left and layout.step == 0:  # the columns of all systems are one after the other
            batch, columns = 1, batch * columns
        return {
            "left": int(self._left), "upper": int(self._upper != is_transposed), "operation": int(layout.operation),
            "unit": int(self._unit), "batch": batch, "rows": rows, "columns": columns, "a_column": layout.column,
            "a_step": layout.step,
        }  # fmt: skip


@operator("linalg_solve_triangular", dtypes="complex", one_dtype=["self", "B"])
def solve_triangular(
    call: Call, self: torch.Tensor, B: torch.Tensor, upper: bool, left: bool, unitriangular: bool
) -> torch.Tensor:
    check_matrices(self)
    check_matrices(B, square=False)
    if self.shape[-1] != B.shape[-2 if left else -1]:
        raise Refused("operands whose sizes do not fit")
    shape = broadcast(self, B)
    system = Triangular(self, shape, upper=upper, left=left, unit=unitriangular)
    choose_driver(self, system.library())
    of_rows = self.is_conj() and self.expand(*shape[:-2], *self.shape[-2:]).mT.is_contiguous()  # as in PyTorch
    (out,) = call.outputs(like=[B.new_empty(shape, device="meta") if of_rows else with_columns(B.expand(shape))])

    def work() -> None:
        with contiguous_result(out.mT) as rows:
            rows.copy_(B.mT)
            system.solve(rows)

    compute(work)
    return out


# LU


def lu_call(a: torch.Tensor) -> LibraryCall:
    """The library call of `factor`."""
    return library_call("lu", a, lambda: {"batch": count(a.shape), "rows": a.shape[-2], "columns": a.shape[-1]})


def factor(a: torch.Tensor, lu: torch.Tensor, pivots: torch.Tensor, info: torch.Tensor) -> None:
    """Writes the LU decomposition of `a` and the number of the first pivot that is 0, or 0."""
    if not a.numel():
        info.zero_()
        return
    with contiguous_result(lu.mT) as rows, contiguous_result(info) as status:
        rows.copy_(a.mT)
        wide = torch.empty(pivots.shape, dtype=torch.int64, device=a.device)
        lu_call(a).run([rows, wide, status], written=3)
        pivots.copy_(wide)


def lu_solve_call(lu: torch.Tensor, shape: Sequence[int], left: bool, adjoint: bool) -> LibraryCall:
    """The library call of `solve`. `shape`: of the result."""

    def integers() -> dict[str, int]:
        columns = shape[-1 if left else -2]
        transposed = MatrixOperation.CONJUGATE_TRANSPOSE if lu.is_complex() else MatrixOperation.TRANSPOSE
        operation = transposed if adjoint == left else MatrixOperation.NONE
        return {"operation": int(operation), "batch": count(shape), "n": lu.shape[-1], "columns": columns}

    return LibraryCall(lu.device, "lu_solve", lu.dtype, integers if math.prod(shape) else None)


def solve(
    out: torch.Tensor, lu: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, left: bool = True, adjoint: bool = False
) -> None:
    """Writes the solution of a x = b, or of aᴴ x = b if `adjoint`; x a = b if not `left`. `lu` decomposes a.

    x a = b is computed as aᴴ xᴴ = bᴴ.
    """
    if not out.numel():
        return
    library = lu_solve_call(lu, out.shape, left, adjoint)
    batch = out.shape[:-2]
    factors = lu.expand(*batch, *lu.shape[-2:]).mT.contiguous()
    wide = pivots.expand(*batch, pivots.shape[-1]).to(torch.int64).contiguous()
    with contiguous_result(out.mT if left else out) as rows:
        rows.copy_(b.mT if left else b.conj())
        library.run([rows, factors, wide])
        if not left and out.is_complex():
            rows.conj_physical_()


@operator("linalg_lu_factor_ex", dtypes="complex")
def lu_factor_ex(call: Call, A: torch.Tensor, pivot: bool, check: bool) -> Any:
    check_matrices(A, square=False)
    if not pivot:
        raise RunOnCPU("a decomposition without pivots")
    choose_driver(A, lu_call(A))
    lu, pivots, info = call.outputs()
    compute(lambda: factor(A, lu, pivots, info))
    if check:
        check_errors(info, "torch.linalg.lu_factor_ex", A)
    return lu, pivots, info


@operator("linalg_lu_solve", dtypes="complex", one_dtype=["LU", "B"])
def lu_solve(
    call: Call, LU: torch.Tensor, pivots: torch.Tensor, B: torch.Tensor, left: bool, adjoint: bool
) -> torch.Tensor:
    check_matrices(LU)
    check_matrices(B, square=False)
    shape = broadcast(LU, B)
    choose_driver(LU, lu_solve_call(LU, shape, left, adjoint))
    (out,) = call.outputs()
    compute(lambda: solve(out, LU, pivots, B, left, adjoint))
    return out


@functools.cache
def _decomposes_transpose(function: Callable[..., Any]) -> bool:
    """Whether PyTorch's function decomposes the transpose of real, contiguous matrices, which saves a copy on the CPU.
    Gradients rely on it, and releases differ."""
    example = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cpu")
    results = function(example, example) if function is aten._linalg_solve_ex else function(example)
    return bool(results[1][0, 0] == 2.0)  # the first pivot; without a transposition 3


def takes_transpose(function: Callable[..., Any], a: torch.Tensor) -> bool:
    """Whether PyTorch's `function`, one of aten._linalg_solve_ex and aten._linalg_det, decomposes the transpose of the
    matrices."""
    return a.is_contiguous() and not a.is_complex() and _decomposes_transpose(function)


@operator("_linalg_solve_ex", dtypes="complex", one_dtype=["A", "B"])
def solve_ex(call: Call, A: torch.Tensor, B: torch.Tensor, left: bool, check: bool) -> Any:
    check_matrices(A)
    is_vector = B.dim() == 1 or (A.dim() - 1 == B.dim() and A.shape[:-1] == B.shape)
    if not B.dim():
        raise Refused("a right side without dimensions")
    b = B.unsqueeze(-1) if is_vector else B
    shape = broadcast(A, b)
    transposed = takes_transpose(aten._linalg_solve_ex, A)
    choose_driver(A, lu_call(A), lu_solve_call(A, shape, left, transposed))
    out, lu, pivots, info = call.outputs()

    def work() -> None:
        factor(A.mT if transposed else A, lu, pivots, info)
        if check:
            check_errors(info, "torch.linalg.solve_ex", A)
        solve(out.unsqueeze(-1) if is_vector else out, lu, pivots, b, left, transposed)

    compute(work)
    return out, lu, pivots, info


@operator("linalg_inv_ex", dtypes="complex")
def inv_ex(call: Call, A: torch.Tensor, check: bool) -> Any:
    check_matrices(A)
    transposed = takes_transpose(aten._linalg_solve_ex, A)
    choose_driver(A, lu_call(A), lu_solve_call(A, A.shape, True, transposed))
    out, info = call.outputs()

    def work() -> None:
        lu = torch.empty(A.shape, dtype=A.dtype, device=A.device).mT
        pivots = torch.empty(A.shape[:-1], dtype=torch.int32, device=A.device)
        factor(A.mT if transposed else A, lu, pivots, info)
        solve(out, lu, pivots, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), adjoint=transposed)

    compute(work)
    if check:
        check_errors(info, "linalg.inv_ex", A)
    return out, info


def sign_of(pivots: torch.Tensor) -> torch.Tensor:
    """The determinant of the permutation that the pivots describe."""
    places = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - 2 * ((pivots != places).sum(-1) % 2)


def decompose(A: torch.Tensor, lu: torch.Tensor, pivots: torch.Tensor) -> torch.Tensor:
    """Writes the LU decomposition of A or of its transpose. Returns its diagonal."""
    info = torch.empty(A.shape[:-2], dtype=torch.int32, device=A.device)
    given = A.mT if takes_transpose(aten._linalg_det, A) else A
    compute(lambda: factor(given, lu, pivots, info))
    return lu.diagonal(0, -2, -1)


@operator("_linalg_det", dtypes="complex")
def det(call: Call, A: torch.Tensor) -> Any:
    check_matrices(A)
    choose_driver(A, lu_call(A))
    out, lu, pivots = call.outputs()
    diagonal = decompose(A, lu, pivots)
    torch.mul(diagonal.prod(-1), sign_of(pivots), out=out)
    return out, lu, pivots


@operator("_linalg_slogdet", dtypes="complex")
def slogdet(call: Call, A: torch.Tensor) -> Any:
    check_matrices(A)
    choose_driver(A, lu_call(A))
    sign, logarithm, lu, pivots = call.outputs()
    diagonal = decompose(A, lu, pivots)
    torch.mul(diagonal.sgn().prod(-1), sign_of(pivots), out=sign)
    torch.sum(diagonal.abs().log_(), -1, out=logarithm)
    return sign, logarithm, lu, pivots


# Exchanges rows as the pivots say, one after the other.
_PERMUTE = """
  for (index_t i = 0; i < rows; ++i) store_order(item * rows + i, i);
  for (index_t i = 0; i < count; ++i) {
    const index_t pivot = load_pivots(item * count + i) - 1;
    if (pivot < 0 || pivot >= rows) { refuse; break; }
    const index_t kept = load_order(item * rows + i);
    store_order(item * rows + i, load_order(item * rows + pivot));
    store_order(item * rows + pivot, kept);
  }
"""
_OUT_OF_RANGE = (
    "pivots passed to lu_unpack must be between 1 and LU.size(-2) inclusive."
    "Did you properly pass the result of lu_factor?"
)


def unpack_pivots(out: torch.Tensor, pivots: torch.Tensor) -> None:
    """Writes the permutation matrices that the pivots describe."""
    rows = out.shape[-1]
    order = torch.empty(out.shape[:-1], dtype=torch.int64, device=out.device)
    if not out.numel():
        return
    run_kernel(
        "lu_unpack",
        _PERMUTE,
        items=count(out.shape),
        outputs={"order": order, "errors": error_words(out.device)},
        inputs={"pivots": pivots.contiguous()},
        integers={"rows": rows, "count": pivots.shape[-1]},
        numbers={"text": (torch.int32, errors.text_number(_OUT_OF_RANGE))},
        value=torch.int64,
        constants={"refuse": f"if (atomic_swap(errors, 0u, {errors.REFUSED_VALUE}u) == 0u) errors[1] = text"},
    )
    out.copy_(order.unsqueeze(-2) == torch.arange(rows, device=out.device).unsqueeze(-1))


def unpack_factors(lower: torch.Tensor, upper: torch.Tensor, lu: torch.Tensor) -> None:
    """Writes the two factors, the lower one with a diagonal of ones."""
    *_, rows, columns = lu.shape
    least = min(rows, columns)
    lower.copy_(lu[..., :least].tril(-1)).diagonal(0, -2, -1).fill_(1)
    upper.copy_(lu[..., :least, :].triu())


@operator("lu_unpack", dtypes="complex")
def lu_unpack(call: Call, LU: torch.Tensor, pivots: torch.Tensor, unpack_data: bool, unpack_pivots_too: bool) -> Any:
    check_matrices(LU, square=False)
    out = call.outputs()
    if unpack_pivots_too:
        shape = [*LU.shape[:-2], min(LU.shape[-2:])]
        torch._check(  # PyTorch's CPU kernel accesses memory out of bounds instead
            list(pivots.shape) == shape,
            lambda: f"lu_unpack: LU_pivots must have the shape {shape}, but got {list(pivots.shape)}",
        )
        unpack_pivots(out[0], pivots)
    if unpack_data:
        unpack_factors(out[1], out[2], LU)
    return tuple(out)


@operator("linalg_lu", dtypes="complex")
def lu(call: Call, A: torch.Tensor, pivot: bool) -> Any:
    check_matrices(A, square=False)
    if not pivot:
        raise RunOnCPU("a decomposition without pivots")
    choose_driver(A, lu_call(A))
    permutation, lower, upper = call.outputs()
    factors = torch.empty(A.mT.shape, dtype=A.dtype, device=A.device).mT
    pivots = torch.empty((*A.shape[:-2], min(A.shape[-2:])), dtype=torch.int32, device=A.device)
    info = torch.empty(A.shape[:-2], dtype=torch.int32, device=A.device)
    compute(lambda: factor(A, factors, pivots, info))
    unpack_pivots(permutation, pivots)
    unpack_factors(lower, upper, factors)
    return permutation, lower, upper


# Eigenvalues of symmetric matrices


def eigh_call(a: torch.Tensor, upper: bool, vectors: bool) -> LibraryCall:
    """The library call of `decompose_symmetric`."""
    return library_call(
        "eigh",
        a,
        lambda: {"vectors": int(vectors), "upper": int(upper), "batch": count(a.shape), "n": a.shape[-1]},
    )


@part("(Tensor(a!) values, Tensor(b!) vectors, Tensor A, bool upper, bool has_vectors) -> Tensor", dtypes="complex")
def decompose_symmetric(
    call: Call, values: torch.Tensor, vectors: torch.Tensor, A: torch.Tensor, upper: bool, has_vectors: bool
) -> torch.Tensor:
    """Writes the eigenvalues, and the eigenvectors unless they are not needed. Returns the status of each matrix."""
    info = torch.empty(A.shape[:-2], dtype=torch.int32, device=A.device)
    with contiguous_result(vectors.mT) as rows, contiguous_result(values) as found:
        rows.copy_(A.mT)
        eigh_call(A, upper, has_vectors).run([rows, found, info], written=3)
    return info


@operator("_linalg_eigh", dtypes="complex")
def eigh(call: Call, A: torch.Tensor, UPLO: str, compute_v: bool) -> Any:
    """Waits for the device, because it raises an error if the library finds no eigenvalues."""
    check_matrices(A)
    upper = UPLO in ("U", "u")
    choose_driver(A, eigh_call(A, upper, compute_v))
    values, vectors = call.outputs()
    if not A.numel():
        return values, vectors
    memory = vectors if compute_v else torch.empty(A.shape, dtype=A.dtype, device=A.device).mT
    info: list[torch.Tensor] = []
    compute(lambda: info.append(decompose_symmetric(values, memory, A, upper, compute_v)))
    check_errors(info[0], "linalg.eigh", A)
    return values, vectors
