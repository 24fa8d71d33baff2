"""Operators on complex64 and complex128, compared with the CPU, planned and replayed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, had, need
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_backplane import plans
from torch_backplane.planning import host_sees_memory

C64, C128 = torch.complex64, torch.complex128


def widest() -> torch.dtype:
    return had((C128, C64))[0]



@pytest.fixture(params=[C64, C128], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
    "neg reciprocal sgn abs angle square sigmoid sinc isnan isinf isfinite isreal logical_not conj_physical nan_to_num"
)


@pytest.mark.parametrize("name", UNARY.split())
def test_unary(name: str, dtype: torch.dtype) -> None:
    function = getattr(torch, name)
    x = torch.randn(3, 50, dtype=dtype)
    x[0, :4] = torch.tensor([0, 1, complex(math.inf, 1), complex(1, math.nan)] if "is" in name else [1j, 2, -1 + 1j, 3])
    agrees(function, x)
    agrees(lambda x: function(x.conj()), x.t())


@pytest.mark.parametrize("name", UNARY.split())
def test_out_of_another_dtype_is_accepted_or_refused_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Good calls and bad ones in turn: plans of the one must not serve the other."""
    need(dtype)

    def call(x: torch.Tensor, out_dtype: torch.dtype) -> tuple[type[BaseException] | None, torch.dtype]:
        out = torch.empty(3, 2, dtype=out_dtype, device=x.device)
        try:
            getattr(torch, name)(x, out=out)
        except (RuntimeError, TypeError) as error:
            return type(error), out.dtype
        return None, out.dtype

    x = torch.randn(3, 2, dtype=dtype)
    if name.startswith("is"):
        pytest.skip("has no out=")
    for out_dtype in 2 * had((C64, C128, torch.float32, torch.float64, torch.int64, torch.bool)):
        assert call(x.to(DEVICE), out_dtype) == call(x, out_dtype), out_dtype


BINARY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: torch.add(a, b, alpha=2 - 1j),
    "add with a real alpha": lambda a, b: torch.add(a, b, alpha=3),
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: torch.rsub(a, b),
    "mul": lambda a, b: a * b.conj(),
    "div": lambda a, b: a / b,
    "pow": lambda a, b: a**b,
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=2j),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b, value=2j),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25 + 1j),
    "eq": lambda a, b: (a == b, a != b, a == a, a == 2j),
    "logical": lambda a, b: (a.logical_and(b), a.logical_or(b), a.logical_xor(b * 0)),
    "where": lambda a, b: (torch.where(a.real > 0, a, b), torch.where(a.real > 0, a, 2j)),
    "a real tensor": lambda a, b: (a * b.real, b.imag + a, a / b.real, b.real - a),
    "numbers": lambda a, b: (a * 2, a * 2.5, 2j * a, a / 2j, 1 - a, 3 / a),
    "powers": lambda a, b: (a**2, a**3, a**-1, a**0, 2**a, a**0.5, a**2j),
    "real and a complex number": lambda a, b: (a.real * 2j, a.real + torch.tensor(1j), a.real.to(torch.int32) * 1j),
    "in place": lambda a, b: a.add_(b).mul_(2j).div_(b.real),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 5, dtype=dtype), torch.randn(5, dtype=dtype)
    agrees(BINARY[name], a, b)
    agrees(BINARY[name], torch.randn(5, 4, dtype=dtype).t(), b)


COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "resolve_conj": lambda x: x.conj().resolve_conj(),
    "imag of conj": lambda x: (x.conj().imag.clone(), x.conj().imag + 1, x.conj().imag.resolve_neg().t().contiguous()),
    "to a conjugated one": lambda x: torch.zeros_like(x).conj().copy_(x).conj(),
    "to a negated one": lambda x: torch.zeros_like(x).conj().imag.copy_(x.real),
    "conj to conj": lambda x: torch.zeros_like(x).t().conj().copy_(x.t().conj()),
    "from real": lambda x: (
        x.real.to(x.dtype), x.real.to(C64), x.real.to(torch.int32).to(widest()), (x.real > 0).to(C64)
    ),
    "to the other": lambda x: (x.to(C64), x.conj().to(widest()), x.t().to(C64).contiguous()),
    "to bool": lambda x: x.bool(),
    "fill": lambda x: (torch.full_like(x, 1 + 2j), x.zero_(), torch.ones_like(x)),
    "view_as_real": lambda x: torch.view_as_real(x * 2) + 1,
    "made of parts": lambda x: (torch.complex(x.real, x.imag), torch.polar(x.real, x.imag)),
    "viewed": lambda x: torch.view_as_complex(torch.view_as_real(x) * 2),
    "joined": lambda x: (torch.cat([x, x.conj()]), torch.stack([x, x.mH.mT]), x.repeat(2, 1), x.tril(), x.triu(1)),
    "moved": lambda x: (x.roll(1, 0), x.flip(1), torch.nn.functional.pad(x[None], (1, 2), mode="reflect")),
}


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("name", COPIES)
def test_copies_and_casts(name: str, dtype: torch.dtype) -> None:
    agrees(COPIES[name], torch.randn(4, 5, dtype=dtype))
    agrees(COPIES[name], torch.randn(5, 4, dtype=dtype).t())


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_casts_to_real_take_the_real_part() -> None:
    agrees(lambda x: (x.to(torch.float32), x.to(torch.float16), x.to(torch.int64)), torch.randn(7, dtype=C64) * 5)


REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.real.sum(1, dtype=x.dtype)),
    "mean": lambda x: (x.mean(), x.mean(0), x.mean(1, dtype=widest())),
    "prod": lambda x: (x.prod(1), x.prod()),
    "var": lambda x: (x.var(), x.std(1), x.var(0, correction=0, keepdim=True)),
    "var_mean": lambda x: (*torch.var_mean(x, 1), *torch.std_mean(x), *torch.std_mean(x, (0, 2), keepdim=True)),
    "any": lambda x: (x.any(), x.all(1), x.count_nonzero(0)),
    "trace": lambda x: x[0].trace(),
    "norms": lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (0, 1, 2, 3, 0.5, math.inf, -math.inf)],
    "norm": lambda x: (x.norm(), torch.norm(x, dim=1), torch.norm(x, p=1, dim=0), torch.dist(x, x * 2)),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.5),
    "scans": lambda x: (x.cumsum(1), x.cumprod(2), x.cumsum(0), x.cumprod(0), x[0, 0, 0].cumsum(0)),
    "equal": lambda x: (torch.equal(x, x.clone()), torch.equal(x, x + 1j)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    agrees(REDUCTIONS[name], torch.randn(4, 5, 6, dtype=dtype))
    agrees(REDUCTIONS[name], torch.randn(6, 5, 4, dtype=dtype).transpose(0, 2))


def test_norm_of_order_0_counts_nan() -> None:
    x = torch.tensor([0.0, math.nan, -0.0, 2.0, math.inf])
    agrees(lambda x: torch.linalg.vector_norm(x, 0), x)
    agrees(lambda x: torch.linalg.vector_norm(x, 0), torch.complex(x, x.flip(0)))


def test_norms_with_a_real_out() -> None:
    x = torch.tensor([3 + 4j, 1 - 1j, 0.5j])
    agrees(lambda x, out: (torch.norm(x, out=out), torch.linalg.vector_norm(x, 1, out=out)), x, torch.zeros(()))


def test_out_of_another_precision_raises_pytorchs_error() -> None:
    need(torch.float64)
    for device in ("cpu", DEVICE):
        x, out = torch.ones(3, dtype=torch.float64, device=device), torch.empty(3, dtype=C64, device=device)
        for make in (torch.complex, torch.polar):
            with pytest.raises(RuntimeError, match="Expected object of scalar type ComplexDouble but got scalar type"):
                make(x, x, out=out)


def test_reductions_of_many_elements() -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 1000, dtype=C64)
    agrees(lambda x: (x.sum(), x.sum(0), x.sum(1), x.mean()), x, rtol=1e-5, atol=1e-3)
    # PyTorch's CPU kernel is less accurate than this.
    torch.testing.assert_close(x.to(DEVICE).norm().cpu().double(), x.to(C128).norm(), rtol=2e-6, atol=0.0)


PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b: (a @ b, a.conj() @ b.conj(), a @ a.mH, (a.mT @ a.conj()).mT),
    "bmm": lambda a, b: a.expand(3, 4, 5) @ b,
    "addmm": lambda a, b: torch.addmm(a[:, :1] * 2, a, b, alpha=2j, beta=1 + 1j),
    "addmm with real numbers": lambda a, b: (torch.addmm(a[:, :1], a, b), torch.addmm(a[:, :1], a, b, alpha=3, beta=0)),
    "baddbmm": lambda a, b: torch.baddbmm(a[:, :1], a.expand(2, 4, 5), b.expand(2, 5, 6), alpha=1j),
    "addbmm": lambda a, b: torch.addbmm(b[:4], a.expand(3, 4, 5), b.expand(3, 5, 6), beta=2j),
    "mv": lambda a, b: (a @ b[:, 0], torch.addmv(a[:, 0], a, b[:, 1], alpha=1j)),
    "dot": lambda a, b: (torch.dot(a[0], b[:, 0]), torch.vdot(a[0], b[:, 0]), torch.vdot(a[0].conj(), a[1].conj())),
    "cross": lambda a, b: torch.linalg.cross(a[:3], a[1:], dim=0),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, dtype: torch.dtype) -> None:
    agrees(PRODUCTS[name], torch.randn(4, 5, dtype=dtype), torch.randn(5, 6, dtype=dtype))


def test_products_keep_infinities() -> None:
    """For generated kernels alone: the host's BLAS returns NaN instead."""
    if host_sees_memory(torch.device(DEVICE)):
        pytest.skip("the host computes products here; with TORCH_BACKPLANE_DISCRETE=1 the device does")
    a = torch.tensor([[math.inf, 1], [1, 1]], dtype=C64, device=DEVICE)
    assert (a @ a)[0, 0].isinf()
    assert torch.addmm(a, a, a)[0, 0].isinf()


def put(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    x[:, index[:3]] = x[:, index[:3]] * 2j
    return x


INDEXING: dict[str, Callable[..., Any]] = {
    "index_select": lambda x, i: x.index_select(1, i),
    "gather": lambda x, i: x.gather(1, i.expand(4, 4)),
    "take": lambda x, i: x.take(i * 3),
    "index": lambda x, i: (x[:, i], x[i[:2], i[1:3]]),
    "index_put": put,
    "accumulate": lambda x, i: x.index_put_((i,), x[0].clone(), accumulate=True),
    "index_add": lambda x, i: x.index_add(1, i, x[:, :4] * 1j, alpha=2),
    "index_add with a complex factor": lambda x, i: x.index_add(1, i, x[:, :4], alpha=2j),
    "index_copy": lambda x, i: x.index_copy(1, i[:3], x[:, 2:]),
    "index_fill": lambda x, i: (x.index_fill(1, i, 1 + 2j), x.index_fill(1, i, 3)),
    "scatter": lambda x, i: (x.scatter(0, i.view(1, 4), 2j), x.scatter(1, i[:3].view(3, 1), x[:3])),
    "scatter_add": lambda x, i: x.scatter_add(0, i.view(1, 4), x),
    "masked_fill": lambda x, i: (x.masked_fill(x.real > 0, 1j), x.masked_fill(x.real > 0, torch.tensor(2j))),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
}


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str, dtype: torch.dtype) -> None:
    index = torch.tensor([2, 0, 1, 2])
    if name in ("index_put", "index_copy", "scatter"):
        index = torch.tensor([2, 0, 1, 3])  # with duplicate indices any value may stay
    agrees(INDEXING[name], torch.randn(4, 5, dtype=dtype), index)


def test_factories(dtype: torch.dtype) -> None:
    for make in (
        lambda device: torch.eye(3, 4, dtype=dtype, device=device),
        lambda device: torch.linspace(1, 2 + 3j, 7, dtype=dtype, device=device),
        lambda device: torch.logspace(0, 1j, 5, dtype=dtype, device=device),
        lambda device: torch.full((2, 3), 1 + 2j, dtype=dtype, device=device),
        lambda device: torch.eye(3, out=torch.empty(0, dtype=dtype, device=device)),
    ):
        torch.testing.assert_close(make(DEVICE).cpu(), make("cpu"))


def test_random_numbers_have_half_the_variance_in_each_part(dtype: torch.dtype) -> None:
    x = torch.randn(20_000, dtype=dtype, device=DEVICE).cpu()
    assert abs(x.real.var().item() - 0.5) < 0.02
    assert abs(x.imag.var().item() - 0.5) < 0.02
    assert abs(torch.mean(x.real * x.imag).item()) < 0.02
    y = torch.empty(20_000, dtype=dtype, device=DEVICE).normal_(3.0, 2.0).cpu()
    assert abs(y.mean().item() - 3) < 0.1


def test_gradients() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = torch.tanh(x @ w).sigmoid() * w.conj() / (x.abs() + 1)
        (y * y.conj()).real.sum().backward()
        return x.grad, w.grad

    agrees(run, torch.randn(4, 4, dtype=C64), torch.randn(4, 4, dtype=C64), rtol=1e-4, atol=1e-5)


def test_real_tensors_refuse_complex_numbers() -> None:
    x, index = torch.zeros(3), torch.tensor([1])
    for call in (
        lambda x, i: x.fill_(1j),
        lambda x, i: x.masked_fill(x == 0, 1j),
        lambda x, i: x.index_fill(0, i, 1j),
        lambda x, i: x.scatter(0, i, 1j),
        lambda x, i: x.add_(1j),
    ):
        with pytest.raises(RuntimeError) as expected:
            call(x, index)
        with pytest.raises(RuntimeError) as found:
            call(x.to(DEVICE), index.to(DEVICE))
        assert str(found.value).split("(")[0] == str(expected.value).split("(")[0]


def test_plan_is_reused_for_other_numbers() -> None:
    x = torch.randn(5, dtype=C64, device=DEVICE)
    mode = plans.mode()
    plans.set_mode("1")
    try:
        (x * 1j).cpu()
        before = plans.stats()["aten::mul.Tensor"]["planner_calls"]
        found = [(x * (k + 1j)).cpu() for k in range(5)]
        assert plans.stats()["aten::mul.Tensor"]["planner_calls"] == before
    finally:
        plans.set_mode(mode)
    for k in range(5):
        torch.testing.assert_close(found[k], x.cpu() * (k + 1j))


# PyTorch's CPU kernels of these do not support complex numbers. Our dropout does, and our sums do, as on CUDA.
WIDER = {"nn.functional.dropout", "nansum", "nanmean"}


def test_complex_input_is_refused_like_in_pytorch() -> None:
    """Our formulas could compute meaningless results for operators that PyTorch does not define for complex numbers."""
    taken = []
    for op in op_db:
        if C64 in op.dtypes or torch.float32 not in op.dtypes or op.full_name in WIDER:
            continue
        for sample in list(op.sample_inputs("cpu", torch.float32))[:3]:
            arguments = (sample.input, sample.args, sample.kwargs)
            tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
            if any(one.layout != torch.strided or one.numel() == 0 for one in tensors):
                continue
            first, rest, named = tree_map_only(
                torch.Tensor, lambda t: t.detach().to(C64) if t.is_floating_point() else t.detach(), arguments
            )
            if _takes(op, first, rest, named):
                continue
            if _takes(op, *tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), (first, rest, named))):
                taken.append(op.full_name)
                break
    assert not taken, taken


def _takes(op: Any, first: Any, rest: Any, named: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op(first, *rest, **named)
    except Exception:
        return False
    return True
