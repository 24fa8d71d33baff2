"""nn.TransformerEncoder in evaluation, where PyTorch makes nested tensors of padded batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn


def encoder(norm_first: bool = False, **options: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, **options)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
HOLES = torch.tensor([[False] * 5, [False, True, False, True, False], [True] + [False] * 4])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("padding", [None, PADDING, HOLES, PADDING.flip(1)], ids=["none", "end", "holes", "begin"])
def test_padded_batches_agree_with_the_cpu(padding: Tensor | None, grad: bool, training: bool) -> None:
    """What is not padding: there PyTorch has zeros on the fast path and something else on the other one."""
    model = encoder().train(training)
    x = torch.randn(3, 5, 16)
    kept = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
    with torch.set_grad_enabled(grad):
        expected = model(x, src_key_padding_mask=padding)
        on_bp = None if padding is None else padding.to("bp")
        found = model.to("bp")(x.to("bp"), src_key_padding_mask=on_bp)
    assert found.device.type == "bp"
    torch.testing.assert_close(found.cpu()[kept], expected[kept], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("with_padding", [False, True])
def test_masks_agree_with_the_cpu(with_padding: bool) -> None:
    model = encoder().eval()
    x, mask = torch.randn(3, 5, 16), torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    padding = PADDING if with_padding else None
    with torch.no_grad():
        expected = model(x, mask=mask, src_key_padding_mask=padding)
        on_bp = None if padding is None else padding.to("bp")
        found = model.to("bp")(x.to("bp"), mask=mask.to("bp"), src_key_padding_mask=on_bp)
    kept = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
    torch.testing.assert_close(found.cpu()[kept], expected[kept], rtol=1e-4, atol=1e-5)


def test_nested_tensors_themselves_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="nested tensors are not supported on bp"):
        torch._nested_tensor_from_mask(torch.ones(1, 2, 3, device="bp"), torch.ones(1, 2, device="bp").bool())
