"""Compiled autograd on bp: gradients, hooks and accumulation as in eager PyTorch on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.compiled_autograd.reset()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3 * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * 3 * x * x * ctx.factor, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 8), nn.LayerNorm(8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.first, self.norm(self.embed(x)), use_reentrant=False)
        attended = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        return self.second(Cube.apply(attended, 0.5)).square().mean()


def add_hooks(model: Model, calls: list[Any]) -> None:
    model.first.weight.register_hook(lambda gradient: gradient * 2)
    model.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    model.second.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.norm()))


def with_eager_forward(model: Model, x: Tensor, backend: str) -> None:
    loss = model(x)
    with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend)):
        loss.backward()


def with_compiled_forward(model: Model, x: Tensor, backend: str) -> None:
    loss = torch.compile(model, backend=backend)(x)
    with torch._dynamo.compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend)):
        loss.backward()


def with_the_setting(model: Model, x: Tensor, backend: str) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda model, x: model(x).backward(), backend=backend)(model, x)


@pytest.mark.parametrize(
    ("train", "backend"),
    [(with_eager_forward, "aot_eager"), (with_compiled_forward, "inductor"), (with_the_setting, "aot_eager")],
)
@pytest.mark.slow
def test_training(train: Callable[[Model, Tensor, str], None], backend: str) -> None:
    reference = Model()
    model = copy.deepcopy(reference).to("bp")
    calls: list[Any] = []
    expected_calls: list[Any] = []
    add_hooks(reference, expected_calls)
    add_hooks(model, calls)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):  # gradients accumulate
        x = torch.randint(0, 7, (2, 5))
        reference(x).backward()
        train(model, x.to("bp"), backend)
        found, expected = ({name: one.grad for name, one in of.named_parameters()} for of in (model, reference))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, check_device=False)
    torch.testing.assert_close(calls, expected_calls, rtol=1e-4, atol=1e-5, check_device=False)
    assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] > 0
