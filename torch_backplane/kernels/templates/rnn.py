"""One time step of a recurrent layer, and its gradients, in one kernel each. A work item handles one state element.

A row has the gates one after another, `hidden` elements each: input, forget, cell, output (LSTM); reset, update, new
(GRU). For the formulas see torch.nn.LSTM and torch.nn.GRU. An LSTM saves its gates after activation; a GRU also saves
the hidden state's contribution to the new gate. All tensors are matrices with contiguous rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect
from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.source import Launch, LaunchSpec

_SIGMOID = "#define SIGMOID(x) ((value_t)1 / ((value_t)1 + exp(-(x))))"

_LSTM = """
  const value_t input = SIGMOID(BOTH(0)), forget = SIGMOID(BOTH(1)), fresh = tanh(BOTH(2)), output = SIGMOID(BOTH(3));
  const value_t changed = forget * load_cell(AT(cell)) + input * fresh;
  store_new_cell(AT(new_cell), changed);
  store_out(AT(out), output * tanh(changed));
  store_saved(GATE(saved, 0), input);
  store_saved(GATE(saved, 1), forget);
  store_saved(GATE(saved, 2), fresh);
  store_saved(GATE(saved, 3), output);
"""
_LSTM_BACKWARD = """
  const value_t input = load_saved(GATE(saved, 0)), forget = load_saved(GATE(saved, 1));
  const value_t fresh = load_saved(GATE(saved, 2)), output = load_saved(GATE(saved, 3));
  const value_t total = load_grad(AT(grad)) + LATER, shown = tanh(load_new_cell(AT(new_cell)));
  const value_t inner = total * output * (1 - shown * shown) + OF_NEXT_CELL;
  store_of_gates(GATE(of_gates, 0), inner * fresh * input * (1 - input));
  store_of_gates(GATE(of_gates, 1), inner * load_cell(AT(cell)) * forget * (1 - forget));
  store_of_gates(GATE(of_gates, 2), inner * input * (1 - fresh * fresh));
  store_of_gates(GATE(of_gates, 3), total * shown * output * (1 - output));
  store_of_cell(AT(of_cell), inner * forget);
"""
_GRU = """
  const value_t reset = SIGMOID(BOTH(0)), update = SIGMOID(BOTH(1)), share = FROM_HIDDEN(2);
  const value_t fresh = tanh(FROM_INPUT(2) + reset * share);
  store_out(AT(out), fresh + update * (load_state(AT(state)) - fresh));
  store_saved(GATE(saved, 0), reset);
  store_saved(GATE(saved, 1), update);
  store_saved(GATE(saved, 2), fresh);
  store_saved(GATE(saved, 3), share);
"""
_GRU_BACKWARD = """
  const value_t reset = load_saved(GATE(saved, 0)), update = load_saved(GATE(saved, 1));
  const value_t fresh = load_saved(GATE(saved, 2)), share = load_saved(GATE(saved, 3));
  const value_t total = load_grad(AT(grad)) + LATER;
  const value_t of_new = total * (1 - update) * (1 - fresh * fresh);
  const value_t of_reset = of_new * share * reset * (1 - reset);
  const value_t of_update = total * (load_state(AT(state)) - fresh) * update * (1 - update);
  store_of_gates(GATE(of_gates, 0), of_reset);
  store_of_gates(GATE(of_gates, 1), of_update);
  store_of_gates(GATE(of_gates, 2), of_new);
  store_of_hidden_gates(GATE(of_hidden_gates, 0), of_reset);
  store_of_hidden_gates(GATE(of_hidden_gates, 1), of_update);
  store_of_hidden_gates(GATE(of_hidden_gates, 2), of_new * reset);
  store_of_state(AT(of_state), total * update);
"""
_RNN = """
  const value_t x = BOTH(0);
  store_out(AT(out), RELU ? (x > 0 || x != x ? x : 0) : tanh(x));
"""
_RNN_BACKWARD = """
  const value_t total = load_grad(AT(grad)) + LATER, shown = load_out(AT(out));
  store_of_gates(AT(of_gates), RELU ? (shown > 0 ? total : 0) : total * (1 - shown * shown));
"""
_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
_BODIES = {"lstm": _LSTM, "gru": _GRU, "rnn": _RNN}
_BACKWARD = {"lstm": _LSTM_BACKWARD, "gru": _GRU_BACKWARD, "rnn": _RNN_BACKWARD}


class Gates(NamedTuple):
    """The gates before activation.

    Args:
        input, hidden: products of the weights with the input and the hidden state, without biases, of shape
            (batch, gates * hidden).
        input_bias, hidden_bias: shape (gates * hidden,).
    """

    input: torch.Tensor
    hidden: torch.Tensor
    input_bias: torch.Tensor | None
    hidden_bias: torch.Tensor | None


def rnn_step(
    dialect: Dialect,
    kind: str,
    outputs: Mapping[str, torch.Tensor],
    gates: Gates,
    state: Mapping[str, torch.Tensor],
    relu: bool = False,
) -> Launch:
    """Computes one time step of a layer of kind "lstm", "gru" or "rnn".

    Args:
        outputs: `out` of shape (batch, hidden); for an LSTM also `new_cell` of the same shape; for an LSTM or GRU also
            `saved` of shape (batch, 4 * hidden).
        state: `cell` for an LSTM, `state` for a GRU, of shape (batch, hidden).
        relu: for "rnn": use ReLU instead of tanh.

    Raises:
        ValueError: a tensor has the wrong shape.
    """
    inputs = {"input_gates": gates.input, "hidden_gates": gates.hidden, **state}
    biases = {"input_bias": gates.input_bias, "hidden_bias": gates.hidden_bias}
    given = {name: bias for name, bias in biases.items() if bias is not None}

    def side(name: str) -> str:
        bias = f" + load_{name}_bias((n) * hidden + column)" if f"{name}_bias" in given else ""
        return f"(load_{name}_gates(GATE({name}_gates, n)){bias})"

    constants = {"FROM_INPUT(n)": side("input"), "FROM_HIDDEN(n)": side("hidden")}
    constants["BOTH(n)"] = "FROM_INPUT(n) + FROM_HIDDEN(n)"
    return _step(dialect, f"{kind}_step", _BODIES[kind], outputs, inputs, given, {**constants, "RELU": int(relu)})


def rnn_step_backward(
    dialect: Dialect,
    kind: str,
    outputs: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    later: torch.Tensor | None,
    of_next_cell: torch.Tensor | None = None,
    relu: bool = False,
) -> Launch:
    """Computes the gradients of the gates before activation, and of the state excluding the paths through gates.

    Args:
        outputs: `of_gates`; also `of_cell` for an LSTM; `of_hidden_gates` and `of_state` for a GRU.
        inputs: `grad`, the gradient of the step's result, and inputs and outputs of `rnn_step`.
        later: the next time step's contribution to `grad`.
        of_next_cell: the gradient of an LSTM's new cell.

    Raises:
        ValueError: a tensor has the wrong shape.
    """
    added = {"later": later, "of_next_cell": of_next_cell}
    given = {name: tensor for name, tensor in added.items() if tensor is not None}
    constants = {name.upper(): f"load_{name}(AT({name}))" if name in given else "0" for name in added}
    named: dict[str, int | str] = {**constants, "RELU": int(relu)}
    return _step(dialect, f"{kind}_step_backward", _BACKWARD[kind], outputs, {**inputs, **given}, {}, named)


def _step(
    dialect: Dialect,
    name: str,
    body: str,
    outputs: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    biases: Mapping[str, torch.Tensor],
    constants: Mapping[str, int | str],
) -> Launch:
    matrices, gates = {**outputs, **inputs}, _GATES[name.partition("_")[0]]
    batch, hidden = next(outputs[one] for one in ("out", "of_cell", "of_state", "of_gates") if one in outputs).shape
    for one, tensor in matrices.items():
        columns = hidden * (4 if one == "saved" else gates if one.endswith("gates") else 1)
        if tuple(tensor.shape) != (batch, columns):
            raise ValueError(f"{name}: {one} must have shape {(batch, columns)}, got {tuple(tensor.shape)}")
    for one, tensor in biases.items():
        if tuple(tensor.shape) != (gates * hidden,):
            raise ValueError(f"{name}: {one} must have shape {(gates * hidden,)}, got {tuple(tensor.shape)}")
    return LaunchSpec(
        name,
        dialect,
        outputs=outputs,
        inputs={**inputs, **biases},
        integers={"hidden": hidden, **{f"{one}_row": tensor.stride(0) for one, tensor in matrices.items()}},
        constants={
            "AT(x)": "(row * x##_row + column)",
            "GATE(x, n)": "(AT(x) + (n) * hidden)",
            **constants,
        },
        functions=_SIGMOID,
        body=f"const index_t row = item / hidden, column = item % hidden;{body}",
        items=batch * hidden,
        value=value_dtype(next(iter(outputs.values())).dtype),
        strided=set(matrices),
    ).launch()
