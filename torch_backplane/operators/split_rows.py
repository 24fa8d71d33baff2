"""Softmax and norms of few long rows, in several launches.

The reduction engine computes the statistics of each row and divides rows among work groups. A pointwise launch with any
number of groups then computes the elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from torch_backplane.kernels import Expression, Reduction
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.reductions import summation, summations, two_sum, whole
from torch_backplane.kernels.templates.norms import Affine, Evaluated, Saved, Sets, Statistics
from torch_backplane.kernels.templates.source import row_groups, rows_and_columns, rows_per_group
from torch_backplane.kernels.templates.spelling import lane_count
from torch_backplane.operators.reduce_ops import moments
from torch_backplane.planning import dialect_of, run_pointwise, run_reduction
from torch_backplane.planning.call import shares_memory
from torch_backplane.planning.launch import traced

Optional = torch.Tensor | None


# --- softmax


def divides_softmax(out: torch.Tensor, dim: int) -> bool:
    """Whether to compute the softmax along `dim` here instead of in one launch."""
    dialect = dialect_of(out.device)
    rows, size, columns = rows_and_columns(out.shape, dim)
    if columns == 1:
        return dialect.target.should_divide(row_groups(dialect, rows)[0], -(-size // dialect.target.team_size))
    items = rows * -(-columns // lane_count(dialect, value_dtype(out.dtype)))
    return dialect.target.should_divide(-(-items // rows_per_group(dialect)), size)


# Elements can exceed the reference of exponentials by this much: so little that differences are rounded no more than
# the numbers are. For a greater element the sum is rescaled, which shrinks the sum and its error by more than half.
_ABOVE = 1.0


def exponentials(log: bool, dtype: torch.dtype) -> Reduction:
    """The reduction to the greatest element, and the reciprocal or the logarithm of the sum of exp(x - greatest).

    The state is (reference of exponentials, greatest element, sum of exp(x - reference), rounding error of the sum).
    The greatest element exceeds the reference by at most _ABOVE.
    """

    def joined(*states: Expression) -> tuple[Expression, ...]:
        (at_a, top_a, sum_a, lost_a), (at_b, top_b, sum_b, lost_b) = states[:4], states[4:]
        to_b = top_b > at_a + _ABOVE
        factor = f.exp(f.where(at_a == at_b, 0.0, f.where(to_b, at_a - at_b, at_b - at_a)))
        stays, moves = f.where(to_b, sum_b, sum_a), f.where(to_b, sum_a, sum_b) * factor
        lost = f.where(to_b, lost_b, lost_a) + f.where(to_b, lost_a, lost_b) * factor
        return f.where(to_b, at_b, at_a), f.maximum(top_a, top_b), stays, moves, lost

    def combine(*states: Expression) -> tuple[Expression, ...]:
        at, top, stays, moves, lost = joined(*states)
        total, rest = two_sum(stays, moves)
        return at, top, total, lost + rest

    def add(*states: Expression) -> tuple[Expression | float, ...]:
        at, top, stays, moves, _ = joined(*states)
        return at, top, stays + moves, 0.0

    def start(x: Expression, _: Expression) -> tuple[Expression | float, ...]:
        # NaN and infinity make the sum NaN; minus infinity adds nothing.
        at = f.where(f.isnan(x), -math.inf, x)
        return at, at, f.where(f.isnan(x) | (x == math.inf), math.nan, (x > -math.inf).to(dtype)), 0.0

    def finish(at: Expression, top: Expression, total: Expression, lost: Expression, _: Expression) -> Any:
        summed = whole(total, lost) * f.exp(at - top)
        return top, f.log(summed) if log else 1.0 / summed

    return Reduction([dtype] * 4, [-math.inf, -math.inf, 0.0, 0.0], start, combine, finish, add)


def _softmax_of(x: Expression, top: Expression, scale: Expression) -> Expression:
    return f.exp(x - top) * scale


def _log_softmax_of(x: Expression, top: Expression, logarithm: Expression) -> Expression:
    return (x - top) - logarithm


def softmax(out: torch.Tensor, self: torch.Tensor, dim: int, log: bool) -> None:
    """Computes the same as `templates.softmax.softmax`."""
    name = "log_softmax" if log else "softmax"
    compute = value_dtype(out.dtype)
    shape, kept = _row_shapes(out, dim)
    x, top, scale = self.view(shape), *_statistics(2, kept, compute, out)
    definition = traced(("exponentials", log, compute), lambda: exponentials(log, compute))
    run_reduction(definition, [top, scale], [x], [1], key=(name, compute), compute=compute, name=name)
    formula = _log_softmax_of if log else _softmax_of
    run_pointwise(formula, [out.view(shape)], [x, top, scale], key=name, compute=compute, name=name)


def softmax_backward(out: torch.Tensor, grad: torch.Tensor, result: torch.Tensor, dim: int, log: bool) -> None:
    """Computes the same as `templates.softmax.softmax_backward`."""
    name = ("log_softmax" if log else "softmax") + "_backward"
    compute = value_dtype(grad.dtype)
    shape, kept = _row_shapes(out, dim)
    grad, result = grad.view(shape), result.view(shape)
    (total,) = _statistics(1, kept, compute, out)
    inputs = [grad] if log else [grad, result]
    definition = traced(
        ("softmax_backward", log, compute),
        lambda: summation(compute, (lambda g, _: g) if log else (lambda g, y, _: g * y)),
    )
    run_reduction(definition, [total], inputs, [1], key=(name, compute), compute=compute, name=name)
    formula = _log_softmax_gradient if log else _softmax_gradient
    run_pointwise(formula, [out.view(shape)], [grad, result, total], key=name, compute=compute, name=name)


def _softmax_gradient(grad: Expression, result: Expression, total: Expression) -> Expression:
    return (grad - total) * result


def _log_softmax_gradient(grad: Expression, result: Expression, total: Expression) -> Expression:
    return grad - f.exp(result) * total


def _row_shapes(out: torch.Tensor, dim: int) -> tuple[Sequence[int], Sequence[int]]:
    """(shape of the elements, shape of one number for each row)."""
    rows, size, columns = rows_and_columns(out.shape, dim)
    return (rows, size, columns), (rows, 1, columns)


def _statistics(count: int, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device=like.device) for _ in range(count)]


# --- norms


def divides_sets(device: torch.device, sets: Sets) -> bool:
    """Whether to compute the norm of these sets here instead of in one launch."""
    dialect = dialect_of(device)
    steps = sets.pieces * -(-sets.length // dialect.target.team_size)
    return dialect.target.should_divide(row_groups(dialect, sets.count)[0], steps)


def divides_weights(device: torch.device, sets: Sets, value: torch.dtype) -> bool:
    """`divides_sets` for the gradients of weight and bias, each of which is a sum over sets."""
    dialect = dialect_of(device)
    if sets.norm == "layer":
        items = -(-sets.length // lane_count(dialect, value))
        return dialect.target.should_divide(-(-items // rows_per_group(dialect)), sets.count)
    steps = sets.count // sets.groups * -(-sets.length // dialect.target.team_size)
    return dialect.target.should_divide(row_groups(dialect, sets.pieces * sets.groups)[0], steps)


class _Views:
    """Views that broadcast against each other: of all elements, of a number for each set, and of weights."""

    def __init__(self, sets: Sets) -> None:
        batch = sets.count // sets.groups
        self.shape, self.reduced, self.of_set, self.of_weight = {
            "layer": ((sets.count, sets.length), [1], (sets.count, 1), (1, sets.length)),
            "group": (
                (batch, sets.groups, sets.pieces, sets.length),
                [2, 3],
                (batch, sets.groups, 1, 1),
                (1, sets.groups, sets.pieces, 1),
            ),
            "batch": ((sets.pieces, sets.count, sets.length), [0, 2], (1, sets.count, 1), (1, sets.count, 1)),
        }[sets.norm]

    def elements(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.shape)

    def place(self, given: Optional, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """A tensor for one number for each set: a view of `given` if it has the dtype, else a new tensor."""
        if given is not None and given.dtype == dtype:
            return given.view(self.of_set)
        return torch.empty(self.of_set, dtype=dtype, device=like.device)

    def keep(self, given: Optional, value: torch.Tensor) -> None:
        """Copies the numbers to `given` if `place` made a new tensor for them."""
        if given is not None and given.dtype != value.dtype:
            given.view(self.of_set).copy_(value)

    def sets(self, *tensors: Optional) -> list[torch.Tensor]:
        return [tensor.view(self.of_set) for tensor in tensors if tensor is not None]

    def weights(self, *tensors: Optional) -> list[torch.Tensor]:
        return [tensor.view(self.of_weight) for tensor in tensors if tensor is not None]


def _spread(centred: bool, dtype: torch.dtype) -> Reduction:
    """The reduction to (mean, its rounding error, reciprocal standard deviation, unbiased variance). If not `centred`,
    to the reciprocal root mean square. The scalar is eps, which is added to the variance or mean square.
    """
    if not centred:
        return summation(dtype, lambda x, *_: x * x, lambda s, n, eps: 1.0 / f.sqrt(s / n.to(dtype) + eps), [dtype])

    def finish(
        mean: Expression, low: Expression, m2: Expression, _: Expression, count: Expression, eps: Expression
    ) -> tuple[Expression, ...]:
        near = whole(mean, low)
        number = count.to(dtype)
        return near, low - (near - mean), 1.0 / f.sqrt(m2 / number + eps), m2 / (number - 1.0)

    return moments(finish, dtype)


def norm(
    sets: Sets,
    out: torch.Tensor,
    self: torch.Tensor,
    affine: Affine,
    given: Statistics,
    eps: float,
) -> None:
    """Computes the same as `templates.norms.norm`."""
    (weight, bias), (mean, rstd, running, momentum) = affine, given
    name, compute, views = f"{sets.norm}_norm", value_dtype(out.dtype), _Views(sets)
    x, weights = views.elements(self), views.weights(weight, bias)
    numbers: list[tuple[float, torch.dtype]] = []
    if rstd is None:
        assert running is not None
        statistics, numbers = views.sets(*running), [(eps, compute)]
    else:
        found = [views.place(rstd, compute, out)]
        if mean is not None:
            low, variance = _statistics(2, views.of_set, compute, out)
            found = [views.place(mean, compute, out), low, *found, variance]
        centred = mean is not None
        definition = traced(("spread of sets", centred, compute), lambda: _spread(centred, compute))
        key = (name, centred, compute)
        run_reduction(definition, found, [x], views.reduced, [eps], key=key, compute=compute, name=name)
        views.keep(mean, found[0])
        views.keep(rstd, found[2 if centred else 0])
        statistics = found[:3]
        if running is not None:
            _move(list(zip(views.sets(*running), (found[0], found[3]), strict=True)), momentum, compute)
    shape = (len(statistics), weight is not None, bias is not None)

    def result(x: Expression, *rest: Expression) -> Expression:
        numbers = iter(rest)
        statistics = [next(numbers) for _ in range(shape[0])]
        scale, shift = (next(numbers) if one else None for one in shape[1:])
        if len(statistics) == 2:  # running mean and variance
            normal = (x - statistics[0]) * (1.0 / f.sqrt(statistics[1] + next(numbers)))
        else:
            normal = ((x - statistics[0]) - statistics[1] if statistics[1:] else x) * statistics[-1]
        normal = normal if scale is None else normal * scale
        return normal if shift is None else normal + shift

    to, operands = [views.elements(out)], [x, *statistics, *weights]
    run_pointwise(result, to, operands, numbers, key=(name, *shape), compute=compute, name=name)


def _move(moved: list[tuple[torch.Tensor, torch.Tensor]], momentum: float, compute: torch.dtype) -> None:
    """Updates running statistics (the first of each pair) with new ones."""

    def step(*values: Expression) -> tuple[Expression, ...]:
        *pairs, by = values
        half = len(pairs) // 2
        return tuple((1.0 - by) * old + by * new for old, new in zip(pairs[:half], pairs[half:], strict=True))

    groups = [[one] for one in moved] if shares_memory(moved[0][0], [moved[1][0]]) else [moved]
    for group in groups:
        running, found = (list(part) for part in zip(*group, strict=True))
        numbers, key = [(float(momentum), compute)], ("running statistics", len(group))
        run_pointwise(step, running, [*running, *found], numbers, key=key, compute=compute, name="batch_norm")


def _normal(x: Expression, mean: Expression | None, rstd: Expression) -> Expression:
    return (x if mean is None else x - mean) * rstd


class _Gradient:
    """The formulas for the gradient of self."""

    def __init__(self, sets: Sets, weight: Optional, mean: Optional, *, training: bool, variance: bool) -> None:
        self.by_number = sets.norm != "batch" and weight is not None
        self.key = (sets.norm == "batch", weight is not None, mean is not None, training, variance)
        self.weighted, self.centred, self.training, self.variance = self.key[1:3] + self.key[3:]

    def parts(self, *values: Expression) -> tuple[Expression, Expression, Expression]:
        """(gradient times the weight of each number, normalised number, factor of the set).

        Args:
            values: Gradient, number, mean (if there is one), rstd, weight (if there is one), eps.
        """
        g, x, *rest, added = values
        mean = rest.pop(0) if self.centred else None
        rstd = rest.pop(0)
        if self.variance:
            rstd = 1.0 / f.sqrt(rstd + added)
        normal = _normal(x, mean, rstd)
        if not self.weighted:
            return g, normal, rstd
        return (g * rest[0], normal, rstd) if self.by_number else (g, normal, rest[0] * rstd)

    def products(self, *values: Expression) -> tuple[Expression, Expression]:
        *operands, _, added = values
        g, normal, _ = self.parts(*operands, added)
        return g, g * normal

    def result(self, *values: Expression) -> Expression:
        """The gradient of self. In training, `values` has two more numbers before eps: the means over the set of the
        gradients, and of the gradients times the normalised numbers.
        """
        *operands, added = values
        if not self.training:
            g, _, scale = self.parts(*operands, added)
            return g * scale
        *operands, mean_grad, mean_product = operands
        g, normal, scale = self.parts(*operands, added)
        left = normal * mean_product
        return (g - (mean_grad + left if self.centred else left)) * scale


def norm_backward(
    sets: Sets,
    out: torch.Tensor,
    saved: Saved,
    wanted: Affine = Affine(),  # noqa: B008, it is immutable
    how: Evaluated = Evaluated(),  # noqa: B008, it is immutable
) -> None:
    """Computes the same as `templates.norms.norm_backward`."""
    (grad, self, weight, mean, rstd), (weight_grad, bias_grad), (training, variance, eps) = saved, wanted, how
    name, compute, views = f"{sets.norm}_norm_backward", value_dtype(out.dtype), _Views(sets)
    formulas = _Gradient(sets, weight, mean, training=training, variance=variance)
    operands = [views.elements(grad), views.elements(self), *views.sets(mean, rstd), *views.weights(weight)]
    key, found = (name, *formulas.key, compute), []

    def finish(grads: Expression, products: Expression, count: Expression, _: Expression) -> tuple[Expression, ...]:
        number = count.to(compute)
        return grads, products, grads / number, products / number

    if training or weight_grad is not None or bias_grad is not None:
        sums = (views.place(one, compute, out) for one in (bias_grad, weight_grad))
        found = [*sums, *_statistics(2, views.of_set, compute, out)]
        definition = traced(("of sets", key), lambda: summations(compute, 2, formulas.products, finish, [compute]))
        full = [one.expand(views.shape) for one in operands]
        run_reduction(definition, found, full, views.reduced, [eps], key=key, compute=compute, name=name)
        views.keep(bias_grad, found[0])
        views.keep(weight_grad, found[1])
    means, numbers = found[2:] if training else [], [(float(eps), compute)]
    to, operands = [views.elements(out)], [*operands, *means]
    run_pointwise(formulas.result, to, operands, numbers, key=key, compute=compute, name=name)


def layer_weight_grads(sets: Sets, wanted: Affine, saved: Saved) -> None:
    """Computes the same as `templates.norms.weight_grads`, for a layer or RMS norm."""
    (weight_grad, bias_grad), (grad, self, _, mean, rstd) = wanted, saved
    name, compute, views = "layer_norm_backward", value_dtype(grad.dtype), _Views(sets)
    operands, centred = [views.elements(grad)], mean is not None
    has = (weight_grad is not None, bias_grad is not None)
    if weight_grad is not None:
        operands += [views.elements(self), *views.sets(mean, rstd)]

    def start(g: Expression, *rest: Expression) -> list[Expression]:
        product = [g * _normal(rest[0], rest[1] if centred else None, rest[1 + centred])] if has[0] else []
        return product + [g] * has[1]

    _sum_up(
        start,
        views.weights(weight_grad, bias_grad),
        [one.expand(views.shape) for one in operands],
        [0],
        key=("weights", centred, has),
        compute=compute,
        name=name,
    )


def group_norm_backward(sets: Sets, out: Optional, of: Affine, saved: Saved) -> None:
    """The gradients of a group norm that are wanted, all computed from sums over each channel of each image."""
    (weight_grad, bias_grad), (grad, self, weight, mean, rstd) = of, saved
    assert mean is not None
    name, compute, views = "group_norm_backward", value_dtype(grad.dtype), _Views(sets)
    operands = [views.elements(grad), views.elements(self), *views.sets(mean, rstd)]
    channels = _statistics(2, (*views.shape[:3], 1), compute, grad)

    def start(g: Expression, x: Expression, mean: Expression, rstd: Expression, _: Expression) -> list[Expression]:
        return [g * _normal(x, mean, rstd), g]

    full = [one.expand(views.shape) for one in operands]
    _sum_up(start, channels, full, [3], key="channels", compute=compute, name=name)
    if weight_grad is not None or bias_grad is not None:
        both = ((weight_grad, channels[0]), (bias_grad, channels[1]))
        wanted = [(one, sums) for one, sums in both if one is not None]
        outputs, inputs = views.weights(*(one for one, _ in wanted)), [sums for _, sums in wanted]
        _sum_up(lambda *sums: sums[:-1], outputs, inputs, [0], key=len(wanted), compute=compute, name=name)
    if out is None:
        return
    weights = views.weights(weight)
    definition = traced(
        ("means of groups", weight is not None, compute),
        lambda: summations(compute, 2, _of_group, _mean_of_group, [torch.int64]),
    )
    means, inputs = _statistics(2, views.of_set, compute, grad), [*channels, *weights]
    inputs = [one.expand((*views.shape[:3], 1)) for one in inputs]
    key = (name, "means", weight is not None, compute)
    run_reduction(definition, means, inputs, [2], [sets.length], key=key, compute=compute, name=name)
    formulas = _Gradient(sets, weight, mean, training=True, variance=False)
    to, operands, numbers = [views.elements(out)], [*operands, *weights, *means[::-1]], [(0.0, compute)]
    run_pointwise(formulas.result, to, operands, numbers, key=(name, *formulas.key), compute=compute, name=name)


def _of_group(products: Expression, grads: Expression, *rest: Expression) -> list[Expression]:
    """The sums of a channel times its weight, if there is one. `rest` is the weight, position and length."""
    *weight, _, _ = rest
    return [one * weight[0] if weight else one for one in (products, grads)]


def _mean_of_group(products: Expression, grads: Expression, pieces: Expression, length: Expression) -> list[Expression]:
    number = (pieces * length).to(products.dtype)
    return [products / number, grads / number]


def _sum_up(
    start: Callable[..., Sequence[Any]],
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    dims: list[int],
    *,
    key: Hashable,
    compute: torch.dtype,
    name: str,
) -> None:
    """Writes the sums of the values that `start` computes from elements."""
    key, count = (name, "sums", key, compute), len(outputs)
    definition = traced(key, lambda: summations(compute, count, start, lambda *sums: sums[:count]))
    run_reduction(definition, outputs, inputs, dims, key=key, compute=compute, name=name)
