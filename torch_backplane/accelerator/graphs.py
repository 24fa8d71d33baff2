"""Graphs: work that a stream is given once, and is given again in one call. As torch.cuda's, on devices that run
kernels.

What is captured is what would have been given to the device: kernels, copies within it and from or to pinned memory,
and the host's part in its work, all with the addresses that they have at the capture. Nothing of it is done before
`replay`.
"""

from __future__ import annotations

import gc
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
    """What torch.cuda.CUDAGraph is for CUDA devices. `torch.accelerator.Graph` is the same graph under PyTorch's own
    name.

    Tensors that the work reads and writes must live as long as it is replayed, and stay where they are: new inputs are
    copied into the old ones. The results of a replay are written over by the next. What is allocated in the capture
    comes from the graph's pool, and from nowhere else. Random numbers are others in each replay, those of the generator
    as it is then. Numbers that the work was given as Python's stay what they were.

    Args:
        keep_graph: do not prepare replays at the end of the capture, but when `instantiate` or `replay` is called.
    """

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__(keep_graph)

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Capture what the current stream is given from now on; another stream joins by waiting for an event of this
        one's.

        Args:
            pool: where memory comes from: `other.pool()` of a graph that is replayed before this one and never beside
                it, or `graph_pool_handle()`. None: a pool of its own.
            capture_error_mode: who may wait for the device meanwhile: "global" no thread, "thread_local" others than
                this, "relaxed" all.

        Raises:
            RuntimeError: this graph has been captured, the stream is the default one, or it is being captured.
            NotImplementedError: the device runs no kernels, and the host cannot compute in its memory.
            ValueError: another mode.
        """
        super().capture_begin(pool, capture_error_mode)

    def capture_end(self) -> None:
        """End the capture.

        Raises:
            RuntimeError: there is none; or something in it could not be captured, which the message names; or a stream
                that joined was not waited for. The stream is as it was before, and there is no graph.
        """
        super().capture_end()

    def instantiate(self) -> None:
        """Prepare replays. Raises RuntimeError where nothing has been captured."""
        super().instantiate()

    def replay(self) -> None:
        """Give the work to the current stream of the graph's device. Raises RuntimeError where nothing has been
        captured."""
        super().replay()

    def reset(self) -> None:
        """Forget the work, and give the pool up. Its memory is free once no tensor lives in it.

        Raises RuntimeError during the capture.
        """
        super().reset()

    def pool(self) -> PoolId:
        """The pool's id, for another graph. Raises RuntimeError where nothing has been captured."""
        return super().pool()

    def enable_debug_mode(self) -> None:
        """Allow `debug_dump`."""
        super().enable_debug_mode()

    def debug_dump(self, debug_path: str) -> None:
        """Write the work to a file in the dot language: a box for each kernel, copy and part of the host's, and what it
        waits for.

        Raises RuntimeError without `enable_debug_mode`, where nothing has been captured, or where the file cannot be
        written.
        """
        super().debug_dump(debug_path)


class graph:
    """Context manager that captures what it surrounds.

    Args:
        cuda_graph: a Graph, which is captured. (torch.cuda's name.)
        pool, capture_error_mode: see `Graph.capture_begin`.
        stream: what the work is given to; None: a stream that all such captures share.
        enable_annotations, check_input_liveness: must be False.

    Raises:
        NotImplementedError: enable_annotations, check_input_liveness.
    """

    _streams: dict[int, Stream] = {}  # noqa: RUF012 - shared by all, as said

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
            raise NotImplementedError("graphs on bp have no annotations, and do not watch over their inputs")
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
    """The id of a pool that is made by the first capture that is given it."""
    return _C._memory_new_pool_id(False)


def is_current_stream_capturing() -> bool:
    """Whether what the current stream is given is being captured."""
    return _C.capture_of(current_device()) != 0


# --- callables -------------------------------------------------------------------------------------------------------


class _Captured:
    """The graphs of one callable, forward and backward, on tensors that stay where they are."""

    def __init__(self, function: Graphed, arguments: Any) -> None:
        self.function = function
        self.arguments = arguments
        self.user_inputs, self.spec = tree_flatten(arguments)
        parameters = tuple(function.parameters()) if isinstance(function, torch.nn.Module) else ()
        self.inputs: tuple[torch.Tensor, ...] = (*self.user_inputs, *parameters)
        self.forward_graph, self.backward_graph = Graph(), Graph()
        self.outputs: list[torch.Tensor] = []
        self.output_spec: TreeSpec = self.spec  # until the capture says
        self.cotangents: list[torch.Tensor | None] = []
        self.gradients: list[torch.Tensor | None] = []

    def check(self) -> None:
        if isinstance(self.function, torch.nn.Module):
            module = self.function
            if module._backward_hooks or module._forward_hooks or module._forward_pre_hooks:
                raise RuntimeError("a module must have no hooks when it is captured; they can be registered afterwards")
            if any(buffer.requires_grad for buffer in module.buffers()):
                raise RuntimeError("only parameters of a module that is captured may require gradients")
        if not all(isinstance(one, torch.Tensor) for one in self.user_inputs):
            raise TypeError("sample_args must hold tensors only")

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

    def capture_forward(self, pool: PoolId) -> None:
        with graph(self.forward_graph, pool=pool):
            outputs = self.function(*self.arguments)
        self.outputs, self.output_spec = tree_flatten(outputs)

    def capture_backward(self, pool: PoolId, allow_unused: bool) -> None:
        self.cotangents = [torch.empty_like(one) if one.requires_grad else None for one in self.outputs]
        with graph(self.backward_graph, pool=pool):
            found = iter(self.differentiate(self.outputs, self.cotangents, allow_unused))
        self.gradients = [next(found, None) if one.requires_grad else None for one in self.inputs]
        self.outputs = [one.detach() for one in self.outputs]  # without what autograd has kept for them

    def free_gradients(self) -> None:
        """Gives parameters whose `grad` is still what the last replay wrote, as autograd takes it over, a copy of it:
        the next one is added to that."""
        for parameter, gradient in zip(self.inputs, self.gradients, strict=True):
            if gradient is not None and parameter.grad is not None and parameter.grad.is_set_to(gradient):
                parameter.grad = parameter.grad.clone()

    def made(self) -> Graphed:
        """A function that replays."""
        captured = self

        class Replayed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
                for place, given in zip(captured.user_inputs, inputs, strict=False):
                    if place.data_ptr() != given.data_ptr():
                        place.copy_(given)
                captured.forward_graph.replay()
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
                captured.free_gradients()
                captured.backward_graph.replay()
                return tuple(None if one is None else one.detach() for one in captured.gradients)

        def replayed(*arguments: Any) -> Any:
            given, spec = tree_flatten(arguments)
            if spec != captured.spec:
                raise ValueError(f"the callable was captured with arguments like {captured.spec}, and got {spec}")
            for place, one in zip(captured.user_inputs, given, strict=True):
                if place.shape != one.shape or place.dtype != one.dtype:
                    raise ValueError(
                        f"the callable was captured with a tensor of shape {list(place.shape)} and {place.dtype}, "
                        f"and got shape {list(one.shape)} and {one.dtype}"
                    )
            outputs = Replayed.apply(*given, *captured.inputs[len(captured.user_inputs) :])
            return tree_unflatten(outputs, captured.output_spec)

        return replayed


def _in_place_of(module: torch.nn.Module, replayed: Graphed) -> torch.nn.Module:
    """The module, which replays in the mode that it was captured in, and else runs as before."""
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
) -> Any:
    """Functions or modules whose forward and backward passes are graphs, to be called as before.

    Args:
        callables: one, or a tuple of several, in the order in which the program calls them: they share a pool.
        sample_args: a tuple of tensors, which the graphs keep as their inputs; or a tuple of such tuples. Arguments of
            later calls are copied into them, and need the same shapes, dtypes and requires_grad.
        num_warmup_iters: calls before the capture.
        allow_unused_input: whether inputs may have no part in the results.
        pool: see `Graph.capture_begin`.

    Raises:
        RuntimeError: a module that has hooks, or buffers that require gradients; autocast with its cache; something
            that cannot be captured.
        TypeError: sample_args that are no tensors.
        ValueError: as many sample_args as callables are needed; and, of the graphed callables, arguments that do not
            fit.
    """
    if torch.is_autocast_enabled("bp") and torch.is_autocast_cache_enabled():
        raise RuntimeError("callables cannot be captured while autocast keeps a cache: pass cache_enabled=False to it")
    several = isinstance(callables, tuple)
    functions, samples = (callables, sample_args) if several else ((callables,), (sample_args,))
    if len(functions) != len(samples):
        raise ValueError(f"each of the {len(functions)} callables needs its sample_args, and {len(samples)} were given")
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
        one.capture_forward(memory)
    for one in reversed(captured):
        one.capture_backward(memory, allow_unused_input)

    made = []
    for one in captured:
        replayed = one.made()
        made.append(_in_place_of(one.function, replayed) if isinstance(one.function, torch.nn.Module) else replayed)
    return tuple(made) if several else cast(Any, made[0])
