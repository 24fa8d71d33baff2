"""`torch.nn.attention.flex_attention` on bp devices.

Inductor has templates of the higher-order operators `flex_attention` and `flex_attention_backward` for PyTorch's own
devices. On bp, flex_lowering.py lowers them to one pass over the blocks of the mask, where it can and it pays off.
Other calls are composed as in PyTorch's implementations for eager mode: products, and kernels that fuse `score_mod`,
the mask and the softmax. They need memory for all scores.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._guards import detect_fake_mode
from torch._higher_order_ops.flex_attention import (
    _flex_attention_autocast_impl,
    flex_attention,
    flex_attention_backward,
    sdpa_dense,
    sdpa_dense_backward,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

_AUTOCAST = DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]


def install(module: ModuleType) -> None:
    """Let `torch.nn.attention.flex_attention.flex_attention` accept bp tensors, also in autocast."""
    validate: Callable[..., None] = module._validate_device  # type: ignore[attr-defined]

    @functools.wraps(validate)
    def validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "bp":
            validate(query, key, value)

    module._validate_device = validate_device  # type: ignore[attr-defined]
    flex_attention.py_impl(_AUTOCAST)(_autocast)


def _autocast(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Casts query, key and value to the dtype of autocast, as on CUDA."""
    with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_AUTOCAST)):
        return _flex_attention_autocast_impl(*args)


def install_lowering(lowering: ModuleType) -> None:
    """Lower calls on bp that `decompose` keeps, in `torch._inductor.lowering`."""
    for operator, ours in ((flex_attention, "lower"), (flex_attention_backward, "lower_backward")):
        _install_lowering(lowering, operator, ours)


def _install_lowering(lowering: ModuleType, operator: Any, ours: str) -> None:
    lowerings: dict[Any, Callable[..., Any]] = lowering.lowerings  # type: ignore[attr-defined]
    lower_others = lowerings[operator]

    @functools.wraps(lower_others)
    def lower(query: Any, *given: Any, **named: Any) -> Any:
        if query.get_device().type != "bp":
            return lower_others(query, *given, **named)
        from torch_backplane.compile import flex_lowering

        return getattr(flex_lowering, ours)(lowering, query, *given, **named)

    lowerings[operator] = lower


def decompose(graph: torch.fx.GraphModule, keep: Callable[[torch.fx.GraphModule, Any], bool] | None = None) -> None:
    """Replace the operators in an Inductor graph by products, score_mod, mask and softmax, as PyTorch composes them.

    Args:
        graph: the graph.
        keep: decides for a node of one of the operators whether it stays in the graph.
    """
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, PatternMatcherPass, register_graph_pattern

    for operator in (flex_attention, flex_attention_backward):
        for node in graph.graph.find_nodes(op="call_function", target=operator):
            _check_backend(node)
            for leaf in tree_flatten(node.args)[0]:
                if isinstance(leaf, torch.fx.Node) and leaf.op == "get_attr":
                    _keep_floats_as_tensors(getattr(graph, str(leaf.target)), node.args[0].meta["val"].dtype)
    passes = PatternMatcherPass()
    for operator, composition in ((flex_attention, _forward), (flex_attention_backward, _backward)):
        replace = functools.partial(_replace, graph, composition)

        def is_replaced(match: Any) -> bool:
            return keep is None or not keep(graph, match.output_node())

        pattern = CallFunctionVarArgs(operator)
        register_graph_pattern(pattern, extra_check=is_replaced, pass_dict=passes)(replace)  # type: ignore[arg-type]
    if passes.apply(graph):
        for node in graph.graph.find_nodes(op="get_attr"):
            if not node.users:
                graph.graph.erase_node(node)
        graph.delete_all_unused_submodules()
        graph.recompile()


def _check_backend(node: torch.fx.Node) -> None:
    """Refuses the names of kernels for other devices."""
    backend = next(one for one in node.args if isinstance(one, dict)).get("BACKEND", "AUTO")
    if backend != "AUTO":
        raise RuntimeError(f"BACKEND={backend!r} of flex_attention is not available on bp; use BACKEND='AUTO'")


def _keep_floats_as_tensors(module: torch.fx.GraphModule, dtype: torch.dtype) -> None:
    """Lets the graph of score_mod or mask_mod use captured floats, which are tensors on the CPU, without their value.

    Args:
        module: the graph.
        dtype: dtype of the queries.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._local_scalar_dense.default):
        with module.graph.inserting_before(node):
            arguments = (node.args[0], torch.promote_types(dtype, torch.float32))
            converted = module.graph.call_function(torch.ops.prims.convert_element_type.default, arguments)
        node.replace_all_uses_with(converted)
        module.graph.erase_node(node)
    module.recompile()


def _replace(graph: torch.fx.GraphModule, composition: Callable[..., Any], match: Any, *args: Any) -> None:
    """Replaces a call of an operator by the traced composition."""
    leaves, structure = tree_flatten(args)
    leaves = [_module(graph, one) for one in leaves]
    nodes = [one for one in leaves if isinstance(one, torch.fx.Node)]

    def compute(*values: Any) -> Any:
        given: Iterator[Any] = iter(values)
        filled = [next(given) if isinstance(one, torch.fx.Node) else one for one in leaves]
        with torch.no_grad(), _Constants():
            return composition(*tree_unflatten(filled, structure))

    match.replace_by_example(compute, nodes, _trace)


def _trace(function: Callable[..., Any], values: Sequence[Any]) -> torch.fx.GraphModule:
    """Traces a function to a graph of Inductor's operators without mutations and repetitions."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.pattern_matcher import fwd_only
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    def decompositions() -> dict[Any, Callable[..., Any]]:
        return {**select_decomp_table(), torch.ops.flex_lib.zeros_and_scatter.default: _scatter}

    mode = detect_fake_mode(values)
    assert mode is not None  # query, key and value are fake
    functional = dispatch_functionalize(function, FunctionalTensorMode())
    with mode:
        traced = fwd_only(functional, values, get_decomp_fn=decompositions)
    traced.graph = fx_graph_cse(traced.graph)  # the softmax and the logarithms of its sums share maxima
    return traced


class _Constants(TorchFunctionMode):
    """Fills tensors where PyTorch's implementations convert numbers, which would be tensors outside of the graph."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tensor:
            return torch.full((), *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _module(graph: torch.fx.GraphModule, leaf: Any) -> Any:
    """Returns the module of the graph that the leaf names (score_mod, say), ready for torch.vmap, or else the leaf."""
    if not isinstance(leaf, torch.fx.Node) or leaf.op != "get_attr":
        return leaf
    module = getattr(graph, str(leaf.target))
    for node in list(module.graph.nodes):
        if node.target is torch.ops.prims.convert_element_type.default:
            node.target = torch.ops.aten.to.dtype  # torch.vmap would call the other operator once for each score
        elif isinstance(node.target, torch._ops.OpOverload):
            _use_tensors(node)
    module.recompile()
    return module


def _use_tensors(node: torch.fx.Node) -> None:
    """Converts symbolic numbers that are operands, because torch.vmap cannot."""
    assert isinstance(node.target, torch._ops.OpOverload)
    for position, (argument, given) in enumerate(zip(node.target._schema.arguments, node.args, strict=False)):
        number = given.meta.get("val") if isinstance(given, torch.fx.Node) else None
        if isinstance(argument.type, torch.TensorType) and isinstance(number, (torch.SymInt, torch.SymFloat)):
            dtype = torch.int64 if isinstance(number, torch.SymInt) else torch.get_default_dtype()
            options = {"dtype": dtype, "device": node.meta["val"].device}
            with node.graph.inserting_before(node):
                tensor = node.graph.call_function(torch.ops.aten.scalar_tensor.default, (given,), options)
            node.update_arg(position, tensor)


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`flex_attention` with results of the dtypes that its fake implementation declares, also for float64."""
    out, logarithms, maxima = sdpa_dense(*args)
    return out, logarithms.float(), maxima.float()


def _backward(*args: Any) -> Any:
    """`flex_attention_backward` with the gradients of those captured tensors for which its joint graph returns one."""
    given = list(args)
    (output,) = given[8].graph.find_nodes(op="output")
    gradients = output.args[0][5:]  # after those of score, batch, head and positions
    given[12] = tuple(
        one if gradient is None else one.detach().requires_grad_()
        for one, gradient in zip(given[12], gradients, strict=True)
    )
    return sdpa_dense_backward(*given)


def _scatter(shape: Any, indices: Any, values: torch.Tensor) -> torch.Tensor:
    """The gradient of a captured tensor, summed in float32 as in Inductor's templates."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    zeros = torch.zeros(shape, dtype=dtype, device=values.device)
    return zeros.index_put(tuple(indices), values.to(dtype), accumulate=True).to(values.dtype)
