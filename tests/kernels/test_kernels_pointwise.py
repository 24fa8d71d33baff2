"""Compares pointwise kernels with PyTorch on the CPU: runs OpenCL C and compiles CUDA C++ of the same formulas.

Compilation dominates the run time, so one kernel computes many results.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runners import NUMPY, compile_cuda, opencl, run_pointwise

from torch_backplane.kernels import CudaCpp, Layout, OpenCLC, Target, functions, geometry, pointwise, trace
from torch_backplane.kernels.dtypes import FACTS, STORAGE_ONLY, facts, integer_range, part_dtype, value_dtype

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -7.0, 0.1, 1e-3, 100.0, 2.0**-25, INF, -INF, NAN]

_UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "erf erfc lgamma floor ceil trunc round isnan isinf isfinite signbit absolute sigmoid sign"
)
UNARY = {name: getattr(torch, name) for name in _UNARY.split()}
BINARY = {
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "hypot": torch.hypot,
    "power": torch.pow,
    "fmod": torch.fmod,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "fmin": torch.fmin,
    "fmax": torch.fmax,
    "remainder": torch.remainder,
    "floor_divide": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_divide": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
}
# C does not specify which of 0.0 and -0.0 these return.
ZEROS_OF_ANY_SIGN = {"minimum", "maximum", "fmin", "fmax"}
OPERATORS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "negative": lambda a, b: -a,
    "less": lambda a, b: a < b,
    "less_equal": lambda a, b: a <= b,
    "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b,
    "equal": lambda a, b: a == b,
    "not_equal": lambda a, b: a != b,
}
REAL_ONLY = ("erf", "erfc", "lgamma", "floor", "ceil", "trunc", "round", "signbit")
COMPLEX_UNARY = [name for name in UNARY if name not in REAL_ONLY]
COMPLEX_OPERATORS = ("add", "subtract", "multiply", "divide", "negative", "equal", "not_equal")
BITWISE = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a, b: ~a}


def needs(dtype: torch.dtype) -> None:
    if part_dtype(dtype) == torch.float64 and not opencl()[2]:
        pytest.skip("the OpenCL device has no float64")


def pairs(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.repeat_interleave(len(values)), values.repeat(len(values))


def compare(formulas, inputs, expected):
    """Runs all formulas as one kernel and compares the results. NaN equals NaN; 0.0 differs from -0.0."""
    outputs = [torch.empty_like(result) for result in expected]
    run_pointwise(lambda *a: [formula(*a) for formula in formulas.values()], inputs, outputs, width=1)
    for name, output, result in zip(formulas, outputs, expected, strict=True):
        torch.testing.assert_close(output, result, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        if result.dtype.is_floating_point and name not in ZEROS_OF_ANY_SIGN:
            zero = (result == 0) & (output == 0)
            assert torch.equal(output[zero].signbit(), result[zero].signbit()), f"{name}: sign of zero"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unary_functions_of_floats(dtype):
    needs(dtype)
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    formulas = {name: getattr(functions, name) for name in UNARY}
    compare(formulas, [values], [function(values) for function in UNARY.values()])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_functions_of_floats(dtype):
    needs(dtype)
    inputs = pairs(torch.tensor(SPECIAL, dtype=torch.float64).to(dtype))
    # In float32 for 16-bit dtypes, as in our kernels: PyTorch's float16 remainder differs from the float32 one.
    wide = [tensor.float() for tensor in inputs] if dtype in STORAGE_ONLY else inputs
    formulas = {**{name: getattr(functions, name) for name in BINARY}, **OPERATORS}
    expected = [function(*wide) for function in (*BINARY.values(), *OPERATORS.values())]
    compare(formulas, inputs, [r if r.dtype == torch.bool else r.to(dtype) for r in expected])


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers(dtype):
    least, greatest = integer_range(dtype)
    values = sorted({least, least + 1, greatest, greatest - 1, *range(-9 if least else 0, 10), 63, 64, 100})
    a, b = pairs(torch.tensor(values, dtype=dtype))
    names = ["minimum", "maximum"]
    formulas = {**OPERATORS, **BITWISE, **{name: getattr(functions, name) for name in names}}
    del formulas["divide"]
    formulas |= {"absolute": lambda a, b: abs(a), "left": lambda a, b: a << b, "right": lambda a, b: a >> b}
    formulas |= {"sign": lambda a, b: functions.sign(a), "power": functions.power}
    expected = [f(a, b) for f in (OPERATORS | BITWISE).values() if f is not OPERATORS["divide"]]
    expected += [torch.minimum(a, b), torch.maximum(a, b), a.abs(), a << b, a >> b, a.sign(), a**b]
    compare(formulas, [a, b], expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integer_division_rounding_and_division_by_zero(dtype):
    least, greatest = integer_range(dtype)
    values = sorted({least, least + 1, greatest, *range(-5 if least else 0, 6)})
    a, b = pairs(torch.tensor(values, dtype=dtype))
    names = ["floor_divide", "trunc_divide", "remainder", "fmod"]

    def exact(x: int, y: int) -> tuple[int, int, int, int]:
        if y == 0:
            return 0, 0, 0, 0
        truncated = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return x // y, truncated, x % y, x - truncated * y

    columns = zip(*(exact(x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), strict=True)
    wrapped = [[(x - least) % (greatest - least + 1) + least for x in column] for column in columns]
    compare({n: getattr(functions, n) for n in names}, [a, b], [torch.tensor(c, dtype=dtype) for c in wrapped])


def test_loops_update_their_state_together_and_can_be_nested():
    def triangle(n, total):
        """The sum over k from 1 to n of the sum of 1 to k, with nested loops."""

        def inner(k, left, sum_):
            return functions.while_loop(lambda k, s: k > 0, lambda k, s: (k - 1, s + k), (k, sum_))[1]

        return functions.while_loop(
            lambda k, n, s: k <= n, lambda k, n, s: (k + 1, n, inner(k, n, s)), (functions.full_like(n, 1), n, total)
        )[2]

    def fibonacci(n, zero):
        one = zero + 1
        return functions.while_loop(lambda n, a, b: n > 0, lambda n, a, b: (n - 1, b, a + b), (n, zero, one))[1]

    n, zero = torch.arange(10), torch.zeros(10, dtype=torch.int64)
    expected = [n * (n + 1) * (n + 2) // 6, torch.tensor([0, 1, 1, 2, 3, 5, 8, 13, 21, 34])]
    compare({"triangle": triangle, "fibonacci": fibonacci}, [n, zero], expected)


@pytest.mark.parametrize(("dtype", "integer"), [(torch.float32, torch.int32), (torch.float64, torch.int64)], ids=str)
def test_bits_of_floats(dtype, integer):
    needs(dtype)
    values = torch.tensor(SPECIAL, dtype=dtype)
    formulas = {"bits": lambda a: a.view(integer), "back": lambda a: a.view(integer).view(dtype)}
    compare(formulas, [values], [values.view(integer), values])


def test_bools():
    a, b = pairs(torch.tensor([False, True]))
    formulas = {
        "or": lambda a, b: a + b,
        "and": lambda a, b: a * b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a, b: ~a,
        "minimum": functions.minimum,
        "less": lambda a, b: a < b,
        "where": lambda a, b: functions.where(a, b, True),
    }
    expected = [a | b, a & b, a ^ b, ~a, a & b, ~a & b, torch.where(a, b, True)]
    compare(formulas, [a, b], expected)


def test_non_zero_bytes_are_true():
    stored = torch.tensor([0, 1, 2, 128, 255], dtype=torch.uint8)
    counted = torch.empty(5, dtype=torch.int32)
    run_pointwise(lambda a: a, [stored.view(torch.bool)], [counted])
    assert counted.tolist() == [0, 1, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("source", list(FACTS), ids=str)
def test_casts_to_every_dtype(source):
    needs(source)
    targets = [dtype for dtype in FACTS if part_dtype(dtype) != torch.float64 or opencl()[2]]
    inexact = source.is_floating_point or source.is_complex
    if inexact:
        # Conversions to integers of NaN and of values outside int64 are undefined in C.
        values = torch.tensor([0.0, -0.0, 0.4, -0.9, 1.0, -1.0, 2.5, 99.9, 127.0, 128.0, 255.0, 300.0, -200.0, 4e4])
        values = torch.complex(values, values.roll(3)).to(source) if source.is_complex else values.to(source)
    else:
        least, greatest = (0, 1) if source == torch.bool else integer_range(source)
        values = torch.tensor([least, greatest, 0, 1, greatest // 2, greatest // 3], dtype=source)
    outputs = [torch.empty(len(values), dtype=dtype) for dtype in targets]
    run_pointwise(lambda a: [a] * len(targets), [values], outputs, width=1)  # width 1 compiles faster
    for output, target in zip(outputs, targets, strict=True):
        expected = values.to(target)
        if inexact and facts(target).category in ("signed", "unsigned"):
            expected = values.to(torch.int64).to(target)  # wraps for all integer dtypes, as PyTorch does for uint8
        torch.testing.assert_close(
            output, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m, t=target: f"{t}: {m}"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_floats_round_trip_and_casts_round_to_nearest_even(dtype):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    through = torch.empty_like(every)
    as_float = torch.empty(2**16)
    run_pointwise(lambda a: (a, a), [every], [through, as_float])
    numbers = ~every.isnan()
    assert torch.equal(through.view(torch.int16)[numbers], every.view(torch.int16)[numbers])
    assert torch.equal(as_float[numbers], every.float()[numbers])
    assert through.isnan().equal(every.isnan())

    finite = every.float()[every.isfinite()].sort().values
    between = (finite[1:].double() + finite[:-1].double()) / 2
    ties = between.float()
    above, below = (torch.nextafter(ties, torch.full_like(ties, sign * INF)) for sign in (1, -1))
    values = torch.cat([ties, above, below, torch.tensor([65519.0, 65520.0, 3.3e38, 3.4028235e38, INF, -INF, NAN])])
    rounded = torch.empty(len(values), dtype=dtype)
    run_pointwise(lambda a: a, [values], [rounded])
    torch.testing.assert_close(rounded, values.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_bits_of_casts_to_and_from_16_bit_floats():
    """Compares all bits, also of NaN, with those of the CPU's float16 instructions, which PyTorch uses if available."""
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (2**20,)).to(torch.int32)
    exponents = torch.arange(256, dtype=torch.int32)[:, None] << 23  # combined with mantissas near rounding limits
    edges = [0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0x18000]
    mantissas = torch.tensor([*edges, 0x3FF000, 0x400000, 0x7FF000, 0x7FFFFF], dtype=torch.int32)
    bits = torch.cat([bits, (exponents + mantissas).flatten(), (exponents + mantissas).flatten() - 2**31])
    values = bits.view(torch.float32)
    half, brain = torch.empty(len(values), dtype=torch.float16), torch.empty(len(values), dtype=torch.bfloat16)
    run_pointwise(lambda a: (a, a), [values], [half, brain], width=1, device_kind="cpu")
    sign, carried = (bits >> 16) & 0x8000, (bits >> 13) & 0x3FF
    expected = torch.where(values.isnan(), sign | 0x7E00 | carried, values.half().view(torch.int16).to(torch.int32))
    assert torch.equal(half.view(torch.int16), expected.to(torch.int16))
    expected = torch.where(values.isnan(), bits >> 16 | 0x40, values.bfloat16().view(torch.int16).to(torch.int32))
    assert torch.equal(brain.view(torch.int16), expected.to(torch.int16))

    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    result = torch.empty(2**16)
    run_pointwise(lambda a: a, [every.view(torch.float16)], [result], width=1, device_kind="cpu")
    wide = every.to(torch.int32)
    quiet = (wide & 0x8000) << 16 | 0x7FC00000 | (wide & 0x3FF) << 13
    floats = every.view(torch.float16).float()
    assert torch.equal(result.view(torch.int32), torch.where(floats.isnan(), quiet, floats.view(torch.int32)))
    # The kernel reads a second operand with other code.
    run_pointwise(lambda a, b: b, [every.view(torch.float16)] * 2, [result], width=1, device_kind="cpu")
    assert torch.equal(result.view(torch.int32), torch.where(floats.isnan(), quiet, floats.view(torch.int32)))
    run_pointwise(lambda a: a, [every.view(torch.bfloat16)], [result], width=1, device_kind="cpu")
    assert torch.equal(result.view(torch.int32), wide << 16)


def test_constants_are_exact():
    least, greatest = integer_range(torch.int64)
    constants = [0.1, -0.0, INF, -INF, NAN, 1e-45, 3.4028234663852886e38, 1e300, 16777217.0]
    outputs = [torch.empty(1) for _ in constants]
    run_pointwise(lambda: constants, [], outputs)
    expected = [torch.tensor([value]) for value in constants]
    for output, result in zip(outputs, expected, strict=True):
        assert output.view(torch.int32).item() == result.view(torch.int32).item() or result.isnan().item()
    assert outputs[4].isnan().item()

    numbers = [least, least + 1, greatest, 0, -1]
    results = [torch.empty(1, dtype=torch.int64) for _ in numbers]
    run_pointwise(lambda: numbers, [], results)
    assert [result.item() for result in results] == numbers


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, torch.bool], ids=str)
def test_fill_with_a_scalar_argument(dtype):
    needs(dtype)
    out = torch.empty(7, dtype=dtype)
    run_pointwise(lambda value: value, [], [out], scalars=[(1, dtype)])
    assert torch.equal(out, torch.ones(7, dtype=dtype))


def test_several_result_dtypes_and_a_compute_dtype():
    a, b = torch.tensor([5, -7, 9], dtype=torch.int32), torch.tensor([2.0, 2.0, 0.5])
    quotient, larger = torch.empty(3), torch.empty(3, dtype=torch.bool)
    run_pointwise(lambda a, b: (a / b, a > b), [a, b], [quotient, larger], compute=torch.float32)
    assert torch.equal(quotient, a / b)
    assert torch.equal(larger, a > b)


def test_in_place():
    a = torch.arange(11.0)
    expected = a * 2 + 1
    run_pointwise(lambda a: a * 2 + 1, [a], [a])
    assert torch.equal(a, expected)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("wide", [False, True])
def test_contiguous_sizes_around_the_width(width, wide):
    for size in (0, 1, width - 1, width, width + 1, 4 * width + 3):
        a, out = torch.randn(size), torch.full((size + 3,), 7.0)
        run_pointwise(lambda a: -a, [a], [out[:size]], width=width, wide=wide)
        assert torch.equal(out[:size], -a)
        assert (out[size:] == 7).all()


@pytest.mark.parametrize("wide", [False, True])
def test_sizes_around_the_group_size_of_cpus(wide):
    """On CPUs, the compiler can assume whole work groups."""
    for size in (1, 255, 256, 257, 512, 1000):
        a, out = torch.randn(size), torch.full((size + 3,), 7.0)
        run_pointwise(lambda a: -a, [a], [out[:size]], width=1, wide=wide, device_kind="cpu")
        assert torch.equal(out[:size], -a)
        assert (out[size:] == 7).all()
    for rows, size in ((1, 16), (4, 32), (5, 48), (7, 17), (8, 31), (3, 5), (130, 9)):
        a, b, out = torch.randn(size, rows).t(), torch.randn(rows, 1), torch.full((rows, size + 1), 7.0)
        run_pointwise(lambda a, b: a - b, [a, b], [out[:, :size]], wide=wide, device_kind="cpu")
        assert torch.equal(out[:, :size], a - b)
        assert (out[:, size] == 7).all()


@settings(max_examples=80, deadline=None)
@given(st.data(), st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 17, 33, 70]), max_size=4), st.booleans())
def test_arbitrary_strides_and_broadcasts(data, shape, wide):
    def operand(broadcast: bool) -> torch.Tensor:
        sizes = [1 if broadcast and data.draw(st.booleans()) else size for size in shape]
        order = data.draw(st.permutations(range(len(shape))))
        steps = [data.draw(st.integers(1, 2)) for _ in shape]
        tensor = torch.randint(-99, 99, [sizes[d] * steps[d] for d in order], dtype=torch.int32)
        tensor = tensor.permute([order.index(d) for d in range(len(shape))])
        return tensor[tuple(slice(None, None, step) for step in steps)]

    a, b, out = operand(True), operand(True), operand(False)
    expected = (a - b).expand(shape)
    run_pointwise(lambda a, b: a - b, [a, b], [out], wide=wide)
    assert torch.equal(out, expected)


def test_kernel_text_does_not_depend_on_sizes():
    def text(*shape: int) -> str:
        out, a = torch.empty(shape), torch.empty(shape[::-1]).permute(*reversed(range(len(shape))))
        where = geometry(shape, [out.stride(), a.stride()])
        return pointwise(
            "t", lambda a: a, inputs=[a.dtype], outputs=[a.dtype], layout=where.layout, dialect=OpenCLC()
        ).text

    assert text(3, 4) == text(77, 5)
    assert text(3, 4) != text(3, 4, 5)
    assert text(3, 40) == text(5, 770)  # long rows get a dimension of the launch
    assert text(3, 40) != text(3, 4)


@pytest.mark.parametrize("dtype", list(FACTS), ids=str)
def test_cuda_text_compiles(dtype):
    kind = FACTS[dtype].category
    if kind == "float":

        def formula(a, b, s):
            results = [getattr(functions, name)(a) for name in UNARY]
            results += [getattr(functions, name)(a, b) for name in BINARY]
            results += [operator(a, b) for operator in OPERATORS.values()]
            return [*results, functions.fma(a, b, s), functions.nextafter(a, b), a * INF, a * NAN, a - INF]
    elif kind == "complex":

        def formula(a, b, s):
            results = [getattr(functions, name)(a) for name in COMPLEX_UNARY]
            results += [OPERATORS[name](a, b) for name in COMPLEX_OPERATORS]
            results += [a**b, abs(a), functions.angle(a), functions.conj(a), a * 2j, a.real, functions.isinf(a)]
            return results
    elif kind == "bool":

        def formula(a, b, s):
            return [a + b, a * b, ~a, a ^ b, functions.maximum(a, s), functions.where(a, b, s)]
    else:

        def formula(a, b, s):
            names = ("floor_divide", "trunc_divide", "remainder", "fmod", "minimum", "maximum")
            results = [operator(a, b) for name, operator in {**OPERATORS, **BITWISE}.items() if name != "divide"]
            return [*results, *(getattr(functions, name)(a, b) for name in names), a << b, a >> b, abs(a), s + a]

    results = len(trace(formula, [value_dtype(dtype)] * 3).results)
    compiles_for_cuda(formula, dtype, results, Layout(0, 1))
    for layout in (Layout(0, 1 if kind == "complex" else 4), Layout(3, 1), Layout(2, 1, wide=True), *TILES):
        compiles_for_cuda(lambda a, b, s: (functions.where(a == b, a, b), a + s), dtype, 2, layout)


TILES = (
    Layout(2, 1, inner=(1, 1, 3, 1), tile=(1, 32, 32)),
    Layout(4, 1, True, inner=(2, 1, 0, 3), tile=(2, 4, 256)),
)


def compiles_for_cuda(formula, dtype, results, layout) -> None:
    kernel = pointwise(
        "exp",  # also a built-in function: the generated name has a prefix
        formula,
        inputs=[dtype, dtype],
        scalars=[dtype],
        outputs=[dtype] * results,
        layout=layout,
        dialect=CudaCpp(),
    )
    assert ".entry bp_exp" in compile_cuda(kernel.text, CudaCpp().compile_options)


def test_invalid_arguments_raise_errors():
    def make(**changes):
        arguments = {"inputs": [torch.float32], "outputs": [torch.float32], "layout": Layout(), "dialect": OpenCLC()}
        return pointwise(**{"name": "k", "formula": lambda a: a, **arguments, **changes})

    with pytest.raises(ValueError, match="C identifier, got 'a b'"):
        make(name="a b")
    with pytest.raises(TypeError, match="1 values for 2 outputs"):
        make(outputs=[torch.float32] * 2)
    with pytest.raises(ValueError, match="at least one output"):
        make(outputs=[])
    with pytest.raises(ValueError, match="2 dtypes for 1 inputs"):
        make(compute=[torch.float32] * 2)
    with pytest.raises(TypeError, match="no float64"):
        make(inputs=[torch.float64], dialect=OpenCLC(Target(float64=False)))
    with pytest.raises(ValueError, match="width of a strided layout must be 1"):
        Layout(2, 4)
    assert set(NUMPY) | STORAGE_ONLY == set(FACTS)
