"""Tests Target: its figures, the decisions that follow from them, and that kernels depend on nothing else."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import driver_packages
import forked
import paths
import pytest
import torch

from torch_backplane.kernels import (
    CudaCpp,
    LimitExceeded,
    OpenCLC,
    Reduction,
    Target,
    reduction,
    reduction_geometry,
)
from torch_backplane.kernels.multi_tensor import multi_tensor, slots_within
from torch_backplane.kernels.target import _RULES
from torch_backplane.kernels.templates.matmul import matmul
from torch_backplane.kernels.templates.source import local_bytes

FIGURES = [one.name for one in dataclasses.fields(Target)]

THREADS, LOCKSTEP = Target.of_kind("cpu"), Target.of_kind("gpu")


# --- figures


def test_every_figure_has_a_rule_and_documentation() -> None:
    assert list(_RULES) == FIGURES
    words = str(Target.__doc__).partition("Raises:")[0]
    assert [name for name in FIGURES if not re.search(rf"\b{name}\b", words)] == []


def test_every_figure_is_used() -> None:
    """A figure that only target.py reads counts if other code uses a method that depends on it."""
    package = paths.ROOT / "torch_backplane"
    own = ast.parse((package / "kernels" / "target.py").read_text(encoding="utf-8"))
    read_elsewhere = {
        node.attr
        for path in package.rglob("*.py")
        if path != package / "kernels" / "target.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and "target" in ast.unparse(node.value).lower()
    }
    reads = {
        method.name: {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        for method in ast.walk(own)
        if isinstance(method, ast.FunctionDef)
    }
    found: set[str] = set()
    while not read_elsewhere <= found:
        found |= read_elsewhere
        read_elsewhere = {name for method in found for name in reads.get(method, ())}
    assert [name for name in FIGURES if name not in found] == []


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("value", [None, -1, "many", 2.5, float("nan")])
def test_invalid_figures_raise_with_the_accepted_values(name: str, value: Any) -> None:
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
        ({"atomics": {torch.int32}}, "atomics is {torch.int32}, and must be a frozenset of torch.dtype"),
        ({"group_multiple": 64, "max_group_size": 32}, "group_multiple is 64, and must be at most max_group_size"),
        ({"subgroup_size": 64, "max_group_size": 32}, "subgroup_size is 64, and must be at most max_group_size"),
    ],
)
def test_inconsistent_figures_raise(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Target(**figures)


def test_device_kinds_have_default_figures_that_drivers_can_override() -> None:
    assert Target.of_kind("gpu") == Target.of_kind("accelerator") == Target()
    assert Target.of_kind("gpu").simt
    assert not Target.of_kind("cpu").simt
    assert Target.of_kind("cpu", simt=True, local_memory=5) == Target(native_float16=True, local_memory=5)
    with pytest.raises(ValueError, match="one of gpu, accelerator, cpu, host, got 'toaster'"):
        Target.of_kind("toaster")


def test_every_device_kind_has_default_figures() -> None:
    from torch_backplane.drivers.base import KINDS

    assert tuple(Target.KINDS) == KINDS


# --- decisions


def test_lockstep_items_take_one_element_and_threads_take_runs() -> None:
    assert (LOCKSTEP.run(64), THREADS.run(64)) == (1, 64)
    assert (LOCKSTEP.team_size, THREADS.team_size) == (64, 1)
    assert (LOCKSTEP.register_bytes, THREADS.register_bytes) == (0, 64)
    assert (LOCKSTEP.small_group(8), THREADS.small_group(8)) == (64, 8)
    assert THREADS.has_wide_sums
    assert not dataclasses.replace(THREADS, float64=False).has_wide_sums


def test_work_of_few_long_groups_is_divided() -> None:
    gpu, processor = Target(compute_units=100), Target.of_kind("cpu", compute_units=100)
    assert [gpu.should_divide(groups, 128) for groups in (1, 800, 801, 1600)] == [True, True, False, False]
    assert [gpu.should_divide(1, steps) for steps in (0, 127, 128, 1 << 20)] == [False, False, True, True]
    assert [processor.should_divide(groups, 1 << 15) for groups in (1, 25, 26, 400)] == [True, True, False, False]
    assert not processor.should_divide(1, 1000)
    # Never with few compute units.
    assert not Target.of_kind("cpu", compute_units=3).should_divide(1, 1 << 20)


@pytest.mark.parametrize("simt", [True, False])
@pytest.mark.parametrize("most", [1, 2, 3, 8, 31, 32, 63, 64, 100, 256, 1024])
def test_group_sizes_stay_within_the_maximum(most: int, simt: bool) -> None:
    target = Target(simt=simt, max_group_size=most)
    sizes = [target.group_size, target.element_group_size, target.team_size, target.small_group(8), target.group(512)]
    sizes += [target.team_of(8), target.large_group]
    for length, rows, strided in [(4, 9, False), (100, 9, False), (100, 9, True), (100, 2, False), (3, 3, True)]:
        sizes.append(math.prod(target.row_group(length, rows, strided)))
    assert all(1 <= size <= most for size in sizes)
    assert target.team_size & (target.team_size - 1) == 0  # a power of two, for tree reductions


def test_group_sizes_are_multiples_of_group_multiple() -> None:
    assert [Target(group_multiple=one).group_size for one in (1, 8, 16, 32, 64)] == [64] * 5
    assert [Target(group_multiple=one).group_size for one in (24, 48, 96, 128)] == [72, 96, 96, 128]
    assert Target(group_multiple=128, max_group_size=128).element_group_size == 128


@pytest.mark.parametrize(("local", "team"), [(0, 1), (1 << 10, 1), (2 << 10, 64), (1 << 20, 64)])
def test_teams_need_local_memory(local: int, team: int) -> None:
    assert Target(local_memory=local).team_size == team


def test_team_size_is_limited_by_local_memory() -> None:
    target = Target(local_memory=4 << 10)
    assert [target.team_of(size) for size in (1, 64, 65, 128, 1024, 4096, 4097)] == [64, 64, 32, 32, 4, 1, 1]


def test_dialects_reject_float64_without_target_support() -> None:
    for dialect in (OpenCLC, CudaCpp):
        assert dialect(Target()).type(torch.float64) == "double"
        with pytest.raises(TypeError, match="this device has no float64"):
            dialect(Target(float64=False)).type(torch.float64)


# --- limits


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"arguments": 1025}, "aten::what needs 1,025 bytes of arguments, and its device takes 1,024"),
        ({"local": 40_000}, "aten::what needs 40,000 bytes of local memory, and its device takes 32,768"),
        ({"group": 257}, "aten::what needs 257 work items in a group, and its device takes 256"),
    ],
)
def test_exceeded_limits_raise(needs: dict[str, int], words: str) -> None:
    target = Target()
    target.check("aten::what", **{name: need - 1 for name, need in needs.items() if name != "local"})
    with pytest.raises(LimitExceeded, match=re.escape(words)) as raised:
        target.check("aten::what", **needs)
    (limit,) = re.findall(r"\(Target\.(\w+)\)$", str(raised.value))
    assert limit in FIGURES


F32 = torch.float32


def test_number_of_slots_is_limited_by_argument_bytes() -> None:
    # A slot has three outputs, four inputs and a step, each a handle and an offset; and five numbers and a count.
    adam = {"outputs": [F32] * 3, "inputs": [F32] * 4, "singles": [F32], "scalars": [F32] * 5}
    each = 8 * 16 + 6 * 4
    for most, slots in [(1024, 6), (each, 1), (2 * each - 1, 1), (2 * each, 2), (8 * each, 8), (1 << 20, 8)]:
        assert slots_within(OpenCLC(Target(max_argument_bytes=most)), 8, **adam) == slots
    assert slots_within(CudaCpp(Target(max_argument_bytes=4096)), 8, **adam) == 8
    for dialect in (OpenCLC(), CudaCpp()):
        slots = slots_within(dialect, 8, **adam)
        formula: Any = lambda *values: values[:3]  # noqa: E731
        kernel = multi_tensor("adam", formula, slots=slots, dialect=dialect, compute=F32, **adam)
        assert dialect.argument_bytes(kernel.parameters) <= 1024
        declared = kernel.text.rpartition(" bp_adam(")[2].partition(")")[0].split(", ")
        eight = sum("*" in one or "ulong" in one for one in declared)
        assert dialect.argument_bytes(kernel.parameters) == 8 * eight + 4 * (len(declared) - eight)


def test_product_tiles_fit_the_group_size_and_local_memory() -> None:
    a = torch.empty(100, 100)
    for figures, group, local in [
        ({}, 256, 8320),
        ({"max_group_size": 255}, 64, 4224),
        ({"local_memory": 8319}, 64, 4224),
        ({"max_group_size": 16}, 16, 2176),
        ({"local_memory": 2175}, 64, 0),  # no tiles: each work item computes its result alone
        ({"max_group_size": 15}, 15, 0),
    ]:
        kernel = matmul(OpenCLC(Target(**figures)), torch.empty(100, 100), a, a)[0].kernel
        assert (kernel.group_size, kernel.local_bytes) == (group, local)
        assert ("LOCAL value_t" in kernel.text) == bool(local)
    (doubles,) = matmul(OpenCLC(Target(float64=True)), a.double(), a.double(), a.double())
    assert doubles.kernel.local_bytes == 2 * 8320


def test_local_memory_is_computed_from_declarations() -> None:
    types = {"value_t": F32, "int64": torch.int64}
    text = "LOCAL value_t a[4], b[2][3 + 1]; x; LOCAL int64 c[5];"
    assert local_bytes(text, types) == 4 * 4 + 8 * 4 + 5 * 8
    assert local_bytes("value_t a[4];", types) == 0
    constants = {"TEAM": "8", "DIGITS": "16", "KEY(at)": "at"}
    text = "LOCAL int a[DIGITS * TEAM], b[TEAM + 1][2 * TEAM + 3]; LOCAL uint c[DIGITS];"
    assert local_bytes(text, types, constants) == 4 * (128 + 9 * 19 + 16)
    for unknown in ("LOCAL value_t a[SIZE];", "LOCAL other a[4];", "LOCAL value_t a;"):
        with pytest.raises(ValueError, match="cannot determine the size of LOCAL"):
            local_bytes(unknown, types)


@pytest.mark.parametrize("dims", [[0], [1]])
def test_reduction_teams_fit_the_group_size_and_local_memory(dims: list[int]) -> None:
    state = [torch.float64] * 4 + [torch.bool]
    moments = Reduction(
        state, [0.0] * 4 + [False], lambda x, at: (x, x, x, x, at > 3), lambda *both: both[:5], lambda *left: left[0]
    )
    a = torch.empty(1000, 1000, dtype=torch.float64)
    out = a.sum(dims)
    where = reduction_geometry(a.shape, dims, [out.stride()], [a.stride()])
    for figures, group in [
        ({}, 64),
        ({"local_memory": 64 * 33}, 64),
        ({"local_memory": 64 * 33 - 1}, 32),
        ({"max_group_size": 63}, 32),
        ({"local_memory": 2047}, 8),  # one work item per result
        ({"local_memory": 0, "max_group_size": 5}, 5),
    ]:
        calls = reduction(OpenCLC(Target(**figures)), "moments", moments, [out], [a], where)
        for call in calls:
            shared = "LOCAL shared" in call.kernel.text  # not with one work item per result
            wide = "wide_columns" in call.kernel.name  # many results per work item
            assert wide == (group in (8, 5) and dims == [0])
            assert (call.group_size, call.kernel.local_bytes) == (1 if wide else group, 33 * group if shared else 0)
            assert shared or dims == [0] or Target(**figures).team_size == 1


CALLED = """
import json, torch
from planned_calls import CALLS
import torch_backplane.operators
from torch_backplane import _C, plans
from torch_backplane.kernels import LimitExceeded
from torch_backplane.kernels.templates.attention import attends_in_one_pass
from torch_backplane.planning import dialect_of
from torch_backplane.planning.declare import find

_C.set_fallback_policy(_C.FallbackPolicy.silent)
plans.set_mode("0")
refused, failed = [], []
for name, calls in CALLS.items():
    overload = find(name)
    names = [one.name for one in overload._schema.arguments]
    for device in range(torch.bp.device_count()):
        if name.startswith("backplane::attention") and not attends_in_one_pass(dialect_of(device).target):
            continue  # never called on such devices
        given = dict(zip(names, calls.make(f"bp:{device}"), strict=False))
        schema = [one for one in overload._schema.arguments if one.name in given]
        named = {one.name: given[one.name] for one in schema if one.kwarg_only}
        try:
            overload(*(given[one.name] for one in schema if not one.kwarg_only), **named)
            torch.accelerator.synchronize(device)
        except LimitExceeded as error:
            refused.append(f"{name} on {device}: {error}")
        except Exception as error:
            failed.append(f"{name} on {device}: {error!r}")
print(json.dumps([len(CALLS), refused, failed]))
"""


def called(site: Path, **settings: str) -> Any:
    source = (paths.SUPPORT / "unbuilt_driver.py").read_text(encoding="utf-8")
    driver_packages.install(site, "unbuilt", source, "UnbuiltDriver")
    result = forked.run(CALLED, site, TORCH_BACKPLANE_DRIVERS="unbuilt", **settings)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("targets", ["", "small", "shipped"])
def test_operators_stay_within_the_limits_of_small_devices(targets: str, tmp_path: Path) -> None:
    count, refused, failed = called(tmp_path, UNBUILT_TARGETS=targets)
    assert count > 150
    assert failed == []
    assert refused == []


def test_kernels_and_operators_depend_only_on_the_target() -> None:
    asked = re.compile(r'processor|\.kind ==|"(cpu|gpu|accelerator)"|properties\.(kind|driver|name)|_[CG]PU_|vendor')
    found = [
        f"{path.name}: {line.strip()}"
        for part in ("kernels", "planning", "operators")
        for path in (paths.ROOT / "torch_backplane" / part).rglob("*.py")
        # kernels/cpu/ contains the code for CPUs, and costs.py the costs by class of target.
        if path.name not in ("target.py", "costs.py") and path.parent.name != "cpu"
        for line in path.read_text(encoding="utf-8").splitlines()
        if asked.search(line) and "cpu/" not in line
    ]
    assert sorted(found) == [
        # How PyTorch's CPU kernel decomposes a matrix, which gradients rely on.
        'batch_linear_algebra.py: example = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cpu")',
        "launch.py: target = properties.target or Target.of_kind(properties.kind)",
    ]
