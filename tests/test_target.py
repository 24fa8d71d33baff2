"""What kernels are told of a device: the figures, what they decide, and that nothing else is asked."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_backplane.kernels import CudaCpp, OpenCLC, Target
from torch_backplane.kernels.target import _RULES

ROOT = Path(__file__).resolve().parents[1]
FIGURES = [one.name for one in dataclasses.fields(Target)]

THREADS, LOCKSTEP = Target.of_kind("cpu"), Target.of_kind("gpu")


# --- figures


def test_every_figure_has_a_rule_and_a_meaning() -> None:
    assert list(_RULES) == FIGURES
    words = str(Target.__doc__).partition("Raises:")[0]
    assert [name for name in FIGURES if not re.search(rf"\b{name}\b", words)] == []


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [None, -1, "many", 2.5, float("nan")])
def test_a_missing_or_absurd_figure_is_named_with_its_value_and_what_is_accepted(name: str, value: Any) -> None:
    accepted = re.escape(_RULES[name][0])
    with pytest.raises(ValueError, match=rf"^Target\.{name} is {re.escape(repr(value))}, and must be {accepted}$"):
        Target(**{name: value})


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"max_group_size": 0}, "max_group_size is 0, and must be a whole number of work items from 1 to 65,536"),
        ({"subgroup_size": 24}, "subgroup_size is 24, and must be a power of two"),
        ({"max_group_size": True}, "max_group_size is True"),
        ({"max_argument_bytes": 8}, "max_argument_bytes is 8, and must be a whole number of bytes, 128 or more"),
        ({"vector_widths": {torch.float32: 3}}, "vector_widths is {torch.float32: 3}, and must be a mapping"),
        ({"vector_widths": {"float": 4}}, "vector_widths is"),
        ({"atomics": {torch.int32}}, "atomics is {torch.int32}, and must be a frozenset of torch.dtype"),
        ({"group_multiple": 64, "max_group_size": 32}, "group_multiple is 64, and must be at most max_group_size"),
        ({"subgroup_size": 64, "max_group_size": 32}, "subgroup_size is 64, and must be at most max_group_size"),
    ],
)
def test_figures_that_make_no_sense_are_refused(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Target(**figures)


def test_a_kind_of_device_has_figures_that_a_driver_may_replace() -> None:
    assert Target.of_kind("gpu") == Target.of_kind("accelerator") == Target()
    assert Target.of_kind("gpu").simt
    assert not Target.of_kind("cpu").simt
    assert Target.of_kind("cpu", simt=True, local_memory=5) == Target(
        simt=True, local_memory=5, streaming_stores=True, host_memory=True
    )
    with pytest.raises(ValueError, match="one of gpu, accelerator, cpu, host, and got 'toaster'"):
        Target.of_kind("toaster")


def test_every_kind_of_device_has_its_figures() -> None:
    from torch_backplane.drivers.base import KINDS

    assert tuple(Target.KINDS) == KINDS


# --- decisions


def test_items_in_lockstep_have_an_element_and_threads_have_runs() -> None:
    assert (LOCKSTEP.run(64), THREADS.run(64)) == (1, 64)
    assert (LOCKSTEP.team_size, THREADS.team_size) == (64, 1)
    assert (LOCKSTEP.register_bytes, THREADS.register_bytes) == (0, 64)
    assert (LOCKSTEP.small_group(8), THREADS.small_group(8)) == (64, 8)
    assert (LOCKSTEP.streaming_bytes, THREADS.streaming_bytes) == (None, 32 << 20)
    assert THREADS.has_wide_sums
    assert not dataclasses.replace(THREADS, float64=False).has_wide_sums


@pytest.mark.parametrize("simt", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3, 8, 31, 32, 63, 64, 100, 256, 1024])
def test_no_group_is_larger_than_the_device_allows(most: int, simt: bool) -> None:
    target = Target(simt=simt, max_group_size=most)
    sizes = [target.group_size, target.element_group_size, target.team_size, target.small_group(8), target.group(512)]
    sizes += [target.team_of(8)]
    for length, rows, strided in [(4, 9, False), (100, 9, False), (100, 9, True), (100, 2, False), (3, 3, True)]:
        sizes.append(math.prod(target.row_group(length, rows, strided)))
    assert all(1 <= size <= most for size in sizes)
    assert target.team_size & (target.team_size - 1) == 0  # a tree


def test_groups_leave_no_lanes_empty() -> None:
    assert [Target(group_multiple=one).group_size for one in (1, 8, 16, 32, 64)] == [64] * 5
    assert [Target(group_multiple=one).group_size for one in (24, 48, 96, 128)] == [72, 96, 96, 128]
    assert Target(group_multiple=128, max_group_size=128).element_group_size == 128


@pytest.mark.parametrize(("local", "team"), [(0, 1), (1 << 10, 1), (2 << 10, 64), (1 << 20, 64)])
def test_teams_need_local_memory(local: int, team: int) -> None:
    assert Target(local_memory=local).team_size == team


def test_teams_have_as_many_members_as_local_memory_holds() -> None:
    target = Target(local_memory=4 << 10)
    assert [target.team_of(size) for size in (1, 64, 65, 128, 1024, 4096, 4097)] == [64, 64, 32, 32, 4, 1, 1]


def test_a_dialect_has_no_float64_where_the_target_has_none() -> None:
    for dialect in (OpenCLC, CudaCpp):
        assert dialect(Target()).type(torch.float64) == "double"
        with pytest.raises(TypeError, match="this device has no float64"):
            dialect(Target(float64=False)).type(torch.float64)


def test_results_are_written_past_caches_where_target_and_dialect_can() -> None:
    assert OpenCLC(THREADS).streaming_bytes == 32 << 20
    assert OpenCLC(LOCKSTEP).streaming_bytes is None
    assert OpenCLC(dataclasses.replace(THREADS, streaming_stores=False)).streaming_bytes is None
    assert CudaCpp(THREADS).streaming_bytes is None
