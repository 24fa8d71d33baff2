"""Operators with hand-written kernels match PyTorch's CPU results, planned and replayed, without fallbacks."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE
from torch.utils._pytree import tree_leaves, tree_map

from torch_backplane import _C, plans

aten, F = torch.ops.aten, torch.nn.functional
indices = torch.tensor


def device():
    return torch.device(DEVICE)


def r(*shape, dtype=torch.float32):
    torch.manual_seed(sum(shape) + len(shape))
    return torch.randn(shape).to(dtype)


def ints(high, *shape):
    torch.manual_seed(high)
    return torch.randint(0, high, shape)


def grads(function, *tensors):
    """A call of a function that returns the result of `function` and the gradients of a weighted sum of it."""

    def run(*tensors):
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
        result = function(*leaves)
        wanted = [t for t in leaves if t.requires_grad]
        return result.detach(), *torch.autograd.grad((result * result.detach()).sum(), wanted)

    return run, *tensors


CALLS = {
    "mm": (torch.mm, r(5, 6), r(6, 7)),
    "mm transposed": (lambda a, b: a.t() @ b.t(), r(40, 33), r(50, 40)),
    "mm int64": (torch.mm, ints(9, 5, 6), ints(9, 6, 7)),
    "mm of nothing": (torch.mm, r(5, 0), r(0, 7)),
    "mm empty": (torch.mm, r(0, 5), r(5, 7)),
    "mm bfloat16": (torch.mm, r(5, 40, dtype=torch.bfloat16), r(40, 7, dtype=torch.bfloat16)),
    "bmm": (torch.bmm, r(3, 5, 6), r(3, 6, 7)),
    "matmul of four dims": (torch.matmul, r(2, 3, 5, 6), r(6, 4)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=0.5), r(7), r(5, 6), r(6, 7)),
    "addmm in place": (lambda c, a, b: c.clone().addmm_(a, b, beta=2), r(5, 7), r(5, 6), r(6, 7)),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=3), r(3, 5, 7), r(3, 5, 6), r(3, 6, 7)),
    "addmv, mv, dot": (lambda c, a, b: (torch.addmv(c, a, b), a @ b, b @ b), r(5), r(5, 6), r(6)),
    "linear": grads(F.linear, r(4, 5, 40), r(33, 40), r(33)),
    "softmax": grads(lambda x: x.softmax(-1), r(5, 70)),
    "softmax dim 0": grads(lambda x: x.softmax(0), r(5, 70)),
    "softmax of a transposed tensor": grads(lambda x: x.mT.softmax(-1), r(3, 5, 7)),
    "log_softmax": grads(lambda x: x.log_softmax(1), r(5, 7, 3)),
    "softmax bfloat16": (lambda x: x.softmax(-1), r(5, 70, dtype=torch.bfloat16)),
    "softmax 0-dim": (lambda x: x.softmax(0), r()),
    "layer_norm": grads(lambda x, w, b: F.layer_norm(x, (40,), w, b), r(4, 5, 40), r(40), r(40)),
    "layer_norm plain": grads(lambda x: F.layer_norm(x, (5, 40)), r(4, 5, 40)),
    "rms_norm": grads(lambda x, w: F.rms_norm(x, (40,), w), r(4, 5, 40), r(40)),
    "_fused_rms_norm": (lambda x, w: aten._fused_rms_norm(x, [40], w, None), r(4, 5, 40), r(40)),
    "group_norm": grads(lambda x, w, b: F.group_norm(x, 3, w, b), r(2, 6, 5, 5), r(6), r(6)),
    "batch_norm": grads(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), r(4, 6, 5, 5), r(6), r(6)),
    "batch_norm evaluated": grads(
        lambda x, w, m, v: F.batch_norm(x, m.detach(), v.detach().abs() + 1, w), r(4, 6, 5), r(6)
    )
    and (lambda x, w, m, v: F.batch_norm(x, m, v, w), r(4, 6, 5), r(6), r(6), r(6).abs() + 1),
    "batch_norm running": (
        lambda x, m, v: (F.batch_norm(x, m := m.clone(), v := v.clone(), training=True), m, v), r(30, 6), r(6), r(6)
    ),
    "batch_norm channels last": (
        lambda x: F.batch_norm(x.contiguous(memory_format=torch.channels_last), None, None, training=True),
        r(4, 6, 5, 5),
    ),
    "embedding": grads(lambda w, i: F.embedding(i, w, padding_idx=2), r(9, 33), ints(9, 4, 5)),
    "index_select": (lambda x, i: x.index_select(1, i), r(3, 7, 4), ints(7, 5)),
    "index_select 0-dim": (lambda x, i: x.index_select(0, i), r(), indices([0])),
    "gather": grads(lambda x, i: x.gather(1, i), r(3, 7, 4), ints(7, 3, 2, 4)),
    "take": (torch.take, r(3, 4), indices([[-1, 3], [5, 11]])),
    "take_along_dim": (lambda x: x.take_along_dim(x.long().abs() % 4, 1), r(3, 4)),
    "scatter": (lambda x, i, s: x.scatter(0, i, s), r(6, 4), torch.stack([indices([3, 1, 5])] * 4, 1), r(3, 4)),
    "scatter value": (lambda x, i: x.scatter(1, i, 1.5), r(6, 4), ints(4, 6, 1)),
    "scatter_add": (lambda x, i, s: x.scatter_add(0, i, s), r(6, 4), ints(6, 9, 4), r(9, 4)),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), r(6, 4), ints(6, 9, 4), r(9, 4)),
    "index_add": (lambda x, i, s: x.index_add(0, i, s, alpha=2), r(6, 4), ints(6, 9), r(9, 4)),
    "index_copy": (lambda x, i, s: x.index_copy(1, i, s), r(6, 4), indices([3, 0]), r(6, 2)),
    "index_fill": (lambda x, i: x.index_fill(0, i, -1.0), r(6, 4), indices([3, -6])),
    "index": grads(lambda x, i: x[i], r(6, 4), ints(6, 3, 2)),
    "index two": grads(lambda x, i, j: x[:, i, :, j], r(3, 4, 5, 6), ints(4, 2, 1), ints(6, 3)),
    "index middle": (lambda x, i, j: x[:, i, j], r(3, 4, 5, 6), ints(4, 2, 1), -ints(5, 3)),
    "index_put": (
        lambda x, i, v: x.index_put((i,), v, accumulate=True), r(6, 4), ints(6, 30), r(30, 4)
    ),
    "index_put number": (lambda x, i: (x := x.clone(), x.__setitem__(i, 2.5), x)[0], r(6, 4), ints(6, 3)),
    "cross_entropy": grads(F.cross_entropy, r(8, 11), ints(11, 8)),
    "cross_entropy weighted": grads(
        lambda x, t, w: F.cross_entropy(x, t, w.detach().abs(), ignore_index=3, reduction="sum"), r(8, 11), ints(11, 8)
    )
    and (lambda x, t, w: F.cross_entropy(x, t, w, ignore_index=3, reduction="sum"), r(8, 11), ints(11, 8), r(11).abs()),
    "nll_loss2d": grads(lambda x, t: F.nll_loss(x, t), r(2, 5, 3, 4), ints(5, 2, 3, 4)),
    "nll_loss none": grads(lambda x, t: F.nll_loss(x, t, reduction="none"), r(8, 11), ints(11, 8)),
    "conv2d": grads(lambda x, w, b: F.conv2d(x, w, b, padding=1), r(2, 3, 8, 9), r(4, 3, 3, 3), r(4)),
    "conv2d 1x1": grads(lambda x, w: F.conv2d(x, w), r(2, 3, 8, 9), r(4, 3, 1, 1)),
    "conv2d all": grads(
        lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
        r(2, 4, 9, 8), r(6, 2, 3, 2), r(6),
    ),
    "conv2d depthwise": grads(lambda x, w: F.conv2d(x, w, groups=4), r(2, 4, 9, 8), r(4, 1, 3, 3)),
    "conv1d": grads(lambda x, w: F.conv1d(x, w, stride=2), r(2, 3, 20), r(4, 3, 3)),
    "conv3d": grads(lambda x, w, b: F.conv3d(x, w, b, padding=1), r(2, 3, 4, 5, 6), r(4, 3, 2, 3, 2), r(4)),
    "conv_transpose2d": grads(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, groups=2),
        r(2, 4, 5, 6), r(4, 3, 3, 3), r(6),
    ),
    "conv2d bfloat16": (F.conv2d, r(2, 3, 8, 9, dtype=torch.bfloat16), r(4, 3, 3, 3, dtype=torch.bfloat16)),
    "conv2d of channels last": (
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w), r(2, 3, 8, 9), r(4, 3, 3, 3)
    ),
    "conv2d of an empty batch": (F.conv2d, r(0, 3, 8, 9), r(4, 3, 3, 3)),
    "max_pool2d": grads(lambda x: F.max_pool2d(x, 2), r(2, 3, 8, 9)),
    "max_pool2d all": grads(
        lambda x: F.max_pool2d(x, 3, 2, padding=1, dilation=(1, 2), ceil_mode=True), r(2, 3, 8, 9)
    ),
    "max_pool1d": grads(lambda x: F.max_pool1d(x, 3, 1), r(2, 3, 9)),
    "max_pool3d": grads(lambda x: F.max_pool3d(x, 2), r(2, 3, 4, 5, 6)),
    "max_pool2d of NaN": (
        lambda x: F.max_pool2d(torch.where(x > 1, torch.nan, x), 2, return_indices=True), r(2, 3, 8, 9)
    ),
    "avg_pool2d": grads(lambda x: F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True), r(2, 3, 8, 9)),
    "avg_pool2d without padding": grads(
        lambda x: F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True, count_include_pad=False), r(2, 3, 8, 9)
    ),
    "avg_pool2d over": grads(lambda x: F.avg_pool2d(x, 2, divisor_override=3), r(2, 3, 8, 9)),
    "avg_pool3d": grads(lambda x: F.avg_pool3d(x, 2), r(2, 3, 4, 5, 6)),
    "avg_pool1d": grads(lambda x: F.avg_pool1d(x, 2), r(2, 3, 10)),
    "adaptive_avg_pool2d": grads(lambda x: F.adaptive_avg_pool2d(x, (3, 5)), r(2, 3, 8, 9)),
    "adaptive_avg_pool2d larger": grads(lambda x: F.adaptive_avg_pool2d(x, (11, 10)), r(3, 8, 9)),
    "nll_loss one": grads(lambda x, t: F.nll_loss(x, t), r(11), ints(11)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_operator(name):
    function, *arguments = CALLS[name]
    expected = function(*arguments)
    place = device()
    on_device = tree_map(lambda t: t.to(place), arguments)
    function(*on_device)  # plans all operators of the call
    before, counts = _C.fallback_counts(), plans.total()
    for _ in range(2):
        found = function(*on_device)
        for f, e in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if isinstance(e, torch.Tensor):
                torch.testing.assert_close(
                    f.cpu(), e, rtol=1e-4, atol=1e-4 if e.dtype != torch.bfloat16 else 5e-2, equal_nan=True
                )
    fallen = {k: v for k, v in _C.fallback_counts().items() if v != before.get(k, 0)}
    assert not fallen
    if plans.mode() == "1":
        assert plans.total()["planner_calls"] == counts["planner_calls"], plans.stats()


def test_index_errors_name_the_operator():
    place = device()
    table, index = torch.randn(5, 4, device=place), torch.tensor([0, 7]).to(place)
    table.index_select(0, index)
    with pytest.raises(IndexError, match=r"index_select: index 7 is out of bounds for dimension with size 5"):
        torch.bp.synchronize(place)
    torch.bp.synchronize(place)  # the error is raised once
    good = table.index_select(0, torch.tensor([1, 2]).to(place))
    assert good.shape == (2, 4)
    table.index_select(0, index)
    with pytest.raises(IndexError, match="index 7"):
        table.sum().item()
    assert table.sum().item() == table.sum().item()  # the device keeps working
