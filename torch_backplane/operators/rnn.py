"""Recurrent layers: the operators of which csrc/aten/rnn_layers.cpp composes LSTM, GRU and RNN.

A step is a kernel. On devices on which the host can compute products, it can also compute a whole layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torch_backplane import tuning
from torch_backplane.kernels.templates.rnn import Gates, rnn_step, rnn_step_backward
from torch_backplane.operators.linear_algebra import host_refuses
from torch_backplane.planning import Call, Candidate, Candidates, RunOnCPU, call_on_cpu, costs, operator, run_template

backplane = torch.ops.backplane

_LSTM, _GRU = 2, 3  # PyTorch's numbers for kinds of layers
_SAVED = {_LSTM: 5, _GRU: 4}  # columns that a step saves, as a multiple of those of the state


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its rows are contiguous, else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _rows(tensor)


@operator("backplane::lstm_step", variants=False)
def lstm_step(
    call: Call,
    out: torch.Tensor,
    new_cell: torch.Tensor,
    saved: torch.Tensor,
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    input_bias: torch.Tensor | None,
    hidden_bias: torch.Tensor | None,
    cell: torch.Tensor,
) -> None:
    outputs = {"out": out, "new_cell": new_cell, "saved": saved}
    gates = Gates(_rows(input_gates), _rows(hidden_gates), _optional(input_bias), _optional(hidden_bias))
    run_template(rnn_step, out.device, "lstm", outputs, gates, {"cell": _rows(cell)}, name="lstm")


@operator("backplane::lstm_step_backward", variants=False)
def lstm_step_backward(
    call: Call,
    of_gates: torch.Tensor,
    of_cell: torch.Tensor,
    grad: torch.Tensor,
    later: torch.Tensor | None,
    cell_grad: torch.Tensor | None,
    cell: torch.Tensor,
    new_cell: torch.Tensor,
    saved: torch.Tensor,
) -> None:
    outputs = {"of_gates": of_gates, "of_cell": of_cell}
    inputs = {"grad": _rows(grad), "cell": _rows(cell), "new_cell": _rows(new_cell), "saved": _rows(saved)}
    given = (outputs, inputs, _optional(later), _optional(cell_grad))
    run_template(rnn_step_backward, grad.device, "lstm", *given, name="lstm_backward")


@operator("backplane::gru_step", variants=False)
def gru_step(
    call: Call,
    out: torch.Tensor,
    saved: torch.Tensor,
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    input_bias: torch.Tensor | None,
    hidden_bias: torch.Tensor | None,
    hidden: torch.Tensor,
) -> None:
    gates = Gates(_rows(input_gates), _rows(hidden_gates), _optional(input_bias), _optional(hidden_bias))
    outputs, state = {"out": out, "saved": saved}, {"state": _rows(hidden)}
    run_template(rnn_step, out.device, "gru", outputs, gates, state, name="gru")


@operator("backplane::gru_step_backward", variants=False)
def gru_step_backward(
    call: Call,
    of_gates: torch.Tensor,
    of_hidden_gates: torch.Tensor,
    of_hidden: torch.Tensor,
    grad: torch.Tensor,
    later: torch.Tensor | None,
    hidden: torch.Tensor,
    saved: torch.Tensor,
) -> None:
    outputs = {"of_gates": of_gates, "of_hidden_gates": of_hidden_gates, "of_state": of_hidden}
    inputs = {"grad": _rows(grad), "state": _rows(hidden), "saved": _rows(saved)}
    run_template(rnn_step_backward, grad.device, "gru", outputs, inputs, _optional(later), name="gru_backward")


@operator("backplane::rnn_step", variants=False)
def plain_step(
    call: Call,
    out: torch.Tensor,
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    input_bias: torch.Tensor | None,
    hidden_bias: torch.Tensor | None,
    relu: bool,
) -> None:
    gates = Gates(_rows(input_gates), _rows(hidden_gates), _optional(input_bias), _optional(hidden_bias))
    run_template(rnn_step, out.device, "rnn", {"out": out}, gates, {}, relu, name="rnn")


@operator("backplane::rnn_step_backward", variants=False)
def plain_step_backward(
    call: Call,
    of_gates: torch.Tensor,
    grad: torch.Tensor,
    later: torch.Tensor | None,
    out: torch.Tensor,
    relu: bool,
) -> None:
    inputs = {"grad": _rows(grad), "out": _rows(out)}
    given = ({"of_gates": of_gates}, inputs, _optional(later))
    run_template(rnn_step_backward, grad.device, "rnn", *given, relu=relu, name="rnn_backward")


# Layers

layers = Candidates(
    "recurrent layers",
    Candidate("host", host_refuses, cost=lambda input: costs.on_host("recurrent layers", input.dtype)),
    Candidate("generated", lambda input: None),
)


_NAMES = ("RNNReLU", "RNNTanh", "LSTM", "GRU")  # by PyTorch's numbers for kinds of layers


def _problem(input: torch.Tensor, hx: torch.Tensor, params: Sequence[torch.Tensor], mode: int) -> tuning.Problem:
    """The forward pass of a layer. The same implementation then computes its gradients."""
    directions, _, hidden = hx.shape
    both, biases = directions == 2, len(params) == 4 * directions
    return tuning.Problem.of(_NAMES[mode], input.dtype, input=input, hidden=hidden, biases=biases, both=both)


def _trial(name: str) -> None:
    gates = {"LSTM": 4, "GRU": 3}.get(name, 1)
    function: Any = {"LSTM": torch.lstm, "GRU": torch.gru, "RNNTanh": torch.rnn_tanh, "RNNReLU": torch.rnn_relu}[name]

    @tuning.trial(name)
    def trial(operands: tuning.Operands) -> Callable[[], Sequence[torch.Tensor]]:
        input, hidden, biases = operands.given("input"), operands.integer("hidden"), operands.flag("biases")
        both = operands.flag("both")
        batch, features = input.shape[1:]
        states = [input.new_zeros(1 + both, batch, hidden) for _ in range(2)]
        weights = [input.new_full((gates * hidden, size), 0.01) for size in (features, hidden)]
        weights += [input.new_zeros(gates * hidden) for _ in range(2 * biases)]
        state: Any = states if name == "LSTM" else states[0]
        return lambda: function(input, state, weights * (1 + both), biases, 1, 0.0, False, both, False)


for one in _NAMES:
    _trial(one)


@operator("backplane::rnn_layer", variants=False)
def layer(
    call: Call,
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    mode: int,
    training: bool,
) -> tuple[torch.Tensor, ...]:
    """(states after all steps, last states, last cells, tensor saved for gradients), for one direction or both."""
    if layers.choose(input, problem=partial(_problem, input, hx, params, mode)) != "host":
        raise RunOnCPU("each step is a separate operator")
    time, batch, _ = input.shape
    directions, _, hidden = hx.shape
    of_lstm = mode == _LSTM
    if not training or mode not in _SAVED or (of_lstm and input.dtype == torch.float32):
        saved = input.new_empty(0)  # oneDNN does not tell how much it saves, so gradients compute the layer again
    else:
        saved = input.new_empty(directions, time, batch, _SAVED[mode] * hidden)
    out, hy = input.new_empty(time, batch, directions * hidden), input.new_empty(hx.shape)
    cy = input.new_empty(hx.shape if of_lstm else (0,))
    places = {"out": out, "hy": hy, "cy": _if_any(cy), "saved": _if_any(saved)}
    call_on_cpu(backplane.host_rnn_layer.default, input, hx, cx, params, mode, training, **places)
    return out, hy, cy, saved


def _if_any(result: torch.Tensor) -> torch.Tensor | None:
    """The result, or None if it is empty."""
    return result if result.numel() else None


@operator("backplane::rnn_layer_backward", variants=False, dtypes="any")
def layer_backward(
    call: Call,
    grad: torch.Tensor,
    grad_hy: torch.Tensor,
    grad_cy: torch.Tensor,
    input: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    mode: int,
    out: torch.Tensor,
    hy: torch.Tensor,
    cy: torch.Tensor,
    saved: torch.Tensor,
) -> list[torch.Tensor]:
    """The gradients of input, hx, cx, and of all parameters."""
    # If nothing is saved, the host has computed the layer, whatever the preferred library is now.
    problem = partial(_problem, input, hx, params, mode)
    if (saved.numel() or mode not in _SAVED) and layers.choose(input, problem=problem) != "host":
        raise RunOnCPU("each step is a separate operator")
    of_input, of_hx, of_cx = (input.new_empty((0,) if one is None else one.shape) for one in (input, hx, cx))
    of_params = [input.new_empty(one.shape) for one in params]
    given = (grad, grad_hy, grad_cy, input, hx, cx, params, mode, out, hy, cy, saved)
    places = {"of_input": of_input, "of_hx": of_hx, "of_cx": _if_any(of_cx), "of_params": of_params}
    call_on_cpu(backplane.host_rnn_layer_backward.default, *given, **places)
    return [of_input, of_hx, of_cx, *of_params]
