"""What generated wrappers call: kernels, and graphs whose commands are recorded as a plan and replayed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels.kernel import Kernel, Parameter
from torch_backplane.kernels.templates import errors
from torch_backplane.planning.launch import compiled, dialect_of, launch
from torch_backplane.planning.template import error_words


class GraphKernel:
    """A kernel of a compiled graph, on one device. Its build starts when it is defined."""

    def __init__(self, kernel: Kernel, device: int, team: int, error_texts: Sequence[str] | None) -> None:
        self.kernel, self._device, self._team, self._error_texts = kernel, device, team, error_texts
        compiled(device, kernel, kernel.name)

    def run(self, tensors: list[torch.Tensor], numbers: list[Any], sizes: Sequence[int]) -> None:
        """Launches the kernel.

        Args:
            tensors: the buffers.
            numbers: the other arguments.
            sizes: the sizes of the iteration space without the reduced dimension.
        """
        if 0 in sizes:
            return
        if self._error_texts is not None:
            tensors = [*tensors, error_words(torch.device("bp", self._device))]
            numbers = [*numbers, errors.operator_number(self.kernel.name), *map(errors.text_number, self._error_texts)]
        if self._team > 1:
            launch(self.kernel, tensors, numbers, [sizes[0] * self._team], [self._team])
            return
        target = dialect_of(self._device).target
        if len(sizes) == 1:
            launch(self.kernel, tensors, numbers, sizes, [target.element_group_size])
            return
        group = target.row_group(sizes[0], sizes[1], False)
        launch(self.kernel, tensors, numbers, sizes, group)


def kernel(
    *,
    name: str,
    parameters: Sequence[Any],
    group_size: int | None,
    local_bytes: int,
    team: int,
    reports_errors: bool,
    error_texts: Sequence[str],
    device: int,
    text: str,
) -> GraphKernel:
    """Defines a kernel. Called by generated wrappers."""
    roles = [
        Parameter("scalar", one, k) if isinstance(one, torch.dtype) else Parameter(one, torch.uint8, k)
        for k, one in enumerate(parameters)
    ]
    made = Kernel(name, text, tuple(roles), None, group_size, local_bytes)
    return GraphKernel(made, device, team, error_texts if reports_errors else None)


_library = torch.library.Library("backplane", "FRAGMENT")
_library.define("compiled_graph(Tensor(a!)[] written, Tensor[] read, int[] sizes, int graph) -> Tensor[]")
_graphs: dict[int, Graph] = {}
_numbers = itertools.count()


class Graph:
    """A compiled graph. The first call for given shapes runs the wrapper and records a plan, later ones replay it.

    Graphs that take or return something besides bp tensors and integers run the wrapper at each call.
    """

    def __init__(self, wrapper: Callable[[list[Any]], Any], written: Sequence[int]) -> None:
        self._wrapper, self._written = wrapper, frozenset(written)
        self._number = next(_numbers)
        self._calls = threading.local()
        _graphs[self._number] = self

    def __call__(self, args: list[Any]) -> Any:
        if not all(
            isinstance(one, int) or (isinstance(one, torch.Tensor) and one.device.type == "bp") for one in args
        ):
            return self._wrapper(args)
        kinds = tuple("i" if isinstance(one, int) else "w" if k in self._written else "r" for k, one in enumerate(args))
        written = [one for one, kind in zip(args, kinds, strict=True) if kind == "w"]
        read = [one for one, kind in zip(args, kinds, strict=True) if kind == "r"]
        sizes = [one for one in args if isinstance(one, int)]
        if not written and not read:
            return self._wrapper(args)
        args.clear()
        self._calls.kinds = kinds
        with torch._C._AutoDispatchBelowAutograd():
            found = torch.ops.backplane.compiled_graph(written, read, sizes, self._number)
        return self._restored(found)

    def plan(
        self, written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Runs the wrapper, as a planner."""
        parts = {"w": iter(written), "r": iter(read), "i": iter(sizes)}
        results = self._wrapper([next(parts[kind]) for kind in self._calls.kinds])
        self._rest = [None if isinstance(one, torch.Tensor) else (one,) for one in results]
        return [one for one in results if isinstance(one, torch.Tensor)]

    def _restored(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        given = iter(tensors)
        return tuple(next(given) if one is None else one[0] for one in self._rest)


def _plan(written: Any, read: Any, sizes: Any, graph: int) -> list[torch.Tensor]:
    return _graphs[graph].plan(written, read, sizes)


_C.set_planner("backplane::compiled_graph", _plan)
