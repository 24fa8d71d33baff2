"""Tests the audit of compiled graphs: the traffic of each fused kernel, relative to this kernel's minimum."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from torch_backplane.audit.driver import LANGUAGE
from torch_backplane.interpreter.language import NoCompiler

try:
    LANGUAGE.compiler()
except NoCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

from torch_backplane.audit.bounds import FAMILIES, beyond
from torch_backplane.audit.cases import cases
from torch_backplane.audit.driver import Launch, Operand
from torch_backplane.audit.fused import fused_kernels, kernels_of
from torch_backplane.audit.report import page, summary
from torch_backplane.cli import app
from torch_backplane.compile_report import Compilation, Graph, Report, Step
from torch_backplane.kernels.modelled import read_target

ARM = read_target("arm-mali-g610")  # the target with the smallest cache


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("NO_COLOR", "1")


def launch(kernel: str, moved: float) -> Launch:
    return Launch(kernel=kernel, groups=64, operands=(Operand(bytes=moved, written=0, extent=1 << 30, by_all=True),))


def step(kernel: str, read: int, written: int, kind: str = "kernel") -> Step:
    return Step(kind, kernel, [], {"x": read}, {"y": written})


def graph(*steps: Step) -> Graph:
    return Graph("inference", ["bp:0"], None, [], [], {}, list(steps), 0, 0)


# --- kernels of a graph ------------------------------------------------------------------------------------------


def test_each_launch_is_compared_with_its_step() -> None:
    steps = [step("a", 64, 32), step("b", 320, 320), step("a", 960, 64)]
    launches = [launch("a", 96), launch("product", 1 << 20), launch("b", 960), launch("a", 1024)]
    found = fused_kernels(launches, steps, ARM)
    assert [(one.kernel, one.bytes, one.min_bytes, one.traffic) for one in found] == [
        ("a", 96, 96, 1), ("a", 1024, 1024, 1), ("b", 960, 640, 1.5),
    ]  # fmt: skip


def test_minimum_is_whole_sectors() -> None:
    (found,) = fused_kernels([launch("a", 96)], [step("a", 33, 4)], ARM)
    assert (found.min_bytes, found.traffic) == (64 + 32, 1)


@pytest.mark.parametrize("count", [0, 2])
def test_launches_and_steps_must_agree(count: int) -> None:
    with pytest.raises(ValueError, match=f"a was launched {count} times, and compiled graphs have 1 launches"):
        fused_kernels([launch("a", 96)] * count, [step("a", 64, 32)], ARM)


def test_only_kernels_of_graphs_are_compared() -> None:
    steps = [step("a", 64, 32), step("mm", 64, 32, "operator"), step("as_strided", 0, 0, "none")]
    forward, backward = graph(*steps), graph(step("b", 64, 32))
    report = Report([Compilation("0/0", graphs=[forward]), Compilation("1/0", graphs=[backward])])
    assert [one.name for one in kernels_of(report)] == ["a", "b"]
    report.problems.append("the graph comes from a cache")
    with pytest.raises(ValueError, match="not recorded: the graph comes from a cache"):
        kernels_of(report)


# --- the bound ---------------------------------------------------------------------------------------------------


def result_of(case: str, family: str, *traffic: float) -> dict[str, Any]:
    figures = {"fill": 1.0, "chain": 2, "traffic": 1.0, "divergent": 0, "seconds": 1.0, "ideal_seconds": 1.0}
    figures |= {"launches": 1, "groups": 1, "items": 1, "barriers": 0, "coalescing": 1.0, "conflicts": 1.0}
    fused = [{"kernel": f"bp_{k}", "bytes": 64 * one, "min_bytes": 64, "traffic": one} for k, one in enumerate(traffic)]
    content = {"case": case, "family": family, "target": ARM.name, "elements": 1 << 24, "bytes": 64 << 20}
    return content | {"figures": figures | {"local_bytes": 0}, "wrong": "", "fallbacks": [], "fused": fused}


@pytest.mark.parametrize("family", ["compiled graphs", "compiled steps"])
def test_worst_kernel_is_bounded(family: str) -> None:
    assert FAMILIES[family].fused == 1.25
    assert beyond(result_of("x", family, 1.0, 1.25)) == []
    (finding,) = beyond(result_of("x", family, 1.0, 1.5, 1.26))
    assert (finding.measure, finding.value, finding.bound, finding.reason) == ("fused", 1.5, 1.25, "")
    content = summary([result_of("x", family, 1.5)], [ARM.name], 64 << 20)
    assert not content["ok"]
    assert content["unknown"] == [f"x ({ARM.name}): fused 1.50, bound 1.25"]


def test_page_has_the_worst_kernel_of_each_case() -> None:
    text = page([result_of("x", "compiled steps", 1.0, 1.5), result_of("y", "compiled graphs", 1.0)], [ARM], 64 << 20)
    assert "| x | `bp_1` | 1.50 |" in text
    assert "| y | `bp_0` | 1.00 |" in text
    assert "## Fused kernels" not in page([result_of("x", "copies")], [ARM], 64 << 20)


# --- compiled cases ----------------------------------------------------------------------------------------------


def audit(*options: str) -> Result:
    return CliRunner().invoke(app, ["audit", *options])


def test_kernels_move_their_minimum(tmp_path: Path) -> None:
    titles = ("joined rows", "RMS norm, SwiGLU and their products", "layer norm and gradients")
    file = tmp_path / "audit.json"
    match = f"^compiled: ({'|'.join(titles)})$"
    done = audit("--match", match, "--bytes", "1MiB", "--target", "arm-mali-g610", "--json", str(file))
    assert done.exit_code == 0, done.stdout + done.stderr
    content = json.loads(file.read_text(encoding="utf-8"))
    assert (content["wrong"], content["unknown"]) == ([], [])
    by_case = {one["case"]: one for one in content["results"]}
    joined, block, backward = (by_case[f"compiled: {one}"] for one in titles)
    (kernel,) = joined["fused"]
    assert kernel["min_bytes"] == 2 << 20
    assert kernel["traffic"] == pytest.approx(1, rel=0.01)
    products = [one for one in block["launches"] if "matmul" in one["kernel"]]
    assert len(products) == 2
    assert not {one["kernel"] for one in block["fused"]} & {one["kernel"] for one in products}
    assert len(block["fused"]) == 2  # the norm, and the activation between the products
    assert len(backward["fused"]) >= 2
    assert all(one["traffic"] <= 1.25 for result in (block, backward) for one in result["fused"])


WASTEFUL = """\
import sys
if any(one.endswith("request.json") for one in sys.orig_argv):
    import torch_backplane.compile.scheduling as scheduling
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor import config

    def flat(cls, *given):  # reads a transposed operand along its columns
        with config.patch({"triton.max_tiles": 1}):
            return SIMDScheduling.compute_tiling_strategy.__func__(cls, *given)

    scheduling.GraphScheduling.compute_tiling_strategy = classmethod(flat)
"""


def test_wasteful_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(WASTEFUL)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    options = ("--bytes", "4MiB", "--target", "arm-mali-g610")
    done = audit("--match", "^compiled: sum with a transposed matrix$", *options)
    assert done.exit_code == 1
    (line,) = (one for one in done.stdout.splitlines() if ": fused " in one)
    assert line.startswith("unknown: compiled: sum with a transposed matrix (")
    assert float(line.rpartition("fused ")[2].partition(",")[0]) > 2


def test_cases_cover_both_families() -> None:
    families = [one.family for title, one in cases().items() if title.startswith("compiled: ")]
    assert set(families) == {"compiled graphs", "compiled steps"}
    assert {title for title in cases() if "dynamic shapes" in title}
