"""All overloads of aten without `out=`, with arguments generated from their schemas.

Finds INTERNAL ASSERT errors that the CPU does not raise, and crashes where the CPU does not crash. Results are not
checked.

    TORCH_BACKPLANE_DRIVERS=host python tests/sweeps/sweep_process.py overloads_sweep.py --match window
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import sweep_process
import torch
from torch.utils._pytree import tree_map_only

from torch_backplane.conformance import child_processes

DEVICE, CPU = torch.device("bp", 0), torch.device("cpu")
CALL_SECONDS = 60

# They change the process, files or other devices, or wait for others.
_LEFT_OUT = re.compile(
    r"aten::(_cuda|cudnn|_cudnn|miopen|_sleep|_rpc|wait|save|from_file|_thnn_fused.*cuda|_triton|_nested|_sparse|"
    r"_test_|_assert|_print|record_stream|set_data|_async_error|_cufft|mps|_mps|hip)"
)

# With invalid arguments, PyTorch's CPU kernels write out of bounds, and the CPU's process may or may not crash.
_WRITES_ANYWHERE = ("aten::_cholesky_solve_helper", "aten::_fft_r2c", "aten::_sobol_engine_initialize_state_")

# The tensors of a call, in order; the last one is repeated for further parameters.
TENSORS: tuple[tuple[torch.Tensor, ...], ...] = (
    (torch.rand(3, 4) + 0.25,),
    (torch.rand(3, 3) + torch.eye(3),),
    (torch.rand(4),),
    (torch.rand(2, 3, 4, 4), torch.rand(3, 3, 2, 2), torch.rand(3)),
    (torch.rand(2, 3, 4, 4, 4), torch.rand(3, 3, 2, 2, 2), torch.rand(3)),
    (torch.rand(2, 3, 4), torch.rand(2, 4, 3)),
    (torch.ones(3, 4, dtype=torch.int64),),
    (torch.rand(3, 4), torch.ones(3, 4, dtype=torch.int64)),
    (torch.rand(3, 4), torch.ones(3, dtype=torch.int64)),
    (torch.rand(3, 4), torch.ones(3, 4, dtype=torch.bool)),
    (torch.rand(3, 4).to(torch.complex64),),
    (torch.zeros(0, 3),),
    (torch.tensor(0.5),),
)
INTEGERS = (1, 0, 2, -1)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class NoArgument(Exception):
    """No argument of this type can be generated."""


def value_of(declared: str, integer: int, tensors: Iterator[torch.Tensor], size: int | None) -> Any:
    """Generates an argument of a type as written in schemas. `size`: the length of a list, if the schema gives it."""
    if declared.startswith("Optional[") and "Tensor" not in declared:
        inside = declared.removeprefix("Optional[").removesuffix("]")
        return value_of(inside, integer, tensors, size) if integer == 2 else None
    match declared:
        case "Tensor" | "Optional[Tensor]":
            return next(tensors).clone()
        case "List[Tensor]" | "List[Optional[Tensor]]" | "Optional[List[Tensor]]":
            return [next(tensors).clone(), next(tensors).clone()]
        case "int" | "SymInt":
            return integer
        case "float":
            return 0.5 * integer
        case "number":
            return integer if integer != 2 else 0.5
        case "bool":
            return integer == 2
        case "complex":
            return complex(integer)
        case "List[int]" | "List[SymInt]":
            return [abs(integer)] * (size or (integer if integer > 0 else 2))
        case "List[bool]":
            return [True] * (size or 2)
        case "List[float]":
            return [0.5] * (size or 2)
        case "List[number]":
            return [1, 2]
        case "str":
            return "mean"
        case "Device":
            return CPU
        case "Generator":
            return None
    raise NoArgument(declared)


def arguments_of(overload: Any) -> Iterator[Arguments]:
    """Yields arguments for each kind of tensors and each integer. Raises NoArgument for unknown types."""
    schema = overload._schema.arguments
    kinds: Any = TENSORS if any("Tensor" in str(one.type) for one in schema) else TENSORS[:1]
    for kind, integer in itertools.product(kinds, INTEGERS):
        tensors = itertools.chain(kind, itertools.repeat(kind[-1]))
        positional, named = [], {}
        for one in schema:
            declared = str(one.real_type)
            if one.name == "device":
                value: Any = CPU
            elif one.name in ("dtype", "layout", "pin_memory", "memory_format", "generator") and "Optional" in declared:
                value = None
            elif declared in ("ScalarType", "Optional[ScalarType]"):
                value = torch.float32
            elif declared in ("Layout", "MemoryFormat"):
                raise NoArgument(declared)
            elif one.has_default_value() and integer == 1:
                value = one.default_value
            else:
                value = value_of(declared, integer, tensors, one.N)
            if one.kwarg_only:
                named[one.name] = value
            else:
                positional.append(value)
        yield tuple(positional), named


def outcome(overload: Any, given: Arguments, device: torch.device) -> str:
    """Returns the error, or ""."""
    torch.manual_seed(0)
    placed = tree_map_only(torch.Tensor, lambda one: one.to(device), given)
    placed = tree_map_only(torch.device, lambda one: device, placed)
    try:
        with torch.no_grad():
            overload(*placed[0], **placed[1])
            if device != CPU:
                torch.accelerator.synchronize(device)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sweep(name: str) -> None:
    base, _, overload_name = name.removeprefix("aten::").partition(".")
    overload = getattr(getattr(torch.ops.aten, base), overload_name or "default")
    try:
        calls = list(arguments_of(overload))
    except NoArgument as missing:
        print("without", name, missing, file=sys.stderr)
        return
    taken = 0
    on_cpu = child_processes.in_children(calls, lambda call: outcome(overload, call, CPU))
    for call, expected in zip(calls, on_cpu, strict=True):
        if expected is None:
            continue  # the CPU's process crashed
        taken += not expected
        sweep_process.call(f"{name}{call}")
        signal.alarm(CALL_SECONDS)
        actual = outcome(overload, call, DEVICE)
        signal.alarm(0)
        if "INTERNAL ASSERT" in actual and "INTERNAL ASSERT" not in expected:
            sweep_process.found(f"{name}{call}: {actual[:300]}; on the CPU {expected[:200] or 'no error'}")
    print("taken" if taken else "refused", name, taken, file=sys.stderr)


def names(pattern: str) -> list[str]:
    """The matching names of all overloads without `out=` that PyTorch dispatches."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if not name.startswith("aten::") or _LEFT_OUT.match(name) or not re.search(pattern, name):
            continue
        if any(one.is_out for one in schema.arguments) or not torch._C._dispatch_has_kernel(name):
            continue
        packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
        if name in _WRITES_ANYWHERE:
            continue
        if packet is not None and (schema.overload_name or "default") in packet.overloads():
            found.append(name)
    return sorted(set(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    torch.empty(0, device=DEVICE)
    faulthandler.enable()  # replaces PoCL's handler, which survives a division by zero
    for name in options.names:
        sweep_process.entry(name)
        sweep(name)


if __name__ == "__main__":
    main()
