"""Reflection and replication padding in 1 to 3 dimensions, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.source import named, split
from torch_backplane.kernels.templates.unfold import linear
from torch_backplane.planning import Call, check, check_same_dtype, contiguous_result, dialect_of, operator, run_kernel
from torch_backplane.planning import strides as layouts

_RUN = 64  # elements of a row for each work item, where it is a CPU thread

# The source of the padded coordinate x, in a dimension of `size`.
_ORIGIN = {
    "reflection": "x < 0 ? -x : x >= size{d} ? 2 * (size{d} - 1) - x : x",
    "replication": "x < 0 ? 0 : x >= size{d} ? size{d} - 1 : x",
}
# Loops of the gradient over the padded coordinates y that come from i, each once. Those out of range are skipped.
_COPIES = {
    "reflection": """
    for (int copy{d} = 0; copy{d} < 3; ++copy{d}) {{
      if ((copy{d} == 1 && i{d} == 0) || (copy{d} == 2 && i{d} == size{d} - 1)) continue;
      const index_t y{d} = before{d} + (copy{d} == 0 ? i{d} : copy{d} == 1 ? -i{d} : 2 * (size{d} - 1) - i{d});
      if (y{d} < 0 || y{d} >= padded{d}) continue;""",
    "replication": """
    const index_t last{d} = i{d} == size{d} - 1 ? padded{d} - 1 : i{d} + before{d};
    for (index_t y{d} = i{d} == 0 ? 0 : i{d} + before{d}; y{d} <= last{d}; ++y{d}) {{
      if (y{d} < 0 || y{d} >= padded{d}) continue;""",
}


def _integers(inner: Sequence[int], outer: Sequence[int], padding: Sequence[int]) -> dict[str, int]:
    """Sizes and padding for the kernel. The first two numbers of `padding` are those of the innermost dimension."""
    before = padding[::2][::-1]
    return {**named("size", inner), **named("padded", outer), **named("before", before)}


def pad(out: torch.Tensor, self: torch.Tensor, padding: Sequence[int], mode: str) -> torch.Tensor:
    """Pads the last len(padding) / 2 dimensions."""
    if out.numel() == 0:
        return out
    rank = len(padding) // 2
    *outer, last = [
        f"index_t i{d}; {{ const index_t x = y{d} - before{d}; i{d} = {_ORIGIN[mode].format(d=d)}; }}"
        for d in range(rank)
    ]
    place = linear(["rest", *(f"i{d}" for d in range(rank))], [f"size{d}" for d in range(rank)])
    with contiguous_result(out) as result:
        _run_rows(
            f"{mode}_pad",
            "\n".join(outer),
            f"{last} store_out(element, load_self({place}));",
            {"out": result},
            {"self": self.contiguous()},
            _integers(self.shape[-rank:], out.shape[-rank:], padding),
            ("padded", "y"),
        )
    return out


def pad_backward(out: torch.Tensor, grad: torch.Tensor, padding: Sequence[int], mode: str) -> torch.Tensor:
    """Each element of `out`, of the unpadded shape, sums the gradients of its copies."""
    if out.numel() == 0:
        return out
    rank = len(padding) // 2
    place = linear(["rest", *(f"y{d}" for d in range(rank))], [f"padded{d}" for d in range(rank)])
    loops = "".join(_COPIES[mode].format(d=d) for d in range(rank))
    with contiguous_result(out) as result:
        _run_rows(
            f"{mode}_pad_backward",
            "",
            f"SUM(total); {loops} ADD(total, load_grad({place})) {'}' * rank} store_out(element, TOTAL(total));",
            {"out": result},
            {"grad": grad.contiguous()},
            _integers(out.shape[-rank:], grad.shape[-rank:], padding),
            ("size", "i"),
        )
    return out


def _run_rows(
    name: str,
    of_row: str,
    of_element: str,
    outputs: dict[str, torch.Tensor],
    inputs: dict[str, torch.Tensor],
    integers: dict[str, int],
    names: tuple[str, str],
) -> None:
    """Runs the statements `of_row` for each row of the only output, and `of_element` for each `element` of it.

    Args:
        integers: The result of `_integers`.
        names: Prefixes of the names of the output's sizes, and of coordinates.
    """
    (out,) = outputs.values()
    size, letter = names
    last = len(integers) // 3 - 1
    run = dialect_of(out.device).target.run(_RUN)
    runs = -(-out.shape[-1] // run)
    sizes = ["all", *(f"{size}{d}" for d in range(last))]
    coordinates = ["rest", *(f"{letter}{d}" for d in range(last))]
    body = f"""
  {split("item", [*sizes, "runs"], [*coordinates, "run_number"])}
  const index_t row = ({linear(coordinates, sizes[1:])}) * {size}{last};
  {of_row}
  const index_t begin = run_number * RUN, end = min({size}{last}, begin + RUN);
  for (index_t {letter}{last} = begin; {letter}{last} < end; ++{letter}{last}) {{
    const index_t element = row + {letter}{last};
    {of_element}
  }}"""
    run_kernel(
        name,
        body,
        items=math.prod(out.shape[:-1]) * runs,
        outputs=outputs,
        inputs=inputs,
        integers={**integers, "runs": runs},
        constants={"RUN": run},
        value=value_dtype(out.dtype),
    )


def _like(call: Call, self: torch.Tensor, rank: int) -> list[torch.Tensor] | None:
    """Meta tensors like the CPU's results for channels-last images. None for other layouts, for which PyTorch's meta
    functions agree with the CPU.
    """
    if call.written or rank == 1:
        return None
    memory_format = layouts.suggested(self.shape, self.stride())
    if memory_format == torch.contiguous_format:
        return None
    (made,) = call.meta(call.functional)
    laid_out = layouts.laid_out(made.shape, memory_format)
    return [torch.empty_strided(made.shape, laid_out, dtype=made.dtype, device="meta")]


def _declare(mode: str, rank: int) -> None:
    @operator(f"{mode}_pad{rank}d", dtypes="complex")
    def forward(call: Call, self: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
        torch._check(  # reflection_pad2d's meta kernel does not check it
            rank < self.dim() <= rank + 2,
            lambda: f"Expected {rank + 1}D or {rank + 2}D (batch mode) tensor with possibly 0 batch size and other "
            f"non-zero dimensions for input, but got: {list(self.shape)}",
        )
        torch._check(  # before torch 2.13 the meta kernel of reflection_pad3d reads out of bounds
            mode == "replication" or len(padding) == 2 * rank,
            lambda: f"padding size is expected to be {2 * rank}, but got: {len(padding)}",
        )
        (out,) = call.outputs(like=_like(call, self, rank))
        return pad(out, self, padding, mode)

    @operator(f"{mode}_pad{rank}d_backward", dtypes="complex", one_dtype=["grad_output", "self"])
    def backward(call: Call, grad: torch.Tensor, self: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
        check_same_dtype(call, self.dtype)
        torch._check(  # PyTorch's kernels write out of bounds
            len(padding) == 2 * rank, lambda: f"padding size is expected to be {2 * rank}, but got: {len(padding)}"
        )
        check(self.dim() > rank, "self has too few dimensions")
        check(self.dtype != torch.bool and (self.is_floating_point() or self.is_complex()), "self is an integer tensor")
        wanted, given = self.shape[:-rank], grad.shape[:-rank]  # PyTorch reads out of bounds if they differ
        torch._check(given == wanted, lambda: f"expected a gradient of {list(wanted)} planes, but got {list(given)}")
        (out,) = call.outputs(like=_like(call, self, rank))
        if not out.is_complex():
            return pad_backward(out, grad, padding, mode)
        for to, part in zip(*(torch.view_as_real(one).unbind(-1) for one in (out, grad)), strict=True):
            pad_backward(to, part, padding, mode)
        return out


for mode in ("reflection", "replication"):
    for rank in (1, 2, 3):
        _declare(mode, rank)
