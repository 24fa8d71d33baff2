"""The shapes of results: what PyTorch's meta kernels compute in C++, and many of them in Python.

In symbols (`results`), for dynamic-shape plans: each answer is held against the meta kernel's own for this call. What a
meta kernel refuses must be a guard here, too: a plan serves calls that were never shown to the meta kernel.

In numbers (`recalled`), where the meta kernel is a function in Python, which takes longer than all else that planners
do: that one is asked of the first call of each kind, its answer is held against the rule, and that serves the others.
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
from torch_backplane.planning.recent import Recent
from torch_backplane.planning.strides import number_now
from torch_backplane.planning.symbols import Untraceable

Shape = Sequence[Any]

MOST_KINDS = 4096  # of calls whose dtypes are known

# Whose result is of the first operand's dtype, whatever the number, so that PyTorch is not asked at all: its functions
# for these import SymPy, which takes as long as `import torch`, at the first backward pass.
_OF_ITS_DTYPE = {"aten::fill.Scalar", "aten::fill_.Scalar", "aten::zero", "aten::zero_"}

# The results' dtypes by kinds of calls; none where the rule says something else than PyTorch.
_dtypes: Recent[Hashable, tuple[torch.dtype | None, ...]] = Recent(MOST_KINDS)


class Rule(NamedTuple):
    """Args:
    sizes: of the results, all alike, of the tensors among the arguments and of the arguments by name. What PyTorch
        refuses, this has to raise for, or to leave a guard.
    layout: the strides of new ones, of their sizes and the tensors.
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
    """Meta tensors of symbolic sizes, one for each result, None for one that is not made.

    Args:
        functional: the overload that makes the results which `overload` puts in place or to `out=`.
        ask: PyTorch's meta kernel, for `values` without symbols.

    Raises:
        Untraceable: the shapes are not known for other sizes.
    """
    with _disable_current_modes():
        expected = ask([concrete(value) for value in values])
    shapes = _shapes(overload, functional, values, expected)
    if len(shapes) != len(expected):
        raise Untraceable(f"the shapes of {overload}")
    found: list[Any] = []
    for shape, one in zip(shapes, expected, strict=True):
        if shape is None or one is None:
            if shape is not one:
                raise Untraceable(f"the shapes of {overload}")
            found.append(None)
            continue
        sizes, strides = shape
        now = [number_now(size) for size in sizes], [number_now(stride) for stride in strides]
        if now != (list(one.shape), list(one.stride())):
            raise Untraceable(f"the shapes of {overload}, which are {tuple(one.shape)} {one.stride()} and not {now}")
        found.append(tracer.empty(sizes, strides, one.dtype, "meta"))
    return tuple(found)


def recalled(
    form: Any, own: bool, values: Sequence[Any], ask: Callable[[], tuple[Any, ...]]
) -> tuple[torch.Tensor | None, ...]:
    """Meta tensors, one for each result, as `ask` has them of PyTorch's meta kernel.

    That is asked of one call of each kind: all is the same but sizes and strides, which the operator's rule knows.
    Dynamic-shape plans rely on the same rules, and leave the meta kernel out likewise.

    Args:
        form: a call's.
        own: of the call's own overload, else of the functional one.
        values: the overload's arguments.
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
    """What there is to know of values but for sizes and strides. Adds the tensors among them to `tensors`."""
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
            kinds.append(repr(value))  # not the value: 0.0 == -0.0, and 1 == True
    return tuple(kinds)


def _by_rule(
    rule: Rule,
    form: Any,
    dtypes: Sequence[torch.dtype | None],
    inputs: Sequence[Any],
    tensors: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, ...] | None:
    """Meta tensors for the results. None where the rule does not know, or PyTorch has an error."""
    if 0 in [tensor.numel() for tensor in tensors]:
        return None
    sizes: Shape
    try:
        if rule is _ELEMENTWISE:
            made = [None if dtype is None else _C.elementwise_result(tensors, dtype) for dtype in dtypes]
            sizes = next(one.shape for one in made if one is not None)
        elif False not in [tensor.is_contiguous() for tensor in tensors]:  # others take other ways through the rule
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
    """What is known of the sizes and strides of the overload's results."""
    name = overload._schema.name.removeprefix("aten::").removesuffix("_")
    return RULES.get(name, _ELEMENTWISE if torch.Tag.pointwise in functional.tags else None)


def concrete(value: Any) -> Any:
    """The same with the numbers of this call in the place of symbols, and tensors on the meta device."""
    if isinstance(value, torch.Tensor) and value.device.type == CPU.type:  # a number, whose type it tells
        return value
    if isinstance(value, torch.Tensor):
        sizes, strides = ([number_now(one) for one in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [concrete(element) for element in value]
    return number_now(value)


def by_name(overload: Any, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Values in the order of the schema, as Python passes them."""
    schema = overload._schema.arguments
    positional = [value for one, value in zip(schema, values, strict=True) if not one.kwarg_only]
    return positional, {one.name: value for one, value in zip(schema, values, strict=True) if one.kwarg_only}


def _shapes(
    overload: Any, functional: Any, values: Sequence[Any], expected: Sequence[Any]
) -> list[tuple[Shape, Shape] | None]:
    """(sizes, strides) of each result."""
    schema = overload._schema.arguments
    inputs = {one.name: value for one, value in zip(schema, values, strict=True) if not one.is_out}
    tensors = [value for value in tree_leaves(list(inputs.values())) if isinstance(value, torch.Tensor)]
    written = [value for one, value in zip(schema, values, strict=True) if one.is_out] or [
        value for one, value in zip(schema, values, strict=True) if one.is_write
    ]
    rule = rule_of(overload, functional)
    if rule is not None:
        sizes = rule.sizes(tensors, inputs)
        if len(written) == len(expected):  # those are the results, where they are of the sizes
            return [_result(sizes, one) for one in written]
        strides = rule.layout(sizes, tensors)
        return [(sizes, strides) if one is not None else None for one in expected]
    asked, given = (overload, values) if _function(overload) is not None else (functional, [*inputs.values()])
    function = _function(asked)
    if function is None:
        raise Untraceable(f"the shapes of {overload}")
    positional, named = by_name(asked, given)
    returned = function(*positional, **named)
    returned = returned if isinstance(returned, (tuple, list)) else [returned]
    if asked is not overload and len(written) == len(returned):
        return [_result(one.shape, to) for one, to in zip(returned, written, strict=True)]
    return [(tuple(one.shape), tuple(one.stride())) if one is not None else None for one in returned]


def _function(overload: Any) -> Callable[..., Any] | None:
    """PyTorch's, for compilers, in Python, which computes with symbols and checks what it is given."""
    importlib.import_module("torch._meta_registrations")
    tables = (global_decomposition_table[table] for table in ("meta", "post_autograd"))
    return next((table[overload] for table in tables if overload in table), None)


def _result(shape: Shape, given: torch.Tensor) -> tuple[Shape, Shape]:
    if len(shape) != given.dim() or any(one != other for one, other in zip(shape, given.shape, strict=True)):
        raise Untraceable("results that were given in their shape")
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
        raise RuntimeError("an image without elements")
    return shape


def _resampled_from(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    (gradient,), shape = tensors, inputs["input_size"]
    resampled = [*shape[:2], *inputs["output_size"]]
    fits = all(one == other for one, other in zip(gradient.shape, resampled, strict=True))
    if not fits or any(size <= 0 for size in shape):
        raise RuntimeError("a gradient of another shape")
    return list(shape)


def _arranged(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    start, end, step = inputs.get("start", 0), inputs["end"], inputs.get("step", 1)
    if any(isinstance(number_now(one), float) for one in (start, end, step)):
        raise Untraceable("a range of integers")
    if (step > 0 and end < start) or (step < 0 and end > start):
        raise RuntimeError("bounds that do not fit the sign of the step")
    return [(end - start + step - (1 if step > 0 else -1)) // step]


def _joined(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    # Tensors of shape (0,) are skipped, whatever the others' number of dimensions.
    tensors = [one for one in tensors if one.dim() != 1 or one.shape[0] != 0] or tensors[:1]
    first, dim = tensors[0], inputs["dim"]
    dim %= max(1, first.dim())
    shape = list(first.shape)
    for other in tensors[1:]:
        if other.dim() != first.dim():
            raise Untraceable("to join tensors of one number of dimensions")
        if any(at != dim and size != shape[at] for at, size in enumerate(other.shape)):
            raise RuntimeError("sizes that do not match")
        shape[dim] = shape[dim] + other.shape[dim]
    return shape


def _selected(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    self, index = inputs["self"], inputs["index"]
    if index.dim() > 1 or not self.dim():
        raise Untraceable("to select by one dimension, of some")
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
        raise RuntimeError("a vector of another size")
    return list(matrix.shape[:-1])


def _dealt(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    (self,) = tensors
    if inputs["groups"] < 1 or self.shape[1] % inputs["groups"] != 0:
        raise RuntimeError("groups that do not divide the channels")
    return list(self.shape)


def _magnified(tensors: Sequence[Any], inputs: dict[str, Any]) -> Shape:
    (self,), factor = tensors, inputs["upscale_factor"]
    *batch, channels, height, width = self.shape
    if factor < 1 or channels % factor**2 != 0:
        raise RuntimeError("a factor that does not divide the channels")
    return [*batch, channels // factor**2, height * factor, width * factor]


# How results are laid out.


def _contiguous(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return layouts.contiguous(sizes)


def _as_iterated(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return layouts.iterator(sizes, [(tensor.shape, tensor.stride()) for tensor in tensors])


def _as_iterated_or_single(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return _as_iterated(sizes, tensors) if sizes else []


def _as_first(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    return layouts.like(sizes, tensors[0].stride())


def _as_first_of_elements(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    """Where PyTorch's function for compilers says something else of tensors without elements."""
    if any(size == 0 for size in sizes):
        raise Untraceable("tensors with elements")
    return _as_first(sizes, tensors)


def _as_suggested(sizes: Shape, tensors: Sequence[Any]) -> Shape:
    """In the memory format of the tensors, where they have one in common."""
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
# PyTorch's gradients of these follow no memory format.
_CONTIGUOUS_GRADIENTS = ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_bicubic2d")

RULES = {
    **dict.fromkeys(_FURTHER_ELEMENTWISE, _ELEMENTWISE),  # which PyTorch does not tag so
    **dict.fromkeys(_REDUCTIONS, Rule(_reduced, _contiguous)),
    **dict.fromkeys(("cumprod", "cumsum", "roll", "tril", "triu"), Rule(_kept, _contiguous)),
    **dict.fromkeys(_RESAMPLING, Rule(_resampled, _as_suggested)),
    **{f"{name}_backward": Rule(_resampled_from, _contiguous if name in _CONTIGUOUS_GRADIENTS else _as_suggested)
       for name in _RESAMPLING},
    "arange": Rule(_arranged, _contiguous),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), Rule(_loss, _as_iterated_or_single)),
    "cat": Rule(_joined, _as_suggested),
    "channel_shuffle": Rule(_dealt, _as_suggested),
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
"""By operators' names, without the underscore of those in place. PyTorch's tag tells others that are elementwise."""
