"""Classes of calls have a dynamic-shape plan: those of difficult operators, and those of small models in training and
evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from agreement import DEVICE, plans_from_the_start
from targets import launch
from test_dynamic_shape import compare, randn, whole
from torch import nn
from torch.nn import functional as F

from torch_backplane import _C, plans

Function = Callable[..., Any]
Arguments = tuple[Any, ...]


def exact() -> dict[str, list[str]]:
    """Returns, by operator, why classes that have seen a second shape have no dynamic-shape plan."""
    return {name: one["reasons_for_exact"] for name, one in _C.plan_counts().items() if one["reasons_for_exact"]}


def planner_calls() -> int:
    return plans.total()["planner_calls"]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.complex64)


# Functions, and their arguments for a size, on the CPU.
CASES: dict[str, tuple[Function, Callable[[int], Arguments]]] = {
    # planners that call PyTorch's composite operators
    "isin": (torch.isin, lambda n: (whole(9, n), whole(9, 3))),
    "median": (torch.median, lambda n: (randn(n),)),
    "median of rows": (lambda x: tuple(x.median(-1)), lambda n: (randn(n, n + 2),)),
    "glu": (F.glu, lambda n: (randn(n, 6),)),
    "max_unpool2d": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), lambda n: (randn(1, 2, 2 * n, 2 * n),),
    ),
    "with logits": (F.binary_cross_entropy_with_logits, lambda n: (randn(n, 3), torch.rand(n, 3))),
    "index_reduce": (
        lambda x, at, y: x.index_reduce(0, at, y, "mean"), lambda n: (randn(n, 3), whole(n, 4), randn(4, 3)),
    ),
    "scatter_reduce": (
        lambda x, at, y: x.scatter_reduce(0, at, y, "amax"), lambda n: (randn(n, 3), whole(n, n, 3), randn(n, 3)),
    ),
    # out= and in-place
    "gather to out": (
        lambda x, at, out: torch.gather(x, 0, at, out=out), lambda n: (randn(n, 3), whole(n, n, 3), randn(n, 3)),
    ),
    "topk to out": (
        lambda x, a, b: tuple(torch.topk(x, 2, out=(a, b))), lambda n: (randn(n, n), randn(n, 2), whole(2, n, 2)),
    ),
    "sort to out": (
        lambda x, a, b: tuple(torch.sort(x, out=(a, b))), lambda n: (randn(n, n), randn(n, n), whole(2, n, n)),
    ),
    "avg_pool2d to out": (
        lambda x, out: torch.ops.aten.avg_pool2d.out(x, [2, 2], out=out),
        lambda n: (randn(1, 2, 2 * n, 2 * n), randn(1, 2, n, n)),
    ),
    "lcm in place": (lambda x, y: x.lcm_(y), lambda n: (1 + whole(9, n), 1 + whole(9, n))),
    # layouts
    "flip": (lambda x: x.flip(0), lambda n: (randn(n, 3),)),
    "roll": (lambda x: x.roll(1, 0), lambda n: (randn(n, 3),)),
    "polar": (torch.polar, lambda n: (randn(n, 3), randn(n, 3))),
    "bicubic, gradient": (
        lambda g: torch.ops.aten.upsample_bicubic2d_backward(g, [6, 6], [1, g.shape[1], 4, 4], False),
        lambda n: (randn(1, n, 6, 6).contiguous(memory_format=torch.channels_last),),
    ),
    # tensors without elements
    "empty add": (torch.add, lambda n: (randn(0, n), randn(0, n))),
    "empty channels_last": (
        lambda x: x + 1, lambda n: (torch.empty(0, 3, n, n).to(memory_format=torch.channels_last),),
    ),
    "empty sum": (lambda x: x.sum(0), lambda n: (randn(0, n),)),
    "empty fill": (lambda x: x.fill_(1), lambda n: (randn(n, 0),)),
    "empty clamp": (lambda x: x.clamp(-1, 1), lambda n: (randn(n, 0),)),
    "empty mm": (torch.mm, lambda n: (randn(n, 0), randn(0, n))),
    "empty cat": (lambda x, y: torch.cat((x, y), -1), lambda n: (randn(0), randn(n, 3))),
    "empty embedding": (F.embedding, lambda n: (whole(5, 0, n), randn(5, 3))),
    # lazily conjugated and negated
    "conjugate multiplied": (lambda x, y: x.conj() * y, lambda n: (numbers(n, n), numbers(n, n))),
    "conjugate copied": (lambda x, y: y.copy_(x.conj()), lambda n: (numbers(n), numbers(n))),
    "conjugate to out": (lambda x, y: torch.conj_physical(x, out=y), lambda n: (numbers(n), numbers(n))),
    "negative imaginary part": (lambda x: x.conj().imag @ x.real, lambda n: (numbers(n, n),)),
}  # fmt: skip

SEEN = (5, 6, 8, 12, 7, 20)
NEW = (10, 9, 13, 22)


@pytest.mark.parametrize("name", CASES)
def test_classes_have_dynamic_shape_plans(name: str) -> None:
    function, make = CASES[name]
    with plans_from_the_start():
        for n in SEEN:
            compare(function, make(n), f"{name} at {n}")
        assert exact() == {}
        before = planner_calls()
        for n in NEW:
            compare(function, make(n), f"{name} at {n}")
        assert planner_calls() == before
        plans.set_mode("check")
        for n in (*SEEN, *NEW, 17):
            compare(function, make(n), f"{name}, checked at {n}")


def test_plans_distinguish_which_sizes_are_0() -> None:
    """A plan for tensors without rows is not valid for tensors without columns."""
    functions: list[Function] = [
        lambda x: x.amax(1), lambda x: x.argmax(1), lambda x: x.median(1).values, lambda x: x.sum(1),
        lambda x: x.softmax(1), lambda x: x @ x.t(), lambda x: x.view(0, 7), lambda x: x + x[:, :1],
        lambda x: torch.cat((x, x.new_zeros(0), x)), lambda x: x.sort(1).values, lambda x: x.unfold(1, 2, 1) + 1,
    ]  # fmt: skip
    shapes = [(0, 5), (0, 6), (0, 7), (5, 0), (6, 0), (0, 0), (4, 6), (0, 8), (0, 1), (1, 0), (5, 7), (7, 0)]
    for function in functions:
        with plans_from_the_start():
            for shape in shapes:
                compare(function, (randn(*shape),), f"{shape}")


def test_class_keeps_its_plan_after_empty_tensors() -> None:
    with plans_from_the_start():
        for shape in ((0, 4), (0, 5), (0, 6), (3, 4), (5, 4), (0, 7), (6, 8), (0, 9), (9, 4)):
            compare(lambda x: x * 2, (randn(*shape),), f"{shape}")
        found = _C.plan_counts()["aten::mul.Tensor"]
        assert found["reasons_for_exact"] == []
        assert found["planner_calls"] == 3  # two without elements, and the first with elements


def test_operators_within_unplannable_calls_have_dynamic_shape_plans() -> None:
    """`unique` reads the number of distinct elements from memory and has no plan. The operators that it calls have."""
    with plans_from_the_start():
        for n in (5, 6, 8, 12, 7, 20):
            compare(lambda x: x.unique(return_counts=True), (whole(4, n),), f"{n} elements")
        assert set(exact()) == {"aten::_unique2"}
        assert plans.stats()["aten::sort.stable"]["dynamic_shape_replays"] > 0
        assert plans.stats()["aten::_unique2"]["traces"] == 0


# --- models


class Residual(nn.Module):
    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(channels, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider), nn.ReLU(inplace=True),
            nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(channels, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.shortcut(x))


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
            Residual(4, 8, 2), Residual(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )  # fmt: skip

    def loss(self, n: int) -> torch.Tensor:
        return F.cross_entropy(self(randn(2 + n % 3, 3, 30 + n, 34 + 2 * n).to(DEVICE)), whole(5, 2 + n % 3).to(DEVICE))


class Text(nn.Module):
    """A decoder with masks, norms and attention. It needs no positional encoding here."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, 0.1, "gelu", batch_first=True, norm_first=True), 2,
            enable_nested_tensor=False,
        )  # fmt: skip
        self.head = nn.Linear(16, 20)

    def loss(self, n: int) -> torch.Tensor:
        text = whole(20, 2 + n % 3, 6 + n).to(DEVICE)
        mask = nn.Transformer.generate_square_subsequent_mask(5 + n, device=DEVICE)
        found = self.head(self.layers(self.tokens(text[:, :-1]), mask=mask, is_causal=True))
        return F.cross_entropy(found.flatten(0, 1), text[:, 1:].flatten(), ignore_index=0)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8, padding_idx=0)
        self.cells = nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 20)

    def loss(self, n: int) -> torch.Tensor:
        text = whole(20, 2 + n % 3, 4 + n).to(DEVICE)
        return F.cross_entropy(self.head(self.cells(self.tokens(text))[0]).flatten(0, 1), text.flatten())


@pytest.mark.parametrize("model", [Images, Text, Sequence])
def test_all_calls_of_models_have_dynamic_shape_plans(model: Callable[[], Any]) -> None:
    network = model().to(DEVICE)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def step(n: int) -> None:
        optimizer.zero_grad()
        network.loss(n).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()

    with plans_from_the_start():
        for n in (1, 3, 5, 6, 8, 10):
            network.train()
            step(n)
            network.eval()
            with torch.no_grad():
                network.loss(n).item()
        assert exact() == {}
        found = plans.total()
        assert found["classes"] == found["dynamic_shape_classes"] > 12


def test_class_has_plans_for_many_layouts() -> None:
    """Planners see the order of strides, which differs for each permutation of the dimensions."""
    orders = list(itertools.permutations(range(4)))

    def call_all(n: int, orders: Iterable[tuple[int, ...]]) -> None:
        x = randn(n, n + 1, n + 2, n + 3)
        for order in orders:
            compare(lambda x, y: x + y, (x.permute(order), randn(*x.permute(order).shape)), f"{order}, {n}")

    with plans_from_the_start():
        # On SIMT targets tiles depend on the sizes: smaller and larger tensors belong to other classes.
        seen, new = ((9, 10, 12), (11,)) if launch.target_of(0).simt else ((2, 3, 4, 5), (7, 6, 8))
        for n in seen:
            call_all(n, orders)
        before = planner_calls()
        for n in new:
            call_all(n, reversed(orders) if n % 2 else orders[::5])
        assert planner_calls() == before
        found = plans.stats()["aten::add.Tensor"]
        assert found["traces"] < 64
