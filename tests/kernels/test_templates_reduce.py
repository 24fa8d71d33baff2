"""Compares the reduction template, by threads and by teams, with PyTorch on the CPU: layouts, chunks and states."""

from __future__ import annotations

import pytest
import torch
from kernel_runners import opencl
from template_runners import check_cuda, run_reduction

from torch_backplane.kernels import Reduction, Target, functions, reduction_geometry
from torch_backplane.kernels.reductions import summations
from torch_backplane.kernels.templates.reduce import Form, Options, choose_form, reduction
from torch_backplane.operators import split_rows

F32, I64 = torch.float32, torch.int64


def summed(dtype):
    return Reduction([dtype], [0], lambda x, position: x, lambda a, b: a + b, lambda s, count: s)


# The greatest element and its first position; and the mean, which needs the number of elements.
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


THREADS = Target.of_kind("cpu", float64=opencl()[2])
TEAMS = Target(float64=opencl()[2], compute_units=8)
targets = pytest.mark.parametrize("target", [THREADS, TEAMS], ids=["threads", "teams"])


LAYOUTS = {
    "all": (lambda: torch.randn(300, 70), (0, 1)),
    "many": (lambda: torch.randn(300_000), (0,)),
    "rows": (lambda: torch.randn(100, 71), (1,)),
    "few long rows": (lambda: torch.randn(3, 20_000), (1,)),
    "columns": (lambda: torch.randn(71, 100), (0,)),
    "few columns": (lambda: torch.randn(50_000, 19), (0,)),
    "wide columns": (lambda: torch.randn(1100, 269), (0,)),
    "wide columns of few rows": (lambda: torch.randn(3, 45, 128), (1,)),
    "wide columns in chunks": (lambda: torch.randn(9_000, 131), (0,)),
    "inner and outer": (lambda: torch.randn(20, 30, 40), (0, 2)),
    "middle": (lambda: torch.randn(20, 30, 40), (1,)),
    "transposed": (lambda: torch.randn(40, 30, 20).transpose(0, 2), (0, 1)),
    "with gaps": (lambda: torch.randn(40, 60)[:, ::2], (1,)),
    "one element": (lambda: torch.randn(40, 1), (1,)),
    "nothing reduced": (lambda: torch.randn(40, 5), ()),
    "0-dim": (lambda: torch.randn(()), ()),
}


@targets
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name, target):
    make, dims = LAYOUTS[name]
    x = make()
    shape = [size for d, size in enumerate(x.shape) if d not in dims]
    exact = x.double().sum(dims) if dims else x.double()
    out = torch.empty(shape)
    form = run_reduction(target, summed(F32), [x], dims, [out])
    torch.testing.assert_close(out, exact.float(), atol=1e-5 * max(1, x.numel() ** 0.5), rtol=1e-5)
    count = x.numel() // max(1, out.numel())
    run_reduction(target, MEAN, [x], dims, [out])
    torch.testing.assert_close(out, (exact / count).float(), atol=1e-6, rtol=1e-5)
    place = torch.empty(shape, dtype=I64)
    run_reduction(target, GREATEST, [x.round()], dims, [out, place])
    order = [d for d in range(x.dim()) if d not in dims] + list(dims)
    flat = x.round().permute(order).reshape(*shape, -1)
    torch.testing.assert_close(out, flat.amax(-1))
    torch.testing.assert_close(place, (flat == out.unsqueeze(-1)).int().argmax(-1))
    if name in ("columns", "few columns"):
        assert form.columns
    if name in ("all", "many", "few long rows", "few columns"):
        assert form.chunks > 1
    assert form.by_teams == (target is TEAMS)


@targets
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool], ids=str)
def test_dtypes(dtype, target):
    x = (torch.randn(30, 200) * 3).to(dtype)
    compute = F32 if dtype.is_floating_point else I64
    for dims in ((1,), (0,), (0, 1)):
        out = torch.empty([s for d, s in enumerate(x.shape) if d not in dims], dtype=compute)
        run_reduction(target, summed(compute), [x], dims, [out], compute=compute)
        torch.testing.assert_close(out, x.to(compute).sum(dims), rtol=1e-5, atol=1e-3)


@targets
@pytest.mark.parametrize("dims", [(1,), (0,), (0, 1)])
def test_bool_states(dims, target):
    x = torch.rand(40, 70) < 0.02
    found = Reduction([torch.bool], [False], lambda x, position: x, lambda a, b: a | b, lambda s, count: s)
    out = torch.empty([s for d, s in enumerate(x.shape) if d not in dims], dtype=torch.bool)
    run_reduction(target, found, [x], dims, [out])
    assert torch.equal(out, x.any(dims))


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 10_000])
@pytest.mark.parametrize("form", [(64, 1), (16, 4), (4, 16), (1, 64), (1, 1), (256, 1), (2, 32), (8, 8)], ids=str)
def test_teams_of_all_sizes(form, size, chunks):
    a = torch.randint(-99, 99, (67, size)).float()  # sums are exact in any order
    for columns, given in ((False, a), (True, a.T.contiguous().T)):
        out = torch.full((67,), 7.0)
        run_reduction(TEAMS, summed(F32), [given], [1], [out], form=Form(*form, columns, chunks if size else 1))
        assert torch.equal(out, a.sum(1)), columns


def chain(form, results, count):
    """Returns how many elements a work item adds, and how many partial results one combines afterwards."""
    return -(-count // (form.chunks * form.along)), -(-form.chunks // (form.along * form.adjacent))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [((1 << 24,), [0]), ((16, 1 << 20), [1]), ((1 << 20, 16), [0]), ((1 << 20, 16), [1]), ((64, 512, 512), [0, 2])],
    ids=str,
)
@pytest.mark.parametrize("units", [1, 16, 64, 128])
def test_large_reductions_fill_the_device_with_short_chains(units, shape, dims):
    kept = [size for d, size in enumerate(shape) if d not in dims]
    strides = [torch.empty(shape, device="meta").stride()]
    where = reduction_geometry(shape, dims, [torch.empty(kept, device="meta").stride()], strides)
    form = choose_form(Target(compute_units=units), summed(F32), where, 1)
    count, results = where.reduced.count, where.kept.count
    groups = -(-results // form.adjacent) * form.chunks
    assert groups >= 4 * units
    if units >= 16:
        assert sum(chain(form, results, count)) <= max(64, 4 * count**0.5)


@targets
@pytest.mark.parametrize("shape", [(300, 40), (5_000, 19), (20, 30, 40)], ids=str)
def test_several_sums_of_broadcast_inputs(shape, target):
    """Uses the form for columns, although an input with one value per row has stride 0 along the columns."""
    x, of_rows, of_columns = torch.randn(shape), torch.randn(shape[0], *[1] * (len(shape) - 1)), torch.randn(shape[-1:])
    definition = summations(F32, 2, lambda x, r, c, _: [x * r, x + c], lambda a, b, n: [b, a / n.to(F32)])
    for dims in ([0], list(range(len(shape) - 1))):
        outputs = [torch.empty(shape[len(dims) :]) for _ in range(2)]
        inputs = [x, of_rows.expand(shape), of_columns.expand(shape)]
        form = run_reduction(target, definition, inputs, dims, outputs)
        assert form.columns
        torch.testing.assert_close(outputs[0], (x + of_columns).sum(dims), rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(outputs[1], (x * of_rows).mean(dims), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, torch.float64], ids=str)
def test_sums_compensate_rounding_errors(dtype):
    """Each of two sums adds a large number, many small ones, and the negative of the large one."""
    eps = torch.finfo(dtype).eps
    x = torch.full((100_002,), eps / 4, dtype=dtype)
    x[0], x[-1] = 1.0, -1.0
    outputs = [torch.empty((), dtype=dtype) for _ in range(2)]
    run_reduction(TEAMS, summations(dtype, 2, lambda x, _: [x, -x], lambda a, b, _: [a, b]), [x], [0], outputs)
    for output, sign in zip(outputs, (1, -1), strict=True):
        torch.testing.assert_close(output.item(), sign * 100_000 * eps / 4, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("dtype", [F32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "moments", "squares"])
def test_reductions_of_long_rows_compile_as_cuda(name, dtype):
    compute = torch.float64 if dtype == torch.float64 else F32
    definition = {
        "softmax": lambda: split_rows.exponentials(False, compute),
        "log_softmax": lambda: split_rows.exponentials(True, compute),
        "moments": lambda: split_rows._spread(True, compute),
        "squares": lambda: split_rows._spread(False, compute),
    }[name]()
    x, count = torch.zeros(3, 100_000, dtype=dtype), {"moments": 4, "squares": 1}.get(name, 2)
    outputs = [torch.empty(3, dtype=compute) for _ in range(count)]
    where = reduction_geometry(x.shape, [1], [one.stride() for one in outputs], [x.stride()])
    scalars = [1e-5] if definition.scalars else []
    check_cuda(reduction, name, definition, outputs, [x], where, Options(scalars))
