"""Attention and its gradients by a library of the device's driver (the families attention and attention_backward).

A library gets a finite bias: minus infinity is replaced by the dtype's least number, which leaves the same keys out. A
query that is left with no key would then attend to all of them equally, so its row of the result is set to 0 after the
call, and its row of the gradient before. This holds whatever the library does with infinities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_backplane.planning import LibraryCall, runtime

_ALIGNMENT = 16  # bytes, of all operands and of the distances between their rows
_OPERANDS = ("query", "key", "value", "out", "grad", "query_grad", "key_grad", "value_grad")
_RESULTS = ("query_grad", "key_grad", "value_grad")


@dataclass(frozen=True)
class Attended:
    """A call of attention or of its gradients.

    Args:
        tensors: operands and results of shape (batch, heads, length, columns), by the names of the family. Gradients
            that are not asked for are None.
        bias: expandable to the scores, or None.
        causal: whether queries attend to no later keys.
        lacks: why only kernels compute the call, as a phrase that continues «it»; None if libraries do, too.
    """

    tensors: Mapping[str, torch.Tensor | None]
    bias: torch.Tensor | None
    causal: bool
    lacks: str | None = None

    @property
    def query(self) -> torch.Tensor:
        return self.operand("query")

    def operand(self, name: str) -> torch.Tensor:
        found = self.tensors[name]
        assert found is not None
        return found

    @property
    def is_backward(self) -> bool:
        return "grad" in self.tensors

    def call(self) -> LibraryCall:
        family = "attention_backward" if self.is_backward else "attention"
        return LibraryCall(self.query.device, family, self.query.dtype, self._integers)

    def expanded_bias(self) -> torch.Tensor | None:
        """The bias for all queries and keys, and for one or all batches and heads."""
        if self.bias is None:
            return None
        four = self.bias.reshape([1] * (4 - self.bias.dim()) + list(self.bias.shape))
        return four.expand(-1, -1, self.query.shape[2], self.operand("key").shape[2])

    def _integers(self) -> dict[str, int]:
        query, key, value = map(self.operand, ("query", "key", "value"))
        bias = self.expanded_bias()
        found = {
            "causal": int(self.causal),
            "has_bias": int(bias is not None),
            "batch": query.shape[0],
            "heads": query.shape[1],
            "key_heads": key.shape[1],
            "queries": query.shape[2],
            "keys": key.shape[2],
            "columns": query.shape[3],
            "value_columns": value.shape[3],
            **_named("bias", (0, 0, 0) if bias is None else _bias_strides(bias)),
        }
        for name in _OPERANDS:
            if name in self.tensors:
                like = self.operand(name.removesuffix("_grad")) if name in _RESULTS else self.operand(name)
                is_copied = name == "grad" and bias is not None
                found |= _named(name, _strides(None if is_copied else self.tensors[name], like.shape))
        return found


def _named(name: str, strides: tuple[int, ...]) -> dict[str, int]:
    return dict(zip((f"{name}_batch", f"{name}_head", f"{name}_row"), strides, strict=True))


def _is_ready(tensor: torch.Tensor) -> bool:
    """Whether a library can use the tensor without a copy."""
    unit = _ALIGNMENT // tensor.itemsize
    outer = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return (
        tensor.stride(3) == 1
        and all(size == 1 or (step > 0 and step % unit == 0) for size, step in outer)
        and runtime.is_aligned(tensor, _ALIGNMENT)
    )


def _strides(tensor: torch.Tensor | None, shape: torch.Size) -> tuple[int, ...]:
    """The strides of a batch, a head and a row of the tensor, or of the contiguous one that replaces it."""
    strides = [1]
    given = tensor.stride() if tensor is not None and _is_ready(tensor) else None
    for dim in (2, 1, 0):
        packed = shape[dim + 1] * strides[-1]
        strides.append(packed if given is None or shape[dim] == 1 else given[dim])
    return tuple(reversed(strides[1:]))


def _bias_strides(bias: torch.Tensor) -> tuple[int, int, int]:
    batches, heads, rows, columns = bias.shape
    return 0 if batches == 1 else heads * rows * columns, 0 if heads == 1 else rows * columns, columns


def why_not(query: torch.Tensor, call: Attended) -> str | None:
    """Why no library computes the call, in words that follow «it»; None if one does."""
    if not torch._C._get_cudnn_sdp_enabled():  # a part of the signature of plans: csrc/plans/signature.cpp
        return "is disabled (SDPBackend.CUDNN_ATTENTION)"
    if call.lacks is not None:
        return call.lacks
    if call.is_backward and torch.are_deterministic_algorithms_enabled():
        return "may add gradients up in any order, and deterministic algorithms are enabled"
    if call.bias is not None and call.causal:
        return "does not support a mask in addition to is_causal"
    if call.bias is not None and call.bias.dtype != query.dtype:
        return "needs a mask of the operands' dtype"
    return call.call().why_not()


def workspace(query: torch.Tensor, call: Attended) -> int:
    """Bytes of the routine's workspace."""
    return call.call().workspace()


def cost(query: torch.Tensor, call: Attended) -> int | None:
    """The routine's cost (`planning.costs`); None if the library does not state it."""
    return call.call().cost()


def compute(call: Attended, logarithm: torch.Tensor, scale: float) -> None:
    """Computes the result of `call` and the logarithms of the softmax's denominators."""
    kept, bias = _finite(call)
    out = call.operand("out")
    result = _result(out)
    operands = [_ready(call.operand(name)) for name in ("query", "key", "value")]
    call.call().run([result, logarithm, *operands, operands[0] if bias is None else bias], [scale], written=2)
    if kept is not None:
        result.masked_fill_(kept.logical_not(), 0)
        logarithm.masked_fill_(kept.logical_not().squeeze(3), -torch.inf)
    if result is not out:
        out.copy_(result)


def compute_gradients(call: Attended, logarithm: torch.Tensor, scale: float) -> None:
    """Computes the gradients in `call`."""
    kept, bias = _finite(call)
    grad, logarithm = call.operand("grad"), logarithm.contiguous()
    if kept is None:
        grad = _ready(grad)
    else:
        grad = grad.masked_fill(kept.logical_not(), 0).contiguous()
        logarithm = logarithm.masked_fill(kept.logical_not().squeeze(3), 0)
    results = {name: _result(call.tensors[name], call.operand(name.removesuffix("_grad"))) for name in _RESULTS}
    operands = [_ready(call.operand(name)) for name in ("query", "key", "value")]
    saved = [operands[0] if bias is None else bias, _ready(call.operand("out")), logarithm]
    call.call().run([*results.values(), grad, *operands, *saved], [scale], written=3)
    for name, result in results.items():
        asked = call.tensors[name]
        if asked is not None and asked is not result:
            asked.copy_(result)


def _finite(call: Attended) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Which queries are left with a key, and the finite bias. None without a bias."""
    bias = call.expanded_bias()
    if bias is None:
        return None, None
    kept = (bias > -torch.inf).any(3, keepdim=True)
    finite = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    return kept, finite.copy_(bias.clamp(min=torch.finfo(bias.dtype).min))


def _ready(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_ready(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _result(asked: torch.Tensor | None, like: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that the library writes: the one that is asked for, or a contiguous one."""
    if asked is not None and _is_ready(asked):
        return asked
    like = asked if asked is not None else like
    assert like is not None
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
