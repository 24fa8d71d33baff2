"""Tests that numbers in formulas and templates are kernel arguments: a call with another number builds no new kernel,
except for values declared static.

Covers all planned operators, with the kernel text for GPUs and for CPUs, on devices that do not build kernels.
"""

from __future__ import annotations

import json
from typing import Any

import driver_packages
import forked
import paths
import pytest

CODE = (paths.SWEEPS / "number_sweep.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    site = tmp_path_factory.mktemp("site")
    source = (paths.SUPPORT / "unbuilt_driver.py").read_text(encoding="utf-8")
    driver_packages.install(site, "unbuilt", source, "UnbuiltDriver")
    result = forked.run(CODE, site, TORCH_BACKPLANE_DRIVERS="unbuilt")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_other_numbers_build_no_kernels(found: dict[str, Any]) -> None:
    assert found["operators"] > 150
    assert found["built"] == []


def test_static_numbers_need_separate_kernels(found: dict[str, Any]) -> None:
    assert found["needless"] == []


def test_all_numbers_of_all_operators_are_covered(found: dict[str, Any]) -> None:
    assert found["without a call"] == []
    assert found["not varied"] == []
    assert found["not planned"] == []
