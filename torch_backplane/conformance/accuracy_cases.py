"""The cases of accuracy.py: operators that accumulate, over different dimensions.

The name of a case seeds its random inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from torch_backplane.conformance.accuracy import SIZES, Case, Draw, gradients

Make = Callable[[int, Draw], tuple[Any, ...]]
LARGE, SMALL = 10**6, 10**4  # limits of n for cases that need several, or many, numbers per summand


def few(n: int) -> int:
    """Return a number of results: up to 16, to reduce the influence of chance, and fewer for many summands."""
    return max(1, min(16, LARGE // n))


def side(n: int) -> int:
    return round(n**0.5)


# --- inputs


def rows(n: int, draw: Draw) -> tuple[Any, ...]:
    return (draw(few(n), n),)


def columns(n: int, draw: Draw) -> tuple[Any, ...]:
    return (draw(n, 16),)


def whole(n: int, draw: Draw) -> tuple[Any, ...]:
    return (draw(n),)


def gaps(n: int, draw: Draw) -> tuple[Any, ...]:
    return (draw(few(n), n, 2)[..., 1],)


def factors(n: int, draw: Draw) -> tuple[Any, ...]:
    return (1 + draw.normal(few(n), n) / n**0.5,)


def images(n: int, draw: Draw) -> tuple[Any, ...]:
    return (draw(few(n), 1, side(n), side(n)),)


def pair(n: int, draw: Draw) -> tuple[Any, ...]:
    return draw(n), draw.normal(n)


def labels(n: int, draw: Draw) -> tuple[Any, ...]:
    return draw(n, 10), draw.indices(10, n)


# --- functions


def batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, variance = torch.zeros_like(weight), torch.ones_like(weight)
    return F.batch_norm(x, mean, variance, weight, bias, training=True), mean, variance


def indexed(add: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function of (values, index) that adds values to a result with 4 rows."""
    return lambda values, index: add(values.new_zeros(4, values.shape[1]), index, values)


def _reductions() -> Iterator[Case]:
    yield Case("sum of all", whole, lambda x: x.sum())
    yield Case("sum, inner", rows, lambda x: x.sum(-1))
    yield Case("sum, outer", columns, lambda x: x.sum(0), LARGE)
    yield Case("sum, middle", lambda n, draw: (draw(4, n, 4),), lambda x: x.sum(1), LARGE)
    yield Case("sum, outer and inner", lambda n, draw: (draw(side(n), few(n), side(n)),), lambda x: x.sum((0, 2)))
    yield Case("sum, with gaps", gaps, lambda x: x.sum(-1))
    yield Case("sum of a transposed", columns, lambda x: x.t().sum(1), LARGE)
    yield Case("sum of an expanded", whole, lambda x: x[:1].expand(len(x)).sum())
    yield Case("mean", rows, lambda x: x.mean(-1))
    yield Case("nansum", rows, lambda x: x.nansum(-1))
    yield Case("nanmean", rows, lambda x: x.nanmean(-1))
    yield Case("trace", lambda n, draw: (draw(n, n),), torch.trace, SMALL // 10)
    yield Case("prod", factors, lambda x: x.prod(-1), distributions=("normal",))
    yield Case("logsumexp", rows, lambda x: x.logsumexp(-1))
    yield Case("logsumexp, outer", columns, lambda x: x.logsumexp(0), LARGE)
    for p in (0.5, 1, 2, 3):
        yield Case(f"norm of order {p}", rows, partial(torch.linalg.vector_norm, ord=p, dim=-1))
    yield Case("norms of a list", lambda n, draw: (draw(n), draw(3, n)), lambda *xs: torch._foreach_norm(xs))
    yield Case("dist", pair, torch.dist)
    yield Case("cosine_similarity", lambda n, draw: (draw(few(n), n), draw(few(n), n)), F.cosine_similarity)
    yield Case("renorm", rows, lambda x: x.renorm(2, 0, 1.0))
    yield Case("normalize", rows, F.normalize)
    for name in ("var", "std"):
        yield Case(name, rows, partial(getattr(torch, name), dim=-1))
        yield Case(f"{name} of all", whole, getattr(torch, name))
        yield Case(f"{name}, outer", columns, partial(getattr(torch, name), dim=0), LARGE)
    yield Case("var_mean", rows, lambda x: torch.var_mean(x, -1))
    yield Case("var, backward", rows, gradients(lambda x: x.var(-1)))
    yield Case("cov", lambda n, draw: (draw(4, n),), torch.cov)
    yield Case("corrcoef", lambda n, draw: (draw(4, n),), torch.corrcoef)
    yield Case("trapezoid", rows, torch.trapezoid)
    expanded = gradients(lambda x, n: x.expand(4, n))
    yield Case("expand, backward", lambda n, draw: (draw(4, 1), n), expanded, distributions=("normal",))


def _norms() -> Iterator[Case]:
    def layer(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(few(n), n), draw.normal(n), draw.normal(n)

    def of_rows(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(n, 16), draw.normal(16), draw.normal(16)

    def groups(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(few(n), 4, n // 2), draw.normal(4), draw.normal(4)

    def batch(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(n // 10, 4, 10), draw.normal(4), draw.normal(4)

    def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[1:], weight, bias)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[1:], weight)

    def group_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, 2, weight, bias)

    def trained(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return batch_norm(x, weight, bias)[0]

    yield Case("layer_norm", layer, layer_norm)
    yield Case("native_layer_norm", layer, lambda x, w, b: torch.native_layer_norm(x, x.shape[1:], w, b, 1e-5))
    yield Case("layer_norm, backward", layer, lambda x, w, b: gradients(layer_norm)(x, w, b)[:1])
    yield Case("layer_norm, backward of weights", of_rows, lambda x, w, b: gradients(layer_norm)(x, w, b)[1:], LARGE)
    yield Case("rms_norm", layer, rms_norm)
    yield Case("rms_norm, backward", layer, lambda x, w, _: gradients(lambda x, w: rms_norm(x, w, w))(x, w)[:1])
    yield Case(
        "rms_norm, backward of weights",
        of_rows,
        lambda x, w, _: gradients(lambda x, w: rms_norm(x, w, w))(x, w)[1:],
        LARGE,
    )
    yield Case("group_norm", groups, group_norm)
    yield Case("group_norm, backward", groups, gradients(group_norm))
    yield Case("batch_norm", batch, batch_norm)
    yield Case("batch_norm, backward", batch, gradients(trained))
    yield Case("batch_norm of images", lambda n, draw: (draw(2, 4, n // 2), *batch(n, draw)[1:]), batch_norm)
    yield Case("batch_norm of images, backward", lambda n, d: (d(2, 4, n // 2), *batch(n, d)[1:]), gradients(trained))
    yield Case("batch_norm of rows", of_rows, batch_norm, LARGE)
    yield Case("batch_norm of rows, backward", of_rows, gradients(trained), LARGE)
    yield Case("instance_norm", lambda n, draw: (draw(few(n), 2, n // 2),), F.instance_norm)
    yield Case(
        "weight_norm", lambda n, draw: (draw(4, n), draw.normal(4, 1)), lambda v, g: torch._weight_norm(v, g, 0), LARGE
    )
    yield Case(
        "weight_norm, backward",
        lambda n, draw: (draw(4, n), draw.normal(4, 1)),
        gradients(lambda v, g: torch._weight_norm(v, g, 0)),
        LARGE,
    )


def _losses() -> Iterator[Case]:
    def probabilities(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw.positive(n) * 0.98 + 0.01, draw.positive(n)

    def signs(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw.normal(n), draw.indices(2, n) * 2 - 1

    def many_classes(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(few(n), n), draw.indices(n, few(n))

    only: dict[str, Any] = {"distributions": ("normal",)}
    for reduction in ("mean", "sum"):
        of = partial(partial, reduction=reduction)
        for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
            yield Case(f"{loss.__name__}, {reduction}", pair, of(loss))
        yield Case(f"poisson_nll_loss, {reduction}", pair, of(F.poisson_nll_loss), distributions=("normal", "positive"))
        yield Case(f"binary_cross_entropy, {reduction}", probabilities, of(F.binary_cross_entropy), **only)
        logits = of(F.binary_cross_entropy_with_logits)
        yield Case(f"binary_cross_entropy_with_logits, {reduction}", lambda n, d: (d(n), d.positive(n)), logits)
        yield Case(f"kl_div, {reduction}", lambda n, d: (-d.positive(n), d.positive(n)), of(F.kl_div), **only)
        yield Case(f"soft_margin_loss, {reduction}", signs, of(F.soft_margin_loss), **only)
        yield Case(f"hinge_embedding_loss, {reduction}", signs, of(F.hinge_embedding_loss), **only)
        nll = of(F.nll_loss)
        yield Case(f"nll_loss, {reduction}", labels, nll, LARGE)
        yield Case(
            f"nll_loss with weights, {reduction}",
            lambda n, draw: (*labels(n, draw), draw.positive(10)),
            nll,
            LARGE,
        )
        yield Case(f"cross_entropy, {reduction}", labels, of(F.cross_entropy), LARGE)
        yield Case(f"multi_margin_loss, {reduction}", labels, of(F.multi_margin_loss), LARGE)
    yield Case("cross_entropy, smoothed", labels, partial(F.cross_entropy, label_smoothing=0.1), LARGE)
    yield Case("cross_entropy, many classes", many_classes, F.cross_entropy)
    yield Case("cross_entropy, backward", many_classes, gradients(F.cross_entropy))
    yield Case("gaussian_nll_loss", lambda n, d: (d(n), d.normal(n), d.positive(n) + 0.1), F.gaussian_nll_loss)
    yield Case("prelu, backward", lambda n, d: (d.normal(n), d.positive(1)), gradients(F.prelu), **only)


def _images() -> Iterator[Case]:
    def small(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(1, 1, 2, 2), side(n)

    yield Case("avg_pool2d", images, lambda x: F.avg_pool2d(x, x.shape[2:]))
    yield Case("adaptive_avg_pool2d", images, lambda x: F.adaptive_avg_pool2d(x, 1))
    yield Case("avg_pool1d", rows, lambda x: F.avg_pool1d(x, x.shape[-1]))
    yield Case("lp_pool2d", images, lambda x: F.lp_pool2d(x, 2, x.shape[2:]), distributions=("positive",))
    for pool in (F.avg_pool2d, F.max_pool2d):
        overlapping = gradients(lambda x, f=pool: f(x, x.shape[-1] // 2, 1))
        yield Case(f"{pool.__name__}, backward", images, overlapping, SMALL)
    yield Case("adaptive_avg_pool2d, backward", small, gradients(lambda x, s: F.adaptive_avg_pool2d(x, s)))
    for mode in ("nearest", "bilinear", "bicubic"):
        resized = gradients(lambda x, s, m=mode: F.interpolate(x, (s, s), mode=m))
        yield Case(f"interpolate, {mode}, backward", small, resized)
    for mode in ("bilinear", "bicubic"):
        shrunk = partial(F.interpolate, size=(2, 2), mode=mode, antialias=True)
        yield Case(f"interpolate, {mode}, antialias", images, shrunk)
    yield Case("pad, replicate, backward", lambda n, d: (d(1, 2, 3), n), gradients(_replicated))
    yield Case("fold", lambda n, d: (d(1, side(n) ** 2, side(n) ** 2), side(n)), _folded, 10**3)
    yield Case("unfold, backward", lambda n, d: (d(1, 1, side(n), side(n)),), gradients(_unfolded), SMALL)


def _replicated(x: torch.Tensor, n: int) -> torch.Tensor:
    return F.pad(x, (n, 0), mode="replicate")


def _folded(x: torch.Tensor, window: int) -> torch.Tensor:
    return F.fold(x, (2 * window - 1,) * 2, (window, window))


def _unfolded(x: torch.Tensor) -> torch.Tensor:
    return F.unfold(x, (x.shape[-1] // 2,) * 2)


def _indexing() -> Iterator[Case]:
    def values(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(n, 4), draw.indices(4, n)

    def table(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(4, 4), draw.indices(4, n)

    def wide(index: torch.Tensor) -> torch.Tensor:
        return index[:, None].expand(len(index), 4)

    yield Case("index_add", values, indexed(lambda out, index, x: out.index_add(0, index, x)), LARGE)
    yield Case("index_put, accumulate", values, indexed(lambda o, i, x: o.index_put((i,), x, accumulate=True)), LARGE)
    yield Case("scatter_add", values, indexed(lambda out, index, x: out.scatter_add(0, wide(index), x)), LARGE)
    for how in ("sum", "mean"):
        scatter = indexed(lambda o, i, x, r=how: o.scatter_reduce(0, wide(i), x, r))
        yield Case(f"scatter_reduce, {how}", values, scatter, LARGE)
    yield Case("index_reduce, mean", values, indexed(lambda o, i, x: o.index_reduce(0, i, x, "mean")), LARGE)
    yield Case("embedding, backward", table, gradients(lambda w, i: F.embedding(i, w)), LARGE)
    yield Case("index, backward", table, gradients(lambda w, i: w[i]), LARGE)
    yield Case("index_select, backward", table, gradients(lambda w, i: w.index_select(0, i)), LARGE)
    yield Case("gather, backward", table, gradients(lambda w, i: w.gather(0, wide(i))), LARGE)
    yield Case("embedding_bag", lambda n, d: (d(n, 4), d.indices(n, 2, n)), lambda w, i: F.embedding_bag(i, w), LARGE)
    yield Case("embedding_bag, backward", lambda n, d: (d(4, 4), d.indices(4, 2, n)), gradients(_bag), LARGE)
    yield Case("bincount", lambda n, d: (d.indices(4, n), d(n)), torch.bincount)


def _bag(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return F.embedding_bag(index, weight, mode="sum")


def _rows() -> Iterator[Case]:
    yield Case("cumsum", rows, lambda x: x.cumsum(-1))
    yield Case("cumsum, outer", columns, lambda x: x.cumsum(0), LARGE)
    yield Case("cumsum, backward", rows, gradients(lambda x: x.cumsum(-1)))
    yield Case("cumprod", factors, lambda x: x.cumprod(-1), distributions=("normal",))
    yield Case("logcumsumexp", rows, lambda x: x.logcumsumexp(-1))
    yield Case("logcumsumexp, outer", columns, lambda x: x.logcumsumexp(0), LARGE)
    for softmax in (torch.softmax, torch.log_softmax):
        for name, make, dim, most in (("", rows, -1, SIZES[-1]), (", outer", columns, 0, LARGE)):
            function = partial(softmax, dim=dim)
            yield Case(f"{softmax.__name__}{name}", make, function, most)
            yield Case(f"{softmax.__name__}{name}, backward", make, gradients(function), most)


def _products() -> Iterator[Case]:
    def matrices(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw(4, n), draw.normal(n, 4)

    yield Case("mm", matrices, torch.mm)
    yield Case("mm, both of depth first", lambda n, d: (d(n, 4), d.normal(n, 4)), lambda a, b: a.t() @ b)
    yield Case("mm, both of depth last", lambda n, d: (d(4, n), d.normal(4, n)), lambda a, b: a @ b.t())
    yield Case("mm, many columns", lambda n, d: (d(16, n), d.normal(n, 32)), torch.mm, LARGE)
    yield Case("mv", lambda n, d: (d(4, n), d.normal(n)), torch.mv)
    yield Case("dot", pair, torch.dot)
    yield Case("bmm", lambda n, d: (d(2, 3, n), d.normal(2, n, 3)), torch.bmm, LARGE)
    yield Case("addmm", lambda n, d: (d(4, 4), d(4, n), d.normal(n, 4)), torch.addmm)
    yield Case("linear, backward", lambda n, d: (d(n, 4), d.normal(3, 4), d.normal(3)), gradients(F.linear), LARGE)
    yield Case("conv1d", lambda n, d: (d(1, n // 5, 8), d.normal(2, n // 5, 5)), F.conv1d, LARGE)
    yield Case("conv2d", lambda n, d: (d(1, n // 9, 4, 4), d.normal(2, n // 9, 3, 3)), F.conv2d, LARGE)
    yield Case("conv2d, large window", lambda n, d: (*images(n, d), d.normal(2, 1, side(n), side(n))), F.conv2d)
    weights = gradients(lambda x, w, b: F.conv2d(x, w, b, padding=1))
    yield Case(
        "conv2d, backward",
        lambda n, d: (d(n // 100, 2, 10, 10), d.normal(3, 2, 3, 3), d.normal(3)),
        weights,
        LARGE,
    )
    yield Case(
        "conv_transpose2d",
        lambda n, d: (d(1, n // 4, 4, 4), d.normal(n // 4, 2, 2, 2)),
        F.conv_transpose2d,
        LARGE,
    )
    yield Case(
        "conv_transpose2d, backward",
        lambda n, d: (d(n // 100, 2, 10, 10), d.normal(2, 3, 3, 3), d.normal(3)),
        gradients(F.conv_transpose2d),
        LARGE,
    )

    def keys(n: int, draw: Draw) -> tuple[Any, ...]:
        return draw.normal(1, 2, 4, 8), draw.normal(1, 2, n, 8), draw(1, 2, n, 8)

    yield Case("scaled_dot_product_attention", keys, F.scaled_dot_product_attention, LARGE)
    attended = gradients(F.scaled_dot_product_attention)
    yield Case("scaled_dot_product_attention, backward", keys, attended, LARGE)
    for p in (1.0, 2.0, 3.0):
        distances = partial(torch.cdist, p=p, compute_mode="donot_use_mm_for_euclid_dist")
        yield Case(f"cdist of order {p:.0f}", lambda n, d: (d(2, n), d(3, n)), distances)
        backward = gradients(lambda a, b, f=distances: f(a, b))
        yield Case(f"cdist of order {p:.0f}, backward", lambda n, d: (d(2, 4), d(n, 4)), backward, LARGE)
    yield Case("pdist", lambda n, d: (d(3, n),), F.pdist)
    yield Case("einsum", lambda n, d: (d(n, 2, 3), d.normal(n, 3, 2)), partial(torch.einsum, "nij,njk->ik"), LARGE)


CASES: tuple[Case, ...] = (
    *_reductions(),
    *_norms(),
    *_losses(),
    *_images(),
    *_indexing(),
    *_rows(),
    *_products(),
)


def chosen(match: str) -> list[Case]:
    """Return the cases whose names contain a match of the regular expression."""
    return [case for case in CASES if re.search(match, case.name)]
