"""Graphs: a replay runs the captured commands with the current values of the inputs and with new random numbers."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE
from torch import nn

from torch_backplane.tuning import choosing

Graphs = pytest.mark.parametrize("kind", ["torch.bp", "torch.accelerator"])


def made(kind: str, **options: Any) -> Any:
    if kind == "torch.accelerator" and not hasattr(torch.accelerator, "Graph"):
        pytest.skip("torch 2.12 and later have torch.accelerator.Graph")
    return (torch.bp.Graph if kind == "torch.bp" else torch.accelerator.Graph)(**options)


@contextmanager
def captured(graph: Any) -> Iterator[None]:
    """Captures on a side stream, after all pending work has completed."""
    stream = torch.bp.Stream()
    torch.bp.synchronize()
    with stream:
        graph.capture_begin()
        try:
            yield
        finally:
            graph.capture_end()


@Graphs
def test_commands_run_at_each_replay_and_not_at_capture(kind: str) -> None:
    x = torch.zeros(5, device=DEVICE)
    graph = made(kind)
    with captured(graph):
        x += 1
        y = (x * 2).exp().sum()
    assert x.tolist() == [0] * 5
    for round_ in range(1, 4):
        graph.replay()
        torch.testing.assert_close(y.cpu(), torch.full((5,), 2.0 * round_).exp().sum())
    x.fill_(-7)
    graph.replay()
    assert x.tolist() == [-6] * 5
    torch.testing.assert_close(y.cpu(), torch.full((5,), -12.0).exp().sum())


OPERATORS: dict[str, Callable[[torch.Tensor], object]] = {
    "elementwise": lambda x: torch.where(x > 0, x.sin(), x.exp()) + 1.5,
    "in place": lambda x: x.clone().mul_(3).add_(x, alpha=0.5).clamp_(-1, 1),
    "reductions": lambda x: (x.sum(0), x.var(1), x.max(), x.argmax(1), torch.logsumexp(x, 1)),
    "product": lambda x: x @ x.T,
    "linear": lambda x: F.linear(x, x, x[:, 0]),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "convolution": lambda x: F.conv2d(x[None, None], x[:3, :9].reshape(3, 1, 3, 3)),
    "pooling": lambda x: F.max_pool2d(x[None, None], 2),
    "sort": lambda x: x.sort(1),
    "indexing": lambda x: (x[x.argsort(0)[0] % 8], x.index_add(0, x[:1].argmax(1) % 8, x[:1])),
    "scan": lambda x: x.cumsum(1),
    "views": lambda x: x.T.reshape(-1)[3:].unfold(0, 4, 2).contiguous(),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "other dtypes": lambda x: (x.half() * 2, x.long(), x > 0, x.bfloat16().sum()),
    "transform": lambda x: torch.fft.rfft(x).abs(),
    "factories": lambda x: x + torch.arange(x.shape[1], device=x.device) + torch.full_like(x, 2),
    "lists": lambda x: torch._foreach_add([x, x[0]], 2),
    "lazy copies": lambda x: torch._lazy_clone(x).add_(1),
}


@pytest.mark.parametrize("known", [True, False], ids=["planned before", "planned in the capture"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, known: bool) -> None:
    """Replays use other values each time. The shapes have a plan before the capture, or do not."""
    function = OPERATORS[name]
    numbers = torch.randn(3, 8, 9 + known)
    x = numbers[0].to(DEVICE)
    if known:
        function(x)
    graph = torch.bp.Graph()
    with captured(graph):
        found = function(x)
    for one in (*numbers, numbers[0]):
        x.copy_(one)
        graph.replay()
        torch.testing.assert_close(
            torch.utils._pytree.tree_map(torch.Tensor.cpu, found), function(one), atol=2e-3, rtol=2e-3
        )


def test_replays_draw_new_random_numbers_that_repeat_with_the_seed() -> None:
    x = torch.ones(1000, device=DEVICE)
    graph = torch.bp.Graph()
    with captured(graph):
        a, b = torch.rand(1000, device=DEVICE), torch.randn(1000, device=DEVICE)
        c = F.dropout(x, 0.5)

    def drawn() -> list[torch.Tensor]:
        graph.replay()
        return [one.cpu() for one in (a, b, c)]

    torch.manual_seed(5)
    first, second = drawn(), drawn()
    torch.manual_seed(5)
    again = drawn()
    eager_beyond = torch.rand(1000, device=DEVICE).cpu()
    for one, other, repeated in zip(first, second, again, strict=True):
        assert not torch.equal(one, other)
        assert torch.equal(one, repeated)
    torch.manual_seed(5)
    eager = [torch.rand(1000, device=DEVICE), torch.randn(1000, device=DEVICE), F.dropout(x, 0.5)]
    for one, alone in zip(first, eager, strict=True):
        assert torch.equal(one, alone.cpu())
    assert torch.equal(torch.rand(1000, device=DEVICE).cpu(), eager_beyond)  # a replay advances it as far


def test_explicit_generators() -> None:
    generator = torch.Generator(DEVICE).manual_seed(3)
    x = torch.empty(100, device=DEVICE)
    graph = torch.bp.Graph()
    with captured(graph):
        x.normal_(generator=generator)
    state = generator.get_state()
    graph.replay()
    first = x.cpu()
    graph.replay()
    assert not torch.equal(x.cpu(), first)
    generator.set_state(state)
    graph.replay()
    assert torch.equal(x.cpu(), first)


def test_streams_fork_and_join() -> None:
    x = torch.zeros(1000, device=DEVICE)
    graph = torch.bp.Graph()
    other = torch.bp.Stream()
    with captured(graph):
        x += 1
        other.wait_stream(torch.bp.current_stream())
        with other:
            assert torch.bp.is_current_stream_capturing()
            y = x * 10
        z = x * 100
        torch.bp.current_stream().wait_stream(other)
        total = y + z
    assert not torch.bp.is_current_stream_capturing()
    for round_ in (1, 2):
        graph.replay()
        assert total.tolist() == [110 * round_] * 1000
    with other:  # no longer captured
        assert (x + 1).tolist() == [3] * 1000


def test_unjoined_stream_is_an_error() -> None:
    x = torch.zeros(10, device=DEVICE)
    torch.bp.synchronize()  # another stream reads x below
    graph, other = torch.bp.Graph(), torch.bp.Stream()
    with torch.bp.Stream():
        graph.capture_begin()
        other.wait_stream(torch.bp.current_stream())
        with other:
            x + 1
        with pytest.raises(RuntimeError, match="has not waited for all of its work"):
            graph.capture_end()
    with other:
        assert (x + 1).tolist() == [1] * 10
    with captured(graph):
        x += 1
    graph.replay()
    assert x.tolist() == [1] * 10


def test_replays_are_ordered_with_other_work_of_their_stream() -> None:
    x = torch.zeros(100, device=DEVICE)
    graph = torch.bp.Graph()
    with captured(graph):
        x.mul_(2).add_(1)
    x.add_(1)
    graph.replay()
    x.add_(10)
    graph.replay()
    assert x.tolist() == [27] * 100
    stream = torch.bp.Stream()
    stream.wait_stream(torch.bp.current_stream())
    with stream:
        graph.replay()
        x.add_(1)
        graph.replay()
    torch.bp.current_stream().wait_stream(stream)
    assert x.tolist() == [113] * 100


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "item": (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
    "nonzero": (lambda x: x.nonzero(), "aten::nonzero"),
    "masked_select": (lambda x: x.masked_select(x > 0), "aten::masked_select"),
    "to the CPU": (lambda x: x.cpu(), "aten::_copy_from"),
    "from the CPU": (lambda x: torch.ones(3).to(x.device), "aten::_copy_from"),
    "an operator on the CPU": (lambda x: torch.linalg.eigvalsh(x[:, :8]), "aten::_linalg_eigh"),
    "synchronize": (lambda x: torch.bp.synchronize(), "this call"),
    "synchronize the stream": (lambda x: torch.bp.current_stream().synchronize(), "this call"),
    "query": (lambda x: torch.bp.current_stream().query(), "this call"),
    "an event": (lambda x: torch.bp.current_stream().record_event().synchronize(), "this call"),
    "equal": (lambda x: torch.equal(x, x + 1), "aten::equal"),
    "seeding": (lambda x: torch.manual_seed(3), "this call"),
    "a generator's state": (lambda x: torch.bp.get_rng_state(), "this call"),
    "setting a state": (lambda x: torch.Generator(x.device).set_state(torch.zeros(16, dtype=torch.uint8)), "this call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_operator_and_leave_the_stream_usable(name: str) -> None:
    function, operator = REFUSED[name]
    x = torch.randn(8, 9, device=DEVICE)
    graph = torch.bp.Graph()
    stream = torch.bp.Stream()
    torch.bp.synchronize()
    with stream:
        graph.capture_begin()
        x + 1
        with pytest.raises(RuntimeError, match=f"{operator}.* cannot be captured in a graph: it "):
            function(x)
        with pytest.raises(RuntimeError, match="the capture has failed"):
            x + 1
        with pytest.raises(RuntimeError, match=f"no graph was captured because the capture failed: {operator}"):
            graph.capture_end()
        function(x)
        torch.testing.assert_close((x + 1).cpu(), x.cpu() + 1)
        with pytest.raises(RuntimeError, match="has not been"):
            graph.replay()
    with captured(graph):  # the same graph again
        y = x + 2
    graph.replay()
    torch.testing.assert_close(y.cpu(), x.cpu() + 2)


def test_invalid_uses_are_errors() -> None:
    x = torch.zeros(3, device=DEVICE)
    graph = torch.bp.Graph()
    for call in (graph.replay, graph.instantiate, graph.capture_end, graph.pool):
        with pytest.raises(RuntimeError, match=r"graph"):
            call()
    with pytest.raises(RuntimeError, match="on a non-default stream"):
        graph.capture_begin()
    with pytest.raises(ValueError, match="'global', 'thread_local' or 'relaxed', but got 'strict'"):
        torch.bp.Graph().capture_begin(capture_error_mode="strict")
    with torch.bp.Stream():
        graph.capture_begin()
        x += 1
        with pytest.raises(RuntimeError, match="is being captured already"):
            graph.capture_begin()
        with pytest.raises(RuntimeError, match="captures cannot be nested"):
            torch.bp.Graph().capture_begin()
        with pytest.raises(RuntimeError, match="call capture_end"):
            graph.replay()
        with pytest.raises(RuntimeError, match="cannot be reset while"):
            graph.reset()
        graph.capture_end()
        with pytest.raises(RuntimeError, match="has been captured already"):
            graph.capture_begin()
    with pytest.raises(RuntimeError, match="enable_debug_mode"):
        graph.debug_dump("nowhere")
    graph.reset()
    with pytest.raises(RuntimeError, match="has not been"):
        graph.replay()


def test_replay_within_a_capture_is_an_error() -> None:
    x = torch.zeros(3, device=DEVICE)
    first, second = torch.bp.Graph(), torch.bp.Graph()
    with captured(first):
        x += 1
    with pytest.raises(RuntimeError, match="it replays another graph"), captured(second):
        first.replay()
    first.replay()
    assert x.tolist() == [1] * 3


def test_events_cannot_cross_the_bounds_of_a_capture() -> None:
    x = torch.zeros(3, device=DEVICE)
    graph = torch.bp.Graph()
    before = torch.bp.current_stream().record_event()
    with pytest.raises(RuntimeError, match="recorded outside of the capture"), captured(graph):
        torch.bp.current_stream().wait_event(before)
    with captured(graph):
        x += 1
        inside = torch.bp.current_stream().record_event()
    with pytest.raises(RuntimeError, match="that has ended"):
        torch.bp.current_stream().wait_event(inside)
    inside.record()
    inside.synchronize()


def test_capture_error_modes_control_synchronization_in_other_threads() -> None:
    x = torch.zeros(3, device=DEVICE)

    def waits_elsewhere() -> Exception | None:
        found: list[Exception] = []

        def wait() -> None:
            try:
                torch.bp.synchronize(DEVICE)
            except RuntimeError as error:
                found.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        return found[0] if found else None

    for mode, allowed in (("thread_local", True), ("relaxed", True), ("global", False)):
        graph = torch.bp.Graph()
        with torch.bp.Stream():
            graph.capture_begin(capture_error_mode=mode)
            x += 1
            error = waits_elsewhere()
            assert (error is None) == allowed
            if allowed:
                graph.capture_end()
            else:
                with pytest.raises(RuntimeError, match="the capture failed"):
                    graph.capture_end()


def test_graph_memory_is_private_until_reset() -> None:
    def reserved() -> int:
        gc.collect()
        torch.bp.empty_cache()
        return torch.bp.memory_reserved(DEVICE)

    x = torch.zeros(1 << 20, device=DEVICE)
    before = reserved()
    graph = torch.bp.Graph()
    with captured(graph):
        y = (x + 1) * 2
    assert graph.pool()[1] == 0
    during = reserved()
    assert during > before
    others = [torch.full((1 << 20,), 7.0, device=DEVICE) for _ in range(8)]  # must not reuse the graph's memory
    graph.replay()
    assert y.unique().tolist() == [2]
    assert all(one.unique().tolist() == [7] for one in others)
    del others
    graph.reset()
    kept = y.clone()
    del y
    assert reserved() <= before + kept.numel() * 4 + (2 << 20)
    with pytest.raises(RuntimeError):
        graph.pool()


@pytest.mark.parametrize("given", ["another graph's", "a handle"])
def test_graphs_share_a_pool(given: str) -> None:
    x = torch.ones(1 << 18, device=DEVICE)
    first, second = torch.bp.Graph(), torch.bp.Graph()
    handle = torch.bp.graph_pool_handle()
    with torch.bp.graph(first, pool=None if given.startswith("another") else handle):
        y = x + 1
    with torch.bp.graph(second, pool=first.pool() if given.startswith("another") else handle):
        z = y * 2
    assert first.pool() == second.pool()
    first.reset()  # the second graph keeps the pool alive
    x.zero_()
    second.replay()
    assert z.shape == x.shape
    with torch.bp.graph(first, pool=second.pool()):
        y.copy_(x + 5)
    first.replay()
    second.replay()
    assert z.unique().tolist() == [10]


def test_memory_freed_on_two_streams_is_not_reused_too_early() -> None:
    x = torch.ones(1 << 16, device=DEVICE)
    graph, other = torch.bp.Graph(), torch.bp.Stream()
    with captured(graph):
        temporary = x * 3
        other.wait_stream(torch.bp.current_stream())
        with other:
            late = temporary + 1
        temporary.record_stream(other)
        del temporary
        fresh = [x * number for number in range(5)]
        torch.bp.current_stream().wait_stream(other)
    for _ in range(2):
        graph.replay()
        assert late.unique().tolist() == [4]
        assert [one.unique().tolist() for one in fresh] == [[number] for number in range(5)]
    torch.bp.synchronize()


def test_pinned_memory_is_read_and_written_at_each_replay() -> None:
    source, target = torch.zeros(100).pin_memory(), torch.zeros(100).pin_memory()
    x = torch.zeros(100, device=DEVICE)
    graph = torch.bp.Graph()
    with captured(graph):
        x.copy_(source, non_blocking=True)
        x.mul_(2)
        target.copy_(x, non_blocking=True)
    for number in (3, 5):
        source.fill_(number)
        graph.replay()
        torch.bp.synchronize()
        assert target.tolist() == [2 * number] * 100
    del source
    gc.collect()
    if hasattr(torch.accelerator, "empty_host_cache"):  # since torch 2.12
        torch.accelerator.empty_host_cache()
    filler = [torch.full((100,), 9.0).pin_memory() for _ in range(4)]
    graph.replay()
    torch.bp.synchronize()
    assert target.tolist() == [10] * 100
    assert filler[0].tolist() == [9] * 100


def test_index_out_of_range_is_reported_after_the_replay() -> None:
    table, index = torch.randn(5, 3, device=DEVICE), torch.tensor([0, 1]).to(DEVICE)
    F.embedding(index, table)
    graph = torch.bp.Graph()
    with captured(graph):
        found = F.embedding(index, table)
    graph.replay()
    torch.testing.assert_close(found, table[:2])
    index.fill_(7)
    torch.bp.synchronize()
    graph.replay()
    with pytest.raises((IndexError, RuntimeError), match=r"index (7 is out of bounds|out of range in self)"):
        torch.bp.synchronize()
    index.fill_(4)
    graph.replay()
    torch.testing.assert_close(found, table[[4, 4]])


@Graphs
def test_keep_graph_and_instantiate(kind: str) -> None:
    x = torch.zeros(3, device=DEVICE)
    graph = made(kind, keep_graph=True)
    with captured(graph):
        x += 1
    graph.instantiate()
    graph.replay()
    assert x.tolist() == [1] * 3


@Graphs
def test_debug_dump(kind: str, tmp_path: Path) -> None:
    x = torch.zeros(3, device=DEVICE)
    graph, other = made(kind), torch.bp.Stream()
    graph.enable_debug_mode()
    with captured(graph):
        x += 1
        other.wait_stream(torch.bp.current_stream())
        with other:
            x.sin()
        x.cos()
        torch.bp.current_stream().wait_stream(other)
        x.exp()
    graph.debug_dump(str(tmp_path / "graph.dot"))
    text = (tmp_path / "graph.dot").read_text()
    assert text.startswith("digraph")
    assert all(name in text for name in ("add_", "sin", "cos", "exp"))
    arrows = {line.strip() for line in text.splitlines() if "->" in line}
    assert arrows == {"n0 -> n1;", "n0 -> n2;", "n1 -> n3;", "n2 -> n3;"}
    with pytest.raises(RuntimeError, match="could not be written"):
        graph.debug_dump(str(tmp_path / "nowhere" / "graph.dot"))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(8, 12), torch.randint(0, 4, (8,))) for _ in range(count)]


def test_captures_do_not_tune() -> None:
    """Later calls are tuned: they do not use the plan of the capture."""
    x, w = torch.randn(1, 4, 12, 13, device=DEVICE), torch.randn(4, 4, 3, 3, device=DEVICE)
    graph = torch.bp.Graph()
    before = torch.backends.bp.conv.benchmark
    torch.backends.bp.conv.benchmark = True
    try:
        with captured(graph):
            y = F.conv2d(x, w)
        graph.replay()
        torch.testing.assert_close(y.cpu(), F.conv2d(x.cpu(), w.cpu()), atol=1e-4, rtol=1e-4)
        known = len(choosing.context.benchmarked(x.device.index))
        F.conv2d(x, w)
        assert len(choosing.context.benchmarked(x.device.index)) == known + 1
    finally:
        torch.backends.bp.conv.benchmark = before


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW"])
def test_full_training_step(optimizer: str) -> None:
    """Forward, loss, backward and optimizer step in one graph train the same parameters as on the CPU."""
    torch.manual_seed(0)
    reference = network()
    model = network().to(DEVICE)
    model.load_state_dict(reference.state_dict())
    options = {"capturable": True} if optimizer != "SGD" else {"momentum": 0.9}
    plain = getattr(torch.optim, optimizer)(reference.parameters(), lr=0.01, **(options if optimizer == "SGD" else {}))
    ours = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    data = batches(8)
    x, y = (one.to(DEVICE) for one in data[0])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    stream = torch.bp.Stream()
    stream.wait_stream(torch.bp.current_stream())
    with stream:
        for inputs, labels in data[:3]:  # warm-up
            x.copy_(inputs)
            y.copy_(labels)
            step(model, ours, x, y)
    torch.bp.current_stream().wait_stream(stream)
    for inputs, labels in data[:3]:
        step(reference, plain, inputs, labels)
    graph = torch.bp.Graph()
    with torch.bp.graph(graph):
        loss = step(model, ours, x, y)
    for inputs, labels in data[3:]:
        x.copy_(inputs)
        y.copy_(labels)
        graph.replay()
        torch.testing.assert_close(loss.cpu(), step(reference, plain, inputs, labels), atol=1e-4, rtol=1e-4)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
def test_graphed_callables(autocast: bool) -> None:
    torch.manual_seed(0)
    reference, head = network(), nn.Linear(4, 2)
    model, other = network().to(DEVICE), nn.Linear(4, 2).to(DEVICE)
    model.load_state_dict(reference.state_dict())
    other.load_state_dict(head.state_dict())
    sample = torch.randn(8, 12, device=DEVICE)
    middle = torch.randn(8, 4, device=DEVICE, requires_grad=True)
    with torch.autocast("bp", enabled=autocast, dtype=torch.bfloat16, cache_enabled=False):
        body, end = torch.bp.make_graphed_callables((model, other), ((sample,), (middle,)))
    assert body is model
    tolerance = 5e-2 if autocast else 1e-4
    plain = torch.optim.SGD([*reference.parameters(), *head.parameters()], lr=0.05)
    ours = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.05)
    for inputs, _ in batches(5):
        losses = []
        for layers, optimizer, x in (((reference, head), plain, inputs), ((body, end), ours, inputs.to(DEVICE))):
            optimizer.zero_grad()
            with torch.autocast("bp", enabled=autocast, dtype=torch.bfloat16, cache_enabled=False):
                loss = layers[1](layers[0](x).float() if autocast else layers[0](x)).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().cpu())
        torch.testing.assert_close(*losses, atol=tolerance, rtol=tolerance)
    model.eval()  # the capture was in training mode, so eval mode runs the original forward
    x = torch.randn(3, 12)
    torch.testing.assert_close(model(x.to(DEVICE)).cpu(), reference.eval()(x), atol=tolerance, rtol=tolerance)


def test_invalid_callables_and_arguments() -> None:
    x = torch.randn(3, 12, device=DEVICE)
    replayed = torch.bp.make_graphed_callables(lambda x: x.sin() * 2, (x.clone(),))
    torch.testing.assert_close(replayed(x + 1).cpu(), (x.cpu() + 1).sin() * 2)
    for wrong in (x[:2], x.double() if torch.float64 in torch.bp.get_device_properties(DEVICE).dtypes else x.half()):
        with pytest.raises(ValueError, match="was captured with a tensor of shape"):
            replayed(wrong)
    with pytest.raises(ValueError, match="was captured with arguments like"):
        replayed(x, x)
    with pytest.raises(TypeError, match="tensors only"):
        torch.bp.make_graphed_callables(lambda x, n: x * n, (x, 2))
    with pytest.raises(ValueError, match="each of the 2 callables"):
        torch.bp.make_graphed_callables((torch.sin, torch.cos), ((x,),))
    with pytest.raises(NotImplementedError, match="enable_annotations"):
        torch.bp.make_graphed_callables(torch.sin, (x,), enable_annotations=True)
    with pytest.raises(ValueError, match="capture_error_mode"):
        torch.bp.make_graphed_callables(torch.sin, (x,), capture_error_mode="local")
    hooked = nn.Linear(12, 2).to(DEVICE)
    hooked.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="no hooks"):
        torch.bp.make_graphed_callables(hooked, (x,))
    torch.testing.assert_close(replayed(x).cpu(), x.cpu().sin() * 2)


def test_unused_inputs() -> None:
    x = torch.randn(3, device=DEVICE, requires_grad=True)
    unused = torch.randn(3, device=DEVICE, requires_grad=True)

    def function(x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.raises(RuntimeError, match="not have been used"):
        torch.bp.make_graphed_callables(function, (x, unused))
    replayed = torch.bp.make_graphed_callables(function, (x, unused), allow_unused_input=True)
    found = torch.autograd.grad(replayed(x, unused).sum(), (x, unused), allow_unused=True)
    assert found[0].tolist() == [2] * 3
    assert found[1] is None


OUT_OF_REACH = """
import pytest, torch
x = torch.zeros(3, device="bp")
for module in (torch.bp, torch.accelerator):
    if not hasattr(module, "Graph"):
        continue  # torch.accelerator before torch 2.12
    graph = module.Graph()
    with torch.bp.Stream(), pytest.raises(NotImplementedError, match="runs no kernels"):
        graph.capture_begin()
assert (x + 1).tolist() == [1, 1, 1]
"""


def test_devices_without_capture_support_raise() -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_BACKPLANE_")}
    command = [sys.executable, "-c", OUT_OF_REACH]
    settings = {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_DISCRETE": "1"}
    done = subprocess.run(command, env=environment | settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_concurrent_captures_in_several_threads() -> None:
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        graph = torch.bp.Graph()
        with torch.bp.Stream() as _:
            x = torch.zeros(1000, device=DEVICE)
            graph.capture_begin(capture_error_mode="relaxed")
            x += number
            y = x * 2
            graph.capture_end()
            for _ in range(10):
                graph.replay()
            torch.bp.current_stream().synchronize()
            results[number] = y.unique().tolist()

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [20], 2: [40], 3: [60]}
