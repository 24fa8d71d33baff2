"""Declaring an operator: which overloads a planner serves, and registering it."""

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
# Numbers by whose value a kernel is chosen, by their names: the values that have kernels of their own.
Static = Mapping[str, Collection[float]]

_parts = torch.library.Library("backplane", "FRAGMENT")  # kept: operators are declared for good

# Every planner that was declared, by the operator's full name, for the tools.
declared: dict[str, Planner] = {}
# For each of them the numbers that choose among kernels. All others are arguments of kernels.
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
    """Decorates the planner of the operators `names`, such as "add.Tensor" (of aten; others as "namespace::name").

    The planner is called as `planner(call, *arguments)`, with the arguments of the functional form in the order of the
    schema, and returns what the operator returns; `call.outputs()` are tensors to write to.

    Args:
        passed_through: arguments of type int or float whose values only become kernel arguments: they arrive as
            `Number`s, and another value is no new plan. Those of type Scalar are treated so anyway.
        by_value: arguments of type Scalar that the planner needs to see.
        sizes: likewise, where it computes sizes of them: a dynamic-shape plan serves other integers, too.
        static: the values of numbers for which there are kernels of their own, such as exponents that have a formula
            (`{"exponent": (0.5, 2)}`), by the numbers' names. Any other number is an argument of the kernel, whether
            the planner sees it or not: another value is no kernel to build.
        checks: what PyTorch wants of numbers, such as "lambd >= 0", "low <= high", "not p < 0", "lambd <=
            finite(self)" or "slope >= 0 if is_result": an argument; a comparison; a number, another argument, or of a
            tensor's dtype the greatest `finite` or the `lowest` number; and perhaps a bool or a list, which `not` may
            precede. Each call is held against them, also where it is replayed; where one does not hold, PyTorch's CPU
            kernel has the error.
        variants: also serve the in-place and `out=` overloads.
        dtypes: of tensors for which the planner is called; with others the call is left to the CPU. "real" are bool,
            integers and floating-point, "complex" these and complex numbers, "any" is all that there is, also what
            kernels do not compute with.
        one_dtype: arguments that PyTorch wants to be tensors of one dtype, which its meta function does not look at:
            where they are not, its CPU kernel has the error.
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
    """Decorates what a planner does before or after it has waited for a number from memory. Such a planner runs at
    every call; its parts are operators of their own, with plans, and replayed.

    Args:
        schema: arguments and results, such as "(Tensor mask) -> Tensor". The operator has the name of the function,
            which is called as planners are.
        declared: as for `operator`.

    Returns:
        the operator, to be called with the arguments of the schema.
    """

    def decorate(planner: Planner) -> OpOverload:
        name = planner.__name__
        _parts.define(name + schema)
        operator(f"backplane::{name}", variants=False, **declared)(planner)
        return find(f"backplane::{name}")

    return decorate


def find(name: str) -> OpOverload:
    """The overload "add.Tensor", "relu" or "namespace::name.overload".

    Raises:
        ValueError: PyTorch has none of this name.
    """
    namespace, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    found = getattr(packet, overload or "default", None) if packet is not None else None
    if found is None:
        raise ValueError(f"PyTorch has no operator {name}")
    return found


def overloads_of(functional: OpOverload) -> list[OpOverload]:
    """The overload itself and those that compute the same in place or to `out=`: with the same other arguments."""
    found = [functional]
    namespace, _, base = functional._schema.name.partition("::")
    wanted = _plain_arguments(functional)
    for name in (base, base + "_"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload_name in packet.overloads() if packet is not None else ():
            overload = getattr(packet, overload_name)
            writes = any(argument.is_write for argument in overload._schema.arguments)
            # PyTorch made it of the functional form: that, and a copy to a tensor of just this dtype.
            composed = torch.Tag.generated in overload.tags and any(one.is_out for one in overload._schema.arguments)
            if overload is not functional and writes and not composed and _plain_arguments(overload) == wanted:
                found.append(overload)
    return found


def _plain_arguments(overload: OpOverload) -> list[tuple[str, str]]:
    return [(one.name, str(one.type)) for one in overload._schema.arguments if not one.is_out]


class _Declaration(NamedTuple):
    """As `operator` describes."""

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
        # With a kernel of bp's own, autograd would stop differentiating the composition, on host devices, too.
        raise ValueError(f"{name} is composed of other operators, also for autograd; declare those")

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
                raise _C.RunOnCPU("a CPU tensor without dimensions, where the kernel reads the device's memory")
        for tensor in call.tensors if dtypes != "any" else ():
            if tensor.dtype not in supported:
                check_supported(tensor.dtype)
                raise _C.RunOnCPU(f"its kernel takes no {tensor.dtype}".replace("torch.", ""))
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
    """("lambd", ">=", 0.0, "") of "lambd >= 0". ValueError for anything that is no comparison."""
    found = re.fullmatch(r"(not )?(\w+) (<=?|>=?|==|!=) (\S+)( if (?:not )?\w+)?", check)
    if found is None:
        raise ValueError(f"a check is a comparison such as 'lambd >= 0', and got {check!r}")
    negated, argument, comparison, bound, condition = found.groups()
    condition = (condition or "").removeprefix(" if ")
    named = bound.isidentifier() or re.fullmatch(r"(finite|lowest)\(\w+\)", bound)
    return argument, (negated or "") + comparison, bound if named else float(bound), condition


def in_memory_only(planner: Planner, functional: OpOverload) -> list[bool]:
    """For each argument of the functional form: whether the planner takes tensors there and no `Number`, which is what
    CPU tensors without dimensions arrive as, alone and in lists. It takes them where it says Any or Number.
    """
    parameters = list(inspect.signature(planner).parameters.values())[1:]
    found = []
    for argument in functional._schema.arguments:
        if argument.is_out:
            continue
        if not parameters:
            raise TypeError(f"the planner of {functional} takes too few arguments: it has none for {argument.name}")
        parameter = parameters[0] if parameters[0].kind is parameters[0].VAR_POSITIONAL else parameters.pop(0)
        found.append("Tensor" in str(argument.type) and not admits_number(resolved(planner, parameter)))
    return found


def resolved(planner: Planner, parameter: inspect.Parameter) -> Any:
    """The annotation itself, also where it is text, or the name of an alias; None where there is none."""
    if parameter.annotation is parameter.empty:
        return None
    names = getattr(inspect.unwrap(planner), "__globals__", None)
    key = (id(names), str(parameter.annotation))  # most planners of a module say the same of most arguments
    if key not in _hints:
        holder = SimpleNamespace(__annotations__={"hint": parameter.annotation})
        try:
            _hints[key] = get_type_hints(holder, globalns=names)["hint"]
        except NameError as error:
            said = f"the annotation of {parameter} in a planner is not known to its module: {error}"
            raise TypeError(said) from error
    return _hints[key]


def admits_number(hint: Any) -> bool:
    """Whether what is declared so may be a `Number`, or hold one."""
    return hint in (Any, _C.Number) or any(map(admits_number, get_args(hint)))


def check_supported(dtype: torch.dtype) -> None:
    """Leaves the call to the CPU where generated kernels have no such dtype."""
    if dtype not in FACTS:
        raise _C.RunOnCPU(f"kernels have no {dtype}".replace("torch.", ""))
