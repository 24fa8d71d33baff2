"""Stream compaction: results for the nonzero elements of a mask, contiguous and in order.

A mask is contiguous, of any dtype, and divided into blocks. `count` counts the nonzero elements of each block. `sum_up`
turns the counts into the start of each block's results and the total count. The other templates iterate over the
blocks again and write the results. If `Target.team_size` is 1, as on CPUs, one work item handles a block. Otherwise a
work group does, whose work items have some consecutive elements each.
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

_BLOCK, _PART = 2048, 16  # elements per work item, alone and in a team


def block_count(dialect: Dialect, mask: torch.Tensor) -> int:
    """Returns the number of blocks. The `starts` of the other functions are int64, with one element more."""
    return -(-mask.numel() // _block_size(dialect))


def _block_size(dialect: Dialect) -> int:
    team = dialect.target.team_size
    return _BLOCK if team == 1 else _PART * team


def count(dialect: Dialect, starts: torch.Tensor, mask: torch.Tensor) -> Launch:
    """Sets starts[block] to the number of nonzero elements of the block. `sum_up` must follow."""
    body = f"""
  {team_shared(dialect)}
  value_t counted = 0;
  for (index_t at = first; at < last; ++at) counted += is_set(mask, at);
  {team_reduce(dialect, "counted")}
  if (member == 0) starts[row] = counted;
"""
    return _blocks("count_nonzero", dialect, mask, {"starts": starts}, {"mask": mask}, body)


def sum_up(dialect: Dialect, starts: torch.Tensor) -> Launch:
    """Computes the exclusive prefix sums of the counts in place. The last element receives the total count."""
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
    """Writes the linear indices of the nonzero elements to out, which is contiguous and int64.

    If there are more than `out` has elements, the rest is dropped.
    """
    return _compacted("nonzero", dialect, {"out": out}, mask, starts, {}, "out[to] = at;")


def select(dialect: Dialect, out: torch.Tensor, self: torch.Tensor, mask: torch.Tensor, starts: torch.Tensor) -> Launch:
    """Writes the elements of self where the mask is nonzero to out. self has the mask's shape; both are contiguous."""
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
    """Writes the elements of source, in order, to self where the mask is nonzero. All tensors are contiguous.

    If source is too short, the remaining elements are unchanged, and the error is reported (see `errors`).
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
    """Returns a launch that runs `statement` for every element, to write its result to position `to`.

    Only a nonzero element advances `to`, so there is no branch to predict. The loop ends after the last nonzero
    element of the range.
    """
    body = f"""
  end = min(end, most);
  for (index_t at = first; to < end; ++at) {{ {statement} to += is_set(mask, at); }}
"""
    inputs = {"mask": mask, "starts": starts, **inputs}
    return _blocks(name, dialect, mask, outputs, inputs, _range(dialect) + body, {"most": outputs["out"].numel()})


def _range(dialect: Dialect) -> str:
    """Returns statements that declare `to` and `end`, the range of the results of the elements first to last."""
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
    """Returns statements that declare `name`, the sum of `variable` over the preceding members of the team."""
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
    """Returns a launch of `body` for each block `row`, with the work item's elements from `first` to `last`."""
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
