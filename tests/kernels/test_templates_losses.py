"""Compares the negative log likelihood templates with PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.errors import Report
from torch_backplane.kernels.templates.losses import LossParams, nll_loss, nll_loss_backward

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@processors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("shape", [(300, 7, 1), (3, 5, 20)], ids=str)
def test_forward_and_backward(processor, dtype, reduction, weighted, shape):
    target_dialect, errors = dialect(processor), torch.zeros(error_words.WORDS, dtype=torch.int32)
    x, target = random(shape, dtype), torch.randint(0, shape[1], (shape[0], shape[2]))
    target[0, 0] = -100
    weight = torch.rand(shape[1]).to(dtype) if weighted else None
    doubles = x.double().requires_grad_()
    expected = torch.nn.functional.nll_loss(
        doubles, target, None if weight is None else weight.double(), reduction=("none", "mean", "sum")[reduction]
    )
    out = torch.empty(expected.shape, dtype=dtype)
    total = torch.empty((), dtype=dtype)
    params, report = LossParams(weight, reduction, -100), Report(errors, "nll_loss_forward")
    run(nll_loss(target_dialect, out, total, x, target, params, report))
    torch.testing.assert_close(out, expected.detach().to(dtype))
    grad, grad_in = random(tuple(expected.shape), dtype), torch.zeros(shape, dtype=dtype)
    arguments = (grad, total, target, LossParams(weight, reduction, -100), Report(errors, "nll_loss_backward"))
    run(nll_loss_backward(target_dialect, grad_in, *arguments))
    (expected_grad,) = torch.autograd.grad(expected, doubles, grad.double())
    tolerance = 2e-2 if dtype == torch.bfloat16 else None
    torch.testing.assert_close(grad_in, expected_grad.to(dtype), rtol=tolerance, atol=tolerance)
    assert errors[0] == 0
    target[1, 0] = shape[1]
    run(nll_loss(target_dialect, out, total, x, target, params, report))
    assert error_words.message(errors.tolist()) == (
        f"nll_loss_forward: index {shape[1]} is out of bounds for dimension with size {shape[1]}"
    )


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_cuda_compiles(reduction):
    x, target, errors = torch.randn(4, 5, 1), torch.zeros(4, 1, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    each, total, weight = torch.empty(4, 1), torch.empty(1), torch.randn(5)
    report = Report(errors, "nll_loss")
    check_cuda(nll_loss, each, total, x, target, LossParams(weight, reduction, -100), report)
    check_cuda(nll_loss_backward, x, each, total, target, LossParams(None, reduction, -100), report)
