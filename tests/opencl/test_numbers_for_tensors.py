"""0-dimensional CPU tensors, which planners get as numbers, in place of each tensor argument of every operator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, on_device
from plain_arguments import CRASHES, by_position, fresh, outcome, plain_arguments

from torch_backplane import _C, plans

NUMBER = torch.tensor(2.0)


def places(arguments: list[Any], written: list[bool]) -> Iterator[list[Any]]:
    """The arguments with a number in place of one tensor, for each tensor that is only read."""
    for position, value in enumerate(arguments):
        if written[position]:
            continue
        if isinstance(value, torch.Tensor):
            yield [*arguments[:position], NUMBER.to(value.dtype), *arguments[position + 1 :]]
        elif isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
            for i, element in enumerate(value):
                changed = [*value[:i], NUMBER.to(element.dtype), *value[i + 1 :]]
                yield [*arguments[:position], changed, *arguments[position + 1 :]]


def on_device_but_numbers(arguments: list[Any]) -> list[Any]:
    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(element) for element in value]
        return on_device(value) if isinstance(value, torch.Tensor) and value.dim() else value

    return [moved(value) for value in arguments]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Runs planners at every call without compiling or launching kernels. The values of results are undefined."""
    launch: Any = sys.modules["torch_backplane.planning.launch"]
    kept = plans.mode(), launch.compiled, _C.launch
    plans.set_mode("0")
    launch.compiled, _C.launch = (lambda *arguments: None), (lambda *arguments, **attributes: None)
    try:
        yield
    finally:
        plans.set_mode(kept[0])
        launch.compiled, _C.launch = kept[1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_numbers_in_place_of_each_tensor(dtype: torch.dtype) -> None:
    """Calls succeed or raise the same type of error as on the CPU, or a RuntimeError about tensors on two devices."""
    from torch_backplane.planning import declare

    torch.bp.init()
    wrong = []
    calls = 0
    for name in sorted(declare.declared):
        overload = declare.find(name.removeprefix("aten::"))
        schema = overload._schema.arguments
        call = by_position(overload)
        arguments = plain_arguments(overload, dtype)
        if any(word in name for word in CRASHES) or any(one.is_out for one in schema):
            continue
        if outcome(call, fresh(arguments))[0]:
            continue
        for given in places(arguments, [one.is_write for one in schema]):
            if not any(one.dim() for one in declare.flatten(given) if isinstance(one, torch.Tensor)):
                continue
            calls += 1
            expected = outcome(call, fresh(given))
            if "oneDNN" in expected[1] or "ONEDNN" in expected[1]:
                continue  # oneDNN rejects the operands
            there = on_device_but_numbers(fresh(given))
            with without_kernels():
                found = outcome(call, there)
            if found[0] != expected[0] and not (found[0] == "RuntimeError" and "on the same device" in found[1]):
                wrong.append(f"{name} {dtype}: {expected} on the CPU, {found} on the device")
    assert not wrong, "\n".join(wrong)
    assert calls > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum"])
def test_numbers_in_lists_of_tensors(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, f"_foreach_{name}")

    def with_number(*tensors: torch.Tensor) -> Any:
        return function(list(tensors), [tensors[0], torch.tensor(2, dtype=dtype)])

    x = torch.arange(1, 5).to(dtype)
    agrees(with_number, x, x + 1, fallbacks=None)


def test_lists_of_different_lengths_raise_the_cpus_errors() -> None:
    x = torch.ones(3)
    for function in (
        lambda x: torch._foreach_add([x, x], [x]),
        lambda x: torch._foreach_add([x, x], [1.0]),
        lambda x: torch._foreach_addcmul([x, x], [x, x], [x]),
    ):
        expected, found = outcome(function, [x]), outcome(function, [x.to(DEVICE)])
        assert found == expected
        assert found[0] == "RuntimeError"


def test_parameters_declared_by_an_alias_take_tensors_only() -> None:
    from torch_backplane.planning import declare
    from torch_backplane.planning.declare import in_memory_only

    torch.bp.init()
    for name in ("native_batch_norm", "native_layer_norm", "index.Tensor"):
        functional = declare.find(name)
        tensors = ["Tensor" in str(one.type) for one in functional._schema.arguments]
        assert in_memory_only(declare.declared[f"aten::{name}"], functional) == tensors


@pytest.mark.parametrize(
    ("dtype", "numbers_dtype"),
    [(torch.float32, torch.float64), (torch.float32, torch.int64), (torch.int64, torch.float32)],
)
def test_clamp_between_numbers(dtype: torch.dtype, numbers_dtype: torch.dtype) -> None:
    """PyTorch's meta function of clamp rejects mixed devices, so planners must handle these. Bounds vary per call."""
    x = torch.arange(-6, 6).to(dtype)
    for low, high in ((-2, 3), (-4, 1), (3, -2), (0, 0)):
        for ends in (
            [torch.tensor(low), torch.tensor(high)],
            [torch.full((1,), low), torch.tensor(high)],
            [torch.tensor(low), None],
        ):
            given = [end if end is None else end.to(numbers_dtype) for end in ends]
            expected = torch.clamp(x, *given)
            there = [end.to(DEVICE) if end is not None and end.dim() else end for end in given]
            found = torch.clamp(x.to(DEVICE), *there)
            assert found.dtype == expected.dtype
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
            assert outcome(lambda *ends: x.to(DEVICE).clamp_(*ends), there) == outcome(
                lambda *ends: x.clone().clamp_(*ends), given
            )
