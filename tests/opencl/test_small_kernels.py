"""One small call of each kind of kernel, for `make test-oclgrind` and `make gpu`.

Oclgrind simulates kernels, and reports data races and out-of-bounds accesses; so does compute-sanitizer on a GPU. Both
are slow, so the tensors are small. Kernels are used also where a library of the driver would compute the call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from agreement import agrees

from torch_backplane import preferences

F = torch.nn.functional


def gradient(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function that returns the gradient of the result's weighted sum with respect to the first argument."""

    def of(first: torch.Tensor, *rest: Any) -> torch.Tensor:
        first = first.detach().requires_grad_()
        result = function(first, *rest)
        weights = torch.arange(1.0, result.numel() + 1, device=result.device).view(result.shape)
        (found,) = torch.autograd.grad((result * weights).sum(), first)
        return found

    return of


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape)


KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "elementwise": (torch.add, lambda: (torch.randn(5, 7), torch.randn(7))),
    "strided": (torch.mul, lambda: (torch.randn(6, 5).t(), torch.randn(5, 12)[:, ::2])),
    "cast": (lambda x: x.bfloat16(), lambda: (torch.randn(33),)),
    "sum": (torch.sum, lambda: (torch.randn(300),)),
    "sum of columns": (lambda x: x.sum(0), lambda: (torch.randn(40, 6),)),
    "argmax": (lambda x: x.argmax(1), lambda: (torch.randn(5, 70),)),
    "var": (lambda x: x.var(1), lambda: (torch.randn(3, 90),)),
    "cumsum": (lambda x: x.cumsum(1), lambda: (torch.randn(3, 70),)),
    "sort": (lambda x: x.sort(dim=1, stable=True), lambda: (torch.randn(2, 70),)),
    "topk": (lambda x: x.topk(4), lambda: (torch.randn(3, 40),)),
    "softmax": (lambda x: x.softmax(1), lambda: (torch.randn(3, 70),)),
    "softmax, backward": (gradient(lambda x: x.softmax(1)), lambda: (torch.randn(3, 40),)),
    "layer norm": (lambda x: F.layer_norm(x, (40,)), lambda: (torch.randn(4, 40),)),
    "layer norm, backward": (gradient(lambda x: F.layer_norm(x, (40,))), lambda: (torch.randn(4, 40),)),
    "batch norm": (
        lambda x, m, v: F.batch_norm(x, m, v, training=True),
        lambda: (torch.randn(3, 4, 5), torch.zeros(4), torch.ones(4)),
    ),
    "product": (torch.mm, lambda: (torch.randn(9, 17), torch.randn(17, 5))),
    "batched product": (torch.bmm, lambda: (torch.randn(2, 3, 20), torch.randn(2, 20, 4))),
    "convolution": (F.conv2d, lambda: (torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3))),
    "convolution, backward": (gradient(F.conv2d), lambda: (torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3))),
    "pooling": (lambda x: F.max_pool2d(x, 2), lambda: (torch.randn(1, 2, 6, 6),)),
    "pooling, backward": (gradient(lambda x: F.max_pool2d(x, 2)), lambda: (torch.randn(1, 2, 6, 6),)),
    "upsampling": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), lambda: (torch.randn(1, 2, 3, 4),)),
    "index": (lambda x, i: x[i], lambda: (torch.randn(6, 3), integers(-6, 6, 8))),
    "index_put, adding": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        lambda: (torch.randn(4, 3), integers(0, 4, 20), torch.randn(20, 3)),
    ),
    "scatter_reduce": (
        lambda x, i, v: x.scatter_reduce(0, i, v, "amax"),
        lambda: (torch.randn(4), integers(0, 4, 30), torch.randn(30)),
    ),
    "embedding, backward": (gradient(lambda w, i: F.embedding(i, w)), lambda: (torch.randn(5, 3), integers(0, 5, 12))),
    "gather": (lambda x, i: x.gather(1, i), lambda: (torch.randn(3, 5), integers(0, 5, 3, 7))),
    "nonzero": (torch.nonzero, lambda: (integers(0, 2, 70),)),
    "masked_select": (lambda x: x[x > 0], lambda: (torch.randn(5, 9),)),
    "unique": (lambda x: torch.unique(x, return_inverse=True, return_counts=True), lambda: (integers(0, 6, 50),)),
    "cat": (lambda a, b: torch.cat([a, b], 1), lambda: (torch.randn(3, 4), torch.randn(3, 5))),
    "padding": (lambda x: F.pad(x, (2, 1), mode="reflect"), lambda: (torch.randn(2, 3, 6),)),
    "loss": (gradient(F.cross_entropy), lambda: (torch.randn(6, 5), integers(0, 5, 6))),
    "lists": (lambda *x: torch._foreach_add([*x], 1.5), lambda: (torch.randn(7), torch.randn(3, 2), torch.randn(0))),
    "histogram": (lambda x: torch.histc(x, 4, -1, 1), lambda: (torch.rand(50),)),
    "transposed copy": (lambda x: x.t().contiguous(), lambda: (torch.randn(40, 37),)),
    "attention": (F.scaled_dot_product_attention, lambda: tuple(torch.randn(1, 2, 20, 8) for _ in range(3))),
    "attention, backward": (
        gradient(lambda x: F.scaled_dot_product_attention(*x.unbind(), is_causal=True) / 300),  # the weights reach 320
        lambda: (torch.randn(3, 1, 2, 20, 8),),
    ),
    "attention, gradient of a mask": (
        gradient(lambda m, q, k, v: F.scaled_dot_product_attention(q, k, v, m)),
        lambda: (torch.randn(20, 20), *(torch.randn(1, 2, 20, 8) for _ in range(3))),
    ),
    # By matrix instructions where the device has them.
    "product, float16": (torch.mm, lambda: (torch.randn(40, 24).half(), torch.randn(24, 33).half())),
    "convolution, float16": (F.conv2d, lambda: (torch.randn(1, 4, 6, 6).half(), torch.randn(8, 4, 3, 3).half())),
    "attention, float16": (
        F.scaled_dot_product_attention,
        lambda: tuple(torch.randn(1, 2, 40, 16).half() for _ in range(3)),
    ),
    "attention, float16, backward": (
        gradient(lambda x: F.scaled_dot_product_attention(*x.unbind(), is_causal=True) / 300),
        lambda: (torch.randn(3, 1, 2, 40, 16).half(),),
    ),
}  # fmt: skip
# Relative errors that are allowed.
TOLERANCES = {name: 1e-2 if "float16" in name else 1e-4 for name in KERNELS}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(kernel: str) -> None:
    function, arguments = KERNELS[kernel]
    with ExitStack() as stack:
        for family in ("products", "convolutions", "attention"):
            stack.enter_context(preferences.preferring(family, "generated"))
        agrees(function, *arguments(), rtol=TOLERANCES[kernel], atol=TOLERANCES[kernel] / 10)


def test_random_numbers() -> None:
    drawn = torch.rand(70, device="bp:0")
    torch.bp.synchronize()
    assert 0 <= drawn.min().item() < drawn.max().item() < 1
