"""Checks that the elements of tensors are in the range that an operator accepts, and reports others (see `errors`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates import errors as error_words
from torch_backplane.kernels.templates.source import Launch, LaunchSpec

# Elements that a work item checks. On SIMT targets it checks fewer if otherwise the work items would not fill the
# device. It reports once, after a loop without branches.
_CHUNK = 1024
_SMALL_GROUP = 4

UNIT_INTERVAL = "x >= (value_t)0 && x <= (value_t)1"
NOT_NEGATIVE = "x >= (value_t)0"


class Check(NamedTuple):
    """A condition on the elements of a tensor.

    Args:
        tensor: dense; its dimensions can be in any order in memory.
        holds: C expression of an element `x`, valid for scalars and vectors.
        text: message of the RuntimeError if the condition does not hold.
    """

    tensor: torch.Tensor
    holds: str
    text: str


def check_values(dialect: Dialect, checks: Sequence[Check], errors: torch.Tensor) -> Launch:
    """Reports the text of a check that does not hold.

    If one work item finds that several checks fail, it reports the first.

    Args:
        checks: conditions on floating-point tensors.
        errors: the device's four int32 words.
    """
    inputs = {f"values{i}": check.tensor for i, check in enumerate(checks)}
    most = max(tensor.numel() for tensor in inputs.values())
    group = dialect.target.small_group(_SMALL_GROUP)
    items = -(-most // _CHUNK)
    if dialect.target.simt:
        items = min(most, max(items, dialect.target.enough_groups * group))
    dtypes = {value_dtype(tensor.dtype) for tensor in inputs.values()}
    return LaunchSpec(
        "check_values",
        dialect,
        outputs={"errors": errors},
        inputs=inputs,
        integers={f"count{i}": tensor.numel() for i, tensor in enumerate(inputs.values())},
        numbers={f"text{i}": (torch.int32, error_words.text_number(check.text)) for i, check in enumerate(checks)},
        value=torch.float64 if torch.float64 in dtypes else torch.float32,
        body="".join(_look(dialect, i, check.holds) for i, check in enumerate(checks)),
        items=items,
        group_size=group,
        strided=inputs,  # checked in memory order
    ).launch()


def _look(dialect: Dialect, number: int, holds: str) -> str:
    # On SIMT targets a work item checks every `items`-th element, otherwise consecutive elements.
    if dialect.target.simt:
        first, step, end = "item", "items", f"count{number}"
    else:
        first, step = f"item * {_CHUNK}", "1"
        end = f"(count{number} - first < {_CHUNK} ? count{number} : first + {_CHUNK})"
    return f"""
  {{
    const index_t first = {first};
    const index_t end = {end};
    index_t at = first;
    value_t_lanes found = LANES_OF((value_t)0);
    if (LANES > 1) for (; at + LANES <= end; at += LANES) {{
      const value_t_lanes x = load_values{number}_lanes(at);
      found = ({holds}) ? found : LANES_OF((value_t)1);
    }}
    value_t any_found = lanes_max(found);
    for (; at < end; at += {step}) {{
      const value_t x = load_values{number}(at);
      any_found = ({holds}) ? any_found : (value_t)1;
    }}
    if (any_found > 0 && atomic_swap(errors, 0u, {error_words.REFUSED_VALUE}u) == 0u) errors[1] = text{number};
  }}"""
