"""Variants ("forms") of a call: out= of other dtypes, shapes and layouts, overlapping memory, wrong arguments.

Derives many calls from one call of an ATen overload. PyTorch must either refuse each or compute it correctly. The CPU
decides which, so nothing here depends on what is valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

OUT_DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool, torch.complex64)
ARGUMENT_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float16)
Arguments = dict[str, Any]  # by the names of the schema


@dataclass
class Form:
    """A variant of a call: its description, the overload, all arguments by name."""

    name: str
    overload: OpOverload
    arguments: Arguments
    wrong: bool = False  # whether an argument that is read was changed, and may be invalid for the operator

    def __call__(self, arguments: Arguments) -> Any:
        """Call the overload with these arguments, which are `self.arguments` copied to some device."""
        schema = self.overload._schema.arguments
        positional = [arguments[one.name] for one in schema if not one.kwarg_only]
        return self.overload(*positional, **{one.name: arguments[one.name] for one in schema if one.kwarg_only})


def forms(overload: OpOverload, arguments: Arguments, results: list[torch.Tensor]) -> Iterator[Form]:
    """Yield all forms of a call, given the CPU's results of it."""
    yield from wrong_arguments(overload, arguments)
    yield from overlapping_arguments(overload, arguments)
    for other in siblings(overload):
        written = [one.name for one in other._schema.arguments if one.is_out]
        if not written:
            yield Form("in place", other, arguments)
            yield from wrong_arguments(other, arguments)
            yield from overlapping_arguments(other, arguments)
        elif len(written) == len(results):
            kept = {one.name: arguments[one.name] for one in other._schema.arguments if not one.is_out}
            yield from out_forms(other, kept, dict(zip(written, results, strict=True)))


def siblings(overload: OpOverload) -> list[OpOverload]:
    """Return the in-place and `out=` overloads of the same operator. Those of factories have fewer arguments."""
    namespace, _, base = overload._schema.name.partition("::")
    own = {one.name: str(one.type) for one in overload._schema.arguments}
    options = {"dtype", "layout", "device", "pin_memory", "memory_format"}
    found = []
    for name in (base, base + "_"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for other in (getattr(packet, one) for one in packet.overloads()) if packet is not None else ():
            arguments = {one.name: str(one.type) for one in other._schema.arguments if not one.is_out}
            writes = any(one.is_write for one in other._schema.arguments)
            fits = arguments.items() <= own.items() and own.keys() - arguments.keys() <= options
            if other is not overload and writes and fits:
                found.append(other)
    return found


# --- out= ------------------------------------------------------------------------------------------------------------
def out_forms(overload: OpOverload, kept: Arguments, results: Arguments) -> Iterator[Form]:
    """Yield forms with `out=` of other dtypes, shapes and layouts, or overlapping an input; one result at a time."""
    whole = {name: filled(result.shape, result.dtype) for name, result in results.items()}
    yield Form("out", overload, {**kept, **whole})
    for name, result in results.items():
        for kind, out in outs_like(result):
            yield Form(f"out {kind}", overload, {**kept, **whole, name: out})
        for other, value in kept.items():
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                for kind, given, out in pairs(value, result):
                    yield Form(f"out {kind} {other}", overload, {**kept, **whole, other: given, name: out})


def outs_like(result: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (description, out) pairs for a result like this one. Each `out` differs from it in one way."""
    shape, dtype = result.shape, result.dtype
    for other in OUT_DTYPES:
        if other != dtype:
            yield f"as {str(other).removeprefix('torch.')}", filled(shape, other)
    yield "with gaps", filled((*shape, 3), dtype)[..., 1]
    yield "transposed", filled(shape[::-1], dtype).permute(tuple(range(len(shape) - 1, -1, -1)))
    yield "empty", filled((0,), dtype)
    yield "with an extra dimension", filled((1, *shape), dtype)
    yield "too large", filled((*(size + 1 for size in shape),), dtype)
    yield "too small", filled((*(max(size - 1, 0) for size in shape),), dtype)
    yield "flat", filled((result.numel(),), dtype)
    yield "flat with gaps", filled((result.numel(), 2), dtype)[:, 0]
    if result.numel() % 2 == 0 and result.numel():
        # The same number of elements, in a view with a gap between its two rows.
        yield "in two rows", filled((2, result.numel() // 2 + 1), dtype)[:, 1:]
    yield "without dimensions", filled((), dtype)
    if result.numel() > 1:
        yield "expanded", filled((1,) * len(shape), dtype).expand(shape)


def pairs(value: torch.Tensor, result: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (description, input, out) for an input and a result's tensor that share memory."""
    shape = result.shape
    memory = torch.ones(max(value.numel(), result.numel()) + 1, dtype=value.dtype)
    memory[: value.numel()] = value.reshape(-1)
    given = memory[: value.numel()].view(value.shape)
    if result.dtype == value.dtype:
        if shape == value.shape:
            yield "is", (same := value.clone(memory_format=torch.contiguous_format)), same
        if value.dim() > 1 and value.mT.shape == shape and value.numel() > 1:
            yield "is the transpose of", given, given.mT
        yield "begins with", given, memory[: result.numel()].view(shape)
        yield "is one element after", given, memory[1 : result.numel() + 1].view(shape)
    elif result.itemsize == value.itemsize and not (result.is_complex() or value.is_complex()):
        yield "reinterprets", given, memory.view(result.dtype)[: result.numel()].view(shape)


def filled(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor filled with 77, a value that is unlikely as a result."""
    return torch.full(shape, 77, dtype=dtype)


# --- overlaps --------------------------------------------------------------------------------------------------------
def overlapping_arguments(overload: OpOverload, arguments: Arguments) -> Iterator[Form]:
    """Yield forms in which an argument that is written in place is expanded, or overlaps an argument that is read."""
    for one in overload._schema.arguments:
        value = arguments[one.name]
        if not one.is_write or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            continue
        if value.numel() > 1:
            first = value[tuple(slice(0, 1) for _ in value.shape)].clone().expand(value.shape)
            yield Form(f"{one.name} expanded", overload, {**arguments, one.name: first})
        for name, other in arguments.items():
            if name != one.name and isinstance(other, torch.Tensor) and other.layout == torch.strided:
                for kind, given, written in pairs(other, value):
                    yield Form(f"{one.name} {kind} {name}", overload, {**arguments, name: given, one.name: written})


# --- arguments -------------------------------------------------------------------------------------------------------
def wrong_arguments(overload: OpOverload, arguments: Arguments) -> Iterator[Form]:
    """Yield forms with one argument, or all tensors, replaced by others that can be invalid for the operator."""
    for one in overload._schema.arguments:
        for kind, value in others(one, arguments[one.name]):
            yield Form(f"{one.name} {kind}", overload, {**arguments, one.name: value}, wrong=True)
    # All tensors of the first one's dtype together, which are not refused because of mixed dtypes.
    of = next((value.dtype for value in arguments.values() if _is_dense(value)), None)
    for dtype in (*ARGUMENT_DTYPES, torch.int16, torch.uint32):
        if of is not None and dtype != of and not (of.is_complex and not dtype.is_complex):
            alike = {name: value.detach().to(dtype) for name, value in arguments.items() if _is_dense(value, of)}
            yield Form(f"all {of} as {dtype}".replace("torch.", ""), overload, {**arguments, **alike}, wrong=True)
    # All tensors together with more or fewer dimensions: the ranks match, and can be invalid for the operator.
    dense = {name: value.detach() for name, value in arguments.items() if _is_dense(value)}
    if len(dense) > 1:
        ranks: list[tuple[str, Any]] = [("an extra dimension", (None,)), ("two extra dimensions", (None, None))]
        if all(value.dim() and len(value) for value in dense.values()):
            ranks.append(("one dim less", (0,)))
        for kind, index in ranks:
            given = {name: value[index].clone() for name, value in dense.items()}
            yield Form(f"all with {kind}", overload, {**arguments, **given}, wrong=True)


def _is_dense(value: Any, dtype: torch.dtype | None = None) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and dtype in (None, value.dtype)


def others(argument: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (description, other value) for an argument of a schema."""
    declared = str(argument.type)
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield from other_tensors(value)
    elif "Tensor" in declared and isinstance(value, (list, tuple)):
        yield "shorter", value[:-1]
        for position, tensor in enumerate(value[:2]):
            if isinstance(tensor, torch.Tensor):
                for kind, other in other_tensors(tensor):
                    yield f"[{position}] {kind}", [*value[:position], other, *value[position + 1 :]]
    elif declared in ("Scalar", "number", "Optional[number]", "float", "Optional[float]") and value is not None:
        for number in (True, 0.5, -0.5, -1, 0, 3) if "number" in declared else (0.0, 0.5, -0.5, 3.0):
            yield f"= {number}", number
    elif _is_enumerator(argument):  # PyTorch does not check the range of these numbers, so only valid dtypes are tried
        if isinstance(value, torch.dtype):
            yield from ((f"= {dtype}", dtype) for dtype in ARGUMENT_DTYPES)
    elif declared in ("int", "Optional[int]", "SymInt", "Optional[SymInt]") and isinstance(value, int):
        for number in (-1, 0, 1, 2, -3, 100):
            yield f"= {number}", number
    elif declared == "bool":
        yield f"= {not value}", not value
    elif isinstance(value, (list, tuple)) and all(isinstance(item, int) for item in value):
        yield "longer", [*value, 1]
        yield "two longer", [*value, 1, 1]
        yield "shorter", list(value[:-1])
        yield "negative", [-item - 1 for item in value]
        yield "zero", [0 for _ in value]
        yield "larger", [item + 3 for item in value]
    elif isinstance(value, str):
        yield "nonsense", "nonsense"


def _is_enumerator(argument: Any) -> bool:
    """Whether an argument that schemas declare as int is a dtype, a layout or a memory format."""
    return any(kind in str(argument.real_type) for kind in ("ScalarType", "Layout", "MemoryFormat"))


def other_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (description, tensor) with tensors of other dtypes and shapes."""
    tensor = tensor.detach()
    for dtype in ARGUMENT_DTYPES:
        if dtype != tensor.dtype and not (tensor.is_complex() and not dtype.is_complex):
            yield f"as {str(dtype).removeprefix('torch.')}", tensor.to(dtype)
    yield "with an extra dimension", tensor[None].clone()
    yield "with two extra dimensions", tensor[None, None].clone()
    if tensor.dim():
        yield "longer", torch.cat([tensor, tensor[-1:]]) if len(tensor) else tensor.new_ones((1, *tensor.shape[1:]))
        yield "shorter", tensor[:-1].clone()
        yield "wider", torch.cat([tensor, tensor[..., -1:]], -1)
        yield "with one dim less", tensor.select(0, 0).clone() if len(tensor) else tensor.new_ones(tensor.shape[1:])
        yield "without dimensions", tensor.reshape(-1)[0].clone() if tensor.numel() else tensor.new_ones(())
        yield "empty", tensor[:0].clone()
