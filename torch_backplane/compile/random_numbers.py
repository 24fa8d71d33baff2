"""Random numbers of compiled graphs, equal to those of eager PyTorch on bp.

A graph reserves random numbers for all its calls of `rand`, `randn` and the like when it starts
(`backplane::random_state`). Fused kernels compute them from this state, the number of the call and the number of the
element, as eager kernels do (kernels/templates/random.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_backplane import drivers
from torch_backplane.compile.kernel_functions import ELEMENT_BITS
from torch_backplane.kernels.dtypes import least_as

_aten = torch.ops.aten
library = torch.library.Library("backplane", "FRAGMENT")
library.define("random_state(int calls, *, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
library.define(
    "eager_random(SymInt[] size, str kind, *, ScalarType dtype, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
# "rand" is uniform between a and b; "randn" is normal with mean a and standard deviation b.
library.define("random(SymInt[] size, Tensor state, int call, str kind, float a, float b, ScalarType dtype) -> Tensor")
library.define("random_integers(SymInt[] size, Tensor state, int call, int low, int high, ScalarType dtype) -> Tensor")


@torch.library.register_fake("backplane::random_state", lib=library)
def _(calls: int, *, device: torch.device) -> torch.Tensor:
    return torch.empty(2, dtype=torch.int64, device=device)


@torch.library.impl(library, "eager_random", "CompositeExplicitAutograd")
def _(size: Sequence[int], kind: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.rand` or `torch.randn`, which Inductor would decompose."""
    found: torch.Tensor = getattr(torch, kind)(size, dtype=dtype, device=device)
    return found


@torch.library.register_fake("backplane::eager_random", lib=library)
def _(size: Sequence[int], kind: str, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


@torch.library.register_fake("backplane::random", lib=library)
@torch.library.register_fake("backplane::random_integers", lib=library)
def _(size: Sequence[int], state: torch.Tensor, *given: Any) -> torch.Tensor:
    return state.new_empty(size, dtype=given[-1])


# The arguments of `random` and `random_integers` after `call`, for operators of PyTorch.
_RANDOM: dict[Any, Callable[..., tuple[str, float, float]]] = {
    _aten.rand.default: lambda size: ("rand", 0.0, 1.0),
    _aten.randn.default: lambda size: ("randn", 0.0, 1.0),
    _aten.uniform.default: lambda self, low=0.0, high=1.0: ("rand", low, high),
    _aten.normal_functional.default: lambda self, mean=0.0, std=1.0: ("randn", mean, std),
    torch.ops.prims.normal.default: lambda shape, mean, std: ("randn", mean, std),
}
_INTEGERS = _aten.randint.low
_FACTORY_OPTIONS = {"dtype", "layout", "device", "pin_memory", "requires_grad", "generator"}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_COMPARISONS = (_aten.gt, _aten.ge, _aten.lt, _aten.le)


def install(joint_graph: ModuleType) -> None:
    """Lets Inductor's pass `replace_random_passes` leave calls on bp to this module."""
    replace_others: Callable[[fx.GraphModule], int] = joint_graph.replace_random_passes  # type: ignore[attr-defined]

    @functools.wraps(replace_others)
    def replace(graph: fx.GraphModule) -> int:
        return replace_calls(graph.graph) + replace_others(graph)

    joint_graph.replace_random_passes = replace  # type: ignore[attr-defined]


def replace_calls(graph: fx.Graph) -> int:
    """Replaces calls on bp devices with a dialect. Returns how many.

    Successive calls share a state. Operators that draw numbers themselves end a sequence, so that the order of numbers
    is that of eager PyTorch.
    """
    sequences: list[list[fx.Node]] = []
    extended: dict[torch.device, list[fx.Node]] = {}
    for node in [one for one in graph.nodes if _takes_numbers(one.target)]:
        found = node.meta["val"]
        if not _has_kernel(node):
            extended.clear()
        elif any(isinstance(size, int) and size == 0 for size in found.shape):
            empty = torch.ops.aten.empty.memory_format
            _replace_by(graph, node, empty, (_sizes(graph, node),), dtype=found.dtype, device=found.device)
        elif found.dtype == torch.float64 and node.target in (_aten.rand.default, _aten.randn.default):
            given = (node.args[0], node.target.overloadpacket.__name__)  # Inductor draws float32
            eager = torch.ops.backplane.eager_random.default
            _replace_by(graph, node, eager, given, dtype=found.dtype, device=found.device)
            extended.clear()
        elif not _is_fused(node):
            extended.clear()
        else:
            if found.device not in extended:
                extended[found.device] = []
                sequences.append(extended[found.device])
            extended[found.device].append(node)
    for nodes in sequences:
        device = nodes[0].meta["val"].device
        with graph.inserting_before(nodes[0]):
            state = graph.call_function(
                torch.ops.backplane.random_state.default, (len(nodes),), {"device": device}
            )
        with nodes[0].meta["val"].fake_mode:
            state.meta["val"] = torch.empty(2, dtype=torch.int64, device=device)
        for call, node in enumerate(nodes):
            _replace(graph, node, state, call)
    return sum(map(len, sequences))


def _takes_numbers(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _has_kernel(node: fx.Node) -> bool:
    """Whether the call is one that this module knows, on a device with a dialect."""
    device = node.meta["val"].device if node.target in _RANDOM or node.target == _INTEGERS else None
    return device is not None and device.type == "bp" and bool(drivers.device(device.index).properties.dialect)


def _is_fused(node: fx.Node) -> bool:
    found = node.meta["val"]
    if node.kwargs.get("pin_memory") or node.kwargs.get("generator") is not None:
        return False
    if node.target == _INTEGERS:
        return all(isinstance(one, int) for one in node.args[:2])
    return found.dtype in _DTYPES and found.is_contiguous()


def _replace(graph: fx.Graph, node: fx.Node, state: fx.Node, call: int) -> None:
    dtype, ops = node.meta["val"].dtype, torch.ops.backplane
    if node.target == _INTEGERS:
        *bounds, size = node.args
        _replace_by(graph, node, ops.random_integers.default, (size, state, call, *bounds, dtype))
        return
    named = {name: one for name, one in node.kwargs.items() if name not in _FACTORY_OPTIONS}
    kind, a, b = _RANDOM[node.target](*node.args, **named)
    # Kernels compare numbers before they are rounded to half precision.
    compared = _only_compared(node)
    dtype = dtype if compared is None else torch.float32
    for one in compared or ():
        one.meta["val"] = one.meta["val"].to(dtype)
    _replace_by(
        graph, node, ops.random.default, (_sizes(graph, node), state, call, kind, float(a), float(b), dtype)
    )


def _replace_by(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...], **named: Any) -> None:
    with graph.inserting_before(node):
        new = graph.call_function(target, args, named)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _only_compared(node: fx.Node) -> list[fx.Node] | None:
    """The node and its copies in other layouts, if nothing else than comparisons uses them."""
    found = [node]
    for user in node.users:
        target = getattr(user.target, "overloadpacket", None)
        if target in (_aten.permute, _aten.clone):
            copies = _only_compared(user)
            if copies is None:
                return None
            found += copies
        elif target not in _COMPARISONS:
            return None
    return found


def _sizes(graph: fx.Graph, node: fx.Node) -> Any:
    """The sizes of the result of a call: its first argument, or those of the tensor that it fills."""
    first = node.args[0]
    if node.target == _INTEGERS:
        return node.args[2]
    if not isinstance(first, fx.Node):
        return first

    def size(dim: int, known: Any) -> Any:
        if isinstance(known, int):
            return known
        with graph.inserting_before(node):
            number = graph.call_function(_aten.sym_size.int, (first, dim))
        number.meta["val"] = known
        return number

    return [size(dim, known) for dim, known in enumerate(first.meta["val"].shape)]


def keep_order(operations: Sequence[Any]) -> None:
    """Keeps the order of a graph's operators that take numbers from the generator, when Inductor schedules them."""
    from torch._inductor.virtualized import V

    seeded = [one for one in operations if _takes_numbers(getattr(one, "op_overload", None))]
    for earlier, later in itertools.pairwise(seeded):
        V.graph.additional_buffer_deps[later.operation_name].add(earlier.get_name())


def register_lowerings(lowering: ModuleType) -> None:
    """Lets fused kernels compute the numbers. Graphs call the operators that reserve or draw them."""
    for operator in (torch.ops.backplane.random_state, torch.ops.backplane.eager_random):
        lowering.make_fallback(operator)  # type: ignore[attr-defined]

    from torch._inductor import ir
    from torch._inductor.virtualized import ops

    def integer(value: int) -> Any:
        return ops.constant(value, torch.int64)

    def single(value: float) -> Any:
        return ops.constant(value, torch.float32)

    def drawn(size: Sequence[Any], state: Any, call: int, dtype: torch.dtype, draw: Callable[[Any, Any], Any]) -> Any:
        """A tensor of `draw(seed, counter)`. The counter has the number of the call and that of the element."""
        load, device = state.make_loader(), state.get_device()
        layout = ir.FixedLayout(device, dtype, [*size], ir.FlexibleLayout.contiguous_strides([*size]))
        position = layout.make_indexer()

        def element(index: Any) -> Any:
            calls = ops.add(ops.bitwise_right_shift(load([1]), integer(2)), integer(call))
            first = ops.bitwise_left_shift(calls, integer(ELEMENT_BITS))
            return ops.to_dtype(draw(load([0]), ops.add(first, ops.index_expr(position(index), torch.int64))), dtype)

        result = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=element, ranges=[*size])
        result.realize()
        return result

    @lowering.register_lowering(torch.ops.backplane.random, type_promotion_kind=None)  # type: ignore[attr-defined]
    def random(size: Sequence[Any], state: Any, call: int, kind: str, a: float, b: float, dtype: torch.dtype) -> Any:
        with unset_fake_temporarily():
            bound = least_as(b, dtype)

        def draw(seed: Any, counter: Any) -> Any:
            x = getattr(ops, kind)(seed, counter)
            if kind == "randn":
                return x if (a, b) == (0, 1) else ops.add(single(a), ops.mul(single(b), x))
            if (a, b) != (0, 1):
                x = ops.add(single(a), ops.mul(x, ops.sub(single(b), single(a))))
            elif dtype == torch.float32:
                return x
            # Excludes numbers that rounding makes equal to the upper bound.
            return ops.where(ops.ge(x, single(bound)), single(a), x)

        return drawn(size, state, call, dtype, draw)

    @lowering.register_lowering(torch.ops.backplane.random_integers, type_promotion_kind=None)  # type: ignore[attr-defined]
    def random_integers(size: Sequence[Any], state: Any, call: int, low: int, high: int, dtype: torch.dtype) -> Any:
        return drawn(
            size, state, call, dtype, lambda seed, counter: ops.randint64(seed, counter, integer(low), integer(high))
        )
