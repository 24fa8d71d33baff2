"""Runs OpenCL C kernels on a CPU and compiles CUDA C++ with NVRTC. Skips the test if the device or NVRTC is missing."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import on_opencl
import pytest
import torch

from torch_backplane.kernels import (
    Geometry,
    Kernel,
    OpenCLC,
    Target,
    geometry,
    pointwise,
)
from torch_backplane.kernels.dtypes import STORAGE_ONLY
from torch_backplane.kernels.layouts import TileLimits
from torch_backplane.ptxas.nvrtc import CompileError, Missing, compile_text

NUMPY = {
    torch.bool: np.uint8,
    torch.int8: np.int8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.uint8: np.uint8,
    torch.uint16: np.uint16,
    torch.uint32: np.uint32,
    torch.uint64: np.uint64,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}


@functools.cache
def opencl() -> Any:
    """Returns (context, queue, whether the device has float64) of a CPU device; skips the test if there is none."""
    found = on_opencl.require_platform()
    import pyopencl as cl

    devices = [device for device in found if device.type & cl.device_type.CPU]
    if not devices:
        on_opencl.missing("needs an OpenCL CPU device, for example PoCL's")
    context = cl.Context(devices[:1])
    return context, cl.CommandQueue(context), "cl_khr_fp64" in devices[0].extensions


@functools.cache
def _built(text: str, name: str) -> Any:
    import pyopencl as cl

    return cl.Kernel(cl.Program(opencl()[0], text).build(), name)


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """Returns a view of the storage's bytes from the tensor's first to its last element."""
    flat = tensor.detach().as_strided((extent(tensor),), (1,))
    return flat.view(torch.uint8).numpy()


def extent(tensor: torch.Tensor) -> int:
    """Returns the number of elements of the storage from the tensor's first to its last element, inclusive."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in steps) if tensor.numel() else 0


def scalar(value: float, dtype: torch.dtype) -> Any:
    """Returns a number as a kernel argument. float16 and bfloat16 are passed as their bits."""
    if dtype in STORAGE_ONLY:
        return np.uint16(torch.tensor(value, dtype=dtype).view(torch.uint16).item())
    return NUMPY[dtype](value)


def launch(
    kernel: Kernel,
    where: Geometry,
    results: int,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[float],
    row_group: tuple[int, int] | None = None,
) -> None:
    """Runs an OpenCL C kernel on CPU tensors (outputs first): copies them to buffers, and copies the outputs back.

    Every buffer begins 64 bytes into its `cl_mem`, so that a kernel that ignores the offset fails.
    """
    import pyopencl as cl

    context, queue, _ = opencl()
    if results == 0:
        return
    before = 64
    buffers = []
    for tensor in tensors:
        buffers.append(cl.Buffer(context, cl.mem_flags.READ_WRITE, before + max(1, _memory(tensor).nbytes)))
        if tensor.numel():
            cl.enqueue_copy(queue, buffers[-1], _memory(tensor), dst_offset=before)
    outputs = sum(parameter.role == "output" for parameter in kernel.parameters)
    arguments: list[Any] = []
    for parameter in kernel.parameters:
        if parameter.role in ("output", "input"):
            arguments += [buffers[parameter.operand + (outputs if parameter.role == "input" else 0)], np.uint64(before)]
        elif parameter.role == "scalar":
            arguments.append(scalar(scalars[parameter.operand], parameter.dtype))
        else:
            number = {
                "count": lambda p: where.count,
                "rows": lambda p: where.rows,
                "tiles": lambda p: where.tiles,
                "size": lambda p: where.sizes[p.dimension],
                "stride": lambda p: where.strides[p.operand][p.dimension],
            }[parameter.role](parameter)
            arguments.append(NUMPY[parameter.dtype](number))
    group = kernel.group_size or 64
    needed = where.tiles * group if where.layout.tile else kernel.work_items(results)
    items, groups = (-(-needed // group) * group,), (group,)
    if row_group is not None:
        groups = row_group
        items = (-(-where.sizes[0] // groups[0]) * groups[0], -(-where.rows // groups[1]) * groups[1])
    _built(kernel.text, kernel.name)(queue, items, groups, *arguments)
    for tensor, buffer in zip(tensors[:outputs], buffers, strict=False):
        cl.enqueue_copy(queue, _memory(tensor), buffer, src_offset=before)
    queue.finish()


def run_pointwise(
    formula: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    compute: Any = None,
    scalars: Sequence[tuple[float, torch.dtype]] = (),
    wide: bool = False,
    width: int = 4,
    device_kind: str = "gpu",
) -> Kernel:
    """Computes a formula with an OpenCL C kernel. All `outputs` have the same shape; `inputs` are broadcast to it."""
    _, _, float64 = opencl()
    shape = outputs[0].shape
    operands = [*outputs, *(tensor.expand(shape) for tensor in inputs)]
    dialect = OpenCLC(Target.of_kind(device_kind, float64=float64))
    strides = [tensor.stride() for tensor in operands]
    staged = [*[0] * len(outputs), *(tensor.itemsize for tensor in inputs)]
    where = geometry(
        shape, strides, width=width, limits=dialect.target.row_limits, staged=staged,
        tile_limits=TileLimits(dialect.tile_memory, dialect.target.tile_side),
    )  # fmt: skip
    layout = replace(where.layout, wide=wide)
    kernel = pointwise(
        "exp",  # also a built-in function: the generated name has a prefix
        formula,
        inputs=[tensor.dtype for tensor in inputs],
        outputs=[tensor.dtype for tensor in outputs],
        scalars=[dtype for _, dtype in scalars],
        compute=compute,
        layout=layout,
        dialect=dialect,
    )
    row_group = dialect.target.row_group(where.sizes[0], where.rows, strided=2 in layout.inner) if layout.rows else None
    launch(kernel, where, where.count, operands, [value for value, _ in scalars], row_group)
    return kernel


def compile_cuda(text: str, options: Sequence[str]) -> str:
    """Compiles CUDA C++ and returns the PTX. Raises AssertionError with the compiler's log if it does not compile.

    Warnings are errors, except those about unused declarations.
    """
    try:
        made = compile_text(text, (*options, "--diag-suppress=177"))
    except Missing as error:
        pytest.skip(str(error))
    except CompileError as error:
        raise AssertionError(str(error)) from error
    assert not made.log.strip(), made.log
    return made.code.decode()
