"""Cases of `flex_attention`: modifications of scores, masks, shapes, and what they compute by definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention, or_masks

Modification = Callable[..., Any]


@dataclass
class Case:
    """Attention of queries (batch, heads, length, columns) with `kv` (heads, length, columns of values).

    `score` and `mask` make the functions of flex_attention from the captured tensors.
    """

    query: tuple[int, int, int, int]
    kv: tuple[int, int, int]
    score: Callable[..., Modification] | None = None
    mask: Callable[..., Modification] | None = None
    captured: tuple[Tensor, ...] = ()
    scale: float | None = None
    rows_without_keys: bool = False
    block_size: int | tuple[int, int] = 64

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        batch, _, _, columns = self.query
        heads, length, value_columns = self.kv
        shapes = (self.query, (batch, heads, length, columns), (batch, heads, length, value_columns))
        return [torch.randn(shape).to(dtype) for shape in shapes]


def relative_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + (i - j) * 0.1


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() < 4


def alibi(slopes: Tensor) -> Modification:
    return lambda score, b, h, i, j: score + slopes[h] * (j - i)


def table_of_distances(table: Tensor) -> Modification:
    return lambda score, b, h, i, j: score + table[h, (i - j).clamp(-8, 8) + 8] * table[0, 0]


def soft_cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def capped(cap: float) -> Modification:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap)


def later_scores(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i - j > 3 * h, score * score.abs(), -math.inf)


def prefix(lengths: Tensor) -> Modification:
    return or_masks(lambda b, h, i, j: j < lengths[b], causal)


def documents(numbers: Tensor) -> Modification:
    return lambda b, h, i, j: (numbers[b, i] == numbers[b, j]) & (i >= j)


CASES = {
    "plain": Case((2, 3, 40, 16), (3, 40, 16)),
    "relative bias": Case((1, 2, 33, 40), (2, 33, 40), lambda: relative_bias, scale=0.3),
    "alibi": Case((2, 4, 37, 64), (4, 37, 64), alibi, lambda *_: causal, (torch.rand(4),)),
    "soft cap, other lengths": Case((2, 2, 17, 16), (2, 50, 40), lambda: soft_cap),
    "documents": Case((2, 2, 45, 16), (2, 45, 16), None, documents, ((torch.arange(90).reshape(2, 45) // 12),)),
    "grouped heads": Case((1, 6, 21, 16), (2, 21, 16), lambda: relative_bias, lambda: causal),
    "window": Case((1, 2, 150, 16), (2, 150, 16), None, lambda: and_masks(window, causal)),
    "rows without keys": Case(
        (1, 2, 30, 16), (2, 12, 16), lambda: soft_cap, lambda: window, rows_without_keys=True
    ),
    "one query": Case((3, 4, 1, 64), (4, 77, 64), lambda: relative_bias),
    "prefix": Case((3, 2, 70, 16), (2, 70, 16), None, prefix, (torch.tensor([5, 30, 0]),), block_size=16),
    "blocks of other sizes": Case(
        (2, 4, 203, 16), (2, 331, 24), alibi, lambda *_: window, (torch.rand(4),), block_size=(48, 80)
    ),
    "scores of -inf": Case((2, 4, 70, 16), (2, 70, 24), lambda: later_scores, rows_without_keys=True),
    "table": Case(
        (2, 4, 70, 80), (2, 90, 80), table_of_distances, lambda *_: causal, (torch.randn(4, 17),), block_size=32
    ),
    "distances": Case((2, 2, 20, 16), (2, 29, 16), table_of_distances, None, (torch.randn(2, 17),)),
}  # fmt: skip
WITH_GRADIENTS = {"alibi", "distances"}  # of the captured tensors


def attend(case: Case, inputs: list[Tensor], captured: list[Tensor], **options: Any) -> Any:
    """The call of flex_attention, as a program would write it."""
    query, key, value = inputs
    score = case.score(*captured) if case.score else None
    mask = block_mask(case, query, key, captured) if case.mask else None
    gqa = query.shape[1] != key.shape[1]
    return flex_attention(query, key, value, score, mask, case.scale, gqa, **options)


def block_mask(case: Case, query: Tensor, key: Tensor, captured: list[Tensor]) -> BlockMask:
    assert case.mask is not None
    batch = None if not captured or captured[0].is_floating_point() else query.shape[0]
    return create_block_mask(
        case.mask(*captured),
        batch,
        None,
        query.shape[2],
        key.shape[2],
        device=query.device,
        BLOCK_SIZE=case.block_size,
    )


def formula(case: Case, inputs: list[Tensor], captured: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention and the logarithms of the sums, from their definition."""
    query, key, value = (one.float() for one in inputs)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * (case.scale or 1 / math.sqrt(query.shape[-1]))
    places = [
        torch.arange(size).reshape([-1 if dim == k else 1 for k in range(4)]) for dim, size in enumerate(scores.shape)
    ]
    if case.score:
        scores = case.score(*captured)(scores, *places)
    if case.mask:
        scores = scores.masked_fill(~case.mask(*captured)(*places), -math.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0) if case.rows_without_keys else torch.softmax(scores, -1)
    return (weights @ value).to(inputs[0].dtype), scores.logsumexp(-1)


def on(device: str, tensors: Any, gradients: bool) -> list[Tensor]:
    return [one.detach().to(device).requires_grad_(gradients and one.is_floating_point()) for one in tensors]


def agree(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_device=False)
