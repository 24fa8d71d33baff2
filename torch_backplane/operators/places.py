"""What counts or finds places: repeat_interleave, bincount, isin, randperm."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels.dtypes import FACTS, integer_range, value_dtype
from torch_backplane.kernels.templates import errors
from torch_backplane.operators.masks import check_same_dtype
from torch_backplane.operators.random import EXACT
from torch_backplane.planning import (
    Call,
    Number,
    RunOnCPU,
    contiguous_result,
    dialect_of,
    error_words,
    operator,
    run_kernel,
    run_pointwise,
)

# Sums of so many ones fit 32 bits, whose additions can be atomic.
_MOST_COUNTED = 2**31 - 1
_CPU_CHUNK = 256  # neighbouring results for each work item, which searches for the first one only


def _reporting(text: str) -> dict[str, Any]:
    """What kernels need that compute in int64 and report numbers with `refuse`."""
    return {
        "numbers": {"text": (torch.int32, errors.text_number(text))},
        "value": torch.int64,
        "constants": {"refuse": f"if (atomic_swap(errors, 0u, {errors.REFUSED_VALUE}u) == 0u) errors[1] = text"},
    }



@operator("repeat_interleave.Tensor")
def repeat_interleave(call: Call, repeats: torch.Tensor, output_size: int | None) -> torch.Tensor:
    """Waits for the result's size, unless it is given."""
    if repeats.dim() != 1 or repeats.dtype not in (torch.int32, torch.int64):
        raise RunOnCPU("numbers that are no vector, or of another dtype")
    if repeats.numel() == 0:
        size, ends = 0, repeats
    else:
        ends = repeats.cumsum(0)
        if not output_size:
            size, least = torch.stack([ends[-1], repeats.amin().to(torch.int64)]).tolist()
            if least < 0:
                raise RunOnCPU("negative numbers")
        else:
            size = output_size
            _report_negative(repeats)
    (out,) = call.outputs(like=[torch.empty(size, dtype=repeats.dtype, device="meta")])
    chunk = _CPU_CHUNK if dialect_of(out.device).processor == "cpu" else 1
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


@operator("bincount")
def bincount(call: Call, self: torch.Tensor, weights: torch.Tensor | None, minlength: int) -> torch.Tensor:
    if self.dim() != 1 or self.dtype == torch.bool or self.is_floating_point() or minlength < 0:
        raise RunOnCPU("what bincount does not take")
    if self.numel() == 0:
        (out,) = call.outputs(like=[torch.empty(minlength, dtype=torch.int64, device="meta")])
        return out.zero_()
    if weights is not None and (weights.shape != self.shape or self.device != weights.device):
        raise RunOnCPU("weights of another shape, or on another device")
    least, most = torch.stack([self.amin(), self.amax()]).tolist()
    if least < 0 or self.numel() > _MOST_COUNTED:
        raise RunOnCPU("negative numbers")
    if weights is None:
        dtype, added = torch.int64, torch.ones(1, dtype=torch.int32, device=self.device).expand(self.shape)
    else:
        dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
        added = weights.to(dtype)
    (out,) = call.outputs(like=[torch.empty(max(most + 1, minlength), dtype=dtype, device="meta")])
    index = self if self.dtype in (torch.int32, torch.int64) else self.to(torch.int64)
    return out.copy_(torch.zeros_like(out, dtype=added.dtype).index_add_(0, index, added))


@operator("isin.Tensor_Tensor", "isin.Scalar_Tensor")
def isin(call: Call, elements: Any, test_elements: torch.Tensor, assume_unique: bool, invert: bool) -> torch.Tensor:
    """Looks for each element in those that it is tested for, which are sorted."""
    example = elements.example if isinstance(elements, Number) else elements
    dtype = torch.result_type(example, test_elements)
    if torch.bool in (elements.dtype, test_elements.dtype) or elements.dtype.is_complex:
        raise RunOnCPU("isin of bools, or of a complex number")
    check_same_dtype(call, torch.bool)
    if isinstance(elements, Number):
        number, elements = elements, torch.empty((), dtype=dtype, device=test_elements.device)
        run_pointwise(lambda x: x, [elements], [], [(number, value_dtype(dtype))], key="value", name="value")
    like = torch.empty(elements.shape, dtype=torch.bool, device="meta")
    if isinstance(elements, torch.Tensor) and elements.device != test_elements.device:
        raise RunOnCPU("tensors on two devices")
    (out,) = call.outputs(like=[like])
    if test_elements.numel() == 0:
        return out.fill_(invert)
    found = test_elements.to(dtype).reshape(-1).sort()[0]
    with contiguous_result(out) as result:
        run_kernel(
            "isin",
            """
  const value_t x = load_elements(item);
  index_t low = 0, high = size;
  while (low < high) {
    const index_t middle = low + (high - low) / 2;
    if (load_sorted(middle) < x) low = middle + 1;
    else high = middle;
  }
  store_out(item, (low < size && load_sorted(min(low, size - 1)) == x) != (invert != 0));
""",
            items=elements.numel(),
            outputs={"out": result},
            inputs={"elements": elements.to(dtype).contiguous(), "sorted": found},
            integers={"size": found.numel(), "invert": int(invert)},
            value=value_dtype(dtype),
        )
    return out


@operator("randperm.generator_out", variants=False)
def randperm(call: Call, n: int, generator: Any) -> torch.Tensor:
    """The order of random keys. There are so many keys that two equal ones, which stay in order, are not expected."""
    (given,) = call.written
    dtype = given.dtype
    most = EXACT[dtype] + 1 if dtype in EXACT else integer_range(dtype)[1] if dtype in FACTS else 0
    if n < 0 or n > most or dtype == torch.bool:
        raise RunOnCPU("a number that is negative, or beyond the dtype")
    (out,) = call.outputs(like=[torch.empty(n, dtype=dtype, device="meta")])
    keys = torch.empty(n, dtype=torch.int64, device=out.device).random_(generator=generator)
    return out.copy_(keys.argsort())
