"""Calls that PyTorch rejects raise the error of the CPU kernel, which runs on zeros instead of the data.

They copy no data, do not count as fallbacks, and leave no plans.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain_arguments import outcome

from torch_backplane import _C

aten = torch.ops.aten
F16, F32, I64, BOOL = torch.float16, torch.float32, torch.int64, torch.bool


def t(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def i(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I64)


# (operator, invalid arguments, valid arguments).
CALLS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "two shapes": (aten.add.Tensor, [t(2), t(3)], [t(3), t(3)]),
    "sub of bools": (aten.sub.Tensor, [t(2, dtype=BOOL), t(2, dtype=BOOL)], [t(2), t(2)]),
    "a bool for alpha": (aten.rsub.Tensor, [t(2), t(2)], [t(2), t(2)]),
    "product of two dtypes": (aten.mm.default, [t(2, 2), t(2, 2, dtype=F16)], [t(2, 2), t(2, 2)]),
    "product of mismatched sizes": (aten.mm.default, [t(2, 3), t(2, 3)], [t(2, 3), t(3, 2)]),
    "addr of a matrix": (aten.addr.default, [t(2, 2), t(2, 1), t(2)], [t(2, 2), t(2), t(2)]),
    "a bool as a factor": (aten.addr.default, [t(2, 2), t(2), t(2)], [t(2, 2), t(2), t(2)]),
    "an unknown approximation": (aten.gelu.default, [t(3)], [t(3)]),
    "norm of integers": (aten.linalg_vector_norm.default, [t(3, dtype=I64)], [t(3)]),
    "variance of integers": (aten.var.correction, [t(3, dtype=I64)], [t(3)]),
    "trace of a vector": (aten.trace.default, [t(3)], [t(3, 3)]),
    "amax of no elements": (aten.amax.default, [t(0), [0]], [t(2), [0]]),
    "a scan of integers": (aten._logcumsumexp.default, [t(3, dtype=I64), 0], [t(3), 0]),
    "dimension out of range": (aten.sort.stable, [t(3)], [t(3)]),
    "k out of range": (aten.topk.default, [t(3), 4], [t(3), 2]),
    "kthvalue out of range": (aten.kthvalue.default, [t(3), 4], [t(3), 2]),
    "shifts without dimensions": (aten.roll.default, [t(3, 2), [1, 2], [0]], [t(3, 2), [1, 2], [0, 1]]),
    "indivisible channels": (aten.pixel_shuffle.default, [t(3, 2, 2), 2], [t(4, 2, 2), 2]),
    "reversed range": (aten.uniform_.default, [t(3), 2.0, 1.0], [t(3), 1.0, 2.0]),
    "a negative deviation": (aten.normal_.default, [t(3), 0.0, -1.0], [t(3), 0.0, 1.0]),
    "probability out of range": (aten.bernoulli_.float, [t(3), 2.0], [t(3), 0.5]),
    "negative size": (aten.randperm.generator_out, [-1], [3]),
    "masks of floats": (aten.masked_select.default, [t(3), t(3)], [t(3), t(3, dtype=BOOL)]),
    "mask of another shape": (aten.index.Tensor, [t(3), [t(2, dtype=BOOL)]], [t(3), [t(3, dtype=BOOL)]]),
    "too many indices": (aten.index.Tensor, [t(3), [i(0), i(0)]], [t(3), [i(0)]]),
    "values of another dtype": (aten.index_put_.default, [t(3), [i(0)], t(1, dtype=F16)], [t(3), [i(0)], t(1)]),
    "values of another dtype for separate indices": (lambda x, values: x.__setitem__(([0], None, [0]), values),
                                                     [t(2, 2), t(1, dtype=F16)], [t(2, 2), t(1)]),
    "no slices, of another dtype": (aten.index_add.default, [t(3), 0, i(), t(0, dtype=F16)], [t(3), 0, i(), t(0)]),
    "mismatched slices": (aten.index_add.default, [t(3), 0, i(0, 1), t(3)], [t(3), 0, i(0, 1), t(2)]),
    "dimension of slices out of range": (aten.index_select.default, [t(3), 1, i(0)], [t(3), 0, i(0)]),
    "an index of floats": (aten.gather.default, [t(3), 0, t(3)], [t(3), 0, i(0, 1)]),
    "a larger index": (aten.gather.default, [t(2, 2), 0, t(1, 3, dtype=I64)], [t(2, 2), 0, t(1, 2, dtype=I64)]),
    "an unknown reduction": (aten.scatter.reduce, [t(3), 0, i(0), t(1)], [t(3), 0, i(0), t(1)]),
    "embedding in a vector": (aten.embedding.default, [t(3), i(0)], [t(3, 2), i(0)]),
    "a loss of two dtypes": (aten.huber_loss.default, [t(3, dtype=I64), t(3)], [t(3), t(3)]),
    "float targets": (aten.nll_loss_forward.default, [t(2, 3), t(2), None, 1, -100], [t(2, 3), i(0, 1), None, 1, -100]),
    "missing targets": (aten.multi_margin_loss.default, [t(2, 3), i(0)], [t(2, 3), i(0, 1)]),
    "windows larger than images": (aten.im2col.default, [t(1, 2, 2), [5, 5], [1, 1], [0, 0], [1, 1]],
                                   [t(1, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]]),
    "images without channels": (aten.max_pool2d_with_indices.default, [t(3, 3), [2, 2]], [t(1, 3, 3), [2, 2]]),
    "images of integers": (aten.upsample_nearest1d.default, [t(1, 1, 3, dtype=I64), [6]], [t(1, 1, 3), [6]]),
    "mismatched normalized shape": (aten.native_layer_norm.default, [t(2, 3), [2], None, None, 1e-5],
                                    [t(2, 3), [3], None, None, 1e-5]),
    "a softmax of integers": (aten._softmax.default, [t(3, dtype=I64), 0, False], [t(3), 0, False]),
    "mismatched rows": (aten.searchsorted.Tensor, [t(2, 3), t(3, 3)], [t(2, 3), t(2, 3)]),
    "bincount of a matrix": (aten.bincount.default, [t(2, 2, dtype=I64)], [t(2, dtype=I64)]),
    "no bins": (aten.histc.default, [t(3), 0], [t(3), 2]),
    "complex parts of integers": (aten.complex.default, [t(3, dtype=I64), t(3, dtype=I64)], [t(3), t(3)]),
    "distances of integers": (aten._cdist_forward.default, [t(2, 2, dtype=I64), t(2, 2, dtype=I64), 2.0, None],
                              [t(2, 2), t(2, 2), 2.0, None]),
    "dimension of unique slices out of range": (aten.unique_dim.default, [t(2), 3], [t(2), 0]),
    "empty quantization range": (aten.fake_quantize_per_tensor_affine_cachemask.default, [t(3), 1.0, 0, 5, 1],
                                 [t(3), 1.0, 0, 0, 5]),
}  # fmt: skip
NAMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a bool for alpha": ({"alpha": True}, {"alpha": 2}),
    "a bool as a factor": ({"alpha": True}, {"alpha": 2}),
    "an unknown approximation": ({"approximate": "none at all"}, {"approximate": "tanh"}),
    "dimension out of range": ({"stable": False, "dim": 3}, {"stable": False, "dim": 0}),
    "an unknown reduction": ({"reduce": "most"}, {"reduce": "add"}),
    "negative size": ({"generator": None, "out": t(0, dtype=I64)}, {"generator": None, "out": t(0, dtype=I64)}),
}


def calls() -> Iterator[tuple[str, Callable[[str], Any], Callable[[str], Any]]]:
    """(name, invalid call, valid call). The calls take a device."""

    def on(function: Any, values: list[Any], named: dict[str, Any]) -> Callable[[str], Any]:
        def call(device: str) -> Any:
            moved = [[one.to(device) for one in v] if isinstance(v, list) and v and isinstance(v[0], torch.Tensor)
                     else v.to(device) if isinstance(v, torch.Tensor) else v for v in values]  # fmt: skip
            given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in named.items()}
            return function(*moved, **given)

        return call

    for name, (function, bad, good) in CALLS.items():
        bad_named, good_named = NAMED.get(name, ({}, {}))
        yield name, on(function, bad, bad_named), on(function, good, good_named)


def refused_and_planned() -> None:
    """Makes an invalid, a valid and an invalid call per case. The errors are the CPU's, and nothing falls back."""
    _C.set_fallback_policy(_C.FallbackPolicy.error)
    wrong = []
    for name, bad, good in calls():
        expected = outcome(bad, ["cpu"])
        if not expected[0]:
            wrong.append(f"{name}: the CPU accepts it")
            continue
        for what in ("first", "after a valid call", "again"):
            _C.reset_fallback_counts()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = outcome(bad, ["bp"])
            if found != expected or _C.fallback_counts() or [one for one in warned if "fall" in str(one.message)]:
                wrong.append(f"{name}, {what}: {found}, counted {_C.fallback_counts()}; on the CPU {expected}")
            if what != "again" and (result := outcome(good, ["bp"]))[0]:
                wrong.append(f"{name}, a valid call: {result}")
    assert not wrong, "\n".join(wrong)


def test_invalid_calls_before_and_after_valid_ones() -> None:
    before = _C.fallback_policy()
    try:
        refused_and_planned()
    finally:
        _C.set_fallback_policy(before)


# (operator, arguments with which PyTorch's CPU kernel would access memory out of bounds, valid arguments, error).
UNCHECKED: dict[str, tuple[Any, list[Any], list[Any], str]] = {
    "lengths": (aten._weight_norm_interface.default, [t(3, 4), t(2)], [t(3, 4), t(3, 1)], "expected 3 lengths"),
    "an output": (aten._masked_softmax_backward.default, [t(2, 3), t(1, 3), t(2, 3, dtype=BOOL)],
                  [t(2, 3), t(2, 3), t(2, 3, dtype=BOOL)], "expected output of the gradient's shape"),
    "statistics": (aten.batch_norm_update_stats.default, [t(2, 3), t(2), t(2), 0.1], [t(2, 3), t(3), t(3), 0.1],
                   "running_mean should contain 3 elements not 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHECKED)
def test_arguments_that_the_cpu_does_not_check_are_errors(name: str) -> None:
    function, bad, good, words = UNCHECKED[name]
    for values in (bad, good, bad):
        moved = [one.to("bp") if isinstance(one, torch.Tensor) else one for one in values]
        if values is bad:
            with pytest.raises(RuntimeError, match=words):
                function(*moved)
        else:
            function(*moved)
