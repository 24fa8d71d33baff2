"""Operators in dtypes that CUDA supports and the CPU lacks: a sample of `conformance --cuda-dtypes`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from torch_backplane.conformance import Settings
from torch_backplane.conformance.cuda_dtypes import CudaDtypeCheck, lacking_on_cpu
from torch_backplane.conformance.database import load

ENTRIES = [
    ("histc", torch.int64), ("histc", torch.uint8), ("trace", torch.bool), ("abs", torch.bool),
    ("nn.functional.multi_margin_loss", torch.float16), ("nn.functional.avg_pool3d", torch.bfloat16),
    ("nn.functional.rrelu", torch.float16), ("exp", torch.complex32), ("angle", torch.complex32),
    ("sum", torch.complex32), ("prod", torch.complex32), ("fft.rfft", torch.float16), ("fft.ihfft2", torch.float16),
    ("fft.hfft", torch.complex32), ("nansum", torch.complex128), ("nanmean", torch.complex64),
]  # fmt: skip


@functools.cache
def database() -> dict[str, Any]:
    return load(Settings().database)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "dtype"), ENTRIES, ids=str)
def test_entry(name: str, dtype: torch.dtype) -> None:
    op = database()[name]
    assert dtype in lacking_on_cpu(op)
    settings = Settings(grad=True, samples=3, cuda_dtypes=True)
    result = CudaDtypeCheck(op, dtype, settings, torch.device("bp", 0), lambda text: None).run(errors=False)
    assert result.status == "passed", result.findings


def test_results_have_the_promoted_dtype() -> None:
    half = torch.ones(2, dtype=torch.complex32, device="bp")
    assert torch.exp(half).dtype == torch.complex32
    assert torch.angle(half).dtype == torch.float16
    assert torch.div(half, torch.ones(2, device="bp")).dtype == torch.complex64
    assert torch.sum(half, dtype=torch.complex64).dtype == torch.complex64
    real = torch.ones(8, dtype=torch.float16, device="bp")
    assert torch.ops.aten._fft_r2c(real, [0], 0, True).dtype == torch.complex32
    out = torch.empty(0, dtype=torch.complex64, device="bp")
    assert torch.exp(half, out=out) is out
    assert out.shape == (2,)
    assert half.exp_() is half


def test_out_must_have_the_result_dtype() -> None:
    bools = torch.tensor([True, False], device="bp")
    for dtype in (torch.uint8, torch.int8, torch.float32):
        with pytest.raises(RuntimeError, match=r"^Found dtype \w+ but expected Bool$"):
            torch.abs(bools, out=torch.zeros(2, dtype=dtype, device="bp"))
    for device in ("cpu", "bp"):
        with pytest.raises(RuntimeError, match=r"^Found dtype Double but expected Float$"):
            torch.abs(torch.zeros(2, device=device), out=torch.zeros(2, device=device).double())
        with pytest.raises(RuntimeError, match=r"Bool"):
            torch.abs(torch.zeros(2, dtype=torch.float16, device=device), out=torch.zeros(2, device=device).bool())
        with pytest.raises(RuntimeError, match=r"^torch.histogram: input tensor and hist tensor should have the same"):
            torch.histc(torch.zeros(2, device=device), 2, out=torch.zeros(2, device=device).int())
    out = torch.empty(0, dtype=torch.bool, device="bp")
    assert torch.abs(bools, out=out) is out
    assert out.tolist() == [True, False]
    copy = torch.abs(bools)
    assert bools.logical_not_().abs_() is bools
    assert (bools.tolist(), copy.tolist()) == ([False, True], [True, False])


@pytest.mark.parametrize("target", [torch.int64, torch.float32, torch.complex64], ids=str)
def test_targets_do_not_promote(target: torch.dtype) -> None:
    for device in ("cpu", "bp"):
        x = torch.zeros(0, 4, dtype=torch.float16, device=device)
        loss = torch.nn.functional.multilabel_margin_loss(x, x.to(target), reduction="none")
        assert (loss.dtype, loss.shape) == (torch.float16, (0,))


def test_errors_name_the_dtypes_of_the_arguments() -> None:
    for device in ("cpu", "bp"):
        half = torch.ones(3, dtype=torch.float16, device=device)
        with pytest.raises(RuntimeError, match=r"^expected dtype c10::Half .* got dtype c10::complex<c10::Half>$"):
            torch.lerp(half, half.to(torch.complex32), 2.0)


def test_unsupported_dtypes_raise_the_cpus_error() -> None:
    for device in ("cpu", "bp"):
        with pytest.raises(RuntimeError, match=r"^linalg\.inv: Low precision dtypes not supported\. Got Half$"):
            torch.linalg.inv(torch.eye(2, dtype=torch.float16, device=device))


@pytest.mark.parametrize(
    ("name", "dtype"), [("abs", torch.bool), ("exp", torch.complex32), ("sigmoid", torch.complex32)], ids=str
)
def test_overlapping_destinations_are_refused(name: str, dtype: torch.dtype) -> None:
    """As in the dtypes that have a CPU kernel. Nothing is written."""
    function = getattr(torch, name)
    one = torch.ones(1, device="bp").to(dtype)
    many = torch.ones(5, device="bp").to(dtype)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        getattr(one.expand(2), name + "_")()
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        function(many[:2], out=one.expand(2))
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        function(many[1:], out=many[:-1])
    assert torch.equal(one.to(torch.complex64).cpu(), torch.ones(1, dtype=torch.complex64))
    assert torch.equal(many.to(torch.complex64).cpu(), torch.ones(5, dtype=torch.complex64))
    getattr(many, name + "_")()
