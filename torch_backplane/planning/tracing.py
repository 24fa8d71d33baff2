"""Traces: runs of a planner on tensors with symbolic sizes, which write a dynamic-shape plan.

A planner is ordinary Python code and does not distinguish numbers from symbols. During a trace, `views` implements
views and new tensors, planners implement other operators, `shape_rules` replaces PyTorch's meta kernels, and
`_C.PlanBuilder` records commands. Everything else raises `Untraceable`. Calls of that class then only have plans for
their own shapes, and `plans.stats()` gives the reason.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_backplane import _C
from torch_backplane.kernels.target import CPU
from torch_backplane.planning import registry, shape_rules, views
from torch_backplane.planning import strides as layouts
from torch_backplane.planning.strides import SYMBOLS, number_now
from torch_backplane.planning.symbols import Node, Tape, Untraceable, as_symbol, quantity

_ALIGNMENT = 16  # bytes; signatures contain addresses modulo this (csrc/plans/signature.h)

_COMPOSED = torch._C.DispatchKey.CompositeExplicitAutograd  # kernels in C++ that call other operators


class _Here(threading.local):
    """The current trace of each thread."""

    tracer: Tracer | None = None


_here = _Here()


def current() -> Tracer | None:
    """This thread's trace; None outside of traces."""
    return _here.tracer


class Memory:
    """The allocation that holds a tensor: ("argument" | "allocation" | "kept" | "meta" | "nothing", index)."""

    base = "nothing"  # for `__del__`, if `__init__` was interrupted

    def __init__(self, tracer: Tracer, base: str, index: int, alignment: int = 0) -> None:
        self.tracer, self.base, self.index, self.alignment = tracer, base, index, alignment

    def __del__(self) -> None:
        if self.base == "allocation":
            self.tracer.freed(self.index)


class Traced(torch.Tensor):
    """A tensor with symbolic sizes. Its offset counts from the argument's first element or the allocation's start."""

    memory: Memory
    position: int | None = None  # among the arguments
    layout_known: tuple[torch.Size, tuple[Any, ...], Any]  # sizes, strides and offset, which are immutable

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, overload: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise Untraceable(f"{overload} got a traced tensor outside of the trace")

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.layout_known[0]

    def size(self, dim: int | None = None) -> Any:
        sizes = self.layout_known[0]
        return sizes if dim is None else sizes[dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        strides = self.layout_known[1]
        return strides if dim is None else strides[dim]

    def storage_offset(self) -> Any:
        return self.layout_known[2]

    def numel(self) -> Any:
        return math.prod(self.layout_known[0])

    def untyped_storage(self) -> Any:
        raise Untraceable("it reads the storage of a tensor")

    def data_ptr(self) -> Any:
        raise Untraceable("it reads the address of a tensor")


class Tracer(TorchDispatchMode):
    """A trace: a dispatch mode that implements PyTorch's operators on traced tensors, and records their commands."""

    def __init__(self, builder: Any) -> None:
        super().__init__()
        self.builder = builder
        self.tape = Tape(builder)
        self.sizes = 0
        self.is_writing = True
        self.arguments: list[tuple[torch.Tensor, Traced]] = []
        self.kept: dict[int, int] = {}

    # Operands

    def argument(self, value: Any, is_size: bool) -> Any:
        """Converts an argument; the order of sizes must be that in which csrc/plans/signature.cpp reads them."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (list, tuple)):
            return [self.argument(element, is_size) for element in value]
        return self._size(value) if is_size and type(value) is int else value

    def _size(self, value: int) -> Any:
        self.sizes += 1
        return self.tape.size(self.sizes - 1, value)

    def _tensor(self, tensor: torch.Tensor) -> Traced:
        sizes = [self._size(size) for size in tensor.shape]
        strides = [self._size(stride) for stride in tensor.stride()]
        address, storage = _C.address_of(tensor), tensor.untyped_storage()._cdata
        offset: Any = 0
        memory = None
        for other, traced in self.arguments:
            if other.untyped_storage()._cdata == storage:
                distance = self._size(address - _C.address_of(other))
                if distance % tensor.itemsize != 0:
                    raise Untraceable("the distance of two tensors in one storage is not a multiple of the item size")
                memory, offset = traced.memory, distance // tensor.itemsize
                break
        if memory is None:
            memory = Memory(self, "argument", len(self.arguments), address % _ALIGNMENT)
        found = self.make(memory, sizes, strides, offset, tensor.dtype, tensor.device)
        torch._C._set_conj(found, tensor.is_conj())
        torch._C._set_neg(found, tensor.is_neg())
        found.position = len(self.arguments)
        for other, traced in self.arguments:
            if other is tensor:
                if not (_is_alike(traced, found) and self.same_start(traced, found)):  # leaves guards
                    raise AssertionError("one tensor, passed twice, has different sizes, strides or offsets")
                found = traced
                break
        self.arguments.append((tensor, found))
        if found.numel() == 0:  # PyTorch's checks of empty tensors depend on which sizes are 0
            for size in found.shape:
                bool(size == 0)  # leaves a guard
        return found

    def make(
        self, memory: Memory, sizes: Sequence[Any], strides: Sequence[Any], offset: Any, dtype: Any, device: Any
    ) -> Traced:
        sizes, strides, offset = tuple(map(as_symbol, sizes)), tuple(map(as_symbol, strides)), as_symbol(offset)
        with torch._C._DisableTorchDispatch():
            made: Traced = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                Traced,
                sizes,
                strides=strides,
                storage_offset=offset,
                dtype=dtype,
                device=device,
                storage_size=0,  # unused; without it PyTorch would compute the size with symbols
            )
        made.memory, made.layout_known = memory, (torch.Size(sizes), strides, offset)
        return made

    def empty(self, sizes: Sequence[Any], strides: Sequence[Any] | None, dtype: Any, device: Any) -> Traced:
        device = torch.device(device if device is not None else CPU)
        strides = layouts.contiguous(sizes) if strides is None else strides
        if device.type == "meta":
            return self.make(Memory(self, "meta", 0), sizes, strides, 0, dtype, device)
        if device.type != "bp":
            raise Untraceable(f"it creates a tensor on {device}")
        last: Any = 0
        for size, stride in zip(sizes, strides, strict=True):
            if size == 0:
                return self.make(Memory(self, "nothing", -1), sizes, strides, 0, dtype, device)
            last = last + (size - 1) * stride
        memory = Memory(self, "allocation", self.builder.allocate(quantity((last + 1) * dtype.itemsize)))
        return self.make(memory, sizes, strides, 0, dtype, device)

    def freed(self, index: int) -> None:
        if self.is_writing:
            self.builder.free(index)

    # Queries about memory, documented in `runtime`

    def storage_of(self, tensor: Any) -> Any:
        return tensor.memory

    def same_start(self, one: Any, other: Any) -> bool:
        return one.memory is other.memory and bool(
            one.storage_offset() * one.itemsize == other.storage_offset() * other.itemsize
        )

    def is_aligned(self, tensor: Any, size: int) -> bool:
        address = tensor.memory.alignment + tensor.storage_offset() * tensor.itemsize
        return bool(address % size == 0)

    def check_overlaps(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Accepts tensors that are disjoint or identical. Otherwise ends the trace: each call needs its own check."""
        for output in outputs:
            ordered = sorted(zip(output.stride(), output.shape, strict=True), key=lambda pair: number_now(pair[0]))
            reach: Any = 0
            for stride, size in ordered:
                if size > 1:
                    if not stride > reach:
                        raise Untraceable("a result may overlap itself")
                    reach = reach + (size - 1) * stride
            for given in inputs:
                if (
                    given is not output
                    and given.memory is output.memory
                    and not (_is_alike(given, output) and self.same_start(given, output))
                ):
                    raise Untraceable("a result shares memory with an operand")

    # Commands

    def keep_in_plan(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self.kept:
            self.kept[id(tensor)] = self.builder.keep(tensor)

    def place(self, tensor: torch.Tensor) -> tuple[str, int, Any]:
        """Describes a tensor's memory for `_C.PlanBuilder`: base, index and offset in bytes."""
        if not isinstance(tensor, Traced):
            if id(tensor) not in self.kept:
                raise Untraceable("it uses a tensor from outside the call")
            return "kept", self.kept[id(tensor)], 0
        if tensor.memory.base not in ("argument", "allocation"):
            raise Untraceable("it uses the memory of a meta tensor or an empty tensor")
        if tensor.is_conj() or tensor.is_neg():
            raise Untraceable("it uses a tensor with its conjugate or negative bit set")
        return tensor.memory.base, tensor.memory.index, quantity(tensor.storage_offset() * tensor.itemsize)

    def launch(
        self,
        kernel: Any,
        arguments: Sequence[Any],
        global_size: Sequence[Any],
        group_size: Sequence[int],
        *,
        dynamic_shared_memory: int,
        cluster: Sequence[int],
        cooperative: bool,
    ) -> None:
        self.builder.launch(
            kernel, self._given(arguments), [quantity(one) for one in global_size], [int(one) for one in group_size],
            dynamic_shared_memory, cluster, cooperative,
        )  # fmt: skip

    def call_on_queue(self, function: Any, arguments: Sequence[Any]) -> None:
        self.builder.call_on_queue(function, self._given(arguments))

    def call_library(self, function: Any, arguments: Sequence[Any]) -> None:
        self.builder.call_library(function, self._given(arguments))

    def _given(self, arguments: Sequence[Any]) -> list[Any]:
        return [self.place(one) if isinstance(one, torch.Tensor) else quantity(one) for one in arguments]

    def call_on_cpu(self, name: str, values: Sequence[Any]) -> None:
        def described(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                place = self.place(value)
                sizes, strides = ([quantity(one) for one in numbers] for numbers in (value.shape, value.stride()))
                return place, value.dtype, sizes, strides
            if isinstance(value, (list, tuple)):
                return [described(element) for element in value]
            return int(value) if isinstance(value, torch.SymInt) else value

        self.builder.call_on_cpu(name, [described(value) for value in values])

    # Operators

    def __torch_dispatch__(
        self, overload: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((list(args), kwargs))
        if not any(_is_traced(value) for value in leaves):
            return overload(*args, **kwargs)  # no traced operand, for example a table on the CPU
        with self:
            handler = views.HANDLERS.get(overload)
            if handler is not None:
                return handler(self, *args, **kwargs)
            composed = overload.decompose(*args, **kwargs)
            if composed is not NotImplemented:
                return composed
            tensors = [value for value in leaves if isinstance(value, Traced)]
            if tensors and all(tensor.memory.base == "meta" for tensor in tensors):
                return self._meta(overload, args, kwargs)
            return self._planned(overload, args, kwargs)

    def _meta(self, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        def ask(given: Sequence[Any]) -> tuple[Any, ...]:
            positional, named = shape_rules.by_name(overload, given)
            returned = overload(*positional, **named)
            return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)

        found = shape_rules.results(self, overload, overload, _in_order(overload, args, kwargs), ask)
        return found[0] if len(overload._schema.returns) == 1 and len(found) == 1 else found

    def _planned(self, overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = registry.full_name(overload)
        if name not in registry.planned:
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSED):
                return overload._op_dk(_COMPOSED, *args, **kwargs)  # its operators are dispatched to this mode
            raise Untraceable(f"it calls {name}, which has no planner")
        values = _in_order(overload, args, kwargs)
        for position, argument in enumerate(overload._schema.arguments):
            value = values[position]
            if isinstance(value, (int, float)) and isinstance(argument.type, torch.TensorType):
                values[position] = self.builder.number(value, for_tensor=True)
            elif argument.name in registry.passed[name] and isinstance(value, (int, float, complex, *SYMBOLS)):
                values[position] = self.builder.number(quantity(value))
        return registry.planned[name](*values)


def _is_traced(value: Any) -> bool:
    """Whether the value belongs to a trace: a traced tensor, a symbol, or the device of a new tensor."""
    if isinstance(value, torch.device):
        return value.type in ("bp", "meta")
    return isinstance(value, (Traced, *SYMBOLS))


def _in_order(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments in the order of the schema."""
    return [
        args[position] if position < len(args) else kwargs.get(argument.name, _default(argument))
        for position, argument in enumerate(overload._schema.arguments)
    ]


def _default(argument: Any) -> Any:
    """The argument's default value, converted to a dtype if the schema has a dtype as a number."""
    value = argument.default_value
    if isinstance(value, int) and "ScalarType" in str(argument.real_type):
        return torch.ops.aten.empty.memory_format([0], dtype=value).dtype
    return value


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two tensors have the same sizes and strides. Leaves guards."""
    return one.dim() == other.dim() and all(
        bool(a == b) for a, b in zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=True)
    )


# Errors of a planner that rejects the call. The planner runs next with the call's own numbers, and then raises the same
# error, or accepts them. Python raises a TypeError for an operation that symbols do not implement.
_REFUSALS = (RuntimeError, IndexError, ValueError, ZeroDivisionError, TypeError)


def _is_refusal(error: Exception) -> bool:
    """Whether the planner rejects the call. True also if PyTorch needs a method that `Node` does not implement."""
    return isinstance(error, _REFUSALS) or (isinstance(error, AttributeError) and isinstance(error.obj, Node))


def trace(planner: Callable[..., Any], arguments: list[tuple[Any, bool]], builder: Any, results: int) -> str:
    """Traces a planner and writes its dynamic-shape plan.

    Args:
        planner: the planner.
        arguments: (argument, whether the schema says that it is a size). The list is emptied.
        builder: a `_C.PlanBuilder` for the call.
        results: the number of results in the schema.

    Returns:
        Why there is no such plan; "" if there is one.

    Raises:
        Exception: the planner's error, unless it is one with which planners reject a call.
    """
    handled = sys.exc_info()[1]
    tracer = Tracer(builder)
    outer, _here.tracer = current(), tracer
    try:
        given = [tracer.argument(value, is_size) for value, is_size in arguments]
        with tracer:
            returned = planner(*given)
        tracer.is_writing = False  # tensors that are released from here on are results, which outlive the call
        if results:
            _write_results(tracer, tuple(returned) if results > 1 else (returned,))
        del given, returned
    except Untraceable as reason:
        return f"cannot be traced: {reason}"
    except _C.RunOnCPU as reason:
        return f"runs on the CPU: {reason}"
    except Exception as error:
        _raise_interrupt(error, handled)
        if not _is_refusal(error):
            raise  # a bug in the planner
        return f"{type(error).__name__} in the trace: {str(error).partition(chr(10))[0]}"
    finally:
        _here.tracer = outer  # first, before any call in which Ctrl-C can arrive
        tracer.is_writing = False
        # Do not keep the call's tensors alive: the trace and its tensors are a reference cycle, and a debugger can hold
        # this frame.
        tracer.arguments.clear()
        arguments.clear()
    return ""


def _raise_interrupt(error: BaseException, handled: BaseException | None) -> None:
    """Raises a KeyboardInterrupt or the like from which `error` followed.

    PyTorch's dispatch modes raise errors of their own on exit if they were interrupted on entry. Exceptions that were
    being handled before the trace are ignored.
    """
    behind: BaseException | None = error
    while behind is not None and behind is not handled:
        if not isinstance(behind, Exception):
            raise behind
        behind = behind.__context__


def _write_results(tracer: Tracer, returned: Any) -> None:
    for one in returned:
        if isinstance(one, list):
            tracer.builder.result([_described(element) for element in one], "list")
        elif one is None or isinstance(one, torch.Tensor):
            tracer.builder.result(_described(one), "tensor")
        else:
            raise Untraceable(f"it returns {type(one).__name__}")


def _described(tensor: Any) -> Any:
    """Describes a result for `_C.PlanBuilder.result`."""
    if tensor is None:
        return None
    if not isinstance(tensor, Traced) or tensor.memory.base not in ("argument", "allocation", "nothing"):
        raise Untraceable("it returns memory from outside the call")
    if tensor.position is not None:
        return tensor.position
    if tensor.is_conj() or tensor.is_neg():
        raise Untraceable("it returns a tensor with its conjugate or negative bit set")
    base = "argument" if tensor.memory.base == "argument" else "allocation"
    sizes, strides = ([quantity(one) for one in numbers] for numbers in (tensor.shape, tensor.stride()))
    return base, tensor.memory.index, tensor.dtype, sizes, strides, quantity(tensor.storage_offset())
