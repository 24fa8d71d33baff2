"""Products and convolutions in Inductor's graphs under max-autotune, with the elementwise operations on their results
and, for products, on their operands.

Inductor fuses these operations into a template, which a product or convolution is here. The wrapper gets a
`TemplateKernel`, which chooses between the fused kernel and separate ones when it runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
from torch._inductor import dependencies, ir
from torch._inductor.codegen.common import Kernel
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.kernel.conv import conv_layout
from torch._inductor.kernel.mm_common import mm_args
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V, ops
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import Max
from torch.utils._sympy.value_ranges import ValueRanges

from torch_backplane.compile.indexing import PLACE, index_at_place
from torch_backplane.compile.kernel import GraphKernel
from torch_backplane.compile.variables import Variable
from torch_backplane.kernels.dialects.base import Value
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.convolution import can_gather
from torch_backplane.kernels.templates.matmul import has_tiles
from torch_backplane.planning.launch import dialect_of

# The scheduler of torch 2.11 fuses operations on operands only into TritonTemplateBuffer.
_HAS_PROLOGUES = hasattr(ir.TemplateBuffer, "get_allowed_prologue_inps")
_Template: Any = ir.TemplateBuffer if _HAS_PROLOGUES else ir.TritonTemplateBuffer


class TemplateBuffer(_Template):  # type: ignore[misc]
    """The results of a product or of a convolution."""

    kind = ""  # the class of its calls in `torch_backplane.compile.template_kernel`

    def operands(self) -> dict[str, Any]:
        """The operands by name, of which elementwise operations can compute those in `allowed_prologue_inps`."""
        raise NotImplementedError

    def tiling(self) -> dict[str, sympy.Expr] | None:
        """The rows and columns of the results, if the template has them."""
        return None

    def described(self) -> str:
        """The operands and settings, for people."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """The wrapper's call of the operator of eager PyTorch."""
        raise NotImplementedError

    def arguments(self, operands: Sequence[str], is_kept: bool) -> list[str]:
        """The arguments of `kind` in the wrapper. `operands` are the texts of `operands()`."""
        raise NotImplementedError

    def assigned(self, call: str) -> str:
        """The wrapper's statement with a call that returns the results in memory."""
        return call


class ProductBuffer(TemplateBuffer):
    """alpha * a @ b + beta * c. `inputs` are a, b and, if there is one, c; `scales` are alpha and beta."""

    kind = "Product"

    def __init__(self, layout: ir.Layout, inputs: Sequence[ir.IRNode], scales: tuple[float, float]) -> None:
        super().__init__(layout, inputs, make_kernel_render=None)
        self.scales = scales
        names = ("addmm", "baddbmm") if len(inputs) > 2 else ("mm", "bmm")
        self.python_kernel_name = f"extern_kernels.{names[len(self.get_size()) - 2]}"
        buffers = [one.get_name() for one in self.inputs]
        fuses = has_tiles(dialect_of(layout.device), layout.dtype)
        self.allowed_prologue_inps = OrderedSet(one for one in buffers[:2] if fuses and buffers.count(one) == 1)

    def extract_read_writes(self, normalize: bool = False) -> dependencies.ReadWrites:
        """The accesses. Operands are read in the order of their memory, because the scheduler only fuses operations
        that write in the order in which the product reads."""
        found = super().extract_read_writes(normalize)
        reads = OrderedSet(one for one in found.reads if one.name not in self.allowed_prologue_inps)
        for view in self.inputs:
            if view.get_name() in self.allowed_prologue_inps:
                reads |= _accesses_in_order(view, normalize, ops.load).reads
        return dataclasses.replace(found, reads=reads)

    def operands(self) -> dict[str, Any]:
        return dict(zip("abc", self.inputs, strict=False))

    def tiling(self) -> dict[str, sympy.Expr]:
        *batch, rows, columns = self.get_size()
        return {"y": sympy_product([*batch, rows]), "x": columns}

    def described(self) -> str:
        added = "".join(f" + {_layout(one)}" for one in self.inputs[2:])
        return " @ ".join(_layout(one) for one in self.inputs[:2]) + added

    def lines(self) -> list[str]:
        a, b, *added = (one.codegen_reference() for one in self.inputs)
        scales = f", alpha={self.scales[0]}, beta={self.scales[1]}" if added else ""
        return [f"{self.python_kernel_name}({', '.join([*added, a, b])}{scales}, out={self.get_name()})"]

    def arguments(self, operands: Sequence[str], is_kept: bool) -> list[str]:
        c = () if len(operands) > 2 else ("None",)
        return [*operands, *c, str(self.scales), self.get_name() if is_kept else "None"]


class ConvolutionBuffer(TemplateBuffer):
    """A convolution. `inputs` are the image, the weight and, if there is one, the bias.

    The operator allocates its results itself, as it has no overload with `out`.
    """

    kind = "Convolution"

    def __init__(self, layout: ir.Layout, inputs: Sequence[ir.IRNode], settings: dict[str, Any]) -> None:
        super().__init__(layout, inputs, make_kernel_render=None)
        self.settings = settings  # stride, padding, dilation and groups
        self.python_kernel_name = "extern_kernels.convolution"

    def should_allocate(self) -> bool:
        return False

    def extract_read_writes(self, normalize: bool = False) -> dependencies.ReadWrites:
        """The accesses. Results are written in the order of their memory, in which the scheduler fuses operations."""
        reads = super().extract_read_writes(normalize).reads
        return dataclasses.replace(_accesses_in_order(self, normalize, _store), reads=reads)

    def assigned(self, call: str) -> str:
        V.graph.wrapper_code.allocated.add(self.get_name())
        return f"{self.get_name()} = {call}"

    def operands(self) -> dict[str, Any]:
        return dict(zip(("input", "weight", "bias"), self.inputs, strict=False))

    def described(self) -> str:
        image, weight, *bias = (_layout(one) for one in self.inputs)
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return f"{weight} * {image}{''.join(f' + {one}' for one in bias)}, {settings}"

    def lines(self) -> list[str]:
        image, weight, *bias = (one.codegen_reference() for one in self.inputs)
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        rest = f"transposed=False, output_padding={[0] * len(self.settings['stride'])}, bias={''.join(bias) or None}"
        call = self.assigned(f"{self.python_kernel_name}({image}, {weight}, {settings}, {rest})")
        return [call, f"assert_size_stride({', '.join([self.get_name(), *self._sizes_and_strides()])})"]

    def arguments(self, operands: Sequence[str], is_kept: bool) -> list[str]:
        bias = () if len(operands) > 2 else ("None",)
        return [*operands, *bias, *map(str, self.settings.values()), *self._sizes_and_strides(), str(is_kept)]

    def _sizes_and_strides(self) -> list[str]:
        layout = self.get_layout()
        return [V.graph.wrapper_code.codegen_python_shape_tuple(one) for one in (layout.size, layout.stride)]


def _store(name: str, index: sympy.Expr) -> Any:
    return ops.store(name, index, "result")


def _accesses_in_order(view: Any, normalize: bool, access: Callable[..., Any]) -> dependencies.ReadWrites:
    """The accesses to all elements of a view, those with the greatest stride in the outermost loop."""
    sizes, indexer = view.get_size(), view.get_layout().make_indexer()
    outermost_first = [*reversed(ir.get_fill_order(view.get_stride(), V.graph.sizevars.shape_env))]

    def access_at(index: Sequence[Any], _: Sequence[Any]) -> Any:
        at = dict(zip(outermost_first, index, strict=True))
        place = indexer([at[dim] for dim in range(len(sizes))])
        return access(view.get_name(), sympy.expand(place))  # as in the accesses of elementwise operations

    in_order = [sizes[dim] for dim in outermost_first]
    return dependencies.extract_read_writes(access_at, in_order, (), normalize=normalize)


def lower_product(*operands: Any, scales: tuple[float, float]) -> Any:
    """alpha * a @ b + beta * c as a template. `operands` are as those of mm or addmm."""
    *added, a, b = operands
    _, _, _, layout, a, b, *added = mm_args(a, b, *added)
    return ir.TensorBox.create(ProductBuffer(layout, [a, b, *added], scales))


def lower_convolution(x: Any, weight: Any, bias: Any, steps: dict[str, Any], groups: Any) -> Any:
    """A convolution that is not transposed, as a template; None if Inductor should lower it.

    Inductor lowers windows of one element as products if the results are in channels-last order.

    Args:
        x, weight, bias: the operands.
        steps: stride, padding and dilation, in this order.
        groups: the number of groups.
    """
    rank, device = len(x.get_size()) - 2, x.get_device()
    gathers = can_gather(dialect_of(device), x.get_dtype())
    if not gathers or rank not in (1, 2, 3) or len(weight.get_size()) != rank + 2 or V.graph.layout_opt:
        return None
    static = V.graph.sizevars.guard_int_seq
    window = static(weight.get_size())[2:]
    steps = {name: [*static(one)] * (rank if len(one) == 1 else 1) for name, one in steps.items()}
    groups = V.graph.sizevars.guard_int(groups)
    inputs = [ir.ExternKernel.realize_input(one) for one in (x, weight, bias) if one is not None]
    for one in inputs:
        one.freeze_layout()
    stride, padding, dilation = (tuple(steps[name]) for name in ("stride", "padding", "dilation"))
    layout = conv_layout(x, weight, None, stride, padding, dilation, False, (0,) * rank, groups)
    is_product = all(one == 1 for one in (*window, *stride, groups)) and not any(padding)
    order = ir.get_stride_order(layout.stride, V.graph.sizevars.shape_env)
    if is_product and order == ir.NHWC_STRIDE_ORDER:
        return None
    layout.stride = [_without_limit(one) for one in layout.stride]
    return ir.TensorBox.create(ConvolutionBuffer(layout, inputs, {**steps, "groups": groups}))


def _without_limit(stride: Any) -> Any:
    """A stride whose factors are sizes instead of max(1, size), so that the scheduler finds that results are dense. It
    differs only for empty results."""
    if not isinstance(stride, sympy.Expr):
        return stride
    return stride.replace(lambda one: isinstance(one, Max) and 1 in one.args, lambda one: Max(*({*one.args} - {1})))


class ElementwiseKernel(GraphKernel):
    """Elementwise operations on the results of a template or on an operand: a kernel, and a part of the template's.

    Args:
        buffer: the results or the operand. It is in memory only if the separate kernel runs.
        nodes: Inductor's nodes of the operations.
        tiling: the dimensions of the iteration space.
    """

    operand = ""  # the operand's name if the operations compute an operand
    flat = True

    def __init__(self, buffer: Any, nodes: Sequence[Any], tiling: dict[str, sympy.Expr]) -> None:
        self.buffer, self.nodes = buffer, nodes
        features = SIMDKernelFeatures([*nodes], sympy_product(tiling.values()))
        super().__init__({**tiling, "r0_": sympy.S.One}, features=features)

    def write_operations(self) -> None:
        """Writes the operations. None of them is in place, because other work items still read the operands."""
        with self:
            ranges = [self.split_and_set_ranges(node.get_ranges()) for node in self.nodes]
            indices = [
                index
                for node, variables in zip(self.nodes, ranges, strict=True)
                for index in node._body.indexing_from_args(variables).values()
            ]
            self.finalize_indexing(indices)
            for node in self.nodes:
                node.codegen(self.split_and_set_ranges(node.get_ranges()))

    def pointer(self) -> str:
        """The name of `buffer` in the separate kernel."""
        return str(self.args.output_buffers[self.buffer.get_name()])

    def statements(self) -> str:
        """The operations as part of the template's kernel, after `codegen_kernel`; empty if they cannot be."""
        return "" if self.draws or self.reports_errors else self.body.getvalue().strip()

    def codegen_part(self) -> str:
        """The operations in the wrapper: a `torch_backplane.compile.template_kernel.Elementwise`."""
        with V.set_kernel_handler(self):
            separate = self.codegen_kernel(self._named("KERNEL_NAME"))
            statements = self.statements()
        functions = self._functions(statements)
        prefix = f"{self.operand}_" if self.operand else ""
        names = {one: prefix + one for one in self.named_parameters if one != self.pointer()}
        arguments = {
            new: (self.named_parameters[one].role, self.named_parameters[one].dtype) for one, new in names.items()
        }
        statements = re.sub(r"\b[a-z]\w*\b", lambda word: names.get(word[0], word[0]), statements)
        parts = {
            "separate": separate,
            "arguments": arguments,
            "statements": f'"""\n{statements}\n"""' if statements else '""',
            "functions": repr(functions),
            "flat": self.flat,
            "index_dtype": self.get_index_dtype_as_torch_dtype(),
            "dtypes": sorted({value_dtype(one) for one in self.used_dtypes}, key=str),
        }
        lines = [f"{one}={text}," for one, text in parts.items()]
        return "\n".join(["bp_templates.Elementwise(", *lines, ")"])

    def _named(self, kernel: str) -> str:
        return f"{kernel}_{self.operand}" if self.operand else kernel

    def given(self, name: str) -> str:
        """The arguments in the wrapper, where the kernel's name is `name`: `template_kernel.Arguments`."""
        return f"bp_templates.Arguments({', '.join(self.call_arguments(self._named(name), self.buffer.get_name()))})"


class EpilogueKernel(ElementwiseKernel):
    """The elementwise operations on the results of a template.

    Inductor's nodes load the template's buffer, which is the variable `product` here. The results are dense, and nodes
    iterate over them in the order of memory.
    """

    def __init__(self, template: Any, nodes: Sequence[Any]) -> None:
        results: TemplateBuffer = template.node
        tiling, flat = results.tiling(), {"x": sympy_product(results.get_size())}
        self.flat = tiling is None or not all(self.is_compatible(tiling.values(), node.get_ranges()) for node in nodes)
        super().__init__(results, nodes, flat if tiling is None or self.flat else tiling)
        name, dtype = results.get_name(), results.get_dtype()
        place = "xindex" if self.flat else f"yindex * {self.numel_text(self._kept_trees()[0])} + xindex"
        self.more_input = (Value("product", dtype), place)
        variable = self.create_cse_var("product", ValueRanges.unknown(), value_dtype(dtype), ())
        self.outside_loops.add(variable)
        self.cse.store_cache[name] = variable
        self.store_buffer_names.add(name)

    def pointer(self) -> str:
        return "product_ptr"

    def statements(self) -> str:
        found = super().statements()
        return f"const {self.index_dtype} xindex = place;\n{found}" if self.flat and found else found


class PrologueKernel(ElementwiseKernel):
    """The elementwise operations that compute an operand of a product. The last node stores the operand's buffer."""

    def __init__(self, operand: str, view: Any, nodes: Sequence[Any]) -> None:
        self.operand, self.view = operand, view
        self.element = ""  # text of the operand's element, as its buffer stores it
        self.index: sympy.Expr | None = None  # index of the element at PLACE
        buffer = nodes[-1].node
        super().__init__(buffer, nodes, {"x": sympy_product(buffer.get_size())})

    def store(  # type: ignore[override]
        self, name: str, index: sympy.Expr, value: Variable, mode: Any = None
    ) -> None:
        super().store(name, index, value, mode)
        if name == self.buffer.get_name():
            self.element = self._stored(name, value)
            found = index_at_place(self.prepare_indexing(index), self.range_tree_nodes, self.numels["x"])
            if found is not None:
                offset = self.view.get_layout().offset
                self.index = self.rename_indexing(found.subs(PLACE, PLACE + offset))

    def statements(self) -> str:
        found = super().statements()
        if not found or self.index is None:
            return ""
        lines = [line for line in found.splitlines() if not line.startswith(f"{self.pointer()}[")]
        index = f"const {self.index_dtype} xindex = {self.kexpr(self.index)};"
        element = self.dialect.decode(self.element, self.buffer.get_dtype())
        return "\n".join([index, *lines, f"operand = {element};"])

    def given(self, name: str) -> str:
        """The operand in the wrapper: a `torch_backplane.compile.template_kernel.Computed`."""
        wrapper, layout = V.graph.wrapper_code, self.view.get_layout()
        size, stride = (wrapper.codegen_python_shape_tuple(one) for one in (layout.size, layout.stride))
        offset, elements = (
            wrapper.codegen_python_sizevar(one) for one in (layout.offset, self.buffer.get_layout().storage_size())
        )
        return f"bp_templates.Computed({super().given(name)}, {layout.dtype}, {size}, {stride}, {offset}, {elements})"


class FusedTemplate:
    """A template with elementwise operations on its operands and on its results, for the wrapper."""

    def __init__(self, template: Any, epilogue_nodes: Sequence[Any], prologue_nodes: Sequence[Any]) -> None:
        self.buffer: TemplateBuffer = template.node
        self.nodes = [*prologue_nodes, template, *epilogue_nodes]
        self.epilogue = EpilogueKernel(template, epilogue_nodes) if epilogue_nodes else None
        self.prologues = dict(_prologues(self.buffer, prologue_nodes))
        self.kernels = [*self.prologues.values(), *([] if self.epilogue is None else [self.epilogue])]
        for kernel in self.kernels:
            kernel.write_operations()

    def codegen_kernel(self) -> str:
        """The kernel in the wrapper: a `torch_backplane.compile.template_kernel.TemplateKernel`."""
        V.graph.wrapper_code.add_import_once("from torch_backplane.compile import template_kernel as bp_templates")
        prologues = "".join(f"{name!r}: {one.codegen_part()},\n" for name, one in self.prologues.items())
        parts = {
            "kind": f"bp_templates.{self.buffer.kind}",
            "epilogue": None if self.epilogue is None else self.epilogue.codegen_part(),
            "prologues": f"{{{prologues}}}",
            "name": "'KERNEL_NAME'",
            "operands": repr(self.buffer.described()),
            "device": V.graph.get_current_device_or_throw().index,
        }
        lines = [f"{one}={text}," for one, text in parts.items()]
        return "\n".join(["bp_templates.TemplateKernel(", *lines, ")"])

    def mark_run(self) -> None:
        """Allocates the results. Buffers of operands with prologues are no part of the graph."""
        V.graph.removed_buffers |= {one.buffer.get_name() for one in self.prologues.values()}
        for kernel in self.kernels:
            V.graph.removed_buffers |= kernel.removed_buffers
        with V.set_kernel_handler(Kernel(increase_kernel_count=False)):
            for node in self.nodes:
                node.mark_run()

    def call(self, name: str) -> None:
        """Writes the call of the kernel `name` to the wrapper."""
        operands = [
            self.prologues[one].given(name) if one in self.prologues else node.codegen_reference()
            for one, node in self.buffer.operands().items()
        ]
        is_kept = self.buffer.get_name() not in V.graph.removed_buffers
        arguments = [f"bp_templates.{self.buffer.kind}({', '.join(self.buffer.arguments(operands, is_kept))})"]
        if self.epilogue is not None:
            arguments.append(self.epilogue.given(name))
        call = f"{name}.run({', '.join(arguments)})"
        V.graph.wrapper_code.writeline(self.buffer.assigned(call) if is_kept else call)


def _prologues(template: TemplateBuffer, nodes: Sequence[Any]) -> Iterator[tuple[str, PrologueKernel]]:
    """Splits the nodes into groups, each of which ends with the node that stores an operand."""
    operands = {view.get_name(): (name, view) for name, view in template.operands().items()}
    group: list[Any] = []
    for node in nodes:
        group.append(node)
        if node.node.get_name() in operands:
            yield operands[node.node.get_name()][0], PrologueKernel(*operands[node.node.get_name()], group)
            group = []
    assert not group, "operations of a prologue store no operand"


def _layout(node: Any) -> str:
    return f"{list(node.get_size())}:{list(node.get_stride())}"
