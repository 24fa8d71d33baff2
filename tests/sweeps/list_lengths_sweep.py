"""Lists of integers with lengths that operators do not accept: errors have the CPU's type and message.

The calls are the aten calls of the database's samples, forward and backward. Values are not compared, so any driver
with planners works.

    TORCH_BACKPLANE_DRIVERS=opencl python tests/sweeps/sweep_process.py list_lengths_sweep.py --match pool
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import sweep_process
import torch

from torch_backplane.conformance import Settings, child_processes, comparison
from torch_backplane.conformance.calls import _brief
from torch_backplane.conformance.database import load
from torch_backplane.conformance.forms import Arguments, Form
from torch_backplane.conformance.forms_check import FormsCheck, is_internal
from torch_backplane.conformance.settings import OP_DB
from torch_backplane.conformance.transfer import Transfer

DEVICE, CPU = torch.device("bp", 0), torch.device("cpu")
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)  # the first that an operator supports


def other_lengths(overload: Any, arguments: Arguments) -> Iterator[Form]:
    """Yields the call with each list of integers empty, longer and shorter."""
    for one in overload._schema.arguments:
        value = arguments[one.name]
        if "int[" not in str(one.type).lower() and "List[int]" not in str(one.real_type):
            continue
        if isinstance(value, (list, tuple)):
            lists = {"empty": [], "longer": [*value, 1], "two longer": [*value, 1, 1], "shorter": list(value[:-1])}
            for name, other in lists.items():
                if len(other) != len(value):
                    yield Form(f"{one.name} {name}", overload, {**arguments, one.name: other})


def outcome(form: Form, device: torch.device) -> tuple[str, str]:
    """Returns (type of the error, its first line), empty if there is none."""
    torch.manual_seed(0)
    try:
        with torch.no_grad():
            form(Transfer(device)(form.arguments))
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]
    return "", ""


def sweep(op: Any, samples: int) -> None:
    dtype = next((dtype for dtype in DTYPES if dtype in op.dtypes), None)
    if dtype is None:
        return
    random.seed(0)
    check = FormsCheck(op, dtype, Settings(samples=samples), DEVICE, lambda text: None)
    forms = [form for overload, arguments in check._calls() for form in other_lengths(overload, arguments)]
    for form, expected in zip(forms, child_processes.in_children(forms, lambda form: outcome(form, CPU)), strict=True):
        if expected is None:
            continue  # the CPU's process crashed
        given = (f"{name}={_brief(value)}" for name, value in form.arguments.items() if value is not None)
        text = f"{form.overload}({', '.join(given)})"
        sweep_process.call(text)
        actual = outcome(form, DEVICE)
        if _is_wrong(form.overload, actual, expected):
            sweep_process.found(f"{text}: {actual}; on the CPU {expected}")


def _is_wrong(overload: Any, actual: tuple[str, str], expected: tuple[str, str]) -> bool:
    """Internal operators, which get valid lists from their callers, can have other messages."""
    alike = (actual[0], _without_device(actual[1])) == (expected[0], _without_device(expected[1]))
    if is_internal(overload):
        return comparison.is_broken(actual[1], expected[1]) or actual[0] in (
            "TypeError",
            "ValueError",
            "AssertionError",
        )
    return not alike and "not implemented for" not in expected[1]


def _without_device(message: str) -> str:
    """Replaces tensor types such as bpFloatType and CPUFloatType by the form without a device."""
    return re.sub(r"\b(?:bp|CPU)(\w+)Type\b", r"torch.\1Tensor", message)


def names(pattern: str) -> list[str]:
    return [name for name in load(OP_DB) if re.search(pattern, name)]


if __name__ == "__main__":
    sweep_process.over_database(__doc__, sweep, samples=6)
