"""Tests TORCH_BACKPLANE_TARGET, which makes an OpenCL device model another device. Programs run in new processes."""

from __future__ import annotations

import json
from pathlib import Path

import forked
import on_opencl
import pytest

from torch_backplane.conformance import ConformanceError, Settings, run
from torch_backplane.kernels.modelled import SHIPPED, read_target

PROGRAM = """
import json, torch, torch_backplane
from torch_backplane import planning
x = torch.arange(300.0).reshape(3, 100)
y = x.to("bp")
try:
    float64 = str(y.double().dtype)
except TypeError as error:
    float64 = str(error)
target = planning.dialect_of(y.device).target
properties = torch.bp.get_device_properties()
print(json.dumps({
    "name": properties.name, "units": [properties.multi_processor_count, target.compute_units], "simt": target.simt,
    "limits": [target.max_group_size, target.group_multiple, target.max_argument_bytes], "float64": float64,
    "right": [torch.allclose(f(y).cpu(), f(x)) for f in (torch.sum, lambda x: x @ x.t(), lambda x: x.softmax(1))],
    "host sees memory": planning.host_sees_memory(y.device), "host device": torch.ones(2, device="bp:1").sum().item(),
}))
"""
SETTINGS = {"TORCH_BACKPLANE_VISIBLE_DEVICES": "opencl:0,host:0", "TORCH_BACKPLANE_DRIVERS": "opencl,host"}
# One or two operators of every family.
SAMPLE = (
    "add|where|sum|var|cumsum|sort|nonzero|unique|index_add|scatter_add|matmul|softmax|cat|"
    "nn.functional.(layer_norm|conv2d|max_pool2d|embedding|cross_entropy|interpolate.bilinear|pad.reflect)"
)


def properties_as(target: str) -> dict[str, object]:
    on_opencl.require_platform()
    done = forked.run(PROGRAM, Path(), timeout=300, **SETTINGS, TORCH_BACKPLANE_TARGET=target)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SHIPPED)
def test_device_has_the_properties_of_the_modelled_target(name: str) -> None:
    modelled, found = read_target(name), properties_as(name)
    target = modelled.target
    assert str(found["name"]).startswith(f"{modelled.name}, modelled on ")
    assert found["units"] == [target.compute_units] * 2
    assert found["simt"] is True
    group, multiple, arguments = found["limits"]
    assert group <= target.max_group_size
    assert multiple == target.group_multiple
    assert arguments <= target.max_argument_bytes
    assert found["host sees memory"] is False
    assert found["right"] == [True] * 3
    assert found["host device"] == 2.0
    if target.float64:
        assert found["float64"] == "torch.float64"
    else:
        assert "does not support Double" in str(found["float64"])
        assert modelled.name in str(found["float64"])


def test_limits_of_the_real_device_cap_the_modelled_limits(tmp_path: Path) -> None:
    described = json.loads(SHIPPED["nvidia-ada"].read_text(encoding="utf-8"))
    described["figures"] |= {"max_group_size": 1 << 16, "max_argument_bytes": 1 << 40}
    path = tmp_path / "large.json"
    path.write_text(json.dumps(described), encoding="utf-8")
    group, _, arguments = properties_as(str(path))["limits"]
    assert group < 1 << 16
    assert arguments < 1 << 40


@pytest.mark.slow
@pytest.mark.parametrize("name", ["amd-rdna3", "arm-mali-g610"])  # wide subgroups; narrow ones, and no float64
def test_operators_of_every_family_on_a_modelled_device(name: str) -> None:
    on_opencl.require_platform()
    settings = Settings(match=rf"^({SAMPLE})$", samples=1, driver="opencl", target=name, grad=True)
    report = run(settings, jobs=1)
    assert report.ok, [(one.op, one.dtype, one.findings[:1]) for one in report.results if one.status == "failed"]
    assert sum(one.status == "passed" for one in report.results) > 18


def test_conformance_reports_an_invalid_target() -> None:
    with pytest.raises(ConformanceError, match=r"TORCH_BACKPLANE_TARGET='nonsense'.*with Backplane are amd-rdna3"):
        run(Settings(match="^add$", target="nonsense"), jobs=1)
