"""What generated wrappers call for products and convolutions under max-autotune: one with elementwise operations on its
results and, for products, on its operands.

There are two candidates: one kernel of the operator's template that also computes the operations, or the operator as in
eager PyTorch and a kernel for the operations on each operand and on the results. The first call measures both, for this
process.
"""

from __future__ import annotations

import abc
import hashlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch._C._dynamo.guards import assert_size_stride

from torch_backplane import _C, tuning
from torch_backplane.compile.runtime import Graph, GraphKernel
from torch_backplane.kernels.templates.fused_operations import Operations
from torch_backplane.operators.convolution import (
    convolution_gathers,
    convolution_takes_operations,
    convolution_with_operations,
)
from torch_backplane.operators.linear_algebra import (
    product_with_operations,
    products,
    sizes_of_product,
    takes_operations,
)
from torch_backplane.planning.launch import dialect_of

FAMILY = "products and convolutions with elementwise operations"
FUSED, SEPARATE = "fused", "separate"
_TENSORS = ("input", "output")

_log = torch._logging.getArtifactLogger("torch._inductor.bp", "autotuning")
_kernels: weakref.WeakValueDictionary[int, TemplateKernel] = weakref.WeakValueDictionary()


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


class Call(abc.ABC):
    """A call of an operator whose template can also compute elementwise operations.

    Attributes:
        noun: the operator in texts.
    """

    noun: ClassVar[str]

    def computed(self) -> dict[str, Computed]:
        """The operands that elementwise operations compute, by name."""
        return {}

    @abc.abstractmethod
    def results(self) -> torch.Tensor:
        """A tensor with the sizes, strides and dtype of the results. It may have no memory."""

    @abc.abstractmethod
    def takes_operations(self, device: torch.device) -> bool:
        """Whether `fuse` accepts the operands."""

    @abc.abstractmethod
    def is_same_kernel(self, device: torch.device) -> bool:
        """Whether the operator usually runs the kernel of `fuse`, without operations. `fuse` accepts the operands."""

    @abc.abstractmethod
    def kept(self, device: torch.device) -> torch.Tensor | None:
        """A tensor for the results, if they are needed."""

    @abc.abstractmethod
    def fuse(
        self,
        kept: torch.Tensor | None,
        epilogue: Operations | None,
        prologues: Mapping[str, Operations],
        device: torch.device,
    ) -> None:
        """Runs the template's kernel with the operations. Without an epilogue, the results are stored in `kept`."""

    @abc.abstractmethod
    def run(self, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Computes the results as in eager PyTorch. `operands` are the computed ones."""

    @abc.abstractmethod
    def parameters(self) -> dict[str, Any]:
        """The tensors and settings for a trial, without computed operands."""

    @classmethod
    @abc.abstractmethod
    def tensors_of_trial(cls, operands: tuning.Operands, computed: Collection[str]) -> dict[str, torch.Tensor]:
        """Creates the tensors of `parameters` for a trial in which the operands `computed` are computed."""

    @classmethod
    @abc.abstractmethod
    def of_trial(cls, given: Mapping[str, Any], operands: tuning.Operands) -> Call:
        """The call of a trial. `given` are `tensors_of_trial` and the computed operands."""


@dataclass(frozen=True, eq=False)
class Product(Call):
    """alpha * a @ b + beta * c, for matrices or batches of matrices. `out` is for the results if they are needed."""

    a: torch.Tensor | Computed
    b: torch.Tensor | Computed
    c: torch.Tensor | None = None
    scales: tuple[Any, Any] = (1, 1)
    out: torch.Tensor | None = None
    noun = "product"

    def computed(self) -> dict[str, Computed]:
        return {name: one for name, one in (("a", self.a), ("b", self.b)) if isinstance(one, Computed)}

    def described(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b, or tensors like them without memory."""
        a, b = (one.described() if isinstance(one, Computed) else one for one in (self.a, self.b))
        return a, b

    def results(self) -> torch.Tensor:
        a, b = self.described()
        return torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype, device="meta")

    def takes_operations(self, device: torch.device) -> bool:
        return takes_operations(*self.described(), device)

    def is_same_kernel(self, device: torch.device) -> bool:
        a, b = self.described()
        return products.choose(sizes_of_product(a, b, device), a, b).partition("/")[0] == "generated"

    def kept(self, device: torch.device) -> torch.Tensor | None:
        return self.out

    def fuse(
        self,
        kept: torch.Tensor | None,
        epilogue: Operations | None,
        prologues: Mapping[str, Operations],
        device: torch.device,
    ) -> None:
        a, b = self.described()
        out = sizes_of_product(a, b, device) if kept is None else kept
        product_with_operations(out, a, b, self.c, self.scales, epilogue, prologues)

    def run(self, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
        described = self.described()
        a, b = operands.get("a", described[0]), operands.get("b", described[1])
        out = a.new_empty(*a.shape[:-1], b.shape[-1]) if self.out is None else self.out
        if self.c is None:
            return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)
        add = torch.addmm if a.dim() == 2 else torch.baddbmm
        return add(self.c, a, b, beta=self.scales[1], alpha=self.scales[0], out=out)

    def parameters(self) -> dict[str, Any]:
        found = {"a": self.a, "b": self.b, "c": self.c, "out": self.out}
        return {name: one for name, one in found.items() if not isinstance(one, Computed)}

    @classmethod
    def tensors_of_trial(cls, operands: tuning.Operands, computed: Collection[str]) -> dict[str, torch.Tensor]:
        found = {name: operands.given(name) for name in ("a", "b") if name not in computed}
        return found | {name: one for name in ("c", "out") if (one := operands.tensor(name)) is not None}

    @classmethod
    def of_trial(cls, given: Mapping[str, Any], operands: tuning.Operands) -> Call:
        return cls(given["a"], given["b"], given.get("c"), (1, 1), given.get("out"))


@dataclass(frozen=True, eq=False)
class Convolution(Call):
    """A convolution that is not transposed.

    Args:
        input, weight, bias: the operands.
        stride, padding, dilation, groups: the settings.
        size, steps: sizes and strides of the results, which are dense.
        keeps: whether the results are needed.
    """

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int
    size: Sequence[int]
    steps: Sequence[int]
    keeps: bool
    noun = "convolution"

    def settings(self) -> tuple[Any, ...]:
        """The arguments of the operator after the tensors."""
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), self.groups

    def results(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.steps, dtype=self.input.dtype, device="meta")

    def takes_operations(self, device: torch.device) -> bool:
        return convolution_takes_operations(self.results(), self.input, self.weight)

    def is_same_kernel(self, device: torch.device) -> bool:
        return convolution_gathers(self.results(), self.input, self.weight, self.settings())

    def kept(self, device: torch.device) -> torch.Tensor | None:
        if not self.keeps:
            return None
        return torch.empty_strided(self.size, self.steps, dtype=self.input.dtype, device=device)

    def fuse(
        self,
        kept: torch.Tensor | None,
        epilogue: Operations | None,
        prologues: Mapping[str, Operations],
        device: torch.device,
    ) -> None:
        assert epilogue is not None, "operands of convolutions have no operations"
        convolution_with_operations(self.results(), self.input, self.weight, self.bias, self.settings(), epilogue)

    def run(self, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
        found = torch.convolution(self.input, self.weight, self.bias, *self.settings())
        if found.numel():
            assert_size_stride(found, tuple(self.size), tuple(self.steps))
        return found

    def parameters(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def tensors_of_trial(cls, operands: tuning.Operands, computed: Collection[str]) -> dict[str, torch.Tensor]:
        return {name: one for name in ("input", "weight", "bias") if (one := operands.tensor(name)) is not None}

    @classmethod
    def of_trial(cls, given: Mapping[str, Any], operands: tuning.Operands) -> Call:
        stride, padding, dilation, size, steps = map(
            operands.integers, ("stride", "padding", "dilation", "size", "steps")
        )
        tensors = (given["input"], given["weight"], given.get("bias"))
        groups, keeps = operands.integer("groups"), operands.flag("keeps")
        return cls(*tensors, stride, padding, dilation, groups, size, steps, keeps)


@dataclass(kw_only=True, frozen=True, eq=False)
class Elementwise:
    """Elementwise operations on the results of an operator or on one of its operands.

    Args:
        separate: their kernel. Its last buffer is the operand, which it writes, or the results, which it reads.
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
        """The operations for the template's kernel, which also stores the results in `kept` if that is given."""
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
class TemplateKernel:
    """An operator and elementwise operations on its results or its operands.

    Args:
        kind: the class of the operator's calls.
        epilogue: the operations on the results, if there are any.
        prologues: the operations on operands, by the operand's name. They have different names of arguments.
        name: the kernel's name in the graph.
        operands: the sizes and strides of the operands, as text.
        device: index of the device.
    """

    kind: type[Call]
    epilogue: Elementwise | None
    prologues: dict[str, Elementwise]
    name: str
    operands: str
    device: int
    _choice: str | None = field(default=None, init=False)
    _graphs: dict[Any, Graph] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        texts = (text for part in self._parts() for text in (part.separate.text, part.statements))
        hashed = "\n".join([self.kind.noun, *texts, *self.prologues, self.operands])
        self._number = int.from_bytes(hashlib.sha256(hashed.encode()).digest()[:7], "big")
        self._device = torch.device("bp", self.device)
        _kernels[self._number] = self

    def _parts(self) -> list[Elementwise]:
        return [*self.prologues.values(), *([] if self.epilogue is None else [self.epilogue])]

    def wait(self) -> TemplateKernel:
        """Waits for the builds of the separate kernels. Raises RuntimeError if one failed."""
        for part in self._parts():
            part.separate.wait()
        return self

    def run(self, call: Call, given: Arguments | None = None) -> torch.Tensor | None:
        """Computes the operator and the operations.

        Args:
            call: the call of the operator. The operands with prologues are `Computed`.
            given: the arguments of the epilogue.

        Returns:
            The operator's results, if they are in memory.
        """
        computed = call.computed()
        if self._chosen(call, given) == FUSED:
            kept, epilogue = call.kept(self._device), None
            if self.epilogue is not None and given is not None:
                epilogue = self.epilogue.operations(given, kept)
            prologues = {name: self.prologues[name].operations(one.arguments) for name, one in computed.items()}
            call.fuse(kept, epilogue, prologues, self._device)
            return kept
        operands = {name: one.compute(self.prologues[name], self._device) for name, one in computed.items()}
        results = call.run(operands)
        del operands  # frees them before the epilogue
        if self.epilogue is not None and given is not None:
            self.epilogue.run(given, results)
        return results

    def _chosen(self, call: Call, given: Arguments | None) -> str:
        """FUSED or SEPARATE. The first call decides, also for other sizes of a graph with dynamic shapes."""
        if not all(part.statements for part in self._parts()) or not call.takes_operations(self._device):
            return SEPARATE
        if (forced := tuning.forced(FAMILY)) is not None:
            return forced
        if self._choice is not None:
            return self._choice
        target = dialect_of(self._device).target
        # The second one must be clearly faster. On GPUs, the same kernel with operations only saves memory accesses.
        is_first = target.simt and call.is_same_kernel(self._device)
        candidates = [FUSED, SEPARATE] if is_first else [SEPARATE, FUSED]
        numbers = [one for _, arguments in self._with_arguments(call, given) for one in arguments.numbers]
        if any(isinstance(one, float) for one in numbers) or _C.capture_of(self.device):
            return candidates[0]
        problem = self._problem(call, given)
        known = tuning.context.benchmarked(self.device)
        if problem not in known:
            known[problem] = tuning.tune(FAMILY, problem, self._device, candidates, target.cache_bytes)
        found = known[problem].candidate
        self._choice = found if found in candidates else candidates[0]
        self._report(self._choice)
        return self._choice

    def _with_arguments(self, call: Call, given: Arguments | None) -> list[tuple[Elementwise, Arguments]]:
        found = [(self.prologues[name], one.arguments) for name, one in call.computed().items()]
        return found if self.epilogue is None or given is None else [*found, (self.epilogue, given)]

    def _problem(self, call: Call, given: Arguments | None) -> tuning.Problem:
        """Describes a call for tuning."""
        found = call.parameters()
        for name, one in call.computed().items():
            found |= {f"{name}_size": one.size, f"{name}_stride": one.stride}
            found[f"{name}_buffer"] = [one.offset, one.elements, *one.arguments.sizes]
        for part, (tensors, numbers, _) in self._with_arguments(call, given):
            described = [one if one.dim() else one.reshape(1) for one in tensors]
            found |= dict(zip(part.arguments, [*described, *numbers], strict=True))
        return tuning.Problem.of(_problem_of(self.kind), call.results().dtype, kernel=self._number, **found)

    def _report(self, choice: str) -> None:
        """Writes the choice to the logs of TORCH_LOGS and TORCH_TRACE."""
        how = "one kernel"
        if choice == SEPARATE:
            before = f"{len(self.prologues)} kernel{'s' * (len(self.prologues) > 1)}, then " if self.prologues else ""
            after = "" if self.epilogue is None else ", then a kernel"
            how = f"{before}the {self.kind.noun} as in eager PyTorch{after}"
        text = f"{self.name} ({self.operands}): {how}"
        _log.info(text)
        torch._logging.trace_structured(
            "artifact", lambda: {"name": "bp_template", "encoding": "string"}, payload_fn=lambda: text
        )

    def trial(self, operands: tuning.Operands) -> Callable[[], Any]:
        """Returns a call with generated operands, for measurements."""
        tensors = self.kind.tensors_of_trial(operands, self.prologues)
        for part in self._parts():
            tensors |= {name: operands.given(name, dtype) for name, dtype in part.named(*_TENSORS).items()}
        numbers = {name: operands.integer(name) for part in self._parts() for name in part.named("scalar")}
        graph = self._graph_of((*tensors, *numbers), operands)
        return lambda: graph([*tensors.values(), *numbers.values()])

    def _graph_of(self, names: tuple[str, ...], operands: tuning.Operands) -> Graph:
        """A graph of the operator and the operations alone, with arguments of these names. All trials of a problem
        share its plan."""
        written = [name for part in self._parts() for name in part.named("output")]
        written += ["out"] if "out" in names else []

        def call(arguments: list[Any]) -> list[torch.Tensor]:
            given = dict(zip(names, arguments, strict=True))

            def arguments_of(part: Elementwise, sizes: Sequence[int]) -> Arguments:
                tensors, numbers = ([given[name] for name in part.named(*roles)] for roles in (_TENSORS, ["scalar"]))
                return Arguments(tensors, numbers, sizes)

            for name, prologue in self.prologues.items():
                size, stride, (offset, elements, *sizes) = (
                    operands.integers(f"{name}_{what}") for what in ("size", "stride", "buffer")
                )
                of_prologue = arguments_of(prologue, sizes)
                given[name] = Computed(of_prologue, operands.dtype, size, stride, offset, elements)
            made = self.kind.of_trial(given, operands)
            of_epilogue = None
            if self.epilogue is not None:
                shape = made.results().shape
                sizes = [shape.numel()] if self.epilogue.flat else [shape[-1], shape[:-1].numel()]
                of_epilogue = arguments_of(self.epilogue, sizes)
            self.run(made, of_epilogue)
            return [given[name] for name in written]

        if operands.problem not in self._graphs:
            self._graphs[operands.problem] = Graph(call, [k for k, name in enumerate(names) if name in written])
        return self._graphs[operands.problem]


def _problem_of(kind: type[Call]) -> str:
    return f"{kind.noun.capitalize()}WithOperations"


@tuning.trial(_problem_of(Product))
@tuning.trial(_problem_of(Convolution))
def _trial(operands: tuning.Operands) -> Callable[[], Any]:
    kernel = _kernels.get(operands.integer("kernel"))
    if kernel is None:
        raise RuntimeError("it is part of a compiled graph that this process has not compiled")
    return kernel.trial(operands)
