"""Reductions from (start, combine, finish), launched."""

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
    """Reduces `inputs`, all of one shape, over `dims`, and writes the results to `outputs`. Without elements they are
    what `finish` makes of the identity.

    Args:
        outputs: without the dimensions `dims`, or with size 1 there.
        scalars: the definition's numbers; others are the same kernel.
        key: what tells this definition from others: equal keys share kernels.
        compute: what `start` sees each input as.
        name: a C identifier, for the kernel.
    """
    dtypes = (tuple(tensor.dtype for tensor in inputs), tuple(tensor.dtype for tensor in outputs))
    if inputs[0].numel() == 0:
        with tracing():  # what the formulas refuse of a dtype, they refuse of no numbers, too
            traced(("reduction of nothing", key, dtypes, compute), lambda: programs(definition, *dtypes, compute))
            values = _of_nothing(definition, scalars)
        for output, value in zip(outputs, values, strict=True):
            output.fill_(value)
        return
    rank = inputs[0].dim()
    reduced = {dim % rank for dim in dims} if rank else set()
    where = reduction_geometry(outputs, inputs, sorted(reduced))
    device = inputs[0].device
    with tracing():  # all of them before the first is launched: after that nothing may be left to the CPU
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
    """A Python number for each output."""
    state = [constant(value, dtype) for value, dtype in zip(definition.identity, definition.state, strict=True)]
    numbers = [constant(value, dtype) for value, dtype in zip(scalars, definition.scalars, strict=True)]
    finished = trace(lambda: definition.finish(*state, constant(0, torch.int64), *numbers), [])
    return [value.item() for value in evaluate(finished, [])]
