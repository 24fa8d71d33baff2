"""nn.TransformerEncoder in evaluation mode, where PyTorch converts padded batches to nested tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def encoder(norm_first: bool = False, **options: bool) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, **options)


def to_bp(arguments: Any) -> Any:
    """Moves arguments to the device. A tensor that is passed twice stays one tensor."""
    moved: dict[int, Tensor] = {}
    return tree_map_only(Tensor, lambda one: moved.setdefault(id(one), one.to("bp")), arguments)


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
HOLES = torch.tensor([[False] * 5, [False, True, False, True, False], [True] + [False] * 4])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("padding", [None, PADDING, HOLES, PADDING.flip(1)], ids=["none", "end", "holes", "begin"])
def test_padded_batches_agree_with_the_cpu(padding: Tensor | None, grad: bool, training: bool) -> None:
    """Compares positions without padding: at padding, only PyTorch's fast path gives zeros."""
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


def _multi_head_arguments(batch: int, length: int, width: int, heads: int) -> list[Any]:
    weights = torch.randn(3 * width, width), torch.randn(3 * width), torch.randn(width, width), torch.randn(width)
    return [*[torch.randn(batch, length, width)] * 3, width, heads, *weights]


def _masks(batch: int, length: int, heads: int) -> dict[int | None, Tensor | None]:
    """Masks by kind. Each query has at least one key."""
    shapes = {0: (length, length), 1: (batch, length), 2: (batch, heads, length, length)}
    masks: dict[int | None, Tensor | None] = {kind: torch.rand(shape) > 0.6 for kind, shape in shapes.items()}
    for mask in masks.values():
        mask[..., 0] = False  # type: ignore[index]
    return {None: None, **masks}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", [None, 0, 1, 2])
def test_multi_head_attention_agrees_with_the_cpu(kind: int | None, need_weights: bool) -> None:
    for sizes in ((2, 3, 8, 2), (4, 7, 16, 4), (1, 1, 8, 1), (2, 5, 8, 2), (2, 3, 8, 2)):
        arguments = _multi_head_arguments(*sizes)
        mask = _masks(sizes[0], sizes[1], sizes[3])[kind]
        for average in (True, False):
            if mask is not None and not average:  # a mask of floats, which PyTorch adds elsewhere
                mask = torch.zeros(mask.shape).masked_fill(mask, -torch.inf)
            call = (*arguments, mask, need_weights, average, kind)
            expected = torch._native_multi_head_attention(*call)
            found = torch._native_multi_head_attention(*to_bp(call))
            torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-4, atol=1e-4)
            assert (found[1] is None) == (expected[1] is None)
            if need_weights:
                torch.testing.assert_close(found[1].cpu(), expected[1])


def test_multi_head_attention_with_other_keys_agrees_with_the_cpu() -> None:
    arguments = _multi_head_arguments(2, 3, 8, 2)
    arguments[1] = arguments[2] = torch.randn(2, 3, 8)
    for other in (arguments[2], torch.randn(2, 3, 8)):
        arguments[2] = other
        expected = torch._native_multi_head_attention(*arguments)
        found = torch._native_multi_head_attention(*to_bp(arguments))
        torch.testing.assert_close(tuple(one.cpu() for one in found), expected, rtol=1e-4, atol=1e-4)


def test_multi_head_attention_raises_the_cpus_errors() -> None:
    right = _multi_head_arguments(2, 3, 8, 2)
    wrong = {
        0: torch.randn(3, 8), 1: torch.randn(1, 3, 8), 3: 7, 4: 3, 5: torch.randn(3, 8), 6: torch.randn(1, 24),
        7: torch.randn(3, 3), 8: torch.randn(2),
    }  # fmt: skip
    masks = [(torch.zeros(3, 3).bool(), 1), (torch.zeros(3, 3).bool(), None), (torch.zeros(2, 2).bool(), 0)]
    calls = [[*right[:at], value, *right[at + 1 :]] for at, value in wrong.items()]
    calls += [[*right, mask, True, True, kind] for mask, kind in masks]
    for call in calls:
        with pytest.raises(RuntimeError) as expected:
            torch._native_multi_head_attention(*call)
        with pytest.raises(RuntimeError) as found:
            torch._native_multi_head_attention(*to_bp(call))
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]
        torch._native_multi_head_attention(*to_bp(right))


def test_nested_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="nested tensors are not supported on bp"):
        torch._nested_tensor_from_mask(torch.ones(1, 2, 3, device="bp"), torch.ones(1, 2, device="bp").bool())
