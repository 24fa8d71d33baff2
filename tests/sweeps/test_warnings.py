"""PyTorch's warnings are issued at every call, as on the CPU. The driver executes nothing.

Runs a sample of the operator database. `tests/sweeps/sweep_process.py warnings_sweep.py` runs all of it.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import driver_packages
import pytest
import sweep_process
import torch
import warnings_sweep

SAMPLE = (
    r"^(add|addr|arange|bernoulli|cat|conj_physical|cumsum|eye|fft\.i?fft|fft\.rfft|gather|index_(add|copy|fill|put|select)|"
    r"isin|ldexp|linspace|logcumsumexp|lerp|masked_fill|mean|mm|multinomial|mvlgamma.*|nan(mean|sum)|native_batch_norm|"
    r"nn\.functional\.(avg_pool2d|linear|logsigmoid)|normal|pow|round|sort|std|sum|take|topk|tril|var|var_mean|where)$"
)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_warnings_match_cpu(tmp_path: Path) -> None:
    settings = driver_packages.install_null(tmp_path)
    names = warnings_sweep.names(SAMPLE)
    assert len(names) > 45
    assert sweep_process.findings("warnings_sweep.py", names, settings, "--samples", "4") == []


def warnings_of(function: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(one.message) for one in caught]


CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "resized": (
        "An output with one or more elements was resized since it had shape",
        lambda: torch.fft.ifft(torch.rand(5, device="bp"), out=torch.empty(3, dtype=torch.complex64, device="bp")),
    ),
    "masked_select": (
        "An output with one or more elements was resized since it had shape",
        lambda: torch.masked_select(
            torch.ones(3, device="bp"), torch.ones(3, dtype=torch.bool, device="bp"), out=torch.empty(2, device="bp")
        ),
    ),
    "expanded": (
        "Use of index_put_ on expanded tensors is deprecated",
        lambda: (
            torch.zeros(1, 3, device="bp")
            .expand(2, 3)
            .index_put_((torch.tensor([0], device="bp"),), torch.ones((), device="bp"))
        ),
    ),
    "no degrees of freedom": (
        "var(): degrees of freedom is <= 0",
        lambda: torch.var(torch.ones(2, 1, device="bp"), 1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_warnings_are_issued_at_every_call(name: str) -> None:
    """Also when a plan is replayed."""
    words, call = CALLS[name]
    call()  # a fallback may warn once
    for _ in range(3):
        (one,) = warnings_of(call)
        assert one.startswith(words)
