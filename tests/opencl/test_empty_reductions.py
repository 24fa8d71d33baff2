"""Reductions over no elements return the identity without a fallback, or raise PyTorch's error if there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import agrees, refused_alike

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
REDUCTIONS: dict[str, Callable[..., object]] = {
    "sum": lambda x, dim: x.sum(dim),
    "kept": lambda x, dim: x.sum(dim, keepdim=True),
    "another dtype": lambda x, dim: x.sum(dim, dtype=torch.complex64 if x.is_complex() else torch.float32),
    "prod": lambda x, dim: x.prod(dim),
    "any": lambda x, dim: x.any(dim),
    "all": lambda x, dim: x.all(dim),
    "count_nonzero": lambda x, dim: x.count_nonzero(dim),
}
OF_NUMBERS: dict[str, Callable[..., object]] = {
    "mean": lambda x, dim: x.mean(dim),
    "norm": lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
    "norm of order 0": lambda x, dim: torch.linalg.vector_norm(x, 0, dim),
    "norm of order 3": lambda x, dim: torch.linalg.vector_norm(x, 3, dim),
}
OF_REAL_NUMBERS: dict[str, Callable[..., object]] = {
    "nansum": lambda x, dim: x.nansum(dim),
    "logsumexp": lambda x, dim: x.logsumexp(dim),
    "nanmean": lambda x, dim: x.nanmean(dim),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*REDUCTIONS, *OF_NUMBERS, *OF_REAL_NUMBERS])
def test_reductions_over_no_elements_return_the_identity(name: str, dtype: torch.dtype) -> None:
    if (name in OF_NUMBERS and not (dtype.is_floating_point or dtype.is_complex)) or (
        name in OF_REAL_NUMBERS and not dtype.is_floating_point
    ):
        pytest.skip(f"PyTorch does not support {name} of {dtype}")
    function = (REDUCTIONS | OF_NUMBERS | OF_REAL_NUMBERS)[name]
    for shape, dim in (((0, 3), 0), ((0, 3), 1), ((2, 0, 3), 1), ((2, 0, 3), -1), ((0,), 0)):
        agrees(lambda x: function(x, dim), torch.zeros(shape, dtype=dtype))  # noqa: B023


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_of_whole_empty_tensors(dtype: torch.dtype) -> None:
    agrees(lambda x: (x.sum(), x.prod(), x.any(), x.all(), x.count_nonzero()), torch.zeros(0, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_trace_of_no_elements(dtype: torch.dtype) -> None:
    try:
        torch.zeros(0, 3, dtype=dtype).trace()
    except NotImplementedError:
        pytest.skip(f"the CPU has no trace of {dtype} before torch 2.13")
    agrees(lambda x: x.trace(), torch.zeros(0, 3, dtype=dtype))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variances_over_no_elements_are_nan() -> None:
    for function in (torch.var, torch.std, torch.var_mean, torch.std_mean):
        agrees(lambda x: function(x, 0), torch.zeros(0, 3))  # noqa: B023
        agrees(lambda x: function(x, 0, correction=0), torch.zeros(0, 3))  # noqa: B023
        agrees(function, torch.zeros(0))


def test_out_variants() -> None:
    agrees(lambda x, out: torch.sum(x, 0, out=out), torch.zeros(0, 3), torch.ones(3))
    agrees(lambda x, out: torch.sum(x, 0, out=out), torch.zeros(0, 3), torch.ones(6)[::2])


EXTREMES: dict[str, Callable[[torch.Tensor], object]] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of a dim": lambda x: x.max(0),
    "min of a dim": lambda x: x.min(0),
    "argmax": lambda x: x.argmax(),
    "argmin of a dim": lambda x: x.argmin(0),
    "aminmax": lambda x: x.aminmax(),
    "aminmax of a dim": lambda x: x.aminmax(dim=0),
    "norm of order inf": lambda x: torch.linalg.vector_norm(x, torch.inf, 0),
    "norm of order -1": lambda x: torch.linalg.vector_norm(x, -1, 0),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_of_no_elements_are_errors(name: str) -> None:
    refused_alike(EXTREMES[name], torch.zeros(0, 3))


def test_extremes_of_no_rows() -> None:
    agrees(lambda x: (x.amax(1), x.amin(1), x.argmax(1), *x.max(1), *x.aminmax(dim=1)), torch.zeros(0, 3))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_of_empty_tensors(reduction: str) -> None:
    functional = torch.nn.functional
    for loss in (functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.soft_margin_loss):
        agrees(lambda a, b: loss(a, b, reduction=reduction), torch.zeros(0, 3), torch.ones(0, 3))  # noqa: B023


OVER_A_LIST: dict[str, Callable[..., object]] = {
    "sum": torch.sum,
    "nansum": torch.nansum,
    "mean": torch.mean,
    "nanmean": torch.nanmean,
    "logsumexp": torch.logsumexp,
    "amax": torch.amax,
    "amin": torch.amin,
    "any": torch.any,
    "all": torch.all,
    "var": torch.var,
    "std_mean": torch.std_mean,
    "count_nonzero": lambda x, dim, keepdim: torch.count_nonzero(x, dim),
    **{
        f"vector_norm of order {order}": lambda x, dim, keepdim, order=order: torch.linalg.vector_norm(
            x, order, dim, keepdim
        )
        for order in (2, 0, torch.inf)
    },
}


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", OVER_A_LIST)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_empty_list_of_dimensions(name: str, keepdim: bool) -> None:
    """It means all dimensions, no dimensions, or an error, as on the CPU, for any rank and for empty tensors."""
    numbers = torch.tensor([1.0, torch.nan, 3.0, 4.0])
    for x in (numbers, numbers.view(2, 2), numbers[3], numbers[:1], numbers[:0], numbers[:0].view(2, 0), numbers.int()):

        def reduced(x: torch.Tensor) -> object:
            return OVER_A_LIST[name](x, [], keepdim=keepdim)

        try:
            reduced(x)
        except (RuntimeError, IndexError):
            refused_alike(reduced, x)
        else:
            agrees(reduced, x)
