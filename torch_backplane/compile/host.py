"""torch.compile on devices without a dialect: Inductor compiles the graph for the CPU, and an operator runs it.

The operator has a CPU kernel only. On bp it is a fallback, which gives the graph CPU tensors. On host devices they
share the memory of the bp tensors, and the graph runs in stream order.
"""

from __future__ import annotations

import copy
import functools
import itertools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.output_code import OutputCode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves

from torch_backplane import drivers
from torch_backplane.compile import flex_attention, inductor

_library = torch.library.Library("backplane", "FRAGMENT")
# Results can be arguments that the backward pass needs, or views of them.
_library.define("compiled_for_cpu(Tensor(a!)[] tensors, int graph) -> Tensor(a!)[]")
_graphs: weakref.WeakValueDictionary[int, CpuGraph] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_CPU = torch.device("cpu")
_ATTENTION = (
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)


def _bp_devices(graph: GraphModule, inputs: Sequence[Any]) -> set[int]:
    return {one.device.index for one in _tensors(graph, inputs) if one.device.type == "bp"}


def _tensors(graph: GraphModule, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The fake tensors of all inputs and nodes."""
    values = [*inputs, *(node.meta.get("val") for node in graph.graph.nodes)]
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def is_without_dialect(graph: GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the graph has tensors of bp devices, none of which has a dialect.

    Raises:
        NotImplementedError: some of its devices have a dialect, and others have none.
    """
    indices = _bp_devices(graph, inputs)
    kinds = {bool(drivers.device(index).properties.dialect) for index in indices}
    if len(kinds) > 1:
        named = ", ".join(f"bp:{index}" for index in sorted(indices))
        raise NotImplementedError(f"a graph on {named}: only some of these devices run kernels; compile them apart")
    return kinds == {False}


def _obstacle(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Why the graph cannot run on the CPU as a whole; empty if it can."""
    if len(_bp_devices(graph, inputs)) > 1:
        return "its tensors are on several devices"
    if any(one.device.type != "bp" and one.dim() > 0 for one in _tensors(graph, inputs)):
        return "it has tensors of other devices, too"
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            name = node.target.name()
            has_kernel = any(
                torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
                for key in ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
            )
            if not has_kernel and node.target.namespace == "aten" and node.target not in _ATTENTION:
                return f"the CPU has no kernel for {name}"
    return ""


def compile_for_cpu(inner_compile: Callable[..., Any], graph: GraphModule, inputs: Sequence[Any], **named: Any) -> Any:
    """Compiles a graph on a bp device as if it was on the CPU.

    Warns and returns the graph as it is, which runs operator by operator, if that is not possible.

    Args:
        inner_compile: Inductor's `compile_fx_inner`.
        inputs: fake tensors and sizes.
    """
    flex_attention.decompose(graph)
    if obstacle := _obstacle(graph, inputs):
        warnings.warn(f"torch.compile runs a graph on host devices without compiling it: {obstacle}", stacklevel=2)
        return make_boxed_func(graph.forward)
    device = torch.device("bp", _bp_devices(graph, inputs).pop())
    with unset_fake_temporarily():  # a graph can have real tensors: constants of its source
        on_cpu = copy.deepcopy(graph)
    on_cpu.meta["bp_device"] = device  # for reports
    for node in on_cpu.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, _moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _moved)
    _use_cpu_attention(on_cpu)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    values = (one.meta.get("val") if isinstance(one, torch.fx.Node) else one for one in output.args[0])
    on_bp = [_is_on_bp(one) for one in values]
    placeholders = [node for node in on_cpu.graph.nodes if node.op == "placeholder"]
    given = [_on_cpu(one) for one in inputs]
    mode = next((one.fake_mode for one in _tensors(graph, inputs) if isinstance(one, FakeTensor)), None)
    FakeTensorProp(on_cpu, mode).propagate_dont_convert_inputs(*given)
    for node, one in zip(placeholders, given, strict=True):
        node.meta["val"] = one
    on_cpu.recompile()
    return CpuGraph(inner_compile(on_cpu, given, **named), device, on_bp)


def _use_cpu_attention(graph: GraphModule) -> None:
    """Replaces fused attention by the operator that host devices run for it (csrc/aten/attention.cpp)."""
    for node in list(graph.graph.nodes):
        if node.target is _ATTENTION[0]:
            query, key, value, *rest = node.args
            bias, dropout, is_causal = (*rest, *(None, 0.0, False)[len(rest) :])[:3]
            node.target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            node.args, likes = (query, key, value, dropout, is_causal), [query]
        elif node.target is _ATTENTION[1]:
            grad, query, key, value, bias, _, out, logarithm, _, _, _, _, dropout, is_causal = node.args[:14]
            node.target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            node.args, likes = (grad, query, key, value, out, logarithm, dropout, is_causal), [query, key, value]
        else:
            continue
        node.kwargs = {"attn_mask": bias, "scale": node.kwargs.get("scale")}
        for user in [one for one in node.users if one.target is operator.getitem]:
            _replace_result(graph, user, likes, len(node.target._schema.returns))


def _replace_result(graph: GraphModule, user: torch.fx.Node, likes: Sequence[torch.fx.Node], results: int) -> None:
    """Gives a result of attention the layout of the graph's operator, or replaces one that the CPU's does not have."""
    position = user.args[1]
    assert isinstance(position, int)
    with graph.graph.inserting_after(user):
        if position >= results:  # the random state of dropout, which the CPU's attention does not support
            new = graph.graph.call_function(torch.ops.aten.empty.memory_format, ([],), {"dtype": torch.int64})
            user.replace_all_uses_with(new)
            graph.graph.erase_node(user)
        elif position < len(likes):
            empty = graph.graph.call_function(torch.ops.aten.empty_like.default, (likes[position],))
    if position < min(results, len(likes)):
        with graph.graph.inserting_after(empty):
            new = graph.graph.call_function(torch.ops.aten.copy.default, (empty, user))
        user.replace_all_uses_with(new, delete_user_cb=lambda one: one is not new)


def _is_on_bp(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "bp"


def _moved(argument: Any) -> Any:
    return _CPU if isinstance(argument, torch.device) and argument.type == "bp" else argument


def _on_cpu(value: Any) -> Any:
    """The fake tensor with the same layout on the CPU; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or value.device.type != "bp":
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        if value.numel() == 0:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        size = value.storage_offset() + 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        base = torch.empty(size, dtype=value.dtype, device="cpu")
        return base.as_strided(value.shape, value.stride(), value.storage_offset())


class CpuGraph(OutputCode):
    """A graph that was compiled for the CPU, called with bp tensors, CPU scalars and sizes.

    Args:
        compiled: the compiled graph.
        device: the device of its bp tensors.
        on_bp: for each result, whether it is a tensor on this device.
    """

    def __init__(self, compiled: Callable[[list[Any]], Any], device: torch.device, on_bp: Sequence[bool]) -> None:
        self._boxed_call = True
        self._compiled, self._device, self._on_bp = compiled, device, on_bp
        self._calls = threading.local()
        self._number = next(_numbers)
        _graphs[self._number] = self

    @property
    def _fx_graph_cache_key(self) -> str:  # type: ignore[override]
        """Missing, so that AOTAutograd's cache, which would restore the graph without this object, leaves it out.

        Raises:
            AttributeError: always.
        """
        raise AttributeError("graphs on host devices are not cached")

    def __call__(self, inputs: Sequence[Any]) -> Any:
        tensors = [one for one in inputs if _is_on_bp(one)]
        self._calls.inputs = [None if _is_on_bp(one) else one for one in inputs]
        if isinstance(inputs, list):
            inputs.clear()
        with torch._C._AutoDispatchBelowAutograd():
            # The first tensor has no elements: a graph without inputs also needs a device.
            nothing = torch.empty(0, device=self._device)
            found = iter(torch.ops.backplane.compiled_for_cpu([nothing, *tensors], self._number))
        others = iter(self._calls.others)
        return tuple(next(found) if is_on_bp else next(others) for is_on_bp in self._on_bp)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the graph on CPU tensors; returns those of the results that belong on bp."""
        given = iter(tensors)
        results = self._compiled([next(given) if one is None else one for one in self._calls.inputs])
        self._calls.others = [one for one, is_on_bp in zip(results, self._on_bp, strict=True) if not is_on_bp]
        return [one for one, is_on_bp in zip(results, self._on_bp, strict=True) if is_on_bp]

    def post_compile(self, *given: Any, **named: Any) -> None:
        """Nothing is left to do: the graph inside has been completed."""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There are no Triton kernels."""


def _run(tensors: Sequence[torch.Tensor], graph: int) -> list[torch.Tensor]:
    return _graphs[graph].run(tensors[1:])


_library.impl("compiled_for_cpu", _run, "CPU")


def install(compile_fx: Any) -> None:
    """Lets `torch._inductor.compile_fx.compile_fx` compile graphs on devices without a dialect for the CPU."""
    original = compile_fx.compile_fx
    default = compile_fx.compile_fx_inner

    def inner(graph: GraphModule, inputs: Sequence[Any], **named: Any) -> Any:
        inductor.check_backend(sorted(_bp_devices(graph, inputs)))
        if is_without_dialect(graph, inputs):
            return compile_for_cpu(default, graph, inputs, **named)
        return default(graph, inputs, **named)

    @functools.wraps(original)
    def compile_with_bp(model: Any, inputs: Any, inner_compile: Any = default, *given: Any, **named: Any) -> Any:
        return original(model, inputs, inner if inner_compile is default else inner_compile, *given, **named)

    compile_fx.compile_fx = compile_with_bp


