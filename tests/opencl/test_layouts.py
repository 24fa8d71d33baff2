"""Results of each operator have the CPU's strides for inputs of many layouts. No kernels are compiled or launched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import on_device
from plain_arguments import REFUSED, by_position, plain_arguments
from test_bad_input import CRASHING
from test_numbers_for_tensors import without_kernels
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

# Functions that return the tensor with the given index among an operator's tensors.
LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "transposed": lambda i: torch.ones(3, 2).t(),
    "permuted": lambda i: torch.ones(4, 3, 2).permute(2, 0, 1),
    "channels last": lambda i: torch.ones(2, 4, 3, 5).to(memory_format=torch.channels_last),
    "of rows of one": lambda i: torch.ones(1, 5, 2).mT,
    "expanded": lambda i: torch.ones(3, 1).expand(3, 4),
    "with gaps": lambda i: torch.ones(4, 6)[:, ::2].t(),
    "first transposed": lambda i: torch.ones(3, 2).t() if i == 0 else torch.ones(2, 6)[:, ::2],
    "second transposed": lambda i: torch.ones(3, 2).t() if i == 1 else torch.ones(2, 3),
    "broadcast": lambda i: torch.ones(3, 2).t() if i == 1 else torch.ones(1, 3),
}
# These crash if arguments do not match, or read sizes or probabilities from memory that nothing writes here.
LEFT_OUT = (
    *CRASHING, "batch_norm", "_fused_", "_pad", "dist_backward", "grid_sampler", "nonzero", "masked_select",
    "masked_scatter", "unique", "repeat_interleave", "bincount", "histc", "embedding_bag", "_foreach",
)  # fmt: skip
# CPU kernels whose result layouts differ from those of other devices, and one that does not resize its `out=`.
OF_THE_CPU = {
    "aten::log_sigmoid_forward": "torch.cuda keeps the layout",
    "aten::log_sigmoid_forward.output": "torch.cuda keeps the layout",
    "aten::channel_shuffle": "torch.cuda's result is contiguous",
    "aten::pixel_shuffle": "torch.cuda's result is contiguous",
    "aten::rrelu_with_noise.out": "the functional form is contiguous, on the CPU and on bp",
    "aten::binary_cross_entropy.out": "the CPU returns an empty tensor",
    "aten::binary_cross_entropy_backward.grad_input": "the CPU returns an empty tensor",
}
# PyTorch composes these of several operators. On bp, another of the two operands decides the layout.
OF_TWO_LAYOUTS = ("aten::ldexp", "aten::log_sigmoid_backward", "aten::soft_margin_loss_backward")


def operators() -> Iterator[tuple[str, Any]]:
    from torch_backplane.planning import declare

    torch.bp.init()
    for name in sorted(declare.declared):
        left_out = name in OF_THE_CPU or any(word in name for word in LEFT_OUT)
        if name.startswith("aten::") and not left_out:
            yield name, declare.find(name.removeprefix("aten::"))


def results(call: Callable[..., Any], arguments: list[Any]) -> list[tuple[Any, ...]] | None:
    """(dtype, shape, strides of dimensions with more than one element) of each returned tensor; None after an error."""
    try:
        returned = call(*arguments)
    except Exception:
        return None
    return [
        (one.dtype, one.shape, [stride for size, stride in zip(one.shape, one.stride(), strict=True) if size > 1])
        for one in tree_leaves(returned)
        if isinstance(one, Tensor)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_strides_of_results(dtype: torch.dtype, layout: str) -> None:
    calls, wrong = 0, []
    for name, overload in operators():
        if any(word in name for word in REFUSED):
            continue
        call, schema = by_position(overload), overload._schema.arguments
        try:
            plain = plain_arguments(overload, dtype)
        except NotImplementedError:  # a mask of complex numbers
            continue

        def arguments(reduction: int, schema: Any = schema, plain: list[Any] = plain) -> list[Any]:
            count = itertools.count()
            return [
                torch.empty(0, dtype=dtype) if one.is_out
                else reduction if one.name == "reduction"
                else tree_map_only(Tensor, lambda given: LAYOUTS[layout](next(count)).to(given.dtype), value)
                for one, value in zip(schema, plain, strict=True)
            ]  # fmt: skip

        for reduction in (0, 1) if any(one.name == "reduction" for one in schema) else (1,):
            expected = results(call, arguments(reduction))
            if expected is None:
                continue
            calls += 1
            with without_kernels():
                found = results(call, on_device(arguments(reduction)))
            of_two = "second" in layout or "first" in layout or layout == "broadcast"
            of_two = of_two and name.startswith(OF_TWO_LAYOUTS)
            # PyTorch broadcasts before it calls this operator, whose CPU kernel takes the first operand's shape.
            broadcast = layout == "broadcast" and name == "aten::binary_cross_entropy"
            if found != expected and not of_two and not broadcast:
                wrong.append(f"{name}, reduction {reduction}: {found}, expected {expected}")
    assert not wrong, "\n".join(wrong)
    assert calls > 100


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_arguments_of_frexp_get_the_cpus_strides() -> None:
    for shapes in (((3, 2), (0,)), ((0,), (3, 2)), ((0,), (0,)), ((3, 2), (3, 2))):
        strides = []
        for device in ("cpu", "bp"):
            x = torch.rand(2, 3, device=device).t()
            out = torch.empty(shapes[0], device=device), torch.empty(shapes[1], dtype=torch.int32, device=device)
            strides.append([one.stride() for one in torch.frexp(x, out=out)])
        assert strides[1] == strides[0]
