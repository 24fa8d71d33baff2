"""`torch_backplane.elementwise`: builds an elementwise function on tensors from a Python formula over scalars.

Each function is a PyTorch operator in the namespace `backplane`, with one overload for each combination of tensor and
number arguments. Overloads are defined on first use. On devices that run kernels, a planner computes the formula in one
kernel, and later calls replay its plan. On all other devices, PyTorch's operators compute the formula step by step.

(The file is not named elementwise.py because a submodule of that name would shadow the function in the package.)
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.evaluate import evaluate
from torch_backplane.kernels.expression import Formula, Program, trace
from torch_backplane.planning import Call, Number, operator, run_pointwise
from torch_backplane.planning.call import example

NUMBERS = (bool, int, float, complex)
Value = torch.Tensor | bool | int | float | complex

_library = torch.library.Library("backplane", "FRAGMENT")
_numbers = itertools.count()
_lock = threading.Lock()


def elementwise(
    formula: Callable[..., Any] | None = None, *, backward: Callable[..., Any] | None = None, name: str | None = None
) -> Any:
    """Make a function on tensors that computes `formula` for each element. Also usable as a decorator.

    >>> import torch, torch_backplane
    >>> @torch_backplane.elementwise
    ... def leaky(x, y, slope=0.01):
    ...     return torch.where(x > 0, x, x * slope) + y
    >>> leaky(torch.tensor([-1.0, 2.0]), 1, slope=0.5)
    tensor([0.5000, 3.0000])

    On a device that runs kernels, the function is one kernel, however long the formula is. On other devices, PyTorch's
    operators compute it.

    The function broadcasts its arguments and promotes their dtypes, including those of numbers and defaults, as
    `torch.add` does. The whole formula is computed in the promoted dtype (in float32 for float16 and bfloat16). If the
    arguments are integers but the formula needs floats, as division does, it is computed in the default dtype. Results
    have the promoted dtype; results of comparisons are bool.

    Define each function once: its operator lives until the process exits.

    Args:
        formula: A function that takes scalars and returns a scalar, or a tuple of scalars for several results. It is
            called with traced values instead of numbers: it can use Python operators, scalar functions of PyTorch
            (`torch.exp`, `torch.where`) and `torch_backplane.kernels.functions`, but it cannot branch on values.
            Parameters without a default accept tensors and Python numbers, and at least one must be a tensor.
            Parameters with a default accept Python numbers only; other values need no new kernel and no new plan.
        backward: A formula for the gradient. It takes the gradient of each result, then all parameters of `formula`,
            and returns one value for each parameter without a default (None for a parameter without gradient). Without
            it, an argument that requires grad is an error, except under `torch.no_grad()`. A second derivative is
            always an error.
        name: The name used in errors, profiles and kernels. Defaults to the name of `formula`.

    Raises:
        TypeError: `formula` is not a function of scalars: it branches on a value, calls a function that traced values
            do not support, or has unsupported parameters. On a call: an argument is neither a tensor nor a number, or
            kernels do not support its dtype.
        RuntimeError: On a call: shapes do not broadcast, or an argument requires grad and there is no `backward`.
    """
    if formula is None:
        return lambda decorated: elementwise(decorated, backward=backward, name=name)
    return Elementwise(formula, backward=backward, name=name)


class Elementwise:
    """An elementwise function on tensors, as returned by `elementwise`."""

    def __init__(
        self, formula: Callable[..., Any], *, backward: Callable[..., Any] | None = None, name: str | None = None
    ) -> None:
        if not callable(formula):
            raise TypeError(f"elementwise expects a Python function of scalars, but got {type(formula).__name__}")
        functools.update_wrapper(self, formula)
        self.name = name or getattr(formula, "__name__", type(formula).__name__).strip("<>")
        self._signature, self._required, self._defaults = _parameters(self.name, formula)
        self._formula: Formula = self._positional(formula)
        self._programs: dict[torch.dtype, Program] = {}
        self._results = self._count_results()
        self._overloads: dict[tuple[bool, ...], OpOverload] = {}
        plain = re.sub(r"\W", "_", self.name, flags=re.ASCII).strip("_") or "formula"
        self._kernel_name = plain
        self._operator_name = f"elementwise_{plain}_{next(_numbers)}"
        self._gradient = None if backward is None else Gradient(self, backward)

    def __repr__(self) -> str:
        return f"torch_backplane.elementwise({self._described})"

    @property
    def _described(self) -> str:
        parameters = [*self._required, *(f"{one}={default}" for one, default in self._defaults.items())]
        return f"{self.name}({', '.join(parameters)})"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Apply the formula to tensors and numbers."""
        numbers = self._defaults
        if len(arguments) != len(self._required) or named:
            arguments, numbers = self._bind(arguments, named)
        tensors = tuple(isinstance(value, torch.Tensor) for value in arguments)
        if not all(tensors):
            self._check_numbers(arguments)
        overload = self._overloads.get(tensors) or self._define(tensors)
        if torch.is_grad_enabled():
            for value, parameter in zip(arguments, self._required, strict=True):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    if self._gradient is None:
                        raise RuntimeError(
                            f"{self.name} has no derivative, but its argument {parameter} requires grad: "
                            "pass backward= to elementwise, or call it under torch.no_grad()"
                        )
                    return _Differentiable.apply(self, overload, numbers, *arguments)
        return overload(*arguments, *numbers.values())

    def _bind(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        try:
            bound = self._signature.bind(*arguments, **named).arguments
        except TypeError as error:
            raise TypeError(f"{self._described}: {error}") from None
        numbers = {one: bound.get(one, default) for one, default in self._defaults.items()}
        for one, number in numbers.items():
            if not isinstance(number, NUMBERS):
                raise TypeError(f"{self.name}: {one} must be a Python number, but got {type(number).__name__}")
        return tuple(bound[one] for one in self._required), numbers

    # --- the formula

    def _positional(self, formula: Callable[..., Any]) -> Formula:
        """The formula as a function of positional values: the required parameters, then the numbers."""
        required, names = len(self._required), list(self._defaults)

        def arranged(*values: Any) -> Any:
            return formula(*values[:required], **dict(zip(names, values[required:], strict=True)))

        return arranged

    def _count_results(self) -> int:
        """The number of values that the formula returns. TypeError if it cannot be traced for any kind of number."""
        problem: Exception | None = None
        for dtype in (torch.float32, torch.int64, torch.bool):
            try:
                return len(self._program(dtype).results)
            except (TypeError, OverflowError, AttributeError, ValueError) as error:
                problem = problem or error
        raise TypeError(f"elementwise cannot trace {self.name}: {problem}") from problem

    def _program(self, dtype: torch.dtype) -> Program:
        """The formula, computed in `dtype`."""
        if dtype not in self._programs:
            count = len(self._required) + len(self._defaults)
            program = trace(self._formula, [dtype] * count, dtype)
            if program.indices:
                raise TypeError("formulas of elementwise cannot use the position of an element")
            self._programs[dtype] = program
        return self._programs[dtype]

    def dtypes(self, values: Sequence[Value]) -> tuple[torch.dtype, list[torch.dtype]]:
        """Returns (dtype to compute in, dtypes of the results) for tensors and numbers.

        Raises:
            TypeError: kernels or the formula do not support the promoted dtype.
        """
        _, common = elementwise_dtypes(*values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
        candidates = [common]
        if not (common.is_floating_point or common.is_complex):
            # As in PyTorch: bool * 2 is int64, and int / int is of the default dtype.
            candidates += [torch.int64] * (common == torch.bool) + [torch.get_default_dtype()]
        problem: Exception | None = None
        for dtype in candidates:
            try:
                compute = value_dtype(dtype)
                found = self._program(compute).result_dtypes
            except (TypeError, OverflowError) as error:
                problem = problem or error
                continue
            if len(found) != self._results:
                raise TypeError(f"{self.name} returns {len(found)} values of {compute}, but {self._results} of others")
            return compute, [dtype if one == compute else one for one in found]
        raise TypeError(f"{self.name} does not support {common}: {problem}") from problem

    # --- the operator

    def _check_numbers(self, arguments: Sequence[Any]) -> None:
        for value, parameter in zip(arguments, self._required, strict=True):
            if not isinstance(value, (torch.Tensor, *NUMBERS)):
                raise TypeError(
                    f"{self.name}: {parameter} must be a tensor or a Python number, but got {type(value).__name__}"
                )
        if not any(isinstance(value, torch.Tensor) for value in arguments):
            raise TypeError(f"{self.name} needs at least one tensor argument, but got only numbers")

    def _define(self, tensors: tuple[bool, ...]) -> OpOverload:
        """The overload for arguments of these kinds: True for a tensor, False for a number."""
        with _lock:
            if tensors not in self._overloads:
                self._overloads[tensors] = self._define_locked(tensors)
        return self._overloads[tensors]

    def _define_locked(self, tensors: tuple[bool, ...]) -> OpOverload:
        kinds = [*("Tensor" if one else "Scalar" for one in tensors), *("Scalar" for _ in self._defaults)]
        overload = "".join(kind[0] for kind in kinds)
        returned = "Tensor" if self._results == 1 else f"({', '.join(['Tensor'] * self._results)})"
        parameters = ", ".join(f"{kind} x{i}" for i, kind in enumerate(kinds))
        name = f"{self._operator_name}.{overload}"
        _library.define(f"{name}({parameters}) -> {returned}", tags=(torch.Tag.pointwise, torch.Tag.pt2_compliant_tag))
        _library.impl(name, self._on_meta, "Meta")
        _library.impl(name, self._by_operators, "CompositeExplicitAutograd")
        operator(f"backplane::{name}", variants=False)(self._plan)
        return getattr(getattr(torch.ops.backplane, self._operator_name), overload)

    def _on_meta(self, *values: Value) -> Any:
        """Meta tensors with the sizes, strides and dtypes of the results."""
        _, dtypes = self.dtypes(values)
        # Results have the sizes and strides of a sum of the tensors. Adding meta tensors computes them.
        shaped = [(one.shape, one.stride()) for one in values if isinstance(one, torch.Tensor)]
        metas = [torch.empty_strided(*one, device="meta") for one in shaped]
        like = functools.reduce(torch.add, metas[1:], metas[0] + 0)
        return self._returned(
            [torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta") for dtype in dtypes]
        )

    def _by_operators(self, *values: Value) -> Any:
        compute, _ = self.dtypes(values)
        device = next(value.device for value in values if isinstance(value, torch.Tensor))
        arguments = [value if isinstance(value, torch.Tensor) else _tensor(value, device) for value in values]
        found = evaluate(self._program(compute), [one.to(compute) for one in arguments])
        made = self._on_meta(*values)
        outputs = [
            torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device).copy_(value)
            for meta, value in zip(made if self._results > 1 else (made,), found, strict=True)
        ]
        return self._returned(outputs)

    def _plan(self, call: Call, *values: torch.Tensor | Number) -> Any:
        compute, _ = self.dtypes([v if isinstance(v, torch.Tensor) else example(v) for v in values])
        outputs = call.outputs()
        places = [isinstance(value, torch.Tensor) for value in values]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]

        def arranged(*traced: Any) -> Any:
            inputs, scalars = iter(traced[: len(tensors)]), iter(traced[len(tensors) :])
            return self._formula(*(next(inputs) if is_tensor else next(scalars) for is_tensor in places))

        run_pointwise(
            arranged,
            outputs,
            tensors,
            [(value, compute) for value in values if not isinstance(value, torch.Tensor)],
            compute=compute,
            key=(self._operator_name, tuple(places)),
            name=self._kernel_name,
        )
        return self._returned(outputs)

    def _returned(self, tensors: list[torch.Tensor]) -> Any:
        return tensors[0] if self._results == 1 else tuple(tensors)


class Gradient:
    """The gradients of a function's arguments: results of the backward formula, summed over broadcast dimensions."""

    def __init__(self, function: Elementwise, formula: Callable[..., Any]) -> None:
        self.function = function
        self.has = [True] * len(function._required)  # whether each parameter has a gradient; set by tracing

        def some(*values: Any) -> Any:
            grads, rest = values[: function._results], values[function._results :]
            required = len(function._required)
            found = formula(*grads, *rest[:required], **dict(zip(function._defaults, rest[required:], strict=True)))
            found = found if isinstance(found, (tuple, list)) else (found,)
            if len(found) != required:
                raise TypeError(f"the formula returned {len(found)} gradients for {required} parameters")
            self.has = [one is not None for one in found]
            return [one for one in found if one is not None]

        names = [f"grad{i}" for i in range(function._results)] + function._required
        # Numbers are required parameters here, because `__call__` always passes all of them.
        some.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(one, inspect.Parameter.POSITIONAL_ONLY) for one in [*names, *function._defaults]]
        )
        self.compute = Elementwise(some, name=f"{function.name}_backward")

    def __call__(
        self, grads: Sequence[torch.Tensor], arguments: Sequence[Any], numbers: Mapping[str, Any]
    ) -> list[torch.Tensor | None]:
        """Return the gradient of each argument."""
        found = self.compute(*grads, *arguments, *numbers.values())
        left = iter(found if isinstance(found, tuple) else (found,))
        grads_of: list[torch.Tensor | None] = []
        for has, argument in zip(self.has, arguments, strict=True):
            one = next(left) if has else None
            if one is None or not isinstance(argument, torch.Tensor):
                grads_of.append(None)
            else:
                one = one.sum_to_size(argument.shape)
                # The gradient of a real argument is the real part of the complex gradient.
                grads_of.append((one if argument.is_complex() else one.real).to(argument.dtype))
        return grads_of


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(function: Elementwise, overload: OpOverload, numbers: Mapping[str, Any], *arguments: Any) -> Any:
        return overload(*arguments, *numbers.values())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function, _, ctx.numbers, *arguments = inputs
        ctx.arguments = [None if isinstance(one, torch.Tensor) else one for one in arguments]
        ctx.save_for_backward(*(one for one in arguments if isinstance(one, torch.Tensor)))
        outputs = output if isinstance(output, tuple) else (output,)
        inexact = (one.is_floating_point() or one.is_complex() for one in outputs)
        ctx.mark_non_differentiable(
            *(one for one, differentiable in zip(outputs, inexact, strict=True) if not differentiable)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if one is None else one for one in ctx.arguments]
        with torch.no_grad():
            found = ctx.function._gradient(grads, arguments, ctx.numbers)
        sources = [one for one in (*grads, *ctx.saved_tensors) if one.requires_grad]
        if torch.is_grad_enabled() and sources:
            # torch's once_differentiable does not work here: it ignores whether saved tensors require grad.
            found = [one if one is None else _Once.apply(ctx.function.name, one, *sources) for one in found]
        return None, None, None, *found


class _Once(torch.autograd.Function):
    """Makes a gradient depend on `sources`; differentiating it raises an error."""

    @staticmethod
    def forward(name: str, grad: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(f"{ctx.name} has no second derivative: elementwise supports first derivatives only")


def _tensor(number: bool | int | float | complex, device: torch.device) -> torch.Tensor:
    """The exact number as a tensor, so that converting the tensor converts the number as PyTorch does."""
    dtype = {float: torch.float64, complex: torch.complex128}.get(type(number))
    return torch.tensor(number, dtype=dtype, device=device)


def _parameters(name: str, formula: Callable[..., Any]) -> tuple[inspect.Signature, list[str], dict[str, Any]]:
    """Returns (signature, names without a default, defaults by name)."""
    try:
        signature = inspect.signature(formula)
    except ValueError:
        raise TypeError(f"elementwise cannot inspect the parameters of {name}: wrap it in a Python function") from None
    required, defaults = [], {}
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise TypeError(f"elementwise needs a fixed number of parameters: {name} has {parameter}")
        if parameter.default is not inspect.Parameter.empty:
            if not isinstance(parameter.default, NUMBERS):
                raise TypeError(
                    f"a default must be a number: parameter {parameter.name} of {name} has {parameter.default!r}"
                )
            defaults[parameter.name] = parameter.default
        elif parameter.kind == inspect.Parameter.KEYWORD_ONLY:
            raise TypeError(f"keyword-only parameters need a number as default: {parameter.name} of {name} has none")
        else:
            required.append(parameter.name)
    if not required:
        raise TypeError(f"elementwise needs a parameter without a default, for a tensor: {name}{signature} has none")
    return signature, required, defaults
