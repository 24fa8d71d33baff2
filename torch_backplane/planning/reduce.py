"""Launches reductions that are defined by the formulas (start, combine, finish)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from torch_backplane.kernels import Reduction
from torch_backplane.kernels.evaluate import evaluate
from torch_backplane.kernels.expression import constant, trace
from torch_backplane.kernels.reductions import programs
from torch_backplane.kernels.templates.reduce import Options, reduction
from torch_backplane.planning.geometry import reduction_geometry
from torch_backplane.planning.launch import dialect_of, launch, traced, tracing


def run_reduction(
    definition: Reduction,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    dims: Sequence[int],
    scalars: Sequence[int | float] = (),
    *,
    key: Hashable,
    compute: torch.dtype | None = None,
    name: str = "reduction",
) -> None:
    """Reduces `inputs` over `dims` and writes the results to `outputs`.

    If the inputs have no elements, the results are `finish` of the identity.

    Args:
        definition: the formulas.
        outputs: tensors without the dimensions `dims`, or with size 1 there.
        inputs: tensors of one shape.
        dims: the dimensions to reduce; negative ones count from the last.
        scalars: values for the definition's scalars. They are kernel arguments.
        key: identifies the definition. Equal keys share kernels.
        compute: the dtype in which `start` gets the inputs. Default: their own, or float32 for float16 and bfloat16.
        name: the name of the operator and the kernel; a C identifier.
    """
    dtypes = (tuple(tensor.dtype for tensor in inputs), tuple(tensor.dtype for tensor in outputs))
    if inputs[0].numel() == 0:
        with tracing():  # reject the dtypes that the formulas reject, as for inputs with elements
            traced(("reduction of nothing", key, dtypes, compute), lambda: programs(definition, *dtypes, compute))
            values = _of_nothing(definition, scalars)
        for output, value in zip(outputs, values, strict=True):
            output.fill_(value)
        return
    rank = inputs[0].dim()
    reduced = {dim % rank for dim in dims} if rank else set()
    where = reduction_geometry(outputs, inputs, sorted(reduced))
    device = inputs[0].device
    with tracing():  # generate all kernels before the first launch: after it, the call cannot be left to the CPU
        calls = reduction(
            dialect_of(device),
            name,
            definition,
            outputs,
            inputs,
            where,
            Options(
                scalars, compute, known=lambda part, make: traced((part, key, dtypes, compute, device.index), make)
            ),
        )
    for call in calls:
        launch(call.kernel, call.tensors, call.numbers, [call.global_size], [call.group_size], name=name)


def _of_nothing(definition: Reduction, scalars: Sequence[int | float]) -> list[Any]:
    """The results of an empty reduction: a Python number for each output."""
    state = [constant(value, dtype) for value, dtype in zip(definition.identity, definition.state, strict=True)]
    numbers = [constant(value, dtype) for value, dtype in zip(scalars, definition.scalars, strict=True)]
    finished = trace(lambda: definition.finish(*state, constant(0, torch.int64), *numbers), [])
    return [value.item() for value in evaluate(finished, [])]
