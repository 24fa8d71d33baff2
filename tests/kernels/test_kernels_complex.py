"""Tests the complex functions of formulas (kernels/special/complex_numbers.py), using PyTorch for their real functions.

The reference is complex128 for complex64, and mpmath for complex128. Special values, signed zeros and branch cuts must
be those of PyTorch on the CPU for complex64, which come from the C library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
import torch
from complex_samples import BINARY, arguments, errors, on_parts, parts, reference, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_runners import compile_cuda

from torch_backplane.kernels import CudaCpp, Layout, pointwise
from torch_backplane.kernels.evaluate import evaluate
from torch_backplane.kernels.expression import Expression, trace
from torch_backplane.kernels.special.complex_numbers import FUNCTIONS, Parts, absolute, angle

INF, NAN = math.inf, math.nan
FINITE = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 1e30, -1e30, 1e-30, 3e38, 1e-37]  # real and imaginary parts
SPECIAL = [*FINITE, INF, -INF, NAN]
UNARY = [name for name in FUNCTIONS if name not in BINARY]


def computed(name: str, *numbers: torch.Tensor) -> torch.Tensor:
    tensors = parts(numbers)
    results = evaluate(trace(on_parts(name), [part.dtype for part in tensors]), tensors)
    return torch.complex(*(result.expand(numbers[0].shape).contiguous() for result in results))


def grid(values: list[float]) -> torch.Tensor:
    return torch.tensor([complex(x, y) for x, y in itertools.product(values, values)], dtype=torch.complex64)


def all_pairs(values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = grid(values)
    return numbers.repeat_interleave(len(numbers)), numbers.repeat(len(numbers))


# Accuracy


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex64_is_accurate(name: str) -> None:
    """The relative error must be at most 4 × 2⁻²⁴, or 1.5 times the error of PyTorch's kernel."""
    for label, numbers in arguments(name, samples(5000)):
        exact = reference(name)(*(z.to(torch.complex128) for z in numbers))
        allowed = 1.5 * errors(reference(name)(*numbers), exact).max()
        assert errors(computed(name, *numbers), exact).max() <= max(2.4e-7, allowed), label


MPMATH: dict[str, Callable[..., mpmath.mpc]] = {
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "reciprocal": lambda a: 1 / a,
    "sign": lambda a: a / abs(a),
    "exp2": lambda a: mpmath.exp(a * mpmath.log(2)),
    "expm1": lambda a: mpmath.exp(a) - 1,
    "log2": lambda a: mpmath.log(a) / mpmath.log(2),
    "log10": lambda a: mpmath.log(a) / mpmath.log(10),
    "log1p": lambda a: mpmath.log(1 + a),
    "rsqrt": lambda a: 1 / mpmath.sqrt(a),
    "power": lambda a, b: mpmath.exp(b * mpmath.log(a)),
}


def exactly(name: str, *numbers: complex) -> mpmath.mpc:
    return (MPMATH.get(name) or getattr(mpmath, name))(*map(mpmath.mpc, numbers))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex128_is_accurate(name: str) -> None:
    """The relative error must be at most 5 × 2⁻⁵³, or 1.5 times the error of PyTorch's kernel."""
    with mpmath.workprec(400):
        for label, numbers in arguments(name, samples(8, torch.complex128)):
            each = list(zip(*(z.tolist() for z in numbers), strict=True))
            exact = [exactly(name, *one) if name in BINARY or one[0] else mpmath.mpc(0) for one in each]

            def worst(results: torch.Tensor, exact: list[mpmath.mpc] = exact) -> float:
                found = zip(map(mpmath.mpc, results.tolist()), exact, strict=True)
                return max((float(abs(z - w) / abs(w)) for z, w in found if 1e-300 < abs(w) < 1e308), default=0.0)

            allowed = 1.5 * worst(reference(name)(*numbers))
            assert worst(computed(name, *numbers)) <= max(5.6e-16, allowed), label


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *(("log", z) for z in (complex(1, 1e-4), complex(0.8, 0.6), complex(-0.6, 0.8), complex(1e-30, 1))),
        *(("log1p", z) for z in (complex(1e-30, 1e-25), complex(-1e-30, 1e-10))),
        *(("sqrt", z) for z in (complex(1e19, 1e-10), complex(-1e19, 1e-10), complex(1e-38, 1e-36))),
        *(("acos", z) for z in (complex(3, 1e-30), complex(1, 1e-30), complex(0.5, 1e-30), complex(1e20, 1e-10))),
        *(("asin", z) for z in (complex(3, 1e-30), complex(1, 1e-30), complex(1e-30, 0.5), complex(1e-30, 1e20))),
        *(("atanh", z) for z in (complex(1, 1e-30), complex(1e20, 1e-10), complex(1e-30, 1), complex(0.5, 1e-30))),
        *(("expm1", z) for z in (complex(1e-30, 1e-25), complex(1e-20, 1e-12))),
        *(("tanh", z) for z in (complex(12, 1), complex(1e-30, 1.5), complex(40, 1))),
        *(("sinh", z) for z in (complex(1e-30, 2), complex(150, 1e-35))),
        *(("exp", z) for z in (complex(100, 1e-30), complex(170, 1e-38))),
    ],
)
def test_much_smaller_parts_are_accurate(name: str, number: complex) -> None:
    numbers = torch.tensor([number], dtype=torch.complex64)
    with mpmath.workprec(400):
        exact = complex(exactly(name, numbers.item()))
    expected = torch.tensor([exact.real, exact.imag], dtype=torch.float64).float()
    torch.testing.assert_close(torch.view_as_real(computed(name, numbers))[0], expected, rtol=1e-6, atol=0)


def fraction(number: complex) -> tuple[Fraction, Fraction]:
    return Fraction(number.real), Fraction(number.imag)


PART = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@settings(max_examples=300, deadline=None)
@given(st.builds(complex, PART, PART), st.builds(complex, PART, PART).filter(bool))
def test_representable_quotients_do_not_overflow(a: complex, b: complex) -> None:
    (x, y), (u, v) = fraction(a), fraction(b)
    real, imaginary = (x * u + y * v) / (u * u + v * v), (y * u - x * v) / (u * u + v * v)
    size = max(abs(real), abs(imaginary))
    if not 2.0**-100 < size < 2.0**127:
        return
    found = computed("divide", *(torch.tensor([z], dtype=torch.complex64) for z in (a, b))).item()
    p, q = fraction(found)
    assert max(abs(p - real), abs(q - imaginary)) <= size * Fraction(5e-7)


# Special values, signed zeros and branch cuts

# This part is an angle. C99 does not specify signs if it is NaN or infinite.
ANGLE = {
    **dict.fromkeys(["exp", "exp2", "expm1", "sinh", "cosh", "tanh"], "imag"),
    **dict.fromkeys(["sin", "cos", "tan"], "real"),
}


def special_values(name: str, a: torch.Tensor) -> torch.Tensor:
    """Returns PyTorch's results. Where PyTorch's own formulas of expm1 and log1p do not apply, uses exp and log."""
    finite = torch.isfinite(torch.view_as_real(a)).all(-1)
    if name == "expm1":
        whole = torch.exp(a)
        return torch.where(finite & (a.real < 88), torch.expm1(a), torch.complex(whole.real - 1.0, whole.imag))
    if name == "log1p":
        return torch.where(finite, torch.log1p(a), torch.log(torch.complex(1.0 + a.real, a.imag)))
    return reference(name)(a)


def assert_same(found: torch.Tensor, expected: torch.Tensor, *numbers: torch.Tensor, signs: torch.Tensor) -> None:
    """Asserts that results are equal, finite ones up to 5e-6. `signs` selects where signs must be equal."""
    size = torch.nan_to_num(expected.to(torch.complex128).abs(), 0, 0, 0)
    for part in ("real", "imag"):
        got, wanted = getattr(found, part), getattr(expected, part)
        close = (got == wanted) | ((got.double() - wanted.double()).abs() <= 5e-6 * size)
        close |= ~signs & (got.abs() == wanted.abs())
        close &= ~signs | (torch.signbit(got) == torch.signbit(wanted)) | (wanted != 0)
        close |= torch.isnan(got) & torch.isnan(wanted)
        wrong = [(*(z[i].item() for z in numbers), found[i].item(), expected[i].item()) for i in (~close).nonzero()]
        assert not wrong, f"{part} part of (arguments, found, expected): {wrong[:5]}, {len(wrong)} in total"


# Only our results are finite here: in PyTorch, the absolute value overflows.
BEYOND = {"sign": [complex(3e38, 3e38)], "reciprocal": [complex(3e38, 3e38)]}


@pytest.mark.parametrize("name", UNARY)
def test_special_values_signed_zeros_and_branch_cuts(name: str) -> None:
    numbers = grid(SPECIAL)
    for z in BEYOND.get(name, []):
        numbers = numbers[numbers != torch.tensor(z, dtype=torch.complex64)]
    signs = torch.ones(len(numbers), dtype=torch.bool)
    if name in ANGLE:
        signs = torch.isfinite(getattr(numbers, ANGLE[name])) & ~torch.isnan(torch.view_as_real(numbers)).any(-1)
    assert_same(computed(name, numbers), special_values(name, numbers), numbers, signs=signs)


def test_products_and_quotients_of_special_values() -> None:
    a, b = all_pairs([0.0, -0.0, 1.0, -2.0, 0.5, INF, -INF, NAN])
    every = torch.ones(len(a), dtype=torch.bool)
    assert_same(computed("multiply", a, b), a * b, a, b, signs=every)
    assert_same(computed("divide", a, b), a / b, a, b, signs=every)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_finite_inputs_give_nan_only_where_pytorch_does(name: str) -> None:
    numbers = all_pairs(FINITE) if name in BINARY else (grid(FINITE),)
    found, expected = (torch.view_as_real(z) for z in (computed(name, *numbers), reference(name)(*numbers)))
    wrong = (torch.isnan(found) & ~torch.isnan(expected)).any(-1)
    assert not wrong.any(), [z[wrong][:5] for z in numbers]


def test_absolute_and_angle() -> None:
    numbers = torch.cat([grid(SPECIAL), *samples(500).values()])
    for formula, function in ((absolute, torch.abs), (angle, torch.angle)):
        program = trace(lambda x, y, formula=formula: formula(Parts(x, y)), [torch.float32] * 2)
        (found,) = evaluate(program, parts([numbers]))
        exact = function(numbers.to(torch.complex128)).float()
        torch.testing.assert_close(found, exact, rtol=2e-7, atol=1e-44, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cuda_text_compiles(dtype: torch.dtype) -> None:
    def every(x: Expression, y: Expression, u: Expression, v: Expression) -> list[Expression]:
        given = {name: (x, y, u, v) if name in BINARY else (x, y) for name in FUNCTIONS}
        return [part for name in FUNCTIONS for part in on_parts(name)(*given[name])]

    kernel = pointwise(
        "complex",
        every,
        inputs=[dtype] * 4,
        outputs=[dtype] * 2 * len(FUNCTIONS),
        layout=Layout(0, 1),
        dialect=CudaCpp(),
    )
    assert kernel.name in compile_cuda(kernel.text, CudaCpp().compile_options)
