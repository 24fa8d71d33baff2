"""Lowers `flex_attention` and its gradients to one pass: score_mod and mask_mod become statements of the kernels.

PyTorch traces both functions, and the gradient of score_mod, to graphs of operators on scalars. Inductor lowers these
graphs as it lowers elementwise operators, and a kernel's methods write the statements. The graph calls the operators of
flex_operator.py with the statements as text, so captured tensors, numbers and sizes are arguments, and a changed block
mask is data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch._inductor import ir
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.subgraph_lowering import PointwiseSubgraphLowering
from torch._inductor.virtualized import OpsValue, V
from torch.utils._sympy.value_ranges import ValueRanges

from torch_backplane.compile.flex_operator import Statements
from torch_backplane.compile.kernel import GraphKernel, is_float
from torch_backplane.compile.variables import Variable
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.target import Target
from torch_backplane.kernels.templates.attention import attends_in_one_pass
from torch_backplane.kernels.templates.flex_attention import argument_bytes
from torch_backplane.planning.launch import dialect_of
from torch_backplane.preferences import preferred

_PLACES = ("in_batch", "in_head", "query_at", "key_at")

_aten, _prims = torch.ops.aten, torch.ops.prims
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Numbers of scores from which CPUs compute in one pass, without and with a block mask. The composition uses the
# library's matrix products: it took 0.5 to 0.7 of the time of one pass for a causal mask, and 2.5 times as long for a
# window of 256 in 2,048 keys. But it stores all scores: 0.5 GiB for 2^27.
_SCORES = (1 << 28, 1 << 27)
# Operators besides pointwise ones that Inductor lowers to loads and index arithmetic.
_EXPRESSIBLE = {
    _aten.alias.default,
    _aten.clone.default,
    _aten.expand.default,
    _aten.full.default,
    _aten.index.Tensor,
    _aten.scalar_tensor.default,
    _aten.select.int,
    _aten.squeeze.dim,
    _aten.unsqueeze.default,
    _aten.view.default,
    _prims.convert_element_type.default,
}


class _Call(NamedTuple):
    """The arguments of `flex_attention` and of its gradients that decide about one pass.

    Args:
        joint: the graph of the gradients of score_mod. None for `flex_attention`.
        captured: the tensors and numbers that score_mod and mask_mod capture.
    """

    query: Any
    key: Any
    value: Any
    score_mod: Any
    joint: Any
    block_mask: Sequence[Any]
    captured: Sequence[Any]


def _call(node: torch.fx.Node) -> _Call:
    arguments: Any = node.args
    query, key, value, *given = arguments
    if node.target is flex_attention_backward:
        _, _, _, _, score_mod, joint, block_mask, _, _, score_captured, mask_captured = given
    else:
        (score_mod, block_mask, _, _, score_captured, mask_captured), joint = given, None
    return _Call(query, key, value, score_mod, joint, block_mask, (*score_captured, *mask_captured))


def computes_in_one_pass(graph: torch.fx.GraphModule, node: torch.fx.Node) -> bool:
    """Whether a call of `flex_attention` or of its gradients in the graph can be lowered. All others are composed."""
    call = _call(node)
    operands = [one.meta["val"] for one in (call.query, call.key, call.value)]
    captured = [one.meta["val"] if isinstance(one, torch.fx.Node) else one for one in call.captured]
    tensors = [one for one in captured if isinstance(one, torch.Tensor)]
    dialect = dialect_of(operands[0].device)
    functions = [getattr(graph, str(one.target)) for one in (call.score_mod, call.block_mask[-1])]
    joint = None if call.joint is None else getattr(graph, str(call.joint.target))
    return (
        attends_in_one_pass(dialect.target)
        and argument_bytes(dialect, len(tensors), 8 * len(captured)) <= dialect.target.max_argument_bytes
        and _pays_off(dialect.target, operands[0], operands[1], call.block_mask)
        and operands[0].dtype in _DTYPES
        and all(one.dtype == operands[0].dtype for one in operands)
        and all(one.device.type == "bp" or one.dim() == 0 for one in tensors)
        and all(_is_expressible(one) for one in functions)
        and (joint is None or (_has_only_the_gradient_of_scores(joint) and _is_expressible(joint)))
    )


def _has_only_the_gradient_of_scores(joint: torch.fx.GraphModule) -> bool:
    """Whether no captured tensor needs a gradient: one pass has no place for the sums over scores."""
    (output,) = joint.graph.find_nodes(op="output")
    of_score, *of_others = output.args[0]
    return of_score is not None and all(one is None for one in of_others)


def _pays_off(target: Target, query: torch.Tensor, key: torch.Tensor, block_mask: Sequence[Any]) -> bool:
    """Whether one pass is better than the composition, by the sizes that the graph is compiled with."""
    if target.simt or preferred("attention") == "generated":
        return True
    blocks = block_mask[3].meta["val"]
    masked = _number(blocks.shape[-2:]) > 1
    return _number((*query.shape[:3], key.shape[2])) >= _SCORES[masked]


def _number(sizes: Sequence[Any]) -> int:
    """The number of elements of these sizes, by their hints; 0 if one has none."""
    hints = [one if isinstance(one, int) else one.node.hint if one.node.has_hint() else None for one in sizes]
    return math.prod(0 if one is None else one for one in hints)


def _is_expressible(module: torch.fx.GraphModule) -> bool:
    """Whether a graph of operators on scalars can be statements."""
    from torch._inductor.lowering import fallbacks, lowerings

    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            tags = node.target.tags
            if torch.Tag.nondeterministic_seeded in tags or node.target in fallbacks or node.target not in lowerings:
                return False
            if torch.Tag.pointwise not in tags and node.target not in _EXPRESSIBLE:
                return False
        elif node.op == "get_attr":  # a constant, which is a tensor on the CPU
            return False
    return True


class ScoreKernel(GraphKernel):
    """The statements of score_mod and mask_mod. They are no kernel by themselves."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        super().__init__({"x": sympy.Integer(1)}, features=SIMDKernelFeatures([], sympy.Integer(1)))
        self.given = {one.name: one for one in variables}
        self.outside_loops |= {*variables}

    def get_index_dtype_as_torch_dtype(self) -> torch.dtype:
        return torch.int64

    def load(self, name: str, index: sympy.Expr) -> Variable:
        return self.given[name] if name in self.given else super().load(name, index)

    def write(self, value: Any, result: str, dtype: torch.dtype) -> str:
        """Statements that compute an Inductor node without dimensions and assign it to `result`, of this dtype."""
        with self:
            found = value.make_loader()(())
            found = self.cast(found.value if isinstance(found, OpsValue) else found, dtype)
            self.compute.writeline(f"{result} = {found};")
        lines = [*self.loads.getvalue().splitlines(), *self.compute.getvalue().splitlines()]
        self.loads.clear()
        self.compute.clear()
        self.outside_loops = {*self.given.values()}  # the next statements are in another scope
        self.cse.invalidate(self.outside_loops)  # type: ignore[arg-type]
        return "\n".join(line.strip() for line in lines)

    def arguments(self) -> tuple[list[str], list[str], list[tuple[str, str]], list[Any]]:
        """The captured tensors that statements load: names and buffers; and numbers: names with dtypes, and values."""
        definitions, buffers, arguments, _ = self.args.python_argdefs()
        names: list[str] = []
        loaded: list[str] = []
        numbers: list[tuple[str, str]] = []
        values: list[Any] = []
        for definition, buffer, argument in zip(definitions, buffers, arguments, strict=True):
            if hasattr(argument, "buffer"):
                names.append(definition.name)
                loaded.append(buffer)
            else:
                kind = torch.float32 if is_float(argument) else self.get_index_dtype_as_torch_dtype()
                numbers.append((definition.name, _name(kind)))
                values.append(argument.expr)  # type: ignore[union-attr]
        return names, loaded, numbers, values

    def functions(self, *texts: str) -> str:
        """The functions that statements call, without those that report errors."""
        reports, self.reports_errors = self.reports_errors, False
        found = self._functions("\n".join(texts))
        self.reports_errors = reports
        return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Functions(NamedTuple):
    """The functions of a call, which Inductor lowers, and what they capture.

    Args:
        joint: the gradient of score_mod. None for the result.
        score_captured, mask_captured: captured tensors and numbers.
    """

    score_mod: Any
    joint: Any
    mask_mod: Any
    score_captured: Sequence[Any]
    mask_captured: Sequence[Any]


def lower(
    lowering: Any,
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> Any:
    """Lowers a call of `flex_attention`: returns the result, the logarithms of base 2, and the maxima."""
    from torch._inductor.kernel.flex.common import infer_dense_strides

    _, _, *tensors, query_block, key_block, mask_mod = block_mask
    query = _realized(query)
    layout = infer_dense_strides([*query.get_size()[:3], value.get_size()[3]], query.get_stride())
    functions = _Functions(score_mod, None, mask_mod, score_mod_other_buffers, mask_mod_other_buffers)
    text, buffers, values = _written(lowering, query, key, functions)
    call = lowering.fallback_handler(torch.ops.backplane.flex_attention.default, add_to_fallback_set=False)
    return call(
        query,
        key,
        value,
        [one for one in tensors[:4] if one is not None],  # after these, the blocks of queries for each block of keys
        buffers,
        values,
        layout,
        [query_block, key_block],
        scale,
        bool(kernel_options.get("OUTPUT_MAX", True)),
        text,
    )


def lower_backward(
    lowering: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logarithm: Any,
    grad: Any,
    logarithm_grad: Any,
    score_mod: Any,
    joint: Any,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: Sequence[Any] = (),
    mask_mod_other_buffers: Sequence[Any] = (),
) -> Any:
    """Lowers the gradients: returns those of query, key and value, and None for each captured tensor or number.

    Args:
        logarithm: the logarithms of base 2.
        grad, logarithm_grad: the gradients of the result and of the logarithms of base 2. None if there are none.
    """
    lowered, compute = lowering.lowerings, value_dtype(query.get_dtype())
    _, _, *tensors, query_block, key_block, mask_mod = block_mask
    if grad is None:
        grad = lowered[_aten.full](out.get_size(), 0, dtype=out.get_dtype(), device=out.get_device())
    products = lowered[_aten.mul](*(lowered[_prims.convert_element_type](one, compute) for one in (out, grad)))
    inner = lowered[_aten.sum](products, axis=[-1])
    if logarithm_grad is not None:
        inner = lowered[_aten.sub](inner, lowered[_aten.mul](logarithm_grad, 1 / math.log(2)))
    query = _realized(query)
    functions = _Functions(score_mod, joint, mask_mod, score_mod_other_buffers, mask_mod_other_buffers)
    text, buffers, values = _written(lowering, query, key, functions)
    call = lowering.fallback_handler(torch.ops.backplane.flex_attention_backward.default, add_to_fallback_set=False)
    of_query, *of_others = call(
        grad,
        query,
        key,
        value,
        ir.ExternKernel.require_contiguous(logarithm),
        ir.ExternKernel.require_contiguous(inner),
        [one for one in tensors[:8] if one is not None],
        buffers,
        values,
        [query_block, key_block],
        scale,
        text,
    )
    if not V.graph.sizevars.statically_known_equals(query.get_size()[0], key.get_size()[0]):  # all sequences share keys
        of_others = [lowered[_aten.sum](one, axis=[0], keepdims=True) for one in of_others]
    return of_query, *of_others, tuple(None for _ in score_mod_other_buffers)


def _written(lowering: Any, query: Any, key: Any, functions: _Functions) -> tuple[str, list[Any], list[Any]]:
    """The `Statements` of the functions as text, and the captured tensors and numbers that these use."""
    device, dtype = query.get_device(), query.get_dtype()
    sizes = [*query.get_size()[:3], key.get_size()[2]]
    score_captured, mask_captured = (
        [_realized(_on_device(lowering, one, device)) for one in given]
        for given in (functions.score_captured, functions.mask_captured)
    )
    places = [_variable(name, torch.int32, size) for name, size in zip(_PLACES, sizes, strict=True)]
    score, slope = (_variable(name, value_dtype(dtype)) for name in ("score", "slope"))
    nodes = [_placeholder(one.name, torch.int32, device) for one in places]
    score_node, slope_node = (_placeholder(one.name, dtype, device) for one in (score, slope))
    with V.graph.set_current_device(device):
        kernel = ScoreKernel([score, slope, *places])
        masked = _result(functions.mask_mod.graph_module, [*nodes, *mask_captured])
        mask = kernel.write(masked, "attends", torch.bool)
        modified = _result(functions.score_mod.graph_module, [score_node, *nodes, *score_captured])
        modify, differentiate = kernel.write(modified, "score", score.dtype), ""
        if functions.joint is not None:
            gradient = _result(functions.joint.graph_module, [score_node, *nodes, slope_node, *score_captured])
            differentiate = kernel.write(gradient, "slope", slope.dtype)
        inputs, buffers, numbers, values = kernel.arguments()
        text = Statements(
            modify=modify,
            mask=mask,
            differentiate=differentiate,
            functions=kernel.functions(modify, mask, differentiate),
            dtypes=sorted(_name(value_dtype(one)) for one in kernel.used_dtypes),
            inputs=inputs,
            numbers=numbers,
            reports_errors=kernel.reports_errors,
        ).as_text()
    return text, [_buffer(one) for one in buffers], values


def _on_device(lowering: Any, node: Any, device: torch.device) -> Any:
    """The node, copied to the device if it is a scalar on the CPU, as captured floats are with dynamic shapes."""
    return lowering.to_device(node, device) if isinstance(node, ir.IRNode) and node.get_device() != device else node


def _realized(node: Any) -> Any:
    """The node with memory and strides, if it is a tensor."""
    if not isinstance(node, ir.IRNode):
        return node
    realized = ir.ExternKernel.realize_input(node)
    realized.freeze_layout()
    return realized


def _buffer(name: str) -> Any:
    found = V.graph.get_buffer(name)
    return found if isinstance(found, ir.TensorBox) else ir.TensorBox.create(found)


def _variable(name: str, dtype: torch.dtype, size: Any = None) -> Variable:
    static = isinstance(size, (int, sympy.Integer))
    bounds = ValueRanges(0, int(size) - 1 if static else torch.iinfo(dtype).max) if size is not None else None
    return Variable(name, bounds or ValueRanges.unknown(), dtype)


def _placeholder(name: str, dtype: torch.dtype, device: torch.device) -> Any:
    return ir.TensorBox.create(ir.InputBuffer(name=name, layout=ir.FixedLayout(device, dtype, [], [])))


def _result(module: torch.fx.GraphModule, arguments: Iterable[Any]) -> Any:
    """The result of a graph of operators on scalars, as an Inductor node."""
    lowering = PointwiseSubgraphLowering(module, root_graph_lowering=V.graph)
    with V.set_graph_handler(lowering):  # type: ignore[arg-type]
        lowering.run(*arguments)
    found: Any = lowering.graph_outputs
    return found[0] if isinstance(found, (list, tuple)) else found
