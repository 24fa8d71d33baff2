"""repeat_interleave: repeats each index as often as `repeats` says."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels.templates import errors
from torch_backplane.planning import (
    Call,
    Refused,
    RunOnCPU,
    contiguous_result,
    dialect_of,
    error_words,
    operator,
    run_kernel,
)

_RUN = 256  # adjacent results for each work item, which searches only for the first of them


def _reporting(text: str) -> dict[str, Any]:
    """Arguments of kernels that compute in int64 and report bad numbers with `refuse`."""
    return {
        "numbers": {"text": (torch.int32, errors.text_number(text))},
        "value": torch.int64,
        "constants": {"refuse": f"if (atomic_swap(errors, 0u, {errors.REFUSED_VALUE}u) == 0u) errors[1] = text"},
    }


@operator("repeat_interleave.Tensor")
def repeat_interleave(call: Call, repeats: torch.Tensor, output_size: int | None) -> torch.Tensor:
    """Waits for the size of the result, unless `output_size` is given."""
    if repeats.dim() != 1 or repeats.dtype not in (torch.int32, torch.int64):
        raise Refused("repeats is not an int32 or int64 vector")
    if repeats.numel() == 0:
        size, ends = 0, repeats
    else:
        ends = repeats.cumsum(0)
        if not output_size:
            size, least = torch.stack([ends[-1], repeats.amin().to(torch.int64)]).tolist()
            if least < 0:
                raise RunOnCPU("repeats has negative numbers")
        else:
            size = output_size
            _report_negative(repeats)
    (out,) = call.outputs(like=[torch.empty(size, dtype=repeats.dtype, device="meta")])
    chunk = dialect_of(out.device).target.run(_RUN)
    with contiguous_result(out) as result:
        run_kernel(
            "repeat_interleave",
            """
  const index_t begin = item * chunk, end = min(begin + chunk, length);
  index_t low = 0, high = size;
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    if (ends[middle] <= begin) low = middle + 1;
    else high = middle;
  }
  for (index_t at = begin; at < end; ++at) {
    while (low < size && ends[low] <= at) ++low;
    out[at] = low;
  }
  if (item == 0 && ends[size - 1] != (value_t)length) refuse;
""",
            items=-(-size // chunk),
            outputs={"out": result, "errors": error_words(out.device)},
            inputs={"ends": ends},
            integers={"size": repeats.numel(), "chunk": chunk, "length": size},
            **_reporting("allocated size does not match required size"),
        )
    return out


def _report_negative(repeats: torch.Tensor) -> None:
    run_kernel(
        "repeat_interleave_check",
        "if (load_repeats(item) < 0) refuse;",
        items=repeats.numel(),
        outputs={"errors": error_words(repeats.device)},
        inputs={"repeats": repeats.contiguous()},
        **_reporting("repeats can not be negative"),
    )
