"""Graphs: commands that are captured once from a stream and replayed with one call, as with torch.cuda.CUDAGraph.

A capture records the commands that would have been submitted to the device, without executing them: kernel launches,
library calls, copies within the device and from or to pinned memory, and host callbacks. All keep the memory addresses
that they had in the capture.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torch_backplane import _C
from torch_backplane.accelerator.devices import current_device, synchronize
from torch_backplane.accelerator.memory import PoolId, empty_cache
from torch_backplane.accelerator.streams import Stream, StreamContext, current_stream

__all__ = ["Graph", "graph", "graph_pool_handle", "is_current_stream_capturing", "make_graphed_callables"]

Graphed = Callable[..., Any]


class Graph(_C.Graph):
    """A graph of captured commands: torch.cuda.CUDAGraph for bp devices.

    `torch.accelerator.Graph` is the same graph under PyTorch's device-independent name.

    Tensors that the graph reads or writes must stay alive and keep their memory as long as the graph is replayed. Copy
    new inputs into the captured input tensors. Each replay overwrites the results of the previous one. Memory that is
    allocated during the capture comes from the graph's memory pool. Each replay draws new random numbers from the
    generators. Python numbers keep their value from the capture.

    Args:
        keep_graph: instantiate the graph in `instantiate` or the first `replay`, not at the end of the capture.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Begin to capture the commands that are submitted to the current stream.

        Another stream joins the capture when it waits for an event of a captured stream. `torch.bp.graph` calls this
        method.

        Args:
            pool: the memory pool: `other.pool()` of a graph that is always replayed before this one and never at the
                same time, or `graph_pool_handle()`. None creates a new pool.
            capture_error_mode: which threads get an error if they wait for the device during the capture: "global" for
                all, "thread_local" for the capturing thread, "relaxed" for none.

        Raises:
            RuntimeError: the graph has been captured already, the stream is the default stream, or it is being
                captured.
            NotImplementedError: the device runs no kernels, and the host cannot access its memory.
            ValueError: `capture_error_mode` is none of these.
        """
        super().capture_begin(pool, capture_error_mode)

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            RuntimeError: there is no capture; an operation could not be captured, which the message names; or a stream
                that joined the capture was not waited for. The stream then returns to its normal state, and the graph
                stays empty.
        """
        super().capture_end()

    def instantiate(self) -> None:
        """Prepare the graph for replays. `capture_end` or the first `replay` calls this method.

        Raises:
            RuntimeError: nothing has been captured.
        """
        super().instantiate()

    def replay(self) -> None:
        """Submit the captured commands to the current stream of the graph's device.

        Raises:
            RuntimeError: nothing has been captured.
        """
        super().replay()

    def reset(self) -> None:
        """Delete the captured commands and release the memory pool, whose memory is freed when no tensor uses it.

        Raises:
            RuntimeError: the graph is being captured.
        """
        super().reset()

    def pool(self) -> PoolId:
        """Return the id of the graph's memory pool, to share it with another graph.

        Raises:
            RuntimeError: nothing has been captured.
        """
        return super().pool()

    def enable_debug_mode(self) -> None:
        """Enable `debug_dump`."""
        super().enable_debug_mode()

    def debug_dump(self, debug_path: str) -> None:
        """Write the commands and their dependencies to a file in the DOT language.

        Args:
            debug_path: the file.

        Raises:
            RuntimeError: `enable_debug_mode` was not called, nothing has been captured, or the file cannot be written.
        """
        super().debug_dump(debug_path)


class graph:
    """Context manager that captures the commands of its body in a graph.

    Args:
        cuda_graph: the `Graph` to capture into. The name of the argument is torch.cuda's.
        pool: see `Graph.capture_begin`.
        stream: the stream to capture, which becomes the current stream. None uses a stream of the current device that
            all such captures share.
        capture_error_mode: see `Graph.capture_begin`.
        enable_annotations: must be False.
        check_input_liveness: must be False.

    Raises:
        NotImplementedError: `enable_annotations` or `check_input_liveness` is True.
    """

    _streams: dict[int, Stream] = {}  # noqa: RUF012 - shared by all instances

    def __init__(
        self,
        cuda_graph: Graph,
        pool: PoolId | None = None,
        stream: torch.Stream | None = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        check_input_liveness: bool = False,
    ) -> None:
        if enable_annotations or check_input_liveness:
            raise NotImplementedError("bp graphs do not support enable_annotations and check_input_liveness")
        if stream is None:
            device = current_device()
            if device not in self._streams:
                self._streams[device] = Stream(device)
            stream = self._streams[device]
        self.cuda_graph = cuda_graph
        self.pool = pool
        self.capture_stream = stream
        self.capture_error_mode = capture_error_mode
        self._context = StreamContext(stream)

    def __enter__(self) -> None:
        synchronize()
        if torch.compiler.config.force_cudagraph_gc:
            gc.collect()
        empty_cache()
        if hasattr(torch.accelerator, "empty_host_cache"):  # since torch 2.12
            torch.accelerator.empty_host_cache()
        self._context.__enter__()
        try:
            self.cuda_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException:
            self._context.__exit__(None, None, None)
            raise

    def __exit__(self, *raised: Any) -> None:
        try:
            self.cuda_graph.capture_end()
        finally:
            self._context.__exit__(*raised)


def graph_pool_handle() -> PoolId:
    """Return the id of a new memory pool, which the first capture that gets it creates."""
    return _C._memory_new_pool_id(False)


def is_current_stream_capturing() -> bool:
    """Return whether the current stream is being captured."""
    return _C.capture_of(current_device()) != 0


# --- callables -------------------------------------------------------------------------------------------------------


class _Captured:
    """The forward and the backward graph of one callable, with their static tensors."""

    def __init__(self, function: Graphed, arguments: Any) -> None:
        self.function = function
        self.arguments = arguments
        self.user_inputs, self.spec = tree_flatten(arguments)
        parameters = tuple(function.parameters()) if isinstance(function, torch.nn.Module) else ()
        self.inputs: tuple[torch.Tensor, ...] = (*self.user_inputs, *parameters)
        self.forward_graph, self.backward_graph = Graph(), Graph()
        self.outputs: list[torch.Tensor] = []
        self.output_spec: TreeSpec = self.spec  # set by the capture
        self.cotangents: list[torch.Tensor | None] = []
        self.gradients: list[torch.Tensor | None] = []

    def check(self) -> None:
        if isinstance(self.function, torch.nn.Module):
            module = self.function
            if module._backward_hooks or module._forward_hooks or module._forward_pre_hooks:
                raise RuntimeError("a module must have no hooks when it is captured; they can be registered afterwards")
            if any(buffer.requires_grad for buffer in module.buffers()):
                raise RuntimeError("a module must have no buffers that require gradients when it is captured")
        if not all(isinstance(one, torch.Tensor) for one in self.user_inputs):
            raise TypeError("sample_args must contain tensors only")

    def trained(self) -> tuple[torch.Tensor, ...]:
        return tuple(one for one in self.inputs if one.requires_grad)

    def differentiate(self, outputs: Sequence[Any], cotangents: Sequence[Any], allow_unused: bool) -> Sequence[Any]:
        wanted = [(out, one) for out, one in zip(outputs, cotangents, strict=True) if one is not None]
        if not wanted or not self.trained():
            return ()
        return torch.autograd.grad(
            [out for out, _ in wanted],
            self.trained(),
            grad_outputs=[one for _, one in wanted],
            only_inputs=True,
            allow_unused=allow_unused,
        )

    def warm_up(self, times: int, allow_unused: bool) -> None:
        for _ in range(times):
            outputs, _ = tree_flatten(self.function(*self.arguments))
            cotangents = [torch.empty_like(one) if one.requires_grad else None for one in outputs]
            self.differentiate(outputs, cotangents, allow_unused)

    def capture_forward(self, pool: PoolId, error_mode: str) -> None:
        with graph(self.forward_graph, pool=pool, capture_error_mode=error_mode):
            outputs = self.function(*self.arguments)
        self.outputs, self.output_spec = tree_flatten(outputs)

    def capture_backward(self, pool: PoolId, error_mode: str, allow_unused: bool) -> None:
        self.cotangents = [torch.empty_like(one) if one.requires_grad else None for one in self.outputs]
        with graph(self.backward_graph, pool=pool, capture_error_mode=error_mode):
            found = iter(self.differentiate(self.outputs, self.cotangents, allow_unused))
        self.gradients = [next(found, None) if one.requires_grad else None for one in self.inputs]
        self.outputs = [one.detach() for one in self.outputs]  # releases the autograd graph

    def free_gradients(self) -> None:
        """Copies each parameter's `grad` that is the graph's static gradient tensor.

        Autograd assigns that tensor to `grad` without a copy. A replay can overwrite it before the next gradient is
        accumulated: the tensor's memory can also be that of a temporary of another graph in the same pool.
        """
        for parameter, gradient in zip(self.inputs, self.gradients, strict=True):
            if gradient is not None and parameter.grad is not None and parameter.grad.is_set_to(gradient):
                parameter.grad = parameter.grad.clone()

    def made(self, position: int, lent: dict[int, _Captured] | None) -> Graphed:
        """Returns a function that replays the graphs.

        Args:
            position: the callable's number. Backward graphs were captured in decreasing order.
            lent: by their numbers, the callables whose static gradients autograd may have assigned to `grad`. None if
                unknown graphs share the pool: gradients are then copies.
        """
        captured, borrowed = self, {} if lent is None else lent

        def replay(work: Graph, last: float) -> None:
            # It can write to the gradients of callables up to `last`. Those of later ones existed when it was captured.
            for number in [one for one in borrowed if one <= last]:
                borrowed.pop(number).free_gradients()
            work.replay()

        class Replayed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                for place, given in zip(captured.user_inputs, inputs, strict=False):
                    if place.data_ptr() != given.data_ptr():
                        place.copy_(given)
                replay(captured.forward_graph, math.inf)
                outputs = tuple(one.detach() for one in captured.outputs)
                needless = [out for out, one in zip(outputs, captured.cotangents, strict=True) if one is None]
                ctx.mark_non_differentiable(*needless)
                return outputs

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
                for place, given in zip(captured.cotangents, cotangents, strict=True):
                    if place is not None and place.data_ptr() != given.data_ptr():
                        place.copy_(given)
                replay(captured.backward_graph, position)
                if lent is None:
                    return tuple(None if one is None else one.clone() for one in captured.gradients)
                lent[position] = captured
                return tuple(None if one is None else one.detach() for one in captured.gradients)

        def replayed(*arguments: Any) -> Any:
            given, spec = tree_flatten(arguments)
            if spec != captured.spec:
                raise ValueError(f"the callable was captured with arguments like {captured.spec}, but got {spec}")
            for place, one in zip(captured.user_inputs, given, strict=True):
                if place.shape != one.shape or place.dtype != one.dtype:
                    raise ValueError(
                        f"the callable was captured with a tensor of shape {list(place.shape)} and {place.dtype}, "
                        f"but got shape {list(one.shape)} and {one.dtype}"
                    )
            outputs = Replayed.apply(*given, *captured.inputs[len(captured.user_inputs) :])
            return tree_unflatten(outputs, captured.output_spec)

        return replayed


def _in_place_of(module: torch.nn.Module, replayed: Graphed) -> torch.nn.Module:
    """Replaces the module's `forward`: it replays in the training mode of the capture, and runs as before otherwise."""
    training, plain = module.training, module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        return replayed(*arguments, **named) if module.training == training else plain(*arguments, **named)

    module.forward = forward  # type: ignore[method-assign]
    return module


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: PoolId | None = None,
    capture_error_mode: str = "global",
    enable_annotations: bool = False,
) -> Any:
    """Capture the forward and backward passes of functions or modules, and return versions that replay them.

    Args:
        callables: a function or module, or a tuple of them in the order in which the program calls them. They share a
            memory pool.
        sample_args: a tuple of tensors; for a tuple of callables, a tuple of such tuples. The graphs use the tensors as
            their inputs: arguments of later calls are copied into them, and must have the same shapes, dtypes and
            requires_grad.
        num_warmup_iters: number of calls before the capture.
        allow_unused_input: whether inputs that do not contribute to the results are allowed.
        pool: see `Graph.capture_begin`.
        capture_error_mode: see `Graph.capture_begin`.
        enable_annotations: must be False.

    Returns:
        The graphed callable, or a tuple of them. A module is returned itself, with another `forward`. A graphed
        callable raises a ValueError if its arguments do not match `sample_args`.

    Raises:
        RuntimeError: a module has hooks or buffers that require gradients, autocast is enabled with its cache, or an
            operation cannot be captured.
        NotImplementedError: `enable_annotations` is True.
        TypeError: `sample_args` contains something other than tensors.
        ValueError: the numbers of `callables` and `sample_args` differ.
    """
    if enable_annotations:
        raise NotImplementedError("bp graphs do not support enable_annotations")
    if torch.is_autocast_enabled("bp") and torch.is_autocast_cache_enabled():
        raise RuntimeError("callables cannot be captured with autocast's cache: pass cache_enabled=False to autocast")
    several = isinstance(callables, tuple)
    functions, samples = (callables, sample_args) if several else ((callables,), (sample_args,))
    if len(functions) != len(samples):
        raise ValueError(f"each of the {len(functions)} callables needs sample_args, but got {len(samples)}")
    captured = [_Captured(function, arguments) for function, arguments in zip(functions, samples, strict=True)]
    for one in captured:
        one.check()
    memory = graph_pool_handle() if pool is None else pool

    synchronize()
    side = Stream()
    side.wait_stream(current_stream())
    with StreamContext(side):
        for one in captured:
            one.warm_up(num_warmup_iters, allow_unused_input)
    current_stream().wait_stream(side)
    synchronize()

    for one in captured:
        one.capture_forward(memory, capture_error_mode)
    for one in reversed(captured):
        one.capture_backward(memory, capture_error_mode, allow_unused_input)

    made = []
    lent: dict[int, _Captured] | None = {} if pool is None else None
    for position, one in enumerate(captured):
        replayed = one.made(position, lent)
        made.append(_in_place_of(one.function, replayed) if isinstance(one.function, torch.nn.Module) else replayed)
    return tuple(made) if several else cast(Any, made[0])
