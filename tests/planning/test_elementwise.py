"""torch_backplane.elementwise without kernels, on the CPU and on host devices; and its errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import torch_backplane
from torch_backplane.kernels import functions as f
from torch_backplane.kernels import special, trace
from torch_backplane.kernels.evaluate import evaluate
from torch_backplane.kernels.expression import OPERATIONS

DEVICES = ["cpu", "bp:0"]


@torch_backplane.elementwise
def leaky(x: Any, y: Any, slope: float = 0.01) -> Any:
    """A rectifier."""
    return torch.where(x > 0, x, x * slope) + y


def reference(x: torch.Tensor, y: Any, slope: float = 0.01) -> torch.Tensor:
    return torch.where(x > 0, x, x * slope) + y


@pytest.mark.parametrize("device", DEVICES)
def test_broadcasting_and_promotion_match_pytorch(device: str) -> None:
    x, y = torch.randn(3, 1, 4, device=device), torch.randn(5, 1, device=device)
    torch.testing.assert_close(leaky(x, y), reference(x, y))
    assert leaky(x, y).device == x.device
    torch.testing.assert_close(leaky(x.half(), y), reference(x.half().float(), y))
    torch.testing.assert_close(leaky(x.double(), 1, slope=2), reference(x.double(), 1, slope=2))
    torch.testing.assert_close(leaky(1, y, 0.5), y + 1)
    torch.testing.assert_close(leaky(x=x, y=y, slope=3), reference(x, y, 3))
    whole = torch.tensor([-3, 2], device=device)
    torch.testing.assert_close(leaky(whole, 1, slope=2), torch.tensor([-5, 3], device=device))
    torch.testing.assert_close(leaky(whole, 1, slope=0.5), torch.tensor([-0.5, 3.0], device=device))
    assert leaky(x.bfloat16(), 1.0).dtype == torch.bfloat16
    assert leaky(x.half(), y.bfloat16()).dtype == torch.float32
    # Wraps around, like PyTorch's +.
    assert leaky(torch.ones(2, dtype=torch.uint8, device=device), 300, slope=1).tolist() == [45, 45]


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_new_tensors_with_pytorchs_strides(device: str) -> None:
    same = torch_backplane.elementwise(lambda x: x)
    x = torch.randn(4, 3, device=device).t()
    y = same(x)
    assert y.data_ptr() != x.data_ptr()
    assert y.stride() == (x + 0).stride()
    one = torch_backplane.elementwise(lambda x: 1)(x)
    assert one.dtype == x.dtype
    assert one.stride() == x.stride()
    assert one.eq(1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_several_results_of_several_dtypes(device: str) -> None:
    parts = torch_backplane.elementwise(lambda x: (f.floor(x), x < 0, x.to(torch.int32)))
    x = torch.randn(9, device=device) * 5
    floor, negative, whole = parts(x)
    torch.testing.assert_close(floor, x.floor())
    torch.testing.assert_close(negative, x < 0)
    torch.testing.assert_close(whole, x.to(torch.int32))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device: str) -> None:
    product = torch_backplane.elementwise(
        lambda x, y, scale=1.0: (scale * x * y, x > y),
        backward=lambda grad, _, x, y, scale: (grad * scale * y, grad * scale * x),
    )
    x = torch.randn(3, 4, device=device, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, device=device, dtype=torch.float64, requires_grad=True)
    values, greater = product(x, y, scale=2.0)
    assert not greater.requires_grad
    values.sum().backward()
    torch.testing.assert_close(x.grad, (2 * y).expand(3, 4))
    torch.testing.assert_close(y.grad, (2 * x).sum(0))
    assert not product(x.detach(), y.detach())[0].requires_grad
    torch.autograd.gradcheck(lambda x, y: product(x, y)[0], (x, y))
    grad = torch.func.grad(lambda x: product(x, 3.0)[0].sum())(x.detach())
    torch.testing.assert_close(grad, torch.full_like(x, 3.0))


def test_a_gradient_can_be_missing() -> None:
    scaled = torch_backplane.elementwise(lambda x, y: x * y, backward=lambda grad, x, y: (grad * y, None))
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    scaled(x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is None


def test_requires_grad_without_a_derivative_raises() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"leaky has no derivative, but its argument y requires grad: pass"):
        leaky(1.0, x)
    with torch.no_grad():
        assert leaky(x, 1).tolist() == [2.0, 2.0]
    with torch.inference_mode():
        assert leaky(x, 1).tolist() == [2.0, 2.0]
    twice = torch_backplane.elementwise(lambda x: x * x, backward=lambda grad, x: 2 * grad * x, name="twice")
    (grad,) = torch.autograd.grad(twice(x).sum(), x, create_graph=False)
    assert grad.tolist() == [2.0, 2.0]
    (grad,) = torch.autograd.grad(twice(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice has no second derivative"):
        grad.sum().backward()


def branches(x: Any) -> Any:
    return x if x > 0 else -x


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        (3, "elementwise expects a Python function of scalars, but got int"),
        (branches, "cannot trace branches: the value of a traced expression is not known yet; use functions.where"),
        (math.exp, "cannot trace exp: must be real number, not Expression"),
        (lambda x: torch.fft.fft(x), r"cannot trace lambda: formulas do not support torch\.fft_fft"),
        (lambda x: "text", "cannot trace lambda: a formula returns traced values, and this one returned str"),
        (lambda x: x.sin(), "cannot trace lambda: 'Expression' object has no attribute 'sin'"),
        (lambda: 1.0, "needs a parameter without a default"),
        (lambda x=1: x, "needs a parameter without a default"),
        (lambda *x: x[0], r"needs a fixed number of parameters: lambda has \*x"),
        (lambda x, *, y: x, "keyword-only parameters need a number as default: y of lambda has none"),
        (lambda x, mode="fast": x, "a default must be a number: parameter mode of lambda has 'fast'"),
    ],
)
def test_invalid_formulas_raise_at_declaration(formula: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        torch_backplane.elementwise(formula)


def test_a_backward_formula_returns_a_gradient_for_each_parameter() -> None:
    with pytest.raises(TypeError, match="the formula returned 1 gradients for 2 parameters"):
        torch_backplane.elementwise(lambda x, y: x * y, backward=lambda grad, x, y: grad)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(2),), {}, TypeError, r"leaky\(x, y, slope=0\.01\): missing a required argument: 'y'"),
        ((torch.ones(2), 1, 2, 3), {}, TypeError, "too many positional arguments"),
        ((torch.ones(2), 1), {"slop": 2}, TypeError, "got an unexpected keyword argument 'slop'"),
        ((torch.ones(2), 1), {"slope": torch.ones(2)}, TypeError, "slope must be a Python number, but got Tensor"),
        ((torch.ones(2), "1"), {}, TypeError, "leaky: y must be a tensor or a Python number, but got str"),
        ((1.0, 2.0), {}, TypeError, "leaky needs at least one tensor argument"),
        ((torch.ones(2), torch.ones(3)), {}, RuntimeError, "must match the size of tensor"),
        ((torch.ones(2, dtype=torch.complex64), 1), {}, TypeError, r"leaky does not support torch\.complex64"),
        ((torch.ones(2), 1j), {}, TypeError, r"leaky does not support torch\.complex64: greater does not support "),
    ],
)
def test_invalid_calls_raise(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        leaky(*arguments, **options)


def test_the_functions_metadata_is_kept() -> None:
    assert leaky.__name__ == "leaky"
    assert leaky.__doc__ == "A rectifier."
    assert "leaky" in repr(leaky)


def test_importing_the_package_does_not_import_kernels(run_python: Any) -> None:
    code = "import sys, torch_backplane; print('torch_backplane.kernels' in sys.modules)"
    assert run_python(code).stdout.strip() == "False"


# The evaluator implements each operation as kernels define it. test_kernels_pointwise.py tests the kernels.

VALUES = {
    "float": torch.tensor([-7.5, -1.0, -0.5, 0.0, 0.3, 0.9, 1.0, 2.5, 6.0]),
    "signed": torch.tensor([-7, -2, -1, 0, 1, 3, 4, 63]),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_is_evaluated(name: str) -> None:
    operation = OPERATIONS[name]
    for kind in sorted(operation.accepts - {"unsigned"}):
        values = VALUES[kind]
        arguments = list(torch.meshgrid(*[values] * operation.arity, indexing="ij"))
        program = trace(lambda *xs: f.apply(name, *xs), [values.dtype] * operation.arity)
        (found,) = evaluate(program, arguments)
        assert found.dtype == (torch.bool if operation.gives_bool else values.dtype)
        assert found.shape == arguments[0].shape


def test_integer_division_by_zero_is_zero_as_in_kernels() -> None:
    a = torch.tensor([5, -5, 0])
    for function in (f.floor_divide, f.trunc_divide, f.remainder, f.fmod):
        assert torch_backplane.elementwise(lambda a, b, g=0: function(a, b))(a, torch.tensor(0)).tolist() == [0, 0, 0]  # noqa: B023
    assert torch_backplane.elementwise(f.floor_divide)(a, torch.tensor([2, 2, 2])).tolist() == [2, -3, 0]


def test_loops_and_special_functions_are_evaluated() -> None:
    gcd = torch_backplane.elementwise(lambda a, b: f.gcd(a, b))
    a, b = torch.tensor([12, 18, 7, 0]), torch.tensor([18, 12, 3, 5])
    torch.testing.assert_close(gcd(a, b), torch.gcd(a, b))
    x = torch.linspace(0.1, 8, 50)
    torch.testing.assert_close(torch_backplane.elementwise(special.digamma)(x), torch.digamma(x), rtol=1e-4, atol=1e-5)
    bits = torch_backplane.elementwise(lambda x: x.view(torch.int32))
    torch.testing.assert_close(bits(x), x.view(torch.int32))
