"""Geometry of a launch: its index layout, and the sizes and strides of its operands.

The runtime computes it for numbers, `kernels.layouts` for the symbols of a trace. Both give the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels import geometry
from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.layouts import Geometry, Layout, ReductionGeometry, TileLimits
from torch_backplane.kernels.layouts import reduction_geometry as of_strides
from torch_backplane.kernels.pointwise import index_strides
from torch_backplane.planning import runtime
from torch_backplane.planning.tracing import current


def check_operands(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> bool:
    """Checks the operands of a pointwise kernel, and returns whether there are elements to compute.

    Raises:
        ValueError: the outputs have different shapes.
        RuntimeError: PyTorch's error, if `inputs` do not broadcast to the outputs' shape, an output overlaps itself, or
            partially overlaps an input.
    """
    if current() is None:
        return _C.check_operands(outputs, inputs)
    shape = outputs[0].shape
    if any(output.shape != shape for output in outputs):
        raise ValueError(f"all outputs must have one shape, but got {[list(output.shape) for output in outputs]}")
    check_shape(shape, inputs)
    if outputs[0].numel() == 0:
        return False
    runtime.check_overlaps(outputs, inputs)
    return True


def check_shape(shape: torch.Size, inputs: Sequence[torch.Tensor]) -> None:
    """Raises PyTorch's error if `inputs` do not broadcast to `shape`: a kernel would read out of bounds."""
    if all(tensor.shape == shape for tensor in inputs):
        return
    runtime.check_broadcast([torch.empty(shape, device="meta"), *inputs])
    broadcast = runtime.broadcast_shapes(shape, *(tensor.shape for tensor in inputs))
    if broadcast != shape:
        raise RuntimeError(f"output with shape {list(shape)} doesn't match the broadcast shape {list(broadcast)}")


def pointwise_geometry(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    positions: Sequence[int | None],
    width: int,
    dialect: Dialect,
) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Returns (the arguments of a Layout, sizes, strides) of checked operands, as `kernels.geometry` does.

    Args:
        positions: the program's `indices`: the dimension of each, None for the element's number. They count as operands
            without memory.
        width: elements for each work item, if all operands are contiguous and aligned to that many elements.
    """
    limits = dialect.target.row_limits
    if current() is None:
        return _C.pointwise_geometry(
            outputs,
            inputs,
            positions,
            width,
            limits.shortest,
            limits.most,
            dialect.tile_memory,
            dialect.target.tile_side,
        )
    return pointwise_geometry_of_symbols(outputs, inputs, positions, width, dialect)


def pointwise_geometry_of_symbols(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    positions: Sequence[int | None],
    width: int,
    dialect: Dialect,
) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    operands, shape = [*outputs, *inputs], outputs[0].shape
    if outputs[0].numel() == 0:
        shape, strides = torch.Size([1]), [[1]] * (len(operands) + len(positions))
    else:
        strides = [broadcast_strides(tensor, shape) for tensor in operands]
        strides += [index_strides(dim, shape) for dim in positions]
    aligned = all(runtime.is_aligned(tensor, min(16, width * tensor.itemsize)) for tensor in operands)
    staged = [*[0] * len(outputs), *(tensor.itemsize for tensor in inputs), *[0] * len(positions)]
    where = geometry(
        shape,
        strides,
        width=width,
        aligned=aligned,
        limits=dialect.target.row_limits,
        staged=staged,
        tile_limits=TileLimits(dialect.tile_memory, dialect.target.tile_side),
    )
    of = where.layout
    return (of.rank, of.width, of.wide, of.inner, of.tile), where.sizes, where.strides


def broadcast_strides(tensor: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """The strides of `tensor` broadcast to `shape`, as torch.broadcast_to gives them."""
    missing = len(shape) - tensor.dim()
    own = zip(tensor.shape, tensor.stride(), shape[missing:], strict=True)
    return [0] * missing + [0 if size == 1 and wanted != 1 else stride for size, stride, wanted in own]


def reduction_geometry(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], dims: Sequence[int]
) -> ReductionGeometry:
    """The geometry of a reduction over `dims`, which must not be negative. Outputs lack them or have size 1 there."""
    if current() is not None:
        return reduction_geometry_of_symbols(outputs, inputs, dims)
    wide, sizes, strides, reduced_sizes, reduced_strides = _C.reduction_geometry(outputs, inputs, dims)
    return ReductionGeometry(
        Geometry(_strided(len(sizes), wide), sizes, strides),
        Geometry(_strided(len(reduced_sizes), wide), reduced_sizes, reduced_strides),
    )


@lru_cache(maxsize=256)
def _strided(rank: int, wide: bool) -> Layout:
    return Layout(rank, 1, wide)


def reduction_geometry_of_symbols(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], dims: Sequence[int]
) -> ReductionGeometry:
    rank = inputs[0].dim()
    kept = [dim for dim in range(rank) if dim not in dims]
    strides = [
        [output.stride(dim) for dim in kept] if output.dim() == rank else list(output.stride()) for output in outputs
    ]
    return of_strides(inputs[0].shape, sorted(dims), strides, [tensor.stride() for tensor in inputs])
