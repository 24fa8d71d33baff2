"""The operators that graphs call for `flex_attention` in one pass. flex_lowering.py writes their statements."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels.templates.attention import Saved
from torch_backplane.kernels.templates.flex_attention import (
    BlockMask,
    Operands,
    Results,
    Scores,
    flex_attention,
    flex_attention_gradient,
)
from torch_backplane.operators.linear_algebra import all_aligned
from torch_backplane.planning.template import error_report, run_template

_library = torch.library.Library("backplane", "FRAGMENT")
# `blocks` are kv_num_blocks, kv_indices and, if there are any, those of full blocks. `layout` are the strides of the
# result. `block_size` are the queries and the keys of a block. `text` is a `Statements`. For the gradients, as many of
# q_num_blocks, q_indices, … follow in `blocks`, and `inner` is that of `flex_attention_gradient`.
_library.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] blocks, Tensor[] inputs, Scalar[] numbers, "
    "SymInt[] layout, SymInt[] block_size, float scale, bool finds_maxima, str text) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "flex_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor logarithm, Tensor inner, "
    "Tensor[] blocks, Tensor[] inputs, Scalar[] numbers, SymInt[] block_size, float scale, str text) "
    "-> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, kw_only=True)
class Statements:
    """The statements of score_mod and mask_mod, as `kernels.templates.flex_attention.Scores` describes them.

    Args:
        modify, mask, differentiate, functions: text.
        dtypes: the names of the dtypes of variables.
        inputs: the names of captured tensors.
        numbers: the names of captured numbers and sizes, each with the name of its dtype.
        reports_errors: whether statements report an index out of range.
    """

    modify: str
    mask: str
    differentiate: str = ""
    functions: str
    dtypes: Sequence[str]
    inputs: Sequence[str]
    numbers: Sequence[tuple[str, str]]
    reports_errors: bool

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    @functools.lru_cache(256)
    def of(text: str) -> Statements:
        return Statements(**json.loads(text))

    def scores(
        self, scale: float, inputs: Sequence[torch.Tensor], numbers: Sequence[Any], device: torch.device
    ) -> Scores:
        """The statements with their arguments."""
        return Scores(
            scale,
            self.modify,
            self.mask,
            self.functions,
            tuple(_dtype(one) for one in self.dtypes),
            dict(zip(self.inputs, inputs, strict=True)),
            {name: (_dtype(dtype), one) for (name, dtype), one in zip(self.numbers, numbers, strict=True)},
            error_report(device, "flex_attention") if self.reports_errors else None,
            self.differentiate,
        )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def _results(
    query: torch.Tensor, value: torch.Tensor, layout: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the logarithms and the maxima, without their values."""
    shape = (*query.shape[:3], value.shape[3])
    out = torch.empty_strided(shape, layout, dtype=query.dtype, device=query.device)
    logarithm = torch.empty(shape[:3], dtype=torch.float32, device=query.device)
    return out, logarithm, torch.empty_like(logarithm)


@torch.library.register_fake("backplane::flex_attention", lib=_library)
def _fake(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    _, _, _, layout, *_ = given
    return _results(query, value, layout)


def _plan(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: list[torch.Tensor],
    inputs: list[torch.Tensor], numbers: list[Any], layout: list[int], block_size: list[int], scale: float,
    finds_maxima: bool, text: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """`flex_attention` of PyTorch's higher-order operators. The maxima have no values without `finds_maxima`."""
    out, logarithm, maximum = results = _results(query, value, layout)
    if not query.numel() or not value.shape[3]:
        return results
    blocks = [one.expand(*query.shape[:2], *one.shape[2:]) for one in blocks]
    scores = Statements.of(text).scores(scale, inputs, numbers, query.device)
    run_template(
        flex_attention,
        query.device,
        Results(out, logarithm, maximum if finds_maxima else None),
        Operands(query, _of_all_sequences(key, query), _of_all_sequences(value, query)),
        _block_mask(blocks, *block_size),
        scores._replace(aligned=all_aligned(query, key, value)),
        name="flex_attention",
    )
    return results


def _of_all_sequences(one: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The keys or values for each sequence: all can share one."""
    return one.expand(query.shape[0], -1, -1, -1)


def _block_mask(blocks: Sequence[torch.Tensor], rows: int, others: int) -> BlockMask:
    counts, indices, *full = blocks
    full_counts, full_indices = full or (None, None)
    return BlockMask(counts, indices, full_counts, full_indices, rows, others)


_C.set_planner("backplane::flex_attention", _plan)


def _gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients by the names of their operands, without their values; those of keys and values by sequence."""
    operands = {"query": query, "key": _of_all_sequences(key, query), "value": _of_all_sequences(value, query)}
    return {name: torch.empty_like(one) for name, one in operands.items()}


@torch.library.register_fake("backplane::flex_attention_backward", lib=_library)
def _fake_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(_gradients(query, key, value).values())


def _plan_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logarithm: torch.Tensor,
    inner: torch.Tensor, blocks: list[torch.Tensor], inputs: list[torch.Tensor], numbers: list[Any],
    block_size: list[int], scale: float, text: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The gradients of query, key and value."""
    gradients = _gradients(query, key, value)
    queries, keys = block_size
    blocks = [one.expand(*query.shape[:2], *one.shape[2:]) for one in blocks]
    half = len(blocks) // 2
    of_queries, of_keys = _block_mask(blocks[:half], queries, keys), _block_mask(blocks[half:], keys, queries)
    saved = Saved(query, _of_all_sequences(key, query), _of_all_sequences(value, query), logarithm, inner)
    scores = Statements.of(text).scores(scale, inputs, numbers, query.device)
    scores = scores._replace(aligned=all_aligned(query, key, value, grad))
    for of, out in gradients.items():
        if out.numel():
            run_template(
                flex_attention_gradient,
                query.device,
                out,
                of,
                grad,
                saved,
                of_queries if of == "query" else of_keys,
                scores,
                name="flex_attention_backward",
            )
    return tuple(gradients.values())


_C.set_planner("backplane::flex_attention_backward", _plan_backward)
