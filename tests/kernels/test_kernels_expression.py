"""Tests the tracing of formulas: dtypes, constants, shared subexpressions, and errors."""

from __future__ import annotations

import math
import re

import paths
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_backplane.kernels import CudaCpp, OpenCLC, Target, functions, geometry, trace
from torch_backplane.kernels.expression import OPERATIONS

F32, I64 = torch.float32, torch.int64


def operations(program):
    return [i.operation for i in program.instructions]


def test_equal_subexpressions_are_computed_once():
    program = trace(lambda a, b: functions.exp(a + b) / (functions.exp(a + b) + 1.0) * (a + b), [F32, F32])
    assert operations(program).count("add") == 2
    assert operations(program).count("exp") == 1


def test_signed_zeros_are_distinct_constants_and_nans_are_equal():
    def formula(a):
        return a + 0.0, a + -0.0, a + math.nan, a + math.nan

    program = trace(formula, [F32])
    assert operations(program).count("constant") == 3
    assert program.results[2] == program.results[3]


def test_true_and_one_are_different_constants():
    program = trace(lambda a, b: (a + 1, b + True), [I64, torch.bool])
    assert [i.dtype for i in program.instructions if i.operation == "constant"] == [I64, torch.bool]


def test_operands_precede_their_users_in_deep_formulas():
    def formula(a):
        for _ in range(5000):
            a = a * a + 1.0
        return a

    program = trace(formula, [F32])
    assert len(program.instructions) == 2 + 2 * 5000
    assert all(n < number for number, i in enumerate(program.instructions) for n in i.operands)


def test_dtypes_of_results():
    program = trace(lambda a, n: (a < 1.0, a.to(I64) + n, functions.where(n > 0, a, 0.0)), [F32, I64])
    assert program.result_dtypes == (torch.bool, I64, F32)


def test_complex_numbers_are_split_into_real_parts():
    program = trace(lambda a, b: a * b + 1j, [torch.complex64] * 2)
    assert program.result_dtypes == (torch.complex64,)
    real = [i for i in program.instructions if i.dtype != torch.complex64]
    assert [i.operation for i in real if i.operation != "constant"].count("multiply") == 4
    # Only arguments and the construction of the result have a complex dtype.
    assert [i.operation for i in program.instructions if i.dtype == torch.complex64] == ["argument"] * 2 + ["complex"]
    assert operations(trace(lambda a, b: functions.complex(a, b).real, [F32, F32])) == ["argument"]


def test_conversions_of_complex_numbers():
    def formula(a, n):
        return a.to(F32), a.to(torch.bool), a.to(torch.complex128), n.to(torch.complex64), n.imag, a.to(I64)

    found = trace(formula, [torch.complex64, I64]).result_dtypes
    assert found == (F32, torch.bool, torch.complex128, torch.complex64, I64, I64)


@pytest.mark.parametrize(
    ("formula", "dtypes", "message"),
    [
        (lambda a, b: a + b, (F32, I64), "float32 and torch.int64"),
        (lambda a: a + 1.5, (I64,), "cannot be a constant of torch.int64"),
        (lambda a: a + 1, (torch.bool,), "cannot be a constant of torch.bool"),
        (lambda a: a - a, (torch.bool,), "subtract takes float, signed, unsigned operands"),
        (lambda a: functions.exp(a), (I64,), "exp takes float operands"),
        (lambda a: a & a, (F32,), "bitwise_and takes"),
        (lambda a: a / a, (I64,), "divide takes float"),
        (lambda a: a + "1", (F32,), "got str"),
        (lambda a: 1.0 if a > 0 else a, (F32,), "where"),
        (lambda a: functions.where(a, a, a), (F32,), "traced bool"),
        (lambda a: functions.exp(1.0), (F32,), "traced value"),
        (lambda a: a, (torch.float16,), "compute in float32"),
        (lambda a: a.to(torch.bfloat16), (F32,), "compute in float32"),
        (lambda a: a, (torch.complex32,), "kernels have no torch.complex32; they take bool"),
        (lambda a: a < 1, (torch.complex64,), "less does not support complex64"),
        (lambda a: functions.floor(a), (torch.complex64,), "floor does not support complex64"),
        (lambda a: a + 1j, (F32,), r"1j cannot be a constant of torch\.float32"),
        (lambda a, b: functions.complex(a, b), (I64, I64), "complex number must both be float32 or float64"),
        (lambda a: None, (F32,), "returned NoneType"),
        (lambda a: (), (F32,), "at least one value"),
        (lambda a: 1.0, (F32,), "returned float"),
    ],
)
def test_invalid_formulas_raise_type_errors(formula, dtypes, message):
    with pytest.raises(TypeError, match=message):
        trace(formula, dtypes)


def test_constant_out_of_range_raises():
    with pytest.raises(OverflowError, match=r"300 is out of range for torch.uint8, which is 0 to 255"):
        trace(lambda a: a + 300, [torch.uint8])


@pytest.mark.parametrize("dialect", [OpenCLC(), CudaCpp()], ids=lambda d: d.name)
def test_every_operation_has_a_spelling(dialect):
    from torch_backplane.kernels.dialects.base import Value

    for name, operation in OPERATIONS.items():
        for kind, dtype in (("float", F32), ("signed", I64), ("unsigned", torch.uint8), ("bool", torch.bool)):
            if kind in operation.accepts:
                operands = [Value(letter, dtype) for letter in "abc"[: operation.arity]]
                assert dialect.spell(name, operands, torch.bool if operation.gives_bool else dtype), name


def test_loop_has_programs_and_one_result_per_state_value():
    def euclid(a, b):
        return functions.while_loop(lambda a, b: b != 0, lambda a, b: (b, functions.fmod(a, b)), (a, b))

    program = trace(euclid, [I64, I64])
    assert operations(program) == ["argument", "argument", "loop", "loop_result", "loop_result"]
    loop = program.instructions[2].value
    assert operations(loop.condition) == ["argument", "constant", "not_equal"]
    assert loop.body.result_dtypes == (I64, I64)


@pytest.mark.parametrize(
    ("condition", "body", "message"),
    [
        (lambda a: a, lambda a: a, "condition of a loop must return one traced bool"),
        (lambda a: a > 0.0, lambda a: a.to(I64), "body of a loop returned"),
        (lambda a: a > 0.0, lambda a: (a, a), "body of a loop returned"),
    ],
)
def test_invalid_loops_raise_type_errors(condition, body, message):
    with pytest.raises(TypeError, match=message):
        trace(lambda a: functions.while_loop(condition, body, (a,)), [F32])


@pytest.mark.parametrize(("dtype", "target"), [(F32, I64), (torch.int16, torch.uint16), (torch.float64, F32)], ids=str)
def test_view_with_another_width_raises(dtype, target):
    with pytest.raises(TypeError, match="both must have 32 bits, or both 64 bits"):
        trace(lambda a: a.view(target), [dtype])


def test_float64_without_device_support_raises():
    with pytest.raises(TypeError, match="no float64"):
        OpenCLC(Target(float64=False)).type(torch.float64)


@settings(deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_constants_are_exact(value):
    text = OpenCLC().constant(value, torch.float64).strip("()")
    assert float.fromhex(text) == value
    assert math.copysign(1, float.fromhex(text)) == math.copysign(1, value)


shapes = st.lists(st.integers(0, 4), max_size=4)


@settings(deadline=None)
@given(st.data(), shapes)
def test_geometry_visits_every_element_once(data, shape):
    order = data.draw(st.permutations(range(len(shape))))
    out = torch.empty([shape[d] for d in order]).permute([order.index(d) for d in range(len(shape))])
    broadcast = [1 if data.draw(st.booleans()) else size for size in shape]
    operand = torch.empty(broadcast).expand(shape)
    where = geometry(shape, [out.stride(), operand.stride()])
    assert where.count == out.numel()

    def addresses(strides):
        found = [0]
        for size, step in zip(where.sizes, strides, strict=True):
            found = [at + i * step for at in found for i in range(size)]
        return found

    if where.count:
        visited = list(zip(*map(addresses, where.strides), strict=True))
        expected = [(0, 0)]
        for size, *steps in zip(shape, out.stride(), operand.stride(), strict=True):
            expected = [
                tuple(at + i * s for at, s in zip(e, steps, strict=True)) for e in expected for i in range(size)
            ]
        assert sorted(visited) == sorted(expected)


def test_geometry_merges_dimensions_and_chooses_the_index_width():
    assert geometry((3, 4, 5), [(20, 5, 1)] * 2).layout.rank == 0
    assert geometry((3, 4, 5), [(1, 15, 3)] * 2).layout.rank == 0  # the same dense order in all operands
    assert geometry((3, 4, 5), [(20, 5, 1), (0, 5, 1)]).sizes == (20, 3)
    assert geometry((3,), [(1,), (1,)], aligned=False).layout.width == 1
    assert not geometry((2**31 - 1,), [(1,)]).layout.wide
    assert geometry((2**31,), [(1,)]).layout.wide
    assert geometry((2,), [(1,), (2**31,)]).layout.wide
    with pytest.raises(ValueError, match="1 strides for 2 sizes"):
        geometry((2, 2), [(1,)])


def test_examples_of_the_kernel_guide_run(capsys):
    guide = (paths.DOCS / "kernels.md").read_text(encoding="utf-8")
    scope: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        exec(example, scope)
    assert "kernel void bp_gelu_times(" in capsys.readouterr().out
    (launched,) = scope["launches"]
    assert "kernel void bp_amax_" in launched.kernel.text
