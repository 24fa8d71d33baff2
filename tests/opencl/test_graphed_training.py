"""Graph features that PyTorch's tests of CUDA graphs cover, on bp.

Random distributions, memory pools, gradient scaling, dropout, recurrent layers, checkpointing and graphed callables.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE
from torch import nn
from torch.utils.checkpoint import checkpoint

DISTRIBUTIONS: dict[str, Callable[[torch.Tensor, torch.Generator | None], object]] = {
    "bernoulli": lambda x, g: torch.bernoulli(x * 0 + 0.3, generator=g),
    "bernoulli_": lambda x, g: x.bernoulli_(0.3, generator=g),
    "cauchy_": lambda x, g: x.cauchy_(generator=g),
    "exponential_": lambda x, g: x.exponential_(generator=g),
    "geometric_": lambda x, g: x.geometric_(0.3, generator=g),
    "log_normal_": lambda x, g: x.log_normal_(generator=g),
    "normal_": lambda x, g: x.normal_(2.0, 3.0, generator=g),
    "normal": lambda x, g: torch.normal(x * 0, 1.0, generator=g),
    "uniform_": lambda x, g: x.uniform_(-1, 1, generator=g),
    "random_": lambda x, g: x.random_(0, 1000, generator=g),
    "rand": lambda x, g: torch.rand(300, device=x.device, generator=g),
    "randn": lambda x, g: torch.randn(300, device=x.device, generator=g),
    "randint": lambda x, g: torch.randint(0, 9, (300,), device=x.device, generator=g),
}


@pytest.mark.parametrize("given", [False, True], ids=["the default generator", "another generator"])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_replays_draw_the_same_random_numbers_as_eager_calls(name: str, given: bool) -> None:
    draw = DISTRIBUTIONS[name]
    generator = torch.Generator(DEVICE) if given else None
    x, y = torch.zeros(300, device=DEVICE), torch.zeros(300, device=DEVICE)
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        one, other = draw(x, generator), draw(y, generator)

    def seed() -> None:
        generator.manual_seed(11) if generator is not None else torch.manual_seed(11)

    seed()
    replays = []
    for _ in range(3):
        graph.replay()
        replays += [one.cpu(), other.cpu()]
    between = torch.rand(5, device=DEVICE, generator=generator).cpu()
    seed()
    expected = [draw(torch.zeros(300, device=DEVICE), generator).cpu() for _ in range(6)]
    for found, right in zip(replays, expected, strict=True):
        assert torch.equal(found, right)
    assert torch.equal(torch.rand(5, device=DEVICE, generator=generator).cpu(), between)


def test_three_graphs_share_one_pool() -> None:
    size = 1 << 16
    start = torch.ones(size, device=DEVICE)
    graphs = [torch.bp.Graph() for _ in range(3)]
    with torch.bp.graph(graphs[0]):
        a, b = start + 1, start + 2
    with torch.bp.graph(graphs[1], pool=graphs[0].pool()):
        c = a + 2
    with torch.bp.graph(graphs[2], pool=graphs[0].pool()):
        d = b + c
    for value in (1, 5, -3):
        start.fill_(value)
        for graph in graphs:
            graph.replay()
        assert d.unique().tolist() == [2 * value + 5]


def test_results_outlive_their_graph() -> None:
    kept = []
    for value in range(4):
        graph = torch.bp.Graph()
        x = torch.full((1 << 15,), float(value), device=DEVICE)
        with torch.bp.graph(graph):
            y = x * 10
        graph.replay()
        kept.append(y)
        del graph, x, y
        gc.collect()
        torch.bp.empty_cache()
    assert [one.unique().tolist() for one in kept] == [[0], [10], [20], [30]]
    assert torch.full((1 << 15,), 9.0, device=DEVICE).sum().item() == 9 * (1 << 15)
    assert [one.unique().tolist() for one in kept] == [[0], [10], [20], [30]]


def test_reset_graphs_release_their_memory() -> None:
    x = torch.ones(1 << 18, device=DEVICE)

    def once() -> int:
        graph = torch.bp.Graph()
        with torch.bp.graph(graph):
            y = (x + 1).sin() * 2
        graph.replay()
        torch.bp.synchronize()
        del y
        graph.reset()
        gc.collect()
        torch.bp.empty_cache()
        return torch.bp.memory_reserved(DEVICE)

    first = once()
    assert {once() for _ in range(5)} == {first}


def training(layers: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(seed)
    reference, ours = layers(), layers()
    ours.load_state_dict(reference.state_dict())
    return reference, ours.to(DEVICE)


def warm(step: Callable[[], object], times: int = 3) -> None:
    stream = torch.bp.Stream()
    stream.wait_stream(torch.bp.current_stream())
    with stream:
        for _ in range(times):
            step()
    torch.bp.current_stream().wait_stream(stream)


def test_gradient_scaling() -> None:
    """The graph holds forward and backward. The scaler's step reads a value, so it runs outside, and skips one step."""
    reference, model = training(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1)))
    scaler = torch.amp.GradScaler("bp", init_scale=64.0, growth_interval=3)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    x, scale = torch.randn(16, 6, device=DEVICE), torch.ones((), device=DEVICE)

    def forward_and_backward() -> torch.Tensor:
        loss = model(x).square().mean() * scale
        scaler.scale(loss).backward()
        return loss

    warm(forward_and_backward)
    ours.zero_grad(set_to_none=True)
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        forward_and_backward()
    scales = []
    for number, batch in enumerate(torch.randn(8, 16, 6)):
        x.copy_(batch)
        scale.fill_(torch.inf if number == 2 else 1.0)
        graph.replay()
        scaler.step(ours)
        scaler.update()
        scales.append(scaler.get_scale())
        if number != 2:
            plain.zero_grad()
            reference(batch).square().mean().backward()
            plain.step()
    assert scales == [64, 64, 32, 32, 32, 64, 64, 64]
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers_with_dropout(kind: str) -> None:
    torch.manual_seed(3)
    model = getattr(nn, kind)(8, 8, 2, dropout=0.5).to(DEVICE)
    x = torch.randn(5, 3, 8, device=DEVICE)
    model(x)
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        y = model(x)[0]
    graph.replay()
    first = y.cpu()
    graph.replay()
    assert not torch.equal(y.cpu(), first)
    model.eval()
    reference = copy.deepcopy(model).cpu()  # not model.cpu(): the graph reads the parameters at their addresses
    with torch.bp.graph(quiet := torch.bp.Graph()):
        z = model(x)[0]
    for batch in torch.randn(3, 5, 3, 8):
        x.copy_(batch)
        quiet.replay()
        torch.testing.assert_close(z.cpu(), reference(batch)[0], atol=1e-4, rtol=1e-4)


def test_checkpointing() -> None:
    reference, model = training(lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)))
    x = torch.randn(4, 6, device=DEVICE, requires_grad=True)

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = checkpoint(model, x, use_reentrant=False, preserve_rng_state=False).square().sum()
        loss.backward()
        return loss

    warm(step)
    x.grad = None
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        step()
    for batch in torch.randn(3, 4, 6):
        with torch.no_grad():
            x.copy_(batch)
            x.grad.zero_()
        graph.replay()
        reference.zero_grad()
        given = batch.requires_grad_()
        reference(given).square().sum().backward()
        torch.testing.assert_close(x.grad.cpu(), given.grad, atol=1e-4, rtol=1e-4)
        for one, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad, atol=1e-4, rtol=1e-4)


def test_gradients_accumulate_over_replays() -> None:
    w = torch.ones(3, device=DEVICE, requires_grad=True)
    x = torch.ones(3, device=DEVICE)
    warm(lambda: (w * x).sum().backward())
    w.grad.zero_()
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        (w * x).sum().backward()
    total = torch.zeros(3)
    for batch in torch.randn(4, 3):
        x.copy_(batch)
        graph.replay()
        total += batch
    torch.testing.assert_close(w.grad.cpu(), total)


class Mixed(nn.Module):
    """Takes a tuple and a tensor, and returns a dictionary. One of its results requires no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], shift: torch.Tensor) -> dict[str, Any]:
        a, b = pair
        return {"sum": self.first(a) + self.second(b) + shift, "sign": (a > 0).float(), "list": [a * 2]}


def test_callables_with_structures_of_tensors() -> None:
    reference, model = training(Mixed)

    def inputs(seed: int, device: str) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        a, b = (torch.randn(6, size, generator=generator).to(device).requires_grad_() for size in (4, 5))
        return (a, b), torch.randn(3, generator=generator).to(device)

    graphed = torch.bp.make_graphed_callables(model, inputs(0, DEVICE))
    for seed in (1, 2):
        results = []
        for function, device in ((graphed, DEVICE), (reference, "cpu")):
            function.zero_grad(set_to_none=False)
            given = inputs(seed, device)
            out = function(*given)
            (out["sum"].square().sum() + out["list"][0].sum()).backward()
            gradients = [one.grad.cpu() for one in (*given[0], *function.parameters())]
            results.append([out["sum"].detach().cpu(), out["sign"].cpu(), *gradients])
            assert not out["sign"].requires_grad
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_callables_without_gradients_or_parameters() -> None:
    x = torch.randn(4, 3, device=DEVICE)
    functional = torch.bp.make_graphed_callables(F.relu, (x.clone(),))
    frozen = torch.bp.make_graphed_callables(nn.Linear(3, 2).requires_grad_(False).to(DEVICE), (x.clone(),))
    for batch in torch.randn(3, 4, 3):
        given = batch.to(DEVICE)
        assert torch.equal(functional(given).cpu(), batch.relu())
        out = frozen(given)
        assert not out.requires_grad
        torch.testing.assert_close(out.cpu(), F.linear(batch, frozen.weight.cpu(), frozen.bias.cpu()))


class Temporaries(nn.Linear):
    """Its forward and its backward graph have tensors that are freed during the capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = 1 + (self.weight.exp() + self.weight.sin()).cos().sum()
        return super().forward(x).tanh().exp() * scale


@pytest.mark.parametrize("layer", [nn.Linear, Temporaries])
@pytest.mark.parametrize(("layers", "together"), [(1, True), (2, True), (2, False)])
def test_gradients_of_callables_accumulate(layer: type[nn.Linear], layers: int, together: bool) -> None:
    """Also if another callable is replayed in between, which has temporaries in the memory of the gradients."""
    reference, model = training(lambda: nn.ModuleList(layer(4, 4) for _ in range(layers)))
    samples = tuple((torch.randn(5, 4, device=DEVICE),) for _ in model)
    if together:
        graphed = torch.bp.make_graphed_callables(tuple(model), samples)
    else:
        pool = torch.bp.graph_pool_handle()
        graphed = [
            torch.bp.make_graphed_callables(one, given, pool=pool) for one, given in zip(model, samples, strict=True)
        ]
    for to_none in (True, False):
        model.zero_grad(set_to_none=to_none)
        reference.zero_grad(set_to_none=to_none)
        for batch in torch.randn(3, 5, 4):
            for ours, plain in [*zip(graphed, reference, strict=True), *zip(graphed, reference, strict=True)]:
                ours(batch.to(DEVICE)).square().sum().backward()
                plain(batch).square().sum().backward()
            for one, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(one.grad.cpu(), other.grad, atol=1e-4, rtol=1e-4)


def test_gradients_of_callables_are_not_copied_in_a_step() -> None:
    """If they do not accumulate, autograd gets the tensors that the graphs write, which stay at their addresses."""
    layers = [Temporaries(4, 4).to(DEVICE) for _ in range(3)]
    samples = tuple((torch.randn(5, 4, device=DEVICE, requires_grad=True),) for _ in layers)
    first, second, third = torch.bp.make_graphed_callables(tuple(layers), samples)
    addresses, kept = set(), []
    for _ in range(3):
        third(second(first(torch.randn(5, 4, device=DEVICE)))).sum().backward()
        parameters = [one for layer in layers for one in layer.parameters()]
        addresses.add(tuple(one.grad.data_ptr() for one in parameters if one.grad is not None))
        for one in parameters:
            one.grad = None
        kept.append(torch.empty(64, device=DEVICE))  # else copies could have the same addresses, too
    assert len(addresses) == 1


def test_callables_with_dropout_draw_new_numbers_at_each_call() -> None:
    model = nn.Sequential(nn.Linear(50, 50), nn.Dropout(0.5)).to(DEVICE)
    x = torch.ones(4, 50, device=DEVICE)
    graphed = torch.bp.make_graphed_callables(model, (x.clone(),))
    first, second = graphed(x).clone(), graphed(x).clone()
    assert not torch.equal(first.cpu(), second.cpu())
    torch.manual_seed(8)
    again = graphed(x).clone()
    torch.manual_seed(8)
    assert torch.equal(graphed(x).cpu(), again.cpu())
    graphed.eval()
    torch.testing.assert_close(graphed(x).cpu(), F.linear(x.cpu(), model[0].weight.cpu(), model[0].bias.cpu()))
