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
from torch._inductor.async_compile import get_compile_threads
from torch._inductor.codecache import LambdaFuture
from torch._subclasses.fake_tensor import FakeTensor

import torch_backplane.compile.flex_operator  # noqa: F401  defines an operator that graphs call
from torch_backplane import _C
from torch_backplane.compile import random_numbers as random_numbers_of_graphs
from torch_backplane.compile.reduction_form import ITEMS_OF_THREAD
from torch_backplane.compile.triton_calls import TritonKernel, triton_dtype  # noqa: F401  wrappers use them
from torch_backplane.kernels.kernel import Kernel, Parameter
from torch_backplane.kernels.templates import errors
from torch_backplane.kernels.templates.random import WORDS_PER_CALL, write_state
from torch_backplane.planning.launch import compiled, dialect_of, launch, random_numbers
from torch_backplane.planning.template import error_words, run_template


@dataclass(frozen=True, kw_only=True)
class GraphKernel:
    """A kernel of a compiled graph, on one device. Its build starts when it is defined.

    Args:
        name: the entry point in the text.
        text: the whole text, in the device's dialect.
        parameters: "input" and "output" for buffers, then the dtypes of numbers.
        team: work items that share a result of a reduction; 1 if a work item computes a result alone.
        teams: teams of a group.
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
    teams: int
    tile: int
    reduces: bool
    local_bytes: int
    reports_errors: bool
    error_texts: Sequence[str]
    device: int

    def __post_init__(self) -> None:
        self.build()

    def build(self) -> _C.CompiledKernel:
        """Starts the build, if it was not started yet."""
        return compiled(self.device, self.kernel, self.name)

    def wait(self) -> GraphKernel:
        """Waits for the build. Raises RuntimeError if it failed."""
        self.build().wait()
        return self

    @functools.cached_property
    def kernel(self) -> Kernel:
        roles = [
            Parameter("scalar", one, k) if isinstance(one, torch.dtype) else Parameter(one, torch.uint8, k)
            for k, one in enumerate(self.parameters)
        ]
        group_size = self.team * self.teams if self.team > 1 else None
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
            items = self.team * self.teams
            launch(self.kernel, tensors, numbers, [-(-sizes[0] // self.teams) * items], [items])
            return
        target = dialect_of(self.device).target
        if len(sizes) == 1:
            along = target.small_group(ITEMS_OF_THREAD) if self.reduces else target.element_group_size
            launch(self.kernel, tensors, numbers, [-(-sizes[0] // self.tile)], [along])
            return
        group = target.square_group() if target.simt else target.row_group(sizes[0], sizes[1], False)
        launch(self.kernel, tensors, numbers, sizes, group)


def define_kernel(kernel: Any) -> Any:
    """Returns a future of the kernel, whose build has been started, for `async_compile.wait`.

    Inductor waits for all kernels of a graph after it has defined them, with a progress bar if
    `torch._inductor.config.disable_progress` is false. With one compile thread, it waits for none.
    """
    return LambdaFuture(kernel.wait) if get_compile_threads() > 1 else kernel.wait()


_library = torch.library.Library("backplane", "FRAGMENT")
# Results can be arguments that the backward pass needs, or views of them.
_library.define("compiled_graph(Tensor(a!)[] written, Tensor[] read, int[] sizes, int graph) -> Tensor(a!)[]")
_graphs: weakref.WeakValueDictionary[int, Graph] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Arguments(NamedTuple):
    """The arguments of a graph: tensors that it writes, those that it reads, and sizes."""

    written: Sequence[torch.Tensor]
    read: Sequence[torch.Tensor]
    sizes: Sequence[int]

    def shapes(self) -> Any:
        """What the numbers among the results depend on."""
        return tuple(self.sizes), tuple(one.shape for one in (*self.written, *self.read))


class Graph:
    """A compiled graph. The first call for given shapes runs the wrapper and records a plan, later ones replay it.

    Graphs that take or return something besides bp tensors and integers run the wrapper at each call.
    """

    def __init__(self, wrapper: Callable[[list[Any]], Any], written: Sequence[int]) -> None:
        self._wrapper, self._written = wrapper, frozenset(written)
        self._number = next(_numbers)
        self._calls = threading.local()
        # For each result, None if it is a tensor, else a tuple of it. Numbers among the results depend on the shapes.
        self._results: list[tuple[Any] | None] | None = None
        self._results_of_shapes: dict[Any, list[tuple[Any] | None]] = {}
        _graphs[self._number] = self

    def __call__(self, args: list[Any]) -> Any:
        if not all(
            isinstance(one, int) or (isinstance(one, torch.Tensor) and one.device.type == "bp") for one in args
        ):
            if any(isinstance(one, FakeTensor) for one in args):
                raise TypeError(
                    "a compiled graph needs tensors with data, but got fake tensors: after a graph break, "
                    "torch.compile compiled a function that PyTorch uses to trace; TORCH_LOGS=graph_breaks shows it"
                )
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
            tensors = iter(torch.ops.backplane.compiled_graph(*given, self._number))
        results = self._results if self._results is not None else self._results_of_shapes[given.shapes()]
        return tuple(next(tensors) if one is None else one[0] for one in results)

    def plan(self, given: Arguments) -> list[torch.Tensor]:
        """Runs the wrapper, as a planner."""
        parts = {"w": iter(given.written), "r": iter(given.read), "i": iter(given.sizes)}
        found = self._wrapper([next(parts[kind]) for kind in self._calls.kinds])
        results = [None if isinstance(one, torch.Tensor) else (one,) for one in found]
        if all(one is None or one == (None,) for one in results):
            self._results = results
        else:
            self._results_of_shapes[given.shapes()] = results
        return [one for one in found if isinstance(one, torch.Tensor)]


def _plan(written: Any, read: Any, sizes: Any, graph: int) -> list[torch.Tensor]:
    return _graphs[graph].plan(Arguments(written, read, sizes))


_C.set_planner("backplane::compiled_graph", _plan)

_library.define("reserve_random_(Tensor(a!) state, int calls) -> Tensor(a!)")


def _reserve(state: torch.Tensor, calls: int) -> torch.Tensor:
    """Writes the generator's seed and its offset to `state`, and reserves random numbers for `calls` calls."""
    run_template(write_state, state.device, state, random_numbers(WORDS_PER_CALL * calls), name="random_state")
    return state


_C.set_planner("backplane::reserve_random_", _reserve)


@torch.library.impl(random_numbers_of_graphs.library, "random_state", "CompositeExplicitAutograd")
def _random_state(calls: int, *, device: torch.device) -> torch.Tensor:
    """The seed and the offset of random numbers for `calls` calls, as (2,) int64."""
    return torch.ops.backplane.reserve_random_(torch.empty(2, dtype=torch.int64, device=device), calls)
