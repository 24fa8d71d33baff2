"""Calls with one changed size of one tensor: the device raises where the CPU does, with the same type of error.

This is a sample. `python -m torch_backplane conformance --sizes` covers the whole operator database.
"""

from __future__ import annotations

import pytest
import torch

from torch_backplane.conformance import Settings
from torch_backplane.conformance.database import load
from torch_backplane.conformance.settings import OP_DB
from torch_backplane.conformance.sizes import check_sizes

SAMPLE = [
    "addmv", "baddbmm", "cat", "gather", "index_copy", "scatter", "scatter_add", "searchsorted",
    "native_group_norm", "native_batch_norm", "_batch_norm_with_update", "nn.functional.batch_norm",
    "nn.functional.conv_transpose2d", "nn.functional.embedding", "nn.functional.multi_margin_loss",
    "nn.functional.multilabel_margin_loss", "nn.functional.nll_loss", "nn.functional.scaled_dot_product_attention",
]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_mismatched_sizes_raise_the_same_errors(name: str) -> None:
    operators, device = load(OP_DB), torch.device("bp", 0)
    if name == "native_group_norm" and name not in operators:
        pytest.skip("PyTorch's operator database has no native_group_norm before torch 2.13")
    if name.endswith("attention") and torch.__version__ >= "2.14":
        pytest.skip("PyTorch's CPU kernel accepts keys and values of different lengths since torch 2.14")
    result = check_sizes(operators[name], torch.float32, Settings(sizes=True, samples=2), device, lambda text: None)
    assert [finding for finding in result.findings if finding.fails] == []
    assert result.compared + result.both_raised > 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_batch_norm_of_one_element(momentum: float, training: bool) -> None:
    """The running variance becomes NaN, because it is divided by the count minus one."""
    found = []
    for device in ("cpu", "bp:0"):
        one = torch.ones(1, device=device)
        moved = [one.clone(), one.clone()]
        results = torch.native_batch_norm(one.view(1, 1) * 3, one, one, *moved, training, momentum, 1e-5)
        found.append([value.cpu() for value in (*results, *moved)])
    torch.testing.assert_close(found[1], found[0], equal_nan=True, rtol=1e-4, atol=0)
