"""docs/torch-backends.md has a row for every public name of PyTorch's torch.backends, and names existing attributes."""

from __future__ import annotations

import importlib
import inspect
import re

import paths
import pytest
import torch
from cuda_parity import REFERENCE_RELEASE

PAGE = paths.DOCS / "torch-backends.md"
# The modules that PyTorch documents under torch.backends, except python_native, which some releases lack.
MODULES = (
    "cpu", "cuda", "cudnn", "cusparselt", "mha", "miopen", "mkl", "mkldnn", "mps", "nnpack", "openmp", "opt_einsum",
    "xeon",
)  # fmt: skip
# Names in these modules that are not part of their API.
_HELPERS = {
    "Any", "ContextProp", "PropModule", "TYPE_CHECKING", "VERBOSE_OFF", "VERBOSE_ON", "contextmanager", "lru_cache",
    "m", "warn_once",
}  # fmt: skip


def rows() -> dict[str, str]:
    """The right-hand cells of the table, by PyTorch's name."""
    text = PAGE.read_text(encoding="utf-8")
    table = text[text.index("## Names of PyTorch's torch.backends") :]
    found: dict[str, str] = {}
    for left, right in re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", left):
            assert name not in found, name
            found[name] = right
    return found


def public(name: str) -> list[str]:
    """The public names of torch.backends.NAME. If an object replaces the module, those of its class and module."""
    module = importlib.import_module(f"torch.backends.{name}")
    if type(module) is type(torch):
        names = getattr(module, "__all__", None) or dir(module)
        found = {one for one in names if not inspect.ismodule(getattr(module, one))}
    else:
        found = {*vars(type(module)), *(one for one in dir(module.m) if inspect.isfunction(getattr(module.m, one)))}
    return sorted(one for one in found - _HELPERS if not one.startswith("_"))


@pytest.mark.parametrize("module", MODULES)
def test_every_name_of_pytorch_has_a_row(module: str) -> None:
    table = rows()
    missing = [one for one in public(module) if f"{module}.{one}" not in table and f"{module}.*" not in table]
    assert not missing


def test_rows_name_existing_attributes() -> None:
    for name, ours in rows().items():
        module, _, rest = name.partition(".")
        assert module in MODULES, name
        if rest != "*" and torch.__version__.startswith(REFERENCE_RELEASE):
            assert hasattr(importlib.import_module(f"torch.backends.{module}"), rest), name
        if not ours.startswith(("none: ", "not yet")):
            for one in re.findall(r"`([^`]+)`", ours):
                assert hasattr(torch.backends.bp, one), f"{name}: {one}"  # type: ignore[attr-defined]


def test_every_name_of_torch_backends_bp_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in torch.backends.bp.__all__:  # type: ignore[attr-defined]
        assert re.search(rf"\b{name}\b", text) or re.sub("overrideable", "flash", name) in text, name
