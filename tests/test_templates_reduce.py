"""Reductions by lanes against PyTorch on the CPU: rows, columns, chunks, several states and any strides."""

from __future__ import annotations

import pytest
import torch
from template_runners import dialect, run

from torch_backplane.kernels import Reduction, functions, reduction_geometry
from torch_backplane.kernels.layouts import Geometry, Layout, ReductionGeometry
from torch_backplane.kernels.templates.reduce import by_columns, chunk_count, contiguous_strides, reduce_lanes

F32, I64 = torch.float32, torch.int64


def summed(dtype):
    return Reduction([dtype], [0], lambda x, position: x, lambda a, b: a + b, lambda s, count: s)


# The greatest element and the first place where it is; and the mean, which needs the number of elements.
GREATEST = Reduction(
    [F32, I64],
    [float("-inf"), 2**63 - 1],
    lambda x, position: (x, position),
    lambda a, i, b, j: (
        functions.where((a > b) | ((a == b) & (i < j)), a, b),
        functions.where((a > b) | ((a == b) & (i < j)), i, j),
    ),
    lambda a, i, count: (a, i),
)
MEAN = Reduction([F32], [0.0], lambda x, position: x, lambda a, b: a + b, lambda s, count: s / count.to(F32))


def reduce(definition, x, dims, outputs, compute=None):
    kept = [d for d in range(x.dim()) if d not in dims]
    where = reduction_geometry(x.shape, dims, [o.stride() for o in outputs], [x.stride()])
    assert outputs[0].shape == tuple(x.shape[d] for d in kept)
    columns = by_columns(where, len(outputs))
    chunks = chunk_count(where, columns)
    if chunks == 1:
        run(reduce_lanes(dialect("cpu"), "tested", definition, outputs, [x], where, columns=columns, compute=compute))
        return columns, chunks
    states = [torch.empty(where.kept.count, chunks, dtype=dtype) for dtype in definition.state]
    options = {"columns": columns, "chunks": chunks, "compute": compute}
    run(reduce_lanes(dialect("cpu"), "tested", definition, states, [x], where, **options))
    again = Reduction(definition.state, definition.identity, lambda *s: s[:-1], definition.combine, definition.finish)
    partial = contiguous_strides(where.kept.sizes, chunks)
    strides = (*where.kept.strides[: len(outputs)], *(partial for _ in states))
    left = ReductionGeometry(
        Geometry(where.kept.layout, where.kept.sizes, strides),
        Geometry(Layout(1, 1), (chunks,), tuple((1,) for _ in states)),
    )
    run(reduce_lanes(dialect("cpu"), "tested", again, outputs, states, left, total=where.reduced.count))
    return columns, chunks


LAYOUTS = {
    "all": (lambda: torch.randn(300, 70), (0, 1)),
    "many": (lambda: torch.randn(300_000), (0,)),
    "rows": (lambda: torch.randn(100, 71), (1,)),
    "few long rows": (lambda: torch.randn(3, 20_000), (1,)),
    "columns": (lambda: torch.randn(71, 100), (0,)),
    "few columns": (lambda: torch.randn(50_000, 19), (0,)),
    "inner and outer": (lambda: torch.randn(20, 30, 40), (0, 2)),
    "middle": (lambda: torch.randn(20, 30, 40), (1,)),
    "transposed": (lambda: torch.randn(40, 30, 20).transpose(0, 2), (0, 1)),
    "with gaps": (lambda: torch.randn(40, 60)[:, ::2], (1,)),
    "one element": (lambda: torch.randn(40, 1), (1,)),
    "nothing reduced": (lambda: torch.randn(40, 5), ()),
    "0-dim": (lambda: torch.randn(()), ()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name):
    make, dims = LAYOUTS[name]
    x = make()
    shape = [size for d, size in enumerate(x.shape) if d not in dims]
    exact = x.double().sum(dims) if dims else x.double()
    out = torch.empty(shape)
    form = reduce(summed(F32), x, dims, [out])
    torch.testing.assert_close(out, exact.float(), atol=1e-5 * max(1, x.numel() ** 0.5), rtol=1e-5)
    count = x.numel() // max(1, out.numel())
    reduce(MEAN, x, dims, [out])
    torch.testing.assert_close(out, (exact / count).float(), atol=1e-6, rtol=1e-5)
    place = torch.empty(shape, dtype=I64)
    reduce(GREATEST, x.round(), dims, [out, place])
    order = [d for d in range(x.dim()) if d not in dims] + list(dims)
    flat = x.round().permute(order).reshape(*shape, -1)
    torch.testing.assert_close(out, flat.amax(-1))
    torch.testing.assert_close(place, (flat == out.unsqueeze(-1)).int().argmax(-1))
    if name in ("columns", "few columns"):
        assert form[0]
    if name in ("all", "many", "few long rows", "few columns"):
        assert form[1] > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool], ids=str)
def test_dtypes(dtype):
    x = (torch.randn(30, 200) * 3).to(dtype)
    compute = F32 if dtype.is_floating_point else I64
    for dims in ((1,), (0,), (0, 1)):
        out = torch.empty([s for d, s in enumerate(x.shape) if d not in dims], dtype=compute)
        reduce(summed(compute), x, dims, [out], compute)
        torch.testing.assert_close(out, x.to(compute).sum(dims), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dims", [(1,), (0,), (0, 1)])
def test_bool_states(dims):
    x = torch.rand(40, 70) < 0.02
    found = Reduction([torch.bool], [False], lambda x, position: x, lambda a, b: a | b, lambda s, count: s)
    out = torch.empty([s for d, s in enumerate(x.shape) if d not in dims], dtype=torch.bool)
    reduce(found, x, dims, [out])
    assert torch.equal(out, x.any(dims))
