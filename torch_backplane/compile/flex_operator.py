"""The operator that graphs call for `flex_attention` in one pass. flex_lowering.py writes its statements."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.kernels.templates.flex_attention import BlockMask, Operands, Results, Scores, flex_attention
from torch_backplane.planning.template import error_report, run_template

_library = torch.library.Library("backplane", "FRAGMENT")
# `blocks` are kv_num_blocks, kv_indices and, if there are any, those of full blocks. `layout` are the strides of the
# result. `block_size` are the queries and the keys of a block. `text` is a `Statements`.
_library.define(
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] blocks, Tensor[] inputs, Scalar[] numbers, "
    "SymInt[] layout, SymInt[] block_size, float scale, bool finds_maxima, str text) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True, kw_only=True)
class Statements:
    """The statements of score_mod and mask_mod, as `kernels.templates.flex_attention.Scores` describes them.

    Args:
        modify, mask, functions: text.
        dtypes: the names of the dtypes of variables.
        inputs: the names of captured tensors.
        numbers: the names of captured numbers and sizes, each with the name of its dtype.
        reports_errors: whether statements report an index out of range.
    """

    modify: str
    mask: str
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

    def scores(self, inputs: Sequence[torch.Tensor], numbers: Sequence[Any], device: torch.device) -> Scores:
        """The statements with their arguments."""
        return Scores(
            self.modify,
            self.mask,
            self.functions,
            tuple(_dtype(one) for one in self.dtypes),
            dict(zip(self.inputs, inputs, strict=True)),
            {name: (_dtype(dtype), one) for (name, dtype), one in zip(self.numbers, numbers, strict=True)},
            error_report(device, "flex_attention") if self.reports_errors else None,
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
    batch, heads = query.shape[:2]
    key, value = (one.expand(batch, -1, -1, -1) for one in (key, value))
    counts, indices, *full = (one.expand(batch, heads, *one.shape[2:]) for one in blocks)
    full_counts, full_indices = full or (None, None)
    scores = Statements.of(text).scores(inputs, numbers, query.device)
    run_template(
        flex_attention,
        query.device,
        Results(out, logarithm, maximum if finds_maxima else None),
        Operands(query, key, value),
        BlockMask(counts, indices, full_counts, full_indices, *block_size),
        scores,
        scale,
        name="flex_attention",
    )
    return results


_C.set_planner("backplane::flex_attention", _plan)
