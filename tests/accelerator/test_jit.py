"""torch.jit, torch.compile's eager backends, torch.export and make_fx on bp."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).relu()
        return torch.cat([y, y.sum(1, keepdim=True)], 1)


def scripted_function(x: Tensor, steps: int) -> Tensor:
    total = torch.zeros_like(x)
    for step in range(steps):
        if step % 2 == 0:
            total += x * step
        else:
            total = total - torch.ones(x.size(), device=x.device)
    return total


@pytest.mark.parametrize("how", ["trace", "script"])
def test_modules(how: str) -> None:
    model = Net().to("bp")
    x = torch.randn(2, 4, device="bp")
    compiled = torch.jit.trace(model, x) if how == "trace" else torch.jit.script(model)
    for _ in range(3):  # the profiling executor changes the graph after the first runs
        result = compiled(x)
        assert result.device.type == "bp"
        torch.testing.assert_close(result, model(x))
    result.sum().backward()
    (expected,) = torch.autograd.grad(model(x).sum(), model.layer.weight)
    torch.testing.assert_close(model.layer.weight.grad, expected)


def test_scripted_functions() -> None:
    compiled = torch.jit.script(scripted_function)
    x = torch.arange(3.0)
    for steps in (1, 4, 4, 4):
        result = compiled(x.to("bp"), steps)
        assert result.device.type == "bp"
        assert torch.equal(result.cpu(), scripted_function(x, steps))


def test_devices_inside_scripts() -> None:
    def make(like: Tensor) -> Tensor:
        return torch.ones(2, device=torch.device("bp:1")).to(like.device) + like

    assert torch.jit.script(make)(torch.ones(2, device="bp:0")).tolist() == [2, 2]


def test_saved_modules_move_between_devices() -> None:
    model = torch.jit.script(Net().to("bp"))
    buffer = io.BytesIO()
    torch.jit.save(model, buffer)
    x = torch.randn(2, 4)
    for location in (None, "cpu", "bp:1"):
        buffer.seek(0)
        loaded = torch.jit.load(buffer, map_location=location)
        device = torch.device(location or "bp:0")
        assert next(loaded.parameters()).device == device
        torch.testing.assert_close(loaded(x.to(device)).cpu(), model(x.to("bp")).cpu())
    assert next(model.to("bp:2").parameters()).device == torch.device("bp:2")


def test_freezing_and_tracing_of_random_operators() -> None:
    frozen = torch.jit.freeze(torch.jit.script(Net().to("bp").eval()))
    x = torch.randn(2, 4, device="bp")
    assert frozen(x).device.type == "bp"
    traced = torch.jit.trace(lambda x: nn.functional.dropout(x, 0.5), (x,), check_trace=False)
    torch.manual_seed(3)
    first = traced(x)
    torch.manual_seed(3)
    assert torch.equal(first, traced(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_with_the_eager_backends(backend: str) -> None:
    model = Net().to("bp")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 4, device="bp", requires_grad=True)
    result = compiled(x)
    assert result.device.type == "bp"
    torch.testing.assert_close(result, model(x))
    (gradient,) = torch.autograd.grad(result.sum(), x)
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(gradient, expected)


def test_export() -> None:
    model = Net().to("bp")
    x = torch.randn(2, 4, device="bp")
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def test_fake_tensors_on_bp() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.accelerator.memory_allocated()
    with FakeTensorMode():
        x = torch.empty(1 << 40, device="bp")  # 4 TiB, which are not allocated
        y = (x + 1).view(2, -1).sum(1)
        assert y.device == torch.device("bp:0")
        assert y.shape == (2,)
    assert torch.accelerator.memory_allocated() == before


def test_make_fx() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.randn(3, device="bp")
    graph = make_fx(lambda x: torch.softmax(x, 0) + torch.ones(3, device=x.device))(x)
    assert "device(type='bp', index=0)" in graph.code.replace('"', "'")
    torch.testing.assert_close(graph(x), torch.softmax(x, 0) + 1)
