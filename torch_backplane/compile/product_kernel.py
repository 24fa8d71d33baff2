"""What generated wrappers call for products under max-autotune: a product with elementwise operations on its operands
and on its results.

There are two candidates: one kernel of the product's template that also computes the operations, or the product as in
eager PyTorch and a kernel for the operations on each operand and on the results. The first call measures both, for this
process.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_backplane import _C, tuning
from torch_backplane.compile.runtime import Graph, GraphKernel
from torch_backplane.kernels.templates.fused_operations import Operations
from torch_backplane.operators.linear_algebra import (
    product_with_operations,
    products,
    sizes_of_product,
    takes_operations,
)
from torch_backplane.planning.launch import dialect_of

FAMILY = "products with elementwise operations"
FUSED, SEPARATE = "fused", "separate"
_TENSORS = ("input", "output")

_log = torch._logging.getArtifactLogger("torch._inductor.bp", "autotuning")
_kernels: weakref.WeakValueDictionary[int, ProductKernel] = weakref.WeakValueDictionary()


class Arguments(NamedTuple):
    """The arguments of elementwise operations: tensors, numbers, and the sizes of the iteration space."""

    tensors: list[torch.Tensor]
    numbers: list[Any]
    sizes: Sequence[int]


class Computed(NamedTuple):
    """An operand that elementwise operations compute.

    Args:
        arguments: of the operations.
        dtype, size, stride, offset: the operand as a view of the buffer that the operations fill.
        elements: number of elements of the buffer.
    """

    arguments: Arguments
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int
    elements: int

    def described(self) -> torch.Tensor:
        """A tensor without memory that has the operand's dtype, sizes and strides."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")

    def compute(self, operations: Elementwise, device: torch.device) -> torch.Tensor:
        """Computes the operand with the separate kernel."""
        buffer = torch.empty(self.elements, dtype=self.dtype, device=device)
        operations.run(self.arguments, buffer)
        return buffer.as_strided(self.size, self.stride, self.offset)


class Product(NamedTuple):
    """alpha * a @ b + beta * c, for matrices or batches of matrices. `out` is for the results if they are needed."""

    a: torch.Tensor | Computed
    b: torch.Tensor | Computed
    c: torch.Tensor | None = None
    scales: tuple[Any, Any] = (1, 1)
    out: torch.Tensor | None = None

    def described(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b, or tensors like them without memory."""
        a, b = (one.described() if isinstance(one, Computed) else one for one in self[:2])
        return a, b

    def compute(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Computes the product of these operands as in eager PyTorch."""
        _, _, c, (alpha, beta), out = self
        if out is None:
            out = a.new_empty(*a.shape[:-1], b.shape[-1])
        if c is None:
            return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)
        add = torch.addmm if a.dim() == 2 else torch.baddbmm
        return add(c, a, b, beta=beta, alpha=alpha, out=out)


@dataclass(kw_only=True, frozen=True, eq=False)
class Elementwise:
    """Elementwise operations on an operand of a product or on its results.

    Args:
        separate: their kernel. Its last buffer is the operand, which it writes, or the product, which it reads.
        arguments: its other arguments by name, each with its role, "input", "output" or "scalar", and its dtype.
        statements: the operations, as `Operations` describes them; empty if only `separate` can compute them.
        functions: functions that the statements use.
        flat, index_dtype: the indices in the statements, as `Operations` describes them.
        dtypes: the dtypes that the statements use.
    """

    separate: GraphKernel
    arguments: dict[str, tuple[str, torch.dtype]]
    statements: str
    functions: str
    flat: bool
    index_dtype: torch.dtype
    dtypes: Sequence[torch.dtype]

    def named(self, *roles: str) -> dict[str, torch.dtype]:
        """The dtypes of the arguments in these roles, by name."""
        return {name: dtype for name, (role, dtype) in self.arguments.items() if role in roles}

    def run(self, given: Arguments, buffer: torch.Tensor) -> None:
        """Runs the separate kernel with its last buffer."""
        self.separate.run([*given.tensors, buffer], given.numbers, given.sizes)

    def operations(self, given: Arguments, kept: torch.Tensor | None = None) -> Operations:
        """The operations for the product's kernel, which also stores the results in `kept` if that is given."""
        values = dict(zip(self.arguments, [*given.tensors, *given.numbers], strict=True))
        place = "place" if self.flat else "yindex * columns + xindex"
        store = "" if kept is None else f"\nstore_kept({place}, product);"
        return Operations(
            self.statements + store,
            self.flat,
            self.index_dtype,
            self.functions,
            frozenset(self.dtypes),
            inputs={name: values[name] for name in self.named("input")},
            outputs={
                **{name: values[name] for name in self.named("output")},
                **({} if kept is None else {"kept": kept}),
            },
            numbers={name: (dtype, values[name]) for name, dtype in self.named("scalar").items()},
        )


@dataclass(kw_only=True, eq=False)
class ProductKernel:
    """A product and elementwise operations on operands or results.

    Args:
        epilogue: the operations on the results, if there are any.
        prologues: the operations on operands, by the operand: "a" or "b". They have different names of arguments.
        name: the kernel's name in the graph.
        operands: the sizes and strides of the product's operands, as text.
        device: index of the device.
    """

    epilogue: Elementwise | None
    prologues: dict[str, Elementwise]
    name: str
    operands: str
    device: int
    _choice: str | None = field(default=None, init=False)
    _graphs: dict[Any, Graph] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        texts = (text for part in self._parts() for text in (part.separate.text, part.statements))
        hashed = "\n".join([*texts, *self.prologues, self.operands])
        self._number = int.from_bytes(hashlib.sha256(hashed.encode()).digest()[:7], "big")
        self._device = torch.device("bp", self.device)
        _kernels[self._number] = self

    def _parts(self) -> list[Elementwise]:
        return [*self.prologues.values(), *([] if self.epilogue is None else [self.epilogue])]

    def wait(self) -> ProductKernel:
        """Waits for the builds of the separate kernels. Raises RuntimeError if one failed."""
        for part in self._parts():
            part.separate.wait()
        return self

    def run(self, product: Product, given: Arguments | None = None) -> None:
        """Computes the product and the operations.

        Args:
            product: the product. The operands with prologues are `Computed`.
            given: the arguments of the epilogue.
        """
        if given is not None and 0 in given.sizes:
            return
        a, b = product.described()
        if self._chosen(product, a, b, given) == FUSED:
            out = product.out if product.out is not None else sizes_of_product(a, b, self._device)
            epilogue = None
            if self.epilogue is not None and given is not None:
                epilogue = self.epilogue.operations(given, product.out)
            prologues = {name: self.prologues[name].operations(one.arguments) for name, one in _computed(product)}
            product_with_operations(out, a, b, product.c, product.scales, epilogue, prologues)
            return
        operands = {name: one.compute(self.prologues[name], self._device) for name, one in _computed(product)}
        result = product.compute(operands.get("a", a), operands.get("b", b))
        del operands  # frees them before the epilogue
        if self.epilogue is not None and given is not None:
            self.epilogue.run(given, result)

    def _chosen(self, product: Product, a: torch.Tensor, b: torch.Tensor, given: Arguments | None) -> str:
        """FUSED or SEPARATE. The first call decides, also for other sizes of a graph with dynamic shapes."""
        if not all(part.statements for part in self._parts()) or not takes_operations(a, b, self._device):
            return SEPARATE
        if (forced := tuning.forced(FAMILY)) is not None:
            return forced
        if self._choice is not None:
            return self._choice
        target = dialect_of(self._device).target
        # The second one must be clearly faster. On GPUs, the same kernel with operations only saves memory accesses.
        chosen = products.choose(sizes_of_product(a, b, self._device), a, b)
        is_same_kernel = chosen.partition("/")[0] == "generated"
        candidates = [FUSED, SEPARATE] if target.simt and is_same_kernel else [SEPARATE, FUSED]
        numbers = [one for _, arguments in self._with_arguments(product, given) for one in arguments.numbers]
        if any(isinstance(one, float) for one in numbers) or _C.capture_of(self.device):
            return candidates[0]
        problem = self._problem(product, a, b, given)
        known = tuning.context.benchmarked(self.device)
        if problem not in known:
            known[problem] = tuning.tune(FAMILY, problem, self._device, candidates, target.cache_bytes)
        found = known[problem].candidate
        self._choice = found if found in candidates else candidates[0]
        self._report(self._choice)
        return self._choice

    def _with_arguments(self, product: Product, given: Arguments | None) -> list[tuple[Elementwise, Arguments]]:
        found = [(self.prologues[name], one.arguments) for name, one in _computed(product)]
        return found if self.epilogue is None or given is None else [*found, (self.epilogue, given)]

    def _problem(self, product: Product, a: torch.Tensor, b: torch.Tensor, given: Arguments | None) -> tuning.Problem:
        """Describes a call for tuning."""
        found: dict[str, Any] = {"a": a, "b": b, "c": product.c, "out": product.out}
        for name, one in _computed(product):
            found |= {f"{name}_size": one.size, f"{name}_stride": one.stride}
            found[f"{name}_buffer"] = [one.offset, one.elements, *one.arguments.sizes]
            del found[name]
        for part, (tensors, numbers, _) in self._with_arguments(product, given):
            described = [one if one.dim() else one.reshape(1) for one in tensors]
            found |= dict(zip(part.arguments, [*described, *numbers], strict=True))
        return tuning.Problem.of("ProductWithOperations", a.dtype, kernel=self._number, **found)

    def _report(self, choice: str) -> None:
        """Writes the choice to the logs of TORCH_LOGS and TORCH_TRACE."""
        how = "one kernel"
        if choice == SEPARATE:
            before = f"{len(self.prologues)} kernel{'s' * (len(self.prologues) > 1)}, then " if self.prologues else ""
            how = f"{before}the product as in eager PyTorch{'' if self.epilogue is None else ', then a kernel'}"
        text = f"{self.name} ({self.operands}): {how}"
        _log.info(text)
        torch._logging.trace_structured(
            "artifact", lambda: {"name": "bp_product", "encoding": "string"}, payload_fn=lambda: text
        )

    def trial(self, operands: tuning.Operands) -> Callable[[], Any]:
        """Returns a call with generated operands, for measurements."""
        tensors = {name: operands.given(name) for name in ("a", "b") if name not in self.prologues}
        tensors |= {name: one for name in ("c", "out") if (one := operands.tensor(name)) is not None}
        for part in self._parts():
            tensors |= {name: operands.given(name, dtype) for name, dtype in part.named(*_TENSORS).items()}
        numbers = {name: operands.integer(name) for part in self._parts() for name in part.named("scalar")}
        layouts = {
            name: tuple(tuple(operands.integers(f"{name}_{what}")) for what in ("size", "stride", "buffer"))
            for name in self.prologues
        }
        graph = self._graph_of((*tensors, *numbers), operands.dtype, layouts)
        return lambda: graph([*tensors.values(), *numbers.values()])

    def _graph_of(self, names: tuple[str, ...], dtype: torch.dtype, layouts: Mapping[str, Any]) -> Graph:
        """A graph of the product and the operations alone, with arguments of these names. All trials share its plan.

        `layouts` are sizes, strides and buffers of operands with prologues.
        """
        results = [name for part in self._parts() for name in part.named("output")]
        results += ["out"] if "out" in names else []

        def call(arguments: list[Any]) -> list[torch.Tensor]:
            given = dict(zip(names, arguments, strict=True))

            def arguments_of(part: Elementwise, sizes: Sequence[int]) -> Arguments:
                tensors, numbers = ([given[name] for name in part.named(*roles)] for roles in (_TENSORS, ["scalar"]))
                return Arguments(tensors, numbers, sizes)

            for name, (size, stride, (offset, elements, *sizes)) in layouts.items():
                of_prologue = arguments_of(self.prologues[name], sizes)
                given[name] = Computed(of_prologue, dtype, size, stride, offset, elements)
            product = Product(given["a"], given["b"], given.get("c"), (1, 1), given.get("out"))
            if self.epilogue is None:
                self.run(product)
            else:
                a, b = product.described()
                rows, columns = a.shape[:-1].numel(), b.shape[-1]
                sizes = [rows * columns] if self.epilogue.flat else [columns, rows]
                self.run(product, arguments_of(self.epilogue, sizes))
            return [given[name] for name in results]

        key = (names, tuple(layouts.items()))
        if key not in self._graphs:
            self._graphs[key] = Graph(call, [k for k, name in enumerate(names) if name in results])
        return self._graphs[key]


def _computed(product: Product) -> list[tuple[str, Computed]]:
    return [(name, one) for name, one in zip("ab", product[:2], strict=True) if isinstance(one, Computed)]


@tuning.trial("ProductWithOperations")
def _trial(operands: tuning.Operands) -> Callable[[], Any]:
    kernel = _kernels.get(operands.integer("kernel"))
    if kernel is None:
        raise RuntimeError("it is part of a compiled graph that this process has not compiled")
    return kernel.trial(operands)
