"""Overloads of aten, with arguments generated from their schemas, neither raise INTERNAL ASSERT nor crash.

Runs a sample on host devices and on OpenCL. `tests/sweeps/sweep_process.py overloads_sweep.py` runs all.
"""

from __future__ import annotations

import on_opencl
import overloads_sweep
import pytest
import sweep_process
import torch

# Overloads that raised INTERNAL ASSERT or crashed in the past.
ONCE_WRONG = (
    "aten::kaiser_window", "aten::kaiser_window.beta", "aten::kaiser_window.periodic", "aten::nonzero_static",
    "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_reshape_from_tensor", "aten::_saturate_weight_to_fp16",
    "aten::_sobol_engine_draw", "aten::_sobol_engine_ff_", "aten::choose_qparams_optimized",
    "aten::fbgemm_linear_quantize_weight", "aten::fbgemm_pack_gemm_matrix_fp16",
)  # fmt: skip
STEP = 40


@pytest.mark.slow
@pytest.mark.parametrize("driver", ["host", "opencl"])
def test_no_internal_assert_and_no_crash(driver: str) -> None:
    if driver == "opencl":
        on_opencl.require_platform()
    names = overloads_sweep.names("")
    assert len(names) > 1800
    chosen = sorted({*ONCE_WRONG, *names[::STEP]})
    settings = {"TORCH_BACKPLANE_DRIVERS": driver, "TORCH_BACKPLANE_FALLBACK": "silent"}
    assert sweep_process.findings("overloads_sweep.py", chosen, settings) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("length", [0, 1, 2, 9, 100])
def test_kaiser_windows(length: int, dtype: torch.dtype) -> None:
    for options in ({}, {"periodic": False}, {"periodic": True, "beta": 3.5}, {"periodic": False, "beta": 100.0}):
        expected = torch.kaiser_window(length, **options, dtype=dtype)
        found = torch.kaiser_window(length, **options, dtype=dtype, device="bp")
        assert found.device.type == "bp"
        torch.testing.assert_close(found.cpu(), expected, equal_nan=True)


def test_invalid_kaiser_windows_raise() -> None:
    for options in ({"window_length": -1}, {"window_length": 4, "dtype": torch.int64}):
        with pytest.raises(RuntimeError) as expected:
            torch.kaiser_window(**options)
        with pytest.raises(RuntimeError) as found:
            torch.kaiser_window(**options, device="bp")
        assert str(found.value).replace("device=bp", "device=cpu") == str(expected.value)
