"""Moves CPU tensors that index tensors on bp to the device, in the graphs that Inductor compiles.

Inductor makes indices on the device only if it is CUDA or another one of PyTorch's, and reads masks where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def install(post_grad: ModuleType) -> None:
    """Lets `torch._inductor.fx_passes.post_grad` make tensors on bp that programs make on the CPU as indices."""
    move_constructors: Callable[..., None] = post_grad.move_constructors_to_gpu  # type: ignore[attr-defined]

    @functools.wraps(move_constructors)
    def move(graph: torch.fx.Graph) -> None:
        move_constructors(graph)
        # The numbers of a random constructor depend on the device, so these stay on the CPU.
        with torch._inductor.config.patch(fallback_random=True):
            post_grad.ConstructorMoverPass("bp")(graph)

    post_grad.move_constructors_to_gpu = move  # type: ignore[attr-defined]


def copy_to_device(graph: torch.fx.Graph) -> None:
    """Copies the indices that are still on the CPU to the device of what they index."""
    for target in INDEXING:
        for node in graph.find_nodes(op="call_function", target=target):
            device = node.meta["val"].device
            if device.type == "bp":
                with graph.inserting_before(node):
                    indices = [_moved(graph, one, device) for one in node.args[1]]
                node.args = (node.args[0], indices, *node.args[2:])


def _moved(graph: torch.fx.Graph, index: Any, device: torch.device) -> Any:
    if index is None or index.meta["val"].device == device:
        return index
    found = graph.call_function(torch.ops.prims.device_put.default, (index, device))
    found.meta["val"] = index.meta["val"].to(device)
    return found
