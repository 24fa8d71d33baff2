"""Writes increment version counters, so that autograd rejects gradients of saved tensors that have changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from agreement import DEVICE, on_device
from plain_arguments import REFUSED, by_position, fresh, plain_arguments
from test_bad_input import CRASHING
from test_layouts import LEFT_OUT
from test_numbers_for_tensors import without_kernels
from torch.utils._pytree import tree_leaves

from torch_backplane.planning import declare


def written_counts(overload: Any, arguments: list[Any]) -> list[bool] | None:
    """For each tensor that the schema marks as written, whether the call changes its version; None after an error."""
    schema = overload._schema.arguments
    written = [
        tensor
        for argument, value in zip(schema, arguments, strict=True)
        if argument.is_write
        for tensor in tree_leaves(value)
        if isinstance(tensor, torch.Tensor)
    ]
    before = [tensor._version for tensor in written]
    try:
        by_position(overload)(*arguments)
    except Exception:
        return None
    return [tensor._version > version for tensor, version in zip(written, before, strict=True)]


def operators() -> Iterator[tuple[str, Any]]:
    torch.bp.init()
    left_out = [one for one in (*LEFT_OUT, *CRASHING, *REFUSED) if one not in ("_foreach", "_fused_")]
    for name in sorted(declare.declared):
        overload = declare.find(name.removeprefix("aten::"))
        writes = any(argument.is_write for argument in overload._schema.arguments)
        if name.startswith("aten::") and writes and not any(one in name for one in left_out):
            yield name, overload


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kernels", [False, True], ids=["planned", "replayed"])
def test_written_tensors_get_a_new_version(kernels: bool) -> None:
    calls, wrong = 0, []
    for name, overload in operators():
        if kernels and "_foreach" not in name:
            continue
        arguments = plain_arguments(overload, torch.float32)
        expected = written_counts(overload, fresh(arguments))
        if expected is None:
            continue
        calls += 1
        if kernels:
            found = [written_counts(overload, on_device(fresh(arguments))) for _ in range(3)]
        else:
            with without_kernels():
                found = [written_counts(overload, on_device(fresh(arguments)))]
        if any(one != expected for one in found):
            wrong.append(f"{name}: {found}, expected {expected}")
    assert not wrong, "\n".join(wrong)
    assert calls > 30


def test_gradient_of_a_tensor_changed_by_foreach_is_an_error() -> None:
    for device in ("cpu", DEVICE):
        x = torch.rand(3, device=device, requires_grad=True)
        y = x.exp()
        torch._foreach_mul_([y.detach()], 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
