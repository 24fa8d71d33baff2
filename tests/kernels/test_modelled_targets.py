"""Tests targets in JSON files: the shipped ones, and the errors of invalid ones."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_backplane.kernels import OpenCLC, Reduction, Target, reduction, reduction_geometry
from torch_backplane.kernels.modelled import SHIPPED, read_target
from torch_backplane.kernels.templates.matmul import matmul

FIGURES = [one.name for one in dataclasses.fields(Target)]
SPEEDS = ["bytes_per_second", "operations_per_second"]


def test_shipped_targets() -> None:
    assert list(SHIPPED) == ["amd-rdna3", "apple-m2-max", "arm-mali-g610", "intel-arc", "nvidia-ada"]
    names = {read_target(name).name for name in SHIPPED}
    assert len(names) == 5


@pytest.mark.parametrize("name", SHIPPED)
def test_each_figure_has_a_source_or_is_marked_assumed(name: str) -> None:
    content = json.loads(SHIPPED[name].read_text(encoding="utf-8"))
    sourced = [figure for figures in content["sources"].values() for figure in figures]
    assert sorted([*sourced, *content["assumed"]]) == sorted([*FIGURES, *SPEEDS])
    assert all(source.startswith("https://") for source in content["sources"])
    assert all(content["assumed"].values())


@pytest.mark.parametrize("name", SHIPPED)
def test_kernels_for_shipped_targets_stay_within_their_limits(name: str) -> None:
    target = read_target(name).target
    assert target == read_target(SHIPPED[name]).target
    assert target.simt
    assert target.team_size == 64
    assert target.group_size % target.group_multiple == 0
    dialect = OpenCLC(target)
    a = torch.empty(300, 300)
    kernel = matmul(dialect, a.new_empty(300, 300), a, a)[0].kernel
    target.check("mm", arguments=dialect.argument_bytes(kernel.parameters), local=kernel.local_bytes)
    total = Reduction([torch.float32], [0.0], lambda x, at: x, lambda a, b: a + b, lambda x, count: x)
    where = reduction_geometry(a.shape, [0, 1], [()], [a.stride()])
    first, *_ = reduction(dialect, "sum", total, [a.new_empty(())], [a], where)
    target.check("sum", local=first.kernel.local_bytes, group=first.group_size)
    assert first.global_size // first.group_size > 1  # several work groups share the sum
    if not target.float64:
        with pytest.raises(TypeError, match="this device has no float64"):
            matmul(dialect, a.double(), a.double(), a.double())


def written(folder: Path, change: Any) -> Path:
    content = json.loads(SHIPPED["amd-rdna3"].read_text(encoding="utf-8"))
    change(content)
    path = folder / "mine.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("figure", FIGURES)
def test_missing_and_invalid_figures_raise_with_the_file_name(figure: str, tmp_path: Path) -> None:
    path = written(tmp_path, lambda content: content["figures"].pop(figure))
    with pytest.raises(ValueError, match=rf"^the target {re.escape(str(path))}: figures lacks {figure}$"):
        read_target(path)
    for absurd in (None, -3, "many", [["float32"]]):
        path = written(tmp_path, lambda content, absurd=absurd: content["figures"].update({figure: absurd}))
        with pytest.raises(ValueError, match=rf"^the target {re.escape(str(path))}: .*\b{figure}\b"):
            read_target(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["figures"].update(warp=32), "figures contains warp, which Target does not have"),
        (
            lambda content: content["figures"].update(atomics=["int33"]),
            "atomics contains 'int33', which is not a dtype",
        ),
        (lambda content: content["figures"].update(max_group_size=16), "group_multiple is 32, and must be at most"),
        (lambda content: content.pop("figures"), "it must be an object that contains an object 'figures'"),
        (lambda content: content.update(name=" "), "name is ' ', and must be a string that is not empty"),
        (
            lambda content: content.update(bytes_per_second=0),
            "bytes_per_second is 0, and must be a whole number above 0",
        ),
        (
            lambda content: content.pop("operations_per_second"),
            "operations_per_second is None, and must be a whole number",
        ),
    ],
)
def test_other_errors_in_a_target_file(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_target(written(tmp_path, change))


def test_missing_and_malformed_target_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the target nvidia cannot be read: No such file.*amd-rdna3, apple-m2-max"):
        read_target("nvidia")
    (tmp_path / "text.json").write_text("{figures", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text.json is not valid JSON: Expecting property name"):
        read_target(tmp_path / "text.json")
