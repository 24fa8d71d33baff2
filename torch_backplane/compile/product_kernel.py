"""What generated wrappers call for products under max-autotune: a product with elementwise operations on its results.

There are two candidates: one kernel of the product's template that also computes the operations, or the product as in
eager PyTorch and a kernel for the operations. The first call measures both, for this process.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torch_backplane import _C, tuning
from torch_backplane.compile.runtime import Graph, GraphKernel
from torch_backplane.kernels.templates.epilogues import Epilogue
from torch_backplane.operators.linear_algebra import (
    product_with_epilogue,
    products,
    sizes_of_product,
    takes_epilogue,
)
from torch_backplane.planning.launch import dialect_of

FAMILY = "products with epilogues"
FUSED, SEPARATE = "fused", "separate"
_TENSORS = ("input", "output")

_log = torch._logging.getArtifactLogger("torch._inductor.bp", "autotuning")
_kernels: weakref.WeakValueDictionary[int, ProductKernel] = weakref.WeakValueDictionary()


class Product(NamedTuple):
    """alpha * a @ b + beta * c, for matrices or batches of matrices. `out` is for the results if they are needed."""

    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor | None = None
    scales: tuple[Any, Any] = (1, 1)
    out: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        """Computes the product as in eager PyTorch."""
        a, b, c, (alpha, beta), out = self
        if out is None:
            out = a.new_empty(*a.shape[:-1], b.shape[-1])
        if c is None:
            return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)
        add = torch.addmm if a.dim() == 2 else torch.baddbmm
        return add(c, a, b, beta=beta, alpha=alpha, out=out)


@dataclass(kw_only=True, eq=False)
class ProductKernel:
    """A product and the elementwise operations on its results.

    Args:
        separate: the kernel of the operations. Its last buffer is the product.
        arguments: its other arguments by name, each with its role, "input", "output" or "scalar", and its dtype.
        statements: the operations, as `Epilogue` describes them; empty if only `separate` can compute them.
        functions: functions that the statements use.
        flat, index_dtype: the indices in the statements, as `Epilogue` describes them.
        dtypes: the dtypes that the statements use.
        operands: the sizes and strides of the product's operands, as text.
    """

    separate: GraphKernel
    arguments: dict[str, tuple[str, torch.dtype]]
    statements: str
    functions: str
    flat: bool
    index_dtype: torch.dtype
    dtypes: Sequence[torch.dtype]
    operands: str
    _choice: str | None = field(default=None, init=False)
    _graphs: dict[tuple[str, ...], Graph] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        parts = (self.separate.text, self.statements, self.operands)
        self._number = int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:7], "big")
        _kernels[self._number] = self

    def wait(self) -> ProductKernel:
        """Waits for the build of `separate`. Raises RuntimeError if it failed."""
        self.separate.wait()
        return self

    def run(self, product: Product, tensors: list[torch.Tensor], numbers: list[Any], sizes: Sequence[int]) -> None:
        """Computes the product and the operations.

        Args:
            product: the product.
            tensors, numbers: the other arguments of the operations.
            sizes: the number of results, or of columns and rows.
        """
        if 0 in sizes:
            return
        if self._chosen(product, tensors, numbers) == FUSED:
            names = dict(zip(self.arguments, [*tensors, *numbers], strict=True))
            product_with_epilogue(self._epilogue(names, product.out), *product[:4])
        else:
            self.separate.run([*tensors, product.compute()], numbers, sizes)

    def _named(self, *roles: str) -> dict[str, torch.dtype]:
        return {name: dtype for name, (role, dtype) in self.arguments.items() if role in roles}

    def _epilogue(self, given: dict[str, Any], out: torch.Tensor | None) -> Epilogue:
        kept = {} if out is None else {"kept": out}
        place = "xindex" if self.flat else "yindex * columns + xindex"
        return Epilogue(
            self.statements + (f"\nstore_kept({place}, product);" if kept else ""),
            self.flat,
            self.index_dtype,
            self.functions,
            frozenset(self.dtypes),
            outputs={**{name: given[name] for name in self._named("output")}, **kept},
            inputs={name: given[name] for name in self._named("input")},
            numbers={name: (dtype, given[name]) for name, dtype in self._named("scalar").items()},
        )

    def _chosen(self, product: Product, tensors: list[torch.Tensor], numbers: list[Any]) -> str:
        """FUSED or SEPARATE. The first call decides, also for other sizes of a graph with dynamic shapes."""
        if not self.statements or not takes_epilogue(product.a, product.b):
            return SEPARATE
        if (forced := tuning.forced(FAMILY)) is not None:
            return forced
        if self._choice is not None:
            return self._choice
        a, b, c, _, out = product
        device, target = a.device, dialect_of(a.device).target
        # The second one must be clearly faster. On GPUs, the same kernel with an epilogue only saves memory accesses.
        is_same_kernel = products.choose(sizes_of_product(a, b), a, b).partition("/")[0] == "generated"
        candidates = [FUSED, SEPARATE] if target.simt and is_same_kernel else [SEPARATE, FUSED]
        if any(isinstance(one, float) for one in numbers) or _C.capture_of(device.index):
            return candidates[0]
        described = [one if one.dim() else one.reshape(1) for one in tensors]
        given = {"a": a, "b": b, "c": c, "out": out, **dict(zip(self.arguments, [*described, *numbers], strict=True))}
        problem = tuning.Problem.of("ProductWithEpilogue", a.dtype, kernel=self._number, **given)
        known = tuning.context.benchmarked(device.index)
        if problem not in known:
            known[problem] = tuning.tune(FAMILY, problem, device, candidates, target.cache_bytes)
        found = known[problem].candidate
        self._choice = found if found in candidates else candidates[0]
        self._report(self._choice)
        return self._choice

    def _report(self, choice: str) -> None:
        """Writes the choice to the logs of TORCH_LOGS and TORCH_TRACE."""
        how = "one kernel" if choice == FUSED else "the product as in eager PyTorch, then a kernel"
        text = f"{self.separate.name} ({self.operands}): {how}"
        _log.info(text)
        torch._logging.trace_structured(
            "artifact", lambda: {"name": "bp_product", "encoding": "string"}, payload_fn=lambda: text
        )

    def trial(self, operands: tuning.Operands) -> Callable[[], Any]:
        """Returns a call with generated operands, for measurements."""
        found = {"a": operands.given("a"), "b": operands.given("b")}
        found |= {name: one for name in ("c", "out") if (one := operands.tensor(name)) is not None}
        found |= {name: operands.given(name, dtype) for name, dtype in self._named(*_TENSORS).items()}
        arguments = [*found.values(), *(operands.integer(name) for name in self._named("scalar"))]
        graph = self._graph_of((*found, *self._named("scalar")))
        return lambda: graph([*arguments])

    def _graph_of(self, names: tuple[str, ...]) -> Graph:
        """A graph of the product and the operations alone, with arguments of these names. All trials share its plan."""
        outputs = [*self._named("output")]

        def call(arguments: list[Any]) -> list[torch.Tensor]:
            given = dict(zip(names, arguments, strict=True))
            product = Product(given["a"], given["b"], given.get("c"), (1, 1), given.get("out"))
            rows, columns = product.a.shape[:-1].numel(), product.b.shape[-1]
            tensors, numbers = ([given[name] for name in self._named(*roles)] for roles in (_TENSORS, ["scalar"]))
            self.run(product, tensors, numbers, [rows * columns] if self.flat else [columns, rows])
            return [given[name] for name in outputs]

        if names not in self._graphs:
            self._graphs[names] = Graph(call, [k for k, name in enumerate(names) if name in ("out", *outputs)])
        return self._graphs[names]


@tuning.trial("ProductWithEpilogue")
def _trial(operands: tuning.Operands) -> Callable[[], Any]:
    kernel = _kernels.get(operands.integer("kernel"))
    if kernel is None:
        raise RuntimeError("it is part of a compiled graph that this process has not compiled")
    return kernel.trial(operands)
