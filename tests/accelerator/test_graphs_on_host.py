"""Graphs on host devices: the tests of opencl/, and tests of what only host devices do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import paths
import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.append(str(paths.TESTS / "opencl"))

import test_graphs as on_opencl
from test_graph_branches import *  # noqa: F403
from test_graphed_training import *  # noqa: F403
from test_graphs import *  # noqa: F403
from test_graphs import captured

# Host devices run all operators on the CPU.
REFUSED = [name for name in on_opencl.REFUSED if name != "an operator on the CPU"]


@pytest.mark.parametrize("name", REFUSED)
def test_errors_name_the_operator_and_leave_the_stream_usable(name: str) -> None:
    on_opencl.test_errors_name_the_operator_and_leave_the_stream_usable(name)


def test_captures_do_not_tune() -> None:
    """Host devices never tune."""
    x, w = torch.randn(1, 4, 12, 13, device="bp"), torch.randn(4, 4, 3, 3, device="bp")
    graph = torch.bp.Graph()
    with captured(graph):
        y = torch.nn.functional.conv2d(x, w)
    graph.replay()
    torch.testing.assert_close(y.cpu(), torch.nn.functional.conv2d(x.cpu(), w.cpu()))


def test_operators_of_other_libraries_cannot_be_captured() -> None:
    """Their CPU kernels can be Python functions, whose authors do not expect calls at a replay."""
    with torch.library._scoped_library("test_graphs_on_host", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", torch.empty_like, "Meta")
        x = torch.ones(3, device="bp")
        assert torch.ops.test_graphs_on_host.twice(x).tolist() == [2] * 3
        graph = torch.bp.Graph()
        with pytest.raises(RuntimeError, match="test_graphs_on_host::twice cannot be captured"), captured(graph):
            torch.ops.test_graphs_on_host.twice(x)
        assert torch.ops.test_graphs_on_host.twice(x).tolist() == [2] * 3


def channels_last(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="bp").to(memory_format=torch.channels_last)


# Calls whose results differ from those of PyTorch's meta kernels in strides, sizes or dtype.
LIKE_NO_OTHER: dict[str, Callable[[], torch.Tensor]] = {
    "replication padding": lambda: F.pad(channels_last(2, 3, 4, 5), (1, 2, 1, 1), mode="replicate"),
    "reflection padding": lambda: F.pad(channels_last(2, 3, 4, 5), (1, 2, 1, 1), mode="reflect"),
    "isin": lambda: torch.isin(7, torch.arange(10, device="bp")),
    "layer norm": lambda: F.layer_norm(torch.randn(3, 4, device="bp").bfloat16(), (4,)),
    "group norm": lambda: F.group_norm(torch.randn(3, 4, 2, device="bp").bfloat16(), 2, torch.rand(4, device="bp")),
    "convolution": lambda: F.conv2d(channels_last(2, 3, 4, 5), torch.ones(4, 3, 2, 2, device="bp")),
    "transposed convolution": lambda: F.conv_transpose3d(
        torch.randn(2, 3, 4, 5, 2, device="bp").to(memory_format=torch.channels_last_3d),
        torch.ones(3, 4, 2, 2, 2, device="bp"),
    ),
    "pixel shuffle": lambda: F.pixel_shuffle(channels_last(2, 8, 3, 4), 2),
}


@pytest.mark.parametrize("name", LIKE_NO_OTHER)
def test_captured_results_have_the_layout_of_eager_results(name: str) -> None:
    torch.manual_seed(0)
    expected = LIKE_NO_OTHER[name]()
    torch.manual_seed(0)
    with captured(graph := torch.bp.Graph()):
        found = LIKE_NO_OTHER[name]()
    graph.replay()
    graph.replay()
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    if name == "isin":
        assert found.item() == expected.item()


def test_training_step_of_a_model_that_starts_with_batch_norm() -> None:
    """The gradient of the input is not needed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).to("bp")
    x = torch.randn(8, 4, device="bp")
    stream = torch.bp.Stream()
    stream.wait_stream(torch.bp.current_stream())
    with stream:
        for _ in range(3):
            model(x).square().sum().backward()
    torch.bp.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=False)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with captured(graph := torch.bp.Graph()):
        model(x).square().sum().backward()
    graph.replay()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("good", [True, False])
def test_shape_errors_are_raised_by_the_captured_call(good: bool) -> None:
    x, y = torch.zeros(3, device="bp"), torch.ones(3 if good else 4, device="bp")
    graph = torch.bp.Graph()
    with captured(graph):
        z = x + 1
        if not good:
            with pytest.raises(RuntimeError, match="The size of tensor a"):
                x + y
        z += 1
    graph.replay()
    assert z.tolist() == [2] * 3


def test_results_of_any_layout_and_dtype() -> None:
    """With the strides that PyTorch's meta kernels give."""
    x = torch.randn(4, 5, 6).permute(2, 0, 1)
    there = x.to("bp")
    graph = torch.bp.Graph()

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.exp(), x.double(), x.to(torch.complex64).conj(), x.sum(1), x.sort(0)[1], x.contiguous(), x[:, :0] + 1,
                x.flip(0), torch.linalg.qr(x[0])[0], x.half().cumsum(2)]  # fmt: skip

    with captured(graph):
        found = results(there)
    for _ in range(2):
        graph.replay()
        for one, right in zip(found, results(there.cpu()), strict=True):
            torch.testing.assert_close(one.cpu(), right, atol=1e-5, rtol=1e-5)
        there.copy_(torch.randn(6, 4, 5))


MODES = {
    "LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU,
    "tanh": torch.nn.RNN, "relu": lambda *sizes, **named: torch.nn.RNN(*sizes, nonlinearity="relu", **named),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_recurrent_layer_is_one_call_in_a_graph(mode: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """So is its backward. The sizes cover larger and smaller workspaces of oneDNN."""
    for features, hidden, steps, biases in ((3, 5, 4, True), (70, 33, 9, False), (1, 130, 2, True)):
        torch.manual_seed(hidden)
        model = MODES[mode](features, hidden, bidirectional=True, bias=biases).to("bp", dtype)
        reference = MODES[mode](features, hidden, bidirectional=True, bias=biases).to(dtype)
        reference.load_state_dict(model.cpu().state_dict())
        model.to("bp")
        x = torch.randn(steps, 2, features, dtype=dtype)
        there = x.to("bp").requires_grad_()
        wanted = [there, *model.parameters()]
        graph = torch.bp.Graph()
        graph.enable_debug_mode()
        with captured(graph):
            out, _ = model(there)
            gradients = torch.autograd.grad(out.square().sum(), wanted)
            with torch.no_grad():
                evaluated, _ = model(there)
        graph.debug_dump(str(tmp_path / "graph.dot"))
        dumped = (tmp_path / "graph.dot").read_text(encoding="utf-8")
        assert dumped.count('label="backplane::host_rnn_layer_backward') == 1
        assert dumped.count('label="backplane::host_rnn_layer') == 3
        assert "_step" not in dumped
        for factor in (1, -2, 0.5):
            here = (x * factor).requires_grad_()
            with torch.no_grad():
                there.copy_(here)
            graph.replay()
            expected, _ = reference(here)
            torch.testing.assert_close(out.cpu(), expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(evaluated.cpu(), expected, atol=1e-5, rtol=1e-5)
            right = torch.autograd.grad(expected.square().sum(), [here, *reference.parameters()])
            for one, other in zip(gradients, right, strict=True):
                torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)
