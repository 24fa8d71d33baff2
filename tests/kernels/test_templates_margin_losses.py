"""Compares the margin loss templates, for CPUs and for GPUs, with PyTorch on the CPU."""

from __future__ import annotations

import pytest
import torch
from template_runners import check_cuda, dialect, processors, random, run

from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.errors import Report
from torch_backplane.kernels.templates.margin_losses import (
    MarginParams,
    mark_targets,
    multi_margin_loss,
    multi_margin_loss_backward,
    multilabel_margin_loss,
    multilabel_margin_loss_backward,
)

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SHAPES = [(1, 1), (9, 5), (130, 3), (3, 2500)]


@processors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_multi_margin_loss_template(processor, dtype, p, weighted, shape):
    target_dialect, errors = dialect(processor), torch.zeros(error_words.WORDS, dtype=torch.int32)
    x, target, grad = random(shape, dtype), torch.randint(0, shape[1], shape[:1]), random(shape[:1], dtype)
    weight = torch.rand(shape[1]).to(dtype) if weighted else None
    wide = None if weight is None else weight.double()
    out, grad_in = torch.empty(shape[0], dtype=dtype), torch.empty(shape, dtype=dtype)
    report = Report(errors, "multi_margin_loss")
    run(multi_margin_loss(target_dialect, out, x, target, MarginParams(weight, p, 0.7), report))
    expected = aten.multi_margin_loss(x.double(), target, p, 0.7, wide, 0)
    torch.testing.assert_close(out, expected.to(dtype))
    params = MarginParams(weight, p, 0.7, 1 / shape[1])
    arguments = (x, target, params, Report(errors, "multi_margin_loss_backward"))
    run(multi_margin_loss_backward(target_dialect, grad_in, grad, *arguments))
    expected = aten.multi_margin_loss_backward(grad.double(), x.double(), target, p, 0.7, wide, 0)
    torch.testing.assert_close(grad_in, expected.to(dtype))
    assert errors[0] == 0
    target[-1] = shape[1]
    run(multi_margin_loss_backward(target_dialect, grad_in, grad, *arguments))
    assert error_words.message(errors.tolist()) == (
        f"multi_margin_loss_backward: index {shape[1]} is out of bounds for dimension with size {shape[1]}"
    )
    assert not grad_in[-1].any()


@processors
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_multilabel_margin_loss_template(processor, dtype, shape):
    target_dialect, errors = dialect(processor), torch.zeros(error_words.WORDS, dtype=torch.int32)
    x, target, grad = random(shape, dtype), torch.randint(0, shape[1], shape), random(shape[:1], dtype)
    ends = torch.randint(0, min(shape[1] + 1, 20), (shape[0], 1))
    target[torch.arange(shape[1]).expand(shape) == ends] = -1
    out, marks, grad_in = torch.empty(shape[0], dtype=dtype), torch.empty_like(x), torch.empty_like(x)
    run(mark_targets(target_dialect, marks, target, Report(errors, "multilabel_margin_loss_forward")))
    run(multilabel_margin_loss(target_dialect, out, x, target, marks))
    expected, expected_marks = aten.multilabel_margin_loss_forward(x.double(), target, 0)
    assert torch.equal(marks, expected_marks.to(dtype))
    torch.testing.assert_close(out, expected.to(dtype))
    arguments = (x, (target, marks), 1 / shape[1], Report(errors, "multilabel_margin_loss_backward"))
    run(multilabel_margin_loss_backward(target_dialect, grad_in, grad, *arguments))
    expected = aten.multilabel_margin_loss_backward(grad.double(), x.double(), target, 0, expected_marks)
    torch.testing.assert_close(grad_in, expected.to(dtype))
    assert errors[0] == 0
    target[-1, -1] = -7
    run(mark_targets(target_dialect, marks, target, Report(errors, "multilabel_margin_loss_forward")))
    assert error_words.message(errors.tolist()).startswith("multilabel_margin_loss_forward: index -7 is out of bounds")
    assert torch.equal(marks[:-1], expected_marks[:-1].to(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("p", [1, 2])
def test_cuda_compiles(dtype, p):
    x, errors = torch.randn(4, 5).to(dtype), torch.zeros(4, dtype=torch.int32)
    target, targets = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 5, dtype=torch.int64)
    out = torch.empty(4, dtype=dtype)
    for weight in (x[0], None):
        params = MarginParams(weight, p, 1.0, 0.1)
        check_cuda(multi_margin_loss, out, x, target, params, Report(errors, "loss"))
        check_cuda(multi_margin_loss_backward, x, x[:, 0], x, target, params, Report(errors, "loss"))
    check_cuda(mark_targets, x, targets, Report(errors, "loss"))
    check_cuda(multilabel_margin_loss, out, x, targets, x)
    check_cuda(multilabel_margin_loss_backward, x, x[:, 0], x, (targets, x), 0.1, Report(errors, "loss"))
