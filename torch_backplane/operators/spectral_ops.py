"""Fourier transforms: the operators of which PyTorch composes torch.fft."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from torch_backplane import tuning
from torch_backplane.kernels.templates.fft import fft, fft_chirp, radices
from torch_backplane.operators import library_transforms
from torch_backplane.operators.linear_algebra import host_refuses
from torch_backplane.planning import (
    Call,
    Candidate,
    Candidates,
    Refused,
    call_on_cpu,
    costs,
    operator,
    run_template,
    try_library,
)

aten = torch.ops.aten

# The divisor of results for each `normalization`: 1, the square root of the number of elements, or that number.
_DIVISORS: dict[int, Callable[[int], float]] = {0: lambda count: 1.0, 1: math.sqrt, 2: float}
_DTYPES = {torch.float32, torch.float64, torch.complex64, torch.complex128}


@operator("_fft_c2c", dtypes="complex")
def _fft_c2c(call: Call, self: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    if not self.is_complex():
        raise Refused("self is not complex")
    dims = _dims(self, dim, normalization)
    (out,) = _outputs(call, _laid_out(self, _by_strides(self, dims)))
    if not out.numel():
        return out
    if not dims:
        return out.copy_(self)
    chosen = _choose(self, out, dims, not forward, forward=forward)
    if chosen == "host":
        call_on_cpu(aten._fft_c2c.out, self, dims, normalization, forward, out=out)
        return out
    scale = _scale(self.shape, dims, normalization)
    if chosen == "driver" and _by_library(out, self, _by_strides(self, dims), scale, inverse=not forward):
        return out
    _transform(out, self, dims, list(self.shape), scale, inverse=not forward)
    return out


@operator("_fft_r2c", dtypes="complex")
def _fft_r2c(call: Call, self: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    if self.is_complex() or not dim:
        raise Refused("self is complex, or dim is empty")
    dims = _dims(self, dim, normalization)
    last = dims[-1]
    size = self.shape[last] // 2 + 1 if onesided else self.shape[last]
    inward = [*_by_strides(self, dims[:-1]), last]
    made = _laid_out(self, inward, size, self.dtype.to_complex())
    (out,) = _outputs(call, made)
    if not out.numel():
        return out
    chosen = _choose(self, out, dims, False, onesided=onesided)
    if chosen == "host":
        call_on_cpu(aten._fft_r2c.out, self, dims, normalization, onesided, out=out)
        return out
    scale = _scale(self.shape, dims, normalization)
    if chosen == "driver" and _by_library(out, self, inward, scale):
        return out
    _transform(out, self, [*dims[-1:], *dims[:-1]], list(self.shape), scale)
    return out


@operator("_fft_c2r", dtypes="complex")
def _fft_c2r(
    call: Call, self: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int
) -> torch.Tensor:
    if not dim or not self.is_complex():
        raise Refused("self is not complex, or dim is empty")
    dims = _dims(self, dim, normalization)
    if self.shape[dims[-1]] != last_dim_size // 2 + 1:
        raise Refused("self has the wrong size for a result of last_dim_size")
    laid_out = _laid_out(self, _by_strides(self, dims[:-1])) if len(dims) > 1 else self
    (out,) = _outputs(call, _laid_out(laid_out, dims[-1:], last_dim_size, self.dtype.to_real()))
    if not out.numel():
        return out
    chosen = _choose(self, out, dims, True, size=last_dim_size)
    if chosen == "host":
        call_on_cpu(aten._fft_c2r.out, self, dims, normalization, last_dim_size, out=out)
        return out
    sizes = list(out.shape)
    scale = _scale(sizes, dims, normalization)
    inward = [*_by_strides(self, dims[:-1]), dims[-1]]
    if chosen == "driver" and _by_library(out, self, inward, scale, inverse=True):
        return out
    _transform(out, self, dims, sizes, scale, inverse=True)
    return out


def _dims(self: torch.Tensor, dim: Sequence[int], normalization: int) -> list[int]:
    dims = [int(one) for one in dim]
    if len({*dims}) < len(dims) or any(not 0 <= one < self.dim() for one in dims):
        raise Refused("dim has duplicates, or is out of range")  # torch.fft passes no negative dimensions
    if normalization not in _DIVISORS or self.dtype not in _DTYPES or any(not self.shape[one] for one in dims):
        raise Refused("an unknown normalization, an unsupported dtype, or no elements to transform")
    return dims


def _by_strides(self: torch.Tensor, dims: Sequence[int]) -> list[int]:
    """`dims`, sorted from the largest stride to the smallest."""
    return sorted(dims, key=self.stride, reverse=True)


def _laid_out(
    self: torch.Tensor, dims: Sequence[int], last_size: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A meta tensor with the strides of PyTorch's CPU result: `dims` are the innermost dimensions, in this order
    (`_exec_fft` in ATen/native/mkl/SpectralOps.cpp). PyTorch's Python meta functions give other strides.
    """
    order = [*_by_strides(self, [one for one in range(self.dim()) if one not in dims]), *dims]
    sizes = list(self.shape)
    if last_size is not None:
        sizes[dims[-1]] = last_size
    made = torch.empty([sizes[one] for one in order], dtype=dtype or self.dtype, device="meta")
    return made.permute([order.index(one) for one in range(self.dim())])


def _outputs(call: Call, made: torch.Tensor) -> list[torch.Tensor]:
    """The outputs. New ones have the strides of `made`; PyTorch copies such a tensor to given ones."""
    return call.outputs(like=[made.contiguous() if call.written else made])


def _scale(sizes: Sequence[int], dims: Sequence[int], normalization: int) -> float:
    return 1 / _DIVISORS[normalization](math.prod(int(sizes[one]) for one in dims))


# Candidates


transforms = Candidates(
    "transforms",
    Candidate(
        "host",
        lambda self, *described: host_refuses(self),
        cost=lambda self, *described: costs.on_host("transforms", self.dtype),
    ),
    Candidate(
        "driver",
        library_transforms.why_not,
        cost=library_transforms.cost,
        workspace=lambda form, *described: library_transforms.workspace(*described),
    ),
    Candidate("generated", lambda *described: None),
)


def _choose(self: torch.Tensor, out: torch.Tensor, dims: Sequence[int], inverse: bool, **settings: int) -> str:
    problem = partial(tuning.Problem.of, "Transform", self.dtype, self=self, dims=dims, **settings)
    return transforms.choose(self, out, dims, inverse, problem=problem)


def _by_library(out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scale: float, inverse: bool = False) -> bool:
    """Runs the driver's library. Returns False if it fails."""
    return try_library(partial(library_transforms.transform, out, x, dims, scale, inverse))


@tuning.trial("Transform")
def _trial(operands: tuning.Operands) -> Callable[[], torch.Tensor]:
    self, dims = operands.given("self"), operands.integers("dims")
    if operands.has("forward"):
        return lambda: aten._fft_c2c(self, dims, 0, operands.flag("forward"))
    if operands.has("onesided"):
        return lambda: aten._fft_r2c(self, dims, 0, operands.flag("onesided"))
    return lambda: aten._fft_c2r(self, dims, 0, operands.integer("size"))


# Generated kernels


def _transform(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], sizes: Sequence[int], scale: float, inverse: bool = False
) -> None:
    """Transforms along one dimension after another.

    Args:
        out: If `x` is real, `out` keeps as much of the transform along the first of `dims` as its size says. If `out`
            is real, the transform along the last of `dims` has a conjugate symmetric input.
        sizes: The sizes of the transforms.
    """
    for dim in dims:
        last = dim == dims[-1]
        shape = list(x.shape)
        shape[dim] = out.shape[dim]
        dtype = out.dtype if last else out.dtype.to_complex()
        made = out if last else torch.empty(shape, dtype=dtype, device=x.device)
        _along(made, x, dim, int(sizes[dim]), scale if last else 1.0, inverse)
        x = made


def _along(out: torch.Tensor, x: torch.Tensor, dim: int, size: int, scale: float, inverse: bool) -> None:
    outer, inner = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    source = x.reshape(outer, x.shape[dim], inner)
    try:
        result = out.view(outer, out.shape[dim], inner)
    except RuntimeError:  # its strides do not allow a view of three dimensions
        result = out.new_empty((outer, out.shape[dim], inner))
    compute = _by_convolution if radices(size) is None else _by_passes
    compute(result, source, size, scale, inverse)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.view(out.shape))


def _by_passes(out: torch.Tensor, x: torch.Tensor, size: int, scale: float, inverse: bool) -> None:
    """Transforms tensors of three dimensions along the second one."""

    def room() -> torch.Tensor:
        shape = (x.shape[0], size, x.shape[2])
        return torch.empty(shape, dtype=x.dtype.to_complex(), device=x.device)

    run_template(fft, x.device, out, x, size, room, name="fft", inverse=inverse, scale=scale)


def _by_convolution(out: torch.Tensor, x: torch.Tensor, size: int, scale: float, inverse: bool) -> None:
    """Transforms of any length, by Bluestein's algorithm.

    A transform is a convolution with exp(πi j² / n), between two products with its conjugate (Bluestein, A linear
    filtering approach to the computation of the discrete Fourier transform, 1970). The convolution is computed as a
    product of transforms of a length that has radices.
    """
    if not x.is_complex():
        x = x.to(x.dtype.to_complex())
    if x.shape[1] < size:
        x = torch.cat([x, torch.conj_physical(x[:, 1 : size - x.shape[1] + 1].flip(1))], 1)
    whole = _whole(2 * size - 1)
    chirp, filter, filtered = (x.new_empty((1, length, 1)) for length in (size, whole, whole))
    run_template(fft_chirp, x.device, chirp, size, name="fft", inverse=not inverse)
    run_template(fft_chirp, x.device, filter, size, name="fft", inverse=inverse)
    _by_passes(filtered, filter, whole, 1.0, inverse=False)
    room = x.new_zeros((x.shape[0], whole, x.shape[2]))
    torch.mul(x, chirp, out=room[:, :size])
    transformed = torch.empty_like(room)
    _by_passes(transformed, room, whole, 1.0, inverse=False)
    transformed.mul_(filtered)
    _by_passes(room, transformed, whole, scale / whole, inverse=True)
    kept = out.shape[1]
    if out.is_complex():
        torch.mul(room[:, :kept], chirp[:, :kept], out=out)
    else:
        out.copy_((room[:, :kept] * chirp[:, :kept]).real)


def _whole(size: int) -> int:
    """The least number that is at least `size` and has no prime factor above 5."""
    while True:
        rest = size
        for prime in (2, 3, 5):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return size
        size += 1
