"""Pointwise operators, declared by a formula over scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from torch_backplane import _C, kernels
from torch_backplane.kernels import Expression
from torch_backplane.kernels import functions as f
from torch_backplane.kernels.dtypes import part_dtype, value_dtype
from torch_backplane.kernels.expression import Formula, Program, constant
from torch_backplane.kernels.layouts import Layout, tiles
from torch_backplane.kernels.pointwise import pointwise_program
from torch_backplane.planning import runtime
from torch_backplane.planning.call import OF_ONE_DTYPE, Call, shares_memory
from torch_backplane.planning.declare import Dtypes, Static, check_supported, operator
from torch_backplane.planning.geometry import check_operands, pointwise_geometry
from torch_backplane.planning.launch import dialect_of, generated, launch, traced, tracing

Fitting = Literal["computed", "stored", "any"]

# Arguments with these names are conditions: bool, whatever dtype is computed in.
CONDITIONS = ("condition", "mask")
# Dtypes with values that float16 or bfloat16 cannot represent.
_ROUNDED = (
    torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64,
)  # fmt: skip


def pointwise(
    name: str,
    formula: Callable[..., Any],
    *,
    compute: Literal["result", "inputs"] = "result",
    by_value: Sequence[str] = (),
    passed_through: Sequence[str] = (),
    static: Static | None = None,
    checks: Sequence[str] = (),
    dtypes: Dtypes = "real",
    fitting: Fitting | Mapping[str, Fitting] = "computed",
    idempotent: bool = False,
    one_dtype: Sequence[str] = (),
) -> None:
    """Declares a pointwise operator and its in-place and `out=` variants by a formula over scalars.

    Args:
        name: the functional form, such as "add.Tensor".
        formula: takes the arguments of the functional form by position: tensors and numbers as traced values of the
            dtype to compute in, everything else (bool, str, None) as it is. Returns a value for each result. It runs
            once for each combination of dtypes and plain values, not for each call.
        compute: "result" computes in the dtype of PyTorch's result: float32 for float16 and bfloat16; for results of
            type bool, the dtype to which PyTorch promotes the arguments. "inputs" computes with each tensor in its own
            dtype.
        by_value: arguments of type Scalar; each value gets its own plan.
        passed_through: arguments of type float or int; one plan serves all values, as for arguments of type Scalar.
        static: as for `operator`. The formula gets these values of int, float and `by_value` arguments as they are.
        checks: conditions on numbers, as for `operator`.
        fitting: the dtype whose range arguments of type Scalar must fit, else PyTorch raises an error: "computed", the
            dtype computed in; "stored", the dtype of the result in memory; "any", no check. A mapping gives it for
            each argument name.
        dtypes: "complex" if PyTorch supports complex numbers and the formula is right for them.
        one_dtype: arguments that PyTorch requires to have one dtype, as for `operator`.
        idempotent: whether the result is independent of what the destination contained. PyTorch then accepts an
            in-place operand with internal overlap if all other operands are numbers.
    """

    declared = _Declared(name, formula, compute, fitting, idempotent, static or {})

    @operator(
        name,
        by_value=by_value,
        passed_through=passed_through,
        static=static,
        checks=checks,
        dtypes=dtypes,
        one_dtype=one_dtype,
    )
    def plan(call: Call, *values: Any) -> Any:
        return _plan(declared, call, values)


def plan_pointwise(
    name: str,
    formula: Callable[..., Any],
    call: Call,
    values: Sequence[Any],
    compute: str = "result",
    fitting: Fitting | Mapping[str, Fitting] = "computed",
    idempotent: bool = False,
) -> Any:
    """Runs a formula as the planner of a pointwise operator does.

    Args:
        name: identifies the formula; the operator's name.
        formula, compute, fitting, idempotent: as for `pointwise`.
        call: the call.
        values: the formula's arguments.

    Returns:
        What the operator returns.
    """
    return _plan(_Declared(name, formula, compute, fitting, idempotent), call, values)


class _Declared(NamedTuple):
    """The arguments of `pointwise`."""

    name: str
    formula: Callable[..., Any]
    compute: str
    fitting: Fitting | Mapping[str, Fitting]
    idempotent: bool = False
    static: Static = MappingProxyType({})


def _plan(declared: _Declared, call: Call, values: Sequence[Any]) -> Any:
    idempotent = declared.idempotent
    if call.form.has_structured_meta:
        call.meta()  # raises PyTorch's errors, in PyTorch's order
    else:
        # Some of PyTorch's meta kernels have other messages than its CPU kernels.
        runtime.check_broadcast([value for value in values if isinstance(value, torch.Tensor)])
        if not idempotent:
            runtime.check_overlaps(call.written, [])  # before tensors are resized, as PyTorch does
    check_cast(call)
    outputs = call.outputs(elementwise=True, expanded=idempotent)
    if idempotent and call.is_in_place:
        (given,) = outputs
        if any(isinstance(value, torch.Tensor) and value is not given for value in values):
            runtime.check_overlaps([given], [])  # PyTorch copies in this case, and rejects internal overlap
        values = [
            each_once(value) if value is given
            else value.clone() if isinstance(value, torch.Tensor) and shares_memory(given, [value])
            else value
            for value in values
        ]  # fmt: skip
        _run_formula(declared, call, [each_once(given)], values)
        return given
    _run_formula(declared, call, outputs, values)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view that contains each element in memory once: expanded dimensions get size 1."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def check_cast(call: Call) -> None:
    """Raises PyTorch's error if the result cannot be cast to the dtype of the tensor to write to."""
    if call.form.is_functional:
        return
    for given, result in zip(call.written, call.meta(call.functional), strict=True):
        if given.dtype != result.dtype and call.name in OF_ONE_DTYPE:
            raise _C.Refused("a result of another dtype")  # the CPU kernel raises PyTorch's error
        if not torch.can_cast(result.dtype, given.dtype):
            found, wanted = (type_name(dtype) for dtype in (result.dtype, given.dtype))
            raise RuntimeError(f"result type {found} can't be cast to the desired output type {wanted}")


def type_name(dtype: torch.dtype) -> str:
    """The dtype's name in PyTorch's messages, such as "Float"."""
    return torch.empty(0, dtype=dtype).type().rpartition(".")[2].removesuffix("Tensor")


def _run_formula(declared: _Declared, call: Call, outputs: list[Any], values: Sequence[Any]) -> None:
    """Launches the formula with the operator's arguments `values`."""
    static, fitting = declared.static, declared.fitting
    names = call.form.argument_names
    inputs: list[torch.Tensor] = []
    scalars: list[_C.Number] = []
    numbers: list[complex] = []
    places: list[tuple[str, Any]] = []  # for each argument of the formula: ("input" | …, index or the plain value)
    kinds: list[Hashable] = []  # for each argument, the properties that a traced formula depends on
    for position, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            places.append(("input", len(inputs)))
            kinds += (value.dtype, value.dim() == 0)
            inputs.append(value)
        elif isinstance(value, _C.Number):
            places.append(("scalar", len(scalars)))
            kinds.append(value.kind)
            scalars.append(value)
        elif is_number(value) and not (static and value in static.get(names[position], ())):
            places.append(("number", len(numbers)))
            kinds.append(type(value).__name__)
            numbers.append(value)
        else:
            places.append(("value", value))
            kinds.append(repr(value))  # the value would not tell 0.0 from -0.0, or 1 from True
    has_elements = check_operands(outputs, inputs)
    fits = fitting if isinstance(fitting, str) else tuple(fitting.items())
    results = [one.dtype for one in outputs]
    found, index = result_dtype(call), outputs[0].get_device()
    key = (call.form, declared.name, declared.compute, fits, torch.get_default_dtype(), index, found, *results, *kinds)
    with tracing():
        prepared = traced(key, lambda: _prepared(declared, call, outputs, inputs, scalars, numbers, places))
        for number in numbers:
            number_dtype(number, prepared.dtype)
    passed: list[Any] = [*scalars, *numbers]
    for position, fit in enumerate(prepared.fits):
        if fit is not None:
            passed[position] = scalars[position].fitting(fit)
    if prepared.parts is not None:
        passed = [
            one
            for number, in_parts in zip(passed, prepared.parts, strict=True)
            for one in ((number.real, number.imag) if in_parts else (number,))
        ]
    _run(prepared.traced, outputs, inputs, passed, has_elements)


@dataclass(eq=False, slots=True)
class _Traced:
    """A formula traced for the dtypes of its operands on one device. Compared by identity, as a key of caches."""

    name: str
    program: Program
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    scalars: tuple[torch.dtype, ...]
    compute: Any
    index: int  # of the device
    width: int  # elements for each work item if all operands are contiguous


class _Prepared(NamedTuple):
    """A declared formula, prepared for arguments of certain kinds.

    Args:
        traced: the traced formula.
        dtype: the dtype computed in.
        fits: for each `Number`, the dtype whose range it must fit; None for no check.
        parts: for each number, whether it is complex and passed as real and imaginary part; None if no number is.
    """

    traced: _Traced
    dtype: torch.dtype
    fits: list[torch.dtype | None]
    parts: list[bool] | None


def _prepared(
    declared: _Declared,
    call: Call,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[_C.Number],
    numbers: Sequence[complex],
    places: Sequence[tuple[str, Any]],
) -> _Prepared:
    name, formula, compute, fitting, *_ = declared
    names = [one for one, (origin, _) in zip(call.form.argument_names, places, strict=False) if origin == "scalar"]
    fits = [fitting if isinstance(fitting, str) else fitting[one] for one in names]
    # Numbers with the fitting "stored" do not take part in choosing the dtype to compute in.
    common = common_dtype(call, inputs, [one for one, fit in zip(scalars, fits, strict=True) if fit != "stored"])
    dtype = value_dtype(common)
    stored = outputs[0].dtype
    wanted = [
        None if fit == "any" or number.tensor is not None
        else stored if fit == "stored" and value_dtype(stored) == dtype
        else dtype
        for number, fit in zip(scalars, fits, strict=True)
    ]  # fmt: skip
    seen = [
        torch.bool if one in CONDITIONS else None if compute == "inputs" else dtype
        for one, (origin, _) in zip(call.form.argument_names, places, strict=False)
        if origin == "input"
    ]
    # PyTorch converts every tensor to the common dtype (float16, say), which rounds values of wider dtypes.
    if common != dtype:
        seen = [
            common if one == dtype and tensor.dtype in _ROUNDED and tensor.dtype != common else one
            for one, tensor in zip(seen, inputs, strict=True)
        ]

    def arranged(*traced: Expression) -> Any:
        first = len(inputs) + len(scalars)
        given = {"input": traced[: len(inputs)], "scalar": traced[len(inputs) : first], "number": traced[first:]}
        return formula(*(where if origin == "value" else given[origin][where] for origin, where in places))

    passed = [*((number, dtype) for number in scalars), *((one, number_dtype(one, dtype)) for one in numbers)]
    plain = tuple(repr(where) for origin, where in places if origin == "value")
    in_parts, scalars_in_parts = _with_parts(arranged, len(inputs), passed)
    made = _traced(
        in_parts,
        outputs,
        inputs,
        scalars_in_parts,
        (name, tuple(origin for origin, _ in places), plain),
        [one or value_dtype(tensor.dtype) for one, tensor in zip(seen, inputs, strict=True)],
        call.form.kernel_name,
    )
    parts = [one.is_complex for _, one in passed]
    return _Prepared(made, dtype, wanted, parts if any(parts) else None)


def is_number(value: Any) -> bool:
    """Whether the value is a Python number other than a bool."""
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def number_dtype(number: complex, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which a formula that computes in `dtype` gets a Python number.

    Raises:
        TypeError, OverflowError: that dtype cannot represent the number.
    """
    if dtype == torch.bool and isinstance(number, int):
        dtype = torch.int64
    elif isinstance(number, float) and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.float32
    constant(number, dtype)
    return dtype


def common_dtype(call: Call, inputs: Sequence[torch.Tensor], scalars: Sequence[_C.Number]) -> torch.dtype:
    """Returns the dtype to which PyTorch converts all tensors before it computes.

    It is the dtype of the functional form's result. For bool results, and real results of complex inputs, it is the
    dtype to which PyTorch promotes the arguments.
    """
    result = result_dtype(call)
    if result == torch.bool or (not result.is_complex and any(tensor.is_complex() for tensor in inputs)):
        values = [number.tensor if number.is_dimensioned else number.example for number in scalars]
        _, result = elementwise_dtypes(*inputs, *values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    check_supported(result)
    return result


def result_dtype(call: Call) -> torch.dtype:
    """The dtype of the functional form's first result that is not None."""
    for one in call.meta(call.functional):
        if one is not None:
            return one.dtype
    raise AssertionError(f"{call.name} makes nothing")


def run_pointwise(
    formula: Formula,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[tuple[Any, torch.dtype]] = (),
    *,
    key: Hashable,
    compute: torch.dtype | Sequence[torch.dtype] | None = None,
    name: str = "pointwise",
) -> None:
    """Computes `formula` for each element of `outputs`.

    Args:
        formula: takes a traced value for each input and scalar; returns one for each output.
        outputs: tensors of one shape.
        inputs: tensors that are broadcast to that shape.
        scalars: (number, dtype in which the formula gets it).
        key: identifies the formula. Equal keys share kernels.
        compute: the dtype in which the formula gets the inputs, or one for each, as for `kernels.pointwise`.
        name: the name of the kernel; a C identifier.
    """
    has_elements = check_operands(outputs, inputs)
    formula, scalars = _with_parts(formula, len(inputs), scalars)
    made = _traced(formula, outputs, inputs, scalars, key, compute, name)
    _run(made, outputs, inputs, [number for number, _ in scalars], has_elements)


def _traced(
    formula: Formula,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    scalars: Sequence[tuple[Any, torch.dtype]],
    key: Hashable,
    compute: torch.dtype | Sequence[torch.dtype] | None,
    name: str,
) -> _Traced:
    """Traces the formula for these operands, cached by the key. Complex scalars are already split into parts."""
    read, written = tuple([tensor.dtype for tensor in inputs]), tuple([tensor.dtype for tensor in outputs])
    numbers = tuple([dtype for _, dtype in scalars])
    index = outputs[0].get_device()
    seen = tuple(compute) if isinstance(compute, (list, tuple)) else compute

    def trace() -> _Traced:
        program = pointwise_program(formula, read, written, seen, numbers)
        # A complex number is already a vector. Around a formula with loops, compilers do not unroll the loop over the
        # lanes of a vector, and the lanes are in memory.
        scalar = program.has_loops or any(dtype.is_complex for dtype in (*read, *written))
        width = 1 if scalar else dialect_of(index).target.element_width
        return _Traced(name, program, read, written, numbers, seen, index, width)

    with tracing():
        return traced((key, read, written, numbers, seen, index), trace)


def _run(
    made: _Traced,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    numbers: Sequence[Any],
    has_elements: bool,
) -> None:
    """Launches a traced formula. Without elements, only generates the kernel, for its errors, and checks numbers."""
    dialect = dialect_of(made.index)
    layout, sizes, strides = pointwise_geometry(outputs, inputs, made.program.indices, made.width, dialect)
    with tracing():
        kernel, places = generated((made, layout), lambda: _kernel(made, Layout(*layout)))
    if not has_elements:
        for number in numbers:
            if isinstance(number, _C.Number):
                runtime.check_number(number)
        return
    _, _, _, inner, tile = layout
    group_size: tuple[int, ...] | None = None
    if tile:
        count = tiles(tile, sizes)
        assert kernel.group_size is not None
        global_size, group_size = [count * kernel.group_size], (kernel.group_size,)
    elif inner:
        rows = math.prod(sizes[1:])
        global_size, group_size = [sizes[0], rows], dialect.target.row_group(sizes[0], rows, strided=2 in inner)
        count = rows
    else:
        count = math.prod(sizes)
        global_size = [kernel.work_items(count)]
    others = [sizes[dim] if operand is None else strides[operand][dim] for operand, dim in places]
    launch(kernel, [*outputs, *inputs], [*numbers, count, *others], global_size, group_size, name=made.name)


def _kernel(made: _Traced, layout: Layout) -> tuple[kernels.Kernel, list[tuple[int | None, int]]]:
    """Generates the kernel.

    Returns:
        The kernel, and (operand, dimension) for each of its last arguments: a stride of that operand, or a size if the
        operand is None.
    """
    kernel = kernels.pointwise(
        made.name,
        made.program,
        inputs=made.inputs,
        outputs=made.outputs,
        scalars=made.scalars,
        layout=layout,
        dialect=dialect_of(made.index),
        compute=made.compute,
    )
    roles = [one.role for one in kernel.parameters]
    first = roles.index("tiles" if layout.tile else "rows" if layout.rows else "count") + 1
    return kernel, [(one.operand if one.role == "stride" else None, one.dimension) for one in kernel.parameters[first:]]


def check_number(number: Any, dtype: torch.dtype) -> None:
    """Leaves the call to the CPU, whose kernel raises PyTorch's error, if a number is complex and `dtype` is not."""
    is_complex = number.dtype.is_complex if isinstance(number, _C.Number) else isinstance(number, complex)
    if is_complex and not dtype.is_complex:
        raise _C.Refused(f"a complex number as {dtype}".replace("torch.", ""))


def check_fits(dtype: torch.dtype, *numbers: complex) -> None:
    """Leaves the call to the CPU, whose kernel raises PyTorch's error, if a number is out of the range of `dtype`."""
    for number in numbers:
        if not runtime.fits(number, dtype):
            raise _C.Refused(f"{number} as {dtype}".replace("torch.", ""))


def _with_parts(
    formula: Formula, inputs: int, scalars: Sequence[tuple[Any, torch.dtype]]
) -> tuple[Formula, Sequence[tuple[Any, torch.dtype]]]:
    """Splits each complex scalar into a real and an imaginary one: kernels take complex numbers as two parameters.

    Raises:
        Refused: a complex number is needed as a real dtype.
    """
    if not scalars:
        return formula, scalars
    for number, dtype in scalars:
        check_number(number, dtype)
    if not any(dtype.is_complex for _, dtype in scalars):
        return formula, scalars

    def of_parts(*values: Expression) -> Any:
        parts = iter(values[inputs:])
        return formula(
            *values[:inputs],
            *(f.complex(next(parts), next(parts)) if dtype.is_complex else next(parts) for _, dtype in scalars),
        )

    return of_parts, [
        (part, part_dtype(dtype))
        for number, dtype in scalars
        for part in ((number.real, number.imag) if dtype.is_complex else (number,))
    ]


# The dtype with which kernels move elements unchanged, by their size in bytes.
_AS_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view as unsigned integers, for kernels that move elements of any dtype unchanged.

    There is no integer of complex128's size: it gets an additional last dimension of size 2.
    """
    if tensor.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_AS_BITS[tensor.itemsize])


def copy_elements(
    destination: torch.Tensor, source: torch.Tensor, conjugate: bool = False, negate: bool = False
) -> None:
    """Copies `source`, broadcast, to `destination` with a kernel.

    Planners should call `Tensor.copy_` instead, which chooses how to copy (csrc/aten/copies.h).

    Args:
        destination, source: tensors with any strides, without conjugate or negative bit. Their dtypes are equal, or
            both supported by kernels.
        conjugate, negate: what to apply to each element.
    """
    if source.dtype == destination.dtype and not conjugate and not negate:
        run_pointwise(lambda x: x, [as_bits(destination)], [as_bits(source)], key="copy", name="copy")
        return
    for tensor in (source, destination):
        check_supported(tensor.dtype)

    def formula(x: Expression) -> Expression:
        x = f.conj(x) if conjugate else x
        return -x if negate else x

    run_pointwise(formula, [destination], [source], key=("copy", conjugate, negate), name="copy")
