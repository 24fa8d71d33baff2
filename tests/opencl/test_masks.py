"""nonzero, masked_select, masked_scatter and masks as indices: the sizes of results depend on values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, LAYOUTS, agrees, plans_from_the_start

from torch_backplane import plans

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
SHAPES = [(), (1,), (0,), (7,), (5000,), (3, 4), (0, 3), (3, 0), (2, 3, 4), (3, 1, 2, 5), (70, 90)]


def mask_of(shape: tuple[int, ...], share: float = 0.5) -> torch.Tensor:
    torch.manual_seed(len(shape))
    return torch.rand(shape) < share


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(5)
    x = torch.randn(shape) * 9
    return torch.complex(x, x.flip(0) if x.dim() else x).to(dtype) if dtype.is_complex else x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    mask, x = mask_of((6, 50)), numbers((6, 50), dtype)
    agrees(lambda x, m: (x * m).nonzero(), x, mask)
    agrees(lambda x, m: (x[m], x[m[:, 3]], x[:, m[2]], x.masked_select(m)), x, mask)
    agrees(lambda x, m: x.masked_scatter(m, x.flip(0)), x, mask)
    agrees(lambda x, m: x.index_put_((m,), x.flip(0)[m]), x, mask)
    agrees(lambda x, m: x.index_put_((m,), x[0, 0].clone()), x, mask)


def test_float8_bytes_are_selected() -> None:
    x = numbers((9, 9)).to(torch.float8_e5m2)
    found = x.to(DEVICE).view(torch.uint8).masked_select(mask_of((9, 9)).to(DEVICE))
    assert torch.equal(found.cpu(), x.view(torch.uint8)[mask_of((9, 9))])


def test_nonzero_of_complex_numbers_and_nan() -> None:
    agrees(lambda x: x.nonzero(), torch.tensor([0j, 1 + 0j, 1j, -0j, complex(0, float("nan"))]))
    agrees(lambda x: x.nonzero(), torch.tensor([0.0, -0.0, float("nan"), 1e-45, float("-inf")]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("share", [-1.0, 0.01, 0.5, 2.0])
def test_nonzero(shape: tuple[int, ...], share: float) -> None:
    mask = mask_of(shape, share)
    agrees(lambda m: (m.nonzero(), m.nonzero(as_tuple=True), m.argwhere()), mask)
    agrees(lambda m, x: (x.masked_select(m), x.masked_scatter(m, -x)), mask, numbers(shape))
    for size in (0, 3, 200):
        agrees(lambda m, size=size: m.nonzero_static(size=size, fill_value=-7), mask)


@pytest.mark.parametrize("size", [1023, 1024, 1025, 4095, 4096, 4097, 300_001])
def test_sizes_around_the_block_size(size: int) -> None:
    for share in (0.001, 0.5):
        mask = mask_of((size,), share)
        agrees(lambda m: m.nonzero(), mask)
        agrees(lambda m, x: (x[m], x.masked_scatter(m, -x)), mask, numbers((size,)))
    alone = torch.zeros(size, dtype=torch.bool)
    alone[-1] = True
    agrees(lambda m: m.nonzero(), alone)


def test_strides() -> None:
    mask, x = mask_of((20, 30)), numbers((20, 30))
    agrees(lambda m: (m.t().nonzero(), m[::3, 1::2].nonzero(), m[0].expand(4, 30).nonzero()), mask)
    agrees(lambda m, x: (x.t()[m.t()], x[::3, 1::2][m[::3, 1::2]]), mask, x)
    agrees(lambda m, x: x.t().masked_scatter_(m.t(), -x), mask, x)
    agrees(lambda m, x: x[::2].masked_scatter_(m[::2], -x), mask, x)


def test_broadcasts() -> None:
    x = numbers((4, 5))
    for shape in ((5,), (4, 1), (1, 1), (), (3, 4, 5), (2, 1, 1)):
        agrees(lambda x, m: x.masked_select(m), x, mask_of(shape))
    agrees(lambda x, m: x[0].masked_select(m), x, mask_of((4, 5)))
    for shape in ((5,), (4, 1), ()):
        agrees(lambda x, m: x.masked_scatter_(m, -x), x, mask_of(shape))
    agrees(lambda x, m: x[0].masked_scatter(m, torch.cat([x, x])), x, mask_of((4, 5)))


def test_out_variants() -> None:
    mask, x = mask_of((6, 7)), numbers((6, 7))
    n = int(mask.sum())
    agrees(lambda m, out: torch.nonzero(m, out=out), mask, torch.zeros(n, 2, dtype=torch.int64))
    agrees(lambda m, out: torch.nonzero(m, out=out.t()), mask, torch.zeros(2, n, dtype=torch.int64))
    agrees(lambda x, m, out: torch.masked_select(x, m, out=out[::2]), x, mask, torch.zeros(2 * n))
    agrees(lambda x, m: torch.masked_select(x, m, out=torch.empty(0, device=x.device)), x, mask)
    agrees(lambda m: torch.nonzero(m, out=torch.empty(0, dtype=torch.int64, device=m.device)), mask)


X = numbers((4, 5, 6))
INDEXED = {
    "all": lambda x, m: x[m],
    "first": lambda x, m: x[m[:, 0, 0]],
    "second": lambda x, m: x[:, m[0, :, 0]],
    "last": lambda x, m: x[..., m[0, 0]],
    "first two": lambda x, m: x[m[:, :, 0]],
    "last two": lambda x, m: x[:, m[0]],
    "with an index": lambda x, m: x[m[:, 0, 0], 2],
    "with a tensor": lambda x, m: x[m[:, 0, 0], :, torch.ones(1, dtype=torch.int64, device=x.device)],
    "two": lambda x, m: x[m[:, 0, 0] | True, :, torch.arange(6, device=x.device) < 4],
    "two that are adjacent": lambda x, m: x[:, m[0, :, 0] | True, torch.arange(6, device=x.device) == 4],
    "none": lambda x, m: x[m & False],
    "no dimensions": lambda x, m: (x[0, 0, 0][m[0, 0, 0]], x[m[0, 0, 0]], x[~m[0, 0, 0]]),
    "strided": lambda x, m: x.transpose(0, 2)[m.transpose(0, 2)],
    "strided rows": lambda x, m: x.transpose(0, 1)[m[:, :, 0].t()],
    "strided next to a new dimension": lambda x, m: x.permute(2, 0, 1)[None, m[0, 0]],
    "all next to a new dimension": lambda x, m: (x[:, 0, 0][None, m[:, 0, 0]], x[0, 0][m[0, 0], None]),
    "every second": lambda x, m: x[:, ::2, ::2][m[:, ::2, ::2]],
}


@pytest.mark.parametrize("name", INDEXED)
def test_masks_as_indices(name: str) -> None:
    agrees(INDEXED[name], X, mask_of((4, 5, 6)))


def test_strides_match_the_cpus() -> None:
    x, mask = torch.empty(3, 3, 3, 2).permute(1, 3, 2, 0), torch.ones(3, dtype=torch.bool)
    for read in (lambda x, m: x[None, m], lambda x, m: x[:, :, m], lambda x, m: x[m, :, None]):
        assert read(x.to(DEVICE), mask.to(DEVICE)).stride() == read(x, mask).stride()


@pytest.mark.parametrize("shape", [(14,), (2, 7), (1, 2, 7), (2, 7, 1), (2, 1, 7)])
@pytest.mark.parametrize("value", [False, 0.5, torch.tensor(True)], ids=["number", "fraction", "tensor"])
def test_mask_can_be_the_masked_tensor(shape: tuple[int, ...], value: Any) -> None:
    """`mask[mask] = False` in any layout, also if a dimension of size 1 has an unusual stride."""
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "as it is": lambda x: x,
        "reversed": lambda x: x.permute(*reversed(range(x.dim()))),
        "turned": lambda x: x.movedim(-1, 0),
        "with gaps": lambda x: x[..., ::2],
    }
    for transposed in ways.values():

        def fill(x: torch.Tensor, transposed: Callable[[torch.Tensor], torch.Tensor] = transposed) -> torch.Tensor:
            view = transposed(x)
            view[view] = value
            return x

        agrees(fill, mask_of(shape))


def test_uint8_masks() -> None:
    mask = mask_of((4, 5, 6)).byte() * 3
    with pytest.warns(UserWarning, match="indexing with dtype torch.uint8 is now deprecated"):
        agrees(lambda x, m: x[m], X, mask)
    agrees(lambda x, m: x.index_put_((m,), x[m.bool()].neg()), X, mask)
    # Only PyTorch's CPU kernel rejects a 0-dimensional value.
    found = X.to(DEVICE).index_put_((mask.to(DEVICE),), torch.tensor(3.0))
    assert torch.equal(found.cpu(), X.masked_fill(mask.bool(), 3.0))


def put(name: str, accumulate: bool, values: str):  # type: ignore[no-untyped-def]
    def function(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        indices = {
            "all": (m,),
            "first": (m[:, 0, 0],),
            "middle": (None, m[0, :, 0]),
            "two": (m[:, :, 0],),
            "mixed": (m[:, 0, 0], None, torch.arange(1, device=x.device)),
        }[name]
        shape = torch.ops.aten.index.Tensor(x, indices).shape
        given = {
            "number": x.new_ones(()) * 3,
            "one": x.new_ones(1) * 3,
            "cpu": torch.tensor(3.0, dtype=x.dtype),
            "each": torch.arange(shape.numel(), device=x.device).view(shape).to(x.dtype),
            "last": torch.arange(shape[-1], device=x.device).to(x.dtype),
        }[values]
        return torch.ops.aten.index_put_.default(x, indices, given, accumulate)

    return function


@pytest.mark.parametrize("name", ["all", "first", "middle", "two", "mixed"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("values", ["number", "one", "cpu", "each", "last"])
def test_index_put_with_masks(name: str, accumulate: bool, values: str) -> None:
    function = put(name, accumulate, values)
    agrees(function, X, mask_of((4, 5, 6)))
    agrees(lambda x, m: function(x.transpose(0, 2), m.transpose(0, 2)), X, mask_of((4, 5, 6)))


def test_assignment_of_numbers() -> None:
    def assign(x: torch.Tensor, m: torch.Tensor) -> None:
        x[m] = 5
        x[m[:, 0, 0]] = 2.5
        x[:, m[0]] = float("inf")
        x[..., m[0, 0]] = torch.tensor(4.0)

    agrees(assign, X, mask_of((4, 5, 6)))
    agrees(assign, X.transpose(0, 2), mask_of((6, 5, 4)))


def test_masked_writes_are_planned() -> None:
    def assign(x: torch.Tensor, m: torch.Tensor) -> None:
        x[m] = 5.0
        x.index_put_((m[:, 0],), x.new_zeros(()))
        x.masked_scatter_(m, x.neg())
        m.nonzero_static(size=7)

    with plans_from_the_start():
        agrees(assign, X[0], mask_of((5, 6)))
        stats = plans.stats()
        for name in ("aten::_index_put_impl_", "aten::masked_scatter_", "aten::nonzero_static"):
            assert stats[name]["planner_calls"] <= 2 * LAYOUTS, (name, stats[name])
            assert not stats[name]["reasons"], (name, stats[name])


def test_gradients() -> None:
    def gradients(x: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = x.detach().requires_grad_(), x.flip(0).detach().requires_grad_()
        selected = x.masked_select(m).sin().sum() + (x[m] ** 2).sum() + x[:, m[0]].exp().sum()
        scattered = (x.masked_scatter(m, y) * x.detach()).sum()
        filled = x.clone()
        filled[m] = y[m]
        return torch.autograd.grad(selected + scattered + (filled * filled).sum(), (x, y))

    agrees(gradients, X, mask_of((4, 5, 6)))


def refused(function, *arguments: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    """The CPU and the device raise the same error."""
    with pytest.raises((RuntimeError, IndexError)) as expected:
        function(*arguments)

    def on_device() -> None:
        function(*(one.to(DEVICE) for one in arguments))
        torch.accelerator.synchronize(DEVICE)

    with pytest.raises(expected.type) as found:
        on_device()
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_errors() -> None:
    x, mask = numbers((3, 4)), mask_of((3, 4))
    refused(lambda x, m: x[m[:2]], x, mask)
    refused(lambda x, m: x[:, m], x, mask)
    refused(lambda x, m: x.index_put_((m,), x[0, :2]), x, mask | True)
    refused(lambda x, m: x.index_put_((m,), x.half()[m]), x, mask)
    refused(lambda x, m: x.index_put_((m[0],), x[0, 0]), x, mask)
    refused(lambda x, m: x.masked_select(m.float()), x, mask)
    refused(lambda x, m: x.masked_select(m[:2]), x, mask)
    refused(lambda x, m: x.masked_scatter_(m.float(), x), x, mask)
    refused(lambda x, m: x.masked_scatter_(m, x.half()), x, mask)
    refused(lambda x, m: x[0].masked_scatter_(m, x), x, mask)
    refused(lambda x, m: x.masked_scatter_(m, x[0]), x, mask | True)
    refused(lambda x, m: torch.masked_select(x, m, out=x.half()), x, mask)
    refused(lambda x, m: m.nonzero_static(size=-1), x, mask)
