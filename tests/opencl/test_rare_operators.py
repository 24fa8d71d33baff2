"""Less common operators: Chebyshev polynomials, ldexp, forward derivatives of GLU, `_add_relu` and others."""

from __future__ import annotations

import pytest
import torch
from agreement import DEVICE, agrees, had, on_device

aten = torch.ops.aten


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape) * 3).to(dtype)


@pytest.mark.parametrize("kind", "tuvw")
@pytest.mark.parametrize("shifted", ["", "shifted_"])
def test_chebyshev_polynomials_of_low_degree_use_the_recurrence(shifted: str, kind: str) -> None:
    """The recurrence is exact for these x. At zeros, a closed form has the error of the cosine of a rounded angle."""
    function = getattr(torch.special, f"{shifted}chebyshev_polynomial_{kind}")
    x = torch.tensor([0.0, -0.0, 0.5, -0.5, 0.25, 0.75, 1.0, -1.0, 2.0])
    for degree in range(4 if shifted else 6):
        agrees(lambda x, n=degree: function(x, n), x, rtol=0, atol=0)
    for degree in (7, 8):
        agrees(lambda x, n=degree: function(x, n), x, rtol=1e-4, atol=1e-7 if kind in "uvw" and not shifted else 1e-4)


def test_ldexp_with_exponents_of_other_dtypes() -> None:
    floats = had((torch.float16, torch.float32, torch.float64, torch.complex64))
    widest = had((torch.float64, torch.float32))[0]
    for x in (*(numbers(5, dtype=dtype) for dtype in floats), torch.arange(5), torch.tensor(True)):
        for exponent in (
            numbers(5, dtype=torch.float32 if x.is_complex() else torch.float16), numbers(5),
            torch.tensor([3, -2, 100, 0, 1]), torch.tensor([1.5, -0.3], dtype=widest)[0],
        ):  # fmt: skip
            agrees(torch.ldexp, x, exponent, rtol=1e-3 if x.dtype == torch.float16 else 1e-5, atol=1e-6)
        agrees(lambda x, e: x.ldexp_(e), numbers(5, dtype=widest), torch.tensor([3, -2, 200, 0, 1]))
        small = torch.tensor([1e-30, 1e-38, 1.0, -3.0, 1e30])
        agrees(torch.ldexp, small, torch.tensor([150, 200, 127, -140, -200]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_ldexp_is_exact_for_any_exponent(dtype: torch.dtype) -> None:
    """Covers zeros, subnormal numbers, overflow and underflow. Exponents beyond C's int wrap."""
    (dtype,) = had((dtype,)) or pytest.skip(f"the device has no {dtype}")
    few = [0.0, -0.0, 1.0, -1.5, 3.0, 2.0**-149, 1.2345e-38, 3e38, torch.inf, -torch.inf, torch.nan]
    x = torch.tensor(few).to(dtype)
    for exponents in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        for exponent in (0, 1, -1, 2000, -2000, 276, -149, -150, 2**31 - 1, -(2**31), 2**32 + 1, 2**40, 2**33 - 2):
            if torch.iinfo(exponents).min <= exponent <= torch.iinfo(exponents).max:
                agrees(torch.ldexp, x, torch.tensor([exponent], dtype=exponents), rtol=0, atol=0)
                agrees(torch.ldexp, x, torch.tensor(exponent, dtype=exponents), rtol=0, atol=0)
    agrees(lambda x, e: x.ldexp_(e), x, torch.arange(len(x)) * 37 - 200, rtol=0, atol=0)


def test_nan_to_num_of_integers_accepts_any_strides() -> None:
    """Integers have no values to replace, so PyTorch copies the tensor to itself, and expanded tensors are accepted."""
    for dtype in (torch.bool, torch.int32):
        agrees(lambda x: x.expand(7).nan_to_num_(nan=5), torch.ones(1, dtype=dtype))
        agrees(lambda x: x.nan_to_num_(), torch.ones(4, 3, dtype=dtype).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_glu_jvp_and_backward_jvp(dim: int, dtype: torch.dtype) -> None:
    x, dx = numbers(4, 6, 8, dtype=dtype), numbers(4, 6, 8, dtype=dtype).flip(0)
    glu = torch.nn.functional.glu(x, dim)
    agrees(lambda *t: aten.glu_jvp(*t, dim), glu, x, dx)
    grad, step = numbers(*glu.shape, dtype=dtype), numbers(*glu.shape, dtype=dtype).flip(0)

    def along(grad: torch.Tensor, x: torch.Tensor, step: torch.Tensor, dx: torch.Tensor) -> torch.Tensor:
        # The CPU reads the gradient from the first argument, so it must belong to the other arguments.
        return aten.glu_backward_jvp(aten.glu_backward(grad, x, dim), grad, x, step, dx, dim)

    agrees(along, grad, x, step, dx)


def test_glu_forward_mode_autograd() -> None:
    widest = had((torch.float64, torch.float32))[0]
    x, dx = numbers(4, 6, dtype=widest), numbers(4, 6, dtype=widest).flip(0)

    def glu(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.glu(x, 1)

    agrees(lambda x, dx: torch.func.jvp(glu, (x,), (dx,)), x, dx)
    agrees(lambda x, dx: torch.func.jvp(torch.func.grad(lambda x: glu(x).pow(2).sum()), (x,), (dx,)), x, dx)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
def test_add_relu(dtype: torch.dtype) -> None:
    a, b = numbers(5, 33, dtype=dtype), numbers(33, dtype=dtype)
    agrees(lambda a, b: aten._add_relu(a, b), a, b)
    agrees(lambda a, b: aten._add_relu(a, b, alpha=2), a, b)
    agrees(lambda a, b: aten._add_relu_(a, b, alpha=2), a, b)
    agrees(lambda a, b, out: aten._add_relu(a, b, out=out), a, b, torch.empty_like(a))
    agrees(lambda a: aten._add_relu(a, 2), a)
    agrees(lambda a: aten._add_relu(a, -1, 2), a)
    agrees(lambda a: aten._add_relu_(a, 2), a)


def test_add_relu_of_infinities_and_mixed_dtypes() -> None:
    agrees(lambda a: aten._add_relu(a, a), torch.tensor([torch.inf, -torch.inf, 3e38, -3e38, 1.0, -1.0]))
    agrees(lambda a, b: aten._add_relu(a, b), numbers(5), torch.arange(-2, 3))
    for wider in had((torch.float64,)):
        agrees(lambda a, b: aten._add_relu(a, b), numbers(5).to(wider), numbers(5))
    for bad in (numbers(3).bfloat16(), numbers(3).half()):
        with pytest.raises(RuntimeError, match="Unsupported datatyp"):
            aten._add_relu(on_device(bad), on_device(bad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=str)
def test_private_aminmax(dtype: torch.dtype) -> None:
    x = numbers(3, 4, 5, dtype=dtype)
    agrees(lambda x: aten._aminmax(x), x)
    agrees(lambda x: aten._aminmax(x, 1), x)
    agrees(lambda x: aten._aminmax(x, -1, True), x)
    outs = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
    agrees(lambda x, a, b: aten._aminmax(x, 1, out0=a, out1=b), x, *outs)
    with pytest.raises(RuntimeError, match="cannot compute aminmax over an empty dimension"):
        aten._aminmax(torch.zeros(0, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_linear_combination(dtype: torch.dtype) -> None:
    coefficients = numbers(5, 4, dtype=dtype)

    def combine(x: torch.Tensor, c: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        # One coefficient per slice: with another number, PyTorch reads out of bounds.
        return aten._compute_linear_combination(x, c[:, : x.shape[0]], **out)

    for shape in ((4,), (4, 3), (4, 3, 2)):
        agrees(combine, numbers(*shape, dtype=dtype), coefficients)
    out = torch.ones(5, 3, dtype=dtype)  # the combination is added to it
    agrees(lambda x, c, out: combine(x, c, out=out), numbers(4, 3, dtype=dtype), coefficients, out)


def test_vector_norm_of_one_element_is_its_absolute_value() -> None:
    """It is computed without powers and roots, as in PyTorch."""
    x = torch.tensor([[2.0], [-3.0], [0.0]])
    for order in (0, 0.001, 1, 2, torch.inf, -torch.inf, -1):
        for dtype in (torch.float32, torch.complex64, torch.float16):
            agrees(lambda a, order=order: torch.linalg.vector_norm(a, order, dim=[-1]), x.to(dtype))
            agrees(lambda a, order=order: torch.linalg.vector_norm(a, order, keepdim=True), x[:1].to(dtype))


def test_renorm_of_non_finite_values() -> None:
    x = torch.complex(torch.tensor([[1.0, -torch.inf], [0.3, 2.0]]), torch.tensor([[1.0, 0.5], [torch.nan, 0.5]]))
    agrees(lambda a: torch.view_as_real(torch.renorm(a, 2, 0, 1.0)), x)


def test_cumprod_keeps_the_sign_of_zero() -> None:
    x = torch.tensor([[-1.0], [0.0], [-3.0], [2.0], [-1.0]])
    for dtype in had((torch.float32, torch.float64, torch.float16)):
        expected, found = (x.to(device, dtype).cumprod(0).cpu() for device in ("cpu", "bp"))
        assert torch.equal(torch.signbit(found), torch.signbit(expected))
