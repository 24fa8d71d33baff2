"""A number that a formula or a template uses is an argument of the kernel: another number is no kernel to build, except
for values that a declaration calls static.

For all planned operators, on devices that build nothing, with the text for GPUs and for processors.
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


def test_another_number_is_no_kernel_to_build(found: dict[str, Any]) -> None:
    assert found["operators"] > 150
    assert found["built"] == []


def test_static_numbers_have_kernels_of_their_own(found: dict[str, Any]) -> None:
    assert found["needless"] == []


def test_all_numbers_of_all_operators_are_tried(found: dict[str, Any]) -> None:
    assert found["without a call"] == []
    assert found["not varied"] == []
    assert found["not planned"] == []
