"""Calls of the program's own Triton kernels in compiled graphs.

Inductor would compile such a kernel for the graph, with its own launcher. On bp, the wrapper calls the kernel as eager
programs do. So the call is a launch of the runtime, and part of the graph's plan. An autotuned kernel is measured in
the first call.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from types import ModuleType
from typing import Any

_KERNELS = {("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")}

# The forms of a grid: for each the values of the configuration to which it belongs, and its sizes.
Grids = Sequence[tuple[Mapping[str, Any], tuple[int, int, int]]]


def trace_kernels(builder: ModuleType) -> None:
    """Lets Dynamo trace calls of Triton kernels, in `torch._dynamo.variables.builder`, if bp is Triton's driver.

    Dynamo knows these kernels only if a device of a type in its list (cuda, xpu, cpu, mtia) can run them. There is no
    hook: it would trace Triton's own code.
    """
    variable_builder: Any = builder.VariableBuilder  # type: ignore[attr-defined]
    wrap: Callable[..., Any] = variable_builder._wrap

    @functools.wraps(wrap)
    def _wrap(self: Any, value: Any) -> Any:
        if not _runs_on_bp(value):
            return wrap(self, value)
        self.install_guards(builder.GuardBuilder.ID_MATCH)  # type: ignore[attr-defined]
        return builder.TritonKernelVariable(value, None, None, source=self.source)  # type: ignore[attr-defined]

    variable_builder._wrap = _wrap


def _runs_on_bp(value: Any) -> bool:
    """Whether `value` is a Triton kernel, and bp is Triton's driver."""
    kind = type(value)
    if (kind.__module__, kind.__name__) not in _KERNELS:
        return False
    from triton.runtime import driver

    from torch_backplane.triton_driver.driver import BackplaneDriver

    try:
        return isinstance(driver.active, BackplaneDriver)
    except RuntimeError:  # no driver is active
        return False


def install(ir: ModuleType) -> None:
    """Lets `torch._inductor.ir.UserDefinedTritonKernel` write these calls for bp devices."""
    kernel_node: Any = ir.UserDefinedTritonKernel  # type: ignore[attr-defined]
    codegen: Callable[..., None] = kernel_node.codegen

    @functools.wraps(codegen)
    def write(self: Any, wrapper: Any) -> None:
        if self.get_device().type == "bp":
            _write_call(self, wrapper)
        else:
            codegen(self, wrapper)

    kernel_node.codegen = write


def _write_call(node: Any, wrapper: Any) -> None:
    """Writes the definition of a kernel, unless there is one, and the call of a `UserDefinedTritonKernel`."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    from torch_backplane.triton_driver.targets import triton_target

    triton_target(node.get_device().index)  # raises an error for other devices
    kernel = kernel_side_table.get_kernel(node.kernel_idx)
    name, configs = _jitted(kernel).__name__, getattr(kernel, "configs", [])
    definition = f"bp_compile.TritonKernel({name!r}, {identity(kernel)!r})"
    if definition not in wrapper.src_to_kernel:
        wrapper.src_to_kernel[definition] = f"triton_{name}_{wrapper.next_kernel_suffix()}"
        wrapper.define_kernel(wrapper.src_to_kernel[definition], definition)
    changed = {one.get_name() for one in node.mutable_args}
    written = [key for key, one in node.kwargs.items() if hasattr(one, "get_name") and one.get_name() in changed]
    values = [getattr(one, "kwargs", {}) for one in configs] if len(node.grid) > 1 else [{}]
    grids = ", ".join(
        f"({_text(wrapper, chosen)}, {wrapper.codegen_python_shape_tuple(tuple(grid))})"
        for chosen, grid in zip(values, node.grid, strict=True)
    )
    called = wrapper.src_to_kernel[definition]
    wrapper.writeline(f"{called}.run([{grids}], {written!r}, {_text(wrapper, node.kwargs)})")


def _text(wrapper: Any, value: Any) -> str:
    """Returns Python text for an argument of a kernel.

    Raises:
        NotImplementedError: the wrapper cannot contain the value.
    """
    import sympy
    import triton
    from torch._inductor import ir

    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(wrapper, one)}" for key, one in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + "".join(f"{_text(wrapper, one)}, " for one in value) + ")"
    if isinstance(value, ir.TMADescriptor):
        raise NotImplementedError("compiled graphs on bp do not create tensor descriptors for Triton kernels")
    if isinstance(value, ir.IRNode):
        return str(value.codegen_reference())
    if isinstance(value, sympy.Expr):
        return str(wrapper.codegen_python_sizevar(value))
    if isinstance(value, triton.language.dtype):
        return f"bp_compile.triton_dtype({value.name!r})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"float({str(value)!r})" if isinstance(value, float) else repr(value)
    raise NotImplementedError(
        f"compiled graphs on bp pass tensors, numbers, strings and Triton's dtypes to Triton kernels, but got "
        f"{type(value).__name__}"
    )


def triton_dtype(name: str) -> Any:
    """Returns Triton's dtype with a name such as "fp32"."""
    import triton

    return triton.language.dtype(name)


def _jitted(kernel: Any) -> Any:
    """Returns the function of @triton.jit in a kernel."""
    while not hasattr(kernel, "cache_key"):
        kernel = kernel.fn
    return kernel


def identity(kernel: Any) -> str:
    """Returns text that is equal for kernels that do the same, also in other processes.

    Cached graphs refer to their kernels by it.
    """
    configs = [one.all_kwargs() for one in getattr(kernel, "configs", [])]
    kept = [getattr(kernel, name, None) for name in ("restore_value", "reset_to_zero")]
    described = repr((_jitted(kernel).cache_key, configs, kept))
    return hashlib.sha256(described.encode()).hexdigest()[:32]


class TritonKernel:
    """A kernel that a compiled graph calls.

    Args:
        name: of the function.
        identity: see `identity`.
    """

    def __init__(self, name: str, identity: str) -> None:
        self._name, self._identity = name, identity

    @functools.cached_property
    def _kernel(self) -> Any:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        for one in list(kernel_side_table.id_to_kernel.values()):
            if identity(one) == self._identity:
                return one
        raise RuntimeError(
            f"a compiled graph calls the Triton kernel {self._name}, which this process has not traced: compile the "
            "function that calls it in this process"
        )

    def run(self, grids: Grids, written: Collection[str], arguments: Mapping[str, Any]) -> None:
        """Launches the kernel.

        Args:
            grids: one grid, or one for each configuration of an autotuned kernel.
            written: the names of the tensors that the kernel writes.
            arguments: all arguments by name.
        """
        from torch_backplane.triton_driver.launcher import only_writing

        def grid(chosen: Mapping[str, Any]) -> tuple[int, int, int]:
            return next(sizes for values, sizes in grids if all(chosen.get(key) == values[key] for key in values))

        with only_writing(written):
            self._kernel[grid](**arguments)
