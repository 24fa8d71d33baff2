"""Compaction: what belongs to the elements that are not zero, side by side and in their order.

A mask is contiguous, of any dtype, and taken apart in blocks. `count` counts each block's elements that are not zero,
`sum_up` makes of the counts where each block's results begin, and how many there are in all; the other templates go
through the blocks again and write. A block is a work item's on a CPU, and elsewhere a group's, whose items have some
neighbouring elements each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import (
    Launch,
    LaunchSpec,
    row_groups,
    row_start,
    team_reduce,
    team_shared,
)

_BLOCK, _PART = 2048, 16  # elements of a work item's, alone and in a team


def block_count(dialect: Dialect, mask: torch.Tensor) -> int:
    """How many blocks there are; `count` and its like want `starts` of one element more, int64."""
    return -(-mask.numel() // _block_size(dialect))


def _block_size(dialect: Dialect) -> int:
    team = dialect.target.team_size
    return _BLOCK if team == 1 else _PART * team


def count(dialect: Dialect, starts: torch.Tensor, mask: torch.Tensor) -> Launch:
    """starts[block] = how many elements of the block are not zero. Follow it by `sum_up`."""
    body = f"""
  {team_shared(dialect)}
  value_t counted = 0;
  for (index_t at = first; at < last; ++at) counted += is_set(mask, at);
  {team_reduce(dialect, "counted")}
  if (member == 0) starts[row] = counted;
"""
    return _blocks("count_nonzero", dialect, mask, {"starts": starts}, {"mask": mask}, body)


def sum_up(dialect: Dialect, starts: torch.Tensor) -> Launch:
    """starts[block], in place, = the sum of those before it; of the last one, which `count` left alone, of all."""
    team = dialect.target.team_size
    body = f"""
  {_team_declared(dialect)}
  const int member = ITEM;
  if (member >= {team}) return;
  const index_t share = (rows + {team - 1}) / {team};
  const index_t first = min(member * share, rows), last = min(first + share, rows);
  int64 mine = 0;
  for (index_t i = first; i < last; ++i) mine += starts[i];
  {_team_before(dialect, "before", "mine")}
  for (index_t i = first; i < last; ++i) {{ const int64 counted = starts[i]; starts[i] = before; before += counted; }}
  if (member == {team - 1}) starts[rows] = before;
"""
    return LaunchSpec(
        "block_starts",
        dialect,
        outputs={"starts": starts},
        inputs={},
        integers={"rows": starts.numel() - 1},
        types={"int64": torch.int64},
        value=torch.int64,
        body=body,
        groups=1,
        group_size=team,
    ).launch()


def positions(dialect: Dialect, out: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor) -> Launch:
    """out (contiguous, int64) = where the elements are that are not zero, counted through all dimensions.

    As many of them as there are elements in `out`, if there are more.
    """
    return _compacted("nonzero", dialect, {"out": out}, mask, starts, {}, "out[to] = at;")


def select(dialect: Dialect, out: torch.Tensor, self: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor) -> Launch:
    """out = the elements of self (of the mask's shape, both contiguous) where the mask is not zero."""
    body = "out[to] = self[at];"
    return _compacted("masked_select", dialect, {"out": out}, mask, starts, {"self": self}, body)


def scatter(
    dialect: Dialect,
    self: torch.Tensor,
    mask: torch.Tensor,
    source: torch.Tensor,
    starts: torch.Tensor,
    errors: torch.Tensor,
) -> Launch:
    """self = the elements of source, in their order, where the mask is not zero; all contiguous.

    Where source is too short, the rest is left as it is, and the error reported as `errors` says.
    """
    body = f"""
  for (index_t at = first; at < last && to < source_size; ++at) {{
    const bool taken = is_set(mask, at);
    self[at] = taken ? source[to] : self[at];
    to += taken;
  }}
  if (end > source_size) atomic_swap(errors, 0u, {error_words.SOURCE_TOO_SHORT}u);
"""
    return _blocks(
        "masked_scatter",
        dialect,
        mask,
        {"self": self, "errors": errors},
        {"mask": mask, "source": source, "starts": starts},
        _range(dialect) + body,
        {"source_size": source.numel()},
    )


def _compacted(
    name: str,
    dialect: Dialect,
    outputs: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    starts: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    statement: str,
) -> Launch:
    """Writes every element's result to the next place, and goes to the one behind it where the element was not zero:
    so there is nothing to predict, and the range's last one ends the loop.
    """
    body = f"""
  end = min(end, most);
  for (index_t at = first; to < end; ++at) {{ {statement} to += is_set(mask, at); }}
"""
    inputs = {"mask": mask, "starts": starts, **inputs}
    return _blocks(name, dialect, mask, outputs, inputs, _range(dialect) + body, {"most": outputs["out"].numel()})


def _range(dialect: Dialect) -> str:
    """Statements that declare `to` and `end`, the places that the results of the elements first to last have."""
    if dialect.target.team_size == 1:
        return "index_t to = starts[row], end = starts[row + 1];"
    return f"""
  {_team_declared(dialect)}
  int64 mine = 0;
  for (index_t at = first; at < last; ++at) mine += is_set(mask, at);
  {_team_before(dialect, "before", "mine")}
  index_t to = starts[row] + before, end = to + mine;
"""


def _team_declared(dialect: Dialect) -> str:
    team = dialect.target.team_size
    return f"LOCAL int64 team_counts[{team}];" if team > 1 else ""


def _team_before(dialect: Dialect, name: str, variable: str) -> str:
    """Statements that declare `name`, the sum of `variable` in the members before this one."""
    if dialect.target.team_size == 1:
        return f"int64 {name} = 0;"
    return f"""
  team_counts[member] = {variable};
  BARRIER;
  int64 {name} = 0;
  for (int i = 0; i < member; ++i) {name} += team_counts[i];
"""


def _blocks(
    name: str,
    dialect: Dialect,
    mask: torch.Tensor,
    outputs: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    body: str,
    integers: Mapping[str, int] | None = None,
) -> Launch:
    """`body` for each block, `row`, whose elements (or the member's of them) are `first` to `last`."""
    rows = block_count(dialect, mask)
    groups, group_size = row_groups(dialect, rows)
    share = _BLOCK if dialect.target.team_size == 1 else _PART
    value = value_dtype(mask.dtype)
    parts = "load_{0}(at).x != 0 || load_{0}(at).y != 0" if mask.is_complex() else "load_{0}(at) != 0"
    return LaunchSpec(
        name,
        dialect,
        outputs=outputs,
        inputs=inputs,
        integers={"rows": rows, "size": mask.numel(), **(integers or {})},
        constants={"is_set(mask, at)": f"({parts.format('mask')} ? 1 : 0)"},
        types={"int64": torch.int64, "mask_t": value},
        value=torch.int64,
        body=f"""
  {row_start(dialect)}
  const index_t begin = row * {_block_size(dialect)}, first = begin + min((index_t)member * {share}, size - begin);
  const index_t last = first + min((index_t){share}, size - first);
  {body}
""",
        groups=groups,
        group_size=group_size,
        bounded=dialect.target.team_size == 1,
    ).launch()
