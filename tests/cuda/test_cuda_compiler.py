"""Tests the CUDA driver's compiler with NVIDIA's NVRTC, which needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")

from torch_backplane.drivers import builds
from torch_backplane.drivers.cuda import compiler
from torch_backplane.drivers.cuda.compiler import CompileError, Compiler, UnsupportedArchitecture, architecture
from torch_backplane.drivers.cuda.device import architecture_of

TEXT = 'extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }'


@pytest.fixture(autouse=True)
def _nvrtc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCH_BACKPLANE_CUDA_OPTIONS", raising=False)
    try:
        compiler.version()
    except Exception as error:
        pytest.skip(f"needs NVRTC: {error}")


@pytest.mark.parametrize(
    ("capability", "supported", "chosen"),
    [
        ((8, 9), [75, 80, 89, 90], "sm_89"),
        ((12, 0), [75, 90, 120], "sm_120"),
        ((8, 7), [75, 80, 90], "compute_80"),
        ((13, 0), [75, 80, 90], "compute_90"),
    ],
)
def test_the_architecture_is_the_devices_or_the_newest_older_one(
    capability: tuple[int, int], supported: Sequence[int], chosen: str
) -> None:
    assert architecture(capability, supported) == chosen


def test_a_gpu_that_is_older_than_nvrtc_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match=r"capability is 6\.1, and NVRTC compiles for 7\.5 or later"):
        architecture((6, 1), [75, 80])


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_machine_code_is_for_the_architecture(capability: tuple[int, int]) -> None:
    binary = Compiler(capability, ["--std=c++17"]).build(TEXT)
    assert architecture_of(binary) == f"sm_{capability[0]}{capability[1]}"


def test_unknown_gpus_get_ptx() -> None:
    made = Compiler((99, 0), [])
    text = made.build(TEXT)
    assert b".entry scale" in text
    assert text.endswith(b"\0")
    assert architecture_of(text) == f"PTX for {made.architecture.replace('compute', 'sm')}"


def test_the_architecture_of_something_else() -> None:
    assert architecture_of(b"") == architecture_of(b"\x7fELF") == architecture_of(b"text") == "no GPU"


def test_the_compilers_log_is_in_the_error() -> None:
    error = r'(?s)NVRTC_ERROR_COMPILATION for --gpu-architecture=sm_80.*"y" is undefined'
    with pytest.raises(CompileError, match=error):
        Compiler((8, 0), []).build(TEXT.replace("*= by", "*= y"))


def test_options_of_the_user_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Compiler((8, 0), []).build(TEXT)
    monkeypatch.setenv("TORCH_BACKPLANE_CUDA_OPTIONS", "--generate-line-info -DUNUSED='1 2'")
    with_lines = Compiler((8, 0), []).build(TEXT)
    assert b".debug_line" in with_lines
    assert b".debug_line" not in plain
    monkeypatch.setenv("TORCH_BACKPLANE_CUDA_OPTIONS", "--no-such-option")
    with pytest.raises(CompileError, match="no-such-option"):
        Compiler((8, 0), []).build(TEXT)


def test_programs_are_cached_by_architecture_options_and_text() -> None:
    def counts(capability: tuple[int, int], options: Sequence[str], text: str) -> dict[str, int]:
        one = Compiler(capability, options)
        assert one.get(text, bytes)[:4] == b"\x7fELF"
        builds.wait_for_all()
        return one.counts

    built, loaded = {"built": 1, "loaded": 0}, {"built": 0, "loaded": 1}
    assert counts((8, 0), [], TEXT) == built
    assert counts((8, 0), [], TEXT) == loaded
    assert counts((9, 0), [], TEXT) == built
    assert counts((8, 0), ["--fmad=false"], TEXT) == built
    assert counts((8, 0), [], TEXT + " ") == built


def test_a_cached_program_that_the_device_refuses_is_built_again() -> None:
    Compiler((8, 0), []).get(TEXT, bytes)
    builds.wait_for_all()
    refusals = [ValueError("another device")]

    def load(binary: bytes) -> bytes:
        if refusals:
            raise refusals.pop()
        return binary

    one = Compiler((8, 0), [])
    assert one.get(TEXT, load)[:4] == b"\x7fELF"
    assert one.counts == {"built": 1, "loaded": 0}
