"""Builds of the kernels of compiled graphs: Inductor waits for them, shows its progress bar, and reports failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from torch_backplane import drivers

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not drivers.device(0).properties.dialect, reason="host devices build no kernels"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield


def function(x: Tensor) -> tuple[Tensor, ...]:
    return x.sin().sum(-1), (x @ x).relu() + x


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends a line that is no OpenCL C to each kernel of a graph."""
    from torch_backplane.compile.kernel import GraphKernel

    finished = GraphKernel.finished

    def appended(self: Any, entry: str) -> Any:
        kernel = finished(self, entry)
        return dataclasses.replace(kernel, text=f"{kernel.text}\nthis is an error;")

    monkeypatch.setattr(GraphKernel, "finished", appended)


def arguments(rows: int) -> Tensor:
    return torch.linspace(-1, 1, rows * rows).view(rows, rows).to("bp")


@pytest.mark.usefixtures("broken")
def test_failures_name_the_operators_and_show_the_kernel() -> None:
    with pytest.raises(Exception, match=r"bp_fused_\w*sin\w*sum") as caught:
        torch.compile(function)(arguments(11))
    text = str(caught.value)
    assert "could not be built for" in text
    assert "\tthis is an error;" in text  # the source, with numbered lines
    assert "error:" in text  # the compiler's log


@pytest.mark.usefixtures("broken")
def test_suppressed_failures_run_in_eager_mode() -> None:
    x = arguments(12)
    with torch._dynamo.config.patch(suppress_errors=True):
        torch.testing.assert_close(torch.compile(function)(x), function(x))


def test_kernels_build_again_after_a_failure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    x = arguments(13)
    with monkeypatch.context():
        request.getfixturevalue("broken")
        with pytest.raises(Exception, match="could not be built"):
            torch.compile(function)(x)
    monkeypatch.undo()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function)(x), function(x))


def test_progress_bar(capfd: pytest.CaptureFixture[str]) -> None:
    for shows, rows in ((False, 14), (True, 15), (False, 16)):
        torch._dynamo.reset()
        with config.patch(disable_progress=not shows):
            torch.compile(function)(arguments(rows))
        assert ("100" in capfd.readouterr().err) == shows  # the bar has a title only if tqdm is installed


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_compile_threads(threads: int) -> None:
    x = arguments(20 + threads)
    with config.patch(compile_threads=threads):
        torch.testing.assert_close(torch.compile(function)(x), function(x))


def test_subgraphs() -> None:
    """Kernels of branches are awaited, too."""

    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda t: t.exp() + 1, lambda t: (t * 3).cos(), (x,))

    compiled = torch.compile(branches)
    for x in (arguments(17) + 1, arguments(17) - 2, arguments(17) + 3):
        torch.testing.assert_close(compiled(x), branches(x))
