"""Recurrent layers: one product for the inputs of all steps and kernels for each step, or whole layers on the host."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, need, placed
from targets import target
from test_host_work import needs_sight
from torch import nn

from torch_backplane import plans, preferences

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "RNN, relu": lambda *given, **named: nn.RNN(*given, nonlinearity="relu", **named),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def pairs(kind: str, *sizes: int, dtype: torch.dtype = torch.float32, **named: Any) -> tuple[nn.RNNBase, nn.RNNBase]:
    """A module on the CPU and its copy on the device."""
    module = KINDS[kind](*sizes, **named).to(dtype)
    return module, copy.deepcopy(module).to(DEVICE)


def everything(module: nn.RNNBase, x: torch.Tensor, states: Any = None) -> list[torch.Tensor]:
    """The results, and the gradients of a weighted sum of all of them."""
    x = x.detach().requires_grad_()
    out, last = module(x) if states is None else module(x, states)
    results = [out, *(last if isinstance(last, tuple) else (last,))]
    total = sum((one * torch.arange(one.numel()).view(one.shape).sin().to(one)).sum() for one in results)
    wanted = [x, *module.parameters()]
    if states is not None:
        wanted += states if isinstance(states, tuple) else [states]
    assert isinstance(total, torch.Tensor)
    return [*(one.detach() for one in results), *torch.autograd.grad(total, wanted)]


def alike(ours: list[torch.Tensor], expected: list[torch.Tensor], **tolerances: float) -> None:
    assert len(ours) == len(expected)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, **tolerances)


@kinds
@pytest.mark.parametrize("way", ["as it is", "a GPU's"])
def test_results_and_gradients_are_the_cpus(kind: str, way: str) -> None:
    cases = [
        ((5, 7), {}, (6, 3, 5)),
        ((5, 7), {"batch_first": True}, (3, 9, 5)),  # another length and batch
        ((3, 4, 2), {"bidirectional": True}, (4, 2, 3)),
        ((3, 4, 2), {"bidirectional": True, "bias": False}, (1, 2, 3)),  # one step
        ((1, 1), {}, (2, 1, 1)),
    ]

    def run() -> None:
        for sizes, named, shape in cases:
            module, ours = pairs(kind, *sizes, **named)
            x = torch.randn(shape)
            for scale in (1.0, 2.0):
                alike(everything(ours, (scale * x).to(DEVICE)), everything(module, scale * x), atol=2e-5, rtol=2e-5)

    plans.set_mode("check")
    if way == "as it is":
        run()
        return
    with target("gpu"):
        run()


@kinds
def test_initial_states_have_gradients(kind: str) -> None:
    module, ours = pairs(kind, 3, 4, 2)
    x, states = torch.randn(5, 2, 3), [torch.randn(2, 2, 4) for _ in range(2 if kind == "LSTM" else 1)]
    found = []
    for one, device in ((module, "cpu"), (ours, DEVICE)):
        given = tuple(state.to(device).requires_grad_() for state in states)
        found.append(everything(one, x.to(device), given if kind == "LSTM" else given[0]))
    alike(found[1], found[0], atol=1e-5, rtol=1e-5)


@kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    module, ours = pairs(kind, 5, 7, dtype=dtype)
    exact = copy.deepcopy(module).double()
    x = torch.randn(4, 3, 5).to(dtype)
    tolerance = {torch.float64: 1e-10, torch.float16: 5e-3, torch.bfloat16: 5e-2}[dtype]
    expected = [one.to(dtype) for one in everything(exact, x.double())]
    alike(everything(ours, x.to(DEVICE)), expected, atol=tolerance, rtol=tolerance)


@kinds
def test_inference_without_gradients(kind: str) -> None:
    module, ours = pairs(kind, 5, 7)
    x = torch.randn(64, 3, 5)
    on_device = x.to(DEVICE)
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            expected = module(x)[0]
            torch.testing.assert_close(ours(on_device)[0].cpu(), expected, atol=1e-5, rtol=1e-5)
    frozen = ours.requires_grad_(False)
    assert not frozen(on_device)[0].requires_grad


@kinds
@pytest.mark.parametrize("way", ["as it is", "a GPU's"])
def test_layouts_and_lengths_change_between_calls(kind: str, way: str) -> None:
    function = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN": torch.rnn_tanh, "RNN, relu": torch.rnn_relu}[kind]
    rows = {"LSTM": 4, "GRU": 3}.get(kind, 1) * 4

    def spread(*shape: int) -> torch.Tensor:
        """A tensor with gaps and permuted strides."""
        return torch.randn(*shape[::-1], 2)[..., 0].permute(*range(len(shape) - 1, -1, -1))

    def run() -> None:
        for make in (torch.randn, spread, torch.randn):
            for time, batch in ((5, 2), (3, 4), (1, 2), (5, 2)):
                given = [make(time, batch, 3), *(make(1, batch, 4) for _ in range(1 + (kind == "LSTM")))]
                given += [0.3 * make(*shape) for shape in ((rows, 3), (rows, 4), (rows,), (rows,))]
                found = []
                for device in ("cpu", DEVICE):
                    x, *rest = (copied(one, device).requires_grad_() for one in given)
                    states, params = (rest[0], rest[1:]) if kind != "LSTM" else (rest[:2], rest[2:])
                    out = function(x, states, params, True, 1, 0.0, True, False, False)
                    total = sum(one.sin().sum() for one in out)
                    found.append([one.detach() for one in (*out, *torch.autograd.grad(total, [x, *rest]))])
                alike(found[1], found[0], atol=1e-4, rtol=1e-4)

    plans.set_mode("check")
    if way == "as it is":
        run()
        return
    with target("gpu"):
        run()


def copied(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A detached copy with the same strides."""
    return placed(tensor.detach(), device)


@kinds
def test_gradients_of_gradients(kind: str) -> None:
    need(torch.float64)
    _, ours = pairs(kind, 2, 3, dtype=torch.float64)
    x = torch.randn(3, 2, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)

    def of_both(x: torch.Tensor) -> torch.Tensor:
        """The state depends on the input: neither gradient must be counted twice."""
        hidden = x.sum(0)[None, :, :1].expand(1, 2, 3).contiguous()
        out: torch.Tensor = ours(x, (hidden, 2 * hidden) if kind == "LSTM" else hidden)[0]
        return out

    assert torch.autograd.gradcheck(of_both, (x,))
    assert torch.autograd.gradgradcheck(of_both, (x,))


@kinds
def test_packed_sequences_and_transforms_are_composed(kind: str) -> None:
    module, ours = pairs(kind, 3, 4)
    x, direction = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    packed = nn.utils.rnn.pack_sequence([torch.randn(4, 3), torch.randn(2, 3)])

    def tangent(module: nn.RNNBase, device: str) -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x.to(device), direction.to(device))
            found: torch.Tensor = torch.autograd.forward_ad.unpack_dual(module(dual)[0]).tangent
            return found.detach()

    found = []
    for one, device in ((module, "cpu"), (ours, DEVICE)):
        found.append([one(packed.to(device))[0].data.detach()])
        found[-1].append(torch.func.grad(lambda x, one=one: one(x)[0].sin().sum())(x.to(device)))
        if kind not in ("LSTM", "GRU"):
            found[-1].append(tangent(one, device))
    alike(found[1], found[0], atol=1e-5, rtol=1e-5)
    if kind in ("LSTM", "GRU"):  # as on torch.cuda: PyTorch's fused cells have no forward derivative
        with pytest.raises(NotImplementedError, match="forward AD"):
            tangent(ours, DEVICE)


@kinds
def test_autocast_computes_in_its_dtype(kind: str) -> None:
    module, ours = pairs(kind, 5, 7)
    x = torch.randn(6, 3, 5)
    with torch.autocast("bp", torch.bfloat16):
        out = ours(x.to(DEVICE))[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float().cpu(), module(x)[0], atol=5e-2, rtol=5e-2)
    out.sum().backward()
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in ours.parameters())


@kinds
def test_invalid_calls_raise_and_later_calls_work(kind: str) -> None:
    module, ours = pairs(kind, 3, 4)
    good, bad = torch.randn(5, 2, 3), torch.randn(5, 2, 4)
    for _ in range(2):
        alike(everything(ours, good.to(DEVICE)), everything(module, good), atol=1e-5, rtol=1e-5)
        with pytest.raises(RuntimeError) as expected:
            module(bad)
        with pytest.raises(RuntimeError, match=re.escape(str(expected.value))):
            ours(bad.to(DEVICE))
    rows = ours.weight_hh_l0.shape[0]
    for name, wrong in (("weight_ih_l0", (rows - 1, 3)), ("weight_hh_l0", (rows, 5)), ("bias_hh_l0", (rows + 1,))):
        right = getattr(ours, name).data
        for bad_weight in (torch.randn(wrong, device=DEVICE), right.bfloat16()):
            getattr(ours, name).data = bad_weight
            with pytest.raises((RuntimeError, ValueError)):
                ours(good.to(DEVICE))
        getattr(ours, name).data = right
    alike(everything(ours, good.to(DEVICE)), everything(module, good), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_fused_cells_reject_mismatched_sizes(cell: str) -> None:
    aten = torch.ops.aten
    gates, fused = (4, aten._thnn_fused_lstm_cell) if cell == "lstm" else (3, aten._thnn_fused_gru_cell)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=DEVICE)

    good = [made(2, gates * 5), made(2, gates * 5), made(2, 5), made(gates * 5), made(gates * 5)]
    bad = [made(2, gates * 5 - 1), made(1, gates * 5), made(3, 5), made(gates), None]
    for place, wrong in enumerate(bad):
        fused(*good)
        with pytest.raises(RuntimeError, match="expected"):
            fused(*(wrong if i == place else one for i, one in enumerate(good)))
    with pytest.raises(RuntimeError, match="of Half, but got"):
        fused(*good[:2], made(2, 5, dtype=torch.float16), *good[3:])


def test_cells_launch_one_kernel_in_addition_to_products() -> None:
    for cell, states in ((nn.LSTMCell(5, 7), 2), (nn.GRUCell(5, 7), 1)):
        ours = copy.deepcopy(cell).to(DEVICE)

        def run(x: torch.Tensor, *given: torch.Tensor, cell: Any = cell, ours: Any = ours) -> Any:
            return (cell if x.device.type == "cpu" else ours)(x, given if len(given) == 2 else given[0])

        agrees(run, torch.randn(3, 5), *(torch.randn(3, 7) for _ in range(states)))
        with target("gpu"):
            plan_text = plans.explain(
                run, torch.randn(3, 5, device=DEVICE), *(torch.randn(3, 7, device=DEVICE),) * states
            )
        assert plan_text.count("launch bp_lstm_step on" if states == 2 else "launch bp_gru_step on") == 1


@kinds
@pytest.mark.parametrize("bias", [True, False])
def test_host_layers_are_replayed(kind: str, bias: bool) -> None:
    needs_sight()
    _, ours = pairs(kind, 5, 7, bias=bias)
    plans.clear()
    for scale in range(4):
        x = torch.full((4, 3, 5), float(scale), device=DEVICE)
        with torch.no_grad():
            ours(x)
        ours(x)[0].sum().backward()
    for name in ("backplane::rnn_layer", "backplane::rnn_layer_backward"):
        found = plans.stats()[name]
        assert found["replays"] > 1
        assert not found["unplannable_calls"], found["reasons"]


def test_layers_work_with_onednn_disabled() -> None:
    needs_sight()
    module, ours = pairs("LSTM", 5, 7)
    plans.clear()

    def check() -> None:
        for length in (4, 6, 4):
            x = torch.randn(length, 3, 5)
            alike(everything(ours, x.to(DEVICE)), everything(module, x), atol=1e-5, rtol=1e-5)

    check()
    with torch.backends.mkldnn.flags(enabled=False):
        check()
    check()
    plans.clear()


@kinds
@pytest.mark.parametrize("first", [True, False])
def test_backward_can_use_another_implementation_than_forward(kind: str, first: bool) -> None:
    module, ours = pairs(kind, 5, 7)
    x = torch.randn(4, 3, 5)
    module(x)[0].sin().sum().backward()
    for _ in range(2):
        ours.zero_grad()
        with torch.backends.bp.rnn.flags(enabled=first):  # type: ignore[attr-defined]
            total = ours(x.to(DEVICE))[0].sin().sum()
        with torch.backends.bp.rnn.flags(enabled=not first):  # type: ignore[attr-defined]
            total.backward()
        for one, other in zip(ours.parameters(), module.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(one.grad.cpu(), other.grad, atol=1e-5, rtol=1e-5)


@kinds
def test_gpu_steps_launch_a_product_and_a_kernel(kind: str) -> None:
    _, ours = pairs(kind, 5, 7)
    with target("gpu"), torch.no_grad(), preferences.preferring("products", "generated"):
        plan_text = plans.explain(ours, torch.randn(4, 3, 5, device=DEVICE))
    name = {"LSTM": "lstm", "GRU": "gru"}.get(kind, "rnn")
    assert plan_text.count(f"launch bp_{name}_step on") == 4
    assert plan_text.count("launch bp_matmul") == 5
