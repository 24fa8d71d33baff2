"""What generated wrappers call: kernels, and graphs whose commands are recorded as a plan and replayed."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torch_backplane import _C
from torch_backplane.kernels.kernel import Kernel, Parameter
from torch_backplane.kernels.templates import errors
from torch_backplane.planning.launch import compiled, dialect_of, launch
from torch_backplane.planning.template import error_words


@dataclass(frozen=True, kw_only=True)
class GraphKernel:
    """A kernel of a compiled graph, on one device. Its build starts when it is defined.

    Args:
        name: the entry point in the text.
        text: the whole text, in the device's dialect.
        parameters: "input" and "output" for buffers, then the dtypes of numbers.
        team: work items that share a result of a reduction; 1 if a work item computes a result alone.
        tile: adjacent results that a work item computes.
        reduces: whether work items reduce elements.
        local_bytes: bytes of local memory per group.
        reports_errors: whether the last buffer is for errors.
        error_texts: the messages of assertions in the kernel.
        device: index of the device.
    """

    name: str
    text: str
    parameters: Sequence[Any]
    team: int
    tile: int
    reduces: bool
    local_bytes: int
    reports_errors: bool
    error_texts: Sequence[str]
    device: int

    def __post_init__(self) -> None:
        compiled(self.device, self.kernel, self.name)

    @functools.cached_property
    def kernel(self) -> Kernel:
        roles = [
            Parameter("scalar", one, k) if isinstance(one, torch.dtype) else Parameter(one, torch.uint8, k)
            for k, one in enumerate(self.parameters)
        ]
        group_size = self.team if self.team > 1 else None
        return Kernel(self.name, self.text, tuple(roles), None, group_size, self.local_bytes)

    def run(self, tensors: list[torch.Tensor], numbers: list[Any], sizes: Sequence[int]) -> None:
        """Launches the kernel.

        Args:
            tensors: the buffers.
            numbers: the other arguments.
            sizes: the sizes of the iteration space without the reduced dimension.
        """
        if 0 in sizes:
            return
        if self.reports_errors:
            tensors = [*tensors, error_words(torch.device("bp", self.device))]
            numbers = [*numbers, errors.operator_number(self.name), *map(errors.text_number, self.error_texts)]
        if self.team > 1:
            launch(self.kernel, tensors, numbers, [sizes[0] * self.team], [self.team])
            return
        target = dialect_of(self.device).target
        if len(sizes) == 1:
            along = target.small_group(4) if self.reduces else target.element_group_size
            launch(self.kernel, tensors, numbers, [-(-sizes[0] // self.tile)], [along])
            return
        group = target.square_group() if target.simt else target.row_group(sizes[0], sizes[1], False)
        launch(self.kernel, tensors, numbers, sizes, group)


_library = torch.library.Library("backplane", "FRAGMENT")
_library.define("compiled_graph(Tensor(a!)[] written, Tensor[] read, int[] sizes, int graph) -> Tensor[]")
_graphs: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Arguments(NamedTuple):
    """The arguments of a graph: tensors that it writes, those that it reads, and sizes."""

    written: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]
    sizes: Sequence[int]

    def layouts(self) -> Any:
        """What the numbers and the views among the results depend on."""
        return tuple(self.sizes), tuple((one.shape, one.stride()) for one in (*self.written, *self.read))


class Constant(NamedTuple):
    """A result that is no tensor."""

    value: Any


class View(NamedTuple):
    """A result in the memory of an argument or of another result, which an operator in PyTorch must not return.

    Args:
        base: its number among the arguments, and the tensors that the operator returns.
        offset: in bytes, from the base.
    """

    base: int
    dtype: torch.dtype
    sizes: Sequence[int]
    strides: Sequence[int]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, bases: Sequence[torch.Tensor]) -> View | None:
        """Describes a tensor as a view of one of the bases; None if they have other memory."""
        memory = tensor.untyped_storage()._cdata
        for number, base in enumerate(bases):
            if base.untyped_storage()._cdata == memory:
                offset = int(tensor.storage_offset()) * tensor.itemsize - int(base.storage_offset()) * base.itemsize
                return cls(number, tensor.dtype, tensor.shape, tensor.stride(), offset)
        return None

    def make(self, bases: Sequence[torch.Tensor]) -> torch.Tensor:
        base = bases[self.base]
        begin = base.storage_offset() * base.itemsize + self.offset
        made = torch.empty(0, dtype=self.dtype, device=base.device)
        return made.set_(base.untyped_storage(), begin // self.dtype.itemsize, self.sizes, self.strides)


class Graph:
    """A compiled graph. The first call for given shapes runs the wrapper and records a plan, later ones replay it.

    Graphs that take or return something besides bp tensors and integers run the wrapper at each call.
    """

    def __init__(self, wrapper: Callable[[list[Any]], Any], written: Sequence[int]) -> None:
        self._wrapper, self._written = wrapper, frozenset(written)
        self._number = next(_numbers)
        self._calls = threading.local()
        # For each result, None if the operator returns it. Those of all calls, or by the layouts of the arguments.
        self._results: list[Constant | View | None] | None = None
        self._results_of_layouts: dict[Any, list[Constant | View | None]] = {}
        _graphs[self._number] = self

    def __call__(self, args: list[Any]) -> Any:
        if not all(
            isinstance(one, int) or (isinstance(one, torch.Tensor) and one.device.type == "bp") for one in args
        ):
            return self._wrapper(args)
        kinds = tuple("i" if isinstance(one, int) else "w" if k in self._written else "r" for k, one in enumerate(args))
        given = Arguments(
            [one for one, kind in zip(args, kinds, strict=True) if kind == "w"],
            [one for one, kind in zip(args, kinds, strict=True) if kind == "r"],
            [one for one, kind in zip(args, kinds, strict=True) if kind == "i"],
        )
        if not given.written and not given.read:
            return self._wrapper(args)
        args.clear()
        self._calls.kinds = kinds
        with torch._C._AutoDispatchBelowAutograd():
            returned = torch.ops.backplane.compiled_graph(*given, self._number)
            results = self._results if self._results is not None else self._results_of_layouts[given.layouts()]
            tensors, bases = iter(returned), [*given.written, *given.read, *returned]
            return tuple(
                next(tensors) if one is None else one.make(bases) if isinstance(one, View) else one.value
                for one in results
            )

    def plan(self, given: Arguments) -> list[torch.Tensor]:
        """Runs the wrapper, as a planner."""
        parts = {"w": iter(given.written), "r": iter(given.read), "i": iter(given.sizes)}
        found = self._wrapper([next(parts[kind]) for kind in self._calls.kinds])
        results: list[Constant | View | None] = []
        returned: list[torch.Tensor] = []
        arguments = [*given.written, *given.read]
        for one in found:
            if not isinstance(one, torch.Tensor):
                results.append(Constant(one))
                continue
            view = View.of(one, [*arguments, *returned])
            results.append(view)
            if view is None:
                returned.append(one)
        if all(one is None or one == Constant(None) for one in results):
            self._results = results
        else:
            self._results_of_layouts[given.layouts()] = results
        return returned


def _plan(written: Any, read: Any, sizes: Any, graph: int) -> list[torch.Tensor]:
    return _graphs[graph].plan(Arguments(written, read, sizes))


_C.set_planner("backplane::compiled_graph", _plan)
