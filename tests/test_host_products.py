"""Products of float32 on the host, by MKL or by oneDNN, whichever multiplies faster on this processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import torch_backplane

assert torch_backplane.__version__
product = torch.ops.backplane.host_product

# As matrices lie: their rows apart, turned, and with gaps between numbers.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x,
    "turned": lambda x: x.mT.contiguous().mT,
    "with rows apart": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]],
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
}
# Few multiplications, and so many that oneDNN may have them; single rows, which it must not have, and columns.
SIZES = [(3, 5, 4), (160, 150, 140), (1, 700, 4000), (1, 4096, 4100), (2100, 1024, 1), (2, 1, 3), (5, 200, 2200)]


def close(found: torch.Tensor, expected: torch.Tensor, inner: int = 200) -> None:
    """Within what sums of so many products lose in float32."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 + 1e-6 * inner)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["matrices", "batches"])
def test_results_are_right_in_all_layouts(sizes: tuple[int, int, int], batch: tuple[int, ...]) -> None:
    rows, inner, columns = sizes
    a, b = torch.randn(*batch, rows, inner), torch.randn(*batch, inner, columns)
    added = torch.randn(*batch, rows, columns)
    exact = a.double() @ b.double()
    for first, second in itertools.product(LAYOUTS.values(), repeat=2):
        out = torch.full_like(added, torch.nan)
        product(None, first(a), second(b), 0, 1, out=out)
        close(out, exact, inner)
        for beta, alpha in ((1, 1), (0.5, -2.0), (0, 3)):
            out = torch.full_like(added, torch.nan)
            product(second(added), first(a), second(b), beta, alpha, out=out)
            close(out, beta * added.double() + alpha * exact, 3 * inner)
    apart = LAYOUTS["with rows apart"](torch.full_like(added, torch.nan))
    product(added, a, b, 1, 1, out=apart)
    close(apart, added.double() + exact, inner)


@pytest.mark.parametrize("size", [8, 200])
def test_what_is_added_may_be_a_row_the_result_itself_or_not_be_read(size: int) -> None:
    a, b, row = torch.randn(size, size), torch.randn(size, size), torch.randn(size)
    out = torch.empty(size, size)
    product(row.expand(size, size), a, b, 2, 1, out=out)
    close(out, 2 * row.double() + a.double() @ b.double())
    before = out.double()
    product(out, a, b, 1, 0.5, out=out)
    close(out, before + 0.5 * (a.double() @ b.double()))
    nothing = torch.full_like(out, torch.nan)
    product(nothing, a, b, 0, 1, out=out)
    close(out, a.double() @ b.double())
    product(out, torch.full_like(a, torch.nan), b, 1, 0, out=out)  # as in PyTorch, which multiplies nothing
    close(out, a.double() @ b.double())


@pytest.mark.parametrize("size", [8, 200])
def test_what_is_infinite_or_no_number_stays_so(size: int) -> None:
    a, b = torch.ones(size, size), torch.ones(size, size)
    a[0, 0], a[1, 1], b[2, 2] = torch.inf, torch.nan, -torch.inf
    out = torch.empty(size, size)
    product(None, a, b, 0, 1, out=out)
    torch.testing.assert_close(out, a @ b, equal_nan=True)


def test_onednn_may_be_switched_off_between_calls() -> None:
    a, b, out = torch.randn(200, 200), torch.randn(200, 200), torch.empty(200, 200)
    for enabled in (True, False, True):
        with torch.backends.mkldnn.flags(enabled=enabled):
            product(None, a, b, 0, 1, out=out.zero_())
        close(out, a.double() @ b.double())
