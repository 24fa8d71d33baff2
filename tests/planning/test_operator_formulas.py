"""The formulas of pointwise operators, compared with PyTorch's CPU kernels on difficult numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_runners import compile_cuda, opencl, run_pointwise
from operator_formulas import Call, Case, Tables, arguments_of, call_cpu, read, run

from torch_backplane.kernels import CudaCpp, Layout, pointwise, special
from torch_backplane.kernels import functions as f

INF, NAN = math.inf, math.nan
FLOATS = [
    *(0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 3.0, -3.0, 6.0, -7.0, 0.1, -0.3, 1e-3, 0.999999),
    *(20.5, -19.9, 88.0, -104.0, 100.0, 2.0**-25, -1e-20, 1e20, 2.0**24 + 2, INF, -INF, NAN),
]
INTEGERS = [0, 1, -1, 2, -2, 3, -3, 5, 7, -8, 12, 31, 63, 64, 100, -100, 127, -128]
BATCH = 24  # results per kernel: compilation takes most of the time
FILES = ["binary_ops", "unary_ops", "pow", "tensor_compare", "masks", "activation", "gated_linear_unit"]


def _pool(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Three tensors: two with all pairs of special values, then random ones; a third with other combinations."""
    special = torch.tensor(INTEGERS if not dtype.is_floating_point else FLOATS, dtype=torch.float64)
    random = torch.randn(3, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    n = len(special)
    a = torch.cat([special.repeat_interleave(n), random[0]])
    b = torch.cat([special.repeat(n), random[1]])
    c = torch.cat([special.repeat(n).roll(7), random[2]])
    if dtype == torch.uint8:
        a, b, c = a.abs(), b.abs(), c.abs()
    if dtype == torch.bool:
        a, b, c = a > 0, b > 0, c > 0
    return a.to(dtype), b.to(dtype), c.to(dtype)


def _degrees(pool: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Degrees from -2 to 11, some with a fraction."""
    return torch.arange(len(pool[0])) % 14 - 2 + torch.where(torch.arange(len(pool[0])) % 5 == 0, 0.4, 0.0)


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_floating_point() else tensor.float()


def _moderate(pool: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Multiples of 0.01 from -3 to 3: next to 1 and -1, polynomials of these degrees change too fast for float32."""
    return (_float(pool[0]).clamp(-3, 3) * 100).round() / 100


# Arguments other than the generated tensors, if defaults do not suffice; one call per row.
NUMBERS: dict[str, list[dict[str, Any]]] = {
    "add.Tensor": [{"alpha": 1}, {"alpha": 3}],
    "sub.Tensor": [{"alpha": 1}, {"alpha": 3}],
    "rsub.Tensor": [{"alpha": 3}],
    "addcmul": [{"value": 3}],
    "addcdiv": [{"value": 3}],
    "lerp.Scalar": [{"weight": 0.25}, {"weight": 0.75}],
    "native_dropout_backward": [{"scale": 1.25}],
    "div.Tensor_mode": [{"rounding_mode": mode} for mode in (None, "trunc", "floor")],
    "remainder.Scalar_Tensor": [{"self": 7}],
    "pow.Scalar": [{"self": 2}, {"self": -3}],
    "pow.Tensor_Scalar": [{"exponent": e} for e in (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 2.5)],
    "round.decimals": [{"decimals": 2}, {"decimals": -1}, {"decimals": 0}],
    "clamp": [{"min": -1, "max": 2}, {"min": None, "max": 2}, {"min": -1, "max": None}, {"min": 3, "max": 1}],
    "clamp.Tensor": [{}, {"max": None}, {"min": None}],
    "clamp_min": [{"min": 2}],
    "clamp_max": [{"max": 2}],
    **{f"__{name}__.Scalar": [{"other": 3}] for name in ("lshift", "rshift", "ilshift", "irshift")},
    "isin.Tensor_Scalar": [{"test_element": 3, "invert": i} for i in (False, True)],
    "masked_fill.Tensor": [{"value": lambda pool: pool[1][3]}],
    "threshold": [{"threshold": 1, "value": 7}],
    "threshold_backward": [{"threshold": 1}],
    "leaky_relu_backward": [{"negative_slope": 0.1, "self_is_result": False}],
    "hardtanh_backward": [{"min_val": -1, "max_val": 2}],
    "hardshrink_backward": [{"lambd": 0.5}],
    "softshrink_backward": [{"lambd": 0.5}],
    "elu": [{}, {"alpha": 1.5, "scale": 2.0, "input_scale": 0.5}],
    "elu_backward": [{"alpha": 1.5, "scale": 2.0, "input_scale": 0.5, "is_result": r} for r in (False, True)],
    "softplus": [{}, {"beta": 2.0, "threshold": 5.0}],
    "softplus_backward": [{"beta": 2.0, "threshold": 5.0}],
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
    "gelu_backward": [{"approximate": "none"}, {"approximate": "tanh"}],
    "glu": [{"dim": 0}],
    "glu_backward": [{"grad_output": lambda pool: pool[2][::2], "self": lambda pool: pool[0], "dim": 0}],
    "logit": [{}, {"eps": 0.25}],
    "logit_backward": [{}, {"eps": 0.25}],
    **{
        name: [{"self": lambda pool: _moderate(pool).abs() * 50, "other": lambda pool: pool[1]}]
        for name in ("igamma", "igammac")
    },
    "mvlgamma": [{"p": 3, "self": lambda pool: _float(pool[0]).abs() + 1.5}],
    "polygamma": [{"n": 0}, {"n": 1, "self": lambda pool: _float(pool[0]).abs()}, {"n": 2}, {"n": 5}],
    "special_zeta": [
        {"self": lambda pool: (_float(pool[0]).abs() + 0.5).clamp(max=90)},
        {"self": lambda pool: _float(pool[0]).trunc().clamp(max=90)},
    ],
    **{
        f"special_{shifted}chebyshev_polynomial_{kind}": [{"x": _moderate, "n": _degrees}]
        for shifted in ("", "shifted_")
        for kind in "tuvw"
    },
    **{
        f"special_{name}": [{"x": _moderate, "n": _degrees}]
        for name in ("hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p")
    },
    "nan_to_num": [{}, {"nan": 2.0, "posinf": 3.0, "neginf": -4.0}],
    **{f"{name}.Scalar": [{"other": 3}] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
# PyTorch's CPU kernels of these raise if an integer divisor is zero.
DIVISIONS = {"div.Tensor_mode", "floor_divide", "remainder.Tensor", "remainder.Scalar_Tensor", "fmod.Tensor"}
# PyTorch does not define the sign of a zero result: its vectorized and scalar loops differ.
ZEROS_OF_ANY_SIGN = {
    *("maximum", "minimum", "fmin", "fmax", "clamp", "clamp.Tensor", "clamp_min", "clamp_max", "clamp_min.Tensor"),
    *("clamp_max.Tensor", "native_dropout_backward", "relu", "_add_relu.Tensor"),
    *("log_sigmoid_backward", "gelu", "gelu_backward", "hardtanh", "hardswish"),
}
# Nor the result for NaN: the vectorized loops of these invert comparisons.
NAN_IN_VECTORS = {
    *("elu_backward", "hardtanh_backward", "hardswish_backward", "hardshrink_backward", "softshrink_backward"),
}


refused: dict[tuple[str, torch.dtype], str] = {}


def cases_of(name: str, dtype: torch.dtype) -> Iterator[Case]:
    """Calls of an operator with tensors of this dtype that PyTorch's CPU kernel accepts."""
    pool = _pool(dtype)
    if name in DIVISIONS and not dtype.is_floating_point:
        pool = tuple(tensor.where(tensor != 0, 5) for tensor in pool)
    schema = arguments_of(name)
    for given in NUMBERS.get(name, [{}]):
        arguments, tensors = [], iter(pool)
        for argument in schema:
            if argument.name in given:
                value = given[argument.name]
                value = value(pool) if callable(value) else value
            elif str(argument.type) in ("Tensor", "Optional[Tensor]"):
                value = next(tensors)
                if argument.name in ("mask", "condition"):
                    value = value > 0
            else:
                assert argument.has_default_value(), f"NUMBERS has no value for the argument {argument.name} of {name}"
                value = argument.default_value
            arguments.append(value)
        if dtype == torch.uint8 and any(isinstance(v, (int, float)) and v < 0 for v in arguments):
            continue
        try:
            # Copies, because some forms are in-place.
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            expected = call_cpu(name, copies)
        except (RuntimeError, ValueError, ZeroDivisionError) as error:
            refused.setdefault((name, dtype), str(error).splitlines()[0])
            continue
        yield Case(name, tuple(arguments), expected)


def expected_of(case: Case) -> tuple[torch.Tensor, ...]:
    """The CPU's results; for NaN in NAN_IN_VECTORS those of its scalar loops, as in torch.cuda."""
    if case.name not in NAN_IN_VECTORS:
        return case.expected
    *_, given = (one for one in case.arguments if isinstance(one, torch.Tensor))
    (expected,) = (one.clone() for one in case.expected)
    for j in given.isnan().nonzero()[:, 0].tolist():
        alone = [one[j : j + 1] if isinstance(one, torch.Tensor) else one for one in case.arguments]
        expected[j : j + 1] = call_cpu(case.name, alone)[0]
    return (expected,)


def difference(case: Case, computed: tuple[torch.Tensor, ...]) -> str | None:
    """Returns what is wrong with a result, or None. For float32, the rounded float64 result is right, too."""
    exact = None
    for i, (got, expected) in enumerate(zip(computed, expected_of(case), strict=True)):
        tolerance = _tolerance(got.dtype, case.name)
        right = torch.isclose(got, expected, **tolerance, equal_nan=True)
        if got.dtype == torch.float32 and not right.all():
            wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in case.arguments]
            exact = exact or call_cpu(case.name, wide)
            right |= torch.isclose(got, exact[i].to(got.dtype), **tolerance, equal_nan=True)
            if "backward" in case.name:  # differences that are small relative to the incoming gradient
                grad = case.arguments[0].float()
                right |= (got / grad - exact[i].to(got.dtype) / grad).abs() < tolerance["atol"]
        if got.dtype.is_floating_point and case.name not in ZEROS_OF_ANY_SIGN:
            right &= (expected != 0) | (got != 0) | (expected.signbit() == got.signbit())
        if not right.all():
            at = (~right).nonzero()[:, 0]
            tensors = [a for a in case.arguments if isinstance(a, torch.Tensor) and a.dim()]
            shown = [
                f"of {[a[j].item() for a in tensors]}: {got[j].item()!r}, expected {expected[j].item()!r}"
                for j in at[:4].tolist()
            ]
            return f"{case}: output {i} wrong in {len(at)} of {len(got)}: {'; '.join(shown)}"
    return None


def _tolerance(dtype: torch.dtype, name: str) -> dict[str, float]:
    if not dtype.is_floating_point:
        return {"rtol": 0.0, "atol": 0.0}
    if dtype in (torch.float16, torch.bfloat16):
        return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
    if dtype == torch.float32:
        return {"rtol": 1e-4, "atol": 1e-4} if "polynomial" in name else {"rtol": 1.3e-6, "atol": 1e-5}
    # PyTorch's Bessel and Airy functions in float64 are accurate to five or six decimal places.
    return {"rtol": 1e-7, "atol": 1e-5 if re.search("bessel_[jy]|airy", name) else 1e-7}


LOSSES = {
    "mse_loss": {},
    "smooth_l1_loss": {"beta": 0.7},
    "huber_loss": {"delta": 0.7},
    "soft_margin_loss": {},
    "binary_cross_entropy": {},
    "binary_cross_entropy_with_logits": {},
}


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_agree_with_pytorch(name: str, reduction: int) -> None:
    opencl()
    planners = read("loss").planners
    random = torch.Generator().manual_seed(2)
    a, b, weight = (torch.randn(37, 5, generator=random) for _ in range(3))
    a[0] = torch.tensor([0.0, -0.7, 0.7, 100.0, -100.0])
    b[0] = 0.0
    weights: dict[str, Any] = {}
    if name == "binary_cross_entropy":
        a, b, weights = a.sigmoid(), b.sigmoid(), {"weight": weight}
    if name == "binary_cross_entropy_with_logits":
        weights = {"weight": weight, "pos_weight": weight[:1].abs()}
    for weighted in [{}, weights] if weights else [{}]:
        given = {"self": a, "target": b, "weight": None, "pos_weight": None, "reduction": reduction, **LOSSES[name]}
        result = _plan(planners, name, {**given, **weighted})
        if f"{name}_backward" in planners:
            grad = torch.randn(result.shape, generator=random)
            _plan(planners, f"{name}_backward", {**given, **weighted, "grad_output": grad})


def _plan(planners: dict[str, Any], name: str, given: dict[str, Any]) -> torch.Tensor:
    """Compares a planner's results with the CPU's, and returns the first of them."""
    arguments = tuple(given[argument.name] for argument in arguments_of(name))
    call = Call(name, call_cpu(name, arguments))
    expected = call_cpu(name, arguments)
    planners[name](call, *arguments)
    torch.testing.assert_close(call.made, expected, rtol=1e-5, atol=1e-5)
    return expected[0]


def test_smooth_l1_with_beta_0() -> None:
    opencl()
    a, b = torch.tensor([1.0, -2.0, 3.0, 0.0]), torch.tensor([0.5, 2.0, 3.0, 0.0])
    given = {"self": a, "target": b, "reduction": 0, "beta": 0.0, "grad_output": torch.ones(4)}
    for name in ("smooth_l1_loss", "smooth_l1_loss_backward"):
        _plan(read("loss").planners, name, given)


def test_every_loss_is_tested() -> None:
    tested = {*LOSSES, *(f"{name}_backward" for name in LOSSES)} - {"binary_cross_entropy_with_logits_backward"}
    assert set(read("loss").planners) == tested


@pytest.fixture(scope="module", params=FILES)
def tables(request: pytest.FixtureRequest) -> Tables:
    return read(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool], ids=str)
def test_formulas_agree_with_pytorch(tables: Tables, dtype: torch.dtype) -> None:
    if dtype == torch.float64 and not opencl()[2]:
        pytest.skip("the OpenCL device has no float64")
    wrong = []
    cases = [case for name in tables.formulas for case in cases_of(name, dtype)]
    for first in range(0, len(cases), BATCH):
        some = cases[first : first + BATCH]
        wrong += [difference(case, got) for case, got in zip(some, run(tables, some), strict=True)]
    for name, planner in tables.planners.items():
        for case in cases_of(name, dtype):
            call = Call(name, case.expected)
            planner(call, *case.arguments)
            wrong.append(difference(case, call.made))
    assert not any(wrong), "\n".join(filter(None, wrong))


def test_every_declared_formula_is_tested(tables: Tables) -> None:
    for name in (*tables.formulas, *tables.planners):
        taken = [dtype for dtype in (torch.float32, torch.int64) for _ in cases_of(name, dtype)]
        assert taken, f"{name} accepted none of the arguments: {refused}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_operators_that_depend_on_the_stored_dtype(dtype: torch.dtype) -> None:
    opencl()
    bits = torch.arange(-(2**15), 2**15, 37).to(torch.int16)
    a, b = bits.view(dtype), bits.roll(701).view(dtype)
    a[:4], b[:4] = torch.tensor([0.0, -0.0, 0.0, 1.0]), torch.tensor([-0.0, 1.0, -1.0, 1.0])
    planners = read("binary_ops", "unary_ops").planners
    towards = torch.where(a < b, 1, torch.where(a > b, -1, 0))
    (moved,) = _planned(planners, "nextafter", (a, b), a)
    step = _ordered(moved) - _ordered(a)
    known = ~(a.isnan() | b.isnan())
    # Both zeros have one position; the smallest number of either sign is one step from it.
    assert torch.equal(step[known], towards[known])
    assert moved[~known].isnan().all()
    assert moved[0].signbit()
    (finite,) = _planned(planners, "nan_to_num", (a, None, None, None), a)
    assert torch.equal(finite, torch.nan_to_num(a))


def _planned(planners: dict[str, Any], name: str, arguments: tuple[Any, ...], like: torch.Tensor) -> tuple[Any, ...]:
    call = Call(name, (like,))
    planners[name](call, *arguments)
    return call.made


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """The positions of 16-bit floats in their order, counted from zero."""
    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


# Computed to 17 digits with mpmath. Some of PyTorch's functions are less accurate.
KNOWN = [
    ("airy_ai", -2.5, -0.11232506769296609),
    ("airy_ai", 3.0, 0.006591139357460719),
    ("airy_ai", -20.0, -0.1764061270779847),
    ("j0", 5.5, -0.006843869417819197),
    ("j1", -30.0, 0.11875106261662294),
    ("y0", 20.0, 0.06264059680938383),
    ("y1", 6.0, -0.17501034430039825),
    ("k0", 1.0, 0.42102443824070834),
    ("k1e", 3.0, 0.8065634801287869),
    ("i0e", 10.0, 0.1278333371634286),
    ("i1e", -3.0, -0.19682671329730086),
    ("erfcx", 2.0, 0.25539567631050575),
    ("erfinv", 0.999, 2.3267537655135246),
    ("ndtri", 1e-200, -30.20559417957964),
    ("log_ndtr", -40.0, -804.6084420137538),
    ("digamma", -1.5, 0.7031566406452432),
    ("trigamma", 0.1, 101.43329915079275),
]


def test_special_functions_are_accurate_in_float64() -> None:
    if not opencl()[2]:
        pytest.skip("the OpenCL device has no float64")
    x = torch.tensor([argument for _, argument, _ in KNOWN], dtype=torch.float64)
    outputs = [torch.empty_like(x) for _ in KNOWN]
    run_pointwise(lambda x: [getattr(special, name)(x) for name, _, _ in KNOWN], [x], outputs, width=1)
    found = torch.stack([output[i] for i, output in enumerate(outputs)])
    expected = torch.tensor([value for _, _, value in KNOWN], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def test_special_functions_compile_for_cuda() -> None:
    """Loops, bit casts and tables, in float32 and float64; and integers."""
    functions = [getattr(special, name) for name in dict.fromkeys(name for name, _, _ in KNOWN)]
    for dtype, integer in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        kernel = pointwise(
            "special",
            lambda x, n: [
                *(one(x) for one in functions),
                special.zeta(x, x),
                f.power(n, n) + f.gcd(n, n) + x.view(n.dtype),
            ],
            inputs=[dtype, integer],
            outputs=[dtype] * (len(functions) + 1) + [integer],
            layout=Layout(0, 1),
            dialect=CudaCpp(),
        )
        assert "bp_special" in compile_cuda(kernel.text, CudaCpp().compile_options)
