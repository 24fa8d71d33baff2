"""Moves CPU tensors that index tensors on bp to the device, in the graphs that Inductor compiles.

Inductor makes indices on the device only if it is CUDA or another one of PyTorch's, and reads masks where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from torch_backplane import drivers

INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def install(post_grad: ModuleType) -> None:
    """Lets `torch._inductor.fx_passes.post_grad` make tensors on bp that programs make on the CPU as indices."""
    move_constructors: Callable[..., None] = post_grad.move_constructors_to_gpu  # type: ignore[attr-defined]

    class Mover(post_grad.ConstructorMoverPass):  # type: ignore[name-defined, misc]
        """Leaves random numbers on the CPU, because those of the device differ."""

        def find_movable_constructors(self, graph: torch.fx.Graph, constructors: list[Any]) -> Any:
            random = torch.Tag.nondeterministic_seeded
            return super().find_movable_constructors(
                graph, [one for one in constructors if random not in one.target.tags]
            )

    @functools.wraps(move_constructors)
    def move(graph: torch.fx.Graph) -> None:
        move_constructors(graph)
        if _devices_support_all_dtypes(graph):
            Mover("bp")(graph)

    post_grad.move_constructors_to_gpu = move  # type: ignore[attr-defined]


def _devices_support_all_dtypes(graph: torch.fx.Graph) -> bool:
    """Whether the bp devices of a graph support the dtypes of all tensors in it.

    Inductor computes what depends on no argument on the device to which it is copied.
    """
    values = [node.meta.get("val") for node in graph.nodes]
    tensors = [one for one in values if isinstance(one, torch.Tensor)]
    dtypes = {one.dtype for one in tensors}
    devices = {one.device for one in tensors if one.device.type == "bp"}
    return all(dtypes <= set(drivers.device(one.index).properties.dtypes) for one in devices)


def copy_to_device(graph: torch.fx.Graph) -> None:
    """Copies the indices that are still on the CPU to the device of what they index."""
    if not _devices_support_all_dtypes(graph):
        return
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
