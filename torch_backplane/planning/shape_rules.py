"""Shape rules: sizes and strides of results, as PyTorch's meta kernels compute them.

Two uses:

- Symbolic sizes, for dynamic-shape plans (`results`). PyTorch's C++ meta kernels take no symbols. Each result is
  checked against the meta kernel's result for the present call. A rule must also raise, or leave a guard, where the
  meta kernel raises: the plan serves calls that the meta kernel never sees.
- Numbers, where PyTorch's meta kernel is a Python function (`recalled`), which takes longer than the rest of a planner
  call. It runs for the first call of each kind. If the rule gives the same result, later calls use the rule.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch._decomp import global_decomposition_table
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from torch_backplane import _C
from torch_backplane.kernels.target import CPU
from torch_backplane.planning import strides as layouts
from torch_backplane.planning.lru_cache import LruCache
from torch_backplane.planning.strides import number_now
from torch_backplane.planning.symbols import Untraceable

Shape = Sequence[Any]

MAX_KINDS = 4096  # kinds of calls whose dtypes are cached

# The result always has the first operand's dtype, so PyTorch's meta function is not called at all. It would import
# SymPy in the first backward pass, which takes as long as `import torch`.
_OF_ITS_DTYPE = {"aten::fill.Scalar", "aten::fill_.Scalar", "aten::zero", "aten::zero_"}

# The results' dtypes by kind of call; empty if the rule and PyTorch disagree.
_dtypes: LruCache[Hashable, tuple[torch.dtype | None, ...]] = LruCache(MAX_KINDS)


class Rule(NamedTuple):
    """How to compute the shape of an operator's results.

    Args:
        sizes: takes the tensors among the arguments, and all arguments by name. Returns the sizes, which all results
            share. Must raise, or leave a guard, where PyTorch raises an error.
        layout: takes the sizes and the tensors. Returns the strides of new results.
    """

    sizes: Callable[[Sequence[Any], dict[str, Any]], Shape]
    layout: Callable[[Shape, Sequence[Any]], Shape]


def results(
    tracer: Any,
    overload: Any,
    functional: Any,
    values: Sequence[Any],
    ask: Callable[[Sequence[Any]], tuple[Any, ...]],
) -> Any:
    """Computes meta tensors with symbolic sizes for the results.

    Args:
        tracer: the trace.
        overload: the overload.
        functional: the functional form of `overload`.
        values: the arguments.
        ask: calls PyTorch's meta kernel, with arguments without symbols.

    Returns:
        A meta tensor for each result; None for a result that the operator does not make.

    Raises:
        Untraceable: there is no rule for the operator, or it and the meta kernel disagree.
    """
    with _disable_current_modes():
        given = [concrete(value) for value in values]
        # The meta function of torch 2.11 gives contiguous strides, its kernel those of zeros_like.
        expected = (torch.zeros_like(given[0]),) if overload is torch.ops.aten.zero.default else ask(given)
    shapes = _shapes(overload, functional, values, expected)
    if len(shapes) != len(expected):
        raise Untraceable(f"the symbolic shapes of {overload} differ from the meta kernel's")
    found: list[Any] = []
    for shape, one in zip(shapes, expected, strict=True):
        if shape is None or one is None:
            if shape is not one:
                raise Untraceable(f"the symbolic shapes of {overload} differ from the meta kernel's")
            found.append(None)
            continue
        sizes, strides = shape
        now = [number_now(size) for size in sizes], [number_now(stride) for stride in strides]
        if now != (list(one.shape), list(one.stride())):
            raise Untraceable(f"the symbolic shapes of {overload} are {now}, not {tuple(one.shape)} {one.stride()}")
        found.append(tracer.empty(sizes, strides, one.dtype, "meta"))
    return tuple(found)


def recalled(
    form: Any, own: bool, values: Sequence[Any], ask: Callable[[], tuple[Any, ...]]
) -> tuple[torch.Tensor | None, ...]:
    """Computes meta tensors for the results, by the operator's rule where possible.

    PyTorch's meta kernel runs for one call of each kind. Calls of a kind differ only in sizes and strides, which the
    rule computes. Dynamic-shape plans rely on the same rules.

    Args:
        form: the form of the call.
        own: True for the results of the call's own overload, False for those of its functional form.
        values: the arguments of that overload.
        ask: calls PyTorch's meta kernel.

    Returns:
        A meta tensor for each result; None for a result that the operator does not make.
    """
    rule = form.rule if own else form.functional_rule
    inputs = [values[position] for position in form.inputs] if own and form.outs else values
    tensors: list[torch.Tensor] = []
    kinds = _kinds(inputs, tensors)
    if rule is None or not tensors:
        return ask()
    written = [values[position] for position in form.written] if own and not form.is_functional else []
    key = (form.name, own, torch.get_default_dtype(), tuple([given.dtype for given in written]), kinds)
    asked: list[tuple[Any, ...]] = []

    def ask_first() -> tuple[torch.dtype | None, ...]:
        if form.name in _OF_ITS_DTYPE:
            return (tensors[0].dtype,)
        asked.append(ask())
        dtypes = tuple([None if one is None else one.dtype for one in asked[0]])
        found = _by_rule(rule, form, dtypes, inputs, tensors, written)
        alike = found is not None and all(map(_alike, found, asked[0]))
        return dtypes if alike else ()

    dtypes = _dtypes.get(key, ask_first)
    if asked:
        return asked[0]
    return (_by_rule(rule, form, dtypes, inputs, tensors, written) if dtypes else None) or ask()


def _kinds(values: Sequence[Any], tensors: list[torch.Tensor]) -> tuple[Hashable, ...]:
    """Describes the values except for sizes and strides. Appends the tensors among them to `tensors`."""
    kinds: list[Hashable] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            kinds.append((value.dtype, value.dim()))
        elif isinstance(value, _C.Number):
            kinds.append(value.kind)
        elif isinstance(value, (list, tuple)):
            kinds.append(_kinds(value, tensors))
        elif isinstance(value, torch.Generator):
            kinds.append("generator")
        else:
            kinds.append(repr(value))  # the value would not tell 0.0 from -0.0, or 1 from True
    return tuple(kinds)


def _by_rule(
    rule: Rule,
    form: Any,
    dtypes: Sequence[torch.dtype | None],
    inputs: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...] | None:
    """Computes the results by the rule. None if the rule does not apply, or PyTorch may raise an error."""
    if 0 in [tensor.numel() for tensor in tensors]:
        return None
    sizes: Shape
    try:
        if rule is _ELEMENTWISE:
            made = [None if dtype is None else _C.elementwise_result(tensors, dtype) for dtype in dtypes]
            sizes = next(one.shape for one in made if one is not None)
        elif False not in [tensor.is_contiguous() for tensor in tensors]:  # other strides take other paths in the rule
            sizes = torch.Size(rule.sizes(tensors, dict(zip(form.input_names, inputs, strict=True))))
            strides = rule.layout(sizes, tensors)
            made = [
                None if dtype is None else torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
                for dtype in dtypes
            ]
        else:
            return None
    except (RuntimeError, Untraceable):
        return None
    if len(written) == len(made):
        return tuple(_C.as_metas(written)) if all(given.shape == sizes for given in written) else None
    return tuple(made)


def _alike(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())


def rule_of(overload: Any, functional: Any) -> Rule | None:
    """Returns the rule for the overload's results; None if there is none."""
    name = overload._schema.name.removeprefix("aten::").removesuffix("_")
    return RULES.get(name, _ELEMENTWISE if torch.Tag.pointwise in functional.tags else None)


def concrete(value: Any) -> Any:
    """Replaces symbols with their values in this call, and tensors with meta tensors."""
    if isinstance(value, torch.Tensor) and value.device.type == CPU.type:  # stands in for a number, for its type
        return value
    if isinstance(value, torch.Tensor):
        sizes, strides = ([number_now(one) for one in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [concrete(element) for element in value]
    return number_now(value)


def by_name(overload: Any, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Splits the values, in the order of the schema, into positional and keyword arguments."""
    schema = overload._schema.arguments
    positional = [value for one, value in zip(schema, values, strict=True) if not one.kwarg_only]
    return positional, {one.name: value for one, value in zip(schema, values, strict=True) if one.kwarg_only}


def _shapes(
    overload: Any, functional: Any, values: Sequence[Any], expected: Sequence[Any]
) -> list[tuple[Shape, Shape] | None]:
    """Returns (sizes, strides) for each result, by the rule or by PyTorch's Python meta function."""
    schema = overload._schema.arguments
    inputs = {one.name: value for one, value in zip(schema, values, strict=True) if not one.is_out}
    tensors = [value for value in tree_leaves(list(inputs.values())) if isinstance(value, torch.Tensor)]
    written = [value for one, value in zip(schema, values, strict=True) if one.is_out] or [
        value for one, value in zip(schema, values, strict=True) if one.is_write
    ]
    rule = rule_of(overload, functional)
    if rule is not None:
        sizes = rule.sizes(tensors, inputs)
        if len(written) == len(expected):  # the tensors to write to are the results
            return [_result(sizes, one) for one in written]
        strides = rule.layout(sizes, tensors)
        return [(sizes, strides) if one is not None else None for one in expected]
    asked, given = (overload, values) if _function(overload) is not None else (functional, [*inputs.values()])
    function = _function(asked)
    if function is None:
        raise Untraceable(f"{overload} has no shape rule")
    positional, named = by_name(asked, given)
    returned = function(*positional, **named)
    returned = returned if isinstance(returned, (tuple, list)) else [returned]
    if asked is not overload and len(written) == len(returned):
        return [_result(one.shape, to) for one, to in zip(returned, written, strict=True)]
    return [(tuple(one.shape), tuple(one.stride())) if one is not None else None for one in returned]


def _function(overload: Any) -> Callable[..., Any] | None:
    """PyTorch's meta function or decomposition in Python, which accepts symbols; None if there is none."""
    importlib.import_module("torch._meta_registrations")
    tables = (global_decomposition_table[table] for table in ("meta", "post_autograd"))
    return next((table[overload] for table in tables if overload in table), None)


def _result(shape: Shape, given: torch.Tensor) -> tuple[Shape, Shape]:
    if len(shape) != given.dim() or any(one != other for one, other in zip(shape, given.shape, strict=True)):
        raise Untraceable("a tensor to write to has another shape than the result")
    return tuple(given.shape), tuple(given.stride())


def _reduced(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    (self,) = tensors
    dims, keepdim = inputs.get("dim"), bool(inputs.get("keepdim", False))
    every = dims is None or (isinstance(dims, (list, tuple)) and not dims)
    dims = range(self.dim()) if every else dims if isinstance(dims, (list, tuple)) else [dims]
    chosen = {dim % max(1, self.dim()) for dim in dims}
    return [1 if dim in chosen else size for dim, size in enumerate(self.shape) if keepdim or dim not in chosen]


def _kept(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    return list(tensors[0].shape)


def _broadcast(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    return layouts.broadcast_shapes([tensor.shape for tensor in tensors])


def _resampled(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    shape = [*tensors[0].shape[:2], *inputs["output_size"]]
    if any(size <= 0 for size in shape):
        raise RuntimeError("the image has no elements")
    return shape


def _resampled_from(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    (gradient,), shape = tensors, inputs["input_size"]
    resampled = [*shape[:2], *inputs["output_size"]]
    fits = all(one == other for one, other in zip(gradient.shape, resampled, strict=True))
    if not fits or any(size <= 0 for size in shape):
        raise RuntimeError("the gradient has the wrong shape")
    return list(shape)


def _arranged(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    start, end, step = inputs.get("start", 0), inputs["end"], inputs.get("step", 1)
    if any(isinstance(number_now(one), float) for one in (start, end, step)):
        raise Untraceable("a range of floats has no shape rule")
    if (step > 0 and end < start) or (step < 0 and end > start):
        raise RuntimeError("the bounds do not match the sign of the step")
    return [(end - start + step - (1 if step > 0 else -1)) // step]


def _joined(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    # torch.cat ignores tensors of shape (0,), whatever the number of dimensions of the others.
    tensors = [one for one in tensors if one.dim() != 1 or one.shape[0] != 0] or tensors[:1]
    first, dim = tensors[0], inputs["dim"]
    dim %= max(1, first.dim())
    shape = list(first.shape)
    for other in tensors[1:]:
        if other.dim() != first.dim():
            raise Untraceable("the tensors to concatenate differ in their number of dimensions")
        if any(at != dim and size != shape[at] for at, size in enumerate(other.shape)):
            raise RuntimeError("the sizes do not match")
        shape[dim] = shape[dim] + other.shape[dim]
    return shape


def _selected(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    self, index = inputs["self"], inputs["index"]
    if index.dim() > 1 or not self.dim():
        raise Untraceable("the index has more than one dimension, or the tensor has none")
    dim = inputs["dim"] % self.dim()
    return [*self.shape[:dim], index.numel(), *self.shape[dim + 1 :]]


def _of_index(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    return list(inputs["index"].shape)


def _looked_up(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    weight, indices = tensors
    return [*indices.shape, *weight.shape[1:]]


def _loss(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    return _broadcast(tensors, inputs) if inputs["reduction"] == 0 else []


def _times_vector(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    matrix, vector = tensors
    if matrix.shape[-1] != vector.shape[0]:
        raise RuntimeError("the size of the vector does not match the matrix")
    return list(matrix.shape[:-1])


def _channel_shuffled(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    (self,) = tensors
    if inputs["groups"] < 1 or self.shape[1] % inputs["groups"] != 0:
        raise RuntimeError("the number of channels is not a multiple of the groups")
    return list(self.shape)


def _magnified(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    (self,), factor = tensors, inputs["upscale_factor"]
    *batch, channels, height, width = self.shape
    if factor < 1 or channels % factor**2 != 0:
        raise RuntimeError("the number of channels is not a multiple of the squared factor")
    return [*batch, channels // factor**2, height * factor, width * factor]


# Layouts of results.


def _contiguous(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return layouts.contiguous(sizes)


def _as_iterated(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return layouts.iterator(sizes, [(tensor.shape, tensor.stride()) for tensor in tensors])


def _as_iterated_or_single(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return _as_iterated(sizes, tensors) if sizes else []


def _as_first(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return layouts.like(sizes, tensors[0].stride())


def _as_first_of_elements(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    """As `_as_first`, for operators whose Python meta function gives other strides for tensors without elements."""
    if any(size == 0 for size in sizes):
        raise Untraceable("a tensor has no elements")
    return _as_first(sizes, tensors)


def _as_suggested(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    """The tensors' suggested memory format if it is the same for all, else contiguous."""
    formats = {layouts.suggested(tensor.shape, tensor.stride()) for tensor in tensors}
    return layouts.laid_out(sizes, formats.pop() if len(formats) == 1 else torch.contiguous_format)


_ELEMENTWISE = Rule(_broadcast, _as_iterated)
_REDUCTIONS = (
    "all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero", "hash_tensor", "linalg_vector_norm",
    "logsumexp", "max", "mean", "min", "nansum", "norm", "prod", "std", "std_mean", "sum", "var", "var_mean",
)  # fmt: skip
_FURTHER_ELEMENTWISE = ("_prelu_kernel", "_to_copy", "complex", "fill", "hardswish", "polar", "where", "zero")
_RESAMPLING = (
    *(f"{name}{rank}d" for name in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip
# PyTorch's gradients of these are contiguous whatever the memory format.
_CONTIGUOUS_GRADIENTS = ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_bicubic2d")

RULES = {
    **dict.fromkeys(_FURTHER_ELEMENTWISE, _ELEMENTWISE),  # PyTorch does not tag these as pointwise
    **dict.fromkeys(_REDUCTIONS, Rule(_reduced, _contiguous)),
    **dict.fromkeys(("cumprod", "cumsum", "roll", "tril", "triu"), Rule(_kept, _contiguous)),
    **dict.fromkeys(_RESAMPLING, Rule(_resampled, _as_suggested)),
    **{f"{name}_backward": Rule(_resampled_from, _contiguous if name in _CONTIGUOUS_GRADIENTS else _as_suggested)
       for name in _RESAMPLING},
    "arange": Rule(_arranged, _contiguous),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), Rule(_loss, _as_iterated_or_single)),
    "cat": Rule(_joined, _as_suggested),
    "channel_shuffle": Rule(_channel_shuffled, _as_suggested),
    "dot": Rule(_times_vector, _contiguous),
    "embedding": Rule(_looked_up, _contiguous),
    "flip": Rule(_kept, _as_first_of_elements),
    "index_select": Rule(_selected, _contiguous),
    "masked_fill": Rule(_broadcast, _contiguous),
    "mv": Rule(_times_vector, _contiguous),
    "pixel_shuffle": Rule(_magnified, _as_suggested),
    "sort": Rule(_kept, _as_first),
    "take": Rule(_of_index, _contiguous),
}  # fmt: skip
"""Rules by operator name, without the underscore of in-place operators. `rule_of` adds those tagged as pointwise."""
