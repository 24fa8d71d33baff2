"""Calls with one argument replaced are rejected where the CPU rejects them, and only there, for every operator.

No kernels are compiled or launched. `python -m torch_backplane conformance --forms` also compares values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, had, on_device
from plain_arguments import CRASHES, by_position, fresh, outcome, plain_arguments
from test_bad_input import MISSING_DTYPE
from test_numbers_for_tensors import without_kernels
from torch.utils._pytree import tree_leaves

from torch_backplane.conformance.forms import others

# Their errors or the sizes of their results depend on values in memory, which nothing writes here.
READS = ("nonzero", "masked_select", "masked_scatter", "unique", "repeat_interleave", "bincount", "histc")
# Only PyTorch's own code calls these, with matching shapes. bp can reject shapes that PyTorch accepts.
INTERNAL = ("_backward", "_jvp", "_foreach_norm")
ACCEPTED = {
    "aten::nansum": "torch.cuda supports complex numbers, the CPU does not",
    "aten::_fft_r2c": "torch.cuda supports float16, the CPU does not",
    "aten::logsumexp": "over no dimensions: PyTorch reduces over all, and then cannot shrink the result",
    "aten::bernoulli_.Tensor": "probabilities with more elements than the tensor",
    "aten::_add_relu.Tensor": "the CPU fails an assertion about the dtype",
    "aten::_add_relu_.Tensor": "the CPU fails an assertion about the dtype",
}
ONEDNN = ("itensor_view_from_dense", "could not create a primitive", "mkldnn")  # errors of oneDNN, not of PyTorch


def operators(out: bool = False) -> Iterator[tuple[str, Any]]:
    """The operators with `out=`, or those without."""
    from torch_backplane.planning import declare

    torch.bp.init()
    for name in sorted(declare.declared):
        skipped = any(word in name for word in (*CRASHES, *READS)) or name in ACCEPTED
        overload = declare.find(name.removeprefix("aten::"))
        if name.startswith("aten::") and not skipped and any(one.is_out for one in overload._schema.arguments) == out:
            yield name, overload


def of_shape(arguments: list[Any], shape: tuple[int, ...]) -> list[Any]:
    def made(value: Any) -> Any:
        if isinstance(value, list):
            return [made(element) for element in value]
        return value.new_ones(shape) if isinstance(value, torch.Tensor) else value

    return [made(value) for value in arguments]


def dtypes_in(value: Any) -> list[torch.dtype]:
    """The dtypes of tensors, and dtypes that are arguments."""
    dtypes = [one.dtype if isinstance(one, torch.Tensor) else one for one in tree_leaves(value)]
    return [one for one in dtypes if isinstance(one, torch.dtype)]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)], ids=str)
@pytest.mark.slow
def test_replaced_arguments_are_rejected_as_on_the_cpu(shape: tuple[int, ...]) -> None:
    calls, wrong = 0, []
    for name, overload in operators():
        schema, call = overload._schema.arguments, by_position(overload)
        arguments = of_shape(plain_arguments(overload, torch.float32), shape)
        if outcome(call, fresh(arguments))[0]:
            continue
        for position, value in enumerate(arguments):
            for kind, other in others(schema[position], value):
                if not all(had([one]) for one in dtypes_in(other)):
                    continue
                given = [*arguments[:position], other, *arguments[position + 1 :]]
                expected = outcome(call, fresh(given))
                if any(text in expected[1] for text in (*MISSING_DTYPE, *ONEDNN)):
                    continue
                calls += 1
                with without_kernels():
                    found = outcome(call, on_device(fresh(given)))
                internal = any(word in name for word in INTERNAL)
                if bool(found[0]) != bool(expected[0]) and (expected[0] or not internal):
                    wrong.append(f"{name}, {schema[position].name} {kind}: {found}; on the CPU {expected}")
    assert not wrong, "\n".join(wrong)
    assert calls > 3000


def test_arguments_that_make_the_cpu_read_out_of_bounds_are_errors() -> None:
    aten, given = torch.ops.aten, torch.ones(2, 3, device=DEVICE)
    for other in (given[:1], given[:, :2], given[0], given[0, 0]):
        for pair in ((given, other), (other, given)):
            with pytest.raises((RuntimeError, IndexError), match=r"same size|out of range"):
                aten._log_softmax_backward_data(*pair, -1, torch.float32)
    with pytest.raises(RuntimeError, match="expected 3 slices"):
        aten._compute_linear_combination(given, given)
    agrees(aten._compute_linear_combination, torch.rand(4, 2, 3), torch.rand(5, 3))


def with_operand(arguments: list[Any], operand: int, position: int) -> list[Any]:
    """The arguments with tensor number `operand` also at another position."""
    tensor = [value for value in arguments if isinstance(value, torch.Tensor)][operand]
    return [*arguments[:position], tensor, *arguments[position + 1 :]]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_that_is_an_operand() -> None:
    """It is rejected where the CPU rejects it, and where the CPU would resize it before reading it."""
    calls, wrong = 0, []
    for name, overload in operators(out=True):
        schema, call = overload._schema.arguments, by_position(overload)
        arguments = of_shape(plain_arguments(overload, torch.float32), (3, 3))
        outs = [position for position, one in enumerate(schema) if one.is_out]
        operands = [value for value in arguments if isinstance(value, torch.Tensor)][: -len(outs)]
        for operand, position in itertools.product(range(len(operands)), outs):
            given = with_operand(fresh(arguments), operand, position)
            expected, resized = outcome(call, given), given[position].shape != (3, 3)
            if any(text in expected[1] for text in (*MISSING_DTYPE, *ONEDNN)):
                continue
            calls += 1
            with without_kernels():
                found = outcome(call, with_operand(on_device(fresh(arguments)), operand, position))
            if "BatchLinearAlgebra" in found[1]:
                continue  # PyTorch read the status of a library, which did not run either
            if bool(found[0]) != (bool(expected[0]) or resized):
                wrong.append(f"{name}, {operand} at {position}: {found}; on the CPU {expected}")
    assert not wrong, "\n".join(wrong)
    assert calls > 200
