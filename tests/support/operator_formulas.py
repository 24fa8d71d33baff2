"""Runs the operator formulas of `torch_backplane/operators` in OpenCL C kernels, many formulas per kernel.

The operator modules are executed with a replacement of `torch_backplane.planning` that records the formulas. This
needs no bp device: it compares each formula with PyTorch's CPU kernel of the operator.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_runners
import template_runners
import torch

import torch_backplane.operators
from torch_backplane import _C, planning
from torch_backplane.kernels import Target
from torch_backplane.kernels.dtypes import value_dtype

# Operators whose planners use more of a call than `Call` provides. Only tests/opencl tests them.
NEEDS_THE_ENGINE = {
    *("masked_fill.Scalar", "masked_select", "masked_scatter_", "isin.Tensor_Tensor", "isin.Scalar_Tensor"),
    *("_add_relu.Scalar", "aminmax", "_aminmax", "_aminmax.dim", "max.dim", "min.dim", "rrelu_with_noise"),
    *("_conj_physical", "conj_physical.out", "conj_physical_", "glu_jvp", "glu_backward_jvp"),
}
FOLDER = Path(torch_backplane.operators.__path__[0])


@dataclass
class Tables:
    formulas: dict[str, Callable[..., Any]] = field(default_factory=dict)
    passed_through: dict[str, Sequence[str]] = field(default_factory=dict)
    planners: dict[str, Callable[..., Any]] = field(default_factory=dict)


class Call:
    """Replaces the engine's call object for planners. Its outputs have the properties of the CPU kernel's results."""

    device = torch.device("cpu")
    is_in_place = False
    written: Sequence[torch.Tensor] = ()

    def __init__(self, name: str, expected: Sequence[torch.Tensor]) -> None:
        self.functional = self.overload = overload(name)
        self.made = tuple(torch.empty_like(tensor) for tensor in expected)

    def meta(self, overload: Any = None) -> tuple[torch.Tensor, ...]:
        return self.made

    def check_each_once(self) -> None:
        """There are no out= tensors to check."""

    def outputs(self, like: Any = None, **_: bool) -> tuple[torch.Tensor, ...]:
        return self.made


def read(*files: str) -> Tables:
    """Returns the declarations in the operator modules with these names (without .py)."""
    tables = Tables()
    recorder = types.ModuleType("torch_backplane.planning")

    def pointwise(
        name: str,
        formula: Callable[..., Any],
        *,
        by_value: Sequence[str] = (),
        passed_through: Sequence[str] = (),
        static: Mapping[str, Collection[float]] | None = None,
        checks: Sequence[str] = (),
        dtypes: str = "real",
        fitting: Any = "computed",
        one_dtype: Sequence[str] = (),
        idempotent: bool = False,
    ) -> None:
        assert name not in tables.formulas, f"{name} is declared twice"
        tables.formulas[name] = formula
        tables.passed_through[name] = passed_through
        assert not by_value
        assert not static

    def operator(*names: str, **_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def declare(planner: Callable[..., Any]) -> Callable[..., Any]:
            for name in names:
                assert name not in tables.planners, f"{name} is declared twice"
                if name not in NEEDS_THE_ENGINE:
                    tables.planners[name] = planner
            return planner

        return declare

    for name, value in {
        **vars(planning),  # for planners that these tests do not call
        "pointwise": pointwise,
        "operator": operator,
        "part": lambda schema, **_: lambda planner: planner,
        "run_pointwise": run_pointwise,
        "run_reduction": run_reduction,
        "plan_pointwise": plan_pointwise,
        # These report errors in device memory, which tests/opencl/test_bad_input.py tests.
        "error_words": lambda device: None,
        "expect_values": lambda *expected: None,
        "run_template": lambda *arguments, **options: None,
        "check_number": lambda number, dtype: None,
        "check_fits": lambda dtype, *numbers: None,
        "each_once": lambda tensor: tensor,
        "copy_elements": lambda destination, source: destination.copy_(source),
        "Call": Call,
        "Number": _C.Number,
        "Refused": NotImplementedError,
        "RunOnCPU": NotImplementedError,
    }.items():
        setattr(recorder, name, value)
    with _instead_of_planning(recorder):
        for name in files:
            spec = importlib.util.spec_from_file_location(f"formulas_of_{name}", FOLDER / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return tables


@contextmanager
def _instead_of_planning(recorder: types.ModuleType) -> Iterator[None]:
    name = recorder.__name__
    before = sys.modules.get(name)
    sys.modules[name] = recorder
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def plan_pointwise(name: str, formula: Any, call: Call, values: Sequence[Any], **_: Any) -> torch.Tensor:
    """Computes a formula of tensors, numbers and plain values in the dtype of the result."""
    dtype = value_dtype(call.made[0].dtype)
    inputs = [value for value in values if isinstance(value, torch.Tensor)]
    of_floats = dtype if dtype.is_floating_point else torch.float32
    scalars = [(one, of_floats if isinstance(one, float) else dtype) for one in values if _is_number(one)]

    def arranged(*traced: Any) -> Any:
        tensors, numbers = iter(traced[: len(inputs)]), iter(traced[len(inputs) :])
        return formula(
            *(
                next(tensors) if isinstance(value, torch.Tensor) else next(numbers) if _is_number(value) else value
                for value in values
            )
        )

    run_pointwise(arranged, call.made, inputs, scalars, key=name, compute=dtype)
    return call.made[0]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def run_pointwise(
    formula: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[tuple[float, torch.dtype]] = (),
    *,
    key: Hashable,
    compute: torch.dtype | None = None,
    name: str = "pointwise",
) -> None:
    kernel_runners.run_pointwise(formula, inputs, outputs, compute=compute, scalars=scalars, width=1)


def run_reduction(
    definition: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    scalars: Sequence[float] = (),
    *,
    key: Hashable,
    compute: torch.dtype | None = None,
    name: str = "reduction",
) -> None:
    target = Target(float64=kernel_runners.opencl()[2], compute_units=4)
    template_runners.run_reduction(target, definition, inputs, dims, outputs, scalars, compute=compute)


@dataclass
class Case:
    """A call of an operator: `arguments` in schema order, without `out`; `expected` is the CPU kernel's result."""

    name: str
    arguments: tuple[Any, ...]
    expected: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        shown = (f"<{a.dtype}>" if isinstance(a, torch.Tensor) else repr(a) for a in self.arguments)
        return f"{self.name}({', '.join(shown)})"


def overload(name: str) -> Any:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


def arguments_of(name: str) -> list[Any]:
    """Returns the schema's arguments that a formula receives."""
    return [a for a in overload(name)._schema.arguments if a.name not in ("out", "generator")]


def call_cpu(name: str, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    operator, schema = overload(name), arguments_of(name)
    positional = [value for value, a in zip(arguments, schema, strict=True) if not a.kwarg_only]
    named = {a.name: value for value, a in zip(arguments, schema, strict=True) if a.kwarg_only}
    result = operator(*positional, **named)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def compute_dtype(case: Case) -> torch.dtype:
    """Returns the result's dtype, or the promoted dtype of the arguments if the result is bool."""
    dtype = case.expected[0].dtype
    if dtype == torch.bool:
        schema = arguments_of(case.name)
        tensors = [a for a in case.arguments if isinstance(a, torch.Tensor)]
        numbers = [a for a, s in zip(case.arguments, schema, strict=True) if _is_scalar(s)]
        dtype = torch.result_type(tensors[0], tensors[-1])
        for number in numbers:
            dtype = torch.result_type(torch.empty(1, dtype=dtype), number)
    return value_dtype(dtype)


def _is_scalar(schema: Any) -> bool:
    return str(schema.type) in ("number", "Optional[number]")


def run(tables: Tables, cases: Sequence[Case]) -> list[tuple[torch.Tensor, ...]]:
    """Computes all cases with one kernel. All tensors must have the same shape."""
    inputs: list[torch.Tensor] = []
    scalars: list[tuple[float, torch.dtype]] = []
    wirings: list[list[tuple[str, Any]]] = []
    for case in cases:
        wiring: list[tuple[str, Any]] = []
        for value, schema in zip(case.arguments, arguments_of(case.name), strict=True):
            if isinstance(value, torch.Tensor):
                if not any(value is known for known in inputs):
                    inputs.append(value)
                place = next(i for i, known in enumerate(inputs) if known is value)
                stays = schema.name in ("condition", "mask")
                wiring.append(("input", (place, value_dtype(value.dtype) if stays else compute_dtype(case))))
            elif value is not None and (_is_scalar(schema) or schema.name in tables.passed_through[case.name]):
                wiring.append(("scalar", len(scalars)))
                scalars.append((value, compute_dtype(case)))
            else:
                wiring.append(("plain", value))
        wirings.append(wiring)

    def formula(*traced: Any) -> list[Any]:
        results: list[Any] = []
        for case, wiring in zip(cases, wirings, strict=True):
            given = []
            for kind, what in wiring:
                if kind == "input":
                    given.append(traced[what[0]].to(what[1]))
                else:
                    given.append(traced[len(inputs) + what] if kind == "scalar" else what)
            try:
                result = tables.formulas[case.name](*given)
            except TypeError as error:
                raise TypeError(f"{case}: {error}") from error
            results += result if isinstance(result, tuple) else (result,)
        return results

    outputs = [tuple(torch.empty_like(tensor) for tensor in case.expected) for case in cases]
    flat = [tensor for tensors in outputs for tensor in tensors]
    kernel_runners.run_pointwise(formula, inputs, flat, scalars=scalars, width=1)
    return outputs
