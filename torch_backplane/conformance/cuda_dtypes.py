"""Checks operators in the dtypes that CUDA supports and the CPU does not, according to PyTorch's database.

The reference is still the CPU: in the same dtype if the call runs, else in a wider one. Inputs have the same values,
and results in the wider dtype are rounded to the dtype under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_backplane.conformance.calls import SampleCall
from torch_backplane.conformance.check import EntryCheck, Outcome
from torch_backplane.conformance.report import EntryResult
from torch_backplane.conformance.transfer import Transfer, tensors

# For each dtype that the CPU does not support, the one in which it computes the reference.
WIDER_SERVED = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex128,
    torch.bool: torch.uint8,
    torch.uint8: torch.float64,
    torch.int8: torch.float64,
    torch.int16: torch.float64,
    torch.int32: torch.float64,
    torch.int64: torch.float64,
}


def lacking_on_cpu(op: Any) -> list[torch.dtype]:
    """Return the dtypes that CUDA supports, forward or backward, and the CPU does not."""
    forward = set(op.supported_dtypes("cuda")) - set(op.supported_dtypes("cpu"))
    backward = set(op.supported_backward_dtypes("cuda")) - set(op.supported_backward_dtypes("cpu"))
    return sorted(forward | (backward if op.supports_autograd else set()), key=str)


def _nansum(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.sum(torch.where(x.isnan(), torch.zeros((), dtype=x.dtype), x), *args, **kwargs)


def _nanmean(x: torch.Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> torch.Tensor:
    dims = list(range(x.dim())) if dim is None else dim
    return _nansum(x, dims, keepdim, **kwargs) / torch.sum(~x.isnan(), dims, keepdim)


def _with_out(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        result = function(*args, **kwargs)
        return result if out is None else out.resize_(result.shape).copy_(result)

    return call


# Operators for which the CPU supports no wider dtype either, composed of others.
COMPOSED: dict[str, Callable[..., Any]] = {"nansum": _with_out(_nansum), "nanmean": _with_out(_nanmean)}

# (atol, rtol) for gradients and chains of transforms: values are rounded to float16 between operators, as on CUDA.
# PyTorch's own comparison of complex32 with complex64 allows 6e-2 and 5e-2 where rounding errors accumulate.
ROUNDED_BETWEEN = (1e-2, 5e-2)


class Converted(Transfer):
    """A transfer to the CPU that converts tensors of one dtype, and the dtype itself, to another."""

    def __init__(self, source: torch.dtype, target: torch.dtype) -> None:
        super().__init__(torch.device("cpu"))
        self._wider = {source: target}
        parts = {torch.float16: torch.complex32, torch.float32: torch.complex64}
        if source.is_complex and target.is_complex:  # also convert their real dtypes
            self._wider[source.to_real()] = target.to_real()
        elif source in parts and target in parts:  # also convert complex dtypes, the results of Fourier transforms
            self._wider[parts[source]] = parts[target]
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage:
        target = self._wider.get(tensor.dtype)
        source = tensor.untyped_storage()
        if (source._cdata, target) not in self._storages:
            self._sources.append(source)
            content = torch.empty(0, dtype=tensor.dtype if target else torch.uint8).set_(source)
            self._storages[source._cdata, target] = content.to(target or torch.uint8, copy=True).untyped_storage()
        return self._storages[source._cdata, target]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a tensor, at most once: a result that is an argument remains the same object."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = (tensor, super().tensor(tensor))
        return self._made[id(tensor)][1]


class CudaDtypeCheck(EntryCheck):
    """Checks an operator in a dtype that the CPU does not support."""

    def run(self, errors: bool) -> EntryResult:
        if self.op.full_name.startswith("fft."):
            self.allowed = ROUNDED_BETWEEN
        return super().run(errors)

    def _check_gradients(self, call: SampleCall) -> None:
        self.allowed = ROUNDED_BETWEEN
        super()._check_gradients(call)

    @property
    def wider(self) -> torch.dtype:
        return WIDER_SERVED.get(self.dtype, self.dtype)

    def _samples(self, variant: str, requires_grad: bool) -> Iterator[SampleCall]:
        """Yield the calls of the samples, generated in the dtype, or in a wider one if the CPU cannot generate them."""
        random.seed(20260)
        torch.default_generator.manual_seed(20260)
        conjugated = self.dtype.is_complex and self.op.test_conjugated_samples
        for dtype in (self.dtype, self.wider):  # making some samples needs operators that lack the dtype
            try:
                samples = list(self.op.sample_inputs("cpu", dtype, requires_grad, include_conjugated_inputs=conjugated))
                break
            except (RuntimeError, TypeError):
                if dtype == self.wider:
                    raise
        for index, sample in enumerate(samples[: self.settings.samples or None]):
            self.result.samples += 1
            arguments = Converted(dtype, self.dtype)((sample.input, tuple(sample.args), dict(sample.kwargs)))
            yield SampleCall(
                self.op.op, arguments, variant, index, sample.output_process_fn_grad,
                has_input=not sample.broadcasts_input,
            )  # fmt: skip

    def _has_gradients(self) -> bool:
        return (
            self.settings.grad
            and self.op.supports_autograd
            and (self.dtype.is_floating_point or self.dtype.is_complex)
            and self.dtype in self.op.supported_backward_dtypes("cuda")
        )

    def _invoke(
        self, call: SampleCall, device: torch.device, seed: int | None = None, *, wider: bool = False, **more: Any
    ) -> Outcome:
        if device.type != "cpu" or wider:
            return super()._invoke(call, device, seed, wider=wider, **more)
        outcome = super()._invoke(call, device, seed, **more)
        if outcome.error is None or (self.wider == self.dtype and self.op.full_name not in COMPOSED):
            return outcome
        self.announce(f"sample {call.sample}, {call.variant} (on the CPU in {self.wider})")
        outcome = Outcome(None)
        try:
            widen = Converted(self.dtype, self.wider)
            outcome.arguments = first, args, kwargs = widen(call.arguments)
            function = COMPOSED.get(self.op.full_name, call.function)
            result = function(first, *args, **kwargs)
            if torch.is_grad_enabled():
                outcome.result = torch.utils._pytree.tree_map_only(torch.Tensor, self._rounded, result)
            else:
                narrow = Converted(self.wider, self.dtype)
                outcome.result, outcome.arguments = narrow((result, outcome.arguments))
        except Exception as error:
            outcome.error = error
        return outcome

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Round a result from the wider dtype to the dtype under test, differentiably."""
        if tensor.dtype == self.wider:
            return tensor.to(self.dtype)
        if self.wider.is_complex and self.dtype.is_complex and tensor.dtype == self.wider.to_real():
            return tensor.to(self.dtype.to_real())
        if self.dtype == torch.float16 and tensor.dtype == torch.complex64:
            return tensor.to(torch.complex32)
        return tensor

    def _differentiate(
        self, call: SampleCall, outcome: Outcome, cotangents: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        made = super()._differentiate(call, outcome, cotangents)
        if outcome.error is None and any(leaf.is_cpu for leaf in tensors(outcome.result)):
            outcome.result = [None if grad is None else self._rounded(grad) for grad in outcome.result]
        return made
