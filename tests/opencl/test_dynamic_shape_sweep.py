"""A sample of `make test-shapes`: families of operators with changing shapes; plans are compared with planners."""

from __future__ import annotations

import dynamic_shape_sweep
import pytest
import torch

SAMPLE = (
    "add", "where", "sum", "var_mean", "argmax", "cat", "index_select", "gather", "index_put", "cumsum",
    "softmax", "sort", "mm", "addmv", "baddbmm", "expand_copy", "slice_scatter", "roll", "tril", "arange",
    "masked_fill", "nn.functional.layer_norm", "nn.functional.conv2d", "nn.functional.max_pool2d",
    "nn.functional.interpolate.bilinear", "nn.functional.embedding", "nn.functional.cross_entropy",
)  # fmt: skip
OTHER_DTYPES = [
    ("add", torch.int32),
    ("mul", torch.float16),
    ("sum", torch.bool),
    ("cat", torch.int8),
    ("mm", torch.float64),
]


def check(name: str, dtype: torch.dtype) -> None:
    (info,) = (info for info, _ in dynamic_shape_sweep.entries(f"^{name}$", []))
    found = dynamic_shape_sweep.findings(info, dtype, samples=4, seconds=1.0)
    assert not found, "\n\n".join(one.text for one in found)


@pytest.mark.parametrize("name", SAMPLE)
def test_plans_for_changing_shapes_agree_with_planners(name: str) -> None:
    check(name, torch.float32)


@pytest.mark.parametrize(("name", "dtype"), OTHER_DTYPES)
def test_plans_of_other_dtypes(name: str, dtype: torch.dtype) -> None:
    check(name, dtype)
