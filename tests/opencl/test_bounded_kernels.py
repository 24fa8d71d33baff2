"""Kernels marked as bounded: work items beyond the last do nothing, so launchers may add groups, as PoCL's does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agreement import on_device, to_cpu
from plain_arguments import REFUSED, by_position, plain_arguments
from test_bad_input import CRASHING
from torch.utils._pytree import tree_leaves

from torch_backplane import plans
from torch_backplane.kernels import Kernel
from torch_backplane.kernels.dialects.base import BOUNDED
from torch_backplane.planning import declare, runtime

MORE = 5  # additional groups in each dimension


@contextmanager
def wider(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Launches bounded kernels with additional groups. Yields the names of those kernels."""
    kernels: dict[int, Kernel] = {}
    entries: set[str] = set()
    launch = sys.modules["torch_backplane.planning.launch"]  # the attribute planning.launch is the function
    compiled, ordinary = launch.compiled, runtime.launch

    def remember(index: int, kernel: Kernel, name: str) -> Any:
        built = compiled(index, kernel, name)
        kernels[id(built)] = kernel
        return built

    def launch_wider(kernel: Any, arguments: Any, items: Any, group: Any, **attributes: Any) -> None:
        if BOUNDED in kernels[id(kernel)].text.splitlines():
            entries.add(kernels[id(kernel)].name)
            items = [count + MORE * size for count, size in zip(items, group, strict=True)]
        ordinary(kernel, arguments, items, group, **attributes)

    mode = plans.mode()
    plans.set_mode("0")
    monkeypatch.setattr(launch, "compiled", remember)
    monkeypatch.setattr(runtime, "launch", launch_wider)
    try:
        yield entries
    finally:
        monkeypatch.undo()
        plans.set_mode(mode)


def results(call: Any, arguments: list[Any]) -> Any:
    """Returns a call's results and its arguments afterwards, or its error message."""
    torch.manual_seed(3)
    arguments = on_device(arguments)
    try:
        returned = call(*arguments)
        torch.bp.synchronize()
    except Exception as error:
        return [str(error).splitlines()[0]]
    return [to_cpu(one) for one in tree_leaves([returned, arguments]) if isinstance(one, torch.Tensor)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.nan_to_num(7), other.nan_to_num(7)) and one.dtype == other.dtype
    return bool(one == other)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_additional_groups_do_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.bp.init()
    wrong, entries = [], set()
    for name in sorted(declare.declared):
        if not name.startswith("aten::") or any(word in name for word in (*CRASHING, *REFUSED, "empty", "resize")):
            continue
        overload = declare.find(name.removeprefix("aten::"))
        call, arguments = by_position(overload), plain_arguments(overload, torch.float32)
        expected = results(call, arguments)
        with wider(monkeypatch) as launched:
            found = results(call, arguments)
        entries |= launched
        if len(found) != len(expected) or not all(map(same, found, expected)):
            wrong.append(f"{name}: {found}, expected {expected}")
    assert not wrong, "\n".join(wrong)
    assert len(entries) > 200, len(entries)


def modules() -> dict[str, Any]:
    """Returns modules that run kernels which plain arguments do not reach."""
    return {
        "convolution": (torch.nn.Conv2d(3, 5, 3), (2, 3, 9, 9)),
        "layer norm": (torch.nn.LayerNorm(33), (5, 33)),
        "batch norm": (torch.nn.BatchNorm2d(5), (3, 5, 4, 4)),
        "linear, softmax": (torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.Softmax(0)), (5, 33)),
        "pooling": (torch.nn.MaxPool2d(2), (2, 3, 9, 9)),
        "attention": (torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0), (3, 5, 8)),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", modules())
def test_additional_groups_do_not_change_gradients(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, shape = modules()[name]
    module, x = module.to("bp"), torch.rand(shape).to("bp").requires_grad_()

    def gradients() -> list[torch.Tensor]:
        leaves = [x, *module.parameters()]
        return [one.cpu() for one in torch.autograd.grad(module(x).square().sum(), leaves)]

    expected = gradients()
    with wider(monkeypatch) as entries:
        found = gradients()
    assert entries
    assert all(map(torch.equal, found, expected))
