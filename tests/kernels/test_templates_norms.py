"""Compares the layer, group, batch and RMS norm templates with PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates.norms import (
    Affine,
    Evaluated,
    Saved,
    Sets,
    Statistics,
    norm,
    norm_backward,
    weight_grads,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
affine = pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])


def close(found, expected, rounding=0.0):
    """Compares tensors. `rounding` is the allowed absolute difference of float32 values."""
    for f, e in zip(found, expected, strict=True):
        if f is not None:
            rtol, atol = {2: (2e-2, 2e-2), 4: (1.3e-6, max(1e-5, rounding)), 8: (1e-7, 1e-7)}[f.dtype.itemsize]
            torch.testing.assert_close(f, e.to(f.dtype), rtol=rtol, atol=atol)


def rounding_of_sums(grad, parameter):
    """The rounding error of weight and bias gradients, which are sums of rounded products of elements of grad."""
    return grad.numel() / parameter.numel() * grad.abs().max().item() * torch.finfo(torch.float32).eps


def rounding_of_grad(grad, x, rstd):
    """The rounding error of x's gradient: x - mean has the rounding error of x, and is multiplied by rstd twice."""
    return (grad.abs().max() * x.abs().max() * rstd.max() ** 2).item() * torch.finfo(torch.float32).eps


def parameters(size, dtype, affine):
    return (random((size,), dtype), random((size,), dtype)) if affine else (None, None)


def empty(*sizes):
    return [torch.full((size,), float("nan")) for size in sizes]


def gradients(function, x, weight, bias, grad):
    """Returns the gradients of x, weight and bias in float64."""
    leaves = [t.double().requires_grad_() for t in (x, weight, bias) if t is not None]
    return torch.autograd.grad(function(*leaves), leaves, grad.double())


@processors
@dtypes
@affine
@pytest.mark.parametrize("shape", [(5, 70), (200, 7), (1, 1)], ids=str)
def test_layer_norm(processor, dtype, affine, shape):
    target, (rows, size) = dialect(processor), shape
    x, grad = random(shape, dtype) + 3, random(shape, dtype)
    weight, bias = parameters(size, dtype, affine)
    out, (mean, rstd) = torch.empty_like(x), empty(rows, rows)
    value = torch.float64 if dtype == torch.float64 else torch.float32
    mean, rstd = mean.to(value), rstd.to(value)
    sets = Sets.layer(rows, size)
    run(norm(target, sets, out, x, Affine(weight, bias), Statistics(mean, rstd), 1e-5))
    doubles = [None if t is None else t.double() for t in (x, weight, bias)]
    close(
        [out, mean, rstd],
        [
            t.flatten() if t.dim() > 1 and t.shape[1] == 1 and t.shape[0] == rows and i else t
            for i, t in enumerate(torch.native_layer_norm(doubles[0], [size], doubles[1], doubles[2], 1e-5))
        ],
    )
    run(norm_backward(target, sets, out, Saved(grad, x, weight, mean, rstd)))
    expected = gradients(lambda x, *p: torch.nn.functional.layer_norm(x, [size], *p), x, weight, bias, grad)
    close([out], expected[:1], rounding_of_grad(grad, x, rstd))
    if affine:
        found = [torch.empty_like(weight), torch.empty_like(bias)]
        run(weight_grads(target, sets, Affine(*found), Saved(grad, x, weight, mean, rstd)))
        only_bias = torch.empty_like(bias)
        run(weight_grads(target, sets, Affine(None, only_bias), Saved(grad, x, weight, mean, rstd)))
        assert torch.equal(only_bias, found[1])
        close(found, expected[1:], rounding_of_sums(grad, weight))


@processors
@affine
def test_rms_norm(processor, affine):
    target, x, grad = dialect(processor), torch.randn(5, 70), torch.randn(5, 70)
    weight = torch.randn(70) if affine else None
    out, (rstd,) = torch.empty_like(x), empty(5)
    sets = Sets.layer(5, 70)
    run(norm(target, sets, out, x, Affine(weight), Statistics(None, rstd), 1e-5))
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x, [70], weight, 1e-5))
    run(norm_backward(target, sets, out, Saved(grad, x, weight, None, rstd)))
    expected = gradients(lambda x, *p: torch.nn.functional.rms_norm(x, [70], *p, eps=1e-5), x, weight, None, grad)
    close([out], expected[:1])
    if affine:
        found = torch.empty_like(weight)
        run(weight_grads(target, sets, Affine(found), Saved(grad, x, weight, None, rstd)))
        close([found], expected[1:], rounding_of_sums(grad, weight))


@processors
@dtypes
@affine
def test_group_norm(processor, dtype, affine):
    target = dialect(processor)
    x, grad = random((3, 12, 5, 7), dtype), random((3, 12, 5, 7), dtype)
    weight, bias = parameters(12, dtype, affine)
    value = torch.float64 if dtype == torch.float64 else torch.float32
    out, mean, rstd = torch.empty_like(x), torch.empty(3, 4, dtype=value), torch.empty(3, 4, dtype=value)
    sets = Sets.group(3, 12, 35, 4)
    run(norm(target, sets, out, x, Affine(weight, bias), Statistics(mean, rstd), 1e-5))
    doubles = [None if t is None else t.double() for t in (x, weight, bias)]
    close([out, mean, rstd], torch.native_group_norm(*doubles, 3, 12, 35, 4, 1e-5))
    run(norm_backward(target, sets, out, Saved(grad, x, weight, mean, rstd)))
    expected = gradients(lambda x, *p: torch.nn.functional.group_norm(x, 4, *p), x, weight, bias, grad)
    close([out], expected[:1])
    if affine:
        found = [torch.empty_like(weight), torch.empty_like(bias)]
        run(weight_grads(target, sets, Affine(*found), Saved(grad, x, weight, mean, rstd)))
        close(found, expected[1:], rounding_of_sums(grad, weight))


@processors
@affine
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("shape", [(4, 6, 5, 7), (30, 6)], ids=str)
def test_batch_norm(processor, dtype, affine, training, shape):
    target, x, grad = dialect(processor), random(shape, dtype), random(shape, dtype)
    weight, bias = parameters(6, torch.float32, affine)
    running = torch.randn(6), torch.rand(6) + 0.5
    expected_running = [t.double() for t in running]
    sets = Sets.batch(shape[0], 6, x[0, 0].numel())
    out, (mean, rstd) = torch.empty_like(x), empty(6, 6)
    saved = (mean, rstd) if training else (None, None)

    def reference(x, *p):
        return torch.nn.functional.batch_norm(x, *[t.clone() for t in expected_running], *p, training=training)

    doubles = [t.double() for t in (x, weight, bias) if t is not None]
    expected = reference(*doubles)
    grads = gradients(reference, x, weight, bias, grad)
    run(norm(target, sets, out, x, Affine(weight, bias), Statistics(*saved, running, 0.1), 1e-5))
    torch.nn.functional.batch_norm(doubles[0], *expected_running, training=training, momentum=0.1)
    close([out, *running], [expected, *expected_running])
    found = [out, torch.empty(6), torch.empty(6)]
    statistics = (mean, rstd) if training else running
    how = Evaluated(training, not training, 1e-5)
    run(norm_backward(target, sets, out, Saved(grad, x, weight, *statistics), Affine(*found[1:]), how))
    close(found[:1], grads[:1])
    if affine:
        close(found[1:], grads[1:], rounding_of_sums(grad, weight))


@dtypes
def test_cuda_compiles(dtype):
    x, w, s = random((4, 12, 3, 3), dtype), random((12,), dtype), torch.empty(12)
    for sets in (Sets.layer(36, 12), Sets.group(4, 12, 9, 3), Sets.batch(4, 12, 9)):
        check_cuda(norm, sets, x, x, Affine(w, w), Statistics(s, s), 1e-5)
        check_cuda(norm_backward, sets, x, Saved(x, x, w, s, s))
        if sets.norm == "batch":
            check_cuda(norm, sets, x, x, Affine(w, w), Statistics(s, s, (s, s)), 1e-5)
            check_cuda(norm, sets, x, x, Affine(w, w), Statistics(None, None, (s, s)), 1e-5)
            check_cuda(norm_backward, sets, x, Saved(x, x, w, s, s), Affine(w, w), Evaluated(variance=True))
        else:
            check_cuda(weight_grads, sets, Affine(w, w), Saved(x, x, w, s, s))
