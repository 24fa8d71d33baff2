"""Reductions from (start, combine, finish), launched."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch

from torch_backplane.kernels import Reduction, reduction
from torch_backplane.kernels.evaluate import evaluate
from torch_backplane.kernels.expression import constant, trace
from torch_backplane.kernels.layouts import Geometry, Layout, ReductionGeometry
from torch_backplane.kernels.reductions import programs
from torch_backplane.kernels.templates.reduce import (
    by_columns,
    chunk_count,
    contiguous_strides,
    lane_functions,
    reduce_lanes,
)
from torch_backplane.kernels.templates.source import Launch
from torch_backplane.planning.geometry import reduction_geometry
from torch_backplane.planning.launch import dialect_of, generated, launch, traced, tracing


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
    ranks = (where.kept.layout.rank, where.reduced.layout.rank, where.wide)
    device = inputs[0].device
    if dialect_of(device).target.team_size == 1:
        with tracing():  # all of them before the first is launched: after that nothing may be left to the CPU
            calls = _calls_by_lanes(definition, outputs, inputs, scalars, where, compute, name, key)
        for call in calls:
            launch(call.kernel, call.tensors, call.numbers, [call.items], [call.group], name=name)
        return
    with tracing():
        kernel = generated(
            ("reduction", key, dtypes, ranks, compute, device.index),
            lambda: reduction(
                name,
                definition,
                inputs=dtypes[0],
                outputs=dtypes[1],
                geometry=where,
                dialect=dialect_of(device),
                compute=compute,
            ),
        )
    numbers = [
        scalars[one.operand]
        if one.kind == "scalar"
        else _number(where.kept, where.reduced, one.kind, one.operand, one.dimension)
        for one in kernel.parameters
        if one.kind not in ("input", "output")
    ]
    launch(kernel, [*outputs, *inputs], numbers, [kernel.work_items(where.kept.count)], name=name)


def _of_nothing(definition: Reduction, scalars: Sequence[int | float]) -> list[Any]:
    """A Python number for each output."""
    state = [constant(value, dtype) for value, dtype in zip(definition.identity, definition.state, strict=True)]
    numbers = [constant(value, dtype) for value, dtype in zip(scalars, definition.scalars, strict=True)]
    finished = trace(lambda: definition.finish(*state, constant(0, torch.int64), *numbers), [])
    return [value.item() for value in evaluate(finished, [])]


def _calls_by_lanes(
    definition: Reduction,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[int | float],
    where: ReductionGeometry,
    compute: torch.dtype | None,
    name: str,
    key: Hashable,
) -> list[Launch]:
    """A work item for each result: one launch, or two where there are few results of many elements."""
    device = inputs[0].device
    columns = by_columns(where, len(outputs))
    chunks = chunk_count(where, columns)
    dialect = dialect_of(device)
    lanes = partial(reduce_lanes, dialect, name, scalars=scalars)

    def functions(
        part: str,
        definition: Reduction,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] | None,
        compute: torch.dtype | None = None,
    ) -> str:
        read = tuple(tensor.dtype for tensor in inputs)
        written = None if outputs is None else tuple(tensor.dtype for tensor in outputs)
        text = partial(lane_functions, dialect, definition, read, written, compute)
        return traced((part, key, read, written, compute, device.index), text)

    if chunks == 1:
        once = functions("reduction", definition, inputs, outputs, compute)
        return [lanes(definition, outputs, inputs, where, columns=columns, functions=once)]
    results = where.kept.count
    states = [torch.empty(results, chunks, dtype=dtype, device=device) for dtype in definition.state]
    count = len(states)
    again = Reduction(
        definition.state,
        definition.identity,
        lambda *state: state[:count],
        definition.combine,
        definition.finish,
        scalars=definition.scalars,
    )
    strides = contiguous_strides(where.kept.sizes, chunks)
    kept = Geometry(
        where.kept.layout, where.kept.sizes, (*where.kept.strides[: len(outputs)], *(strides for _ in states))
    )
    reduced = Geometry(Layout(1, 1, where.wide), (chunks,), tuple((1,) for _ in states))
    first, second = functions("parts", definition, inputs, None, compute), functions("again", again, states, outputs)
    return [
        lanes(definition, states, inputs, where, columns=columns, chunks=chunks, functions=first),
        lanes(again, outputs, states, ReductionGeometry(kept, reduced), total=where.reduced.count, functions=second),
    ]


def _number(kept: Geometry, reduced: Geometry, kind: str, operand: int, dimension: int) -> int:
    part = reduced if kind.startswith("reduced") else kept
    return {
        "count": lambda: part.count,
        "size": lambda: part.sizes[dimension],
        "stride": lambda: part.strides[operand][dimension],
    }[kind.removeprefix("reduced_")]()
