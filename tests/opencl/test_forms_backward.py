"""Gradients, statistics and results that do not fit an operator: refused, and never read or written out of bounds.

Most of these operators are called by others, which pass valid arguments. Dtypes that PyTorch's CPU kernels refuse are
refused here too. PyTorch's CPU kernels do not check all shapes, and then access memory out of bounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE, agrees, need, refused_alike

aten = torch.ops.aten


def batch_norm_backward(grad: Any, x: Any, weight: Any, mean: Any, var: Any, *, train: bool = True) -> Any:
    stats = [torch.zeros_like(weight), torch.ones_like(weight)]
    return aten.native_batch_norm_backward(grad, x, weight, *stats, mean, var, train, 1e-5, [True] * 3)


def layer_norm_backward(grad: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
    return aten.native_layer_norm_backward(grad, x, [4], mean, rstd, weight, weight, [True] * 3)


def group_norm_backward(grad: Any, x: Any, weight: Any, mean: Any, rstd: Any) -> Any:
    return aten.native_group_norm_backward(grad, x, mean, rstd, weight, 2, 2, 2, 1, [True] * 3)


def conv_backward(grad: Any, x: Any, weight: Any, *, transposed: bool = False) -> Any:
    return aten.convolution_backward(grad, x, weight, [2], [1], [0], [1], transposed, [0], 1, [True] * 3)


def batch_norm_of(running: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: F.batch_norm(
        x.view(2, 2, 4), running(torch.zeros_like(x[:2])), torch.ones_like(x[:2]), training=True, **options
    )


# Called with the numbers 0, 1, …, 15.
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "batch norm, statistics of float64": batch_norm_of(lambda mean: mean.double()),
    "batch norm, statistics of integers": batch_norm_of(lambda mean: mean.long()),
    "batch norm, statistics that are no vector": batch_norm_of(lambda mean: mean[None]),
    "batch norm, weights of float16": lambda x: F.batch_norm(
        x.view(2, 2, 4), None, None, x[:2].half(), x[:2].half(), training=True),
    "batch norm, a result of float64": lambda x: aten.native_batch_norm.out(
        x.view(2, 2, 4), None, None, None, None, True, 0.1, 1e-5, out=x.double(), save_mean=x[:2], save_invstd=x[2:4]),
    "batch norm, gradients of float16": lambda x: batch_norm_backward(
        x.half().view(2, 2, 4), x.view(2, 2, 4), x[:2], x[:2], x[2:4]),
    "batch norm, means of integers": lambda x: batch_norm_backward(
        x.view(2, 2, 4), x.view(2, 2, 4), x[:2], x[:2].long(), x[2:4]),
    "batch norm, a weight that is no vector": lambda x: batch_norm_backward(
        x.view(2, 2, 4), x.view(2, 2, 4), x[None, :2], x[:2], x[2:4]),
    "group norm, gradients of integers": lambda x: group_norm_backward(
        x[:8].long().view(2, 2, 2), x[:8].view(2, 2, 2), x[:2], x[:2].view(2, 1), x[:2].view(2, 1)),
    "group norm, means of float64": lambda x: group_norm_backward(
        x[:8].view(2, 2, 2), x[:8].view(2, 2, 2), x[:2], x[:2].double().view(2, 1), x[:2].view(2, 1)),
    "group norm, weights of integers": lambda x: group_norm_backward(
        x[:8].view(2, 2, 2), x[:8].view(2, 2, 2), x[:2].long(), x[:2].view(2, 1), x[:2].view(2, 1)),
    "layer norm, gradients of float64": lambda x: layer_norm_backward(
        x.double().view(4, 4), x.view(4, 4), x[:4], x[:4].view(4, 1), x[:4].view(4, 1)),
    "avg_pool3d, gradients of float64": lambda x: aten.avg_pool3d_backward(
        x[:2].double().view(2, 1, 1, 1), x.view(2, 2, 2, 2), [2] * 3, [2] * 3, [0] * 3, False, True, None),
    "adaptive_avg_pool2d, gradients of float64": lambda x: aten._adaptive_avg_pool2d_backward(
        x[:4].double().view(4, 1, 1), x.view(4, 2, 2)),
    "adaptive_max_pool2d, indices of float32": lambda x: aten.adaptive_max_pool2d_backward(
        x[:4].view(4, 1, 1), x.view(4, 2, 2), x[:4].view(4, 1, 1)),
    "adaptive_max_pool2d, more indices": lambda x: aten.adaptive_max_pool2d_backward(
        x[:4].view(4, 1, 1), x.view(4, 2, 2), x[:8].view(4, 1, 2).long()),
    "fractional_max_pool2d, samples of two dimensions": lambda x: aten.fractional_max_pool2d(
        x.view(1, 4, 4), [2, 2], [2, 2], x[:2].view(1, 2) / 16),
    "fractional_max_pool2d, another size": lambda x: aten.fractional_max_pool2d_backward(
        x[:4].view(1, 2, 2), x.view(1, 4, 4), [2, 2], [3, 3], x[:4].view(1, 2, 2).long()),
    "fractional_max_pool2d, a result of float64": lambda x: aten.fractional_max_pool2d_backward.grad_input(
        x[:4].view(1, 2, 2), x.view(1, 4, 4), [2, 2], [2, 2], x[:4].view(1, 2, 2).long(), grad_input=x.double()),
    "replication_pad1d, gradients of float64": lambda x: aten.replication_pad1d_backward(
        x[:12].double().view(2, 6), x[:6].view(2, 3), [1, 2]),
    "replication_pad1d, of integers": lambda x: aten.replication_pad1d_backward(
        x[:12].long().view(2, 6), x[:6].long().view(2, 3), [1, 2]),
    "replication_pad2d, a result of float64": lambda x: aten.replication_pad2d_backward.grad_input(
        x.view(1, 4, 4), x[:9].view(1, 3, 3), [1, 0, 0, 1], grad_input=x.double()),
    "glu, gradients of float16": lambda x: aten.glu_backward(x[:8].half(), x, 0),
    "glu, longer gradients": lambda x: aten.glu_backward(x, x, 0),
    "glu, a result of float64": lambda x: aten.glu_backward.grad_input(x[:8], x, 0, grad_input=x.double()),
    "hardswish, a result of float64": lambda x: aten.hardswish.out(x, out=x.double()),
    "logsigmoid, a result of float64": lambda x: aten.log_sigmoid_forward.output(x, output=x.double(), buffer=x),
    "logsigmoid, gradients of float64": lambda x: aten.log_sigmoid_backward.grad_input(
        x, x, x, grad_input=x.double()),
    "binary_cross_entropy, a result of float64": lambda x: aten.binary_cross_entropy.out(
        x / 16, x / 16, out=x[0].double()),
    "binary_cross_entropy, gradients to float64": lambda x: aten.binary_cross_entropy_backward.grad_input(
        x, x / 16, x / 16, grad_input=x.double()),
    "huber_loss, gradients to float64": lambda x: aten.huber_loss_backward.out(
        x, x, x, 0, 1.0, grad_input=x.double()),
    "max_pool3d, gradients to float64": lambda x: aten.max_pool3d_with_indices_backward.grad_input(
        x[:2].view(2, 1, 1, 1), x.view(2, 2, 2, 2), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False,
        x[:2].view(2, 1, 1, 1).long(), grad_input=x.double()),
    "max_unpool3d, a flat result with gaps": lambda x: aten.max_unpool3d.out(
        x[:1].view(1, 1, 1, 1), x[:1].view(1, 1, 1, 1).long(), [2, 2, 2], [2, 2, 2], [0, 0, 0], out=x[::2]),
    "rrelu, noise of float16": lambda x: aten.rrelu_with_noise(x, x.half(), 0.0, 1.0, True),
    "soft_margin_loss, a result of float64": lambda x: aten.soft_margin_loss.out(x, x, out=x.double()),
    "soft_margin_loss, gradients for integers": lambda x: aten.soft_margin_loss_backward(x, x.long(), x, 0),
    "multi_margin_loss, a result of float16": lambda x: aten.multi_margin_loss.out(
        x.view(4, 4), x[:4].long(), out=x[0].half()),
    "multi_margin_loss, gradients of float16": lambda x: aten.multi_margin_loss_backward(
        x[0].half(), x.view(4, 4), x[:4].long(), 1, 1.0),
    "multilabel_margin_loss, marks of float16": lambda x: aten.multilabel_margin_loss_backward(
        x[0], x.view(4, 4), x.view(4, 4).long() % 4, 1, (x > 99).half().view(4, 4)),
    "hardtanh, a result of float16": lambda x: aten.hardtanh.out(x, out=x.half()),
    "mse_loss, gradients for integers": lambda x: aten.mse_loss_backward(x, x.long(), x, 0),
    "smooth_l1_loss, gradients for integers": lambda x: aten.smooth_l1_loss_backward(x, x.long(), x, 0, 1.0),
    "pdist, a gradient that is no vector": lambda x: aten._pdist_backward(x[0], x[:1].view(1, 1), 2.0, x[:0]),
    "max_unpool3d, more padding": lambda x: aten.max_unpool3d(
        x[:2].view(2, 1, 1, 1), x[:2].view(2, 1, 1, 1).long(), [2, 2, 2], [2, 2, 2], [0, 0, 0, 0]),
    "max_unpool3d, a result with gaps": lambda x: aten.max_unpool3d.out(
        x[:1].view(1, 1, 1, 1), x[:1].view(1, 1, 1, 1).long(), [2, 2, 2], [2, 2, 2], [0, 0, 0],
        out=x[::2].view(1, 2, 2, 2)),
    "unfold along no dimension": lambda x: aten.unfold_backward(x.view(8, 2), [9], 1, 2, 1),
    "unfold to less than nothing": lambda x: aten.unfold_backward(x.view(8, 2), [9], 0, -1, 1),
    "antialiased upsampling, a result of float16": lambda x: aten._upsample_bilinear2d_aa_backward.grad_input(
        x.view(1, 1, 4, 4), [4, 4], [1, 1, 2, 2], False, grad_input=x[:4].half().view(1, 1, 2, 2)),
    "bernoulli, one element behind": lambda x: torch.bernoulli(x[:8], out=x[1:9]),
    "adaptive_avg_pool2d to one size": lambda x: aten._adaptive_avg_pool2d(x.view(1, 4, 4), [2]),
    "conv_transpose1d, no dilation": lambda x: F.conv_transpose1d(x.view(1, 2, 8), x[:8].view(2, 2, 2), dilation=0),
    "conv3d, no dilation": lambda x: F.conv3d(x[:8].view(1, 1, 2, 2, 2), x[:1].view(1, 1, 1, 1, 1), dilation=0),
    "conv_transpose1d, much output padding": lambda x: F.conv_transpose1d(
        x.view(1, 2, 8), x[:8].view(2, 2, 2), stride=2, output_padding=2),
    "conv_transpose3d, a bias of float64": lambda x: F.conv_transpose3d(
        x[:8].view(1, 1, 2, 2, 2), x[:1].view(1, 1, 1, 1, 1), x[:1].double()),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_are_refused_as_on_the_cpu(name: str) -> None:
    if "float64" in name:
        need(torch.float64)
    refused_alike(REFUSED[name], torch.arange(16.0))


# For these, PyTorch's CPU kernels access memory out of bounds or crash.
BEYOND: dict[str, Callable[[torch.Tensor], Any]] = {
    "batch norm": lambda x: batch_norm_backward(x[:8].view(1, 2, 4), x.view(2, 2, 4), x[:2], x[:2], x[2:4]),
    "layer norm": lambda x: layer_norm_backward(
        x[:8].view(2, 4), x.view(4, 4), x[:4], x[:4].view(4, 1), x[:4].view(4, 1)),
    "layer norm, weights": lambda x: layer_norm_backward(
        x.view(4, 4), x.view(4, 4), x[:0], x[:4].view(4, 1), x[:4].view(4, 1)),
    "layer norm, statistics": lambda x: layer_norm_backward(
        x.view(4, 4), x.view(4, 4), x[:4], x[:2].view(2, 1), x[:4].view(4, 1)),
    "RMS norm": lambda x: aten._fused_rms_norm_backward(
        x[:8].view(2, 4), x.view(4, 4), [4], x[:4].view(4, 1), x[:4], [True, True]),
    "max_pool3d": lambda x: aten.max_pool3d_with_indices_backward(
        x[:0].view(0, 1, 1, 1), x.view(2, 2, 2, 2), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False,
        x[:2].view(2, 1, 1, 1).long()),
    "avg_pool2d": lambda x: aten.avg_pool2d_backward(
        x[:0].view(0, 1, 2, 2), x.view(1, 1, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
    "avg_pool3d": lambda x: aten.avg_pool3d_backward(
        x[:1].view(1, 1, 1, 1), x.view(2, 2, 2, 2), [2] * 3, [2] * 3, [0] * 3, False, True, None),
    "adaptive_avg_pool2d": lambda x: aten._adaptive_avg_pool2d_backward(x[:0].view(0, 1, 2, 2), x.view(1, 1, 4, 4)),
    "adaptive_max_pool2d": lambda x: aten.adaptive_max_pool2d_backward(
        x[:4].view(1, 1, 2, 2), x.view(4, 1, 2, 2), x[:4].view(1, 1, 2, 2).long()),
    "fractional_max_pool2d": lambda x: aten.fractional_max_pool2d_backward(
        x[:4].view(1, 2, 2), x.view(4, 2, 2), [2, 2], [2, 2], x[:4].view(1, 2, 2).long()),
    "replication_pad2d": lambda x: aten.replication_pad2d_backward(
        x.view(1, 4, 4), x.view(4, 2, 2), [1, 1, 1, 1]),
    "reflection_pad1d, of two dimensions": lambda x: aten.reflection_pad1d_backward(
        x[:6].view(1, 6), x[:3].view(1, 3), [1, 2, 1, 1]),
    "reflection_pad1d": lambda x: aten.reflection_pad1d_backward(x[:0].view(0, 6), x[:3].view(1, 3), [1, 2]),
    "convolution of wider gradients": lambda x: conv_backward(
        x[:10].view(1, 2, 5), x.view(1, 2, 8), x[:8].view(2, 2, 2)),
    "grid_sampler_2d": lambda x: aten.grid_sampler_2d_backward(
        x[:0].view(0, 1, 2, 2), x.view(1, 1, 4, 4), x[:8].view(1, 2, 2, 2) / 8, 0, 0, False, [True, True]),
    "fractional_max_pool3d": lambda x: aten.fractional_max_pool3d_backward(
        x[:1].view(1, 1, 1, 1), x.view(2, 2, 2, 2), [1] * 3, [1] * 3, x[:2].view(2, 1, 1, 1).long()),
    "convolution without dilation": lambda x: aten.convolution_backward(
        x[:8].view(1, 2, 4), x[:8].view(1, 2, 4), x[:4].view(2, 2, 1), None, [1], [0], [0], False, [0], 1, [True] * 3),
    "unfold": lambda x: aten.unfold_backward(x.view(8, 2), [10], 0, 2, 1),
    "unfold of a number": lambda x: aten.unfold_backward(x[:2], [], 0, 1, 1),
    "transposed convolution": lambda x: conv_backward(
        x[:12].view(1, 2, 6), x[:4].view(1, 2, 2), x[:8].view(2, 2, 2), transposed=True),
    "convolution": lambda x: conv_backward(x[:0].view(0, 2, 4), x.view(1, 2, 8), x[:8].view(2, 2, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_arguments_that_would_be_read_out_of_bounds_are_refused(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"[Ee]xpected|should contain"):
        BEYOND[name](torch.arange(16.0, device=DEVICE))


@pytest.mark.parametrize(
    ("grad", "self", "target"), [("double", "float", "float"), ("float", "half", "float"), ("float", "float", "double")]
)
@pytest.mark.parametrize("name", ["soft_margin_loss", "mse_loss", "smooth_l1_loss"])
def test_gradients_of_losses_have_the_dtype_of_the_input(name: str, grad: str, self: str, target: str) -> None:
    if "double" in (grad, self, target):
        need(torch.float64)

    def call(x: torch.Tensor) -> torch.Tensor:
        a, beta = x / 8 - 1, [0.5] if name == "smooth_l1_loss" else []
        tensors = [getattr(a, kind)() for kind in (grad, self, target)]
        return getattr(aten, f"{name}_backward")(*tensors, 0, *beta)

    try:
        call(torch.arange(16.0))
    except RuntimeError as error:
        if name == "mse_loss" and "Found dtype" in str(error):
            pytest.skip("the CPU takes tensors of one dtype before torch 2.12")
        raise
    agrees(call, torch.arange(16.0))


def test_huber_loss_with_an_unknown_reduction() -> None:
    agrees(lambda x: aten.huber_loss(x, x / 2, 100, 1.0), torch.arange(4.0))


def test_rrelu_refuses_out_of_another_dtype() -> None:
    """PyTorch's CPU kernel does not, and writes out of bounds."""
    x = torch.arange(16.0, device=DEVICE)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Half"):
        aten.rrelu_with_noise.out(x, x.clone(), 0.0, 1.0, True, out=x.half())


def test_fractional_max_pool_with_empty_windows() -> None:
    """PyTorch refuses them since torch 2.14."""
    given = torch.rand(1, 4, 4), [0, 0], [2, 2], torch.full((1, 1, 2), 0.3)
    moved = [one.to(DEVICE) if isinstance(one, torch.Tensor) else one for one in given]
    try:
        expected = aten.fractional_max_pool2d(*given)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            aten.fractional_max_pool2d(*moved)
        return
    for one, wanted in zip(aten.fractional_max_pool2d(*moved), expected, strict=True):
        assert torch.equal(one.cpu(), wanted)


def test_batch_norm_with_running_statistics_that_overlap_the_input() -> None:
    """PyTorch does not refuse this. The result is the same as without the overlap."""
    x = torch.arange(16.0, device=DEVICE)
    apart = F.batch_norm(x.view(2, 2, 4), torch.zeros(2, device=DEVICE), torch.ones(2, device=DEVICE), training=True)
    over = F.batch_norm(x.view(2, 2, 4), x[:2], torch.ones(2, device=DEVICE), training=True)
    assert torch.equal(apart, over)


def test_batch_norm_does_not_change_the_reserve() -> None:
    agrees(
        lambda x: aten._batch_norm_with_update.out(
            x.view(2, 2, 4), None, None, torch.zeros_like(x[:2]), torch.ones_like(x[:2]), 0.1, 1e-5, out=x.clone(),
            save_mean=x[:0].clone(), save_invstd=x[:0].clone(), reserve=x[:3].byte()),
        torch.arange(16.0),
    )  # fmt: skip
