"""Sums are as accurate as the CPU's: a sample of `python -m torch_backplane conformance --accuracy`, with kernels for
CPUs and, in a separate process, for GPUs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import reduce

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE

from torch_backplane.conformance.accuracy import DRAWS, measure_one
from torch_backplane.conformance.accuracy_cases import chosen

SAMPLE = {
    "sum of an expanded": "positive",
    "sum, outer": "positive",
    "var_mean": "offset",
    "mse_loss, sum": "positive",
    "native_layer_norm": "offset",
    "layer_norm, backward of weights": "normal",
    "rms_norm, backward of weights": "positive",
    "group_norm": "offset",
    "group_norm, backward": "normal",
    "batch_norm": "offset",
    "instance_norm": "offset",
    "nll_loss, sum": "positive",
    "softmax": "positive",
    "softmax, outer": "positive",
    "softmax, backward": "positive",
    "interpolate, nearest, backward": "normal",
    "cumsum": "positive",
    "dot": "offset",
    "trace": "normal",
    "cdist of order 1": "normal",
}


# Their loops in one work item exceed the limit of implementations with the fault "short loops".
LONG = {"cdist of order 1"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.fault("short loops")] if name in LONG else []) for name in SAMPLE],
)
def test_as_accurate_as_the_cpu(name):
    (case,) = [case for case in chosen("") if case.name == name]
    found = measure_one(torch.device("bp:0"), torch.float32, case, min(10**5, case.most), SAMPLE[name])
    assert found.passed, found


def test_accuracy_is_judged_over_several_draws():
    """A less accurate function fails in most draws and is detected. A single unlucky draw is no failure."""
    (case,) = [case for case in chosen("") if case.name == "trace"]
    device = torch.device("bp:0")

    def added_in_order(x: torch.Tensor) -> torch.Tensor:
        return x.trace() if x.device.type == "cpu" else reduce(torch.add, x.diagonal().unbind())

    assert measure_one(device, torch.float32, case, 1000, "normal").passed
    worse = measure_one(device, torch.float32, replace(case, function=added_in_order), 1000, "normal")
    assert not worse.passed
    assert worse.draws == DRAWS

    # A single wrong result among the results of a draw is a failure too.
    def wrong_once(x: torch.Tensor) -> torch.Tensor:
        out = x.mean(-1)
        return out if out.device.type == "cpu" else torch.cat([out[:1] * 1.001, out[1:]])

    rows = next(case for case in chosen("") if case.name == "mean")
    assert not measure_one(device, torch.float32, replace(rows, function=wrong_once), 1000, "positive").passed


def test_as_accurate_as_the_cpu_with_kernels_for_gpus():
    names = {"sum, inner", "var_mean", "native_layer_norm", "cumsum", "mm"}
    command = [sys.executable, "-m", "torch_backplane", "conformance", "--accuracy", "--driver", "opencl"]
    options = ["--match", f"^({'|'.join(names)})$", "--elements", "10000", "--json", "-"]
    environment = os.environ | {"TORCH_BACKPLANE_VISIBLE_DEVICES": "opencl:0", "TORCH_BACKPLANE_DISCRETE": "1"}
    ran = subprocess.run([*command, *options], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert {one["case"] for one in json.loads(ran.stdout)["measurements"]} == names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_half_precision_sums_are_rounded_once(rank: int, dtype: torch.dtype) -> None:
    """Overlapping patches of a transposed convolution, and so of a convolution's backward, add up in each element."""
    image, weight = (torch.randn(2, 3, *[size] * rank).to(dtype) for size in (6, 3))
    weight = weight.repeat(2, *[1] * (rank + 1))[:3]  # three input and three output channels
    transposed, plain = (getattr(F, f"{name}{rank}d") for name in ("conv_transpose", "conv"))

    def gradient(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        return torch.autograd.grad(plain(x, w, stride=2).sum(), x)[0]

    for function in (lambda x, w: transposed(x, w, stride=2), gradient):
        exact = function(image.double(), weight.double())
        found = function(image.to(DEVICE), weight.to(DEVICE)).cpu()
        rounded = exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-5
        assert ((found.double() - exact).abs() <= rounded).all()


ADDITIONS = {
    "index_add": lambda z, i, x: z.index_add(0, i, x),
    "index_add_ in columns": lambda z, i, x: z.t().contiguous().t().index_add_(0, i, x),
    "index_add_ in gaps": lambda z, i, x: z.repeat(1, 2)[:, ::2].index_add_(0, i, x),
    "index_put": lambda z, i, x: z.index_put((i,), x, accumulate=True),
    "scatter_add": lambda z, i, x: z.scatter_add(0, i[:, None].expand_as(x), x),
    "scatter_reduce, sum": lambda z, i, x: z.scatter_reduce(0, i[:, None].expand_as(x), x, "sum"),
    "scatter_reduce, mean": lambda z, i, x: z.scatter_reduce(0, i[:, None].expand_as(x), x, "mean") * len(x),
    "index_reduce, mean": lambda z, i, x: z.index_reduce(0, i, x, "mean") * len(x),
    "put": lambda z, i, x: z.put(i, x[:, 0], accumulate=True),
    "embedding, backward": lambda z, i, x: torch.ops.aten.embedding_dense_backward(x, i, 2, -1, False),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ADDITIONS)
def test_half_precision_sums_exceed_the_range_of_exact_integers(name: str, dtype: torch.dtype) -> None:
    """The sum of 5,000 ones in one element would be 2,048 (float16) or 256 (bfloat16) if each step were rounded.
    PyTorch's CPU kernels accumulate in float32 except in `put` and `index_put`."""
    z, i = torch.zeros(2, 3, dtype=dtype, device=DEVICE), torch.zeros(5000, dtype=torch.int64, device=DEVICE)
    for _ in range(2):  # planned, then replayed
        found = ADDITIONS[name](z, i, torch.ones(5000, 3, dtype=dtype, device=DEVICE))
        assert found[0, 0].item() == pytest.approx(5000, rel=torch.finfo(dtype).eps)
        assert not found[1].any()


@pytest.mark.parametrize("shape", [(200_000, 4, 10), (1_000_000, 4), (400_000, 2, 3)])
def test_batch_norm_of_many_short_runs(shape: tuple[int, ...]) -> None:
    """Rounding errors of the runs' sums are accumulated and compensated. Without that, means were off by whole standard
    deviations."""
    x = torch.randn(shape) + 1e4
    dims = [dim for dim in range(len(shape)) if dim != 1]
    _, mean, rstd = (one.cpu() for one in torch.native_batch_norm(x.to(DEVICE), None, None, None, None, True, 0.1, 0.0))
    torch.testing.assert_close(mean, x.double().mean(dims).float(), rtol=1e-7, atol=0)
    torch.testing.assert_close(rstd, x.double().var(dims, correction=0).rsqrt().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [(10**6,), (10**5, 7), (3, 10**5)])
def test_rounding_errors_of_long_products_do_not_accumulate(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = 1 + torch.randn(shape) * 1e-3
    dim = max(range(x.dim()), key=x.size)
    torch.testing.assert_close(x.to(DEVICE).prod(dim).cpu(), x.double().prod(dim).float(), rtol=2e-7, atol=0)


def test_products_of_special_numbers() -> None:
    for values in ([-0.0], [3e38, 3e38, 0.5], [math.inf, 0.0], [math.nan, 1.0], [1e-30, 1e-30], [math.inf, -2.0], []):
        x = torch.tensor(values)
        torch.testing.assert_close(x.to(DEVICE).prod().cpu(), x.prod(), rtol=0, atol=0, equal_nan=True)
        assert math.copysign(1, x.to(DEVICE).prod().item()) == math.copysign(1, x.prod().item()) or math.isnan(x.prod())


def test_losses_of_many_targets_with_weights() -> None:
    torch.manual_seed(0)
    for count in (100, 4096, 4097, 300_000):
        x, weight = torch.randn(count, 3).log_softmax(1), torch.rand(3)
        target = torch.randint(3, (count,))
        target[::7] = -100
        for reduction in ("mean", "sum"):
            found = F.nll_loss(x.to(DEVICE), target.to(DEVICE), weight.to(DEVICE), reduction=reduction)
            expected = F.nll_loss(x.double(), target, weight.double(), reduction=reduction)
            torch.testing.assert_close(found.cpu(), expected.float(), rtol=3e-7, atol=0)
