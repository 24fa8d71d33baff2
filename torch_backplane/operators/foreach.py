"""torch._foreach_*: operators on lists of tensors, computed in few launches.

A set is one tensor of each list. PyTorch iterates over the sets in order and composes each result of other operators. A
launch computes many sets at the same time. That is valid only if no set accesses memory that another set writes, and
if PyTorch raises no error. Planners leave all other calls (`RunOnCPU`) to PyTorch's composition, which runs on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

import torch

from torch_backplane import kernels
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.multi_tensor import multi_tensor, slots_within
from torch_backplane.operators.linear_algebra import NORMS
from torch_backplane.planning import (
    Call,
    Number,
    RunOnCPU,
    dialect_of,
    launch,
    operator,
    run_pointwise,
    runtime,
)
from torch_backplane.planning.call import elementwise_result, extent
from torch_backplane.planning.launch import generated, tracing
from torch_backplane.planning.pointwise import Fitting

MAX_SLOTS = 8  # sets in one launch
MAX_ELEMENTS = 2**31 - 1  # in one tensor: kernels count in 32 bits

Place = tuple[int, int, int, bool, torch.Tensor]  # begin and end in memory, set, whether it is written, tensor
Set = tuple[list[torch.Tensor], list[torch.Tensor], list[Any]]  # one tensor of each list; one-element tensors; numbers

def run_sets(
    name: str,
    formula: Callable[..., Any],
    sets: Sequence[Set],
    outputs: Sequence[Sequence[torch.Tensor]],
) -> None:
    """Computes `formula` for each set, and writes the results to the set's `outputs`.

    Sets of the same dtypes whose tensors are all dense with the same strides share launches. Others are computed one by
    one.
    """
    together: dict[Any, list[int]] = {}
    alone: list[int] = []
    for position, ((tensors, singles, numbers), written) in enumerate(zip(sets, outputs, strict=True)):
        compute = value_dtype(written[0].dtype)
        if is_plain([*tensors, *written]) and all(value_dtype(one.dtype) == compute for one in singles):
            dtypes = tuple(tuple(one.dtype for one in part) for part in (tensors, singles, written))
            together.setdefault((dtypes, len(numbers)), []).append(position)
        else:
            alone.append(position)
    # Makes all kernels before the first launch: if the formula does not support a dtype, the call is left to the CPU,
    # so nothing may have been written by then.
    device = outputs[0][0].device
    found = {(dtypes, count): slots_kernel(name, formula, dtypes, count, device) for dtypes, count in together}
    for kind, positions in together.items():
        kernel, slots = found[kind]
        for chunk in chunks(positions, slots):
            run_chunk(name, kernel, slots, [(sets[one], outputs[one]) for one in chunk])
    for position in alone:
        run_one(name, formula, sets[position], outputs[position])


def is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors are dense with the same shape and strides, and small enough for kernels."""
    first = tensors[0]
    return first.numel() <= MAX_ELEMENTS and all(
        one.shape == first.shape and one.stride() == first.stride() and dense(one) for one in tensors
    )


def dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range of memory without gaps or overlaps."""
    steps = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1)
    expected = 1
    for stride, size in steps:
        if stride != expected:
            return False
        expected *= size
    return True


def run_one(name: str, formula: Callable[..., Any], one: Set, written: Sequence[torch.Tensor]) -> None:
    tensors, singles, numbers = one
    dtype = value_dtype(written[0].dtype)
    run_pointwise(
        formula,
        written,
        [*tensors, *singles],
        [(number, dtype) for number in numbers],
        key=name,
        compute=dtype,
        name=name,
    )


def slots_kernel(
    name: str,
    formula: Callable[..., Any],
    dtypes: tuple[tuple[torch.dtype, ...], ...],
    numbers: int,
    device: torch.device,
) -> tuple[kernels.Kernel, int]:
    """The kernel for sets with these dtypes (tensors, one-element tensors, results), and its number of sets."""
    compute = value_dtype(dtypes[2][0])

    def generate() -> tuple[kernels.Kernel, int]:
        dialect = dialect_of(device)
        operands: dict[str, Sequence[torch.dtype]] = {"inputs": dtypes[0], "singles": dtypes[1], "outputs": dtypes[2]}
        operands["scalars"] = [compute] * numbers
        slots = slots_within(dialect, MAX_SLOTS, **operands)
        return multi_tensor(name, formula, slots=slots, dialect=dialect, compute=compute, **operands), slots

    with tracing():
        return generated(("multi_tensor", name, dtypes, numbers, device.index), generate)


def run_chunk(
    name: str, kernel: kernels.Kernel, count: int, chunk: Sequence[tuple[Set, Sequence[torch.Tensor]]]
) -> None:
    """Launches a kernel of `count` sets for that many sets or fewer. Unused slots get the memory of the first set, and
    no elements.
    """
    slots = [*chunk, *[chunk[0]] * (count - len(chunk))]
    counts = [written[0].numel() for _, written in chunk] + [0] * (count - len(chunk))
    tensors = [one for _, written in slots for one in written]
    tensors += [one for (read, singles, _), _ in slots for one in (*read, *singles)]
    given = [number for (_, _, passed), _ in slots for number in passed]
    group, width = kernel.group_size, kernel.width
    assert group is not None
    assert width is not None
    items = sum(-(-elements // (group * width)) * group for elements in counts)
    launch(kernel, tensors, [*given, *counts], [items], name=name)


def chunks(values: Sequence[int], size: int) -> Iterator[list[int]]:
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


def foreach(name: str, formula: Callable[..., Any], **fitting: Fitting) -> None:
    """Declares all overloads of torch._foreach_NAME, in-place ones included.

    Args:
        formula: Takes an element of each list of tensors, then each number, in the order of the schema.
        fitting: The dtype that numbers must fit, as in `pointwise`, by argument name. The default is "any", because
            PyTorch converts the numbers of additions, subtractions, multiplications and divisions to tensors.
    """
    packet = getattr(torch.ops.aten, f"_foreach_{name}")
    for overload in packet.overloads():
        names, types = zip(
            *((one.name, str(one.type)) for one in getattr(packet, overload)._schema.arguments), strict=True
        )
        # On every device, PyTorch takes a tensor of several numbers from the CPU and converts it to a list.
        if overload.endswith("out") or ("scalars", "Tensor") in zip(names, types, strict=True):
            continue
        full = f"_foreach_{name}" + ("" if overload == "default" else f".{overload}")
        of_tensors = [one == "List[Tensor]" for one in types]

        @operator(full)
        def plan(
            call: Call,
            *arguments: Any,
            _name: str = f"foreach_{name}_{overload.lower()}",
            _names: tuple[str, ...] = names,
            _of_tensors: list[bool] = of_tensors,
        ) -> Any:
            tensors = [value for value, found in zip(arguments, _of_tensors, strict=True) if found]
            others = [
                one for one, found in zip(zip(_names, arguments, strict=True), _of_tensors, strict=True) if not found
            ]
            singles = [value for _, value in others if isinstance(value, torch.Tensor)]
            numbers = [(name, value) for name, value in others if isinstance(value, list)]
            numbers += [(name, [value] * len(tensors[0])) for name, value in others if isinstance(value, Number)]
            check_lists(tensors)
            check_others(tensors[0], singles, [values for _, values in numbers])
            schema = call.overload._schema.arguments
            written = [value for value, one in zip(call.arguments, schema, strict=True) if one.is_write]
            if written:
                check_order(tensors, singles)
            outputs = written[0] if written else [result_of(one) for one in zip(*tensors, strict=True)]
            sets: list[Set] = []
            for i, result in enumerate(outputs):
                passed = [fitted(values[i], fitting.get(name, "any"), result.dtype) for name, values in numbers]
                sets.append(([one[i] for one in tensors], singles, passed))
            run_sets(_name, formula, sets, [[one] for one in outputs])
            return None if written else outputs


def result_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """An uninitialized tensor with the strides that PyTorch gives the result of an elementwise operator."""
    first = tensors[0]
    if is_plain(tensors):
        return torch.empty_like(first)
    made = elementwise_result(tensors, first.dtype)
    return torch.empty_strided(first.shape, made.stride(), dtype=first.dtype, device=first.device)


def fitted(number: Number, fitting: Fitting, dtype: torch.dtype) -> Number:
    """The number, with a check that it fits the dtype that `dtype` is computed or stored in."""
    return number if fitting == "any" else number.fitting(dtype if fitting == "stored" else value_dtype(dtype))


def check_lists(lists: Sequence[Sequence[torch.Tensor]]) -> None:
    """Leaves a call to PyTorch unless the tensors of each set have one shape and one floating-point dtype."""
    if any(len(one) != len(lists[0]) for one in lists):
        raise RunOnCPU("its lists have different lengths")  # PyTorch raises an error
    if any(isinstance(one, Number) for tensors in lists for one in tensors):
        raise RunOnCPU("a zero-dimensional CPU tensor in its lists")
    for tensors in zip(*lists, strict=True):
        if not tensors[0].dtype.is_floating_point or any(
            one.dtype != tensors[0].dtype or one.shape != tensors[0].shape for one in tensors
        ):
            raise RunOnCPU("its lists differ in dtype or shape, or are not floating-point")


def check_others(
    tensors: Sequence[torch.Tensor], singles: Sequence[torch.Tensor], numbers: Sequence[Sequence[Number]]
) -> None:
    """Leaves a call to PyTorch if there are no elements, or if other arguments do not fit the list `tensors`."""
    if not any(one.numel() for one in tensors):
        raise RunOnCPU("there are no elements")  # without a kernel, nothing would check the numbers
    if any(one.dim() or {value_dtype(each.dtype) for each in tensors} != {one.dtype} for one in singles):
        raise RunOnCPU("its tensor argument is not a zero-dimensional tensor of the lists' compute dtype")
    if any(one.dtype != each.dtype and not each.dim() for one in singles for each in tensors):
        raise RunOnCPU("a zero-dimensional tensor in its lists is promoted by its tensor argument")
    if any(len(one) != len(tensors) for one in numbers):
        raise RunOnCPU("its lists have different lengths")  # PyTorch raises an error
    if any(one.dtype == torch.bool or one.dtype.is_complex for values in numbers for one in values):
        raise RunOnCPU("a number is bool or complex")  # for which some operators raise an error


def check_order(lists: Sequence[Sequence[torch.Tensor]], singles: Sequence[torch.Tensor]) -> None:
    """Leaves a call to PyTorch if the result depends on the order of sets, or if PyTorch raises an error for a tensor
    of the first list, which is written: it overlaps with itself, or partly with a tensor of the same set.
    """
    if any(torch._debug_has_internal_overlap(one) == 1 for one in lists[0]):
        raise RunOnCPU("it writes to a tensor with internal overlap")
    places: dict[Hashable, list[Place]] = {}  # by storage
    for position, tensors in enumerate([singles, *zip(*lists, strict=True)]):
        for at, one in enumerate(tensors):
            if one.numel():
                begin, end = extent(one)
                found = (begin, end, position, position > 0 and at == 0, one)
                places.setdefault(runtime.storage_of(one), []).append(found)
    for in_storage in places.values():
        overlapping: list[Place] = []  # tensors that end after the next one begins
        for begin, end, position, written, one in sorted(in_storage, key=itemgetter(0)):
            overlapping = [other for other in overlapping if other[1] > begin]
            for first, _, elsewhere, too, other in overlapping:
                alike = position == elsewhere and first == begin and one.stride() == other.stride()
                if (written or too) and not alike:
                    raise RunOnCPU("it writes to memory that overlaps another tensor")
            overlapping.append((begin, end, position, written, one))


foreach("add", lambda a, b, alpha=1.0: a + b * alpha, alpha="stored")
foreach("sub", lambda a, b, alpha=1.0: a - b * alpha, alpha="stored")
foreach("mul", lambda a, b: a * b)
foreach("div", lambda a, b: a / b)
foreach("maximum", f.maximum, scalar="stored", scalars="stored")
foreach("minimum", f.minimum, scalar="stored", scalars="stored")
foreach("addcmul", lambda a, b, c, value: a + value * b * c, value="computed", scalars="computed")
foreach("addcdiv", lambda a, b, c, value: a + value * b / c, value="computed", scalars="computed")
foreach("lerp", f.lerp, weight="computed")
foreach("neg", lambda a: -a)
foreach("abs", abs)
foreach("sqrt", f.sqrt)
foreach("exp", f.exp)
foreach("reciprocal", lambda a: 1.0 / a)
foreach("zero", lambda a: 0.0)


@operator("_foreach_norm.Scalar", by_value=("ord",), static={"ord": NORMS}, variants=False)
def foreach_norm(call: Call, tensors: list[torch.Tensor], ord: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
    if not tensors or isinstance(ord, bool) or not isinstance(ord, (int, float)):
        raise RunOnCPU("the list is empty, or ord is not a real number")  # PyTorch raises an error
    if ord == float("inf") and not all(one.numel() for one in tensors):
        raise RunOnCPU("an infinity norm of no elements")  # PyTorch raises an error
    return [torch.linalg.vector_norm(one, ord, dtype=dtype) for one in tensors]
