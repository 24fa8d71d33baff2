"""Results in given memory with other dtypes and shapes than the operator would choose, and PyTorch's errors for them.

A sample: `python -m torch_backplane conformance --forms` covers the whole operator database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from agreement import DEVICE, agrees, need, on_device, refused_alike, to_cpu


def places_for(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape[1:], dtype=torch.int64, device=values.device)


# Each computes a result of `a` and `b`, which are float16, and writes it to `out`.
OPERATORS: dict[str, Callable[..., Any]] = {
    "exp": lambda a, b, out: torch.exp(a, out=out),
    "add": lambda a, b, out: torch.add(a, b, out=out),
    "addcmul": lambda a, b, out: torch.addcmul(a, a, b, out=out),
    "lerp": lambda a, b, out: torch.lerp(a, b, 0.3, out=out),
    "clamp": lambda a, b, out: torch.clamp(a, 0.5, out=out),
    "neg": lambda a, b, out: torch.neg(a, out=out),
    "round": lambda a, b, out: torch.round(a, out=out),
    "maximum": lambda a, b, out: torch.maximum(a, b, out=out),
    "eq": lambda a, b, out: torch.eq(a, b, out=out),
    "where": lambda a, b, out: torch.where(a > b, a, b, out=out),
    "sum": lambda a, b, out: torch.sum(a, 0, keepdim=True, out=out),
    "prod": lambda a, b, out: torch.prod(a, 0, keepdim=True, out=out),
    "mean": lambda a, b, out: torch.mean(a, 0, keepdim=True, out=out),
    "var": lambda a, b, out: torch.var(a, 0, out=out),
    "amax": lambda a, b, out: torch.amax(a, 0, out=out),
    "any": lambda a, b, out: torch.any(a, 0, out=out),
    "argmax": lambda a, b, out: torch.argmax(a, 0, out=out),
    "logsumexp": lambda a, b, out: torch.logsumexp(a, 0, out=out),
    "norm": lambda a, b, out: torch.linalg.vector_norm(a, 2, 0, out=out),
    "cumsum": lambda a, b, out: torch.cumsum(a, 0, out=out),
    "cumprod": lambda a, b, out: torch.cumprod(a, 0, out=out),
    "logcumsumexp": lambda a, b, out: torch.logcumsumexp(a, 0, out=out),
    "kthvalue": lambda a, b, out: torch.kthvalue(a, 1, 0, out=out if out is None else (out, places_for(a)))[0],
    "softmax": lambda a, b, out: torch.softmax(a, 0, out=out),
    "mm": lambda a, b, out: torch.mm(a, b, out=out),
    "cat": lambda a, b, out: torch.cat([a, b], out=out),
    "gather": lambda a, b, out: torch.gather(a, 0, torch.zeros_like(a, dtype=torch.int64), out=out),
    "index_select": lambda a, b, out: torch.index_select(a, 0, a.argmax(0), out=out),
    "tril": lambda a, b, out: torch.tril(a, out=out),
    "mse_loss": lambda a, b, out: torch.ops.aten.mse_loss.out(a, b, 0, out=out),
    "leaky_relu": lambda a, b, out: torch.ops.aten.leaky_relu.out(a, 0.1, out=out),
    "reflection_pad": lambda a, b, out: torch.ops.aten.reflection_pad1d.out(a, [1, 1], out=out),
}
OTHER_DTYPES = [torch.float32, torch.float64, torch.int32, torch.bool]


def outcome(function: Callable[..., Any], *arguments: Any) -> tuple[type | None, Any]:
    """Returns (type of the error, None) or (None, the arguments afterwards)."""
    try:
        function(*arguments)
    except (RuntimeError, IndexError, TypeError) as error:
        return type(error), None
    return None, to_cpu(arguments)


def same_outcome(function: Callable[..., Any], *arguments: Any, **tolerances: float) -> None:
    """Asserts that the device, planned and replayed, raises the CPU's type of error or leaves the same tensors."""
    found = [outcome(function, *on_device(arguments)) for _ in range(2)]
    error, after = outcome(function, *arguments)
    for one in found:
        assert one[0] == error, f"{one[0]}, and on the CPU {error}"
        if error is None:
            torch.testing.assert_close(one[1], after, equal_nan=True, **tolerances)


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_out_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    """Results agree up to float16's rounding. If the CPU rounds to float16 before it writes, so does the device."""
    a, b = torch.rand(4, 4).half() * 4, torch.rand(4, 4).half()
    operator, shape = OPERATORS[name], SHAPES.get(name)
    if shape is None:
        shape = operator(a, b, None).shape
    same_outcome(operator, a, b, torch.zeros(shape, dtype=dtype), atol=1e-3, rtol=2e-3)
    out = torch.zeros(shape, dtype=dtype)
    if outcome(operator, a, b, out)[0] is None and torch.equal(out.half().to(dtype), out):
        found = torch.zeros(shape, dtype=dtype, device=DEVICE)
        operator(a.to(DEVICE), b.to(DEVICE), found)
        assert torch.equal(found.half().to(dtype), found)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OPERATORS)
def test_expanded_out_of_another_shape(name: str) -> None:
    """Its elements no longer share memory once it is resized. index_select and others refuse it before that."""
    a, b = torch.rand(4, 4).half() * 4, torch.rand(4, 4).half()
    for shape in ((3, 5), (1,), (0,), (2, 2, 2)):
        out = torch.ones((1,) * len(shape), dtype=torch.float16).expand(shape)
        same_outcome(OPERATORS[name], a, b, out, atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_out_of_complex_numbers(name: str, dtype: torch.dtype) -> None:
    """Norms are real. For sums, but not for norms, the dtype of `out=` selects the dtype of the computation."""
    a, b = torch.randn(4, 4, dtype=torch.complex64), torch.randn(4, 4, dtype=torch.complex64)
    shape = SHAPES.get(name)
    if shape is None:
        reference = outcome(OPERATORS[name], a, b, torch.zeros(0, dtype=torch.complex64))[1]
        shape = reference[2].shape if reference else (4,)
    same_outcome(OPERATORS[name], a, b, torch.zeros(shape, dtype=dtype), rtol=1e-4, atol=1e-5)


# Shapes of results of operators above that have no functional form.
SHAPES = {"mse_loss": (4, 4), "leaky_relu": (4, 4), "reflection_pad": (4, 6)}


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(torch.add, torch.float64), (torch.mul, torch.float32), (torch.add, torch.int64)],
)
def test_overflow_does_not_depend_on_the_dtype_of_out(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """33000 + 33000 is infinite in float16, and 100 + 100 negative in int8, whatever the dtype of `out`."""
    source = torch.tensor([33000.0, 2.0]).half() if dtype.is_floating_point else torch.tensor([100, 2]).to(torch.int8)
    agrees(lambda a, out: function(a, a, out=out), source, torch.zeros(2, dtype=dtype))


RANGES: dict[str, Callable[..., Any]] = {
    "arange": lambda out: torch.arange(4, out=out),
    "range": lambda out: torch.ops.aten.range.out(0, 3, out=out),
    "linspace": lambda out: torch.linspace(0, 1, 4, out=out),
    "logspace": lambda out: torch.logspace(0, 1, 4, out=out),
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_write_only_to_the_given_view(name: str) -> None:
    for view in (
        lambda x: x.narrow(1, 1, 2), lambda x: x[:, ::2], lambda x: x.t()[1:], lambda x: x[0], lambda x: x[:0, 0],
    ):  # fmt: skip
        x = torch.full((2, 3), 7.0)
        given = x.to(DEVICE)
        for _ in range(2):
            RANGES[name](view(given))
        RANGES[name](view(x))
        torch.testing.assert_close(given.cpu(), x)


OVERLAPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "copy behind": lambda x: x[1:].copy_(x[:-1]),
    "copy of another dtype behind": lambda x: x[1:].copy_(x.view(torch.int32)[:-1]),
    "copy to expanded": lambda x: x[:1].expand(4).copy_(x[:4]),
    "copy to itself": lambda x: x.copy_(x),
    "cumsum behind": lambda x: torch.cumsum(x[:-1], 0, out=x[1:]),
    "cumsum to itself": lambda x: torch.cumsum(x, 0, out=x),
    "flip": lambda x: torch.add(x[::2], x[1::2], out=x[:4]),
    "add behind": lambda x: x[1:].add_(x[:-1]),
    "add expanded": lambda x: x[:1].expand(4).add_(1),
    "index_select to itself": lambda x: torch.index_select(x, 0, torch.arange(7, -1, -1, device=x.device), out=x),
    "gather behind": lambda x: torch.gather(x[:4], 0, torch.zeros(4, dtype=torch.int64, device=x.device), out=x[1:5]),
    "take to itself": lambda x: torch.take(x, torch.arange(7, -1, -1, device=x.device), out=x),
    "cat to itself": lambda x: torch.cat([x[:4], x[4:]], out=x),
    "sort to itself": lambda x: torch.sort(-x, out=(x, torch.zeros(8, dtype=torch.int64, device=x.device))),
    "softmax to itself": lambda x: torch.softmax(x, 0, out=x),
    "scatter into expanded": lambda x: x[:1].expand(4).scatter_(0, torch.arange(4, device=x.device), 1.0),
    "index_add into expanded": lambda x: x[:1].expand(4).index_add_(0, torch.arange(4, device=x.device), x[4:]),
    "fill expanded": lambda x: x[2:3].expand(4).fill_(3),
    "fill with an element": lambda x: x[:4].fill_(x[2]),
    "fill expanded with an element": lambda x: x[2:3].expand(4).fill_(x[5]),
    "zero expanded": lambda x: x[2:3].expand(2, 4).zero_(),
    "masked_fill expanded": lambda x: x[2:3].expand(4).masked_fill_(torch.arange(4, device=x.device) == 1, 9.0),
    "masked_fill expanded rows": lambda x: x[:2, None].expand(2, 3).masked_fill_(
        torch.tensor([[True, False, False], [False, False, False]], device=x.device), 9.0),
    "masked_fill of a tensor": lambda x: x[2:3].expand(4).masked_fill_(
        torch.arange(4, device=x.device) == 3, torch.tensor(4.0, device=x.device)),
    "masked_fill with an element": lambda x: x[:4].masked_fill_(torch.arange(4, device=x.device) == 3, x[1]),
    "uniform into expanded": lambda x: x[:1].expand(4).uniform_(0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERLAPS)
@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded")
def test_overlapping_arguments_behave_as_on_the_cpu(name: str) -> None:
    same_outcome(OVERLAPS[name], torch.arange(1.0, 9.0))


# Here PyTorch's CPU kernels read elements that they have already overwritten.
TAKEN_APART: dict[str, tuple[Callable[..., Any], Callable[[torch.Tensor], Any]]] = {
    "mm": (lambda x, out: torch.mm(x[:4].view(2, 2), x[4:].view(2, 2), out=out), lambda x: x[:4].view(2, 2)),
    "sum": (lambda x, out: torch.sum(x.view(2, 4), 0, out=out), lambda x: x[:4]),
    "tril": (lambda x, out: torch.tril(x[:4].view(2, 2).t(), out=out), lambda x: x[:4].view(2, 2)),
    "cummax": (lambda x, out: torch.cummax(x[:4].flip(0) * x[4:], 0, out=(out, x[:4].long()))[0], lambda x: x[1:5]),
    "cummin behind": (lambda x, out: torch.cummin(-x[:4], 0, out=(out, x[:4].long()))[0], lambda x: x[:4]),
    "cummin": (lambda x, out: torch.cummin(x[:4], 0, out=(out, x[:4].long()))[0], lambda x: x[1:5]),
    "pad": (lambda x, out: torch.ops.aten.reflection_pad1d.out(x[:6].view(1, 6), [1, 1], out=out),
            lambda x: x.view(1, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN_APART)
def test_operands_are_read_before_they_are_overwritten(name: str) -> None:
    function, place = TAKEN_APART[name]
    x = torch.arange(1.0, 9.0)
    right = function(x, torch.zeros_like(place(x)))
    for _ in range(2):
        given = x.to(DEVICE)
        torch.testing.assert_close(function(given, place(given)).cpu(), right)


REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "alpha of bool": lambda x: torch.add(x, x, alpha=True),
    "alpha of a fraction": lambda x: torch.add(x.int(), x.int(), alpha=0.5),
    "sub of bools": lambda x: torch.sub(x > 1, x > 2),
    "neg to float16": lambda x: torch.neg(x, out=x.half()),
    "round to float16": lambda x: torch.round(x, out=x.half()),
    "tanh to int": lambda x: torch.tanh(x, out=x.int()),
    "argmax to float": lambda x: torch.argmax(x, 0, out=x[0].clone()),
    "pads of too many dimensions": lambda x: F.pad(x.view(2, 4), (1, 1, 1, 1, 1, 1)),
    "reflection of too much": lambda x: F.pad(x.view(2, 4), (4, 4), mode="reflect"),
    "kthvalue of another dtype": lambda x: torch.kthvalue(x, 2, out=(x[0].half(), torch.zeros_like(x[0]).long())),
    "softmax of another dtype": lambda x: torch.softmax(x, 0, out=x.half()),
    "isin to float": lambda x: torch.isin(x, x, out=x.clone()),
    "bucketize to float": lambda x: torch.bucketize(x, x.view(-1), out=x.clone()),
    "bucketize of nothing to float": lambda x: torch.bucketize(x[:0], x.view(-1), out=x[:0].clone()),
    "nan_to_num to float16": lambda x: torch.nan_to_num(x, out=x.half()),
    "conj_physical to float": lambda x: torch.conj_physical(x.int(), out=x.clone()),
    "index_add to float16": lambda x: torch.index_add(x, 0, x.argmax(0), x, out=x.half()),
    "index_add of a number to float16": lambda x: torch.index_add(x[0], 0, x[:1].int(), x[0], out=x[0].half()),
    "index_fill by int32": lambda x: x.index_fill(0, x[:2].int(), 0.5),
    "index_fill by nothing of int32": lambda x: x.index_fill(0, x[:0].int(), 0.5),
    "renorm of another dimension": lambda x: torch.renorm(x.view(2, 4), 2, -3, 1.5),
    "roll of other dimensions": lambda x: torch.roll(x.view(2, 4), 2, [0, 1]),
    "roll of nothing in other dimensions": lambda x: torch.roll(x[:0], 2, [0, 1]),
    "put_ of nothing to an expanded one": lambda x: x[:1].expand(3).put_(x[:0].long(), x[:0]),
    "polar of two dtypes": lambda x: torch.polar(x, x.half()),
    "complex of bfloat16": lambda x: torch.complex(x.bfloat16(), x.bfloat16()),
    "polar of bfloat16": lambda x: torch.polar(x.bfloat16(), x.bfloat16()),
    "complex of two dtypes": lambda x: torch.complex(x, x.half()),
    "cross of two dtypes": lambda x: torch.linalg.cross(x[:3], x[:3].half()),
    "binary_cross_entropy of two dtypes": lambda x: F.binary_cross_entropy(x / 9, x.half() / 9),
    "binary_cross_entropy of nothing of two dtypes": lambda x: F.binary_cross_entropy(x[:0], x[:0].bool()),
    "soft_margin_loss of integers": lambda x: F.soft_margin_loss(x.int(), x),
    "soft_margin_loss of a row": lambda x: F.soft_margin_loss(x, x.expand(2, 8)),
    "huber_loss of bools": lambda x: F.huber_loss(x > 2, x),
    "huber_loss with no delta": lambda x: F.huber_loss(x, x, delta=0.0),
    "mvlgamma of no dimensions": lambda x: torch.mvlgamma(x + 9, 0),
    "rsub of bool alpha": lambda x: torch.rsub(x, x, alpha=True),
    "addr with a bool": lambda x: torch.addr(x.view(2, 4), x[:2], x[:4], alpha=True),
    "max_pool3d to float64": lambda x: torch.ops.aten.max_pool3d_with_indices.out(
        x.view(1, 2, 2, 2), [2, 2, 2], out=x.double(), indices=x.long()),
    "gradients of max_pool2d by int32": lambda x: torch.ops.aten.max_pool2d_with_indices_backward(
        x[:2].view(2, 1, 1), x.view(2, 2, 2), [2, 2], [2, 2], [0, 0], [1, 1], False, x[:2].view(2, 1, 1).int()),
    "nll_loss to float64": lambda x: torch.ops.aten.nll_loss_forward.output(
        x.view(2, 4), x[:2].long(), None, 1, -100, output=x[0].double(), total_weight=x[0].clone()),
    "nll_loss with weights of another dtype": lambda x: F.nll_loss(x.view(2, 4), x[:2].long(), x[:4].double()),
    "gradients of nll_loss of another dtype": lambda x: torch.ops.aten.nll_loss_backward(
        x[0].double(), x.view(2, 4), x[:2].long(), None, 1, -100, x[1]),
    "group norm with weights of float64": lambda x: F.group_norm(x.view(1, 2, 4), 1, x[:2].double(), x[:2].double()),
    "group norm with weights of float16": lambda x: F.group_norm(x.view(1, 2, 4), 1, x[:2].half(), x[:2].half()),
    "group norm with a bias of float16": lambda x: F.group_norm(x.view(1, 2, 4), 1, x[:2], x[:2].half()),
    "layer norm with weights of float16": lambda x: F.layer_norm(x.view(2, 4), [4], x[:4].half(), x[:4].half()),
    "norm to float64": lambda x: torch.ops.aten.norm.out(x, 2, [0], out=x[0].double()),
    "norm to complex64": lambda x: torch.ops.aten.norm.out(x.cfloat(), 2, [0], out=x[0].cfloat()),
    "norm in float64 to float32": lambda x: torch.ops.aten.norm.dtype_out(
        x, 2, [0], False, dtype=torch.float64, out=x[0].clone()),
    "addr_ of a row": lambda x: x.addr_(x[:2].clone(), x.clone()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_of_structured_operators(name: str) -> None:
    if "float64" in name or "another dtype" in name:
        need(torch.float64)
    refused_alike(REFUSED[name], torch.arange(1.0, 9.0))


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "leaky_relu": lambda x: F.leaky_relu_(x, -0.5),
    "elu": lambda x: F.elu_(x, -0.5),
    "celu": lambda x: F.celu_(x, -0.5),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_of_negative_slopes_in_place_are_refused(name: str) -> None:
    for device in ("cpu", DEVICE):
        x = torch.tensor([-1.0, 2.0], device=device, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"In-place .* backward calculation is triggered with a negative slope"):
            IN_PLACE[name](x.clone()).sum().backward()


SELVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "expanded": lambda x: (x.expand(3, *x.shape), x.expand(3, *x.shape)),
    "shifted by no step": lambda x: (x.expand(3, *x.shape)[1:], x.expand(3, *x.shape)[:-1]),
    "transposed": lambda x: (x.mT, x.mT),
}


@pytest.mark.parametrize("name", SELVES)
def test_copy_of_a_tensor_to_itself(name: str) -> None:
    """The copy does nothing, even if elements share memory."""
    x = torch.randn(2, 5, device=DEVICE)
    before = x.clone()
    destination, source = SELVES[name](x)
    for _ in range(2):
        destination.copy_(source)
    assert torch.equal(x, before)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        x[:1].expand(3, 5).copy_(torch.ones(3, 5, device=DEVICE))


def test_bernoulli_of_expanded_probabilities() -> None:
    chances = torch.tensor([0.0, 1.0, 1.0])
    for given in (chances.expand(4, 3), chances.repeat(2)[::2].expand(2, 3), chances):
        there = given.to(DEVICE).expand(given.shape) if 0 not in given.stride() else chances.to(DEVICE).expand(4, 3)
        found = torch.bernoulli(there)
        assert found.is_contiguous()
        assert torch.equal(found.cpu() > 0, there.cpu() > 0)
        assert torch.equal(torch.bernoulli(there.clone().requires_grad_()).cpu() > 0, there.cpu() > 0)


@pytest.mark.parametrize("correction", [-3, -1, 0, 1, 2])
@pytest.mark.parametrize("name", ["var", "std", "var_mean", "std_mean"])
def test_variance_of_empty_tensors_is_nan(name: str, correction: int) -> None:
    function = getattr(torch, name)
    for dim in (0, (0, 1), None):
        agrees(lambda x, dim=dim: function(x, dim=dim, correction=correction), torch.zeros(0, 2))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norm_of_half_precision_with_weights_of_float32(layout: torch.memory_format) -> None:
    x, w = torch.randn(2, 4, 3, 3).half().to(memory_format=layout), torch.rand(4)
    agrees(lambda x, w: F.group_norm(x, 2, w, w), x, w)
    agrees(lambda x, w: torch.native_group_norm(x.contiguous(memory_format=layout), w, w, 2, 4, 9, 2, 1e-5), x, w)


@pytest.mark.parametrize("reduction", [0, 1, 2, 3, -3])
def test_nll_loss_of_one_row(reduction: int) -> None:
    """Without a reduction the total weight is that of a sum. Unknown reductions are sums."""
    loss, backward = torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss_backward
    for target in (2, -100):
        agrees(lambda x, t, w: loss(x, t, w, reduction, -100), torch.randn(4), torch.tensor(target), torch.rand(4))
        agrees(lambda g, x, t, w: backward(g, x, t, None, reduction, -100, w),
               torch.tensor(2.0), torch.randn(4), torch.tensor(target), torch.tensor(1.0))  # fmt: skip


def test_losses_have_the_dtype_of_the_input() -> None:
    half, number = torch.randn(3).bfloat16(), torch.tensor(2.0)
    for function in (F.huber_loss, F.soft_margin_loss):
        for reduction in ("none", "mean", "sum"):
            for first, second in ((half, number), (half, half.float()), (half.float(), half)):
                expected = function(first, second, reduction=reduction)
                found = function(first.to(DEVICE), second.to(DEVICE), reduction=reduction)
                assert found.dtype == expected.dtype
                torch.testing.assert_close(found.cpu(), expected, atol=0.05, rtol=0.05)


def test_strides_of_quotients_are_those_of_the_cpu() -> None:
    a, b = torch.rand(5, 2, 3).mT, torch.rand(5, 3, 2) + 1
    for function in (torch.floor_divide, torch.fmod, torch.remainder, torch.true_divide, torch.atan2):
        for first, second in ((a, b), (b, a)):
            there = [on_device(first), on_device(second)]
            assert function(*there).stride() == function(first, second).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64], ids=str)
def test_addr(dtype: torch.dtype) -> None:
    x, v, w = torch.randn(3, 4).to(dtype), torch.randn(3).to(dtype), torch.randn(4).to(dtype)
    rounding = {"atol": 0.05, "rtol": 0.02} if dtype == torch.bfloat16 else {}
    for beta, alpha in ((1, 1), (0.5, -2), (0, 3)):
        scales = {"beta": beta, "alpha": alpha}
        agrees(lambda x, v, w, scales=scales: torch.addr(x, v, w, **scales), x, v, w, **rounding)
        agrees(lambda x, v, w, scales=scales: torch.addr(x[0], v, w, **scales), x, v, w, **rounding)
        agrees(lambda x, v, w, scales=scales: x.addr_(v, w, **scales), x, v, w, **rounding)
    agrees(lambda x, v, w: torch.addr(x, v, w, beta=0), torch.full_like(x, torch.nan), v, w, **rounding)


OPERANDS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: torch.add(a, b, out=a),
    "lerp": lambda a, b: torch.lerp(b, a, 0.5, out=a),
    "where": lambda a, b: torch.where(b > 0, a, b, out=a),
    "ldexp": lambda a, b: torch.ldexp(a, b, out=a),
    "clamp": lambda a, b: torch.clamp(a, b, out=a),
    "eq": lambda a, b: torch.eq(a, b, out=a),
    "addcmul": lambda a, b: torch.addcmul(b, a, b, out=a),
    "floor_divide": lambda a, b: torch.floor_divide(b, a, out=a),
    "cross": lambda a, b: torch.linalg.cross(a, b, out=a),
    "nextafter": lambda a, b: torch.nextafter(a, b, out=a),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_as_out_are_not_resized(name: str) -> None:
    for rows in (1, 4, 1):
        same_outcome(OPERANDS[name], torch.rand(rows, 3), torch.rand(4, 3))
