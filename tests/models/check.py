"""Runs a model on the device and on the CPU, and compares inference and training."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from models.model import Inputs, Model, without_dropout

TOLERANCE = 1e-3  # of each output, loss, gradient and buffer, relative to its norm
# How often training is tried, each time with other weights and inputs. ReLU and max pooling have kinks: where an input
# rounds to the other side, gradients jump. That is rare, and a wrong kernel differs each time.
TRIALS = 4
CALLS = 2  # of each kind: the first call on the device records plans, later ones replay them
MAX_RECOMPILES = 2  # for all lengths after the first
# Norms count as at least this share of the largest one: some gradients are 0 but for rounding.
SMALLEST_SHARE = 1e-3
Results = dict[str, torch.Tensor]


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]


def _loss(outputs: Any) -> torch.Tensor:
    """The loss among the outputs, else the cross entropy of scores of classes, else the mean square of the outputs."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    if isinstance(outputs, torch.Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1:
        return F.cross_entropy(outputs, torch.arange(outputs.shape[0], device=outputs.device) % outputs.shape[1])
    floats = [one for one in _tensors(outputs) if one.dtype.is_floating_point]
    return torch.stack([one.square().mean() for one in floats]).sum()


def _on_cpu(results: Mapping[str, torch.Tensor | None]) -> Results:
    return {name: one.detach().cpu().clone() for name, one in results.items() if one is not None}


def _infer(module: nn.Module, call: Callable[..., Any], inputs: Inputs) -> Iterator[Results]:
    module.eval()
    for number in range(CALLS):
        with torch.no_grad():
            outputs = call(**inputs)
        yield _on_cpu({f"output {k} of call {number}": one for k, one in enumerate(_tensors(outputs))})


def _train(module: nn.Module, call: Callable[..., Any], inputs: Inputs) -> Iterator[Results]:
    module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for step in range(CALLS):
        loss = _loss(call(**inputs))
        optimizer.zero_grad()
        loss.backward()
        yield _on_cpu({f"loss of step {step}": loss})
        yield _on_cpu({f"gradient of {name} in step {step}": one.grad for name, one in module.named_parameters()})
        yield _on_cpu({f"buffer {name} after step {step}": one for name, one in module.named_buffers()})
        optimizer.step()


def _difference(found: Results, expected: Results) -> tuple[float, str]:
    """The largest difference relative to the norm of a tensor, and its name.

    Raises:
        AssertionError: names, shapes, or tensors that are not of floats differ.
    """
    assert found.keys() == expected.keys(), f"not on both devices: {', '.join(found.keys() ^ expected.keys())}"
    norms = {name: float(one.double().norm()) for name, one in expected.items()}
    smallest = SMALLEST_SHARE * max(norms.values(), default=0)
    worst, which = 0.0, ""
    for name, one in found.items():
        wanted = expected[name]
        assert (one.shape, one.dtype) == (wanted.shape, wanted.dtype), (
            f"{name}: {one.dtype} {tuple(one.shape)}, on the CPU {wanted.dtype} {tuple(wanted.shape)}"
        )
        if not wanted.dtype.is_floating_point:
            assert torch.equal(one, wanted), f"{name} differs from the CPU's"
            continue
        assert torch.equal(one.isfinite(), wanted.isfinite()), f"{name}: other elements are finite than on the CPU"
        finite = wanted.isfinite()
        distance = float((one.double() - wanted.double())[finite].norm())
        if distance > worst * max(norms[name], smallest):
            worst, which = distance / max(norms[name], smallest), name
    return worst, which


class Comparison:
    """Compares the results of a module on the device with those of a copy on the CPU."""

    def __init__(self, model: Model, compiled: bool) -> None:
        self._model = model
        self._module = without_dropout(model.build())
        self._on_device = copy.deepcopy(self._module).to("bp")
        self._call = torch.compile(self._on_device) if compiled else self._on_device

    def train(self, inputs: Inputs) -> float:
        """Runs `_train` on both, TRIALS times at most. Returns and raises what `run` does for the last time."""
        for trial in range(1, TRIALS):
            try:
                return self.run(_train, inputs)
            except AssertionError:
                torch.manual_seed(trial)
                weights = self._model.build().state_dict()
                self._module.load_state_dict(weights)
                self._on_device.load_state_dict(weights)
                inputs = self._model.inputs(self._model.lengths[0])
        return self.run(_train, inputs)

    def run(self, kind: Callable[[nn.Module, Callable[..., Any], Inputs], Iterator[Results]], inputs: Inputs) -> float:
        """Runs `_infer` or `_train` on both, and returns the largest difference, relative to the norm of a tensor.

        Raises:
            AssertionError: results differ by more than the tolerance.
        """
        moved = tree_map_only(torch.Tensor, lambda one: one.to("bp"), inputs)
        all_found = list(kind(self._on_device, self._call, moved))
        largest = 0.0
        for found, expected in zip(all_found, kind(self._module, self._module, inputs), strict=True):
            difference, which = _difference(found, expected)
            assert difference <= TOLERANCE, (
                f"{which} differs from the CPU's by {difference:.2g} of its norm, above {TOLERANCE:.2g}"
            )
            largest = max(largest, difference)
        return largest


def _recompiles(run: Callable[[], None]) -> int:
    """Runs the function, and returns how often Dynamo compiled functions that it had compiled before."""
    from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

    clear_compilation_metrics()
    run()
    return sum(bool(one.recompile_reason) for one in get_compilation_metrics())


def _tried(model: Model, compiled: bool, row: dict[str, Any]) -> None:
    torch.manual_seed(0)
    first, *others = (model.inputs(length) for length in model.lengths)
    comparison = Comparison(model, compiled)
    differences = [comparison.run(_infer, first), comparison.train(first)]

    def change_lengths() -> None:
        differences.extend(comparison.run(_infer, inputs) for inputs in others)

    if compiled and others:
        row["recompiles"] = _recompiles(change_lengths)
    else:
        change_lengths()
    row["difference"] = max(differences)


def check(model: Model, compiled: bool) -> dict[str, Any]:
    """Returns a row of the report: status, error, difference, fallbacks, graphs, graph breaks, recompiles, seconds."""
    from torch._dynamo.utils import counters

    from torch_backplane import _C, drivers

    torch._dynamo.reset()
    counters.clear()
    _C.reset_fallback_counts()
    row: dict[str, Any] = {"status": "passed"}
    start = time.perf_counter()
    try:
        _tried(model, compiled, row)
    except Exception as error:
        error = getattr(error, "inner_exception", error)  # of Inductor's errors
        row |= {"status": "failed", "error": f"{type(error).__name__}: {error}".strip().partition("\n")[0]}
    row["seconds"] = time.perf_counter() - start
    row["fallbacks"] = _C.fallback_counts()
    row["graphs"] = counters["stats"]["unique_graphs"]
    # Dynamo counts the reason why it does not compile a function at all as "unimplemented".
    breaks = counters["graph_break"] + counters["unimplemented"]
    row["graph_breaks"] = {reason.partition("\n")[0]: count for reason, count in breaks.items()}
    has_kernels = bool(drivers.device(0).properties.dialect)  # without, all operators run as fallbacks
    if row["status"] == "passed" and has_kernels and row["fallbacks"]:
        row |= {"status": "failed", "error": f"ran on the CPU: {', '.join(sorted(row['fallbacks']))}"}
    if row["status"] == "passed" and row.get("recompiles", 0) > MAX_RECOMPILES:
        row |= {"status": "failed", "error": f"{row['recompiles']} recompiles for {len(model.lengths)} lengths"}
    return row
