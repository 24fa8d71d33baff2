"""Functions that need the elements of a row several times, for tests of the kernels that torch.compile generates."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from torch_backplane import drivers


class Case(NamedTuple):
    """A function of tensors.

    Args:
        make: returns the arguments, on the CPU.
        loads: how often the text of the GPU's kernel loads an element of an argument or of a result; None: not
            counted.
        slow: how often the text of the CPU's kernel calls exp or tanh, where each loop is there once (up to 63
            elements, or a multiple of 16); None: not counted.
    """

    function: Callable[..., Any]
    make: Callable[[], list[torch.Tensor]]
    loads: int | None = None
    slow: int | None = None


def _softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _residual_norm(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
    h = x + y
    return h, F.rms_norm(h, (h.shape[-1],), w)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    x.sub_(x.amax(-1, keepdim=True)).exp_()
    x.div_(x.sum(-1, keepdim=True))
    return x * 2


def _normed_rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(table[index], (table.shape[1],))


def _gradients(x: torch.Tensor, w: torch.Tensor) -> Any:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    F.layer_norm(torch.tanh(x), (x.shape[-1],), w).square().sum().backward()
    return x.grad, w.grad


def _outside_and_inside(dim: int) -> Callable[[torch.Tensor], Any]:
    """The deviation is used in a loop, then for a result of a row, and then in another loop."""

    def function(x: torch.Tensor) -> Any:
        centered = x - x.mean(dim, keepdim=True)
        deviation = (centered.square().mean(dim, keepdim=True) + 1e-5).rsqrt()
        y = (centered * deviation).tanh()
        total = (y * centered).sum(dim, keepdim=True)
        return total * deviation, y - centered * (total * deviation) * deviation.exp()

    return function


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Any:
    x, w, b = (one.detach().requires_grad_() for one in (x, w, b))
    y = F.silu(F.batch_norm(x, None, None, w, b, training=True))
    y.mean((2, 3)).square().sum().backward()
    return y, x.grad, w.grad, b.grad


def _masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x.masked_fill(mask, -torch.inf), -1)


def _special() -> torch.Tensor:
    x = torch.randn(6, 304)
    x[1, 7], x[2, 3], x[3], x[4, :20] = float("nan"), float("inf"), -float("inf"), -float("inf")
    return x


def _rows(length: int, rows: int = 5, dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(rows, length).to(dtype)]


CASES: dict[str, Case] = {
    "softmax of 3": Case(_softmax, _rows(3)),  # elementwise
    **{f"softmax of {n}": Case(_softmax, _rows(n), 1, 1) for n in (16, 17, 63, 64, 512, 4096)},
    **{f"softmax of {n}": Case(_softmax, _rows(n), 1) for n in (65, 500, 513, 1000)},
    "softmax of 4112": Case(_softmax, _rows(4112), 2, 2),
    "logarithms of 5000": Case(lambda x: torch.log_softmax(x, -1), _rows(5000, 3), 2),
    "special values of 4500": Case(_softmax, lambda: [F.pad(_special(), (4196, 0))], 2),
    "nothing else than infinity": Case(_softmax, lambda: [torch.full((2, 4500), -torch.inf)], 2),
    "softmax of half": Case(_softmax, _rows(208, dtype=torch.float16), 1, 1),
    "softmax of float64": Case(_softmax, _rows(208, dtype=torch.float64), 1, 1),
    "special values": Case(_softmax, lambda: [_special()], 1, 1),
    "many rows of few": Case(_softmax, _rows(7, 3000)),
    "columns": Case(lambda x: torch.softmax(x, 0), _rows(90, 100)),
    "one after another": Case(
        lambda x: F.layer_norm(torch.softmax(x, -1), (144,)).tanh().softmax(-1), _rows(144), 1, 3
    ),
    "with a mask": Case(_masked, lambda: [torch.randn(9, 160), torch.rand(9, 160) < 0.3], 2, 1),
    "padded": Case(lambda x: torch.softmax(F.pad(x, (3, 2), value=0.5), -1), _rows(150)),
    "joined": Case(lambda x, y: torch.softmax(torch.cat([x, y], 1), -1), lambda: [*_rows(80)(), *_rows(90)()]),
    "results that are read again": Case(
        _residual_norm, lambda: [torch.randn(6, 400), torch.randn(6, 400), torch.randn(400)], 3
    ),
    "in place": Case(_in_place, _rows(333)),
    "indices": Case(_normed_rows, lambda: [torch.randn(20, 200), torch.randint(-20, 20, (9,))], 2),
    "integers": Case(lambda x: (x - x.amin(-1, keepdim=True)) // 3, lambda: [torch.randint(-99, 99, (6, 300))], 1),
    "bools": Case(
        lambda x: ((x > 0) & ((x > 0).sum(-1, keepdim=True) > 140), (x > 0).any(-1)), _rows(300)
    ),
    "positions": Case(
        lambda x: torch.where(torch.arange(300, device=x.device) == x.argmax(-1, keepdim=True), x, x.tanh()), _rows(300)
    ),
    "several results": Case(lambda x: (torch.log_softmax(x, -1), x.softmax(-1), x.std(-1)), _rows(224), 1, 1),
    **{f"a value of rows of {n} in and outside loops": Case(_outside_and_inside(1), _rows(n)) for n in (20, 150, 1024)},
    "a value of a column in and outside loops": Case(_outside_and_inside(0), _rows(256, 8)),
    "a value of several columns in and outside loops": Case(_outside_and_inside(0), _rows(37, 90)),
    "batch norm of channels last": Case(
        _batch_norm,
        lambda: [torch.randn(2, 2, 2, 256).permute(0, 3, 1, 2), torch.rand(256), torch.randn(256)],
    ),
    "gradients": Case(_gradients, lambda: [torch.randn(40, 100), torch.randn(100)]),
}


def check(case: Case, count: bool = True, **options: Any) -> None:
    """Compares the compiled function on bp with the eager one on the CPU, and counts what its only kernel does."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    given = case.make()
    expected = case.function(*copy.deepcopy(given))
    tolerance = 2e-3 if given[0].dtype == torch.float16 else 1e-4
    compiled = torch.compile(case.function, **options)
    found, codes = run_and_get_code(compiled, *(one.to("bp") for one in given))
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance / 10, check_device=False, equal_nan=True
    )
    if not drivers.device(0).properties.dialect or not count or (case.loads, case.slow) == (None, None):
        return
    (code,) = codes
    (body,) = re.findall(r"void bp_fused.*?\n}\n", code, re.DOTALL)
    loads = len(re.findall(r" tmp\d+ = .*\b(?:in|out|in_out)_ptr\d+\[", body))
    slow = len(re.findall(r"\b(?:cpu_)?(?:exp|tanh)\(", body))
    if is_gpu():
        assert case.loads in (None, loads), loads
    else:
        assert case.slow in (None, slow), slow


def is_gpu() -> bool:
    """Whether work items of the device run in lockstep, or a test has given it the target of such a device."""
    from torch_backplane.planning import dialect_of

    return dialect_of(torch.device("bp:0")).target.simt
