"""Runs the launches that kernel templates return: OpenCL C on a CPU, either dialect in the kernel interpreter. Also
compiles their CUDA C++ text with NVRTC.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from c_argument import CArgument
from kernel_runners import NUMPY, _built, _memory, opencl, scalar

from torch_backplane import sanitizer
from torch_backplane.audit.driver import AuditDevice
from torch_backplane.interpreter.device import InterpreterDevice
from torch_backplane.interpreter.language import NoCompiler
from torch_backplane.kernels import CudaCpp, OpenCLC, Reduction, Target, reduction, reduction_geometry
from torch_backplane.kernels.modelled import read_target
from torch_backplane.kernels.templates.reduce import Form, Options, choose_form
from torch_backplane.kernels.templates.source import Launch
from torch_backplane.ptxas.collect import Kernel
from torch_backplane.ptxas.measure import Measured, measure
from torch_backplane.ptxas.nvrtc import Missing
from torch_backplane.ptxas.report import findings


@functools.cache
def dialect(processor: str, **figures: Any) -> OpenCLC:
    return OpenCLC(Target.of_kind(processor, float64=opencl()[2], **figures))


processors = pytest.mark.parametrize("processor", ["cpu", "gpu"])


def run(launch: Launch | list[Launch]) -> None:
    """Runs launches on CPU tensors: copies them to buffers at an offset of 64 bytes, and copies the outputs back."""
    if isinstance(launch, list):
        for one in launch:
            run(one)
        return
    import pyopencl as cl

    context, queue, _ = opencl()
    if launch.global_size == 0:
        return
    before = 64
    buffers: dict[tuple[int, int], Any] = {}
    arguments: list[Any] = []
    tensors, numbers = iter(launch.tensors), iter(launch.numbers)
    outputs = []
    for parameter in launch.kernel.parameters:
        if parameter.role == "scalar":
            arguments.append(scalar(next(numbers), parameter.dtype))
            continue
        tensor = next(tensors)
        assert tensor.dtype == parameter.dtype
        key = (tensor.data_ptr(), _memory(tensor).nbytes)
        if key not in buffers:
            buffers[key] = cl.Buffer(context, cl.mem_flags.READ_WRITE, before + max(1, key[1]))
            if tensor.numel():
                cl.enqueue_copy(queue, buffers[key], _memory(tensor), dst_offset=before)
        if parameter.role == "output" and tensor.numel():
            outputs.append((tensor, buffers[key]))
        arguments += [buffers[key], np.uint64(before)]
    _built(launch.kernel.text, launch.kernel.name)(queue, (launch.global_size,), (launch.group_size,), *arguments)
    for tensor, buffer in outputs:
        cl.enqueue_copy(queue, _memory(tensor), buffer, src_offset=before)
    queue.finish()


def interpret(launch: Launch | list[Launch]) -> None:
    """Runs launches on CPU tensors in the kernel interpreter: CUDA C++ with the audit's observer, OpenCL C with the
    sanitizer's. Fails if an observer reports an error. Skips the test if there is no compiler for the language.
    """
    if isinstance(launch, list):
        for one in launch:
            interpret(one)
        return
    device = _interpreter("__global__" in launch.kernel.text)
    kernel: Any = device.compile(launch.kernel.text, launch.kernel.name)
    numbers = iter(launch.numbers)
    tensors = iter(launch.tensors)
    segments: dict[int, Any] = {}
    arguments, held = [], []
    for parameter in launch.kernel.parameters:
        if parameter.role == "scalar":
            data = np.array([scalar(next(numbers), parameter.dtype)])
            held.append(data)
            arguments.append(CArgument(None, 0, data.ctypes.data, data.itemsize))
            continue
        tensor = next(tensors)
        if tensor.data_ptr() not in segments:
            memory = memoryview(_memory(tensor)).cast("B")
            segments[tensor.data_ptr()] = made, _ = device.allocate(max(1, len(memory))), memory
            device.copy_in(made, 0, memory, None)
        arguments.append(CArgument(segments[tensor.data_ptr()][0].address, 0, None, 0))
    sizes = [(ctypes.c_uint64 * 3)(count, 1, 1) for count in (launch.global_size, launch.group_size)]
    result = _LAUNCH(device.native_launcher.functions["launch"])(
        None, device.native_kernel(kernel), *sizes, (CArgument * len(arguments))(*arguments), len(arguments)
    )
    assert result == 0, sanitizer.take()
    for made, memory in segments.values():
        device.copy_out(made, 0, memory, None)
        device.free(made)


_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5, ctypes.c_uint64)


@functools.cache
def _interpreter(cuda: bool) -> InterpreterDevice:
    try:
        return AuditDevice(read_target("nvidia-ada")) if cuda else sanitizer.SanitizerDevice()
    except NoCompiler as error:
        pytest.skip(str(error))


def run_reduction(
    target: Target,
    definition: Reduction,
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    outputs: Sequence[torch.Tensor],
    scalars: Sequence[float] = (),
    *,
    compute: torch.dtype | None = None,
    form: Form | None = None,
) -> Form:
    """Reduces `inputs` over `dims` into `outputs` with kernels for `target`. Returns the form, chosen if None."""
    where = reduction_geometry(inputs[0].shape, dims, [t.stride() for t in outputs], [t.stride() for t in inputs])
    form = form or choose_form(target, definition, where, len(outputs))
    run(reduction(OpenCLC(target), "tested", definition, outputs, inputs, where, Options(scalars, compute, form)))
    return form


@functools.cache
def machine_code(text: str, entry: str, group: int, architecture: str = "sm_80") -> Measured:
    """Returns the figures of a kernel in CUDA C++. Fails if it does not compile, spills registers, or has warnings."""
    kernel = Kernel("a test", entry, text, group)
    try:
        (found,) = measure([kernel], [architecture])
    except Missing as error:
        pytest.skip(str(error))
    assert not [*findings(kernel, found)]
    return found[architecture]


def check_cuda(template: Any, *args: Any, **kwargs: Any) -> None:
    """Compiles a template's CUDA C++ text to machine code."""
    made = template(CudaCpp(), *args, **kwargs)
    for launch in [made] if isinstance(made, Launch) else made:
        machine_code(launch.kernel.text, launch.kernel.name, launch.group_size)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(0 if dtype == torch.uint8 else -9, 10, shape).to(dtype)


__all__ = [
    "NUMPY", "check_cuda", "dialect", "interpret", "machine_code", "processors", "random", "run", "run_reduction",
]  # fmt: skip
