"""Results of PyTorch's CPU kernels are computed where they are wanted and not copied there; right wherever they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import torch_backplane

assert torch_backplane.__version__
ops, aten = torch.ops.backplane, torch.ops.aten


def allocated(function: Callable[[], Any]) -> int:
    """Bytes of the CPU's memory that operators ask for meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    return sum(max(0, event.self_cpu_memory_usage) for event in found.events())


def unset(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [torch.full_like(one, torch.nan) for one in tensors]


# Groups, and sizes of which results, weights and images have as many elements as another.
CONVOLUTIONS = {
    "plain": ((4, 64, 32, 32), (64, 64, 3, 3), 1, False, 1),
    "of as many weights as elements": ((4, 64, 12, 12), (64, 64, 3, 3), 1, False, 1),
    "strided": ((4, 32, 32, 32), (64, 32, 3, 3), 2, False, 1),
    "of groups": ((4, 64, 16, 16), (64, 16, 3, 3), 1, False, 4),
    "transposed": ((4, 64, 16, 16), (64, 32, 3, 3), 1, True, 1),
    "little": ((1, 2, 5, 5), (3, 2, 3, 3), 1, False, 1),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("winograd", [False, None], ids=["direct", "as pays"])
def test_convolutions(name: str, last: bool, winograd: bool | None) -> None:
    image, kernel, stride, transposed, groups = CONVOLUTIONS[name]
    settings = ([stride] * 2, [1, 1], [1, 1], transposed, [0, 0], groups)
    near = {} if winograd is False else {"rtol": 1e-4, "atol": 1e-4}
    for seed in (0, 1):
        torch.manual_seed(seed)
        x, w, b = torch.randn(image), torch.randn(kernel) / 10, torch.randn(kernel[1] if transposed else kernel[0])
        if last:
            x, w = (one.contiguous(memory_format=torch.channels_last) for one in (x, w))
        expected = aten.convolution(x, w, b, *settings)
        for given in (expected, torch.empty_like(expected, memory_format=torch.contiguous_format)):
            (out,) = unset(given)
            ops.host_convolution(x, w, b, *settings, out=out, winograd=winograd)
            torch.testing.assert_close(out, expected, **near)
        grad = torch.randn(expected.shape).to(memory_format=torch.channels_last if last else torch.contiguous_format)
        right = aten.convolution_backward(grad, x, w, [b.numel()], *settings, [True] * 3)
        for wanted in ((True, True, True), (True, False, False), (False, True, True), (False, True, False)):
            places = [one if want else None for one, want in zip(unset(x, w, b), wanted, strict=True)]
            of = dict(zip(("of_input", "of_weight", "of_bias"), places, strict=True))
            ops.host_convolution_backward(grad, x, w, *settings, **of, winograd=winograd)
            for place, one in zip(places, right, strict=True):
                if place is not None:
                    assert (place - one).abs().max() <= 3e-6 * one.abs().max()


def layer(mode: int, directions: int, time: int, batch: int, features: int, hidden: int) -> tuple[list[Any], list[Any]]:
    """Its arguments, and places for its results."""
    gates = (1, 1, 4, 3)[mode]
    states = [torch.randn(directions, batch, hidden), torch.randn(directions, batch, hidden) if mode == 2 else None]
    params = []
    for _ in range(directions):
        params += [torch.randn(gates * hidden, size) / size**0.5 for size in (features, hidden)]
        params += [torch.randn(gates * hidden) for _ in range(2)]
    bytes_ = 16 * (4 * batch * (time + 1) * (hidden + features + 16))
    saved = torch.zeros(directions, bytes_, dtype=torch.uint8)
    if mode != 2:
        saved = torch.empty(directions, time, batch, 4 * hidden)
    last = torch.empty(directions, batch, hidden)
    places = [torch.empty(time, batch, directions * hidden), last, last.clone() if mode == 2 else None, saved]
    return [torch.randn(time, batch, features), *states, params, mode], places


@pytest.mark.parametrize("threads", [1, 2, 3], ids="{} threads".format)
@pytest.mark.parametrize("mode", [2, 3], ids=["LSTM", "GRU"])
@pytest.mark.parametrize("sizes", [(9, 16, 64, 64), (64, 16, 64, 64), (32, 16, 96, 64), (3, 2, 5, 4)], ids=str)
def test_recurrent_layers(mode: int, sizes: tuple[int, ...], threads: int) -> None:
    """With two threads two directions are computed side by side."""
    function = {2: torch.lstm, 3: torch.gru}[mode]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for directions in (1, 2):
            given, (out, hy, cy, saved) = layer(mode, directions, *sizes)
            x, hx, cx, params, _ = given
            first, *others = (one.clone().requires_grad_() for one in (x, hx, *([cx] if mode == 2 else []), *params))
            states, weights = (others[:2], others[2:]) if mode == 2 else (others[0], others[1:])
            expected, *_ = function(first, states, weights, True, 1, 0.0, True, directions == 2, False)
            ops.host_rnn_layer(*given, True, out=out, hy=hy, cy=cy, saved=saved)
            torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-5)
            grad = torch.randn(out.shape)
            right = torch.autograd.grad(expected, [first, *others], grad)
            of_input, of_hx, *of_params = unset(x, hx, *params)
            of_cx = None if cx is None else torch.full_like(cx, torch.nan)
            no_cell = hy.new_empty(0) if cy is None else torch.zeros_like(cy)
            after = (out, hy, no_cell if cy is None else cy, saved)
            of = {"of_input": of_input, "of_hx": of_hx, "of_cx": of_cx, "of_params": of_params}
            ops.host_rnn_layer_backward(grad, torch.zeros_like(hy), no_cell, *given, *after, **of)
            found = [of_input, of_hx, *([] if of_cx is None else [of_cx]), *of_params]
            for place, one in zip(found, right, strict=True):
                torch.testing.assert_close(place, one, rtol=1e-3, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mode", [1, 2, 3], ids=["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_threads_share_the_sequences(mode: int, dtype: torch.dtype) -> None:
    """In as many shares as there are threads and pairs of sequences; gradients in those of the layer."""
    function = {1: torch.rnn_tanh, 2: torch.lstm, 3: torch.gru}[mode]
    before = torch.get_num_threads()
    try:
        for batch, directions, biases in itertools.product((1, 2, 3, 5, 16), (1, 2), (True, False)):
            (x, hx, cx, params, _), _ = layer(mode, directions, 7, batch, 6, 20)
            hx, params = hx.to(dtype), [one.to(dtype) for one in params if biases or one.dim() == 2]
            x, cx = x.to(dtype), None if cx is None else cx.to(dtype)
            inputs = [one.clone().requires_grad_() for one in (x, hx, *([] if cx is None else [cx]), *params)]
            states, weights = (inputs[1:3], inputs[3:]) if mode == 2 else (inputs[1], inputs[2:])
            expected, *last = function(inputs[0], states, weights, biases, 1, 0.0, True, directions == 2, False)
            grads = [torch.randn(one.shape, dtype=dtype) for one in (expected, *last)]
            right = torch.autograd.grad([expected, *last], inputs, grads)
            for forwards, backwards in ((1, 2), (2, 1), (2, 2), (3, 3), (4, 2), (3, 16), (16, 4)):
                torch.set_num_threads(forwards)
                out, hy, cy, saved = ops.rnn_layer(x, hx, cx, params, mode, True)
                for found, one in zip((out, hy, cy), (expected, *last), strict=False):
                    torch.testing.assert_close(found, one)
                torch.testing.assert_close(ops.rnn_layer(x, hx, cx, params, mode, False)[:2], (out, hy))
                torch.set_num_threads(backwards)
                given = (grads[0], grads[1], grads[2] if mode == 2 else cy, x, hx, cx, params, mode, out, hy, cy, saved)
                found = [one for one in ops.rnn_layer_backward(*given) if one.numel()]
                for one, of_it in zip(right, found, strict=True):
                    torch.testing.assert_close(of_it, one, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_what_one_direction_throws_is_thrown_and_the_next_call_is_right() -> None:
    given, (out, hy, cy, saved) = layer(2, 2, 9, 4, 8, 8)
    places = {"out": out, "hy": hy, "cy": cy, "saved": saved}
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"expected sizes \[32\]"):
            ops.host_rnn_layer(*given[:3], [*given[3][:7], torch.empty(31)], 2, True, **places)
        with pytest.raises(RuntimeError):  # of the second direction, found as it is computed
            ops.host_rnn_layer(*given, True, **{**places, "saved": saved[:, :63]})
        ops.host_rnn_layer(*given, True, **places)
        states = [one for one in given[1:3] if one is not None]
        torch.testing.assert_close(
            out, torch.lstm(given[0], states, given[3], True, 1, 0.0, True, True, False)[0], rtol=1e-4, atol=1e-5
        )


def test_they_are_computed_there() -> None:
    x, w, b = torch.randn(4, 64, 32, 32), torch.randn(64, 64, 3, 3), torch.randn(64)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    of_x, of_w, of_b = unset(x, w, b)
    assert allocated(lambda: aten.convolution(x, w, b, *settings)) >= x.nbytes
    of = {"of_input": of_x, "of_weight": of_w, "of_bias": of_b}
    for winograd in (False, None):
        way = {"winograd": winograd}
        assert allocated(lambda way=way: ops.host_convolution(x, w, b, *settings, out=of_x, **way)) < 4096
        assert allocated(lambda way=way: ops.host_convolution_backward(x, x, w, *settings, **of, **way)) < 4096
    given, (out, hy, cy, saved) = layer(2, 1, 64, 16, 64, 64)
    told = allocated(lambda: ops.host_rnn_layer(*given, True, out=out, hy=hy, cy=cy, saved=saved))
    assert told < out.nbytes


def test_what_is_asked_for_later_has_its_own_memory() -> None:
    x, w = torch.randn(4, 64, 32, 32), torch.randn(64, 64, 3, 3)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    (out,) = unset(x)
    for _ in range(3):
        ops.host_convolution(x, w, None, *settings, out=out, winograd=False)
        others = [torch.empty(x.shape), torch.nn.functional.conv2d(x, w, padding=1), torch.empty_like(out)]
        assert len({one.data_ptr() for one in (out, *others)}) == 4
    with pytest.raises(RuntimeError):  # an error leaves no offer behind
        ops.host_convolution(x, w[:, :5], None, *settings, out=out, winograd=False)
    pairs = itertools.combinations((out, torch.empty(x.shape), torch.empty(x.shape)), 2)
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairs)
