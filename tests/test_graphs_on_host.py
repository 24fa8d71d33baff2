"""Graphs on host devices, by the tests of opencl/; and what is the host's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent / "opencl"))

import test_graphs as on_opencl
from test_graphed_training import *  # noqa: F403
from test_graphs import *  # noqa: F403
from test_graphs import captured

# The CPU is where these devices' operators run.
REFUSED = [name for name in on_opencl.REFUSED if name != "an operator on the CPU"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_captured_is_named_and_the_stream_usable_afterwards(name: str) -> None:
    on_opencl.test_what_cannot_be_captured_is_named_and_the_stream_usable_afterwards(name)


def test_nothing_is_tuned_in_a_capture() -> None:
    """Nor elsewhere on host devices."""
    x, w = torch.randn(1, 4, 12, 13, device="bp"), torch.randn(4, 4, 3, 3, device="bp")
    graph = torch.bp.Graph()
    with captured(graph):
        y = torch.nn.functional.conv2d(x, w)
    graph.replay()
    torch.testing.assert_close(y.cpu(), torch.nn.functional.conv2d(x.cpu(), w.cpu()))


def test_a_library_of_others_cannot_be_captured() -> None:
    """Its CPU kernel may be Python's, which replays would call without asking."""
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


@pytest.mark.parametrize("good", [True, False])
def test_what_shapes_are_refused_is_said_by_the_call(good: bool) -> None:
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
    """In the strides that PyTorch's meta kernels give."""
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
