"""Activations that are more than a formula: RReLU, which draws slopes for negative elements and saves them; GELU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import DEVICE, agrees, need, plans_from_the_start, refused_alike, to_cpu, why_not
from torch.nn import functional as F

from torch_backplane import _C, plans

aten = torch.ops.aten
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns random values that include zeros of both signs, infinities and NaN."""
    torch.manual_seed(len(shape) + sum(shape))
    x = torch.randn(shape)
    flat = x.view(-1)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    if flat.numel() > len(special):
        flat[: len(special)] = special
    return x.to(dtype)


def check(out: torch.Tensor, x: torch.Tensor, noise: torch.Tensor, lower: float, upper: float) -> None:
    """Asserts that the noise is drawn where x <= 0 and 1 elsewhere, and that `out` is x times the noise."""
    out, x, noise = to_cpu((out, x, noise))
    drawn = x <= 0
    assert (noise[~drawn] == 1).all()
    slack = 0 if noise.dtype in (torch.float32, torch.float64) else torch.finfo(noise.dtype).eps
    assert ((noise[drawn] >= lower - slack) & (noise[drawn] <= upper + slack)).all()
    assert torch.equal(out.nan_to_num(7.0), (x * noise).nan_to_num(7.0))


FORMS: dict[str, Callable[..., torch.Tensor]] = {
    "functional": lambda x, noise, *rest: aten.rrelu_with_noise(x, noise, *rest),
    "in place": lambda x, noise, *rest: aten.rrelu_with_noise_(x.clone(), noise, *rest),
    "out=": lambda x, noise, *rest: aten.rrelu_with_noise(x, noise, *rest, out=torch.empty_like(x)),
    "strided out=": lambda x, noise, *rest: aten.rrelu_with_noise(
        x, noise, *rest, out=x.new_empty((*x.shape, 2))[..., 0]
    ),
    "resized out=": lambda x, noise, *rest: aten.rrelu_with_noise(x, noise, *rest, out=x.new_empty(0)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_draws_slopes_of_nonpositive_elements(dtype: torch.dtype, form: str) -> None:
    x = values(7, 33, dtype=dtype).to(DEVICE)
    noises = []
    for _ in range(3):
        noise = torch.full_like(x, -9)
        _C.reset_fallback_counts()
        out = FORMS[form](x, noise, 0.25, 0.5, True)
        assert not _C.fallback_counts()
        assert out.dtype == dtype
        check(out, x, noise, 0.25, 0.5)
        noises.append(noise.cpu())
    assert not torch.equal(noises[0], noises[1])
    assert not torch.equal(noises[1], noises[2])


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "none": lambda: values(6, 10).to(DEVICE),
    "transposed": lambda: values(10, 6).to(DEVICE).t(),
    "every second": lambda: values(6, 20).to(DEVICE)[:, ::2],
    "expanded": lambda: values(10).to(DEVICE).expand(6, 10),
}


@pytest.mark.parametrize("noise", ["none", "transposed", "every second"])
@pytest.mark.parametrize("x", VIEWS)
def test_rrelu_with_any_strides(x: str, noise: str) -> None:
    given, slopes = VIEWS[x](), VIEWS[noise]()
    out = aten.rrelu_with_noise(given, slopes, 0.1, 0.9, True)
    check(out, given, slopes, 0.1, 0.9)
    assert out.is_contiguous()


def test_slopes_are_uniform() -> None:
    x = torch.full((100_000,), -1.0, device=DEVICE)
    noise = torch.empty_like(x)
    aten.rrelu_with_noise(x, noise, -1.0, 3.0, True)
    drawn = noise.cpu()
    assert abs(drawn.mean() - 1) < 0.02  # a standard deviation is 0.0037
    assert abs(drawn.var() - 16 / 12) < 0.03
    assert (drawn.histc(8, -1, 3) / 12_500 - 1).abs().max() < 0.06


@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
def test_slopes_come_from_the_generator(own: bool) -> None:
    x = torch.full((50,), -1.0, device=DEVICE)
    generator = torch.Generator(DEVICE) if own else None

    def draw() -> torch.Tensor:
        return aten.rrelu(x, 0.1, 0.9, True, generator).cpu()

    def seed() -> None:
        if generator is None:
            torch.manual_seed(11)
        else:
            generator.manual_seed(11)

    seed()
    first = [draw() for _ in range(3)]
    seed()
    again = [draw() for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
    # The slope depends on the element's index, not on strides.
    seed()
    x = torch.full((10, 10), -1.0, device=DEVICE)[:, ::2].t().t().reshape(50)
    assert torch.equal(draw(), first[0])


@plans_from_the_start()
def test_training_is_replayed() -> None:
    x, noise = torch.randn(64, device=DEVICE), torch.empty(64, device=DEVICE)
    for _ in range(4):
        aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
        check(aten.rrelu_with_noise_(x.clone(), noise, 0.1, 0.3, True), x, noise, 0.1, 0.3)
    for name in ("aten::rrelu_with_noise", "aten::rrelu_with_noise_"):
        assert plans.stats()[name]["replays"] == 3
        assert plans.stats()[name]["planner_calls"] == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rrelu_in_eval_mode_is_leaky_relu_and_keeps_noise(dtype: torch.dtype) -> None:
    for x in (values(7, 33, dtype=dtype), values(20, 6, dtype=dtype)[::2].t(), values(0, 3, dtype=dtype)):
        noise = torch.full(x.shape, -9.0, dtype=dtype)
        agrees(lambda x, noise: aten.rrelu_with_noise(x, noise, 0.1, 0.5, False), x, noise)
        agrees(lambda x, noise: aten.rrelu_with_noise_(x, noise, 0.1, 0.5, False), x, noise)
        agrees(lambda x, noise: aten.rrelu_with_noise(x, noise, 0.1, 0.5, out=torch.empty_like(x)), x, noise)
        agrees(lambda x: F.rrelu(x, training=False), x)
        agrees(lambda x: F.rrelu(x, 0, 1), x)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,)], ids=str)
def test_few_elements(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, -2.0, device=DEVICE)
    noise = torch.empty_like(x)
    for _ in range(2):
        out = aten.rrelu_with_noise(x, noise, 0.5, 0.5, True)
        assert torch.equal(out.cpu(), torch.full(shape, -1.0))
        assert torch.equal(noise.cpu(), torch.full(shape, 0.5))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_in_training_is_the_slope(dtype: torch.dtype, inplace: bool) -> None:
    x = values(6, 11, dtype=dtype).nan_to_num(1.0, 2.0, -2.0)
    weight = (2.0 ** torch.randint(-2, 3, (6, 11))).to(dtype)  # powers of two: division by them is exact
    for _ in range(3):
        leaf = x.to(DEVICE).requires_grad_()
        _C.reset_fallback_counts()
        out = F.rrelu(leaf.clone() if inplace else leaf, 0.25, 0.5, training=True, inplace=inplace)
        (grad,) = torch.autograd.grad(out, leaf, weight.to(DEVICE))
        assert not _C.fallback_counts()
        found, slope = out.detach().cpu(), grad.cpu() / weight
        torch.testing.assert_close(found, x * slope)
        assert (slope[x > 0] == 1).all()
        assert ((slope[x <= 0] > 0.24) & (slope[x <= 0] < 0.51)).all()


@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_agree_with_the_cpus(inplace: bool) -> None:
    def evaluated(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        out = F.rrelu(leaf.clone() if inplace else leaf, 0.2, 0.6, training=False, inplace=inplace)
        return torch.autograd.grad(out, leaf, grad)[0]

    def trained(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        # Equal bounds make the slope deterministic.
        leaf = x.detach().requires_grad_()
        out = F.rrelu(leaf.clone() if inplace else leaf, 0.5, 0.5, training=True, inplace=inplace)
        return torch.autograd.grad(out, leaf, grad)[0]

    x, grad = torch.randn(7, 9), torch.randn(7, 9)
    for function in (evaluated, trained):
        agrees(function, x, grad)
        agrees(function, x.t(), grad.t())


def test_input_and_noise_may_be_the_same_tensor() -> None:
    x = values(40).to(DEVICE)
    both = x.clone()
    check(aten.rrelu_with_noise(both, both, 0.1, 0.3, True), x, both, 0.1, 0.3)


def test_functional_form_does_not_change_the_given_noise() -> None:
    x, noise = values(40).to(DEVICE), torch.full((40,), -9.0, device=DEVICE)
    for _ in range(2):
        out, drawn = aten.rrelu_with_noise_functional(x, noise, 0.1, 0.3, True)
        check(out, x, drawn, 0.1, 0.3)
        assert (noise.cpu() == -9).all()


WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "noise of another shape": lambda x: aten.rrelu_with_noise(x, x.new_empty(4), 0.1, 0.3, True),
    "the same, evaluated": lambda x: aten.rrelu_with_noise(x, x.new_empty(4), 0.1, 0.3, False),
    "noise of another dtype": lambda x: aten.rrelu_with_noise(x, x.double(), 0.1, 0.3, True),
    "a result of another dtype": lambda x: aten.rrelu_with_noise(x, x, 0.1, 0.3, True, out=x.double()),
    "a result of another dtype, evaluated": lambda x: aten.rrelu_with_noise(x, x, 0.1, 0.3, False, out=x.double()),
    "no range": lambda x: aten.rrelu_with_noise(x, x, 0.3, 0.1, True),
    "a range without bounds": lambda x: aten.rrelu_with_noise(x, x, -torch.inf, 0.1, True),
    "no range in F": lambda x: F.rrelu(x, 0.3, 0.1, training=True),
    "integers": lambda x: aten.rrelu_with_noise(x.int(), x.int(), 0.1, 0.3, True),
    "integers, evaluated": lambda x: aten.rrelu_with_noise(x.int(), x.int(), 0.1, 0.3, False),
    "complex numbers": lambda x: aten.rrelu_with_noise(x * 1j, x * 1j, 0.1, 0.3, True),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_raises_pytorchs_error(name: str) -> None:
    if "another dtype" in name:
        need(torch.float64)
    refused_alike(WRONG[name], torch.full((3,), -1.0))


def test_overlapping_memory_is_an_error() -> None:
    x = torch.full((8,), -1.0, device=DEVICE)
    for noise in (x[1:5], x[:1].expand(4)):
        with pytest.raises(RuntimeError, match="single memory location"):
            aten.rrelu_with_noise(x[:4], noise, 0.1, 0.3, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["elu", "celu", "selu", "relu6", "hardtanh", "hardswish", "hardshrink", "softshrink"])
def test_gradients_of_nan_inputs(name: str, dtype: torch.dtype) -> None:
    """PyTorch passes the gradient of NaN inputs through. Its vectorized CPU kernels do not, so the tensor here is
    smaller than a vector."""
    function = getattr(torch.nn.functional, name)
    given = torch.tensor([torch.nan, -1.0, 6.0], dtype=dtype)
    found = []
    for device in ("cpu", "bp"):
        x = given.clone().to(device).requires_grad_()
        function(x).backward(torch.full_like(x, -0.75))
        found.append(x.grad.cpu())
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


def test_gelu_is_as_accurate_as_the_cpus() -> None:
    """For moderate inputs, and for large ones, where one side underflows to zero."""
    x = torch.cat([torch.linspace(-13, 13, 100_001), torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-38, -1e-30])])
    for function in (F.gelu, lambda x: aten.gelu_backward(torch.ones_like(x), x)):
        exact = function(x.double())
        worst = [(function(x.to(device)).cpu() - exact).abs().max().item() for device in ("cpu", DEVICE)]
        assert worst[1] <= max(worst[0], 1e-6), worst
    far = torch.tensor([torch.inf, -torch.inf, torch.nan], device=DEVICE)
    assert F.gelu(far).cpu().isnan().tolist() == [False, True, True]  # as on CUDA
    assert F.gelu(far)[0].item() == torch.inf
    if why_not([torch.float64]) is None:
        torch.testing.assert_close(F.gelu(x.double().to(DEVICE)).cpu(), F.gelu(x.double()), rtol=1e-12, atol=1e-14)
