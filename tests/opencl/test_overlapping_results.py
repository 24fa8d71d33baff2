"""Tensors for `out=` with overlapping elements raise the same errors as on the CPU, or none where the CPU accepts them.

The other arguments are valid, or one of them is invalid. Covers all operators with `out=` in PyTorch's operator
database. No kernels are compiled or launched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import database_calls
import pytest
import torch
from agreement import DEVICE, lacks_a_dtype_of
from database_calls import Call
from test_layouts import LEFT_OUT
from test_numbers_for_tensors import without_kernels
from torch.utils._pytree import tree_map_only


class Found(NamedTuple):
    """An overload with `out=`, and a call of the overload without."""

    overload: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    results: dict[str, torch.Tensor]


def _with_results(function: Any) -> Any:
    """The overload with the same arguments and `out=`, if any."""
    names = [one.name for one in function._schema.arguments]
    packet = function.overloadpacket
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        given = [one.name for one in arguments if not one.is_out]
        if len(given) < len(arguments) and given == names:
            return getattr(packet, name)
    return None


def _written(overload: Any) -> list[str]:
    return [one.name for one in overload._schema.arguments if one.is_out]


def found() -> list[Found]:
    def wanted(call: Call) -> bool:
        overload = _with_results(call.function)
        if any(word in call.function.name() for word in LEFT_OUT):  # these read values that no kernel has written
            return False
        are_tensors = all(isinstance(one, torch.Tensor) for one in call.results)
        if lacks_a_dtype_of((call.arguments, call.named, call.results)):
            return False
        return overload is not None and are_tensors and len(_written(overload)) == len(call.results)

    return [
        Found(overload, call.arguments, call.named, dict(zip(_written(overload), call.results, strict=True)))
        for call in database_calls.calls(wanted)
        for overload in [_with_results(call.function)]
    ]


def calls(one: Found, other_shape: bool) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """The valid call, and calls with one invalid argument."""
    yield "", one.arguments, one.named
    if other_shape:
        return
    for position, argument in enumerate(one.overload._schema.arguments):
        if argument.name in ("dim", "axis"):
            beyond = [7] if "List" in str(argument.type) else 7
            if position < len(one.arguments):
                yield "dimension", _put(one.arguments, position, beyond), one.named
            else:
                yield "dimension", one.arguments, {**one.named, argument.name: beyond}
    for position, value in enumerate(one.arguments[1:], 1):
        if isinstance(value, torch.Tensor):
            yield f"dtype {position}", _put(one.arguments, position, value.to(torch.complex64)), one.named


def _put(values: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*values[:position], value, *values[position + 1 :])


def outcome(
    one: Found, arguments: tuple[Any, ...], named: dict[str, Any], device: str, other_shape: bool
) -> type[BaseException] | None:
    """The type of the error, or None."""

    def overlapping(result: torch.Tensor) -> torch.Tensor:
        shape: Any = result.shape if result.numel() > 1 and not other_shape else 3
        if other_shape and result.dim():
            shape = result.shape[0] + 4
        # With room on both sides: some CPU kernels write as if the tensor were contiguous.
        memory = torch.zeros(1 << 17, dtype=result.dtype, device=device)
        return memory[1 << 16 : (1 << 16) + 1].expand(shape)

    given = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (arguments, named))
    results = {name: overlapping(result) for name, result in one.results.items()}
    try:
        one.overload(*given[0], **given[1], **results)
        torch.accelerator.synchronize()
    except Exception as error:
        return type(error)
    return None


# The CPU kernels of these do not check: they overwrite elements or write out of bounds. bp raises the usual error.
_UNSEEN_BY_THE_CPU = {
    "bmm.out", "mv.out", "cummax.out", "cummin.out", "_softmax.out", "_softmax_backward_data.out", "_log_softmax.out",
    "linalg_vector_norm.out", "norm.out", "prod.int_out", "tril.out", "triu.out", "narrow_copy.out", "avg_pool3d.out",
    "adaptive_max_pool3d.out", "fractional_max_pool2d.output", "fractional_max_pool3d.output",
    "max_pool3d_with_indices.out", "max_unpool2d.out", "log_sigmoid_forward.output",
}  # fmt: skip


@pytest.mark.parametrize("other_shape", [False, True])
@pytest.mark.slow
def test_errors_are_the_cpus(other_shape: bool) -> None:
    warnings.simplefilter("ignore")
    operators = found()
    assert len(operators) > 300
    refused = 0
    for one in operators:
        name = one.overload.name().removeprefix("aten::")
        for what, arguments, named in calls(one, other_shape):
            expected = outcome(one, arguments, named, "cpu", other_shape)
            with without_kernels():
                ours = outcome(one, arguments, named, DEVICE, other_shape)
            refused += expected is not None
            if not what and name in _UNSEEN_BY_THE_CPU and ours is RuntimeError:
                continue
            assert ours is expected, (name, what, ours, expected)
    assert refused > (100 if other_shape else 400)


LOSSES: dict[str, Callable[..., Any]] = {
    "mse_loss": torch.ops.aten.mse_loss.out,
    "smooth_l1_loss": torch.ops.aten.smooth_l1_loss.out,
    "huber_loss": torch.ops.aten.huber_loss.out,
    "soft_margin_loss": torch.ops.aten.soft_margin_loss.out,
    "binary_cross_entropy": lambda a, b, reduction, out: torch.ops.aten.binary_cross_entropy.out(
        a, b, None, reduction, out=out
    ),
}


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_with_each_reduction(name: str, reduction: int) -> None:
    for shape in ((5,), (2, 3), ()):
        messages = []
        for device in ("cpu", DEVICE):
            out = torch.zeros(1, device=device).expand(4)
            a, b = (torch.full(shape, number, device=device) for number in (0.25, 1.0))
            try:
                messages.append(LOSSES[name](a, b, reduction, out=out).cpu())
            except RuntimeError as error:
                messages.append(str(error)[:40])
        if isinstance(messages[0], str):
            assert messages[1] == messages[0]
        else:
            torch.testing.assert_close(messages[1], messages[0])
