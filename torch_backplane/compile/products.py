"""Products in Inductor's graphs under max-autotune, with the elementwise operations that use their results.

Inductor fuses these operations into a template, which a product is here. The wrapper gets a `ProductKernel`, which
chooses between the fused kernel and separate ones when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._inductor import ir
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.kernel.mm_common import mm_args
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.utils._sympy.value_ranges import ValueRanges

from torch_backplane.compile.kernel import GraphKernel
from torch_backplane.kernels.dialects.base import Value
from torch_backplane.kernels.dtypes import value_dtype


class ProductBuffer(ir.TemplateBuffer):
    """alpha * a @ b + beta * c. `inputs` are a, b and, if there is one, c; `scales` are alpha and beta."""

    def __init__(self, layout: ir.Layout, inputs: Sequence[ir.IRNode], scales: tuple[float, float]) -> None:
        super().__init__(layout, inputs, make_kernel_render=None)
        self.scales = scales
        names = ("addmm", "baddbmm") if len(inputs) > 2 else ("mm", "bmm")
        self.python_kernel_name = f"extern_kernels.{names[len(self.get_size()) - 2]}"

    def arguments(self) -> list[str]:
        """The operands in the wrapper."""
        inputs: Any = self.inputs
        return [one.codegen_reference() for one in inputs]

    def call(self) -> str:
        """The wrapper's call of the operator of eager PyTorch."""
        a, b, *added = self.arguments()
        scales = f", alpha={self.scales[0]}, beta={self.scales[1]}" if added else ""
        return f"{self.python_kernel_name}({', '.join([*added, a, b])}{scales}, out={self.get_name()})"


def lower(*operands: Any, scales: tuple[float, float]) -> Any:
    """alpha * a @ b + beta * c as a template. `operands` are as those of mm or addmm."""
    *added, a, b = operands
    _, _, _, layout, a, b, *added = mm_args(a, b, *added)
    return ir.TensorBox.create(ProductBuffer(layout, [a, b, *added], scales))


class EpilogueKernel(GraphKernel):
    """The elementwise operations on the results of a product.

    Inductor's nodes load the product's buffer, which is the variable `product` here.
    """

    def __init__(self, template: Any, nodes: Sequence[Any]) -> None:
        self.product: ProductBuffer = template.node
        self.nodes = nodes
        _, (numel, _) = template.group
        *batch, rows, columns = self.product.get_size()
        tiling = {"y": sympy_product([*batch, rows]), "x": columns}
        self.flat = not all(self.is_compatible(tiling.values(), node.get_ranges()) for node in nodes)
        super().__init__({"x": numel} if self.flat else tiling, features=SIMDKernelFeatures([*nodes], numel))
        name, dtype = self.product.get_name(), self.product.get_dtype()
        place = "xindex" if self.flat else f"yindex * {self._numel(self._kept_trees()[0])} + xindex"
        self.more_input = (Value("product", dtype), place)
        variable = self.create_cse_var("product", ValueRanges.unknown(), value_dtype(dtype), ())
        self.outside_loops.add(variable)
        self.cse.store_cache[name] = variable
        self.store_buffer_names.add(name)

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

    def codegen_kernel(self, name: str | None = None) -> str:
        """The kernel in the wrapper: a `torch_backplane.compile.product_kernel.ProductKernel`."""
        V.graph.wrapper_code.add_import_once("from torch_backplane.compile import product_kernel as bp_products")
        separate = super().codegen_kernel(name)
        can_fuse = not (self.draws or self.reports_errors)
        statements = self.body.getvalue().strip() if can_fuse else ""
        named = self.named_parameters.items()
        arguments = {one: (about.role, about.dtype) for one, about in named if one != "product_ptr"}
        operands = " @ ".join(_layout(one) for one in self.product.inputs[:2])
        operands += "".join(f" + {_layout(one)}" for one in self.product.inputs[2:])
        parts = {
            "separate": separate,
            "arguments": arguments,
            "statements": f'"""\n{statements}\n"""' if statements else '""',
            "functions": repr(self._functions(statements)),
            "flat": self.flat,
            "index_dtype": self.get_index_dtype_as_torch_dtype(),
            "dtypes": sorted({value_dtype(one) for one in self.used_dtypes}, key=str),
            "operands": repr(operands),
        }
        lines = [f"{one}={text}," for one, text in parts.items()]
        return "\n".join(["bp_products.ProductKernel(", *lines, ")"])

    def call_kernel(self, name: str, node: ir.IRNode | None = None, deallocate_ws: bool = True) -> None:
        a, b, *added = self.product.arguments()
        out = self.product.get_name()
        kept = None if out in self.removed_buffers else out
        product = f"bp_products.Product({a}, {b}, {added[0] if added else None}, {self.product.scales}, {kept})"
        V.graph.wrapper_code.writeline(f"{name}.run({', '.join([product, *self.call_arguments(name)])})")


def _layout(node: Any) -> str:
    return f"{list(node.get_size())}:{list(node.get_stride())}"
