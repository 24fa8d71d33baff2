"""Dynamic-shape plans: calls that real models make, with changing shapes, layouts, storage offsets and numbers, agree
with the CPU, and planners do not run again for new shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import DEVICE, on_device, placed, plans_from_the_start, to_cpu
from targets import launch
from torch.nn import functional as F

from torch_backplane import _C, drivers, preferences
from torch_backplane.drivers.libraries import routines_of

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape)


def gradients(function: Function) -> Function:
    """Returns a function that computes the result and the gradients of all floating-point arguments."""

    def both(*given: Any) -> Any:
        leaves = [one.detach().requires_grad_() if _is_float(one) else one for one in given]
        found = function(*leaves)
        wanted = [one for one in leaves if _is_float(one)]
        return found.detach(), *torch.autograd.grad(found, wanted, found.detach() * 0.5)

    return both


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def cell(gates: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    i, f, g, o = gates.chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh()


def stepped(optimizer: Callable[..., Any], **options: Any) -> Function:
    """Returns a function that runs two steps of an optimizer on a parameter, with the two given gradients."""

    def steps(parameter: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        leaf = parameter.detach().clone().requires_grad_()
        running = optimizer([leaf], lr=0.1, **options)
        for gradient in (one, other):
            leaf.grad = gradient.clone()
            running.step()
        return leaf.detach()

    return steps


# Functions, and their arguments for sizes n and m.
CASES: dict[str, tuple[Function, Callable[[int, int], Arguments]]] = {
    # general
    "add": (torch.add, lambda n, m: (randn(n, m), randn(n, m))),
    "add of a row": (torch.add, lambda n, m: (randn(n, m), randn(m))),
    "mul of a column": (torch.mul, lambda n, m: (randn(n, m), randn(n, 1))),
    "outer sum": (torch.add, lambda n, m: (randn(n, 1), randn(m))),
    "scaled": (lambda x: x * 2.5 + 1, lambda n, m: (randn(n, m),)),
    "in place": (lambda x, y: x.mul_(y).add_(1), lambda n, m: (randn(n, m), randn(n, m))),
    "out": (lambda x, y, out: torch.sub(x, y, out=out), lambda n, m: (randn(n, m), randn(n, m), randn(n, m))),
    "where": (torch.where, lambda n, m: (randn(n, m) > 0, randn(n, m), randn(m))),
    "masked_fill": (lambda x, mask: x.masked_fill(mask, -1.0), lambda n, m: (randn(n, m), randn(n, m) > 0)),
    "sum": (torch.sum, lambda n, m: (randn(n, m),)),
    "sum of rows": (lambda x: x.sum(-1), lambda n, m: (randn(n, m),)),
    "sum of columns": (lambda x: x.sum(0), lambda n, m: (randn(n, m),)),
    "mean, kept": (lambda x: x.mean((0, 2), keepdim=True), lambda n, m: (randn(n, 3, m),)),
    "amax": (lambda x: x.amax(-1), lambda n, m: (randn(n, m),)),
    "argmax": (lambda x: x.argmax(-1), lambda n, m: (randn(n, m),)),
    "max of rows": (lambda x: tuple(x.max(-1)), lambda n, m: (randn(n, m),)),
    "all": (lambda x: (x > -9).all(), lambda n, m: (randn(n, m),)),
    "cat": (lambda x, y: torch.cat((x, y)), lambda n, m: (randn(n, m), randn(n + 3, m))),
    "cat of columns": (lambda x, y: torch.cat((x, y), -1), lambda n, m: (randn(n, m), randn(n, 4))),
    "stack": (lambda x, y: torch.stack((x, y), 1), lambda n, m: (randn(n, m), randn(n, m))),
    "clone": (torch.clone, lambda n, m: (randn(n, m),)),
    "contiguous": (lambda x: x.transpose(0, 1).contiguous(), lambda n, m: (randn(n, m),)),
    "to half": (lambda x: x.half(), lambda n, m: (randn(n, m),)),
    "arange": (lambda x: torch.arange(x.shape[0], device=x.device) + 1, lambda n, m: (randn(n),)),
    "full": (lambda x: torch.full((x.shape[0], 4), 2.5, device=x.device), lambda n, m: (randn(n),)),
    "zeros_like": (torch.zeros_like, lambda n, m: (randn(n, m),)),
    "fill": (lambda x: x.fill_(3), lambda n, m: (randn(n, m),)),
    # language models
    "embedding": (F.embedding, lambda n, m: (whole(7, n, m), randn(7, 6))),
    "embedding, gradient": (
        lambda i, w, g: torch.ops.aten.embedding_dense_backward(g, i, 7, -1, False),
        lambda n, m: (whole(7, n, m), randn(7, 6), randn(n, m, 6)),
    ),
    "linear": (F.linear, lambda n, m: (randn(2, n, 6), randn(m, 6), randn(m))),
    "linear, gradient": (gradients(F.linear), lambda n, m: (randn(n, 6), randn(m, 6), randn(m))),
    "mm": (torch.mm, lambda n, m: (randn(n, 5), randn(5, m))),
    "bmm": (torch.bmm, lambda n, m: (randn(3, n, 5), randn(3, 5, m))),
    "mv": (torch.mv, lambda n, m: (randn(n, m), randn(m))),
    "attention": (attention, lambda n, m: (randn(2, 3, n, 4), randn(2, 3, m, 4), randn(2, 3, m, 4))),
    "attention, gradient": (gradients(attention), lambda n, m: (randn(2, n, 4), randn(2, m, 4), randn(2, m, 4))),
    "sdpa": (F.scaled_dot_product_attention, lambda n, m: (randn(2, 3, n, 4), randn(2, 3, m, 4), randn(2, 3, m, 4))),
    "softmax": (lambda x: x.softmax(-1), lambda n, m: (randn(n, m),)),
    "log_softmax, gradient": (gradients(lambda x: x.log_softmax(-1)), lambda n, m: (randn(n, m),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), lambda n, m: (randn(n, m), randn(m), randn(m))),
    "layer_norm, gradient": (
        gradients(lambda x, w, b: F.layer_norm(x, w.shape, w, b, 0.1)),  # a small eps amplifies errors if m is 1
        lambda n, m: (randn(n, m), randn(m), randn(m)),
    ),
    "rms": (rms, lambda n, m: (randn(n, m), randn(m))),
    "rms_norm, gradient": (gradients(lambda x, w: F.rms_norm(x, w.shape, w)), lambda n, m: (randn(n, m, 6), randn(6))),
    "rotated": (rotated, lambda n, m: (randn(n, 2 * m), randn(n, 2 * m), randn(n, 2 * m))),
    "gelu, gradient": (gradients(F.gelu), lambda n, m: (randn(n, m),)),
    "silu, gradient": (gradients(F.silu), lambda n, m: (randn(n, m),)),
    "causal mask": (lambda x: x.tril(), lambda n, m: (randn(n, m),)),
    "triu": (lambda x: x.triu(1), lambda n, m: (randn(n, m),)),
    "cache": (lambda x, at, new: x.index_copy_(0, at, new), lambda n, m: (randn(n, m), whole(n, 1), randn(1, m))),
    "cross_entropy": (F.cross_entropy, lambda n, m: (randn(n, m), whole(m, n))),
    "cross_entropy, gradient": (gradients(F.cross_entropy), lambda n, m: (randn(n, m), whole(m, n))),
    "cumsum": (lambda x: x.cumsum(0), lambda n, m: (randn(n, m),)),
    "cumsum of another dtype": (lambda x: x.cumsum(0, dtype=torch.int64), lambda n, m: (whole(7, n, m),)),
    "trace": (torch.trace, lambda n, m: (randn(n, m),)),
    "trace of a view": (lambda x: torch.trace(x[1:, :, 1]), lambda n, m: (randn(n + 1, m, 2),)),
    "normal around means": (lambda x: torch.normal(x, 0.0), lambda n, m: (randn(n, m),)),
    "topk": (lambda x: tuple(x.topk(2)), lambda n, m: (randn(n, m),)),
    "sort": (lambda x: tuple(x.sort(-1)), lambda n, m: (randn(n, m),)),
    "gather": (lambda x, at: x.gather(-1, at), lambda n, m: (randn(n, m), whole(m, n, 3))),
    "index": (lambda x, at: x[at], lambda n, m: (randn(n, m), whole(n, 4))),
    "index_select": (lambda x, at: x.index_select(0, at), lambda n, m: (randn(n, m), whole(n, m))),
    "index_put": (lambda x, at, new: x.index_put_((at,), new), lambda n, m: (randn(n, m), torch.arange(2), randn(m))),
    "hash": (lambda x: torch.hash_tensor(x, 0), lambda n, m: (randn(n, m),)),
    "product with an activation": (torch._addmm_activation, lambda n, m: (randn(m), randn(n, 3), randn(3, m))),
    "norms of rows": (
        lambda x, at: torch.embedding_renorm_(x, at, 1.5, 2.0), lambda n, m: (randn(n, m), torch.arange(n))
    ),
    "one position": (lambda x: x[:, -1].argmax(-1), lambda n, m: (randn(2, n, m),)),
    "eq": (lambda x: (x == 3).any(), lambda n, m: (whole(5, n, m),)),
    # vision
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, padding=1), lambda n, m: (randn(2, 3, n, m), randn(4, 3, 3, 3), randn(4)),
    ),
    "conv2d, gradient": (
        gradients(lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1)),
        lambda n, m: (randn(2, 3, n, m), randn(4, 3, 3, 3), randn(4)),
    ),
    "patches": (
        lambda x, w, b: F.conv2d(x, w, b, stride=2),
        lambda n, m: (randn(n, 3, 4, 2 * m), randn(4, 3, 2, 2), randn(4)),
    ),
    "batch_norm": (
        lambda x, w, b, mean, var: (F.batch_norm(x, mean, var, w, b, True), mean, var),
        lambda n, m: (randn(n, 3, m, 4), randn(3), randn(3), randn(3), randn(3).abs()),
    ),
    "batch_norm, used": (
        lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b),
        lambda n, m: (randn(n, 3, m, 4), randn(3), randn(3), randn(3), randn(3).abs()),
    ),
    "batch_norm, gradient": (
        gradients(lambda x, w, b: F.batch_norm(x, None, None, w, b, True)),
        lambda n, m: (randn(n, 3, m, 4), randn(3), randn(3)),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda n, m: (randn(2, 4, n, m), randn(4), randn(4))),
    "relu, gradient": (gradients(F.relu), lambda n, m: (randn(n, m),)),
    "max_pool2d, gradient": (gradients(lambda x: F.max_pool2d(x, 3, 2, 1)), lambda n, m: (randn(2, 3, n + 4, m + 4),)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), lambda n, m: (randn(2, 3, n + 4, m + 4),)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), lambda n, m: (randn(2, 3, n, m),)),
    "flatten": (lambda x: x.flatten(1) + 1, lambda n, m: (randn(n, 3, m),)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), lambda n, m: (randn(1, 2, n, m),)),
    "pad": (lambda x: F.pad(x, (1, 2)), lambda n, m: (randn(n, m),)),
    # recurrent
    "cell, gradient": (gradients(cell), lambda n, m: (randn(n, 4 * m), randn(n, m))),
    "addmm": (torch.addmm, lambda n, m: (randn(m), randn(n, 6), randn(6, m))),
    "mse_loss, gradient": (gradients(F.mse_loss), lambda n, m: (randn(n, m), randn(n, m))),
    # optimizers
    "sgd": (stepped(torch.optim.SGD, momentum=0.9), lambda n, m: (randn(n, m), randn(n, m), randn(n, m))),
    "adam": (stepped(torch.optim.Adam), lambda n, m: (randn(n, m), randn(n, m), randn(n, m))),
    "adamw, one by one": (
        stepped(torch.optim.AdamW, foreach=False), lambda n, m: (randn(n, m), randn(n, m), randn(n, m)),
    ),
    "adam, fused": (stepped(torch.optim.Adam, fused=True), lambda n, m: (randn(n, m), randn(n, m), randn(n, m))),
    "clipping": (
        lambda x, y: torch._foreach_norm([x, y]), lambda n, m: (randn(n, m), randn(m)),
    ),
}  # fmt: skip

# On devices with eight compute units the last size has a separate class.
SEEN = [(5, 7), (6, 9), (8, 12), (12, 20), (20, 9), (7, 8), (9, 6), (18, 22), (16, 24), (14, 18)]
# On SIMT targets tiles depend on the sizes, so there are more classes.
SEEN_IN_LOCKSTEP = [(13, 12), (9, 16), (14, 10), (11, 15), (15, 11), (23, 12), (24, 10)]
NEW = [(11, 13), (16, 20), (10, 14), (13, 24), (24, 11)]


# --- layouts


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return placed(tensor, "cpu", torch.empty(tensor.shape).stride(), 0)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Transposes the last two dimensions in memory."""
    if tensor.dim() < 2:
        return plain(tensor)
    return placed(tensor, "cpu", torch.empty(tensor.transpose(-1, -2).shape).transpose(-1, -2).stride(), 0)


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """Makes the tensor a part of a wider one."""
    if not tensor.dim():
        return plain(tensor)
    return placed(tensor, "cpu", torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 5).stride(), 0)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Places the tensor at storage offset 1, which is not aligned to 16 bytes."""
    return placed(tensor, "cpu", torch.empty(tensor.shape).stride(), 1)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor).contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else plain(tensor)


LAYOUTS = (plain, transposed, spaced, shifted, channels_last)


def calls(make: Callable[[int, int], Arguments], sizes: list[tuple[int, int]]) -> Iterator[Arguments]:
    """Yields arguments of each size in each layout."""
    for n, m in sizes:
        given = make(n, m)
        for layout in LAYOUTS:
            yield tuple(layout(one) if isinstance(one, torch.Tensor) else one for one in given)


def outcome(function: Function, given: Arguments) -> Any:
    """Returns a call's result and its arguments afterwards, or its error."""
    try:
        found = function(*given)
        torch.accelerator.synchronize(DEVICE)
    except Exception as error:
        return type(error), str(error)
    return to_cpu((found, given))


def compare(function: Function, given: Arguments, what: str) -> None:
    arguments = on_device(given)
    expected, found = outcome(function, given), outcome(function, arguments)
    if isinstance(expected[0], type):
        if expected[0] is IndexError and found[0] is IndexError and "out of bounds" in found[1]:
            return  # the kernel has its own message
        assert found == expected, f"{what}: {found}, and the CPU: {expected}"
        return
    assert not isinstance(found[0], type), f"{what}: {found[1]}"
    torch.testing.assert_close(
        found, expected, equal_nan=True, atol=2e-5, rtol=2e-4, msg=lambda text: f"{what}: {text}"
    )


DIVIDED_WITH_REMAINDERS = {"max_pool2d, gradient", "avg_pool2d"}
# cuBLASLt and cuDNN have a plan for each size: their heuristics are asked for each.
OF_CUBLASLT = {"linear", "linear, gradient", "addmm", "product with an activation"}
OF_CUDNN = {"conv2d", "conv2d, gradient", "patches"}


def planner_calls() -> dict[str, int]:
    return {name: one["planner_calls"] for name, one in _C.plan_counts().items() if one["planner_calls"]}


def refused(given: Arguments) -> Arguments:
    """Returns arguments with mismatched sizes, for most functions that take several."""
    first, *rest = given
    more = torch.randn(*first.shape[:-1], 1).to(first.dtype) if _is_float(first) else first[..., :1]
    return (torch.cat((first, more), -1), *rest)


@pytest.mark.parametrize("name", CASES)
def test_plans_are_replayed_for_new_shapes(name: str) -> None:
    function, make = CASES[name]
    if name in OF_CUDNN and routines_of(drivers.device(0), "convolution"):
        pytest.skip("cuDNN has a plan for each size")
    preferred = "generated" if name in OF_CUBLASLT else preferences.DEFAULT
    with plans_from_the_start(), preferences.preferring("products", preferred):
        for position, given in enumerate(calls(make, SEEN + SEEN_IN_LOCKSTEP * launch.target_of(0).simt)):
            compare(function, given, f"{name} {[tuple(one.shape) for one in given]}")
            if position % 7 == 3:
                compare(function, refused(given), f"{name} with mismatched sizes")
        if name in DIVIDED_WITH_REMAINDERS and torch.__version__ < "2.13":
            pytest.skip("the meta functions before torch 2.13 ask for remainders of sizes: a plan for each remainder")
        before = planner_calls()
        again = set()
        for given in calls(make, NEW):
            compare(function, given, f"{name} {[tuple(one.shape) for one in given]}")
        after = planner_calls()
        again = {one for one in after if after[one] != before.get(one)}
        reasons = {one: _C.plan_counts()[one]["reasons_for_exact"] for one in again}
        assert not again, (
            f"{name} ran planners again: {[(one, after[one] - before.get(one, 0)) for one in again]} {reasons}"
        )
