"""Launches of Triton's binaries as commands of the runtime."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import _allocation

from torch_backplane import _C
from torch_backplane.planning import runtime
from torch_backplane.planning.symbols import Untraceable
from torch_backplane.planning.tracing import current as current_trace

# The parameters of kernels, by Triton's names of types.
_DTYPES = {
    "i1": torch.bool, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32, "i64": torch.int64,
    "u1": torch.bool, "u8": torch.uint8, "u16": torch.uint16, "u32": torch.uint32, "u64": torch.uint64,
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "f32": torch.float32, "fp64": torch.float64,
}  # fmt: skip
_ADDRESS = torch.uint64

# The names of the parameters that a kernel writes; None: not known, so any of them.
_written: contextvars.ContextVar[Collection[str] | None] = contextvars.ContextVar("written", default=None)


@contextlib.contextmanager
def only_writing(names: Collection[str]) -> Iterator[None]:
    """Declare that kernels launched in this context write at most to the parameters with these names."""
    token = _written.set(names)
    try:
        yield
    finally:
        _written.reset(token)


def refuse_in_traces() -> None:
    """Raise Untraceable while a planner is traced: Triton compiles for sizes, which a trace does not know."""
    if current_trace() is not None:
        raise Untraceable("it launches a Triton kernel")


class Binary:
    """A kernel of a binary on bp:`index`. A parameter's pointer can be a tensor, or an address, which is a number."""

    def __init__(self, index: int, name: str, binary: bytes) -> None:
        self.index, self.name, self._binary = index, name, binary
        self._kernels: dict[tuple[Any, ...], _C.CompiledKernel] = {}

    def with_parameters(self, parameters: Sequence[Any]) -> _C.CompiledKernel:
        """Return the runtime's kernel with these parameters: "input" or "output" for tensors, dtypes for numbers."""
        key = tuple(parameters)
        if key not in self._kernels:
            self._kernels[key] = _C.CompiledKernel(self.index, self._binary, self.name, self.name, list(parameters))
        return self._kernels[key]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the binary: the Triton kernel's argument from which it comes, and its type ("*fp32", "i32")."""

    name: str
    path: tuple[int, ...]  # the position of the argument, and in it, if it is a tuple
    type: str

    def of(self, arguments: Sequence[Any]) -> Any:
        """Return its value."""
        value: Any = arguments
        for position in self.path:
            value = value[position]
        return value


def _parameters(name: str, path: tuple[int, ...], kind: Any) -> Iterator[Parameter]:
    if isinstance(kind, tuple):
        for position, one in enumerate(kind):
            yield from _parameters(f"{name}[{position}]", (*path, position), one)
    elif kind != "constexpr":
        yield Parameter(name, path, kind)


class Launcher:
    """Launches a compiled Triton kernel. Triton makes one for each kernel, and calls it for each launch.

    Args:
        src: Triton's source, with the types of the arguments.
        metadata: what Triton's compiler says about the kernel.

    Raises:
        NotImplementedError: the kernel has an argument of a type that the runtime cannot pass.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        self._metadata = metadata
        self._parameters = [
            parameter
            for position, (name, kind) in enumerate(src.signature.items())
            for parameter in _parameters(str(name), (position,), kind)
        ]
        for one in self._parameters:
            if not one.type.startswith("*") and one.type not in _DTYPES:
                hint = "; use tl.make_tensor_descriptor() in the kernel" if one.type.startswith("tensordesc") else ""
                raise NotImplementedError(
                    f"argument {one.name} of the Triton kernel {metadata.name} has the type {one.type}. On bp, "
                    f"arguments are tensors, numbers, and tuples of them{hint}"
                )
        if "gsan" in str(getattr(metadata, "instrumentation_mode", "")):
            raise NotImplementedError("Triton's instrumentation mode gsan is not available on bp")

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: Binary, *given: Any) -> None:
        """Launch the kernel on the current stream.

        Args:
            grid_x, grid_y, grid_z: groups in each dimension. Nothing is launched if one is 0.
            stream: for Triton's allocators only.
            function: the kernel, from `Utilities.load_binary`.
            given: packed metadata, which is ignored; what the hooks get; the hooks before and after the launch, or
                None; then the arguments of the Triton kernel, with constants.

        Raises:
            ValueError: a tensor is not on the current device.
            TypeError: a pointer is neither a tensor nor an address.
        """
        refuse_in_traces()
        _, launch_metadata, enter_hook, exit_hook, *arguments = given
        if enter_hook is not None:
            enter_hook(launch_metadata)
        metadata, groups = self._metadata, grid_x * grid_y * grid_z
        if groups > 0:
            kinds, values = self._given(function, arguments)
            for bytes_of_group, align, allocator in (
                (metadata.global_scratch_size, metadata.global_scratch_align, _allocation._allocator),
                (metadata.profile_scratch_size, metadata.profile_scratch_align, _allocation._profile_allocator),
            ):
                nbytes = groups * metadata.num_ctas * bytes_of_group
                memory = allocator.get()(nbytes, align, stream) if nbytes > 0 else None
                self._add_pointer(kinds, values, function, "the memory of Triton's allocator", memory, True)
            threads = metadata.num_warps * metadata.target.warp_size
            runtime.launch(
                function.with_parameters(kinds), values,
                [grid_x * metadata.num_ctas * threads, grid_y, grid_z], [threads, 1, 1],
                dynamic_shared_memory=metadata.shared, cluster=[metadata.num_ctas, 1, 1],
                cooperative=bool(metadata.launch_cooperative_grid),
            )  # fmt: skip
        if exit_hook is not None:
            exit_hook(launch_metadata)

    def _given(self, function: Binary, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        kinds: list[Any] = []
        values: list[Any] = []
        written = _written.get()
        for one in self._parameters:
            value = one.of(arguments)
            if one.type.startswith("*"):
                is_written = written is None or one.name.partition("[")[0] in written
                self._add_pointer(kinds, values, function, f"argument {one.name}", value, is_written)
            else:
                kinds.append(_DTYPES[one.type])
                values.append(value)
        return kinds, values

    def _add_pointer(
        self, kinds: list[Any], values: list[Any], function: Binary, what: str, value: Any, is_written: bool
    ) -> None:
        if not isinstance(value, torch.Tensor) and isinstance(getattr(value, "base", None), torch.Tensor):
            value = value.base  # triton.reinterpret()
        if isinstance(value, torch.Tensor):
            device = torch.device("bp", function.index)
            if value.device != device:
                raise ValueError(
                    f"{what} of the Triton kernel {function.name} is on {value.device}, but must be on the current "
                    f"device {device}; torch.bp.set_device() makes another one current"
                )
            kinds.append("output" if is_written else "input")
            values.append(value)
            return
        if value is None:
            value = 0
        elif hasattr(value, "data_ptr"):
            value = value.data_ptr()
        if not isinstance(value, int):
            raise TypeError(
                f"{what} of the Triton kernel {function.name} must be a tensor, an address or None, but is of type "
                f"{type(value).__name__}"
            )
        kinds.append(_ADDRESS)
        values.append(value)
