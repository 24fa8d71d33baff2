"""torch.bp has the public names of torch.cuda as the table in tests/support/cuda_parity.py specifies."""

from __future__ import annotations

import functools
import inspect
import re
import types
from typing import Any

import cuda_parity
import paths
import pytest
import torch
from cuda_parity import REFERENCE_RELEASE

NAMES = cuda_parity.cuda_names()


def lookup(root: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), root)


def of_kind(kind: str) -> list[str]:
    return [name for name in NAMES if (found := cuda_parity.verdict(name)) and found.kind == kind]


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    """(name, kind, default) of each parameter; the default device "cuda" is read as "bp"."""
    return [
        (parameter.name, parameter.kind, "bp" if parameter.default == "cuda" else parameter.default)
        for parameter in inspect.signature(function).parameters.values()
    ]


def fits(ours: list[tuple[Any, ...]], theirs: list[tuple[Any, ...]]) -> bool:
    """Whether the parameters are those of torch.cuda. A release before the reference can lack some of ours."""
    if torch.__version__.startswith(REFERENCE_RELEASE):
        return ours == theirs
    return {name for name, *_ in ours} >= {name for name, *_ in theirs}


def test_every_name_has_a_verdict() -> None:
    assert [name for name in NAMES if cuda_parity.verdict(name) is None] == []


@pytest.mark.skipif(
    not torch.__version__.startswith(REFERENCE_RELEASE), reason="the table describes another release of torch"
)
def test_the_table_names_only_members_of_torch_cuda() -> None:
    described = [name for name in cuda_parity.TABLE if not name.endswith(".*") and name not in NAMES]
    assert sorted(described) == sorted(cuda_parity.LATER_NAMES)


def test_every_difference_has_a_note() -> None:
    assert [name for name, found in cuda_parity.TABLE.items() if found.kind != "same" and not found.note] == []


@pytest.mark.parametrize("name", of_kind("same"))
def test_same(name: str) -> None:
    theirs, ours = lookup(torch.cuda, name), lookup(torch.bp, name)
    if isinstance(theirs, types.ModuleType) or not callable(theirs):
        assert type(ours) is type(theirs)
        return
    if ours is theirs:  # exceptions, which torch.cuda shares with other devices
        return
    if type(theirs).__name__ == "tensortype":  # such as torch.cuda.FloatTensor, which is implemented in C++
        assert (ours.dtype, ours.is_sparse) == (theirs.dtype, theirs.is_sparse)
        return
    later = cuda_parity.LATER_PARAMETERS.get(name.rpartition(".")[2], set()) - {one for one, *_ in parameters(theirs)}
    assert fits([one for one in parameters(ours) if one[0] not in later], parameters(theirs))
    if inspect.isclass(theirs):
        methods = {key: value for key, value in vars(theirs).items() if not key.startswith("_") and callable(value)}
        for key, value in methods.items():
            assert fits(parameters(getattr(ours, key)), parameters(value)), key


@pytest.mark.parametrize("name", of_kind("renamed"))
def test_renamed(name: str) -> None:
    found = cuda_parity.verdict(name)
    assert found is not None
    assert lookup(torch.bp, found.note)
    with pytest.raises(AttributeError):
        lookup(torch.bp, name)


@pytest.mark.parametrize("name", of_kind("refused"))
def test_refused(name: str) -> None:
    theirs, ours = lookup(torch.cuda, name), lookup(torch.bp, name)
    assert parameters(ours) == parameters(theirs)
    needed = [p for p in inspect.signature(ours).parameters.values() if p.default is inspect.Parameter.empty]
    with pytest.raises(NotImplementedError, match=r"\w+ .*\w+"):
        ours(*[None] * len(needed))


@pytest.mark.parametrize("name", of_kind("absent"))
def test_absent(name: str) -> None:
    with pytest.raises(AttributeError):
        lookup(torch.bp, name)


def test_all_lists_every_public_name() -> None:
    public = {
        name
        for name in vars(torch.bp)
        if not name.startswith("_")
        and not isinstance(getattr(torch.bp, name), types.ModuleType)
        and name not in ("annotations", "Any")
    }
    legacy = set(torch.bp.legacy.NAMES)  # created on first access
    modules = {"amp", "graphs", "memory", "nvtx", "random", "streams", "tunable"}
    assert set(torch.bp.__all__) == public | legacy | modules | {"default_generators"}
    assert len(set(torch.bp.__all__)) == len(torch.bp.__all__)


@pytest.mark.skipif(
    not torch.__version__.startswith(REFERENCE_RELEASE), reason="the page describes another release of torch"
)
def test_the_torch_bp_page_has_the_counts_of_the_table() -> None:
    page = (paths.DOCS / "torch-bp.md").read_text(encoding="utf-8")
    marked = re.search(r"<!-- generated: parity -->(.*?)<!-- /generated -->", page, re.DOTALL)
    assert marked, "docs/torch-bp.md has no generated part named parity"
    assert marked[1].split() == cuda_parity.sentence().split()
