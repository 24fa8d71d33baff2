"""Reads the tables of `torch_backplane/operators`, and computes what they declare by way of OpenCL C, many at a time.

The tables are executed with a `torch_backplane.planning` of our own, which keeps the formulas. Nothing here needs the
bp device: what is tested is what a formula says, against PyTorch's CPU kernel of that operator.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kernel_runners
import torch

import torch_backplane.operators
from torch_backplane.kernels.dtypes import value_dtype

FOLDER = Path(torch_backplane.operators.__path__[0])


@dataclass
class Tables:
    formulas: dict[str, Callable[..., Any]] = field(default_factory=dict)
    planners: dict[str, Callable[..., Any]] = field(default_factory=dict)


class Call:
    """What a planner gets in the place of the engine's call: outputs like those of the CPU kernel."""

    def __init__(self, expected: Sequence[torch.Tensor]) -> None:
        self.made = tuple(torch.empty_like(tensor) for tensor in expected)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self.made


def read(*files: str) -> Tables:
    """What the files of these names (without .py) declare."""
    tables = Tables()
    recorder = types.ModuleType("torch_backplane.planning")

    def pointwise(name: str, formula: Callable[..., Any], **options: Any) -> None:
        assert name not in tables.formulas, f"{name} is declared twice"
        assert not options, f"{name}: this test knows no {options}"
        tables.formulas[name] = formula

    def operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def declare(planner: Callable[..., Any]) -> Callable[..., Any]:
            assert name not in tables.planners, f"{name} is declared twice"
            tables.planners[name] = planner
            return planner

        return declare

    recorder.pointwise, recorder.operator = pointwise, operator  # type: ignore[attr-defined]
    recorder.run_pointwise, recorder.run_reduction = run_pointwise, run_reduction  # type: ignore[attr-defined]
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


def run_pointwise(
    formula: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[float] = (),
    compute: torch.dtype | None = None,
) -> None:
    """As the engine's: computes in the dtype of the first output; bool inputs stay bool."""
    target = compute or value_dtype(outputs[0].dtype)
    seen = [target for _ in inputs]
    kernel_runners.run_pointwise(
        formula, inputs, outputs, compute=seen, scalars=[(number, target) for number in scalars], width=1
    )


def run_reduction(
    definition: Any,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    compute: torch.dtype | None = None,
) -> None:
    kernel_runners.run_reduction(definition, inputs, dims, outputs, compute=compute)


@dataclass
class Case:
    """A call of an operator: `arguments` in the order of its schema, without `out`; `expected` from the CPU kernel."""

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
    """The arguments of a schema that a formula gets."""
    return [a for a in overload(name)._schema.arguments if a.name not in ("out", "generator")]


def call_cpu(name: str, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    operator, schema = overload(name), arguments_of(name)
    positional = [value for value, a in zip(arguments, schema, strict=True) if not a.kwarg_only]
    named = {a.name: value for value, a in zip(arguments, schema, strict=True) if a.kwarg_only}
    result = operator(*positional, **named)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def compute_dtype(case: Case) -> torch.dtype:
    """The result's dtype; where that is bool, what the arguments promote to."""
    dtype = case.expected[0].dtype
    if dtype == torch.bool:
        numbers = [a for a in case.arguments if isinstance(a, (torch.Tensor, int, float)) and not _plain(case, a)]
        dtype = numbers[0].dtype if isinstance(numbers[0], torch.Tensor) else torch.tensor(numbers[0]).dtype
        for number in numbers[1:]:
            left = next(a for a in numbers if isinstance(a, torch.Tensor))
            dtype = torch.promote_types(dtype, torch.result_type(left, number))
    return value_dtype(dtype)


def _plain(case: Case, value: Any) -> bool:
    """Whether the formula gets this argument as a Python value."""
    return any(
        a is value and str(schema.type) not in ("Tensor", "number", "float", "Optional[number]", "Optional[float]")
        for a, schema in zip(case.arguments, arguments_of(case.name), strict=True)
    )


def run(formulas: dict[str, Callable[..., Any]], cases: Sequence[Case]) -> list[tuple[torch.Tensor, ...]]:
    """Computes all cases, whose tensors have one shape, with one kernel."""
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
            elif value is not None and str(schema.type) in ("number", "float", "Optional[number]", "Optional[float]"):
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
                result = formulas[case.name](*given)
            except TypeError as error:
                raise TypeError(f"{case}: {error}") from error
            results += result if isinstance(result, tuple) else (result,)
        return results

    outputs = [tuple(torch.empty_like(tensor) for tensor in case.expected) for case in cases]
    flat = [tensor for tensors in outputs for tensor in tensors]
    kernel_runners.run_pointwise(formula, inputs, flat, scalars=scalars, width=1)
    return outputs
