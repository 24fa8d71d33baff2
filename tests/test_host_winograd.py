"""Convolutions on the CPU by Winograd's way: right for any sizes and threads, where it can be, and where it pays."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torch_backplane
from torch_backplane import _C

assert torch_backplane.__version__
ops, aten = torch.ops.backplane, torch.ops.aten
pytestmark = pytest.mark.skipif(
    not _C.host_has_winograd(), reason="this processor has no AVX-512, or PyTorch no products of blocks"
)


def settings(padding: list[int], **others: Any) -> tuple[Any, ...]:
    given = {"stride": [1, 1], "padding": padding, "dilation": [1, 1], "transposed": False}
    return tuple((given | {"output_padding": [0, 0], "groups": 1} | others).values())


def computed(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, grad: torch.Tensor, how: tuple[Any, ...], **ways: Any
) -> list[torch.Tensor]:
    """The convolution and its gradients, in places that were not numbers before."""
    results = [torch.full_like(one, torch.nan) for one in (grad, x, w, w[:, 0, 0, 0])]
    ops.host_convolution(x, w, b, *how, out=results[0], **ways)
    of = dict(zip(("of_input", "of_weight", "of_bias"), results[1:], strict=True))
    ops.host_convolution_backward(grad, x, w, *how, **of, **ways)
    return results


def expected(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, grad: torch.Tensor, how: tuple[Any, ...]
) -> list[torch.Tensor]:
    x, w, grad = x.double(), w.double(), grad.double()
    out = aten.convolution(x, w, None if b is None else b.double(), *how)
    return [out, *aten.convolution_backward(grad, x, w, [w.shape[0]], *how, [True] * 3)]


def close(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, exact in zip(found, right, strict=True):
        assert (one - exact).abs().max() <= 3e-6 * exact.abs().max()


def names(function: Callable[[], Any]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        function()
    return {event.name for event in found.events()}


def is_pytorchs(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, how: tuple[Any, ...], out: torch.Tensor, asked: bool | None
) -> bool:
    """Whether PyTorch computed `out`."""
    return "aten::convolution" in names(lambda: ops.host_convolution(x, w, b, *how, out=out, winograd=asked))


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 9])
def test_any_sizes(count: int) -> None:
    draw = random.Random(count)
    torch.manual_seed(count)
    with threads(count):
        for number in range(60):
            batch, channels = draw.randint(1, 5), draw.choice([1, 3, 16, 17, 33])
            wanted = draw.choice([1, 2, 7, 16, 35])
            padding = [draw.randint(0, 2), draw.randint(0, 2)]
            sizes = [draw.randint(max(1, 3 - 2 * beside), most) for beside, most in zip(padding, (40, 70), strict=True)]
            x, w = torch.randn(batch, channels, *sizes), torch.randn(wanted, channels, 3, 3)
            b = torch.randn(wanted) if number % 2 else None
            how = settings(padding)
            grad = torch.randn(aten.convolution(x, w, b, *how).shape)
            close(computed(x, w, b, grad, how, winograd=True), expected(x, w, b, grad, how))


def test_gradients_of_biases_alone() -> None:
    for shape in ((2, 3, 7), (2, 3, 4, 5), (2, 3, 4, 5, 6)):
        rank = len(shape) - 2
        x, w, grad = torch.randn(shape), torch.randn(3, 3, *[1] * rank), torch.randn(shape)
        how = settings([0] * rank, stride=[1] * rank, dilation=[1] * rank, output_padding=[0] * rank)
        of_bias = torch.full((3,), torch.nan)
        ops.host_convolution_backward(grad, x, w, *how, of_input=None, of_weight=None, of_bias=of_bias)
        torch.testing.assert_close(of_bias, grad.sum([0, *range(2, rank + 2)]))


def test_many_channels_and_one_padding_for_both_dimensions() -> None:
    torch.manual_seed(0)
    x, w, grad = torch.randn(2, 400, 7, 5), torch.randn(390, 400, 3, 3) / 60, torch.randn(2, 390, 7, 5)
    how = settings([1], stride=[1], dilation=[1])
    close(computed(x, w, None, grad, how, winograd=True), expected(x, w, None, grad, how))


def test_who_computes() -> None:
    """It can be asked for, and is chosen where it pays."""
    small = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3), torch.randn(1, 3, 5, 5)
    large = torch.randn(4, 64, 32, 32), torch.randn(64, 64, 3, 3), torch.randn(4, 64, 32, 32)
    how = settings([1, 1])
    for (x, w, grad), pays in ((small, False), (large, True), (small, False)):
        for asked, is_winograds in ((None, pays), (True, True), (False, False)):
            told = names(lambda x=x, w=w, grad=grad, asked=asked: computed(x, w, None, grad, how, winograd=asked))
            assert ("aten::convolution" not in told) == is_winograds, (x.shape, asked)
            assert ("aten::convolution_backward" not in told) == is_winograds


def test_where_it_cannot_be_pytorch_computes() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 64, 32, 32), torch.randn(64, 64, 3, 3) / 24, torch.randn(64)
    last = torch.channels_last
    cases: list[tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]] = [
        (x, w, settings([1, 1], stride=[2, 1])),
        (x, w, settings([2, 2], dilation=[2, 2])),
        (x, w, settings([3, 1])),
        (x, w, settings([1, 1], transposed=True)),
        (x, w[:, :32].contiguous(), settings([1, 1], groups=2)),
        (x, w[:, :, :, :1].contiguous(), settings([1, 0])),
        (x.contiguous(memory_format=last), w, settings([1, 1])),
        (x, w.contiguous(memory_format=last), settings([1, 1])),
        (x[:, :, ::2], w, settings([1, 1])),
        (x[:0], w, settings([1, 1])),
        (x.double(), w.double(), settings([1, 1])),
        (x[:, :, 0], w[:, :, 0], settings([1], stride=[1], dilation=[1], output_padding=[0])),
    ]
    for x, w, how in cases:
        right = aten.convolution(x, w, b.to(x.dtype), *how)
        out = torch.full_like(right, torch.nan)
        assert is_pytorchs(x, w, b.to(x.dtype), how, out, asked=True)
        torch.testing.assert_close(out, right)
    x, how = torch.randn(4, 64, 32, 32), settings([1, 1])
    right = aten.convolution(x, w := torch.randn(64, 64, 3, 3) / 24, b, *how)
    for asked in (None, True):  # and where results are wanted in another order, or without oneDNN
        out = torch.empty_like(right, memory_format=last)
        assert is_pytorchs(x, w, b, how, out, asked)
        torch.testing.assert_close(out, right)
        out = torch.full_like(right, torch.nan)
        with torch.backends.mkldnn.flags(enabled=False):
            assert is_pytorchs(x, w, b, how, out, asked)
        torch.testing.assert_close(out, right)


def test_what_pytorch_refuses_is_refused_and_good_calls_go_on() -> None:
    x, w, b = torch.randn(2, 64, 32, 32), torch.randn(64, 64, 3, 3), torch.randn(64)
    how, right = settings([1, 1]), aten.convolution(x, w, b, *settings([1, 1]))
    out = torch.empty_like(right)
    for _ in range(2):
        ops.host_convolution(x, w, b, *how, out=out)
        torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-4)
        for wrong in ((x, w[:, :5].contiguous(), b), (x, w, b[:5]), (x, w, b.double())):
            with pytest.raises(RuntimeError):
                ops.host_convolution(*wrong, *how, out=out)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38, 1e19])
def test_what_is_not_finite_is_where_pytorch_has_it(value: float) -> None:
    """In results whose windows have it, in no neighbours; also where sums on the way are too large, and theirs not."""
    torch.manual_seed(0)
    x, w, grad = torch.randn(3, 20, 9, 7), torch.randn(18, 20, 3, 3) / 100, torch.randn(3, 18, 9, 7)
    how = settings([1, 1])
    for name in ("image", "gradient", "weight", "nothing"):
        given = {"image": x.clone(), "weight": w.clone(), "gradient": grad.clone()}
        if name in given:
            given[name].flatten()[torch.randperm(given[name].numel())[:3]] = value
        spoilt = (given["image"], given["weight"], None, given["gradient"], how)
        ours, theirs = computed(*spoilt, winograd=True), computed(*spoilt, winograd=False)
        for one, exact in zip(ours, theirs, strict=True):
            assert torch.equal(one.isfinite(), exact.isfinite())
            if not exact.isfinite().all():
                assert torch.equal(one.isnan(), exact.isnan())
            else:
                assert (one - exact).abs().max() <= 3e-6 * exact.abs().max()


def test_several_threads_at_once() -> None:
    torch.manual_seed(0)
    cases = []
    for channels, side in ((64, 8), (16, 40), (130, 5)):
        x, w = torch.randn(3, channels, side, side), torch.randn(channels, channels, 3, 3) / channels
        grad, how = torch.randn_like(x), settings([1, 1])
        cases.append(((x, w, None, grad, how), expected(x, w, None, grad, how)))
    wrong: list[BaseException] = []

    def go(first: int) -> None:
        try:
            for number in range(12):
                given, right = cases[(first + number) % 3]
                close(computed(*given, winograd=True), right)
        except BaseException as error:
            wrong.append(error)

    workers = [threading.Thread(target=go, args=(first,)) for first in range(3)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    assert not wrong


def test_host_devices_have_it() -> None:
    torch.manual_seed(0)
    for channels, side, pays in ((64, 32, True), (3, 5, False), (64, 31, True)):
        x, w = torch.randn(4, channels, side, side), torch.randn(channels, channels, 3, 3) / channels
        given = [one.to("bp").requires_grad_() for one in (x, w)]
        found = []

        def train(given: list[torch.Tensor] = given, found: list[torch.Tensor] = found) -> None:
            out = torch.nn.functional.conv2d(*given, padding=1)
            found[:] = [out.detach(), *torch.autograd.grad(out.square().sum(), given)]

        told = names(train)
        assert ("aten::mkldnn_convolution" not in told) == pays
        right = aten.convolution(x.double(), w.double(), None, *settings([1, 1]))
        close([one.cpu() for one in found], expected(x, w, None, 2 * right, settings([1, 1]))[:3])
