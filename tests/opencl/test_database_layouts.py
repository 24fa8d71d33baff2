"""Strides of results are those of the CPU, for the calls of PyTorch's operator database with tensors in other layouts.
Nothing is built or launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import database_calls
import pytest
import torch
from agreement import DEVICE, lacks_a_dtype_of, placed
from database_calls import Call
from test_layouts import LEFT_OUT, OF_THE_CPU
from test_numbers_for_tensors import without_kernels
from torch.utils._pytree import tree_leaves, tree_map_only


def _transposed(shape: torch.Size) -> torch.Tensor:
    """Returns a tensor whose first dimension is the fastest-varying one."""
    return torch.zeros(tuple(reversed(shape))).permute(*reversed(range(len(shape))))


def _turned_with_gaps(shape: torch.Size) -> torch.Tensor:
    larger = _transposed(torch.Size([*(2 * size + 1 for size in shape[:-1]), 2 * shape[-1]]))
    return larger[(*(slice(0, size) for size in shape[:-1]), slice(0, None, 2))]


def _last_first(shape: torch.Size) -> torch.Tensor:
    """Returns a part of a larger tensor, with the first dimension fastest, as channels are in channels-last memory."""
    larger = torch.zeros(*(size + 3 for size in shape[1:]), shape[0] + 3).movedim(-1, 0)
    return larger[tuple(slice(0, size) for size in shape)]


def _strides(returned: Any) -> list[list[int]]:
    """Returns the strides of each result, without those of dimensions of size 1."""
    results = returned if isinstance(returned, (tuple, list)) else [returned]
    return [
        [step for size, step in zip(one.shape, one.stride(), strict=True) if size > 1] if one.numel() else []
        for one in results
        if isinstance(one, torch.Tensor)
    ]


@pytest.mark.parametrize("memory", [_transposed, _turned_with_gaps, _last_first])
@pytest.mark.slow
def test_strides_of_results_are_those_of_the_cpu(memory: Callable[[torch.Size], torch.Tensor]) -> None:
    def wanted(call: Call) -> bool:
        first = next((one for one in call.arguments if isinstance(one, torch.Tensor)), None)
        name = call.function.name()
        left_out = name in OF_THE_CPU or any(word in name for word in (*LEFT_OUT, "rand", "sparse", "_scaled_mm"))
        masks = [one for one in tree_leaves(call.arguments[1:]) if isinstance(one, torch.Tensor)]
        # The result's size depends on the values of a boolean index.
        left_out = left_out or ("index" in name and any(one.dtype == torch.bool for one in masks))
        return first is not None and first.dim() > 1 and first.numel() > 1 and not left_out

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dim() < 2 else memory(tensor.shape).to(tensor.dtype).copy_(tensor)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return placed(tensor, DEVICE)

    compared = 0
    for call in database_calls.calls(wanted, most=2):
        arguments, named = tree_map_only(torch.Tensor, laid_out, (call.arguments, call.named))
        try:
            expected = call.function(*arguments, **named)
        except RuntimeError:  # such as a view that is not possible
            continue
        if lacks_a_dtype_of((arguments, named, expected)):
            continue
        arguments, named = tree_map_only(torch.Tensor, moved, (arguments, named))
        named = {key: DEVICE if isinstance(one, torch.device) else one for key, one in named.items()}
        with without_kernels():
            assert _strides(call.function(*arguments, **named)) == _strides(expected), call.function
        compared += 1
    assert compared > 300
