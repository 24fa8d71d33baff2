"""The steps of a graph that Inductor has compiled, and the bytes that they move.

A kernel reads and writes each element of a buffer at most once, and nothing that stays in registers: neither what it
computes itself nor a buffer that no other step reads. Where indices are data, it accesses as many elements as it has
iterations. An operator of eager PyTorch reads its arguments and writes its results. Sizes are those of the call for
which the graph was compiled.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.dependencies import MemoryDep, WeakDep
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_leaves

from torch_backplane.compile_report import Buffer, Graph, Step

_aten = torch.ops.aten
_VIEWS = {operator.getitem, _aten._unsafe_view.default}  # besides those whose schemas say so
# They read as many elements of their first argument as they return.
_LOOKUPS = {_aten.embedding, _aten.index, _aten._unsafe_index, _aten.gather, _aten.index_select}


def _hint(size: Any) -> int:
    if isinstance(size, torch.SymInt):
        size = size.node.expr
    return size if isinstance(size, int) else int(V.graph.sizevars.optimization_hint(size, fallback=0))


def _numel(sizes: Iterable[Any], strides: Iterable[Any]) -> int:
    """The number of elements in memory: expanded dimensions count once."""
    return math.prod(_hint(size) for size, stride in zip(sizes, strides, strict=True) if _hint(stride) != 0)


# Without fusion


def _is_view(node: torch.fx.Node) -> bool:
    aliases = [one.alias_info for one in _arguments(node) if one.alias_info is not None]
    return node.target in _VIEWS or (bool(aliases) and not any(one.is_write for one in aliases))


def _is_copy_back(node: torch.fx.Node) -> bool:
    """Whether the node copies a result into an argument of the graph: AOTAutograd's form of operators in place."""
    target = node.args[0] if node.target is _aten.copy_.default else None
    return isinstance(target, torch.fx.Node) and target.op == "placeholder"


def _arguments(node: torch.fx.Node) -> list[Any]:
    return list(node.target._schema.arguments) if isinstance(node.target, torch._ops.OpOverload) else []


def _values(nodes: Any) -> Iterator[torch.Tensor]:
    for node in tree_leaves(nodes):
        if isinstance(node, torch.fx.Node):
            yield from (one for one in tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    strided = (one for one in tensors if one.layout == torch.strided)
    return sum(_numel(one.shape, one.stride()) * one.itemsize for one in strided)


def _moved_by(node: torch.fx.Node) -> int:
    """The bytes that a kernel for this node alone reads and writes."""
    if node.op != "call_function" or _is_view(node) or _is_copy_back(node):
        return 0
    named = {one.name: node.kwargs.get(one.name) for one in _arguments(node)}
    named |= {one.name: given for one, given in zip(_arguments(node), node.args, strict=False)}
    changed = [named[one.name] for one in _arguments(node) if one.alias_info is not None and one.alias_info.is_write]
    written = _bytes(_values(changed or [node]))
    if not written:
        return 0
    read = [_bytes(_values(one)) for one in node.all_input_nodes]
    if getattr(node.target, "overloadpacket", None) in _LOOKUPS:
        read[0] = min(read[0], written)
    return written + sum(read)


def unfused_bytes(graph: torch.fx.Graph) -> int:
    """The bytes that a graph reads and writes if each node is a separate kernel.

    `graph` is the one that Inductor compiles (the post-grad graph). Each node that is not a view reads its tensors and
    writes its results. One that looks up (`embedding`, `index`, `gather`) reads as many elements as it returns. Copies
    into the arguments of the graph do not count, because an operator in place needs none.

    Eager PyTorch moves as many bytes where an operator is one node, and fewer where it is several nodes, as silu is.
    """
    return sum(_moved_by(node) for node in graph.nodes)


# Compiled graphs


def _shape(name: str) -> tuple[torch.dtype, list[Any]] | None:
    """The dtype and the sizes of a buffer, or of the one that it stands for being written; None if it is no tensor."""
    buffer = V.graph.try_get_buffer(name)
    if not isinstance(buffer, ir.IRNode):
        return None
    size, dtype = buffer.maybe_get_size(), buffer.maybe_get_dtype()
    if size is not None and dtype is not None:
        return dtype, list(size)
    changed = buffer.get_mutation_names() if isinstance(buffer, ir.Buffer) else ()
    return _shape(changed[0]) if changed else None


def _in_bytes(accesses: dict[str, float]) -> dict[str, int]:
    """Bytes of buffers, of the numbers of accesses; at most all elements."""
    found = {}
    for name, elements in accesses.items():
        if (shape := _shape(name)) is not None:
            found[name] = int(min(elements, math.prod(map(_hint, shape[1])))) * shape[0].itemsize
    return found


def _accesses_of_kernel(nodes: list[Any], kind: str) -> dict[str, float]:
    """Accesses to buffers, by the nodes of a kernel. `kind` is "reads" or "writes"."""
    removed = V.graph.removed_buffers | V.graph.inplaced_to_remove
    written = {one.name for node in nodes for one in node.read_writes.writes} if kind == "reads" else set()
    accesses: dict[str, dict[Any, float]] = defaultdict(dict)
    for node in nodes:
        iterations = math.inf if node.is_template() else math.prod(map(_hint, tree_leaves(node.get_ranges())))
        for one in getattr(node.read_writes, kind):
            if one.name in removed or one.name in written or isinstance(one, WeakDep):
                continue
            # Loops over the same elements can have other forms.
            same = one.normalize() if isinstance(one, MemoryDep) else one
            accesses[one.name][same] = min(_hint(one.get_numel()), iterations)
    return {name: sum(each.values()) for name, each in accesses.items()}


def _accesses_of_operator(node: ExternKernelSchedulerNode, kind: str) -> dict[str, float]:
    found = {one.name: math.inf for one in getattr(node.read_writes, kind) if not isinstance(one, WeakDep)}
    if kind == "reads":  # arguments can be views of buffers
        views: dict[str, float] = defaultdict(float)
        for one in tree_leaves(list(getattr(node.node, "inputs", ()))):
            layout = one.maybe_get_layout() if isinstance(one, ir.IRNode) else None
            if layout is not None:
                views[one.get_name()] += _numel(layout.size, layout.stride)
        found |= {name: elements for name, elements in views.items() if name in found}
    return found


def _operators(node: Any, order: dict[torch.fx.Node, int]) -> list[str]:
    """The program's operators that a node of Inductor's schedule comes from, in its order."""
    origins = {one for each in node.get_nodes() for one in each.node.get_origins() if one.op == "call_function"}
    found = sorted(origins & order.keys(), key=order.__getitem__)
    if isinstance(node.node, (ir.ExternKernel, ir.TemplateBuffer)):  # the others compute its arguments
        operation: Any = node.node
        exactly = operation.get_origin_node()
        found = [exactly] if exactly in order else found[-1:]
    computing = [one for one in found if not _is_view(one) and not _is_copy_back(one)]
    called = [one.meta.get("original_aten") or one.target for one in computing or found]
    return list(dict.fromkeys(str(getattr(one, "overloadpacket", one)) for one in called))


def _launches() -> dict[str, tuple[int, str]]:
    """For each node that is part of a kernel, by name: the number of the launch, and the kernel's name."""
    noted = (one for backend in V.graph.scheduler.backends.values() for one in getattr(backend, "launches", ()))
    return {node: (number, kernel) for number, (kernel, nodes) in enumerate(noted) for node in nodes}


def _step(node: Any, kernel: str, order: dict[torch.fx.Node, int]) -> Step:
    """The step that a node of Inductor's schedule is. `kernel` is the kernel's name, if it has one."""
    operators = _operators(node, order)
    if isinstance(node, NopKernelSchedulerNode):
        reads, writes = (dict.fromkeys(_names(node, kind), 0) for kind in ("reads", "writes"))
        return Step("none", node.get_name(), operators, reads, writes)
    if isinstance(node, ExternKernelSchedulerNode):
        reads, writes = (_in_bytes(_accesses_of_operator(node, kind)) for kind in ("reads", "writes"))
        name = getattr(node.node, "python_kernel_name", None) or type(node.node).__name__
        return Step("operator", name, operators, reads, writes)
    reads, writes = (_in_bytes(_accesses_of_kernel(node.get_nodes(), kind)) for kind in ("reads", "writes"))
    if node.is_template() and not kernel:  # a product alone
        return Step("operator", node.node.python_kernel_name, operators, reads, writes)
    return Step("kernel", kernel or node.get_name(), operators, reads, writes)


def _names(node: Any, kind: str) -> list[str]:
    return [one.name for each in node.get_nodes() for one in getattr(each.read_writes, kind)]


def _add(step: Step, more: Step) -> None:
    step.operators = list(dict.fromkeys([*step.operators, *more.operators]))
    for old, new in ((step.reads, more.reads), (step.writes, more.writes)):
        old.update({name: old.get(name, 0) + count for name, count in new.items()})


def _steps(nodes: list[Any]) -> list[Step]:
    order = {node: number for number, node in enumerate(nodes)}
    launches = _launches()
    steps: list[Step] = []
    by_output: dict[str, Step] = {}
    by_launch: dict[int, Step] = {}
    for node in V.graph.scheduler.nodes:
        launch, kernel = launches.get(node.get_nodes()[0].get_name(), (-1, ""))
        step = _step(node, kernel, order)
        before = by_launch.get(launch)  # a kernel for the CPU can consist of several nodes
        if isinstance(node.node, ir.MultiOutput):  # one of the results of an operator
            step.reads, step.operators, before = {}, [], by_output[_names(node, "reads")[0]]
        if before is not None:
            _add(before, step)
        else:
            steps.append(step)
            if launch >= 0:
                by_launch[launch] = step
        by_output |= dict.fromkeys(_names(node, "writes"), before or step)
    return steps


def describe() -> Graph:
    """Describe the graph that Inductor has just generated code for, `V.graph`."""
    graph: Any = V.graph
    steps, nodes = _steps(list(graph.module.graph.nodes)), graph.module.graph.nodes
    outputs = dict.fromkeys(graph.get_output_names())
    used = dict.fromkeys([*(name for one in steps for name in (*one.reads, *one.writes)), *outputs])
    shapes = {name: shape for name in used if (shape := _shape(name)) is not None}
    given = graph.module.meta.get("bp_device")  # compile/host.py compiles the graph of this device for the CPU
    return Graph(
        kind="backward" if graph.is_backward else "inference" if graph.is_inference else "forward",
        devices=[str(given)] if given else sorted({str(one.device) for one in _values(list(nodes))}),
        compiled_for="cpu" if given else None,
        inputs=[name for name in graph.graph_input_names if name in shapes],
        outputs=[name for name in outputs if name in shapes],
        buffers={name: _buffer(dtype, sizes) for name, (dtype, sizes) in shapes.items()},
        steps=steps,
        compiled_bytes=sum(sum(one.reads.values()) + sum(one.writes.values()) for one in steps),
        unfused_bytes=unfused_bytes(graph.module.graph),
    )


def _buffer(dtype: torch.dtype, sizes: list[Any]) -> Buffer:
    shown = [int(one) if str(one).isdigit() else str(one) for one in sizes]
    return Buffer(str(dtype).removeprefix("torch."), shown, math.prod(map(_hint, sizes)) * dtype.itemsize)
