"""Declares operators: decorators that register a planner for the overloads that it implements."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import torch
from torch._ops import OpOverload

from torch_backplane import _C
from torch_backplane.kernels.dialects import MissingOperation
from torch_backplane.kernels.dtypes import FACTS
from torch_backplane.planning import registry
from torch_backplane.planning.call import Call, Form, flatten
from torch_backplane.planning.refused_dtypes import refused_dtypes

Planner = Callable[..., Any]
Dtypes = Literal["real", "complex", "any"]
# For each argument whose value selects a kernel, by its name: the values that have special kernels.
Static = Mapping[str, Collection[float]]

_parts = torch.library.Library("backplane", "FRAGMENT")  # kept alive, as it unregisters its operators when destroyed

# Every declared planner, by the operator's full name, for the tools.
declared: dict[str, Planner] = {}
# For each of them the numbers that select a kernel. All other numbers are kernel arguments.
static_numbers: dict[str, Static] = {}
_hints: dict[tuple[int, str], Any] = {}


def operator(
    *names: str,
    passed_through: Sequence[str] = (),
    by_value: Sequence[str] = (),
    sizes: Sequence[str] = (),
    static: Static | None = None,
    checks: Sequence[str] = (),
    variants: bool = True,
    dtypes: Dtypes = "real",
    one_dtype: Sequence[str] = (),
) -> Callable[[Planner], Planner]:
    """Decorator that registers a planner for operators and their in-place and `out=` variants.

    The planner is called as `planner(call, *arguments)`, with the arguments of the functional form in the order of the
    schema. It returns what the operator returns; `call.outputs()` are the tensors to write to.

    Args:
        names: overloads, such as "add.Tensor" for aten, or "namespace::name".
        passed_through: arguments of type int or float that only become kernel arguments. The planner gets them as
            `Number`s, and one plan serves all their values. Arguments of type Scalar are always passed through, unless
            `by_value` or `sizes` lists them.
        by_value: arguments of type Scalar whose value the planner reads. Each value gets its own plan.
        sizes: arguments of type Scalar from which the planner computes sizes. A dynamic-shape plan serves other
            integers, too.
        static: for each number that has special kernels for some values, its name and these values, such as
            `{"exponent": (0.5, 2)}`. All other numbers become kernel arguments, even if the planner reads them, so
            another value never builds another kernel.
        checks: conditions that PyTorch requires of numbers, such as "lambd >= 0", "low <= high", "not p < 0",
            "lambd <= finite(self)" or "slope >= 0 if is_result". The left side is an argument. The right side is a
            number, another argument, or `finite(tensor)` or `lowest(tensor)`: the greatest or lowest number of the
            tensor's dtype. `if` names a bool or a list argument, optionally after `not`. Every call is checked,
            including replayed ones. If a check fails, PyTorch's CPU kernel raises the error.
        variants: also register the in-place and `out=` overloads.
        dtypes: tensor dtypes for which the planner is called; with others the call runs on the CPU. "real": bool,
            integers and floating-point numbers. "complex": these and complex numbers. "any": all dtypes, including
            those that kernels cannot compute with.
        one_dtype: arguments that PyTorch requires to have one dtype, if its meta function does not check this. If their
            dtypes differ, PyTorch's CPU kernel raises the error.

    Raises:
        ValueError: PyTorch has no such operator, or composes it of others; `static` names an unknown argument; a check
            is malformed.
        TypeError: the planner takes too few arguments, or has an annotation that cannot be resolved.
    """

    declaration = _Declaration(passed_through, by_value, sizes, static or {}, checks, dtypes, one_dtype)

    def decorate(planner: Planner) -> Planner:
        for name in names:
            functional = find(name)
            for overload in overloads_of(functional) if variants else [functional]:
                _register(overload, functional, planner, declaration)
        return planner

    return decorate


def part(schema: str, **declared: Any) -> Callable[[Planner], OpOverload]:
    """Decorator that makes a part of a planner an internal operator.

    A planner that reads a value from device memory runs at every call. Its parts before and after the read are
    operators of their own, whose plans are replayed.

    Args:
        schema: arguments and results, such as "(Tensor mask) -> Tensor". The operator has the name of the decorated
            function, which is called like a planner.
        declared: arguments of `operator`.

    Returns:
        The operator, to call with the arguments of the schema.
    """

    def decorate(planner: Planner) -> OpOverload:
        name = planner.__name__
        _parts.define(name + schema)
        operator(f"backplane::{name}", variants=False, **declared)(planner)
        return find(f"backplane::{name}")

    return decorate


def find(name: str) -> OpOverload:
    """Finds the overload with a name such as "add.Tensor", "relu" or "namespace::name.overload".

    Raises:
        ValueError: PyTorch has no overload of this name.
    """
    namespace, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    found = getattr(packet, overload or "default", None) if packet is not None else None
    if found is None:
        raise ValueError(f"PyTorch has no operator {name}")
    return found


def overloads_of(functional: OpOverload) -> list[OpOverload]:
    """The overload, and its in-place and `out=` variants: those whose other arguments are the same."""
    found = [functional]
    namespace, _, base = functional._schema.name.partition("::")
    wanted = _plain_arguments(functional)
    for name in (base, base + "_"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload_name in packet.overloads() if packet is not None else ():
            overload = getattr(packet, overload_name)
            writes = any(argument.is_write for argument in overload._schema.arguments)
            # Generated by PyTorch: calls the functional form, and copies the result to an `out=` of the same dtype.
            composed = torch.Tag.generated in overload.tags and any(one.is_out for one in overload._schema.arguments)
            if overload is not functional and writes and not composed and _plain_arguments(overload) == wanted:
                found.append(overload)
    return found


def _plain_arguments(overload: OpOverload) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in overload._schema.arguments if not one.is_out]


class _Declaration(NamedTuple):
    """The arguments of `operator`."""

    passed_through: Sequence[str]
    by_value: Sequence[str]
    sizes: Sequence[str]
    static: Static
    checks: Sequence[str]
    dtypes: Dtypes
    one_dtype: Sequence[str]


def _register(overload: OpOverload, functional: OpOverload, planner: Planner, declaration: _Declaration) -> None:
    passed_through, by_value, sizes, static, checks, dtypes, one_dtype = declaration
    name = registry.full_name(overload)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    known = ("CPU", "PrivateUse1")
    if has_kernel(name, "CompositeImplicitAutograd") and not any(has_kernel(name, key) for key in known):
        # A kernel for bp would stop autograd from differentiating the composition, on host devices, too.
        raise ValueError(f"{name} is CompositeImplicitAutograd: declare the operators that it is composed of")

    in_memory = in_memory_only(planner, functional)
    names = [one.name for one in functional._schema.arguments if not one.is_out]
    if unknown := set(static) - set(names):
        raise ValueError(f"{name} has no argument {', '.join(sorted(unknown))}")
    alike = [names.index(one) for one in one_dtype]
    form = Form(overload, functional)
    refused = refused_dtypes(registry.full_name(functional))
    supported = {dtype for dtype in FACTS if dtypes == "complex" or not dtype.is_complex}
    without_numbers = [position for position, tensors_only in enumerate(in_memory) if tensors_only]

    def run(*arguments: Any) -> Any:
        call = Call(form, arguments)
        inputs = call.inputs
        for position in without_numbers:
            value = inputs[position]
            if isinstance(value, _C.Number) or (
                isinstance(value, (list, tuple)) and any(isinstance(one, _C.Number) for one in flatten(value))
            ):
                raise _C.RunOnCPU("a zero-dimensional CPU tensor where the kernel needs a tensor of the device")
        for tensor in call.tensors if dtypes != "any" else ():
            if tensor.dtype not in supported:
                check_supported(tensor.dtype)
                raise _C.RunOnCPU(f"its kernel does not support {tensor.dtype}".replace("torch.", ""))
        if refused and call.tensors and call.tensors[0].dtype in refused:
            raise _C.Refused(f"{call.tensors[0].dtype}".removeprefix("torch."))
        if alike:
            given = [inputs[position] for position in alike]
            if len({one.dtype for one in given if isinstance(one, (torch.Tensor, _C.Number))}) > 1:
                raise _C.Refused("tensors of different dtypes")
        try:
            return call.finish(planner(call, *inputs))
        except MissingOperation as error:
            raise MissingOperation(f"{name}: {error}") from error

    _C.set_planner(
        name,
        run,
        passed_through=list(passed_through),
        by_value=[*by_value, *sizes],
        sizes=list(sizes),
        checks=[_parsed(check) for check in checks],
    )
    declared[name] = planner
    registry.planned[name] = run
    static_numbers[name] = dict(static)
    registry.passed[name] = [
        one.name
        for one in overload._schema.arguments
        if one.name in passed_through or ("number" in str(one.type) and one.name not in (*by_value, *sizes))
    ]


def _parsed(check: str) -> tuple[str, str, float | str, str]:
    """Parses a check: "lambd >= 0" gives ("lambd", ">=", 0.0, ""). Raises ValueError if it is not a comparison."""
    found = re.fullmatch(r"(not )?(\w+) (<=?|>=?|==|!=) (\S+)( if (?:not )?\w+)?", check)
    if found is None:
        raise ValueError(f"a check must be a comparison such as 'lambd >= 0', but got {check!r}")
    negated, argument, comparison, bound, condition = found.groups()
    condition = (condition or "").removeprefix(" if ")
    named = bound.isidentifier() or re.fullmatch(r"(finite|lowest)\(\w+\)", bound)
    return argument, (negated or "") + comparison, bound if named else float(bound), condition


def in_memory_only(planner: Planner, functional: OpOverload) -> list[bool]:
    """For each argument of the functional form: whether it takes tensors, and the planner accepts no `Number` for it.

    Zero-dimensional CPU tensors arrive as `Number`s, alone and in lists. A planner accepts them if the parameter is
    annotated with Any or Number.
    """
    parameters = list(inspect.signature(planner).parameters.values())[1:]
    found = []
    for argument in functional._schema.arguments:
        if argument.is_out:
            continue
        if not parameters:
            raise TypeError(f"the planner of {functional} takes too few arguments: {argument.name} is missing")
        parameter = parameters[0] if parameters[0].kind is parameters[0].VAR_POSITIONAL else parameters.pop(0)
        found.append("Tensor" in str(argument.type) and not admits_number(resolved(planner, parameter)))
    return found


def resolved(planner: Planner, parameter: inspect.Parameter) -> Any:
    """Resolves the parameter's annotation, which can be text or an alias; None if it has none."""
    if parameter.annotation is parameter.empty:
        return None
    names = getattr(inspect.unwrap(planner), "__globals__", None)
    key = (id(names), str(parameter.annotation))  # most planners of a module use the same few annotations
    if key not in _hints:
        holder = SimpleNamespace(__annotations__={"hint": parameter.annotation})
        try:
            _hints[key] = get_type_hints(holder, globalns=names)["hint"]
        except NameError as error:
            message = f"the annotation of {parameter} in a planner cannot be resolved in its module: {error}"
            raise TypeError(message) from error
    return _hints[key]


def admits_number(hint: Any) -> bool:
    """Whether a value with this annotation can be a `Number` or contain one."""
    return hint in (Any, _C.Number) or any(map(admits_number, get_args(hint)))


def check_supported(dtype: torch.dtype) -> None:
    """Leaves the call to the CPU if generated kernels do not support the dtype."""
    if dtype not in FACTS:
        raise _C.RunOnCPU(f"kernels have no {dtype}".replace("torch.", ""))
