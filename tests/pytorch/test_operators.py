"""Runs PyTorch's operator database on bp and compares with the CPU: out=, variants, layouts, errors, gradients, vmap.

The tests follow PyTorch's `TestCommon`, `TestGradients` and functorch's tests, which PyTorch's wheel does not contain.
A part of the tests runs by default; `--whole` runs all (`make test-pytorch`).
"""

# ruff: noqa: PT009, PT027 - the classes are PyTorch's TestCase

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from outcome import Outcome, outcome, samples_of, to_device
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.utils._pytree import tree_map_only

from torch_backplane.conformance.transfer import WIDER, noncontiguous, spaced, tensors, transposed

SAMPLES = 5
# Operators whose results are uninitialized.
WITHOUT_NUMBERS = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
# (relative, absolute) by dtype. The absolute tolerance is multiplied by 1 + the largest value of the result, because
# implementations add in different orders.
TOLERANCES = {
    torch.float64: (1e-7, 1e-9), torch.complex128: (1e-7, 1e-9), torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5), torch.float16: (1e-2, 1e-3), torch.bfloat16: (5e-2, 1e-2),
}  # fmt: skip
# Operators whose results are random in at least some samples.
RANDOM = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "pca_lowrank",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "svd_lowrank",
    "torch.ops.aten._flash_attention_forward",
    "uniform", *(f"nn.functional.{name}" for name in (
        "alpha_dropout", "dropout", "dropout2d", "dropout3d", "feature_alpha_dropout", "fractional_max_pool2d",
        "fractional_max_pool3d", "multi_head_attention_forward", "rrelu", "scaled_dot_product_attention",
    )),
}  # fmt: skip
# PyTorch's CPU kernel writes out of bounds of such a result and crashes the process.
CRASHES_ON_CPU = {("linalg.lu", "transposed"), ("lu_unpack", "transposed")}
# PyTorch's CPU kernel resizes such a result, and then refuses it.
REFUSED_BY_CPU = {("native_batch_norm", "longer"), ("_native_batch_norm_legit", "longer")}
# Operators on sparse tensors, which bp does not support (test_fallback.py).
SPARSE = {"sparse.mm", "sparse.sampled_addmm", "to_sparse"}
OPERATORS = [op for op in op_db if op.name not in WITHOUT_NUMBERS | SPARSE]
WITH_OUT = [op for op in OPERATORS if op.supports_out]
DIFFERENTIABLE = [op for op in OPERATORS if op.supports_autograd]


def is_tensors(result: Any) -> bool:
    many = result if isinstance(result, (list, tuple)) else [result]
    return bool(many) and all(isinstance(one, torch.Tensor) for one in many)


def mapped(function: Callable[[torch.Tensor], torch.Tensor], result: Any) -> Any:
    """Applies a function to each result; returns a tensor or a tuple of tensors, as `out=` needs them."""
    if isinstance(result, torch.Tensor):
        return function(result)
    return tuple(function(one) for one in result)


def _longer(one: torch.Tensor) -> torch.Tensor:
    return one.new_full((*one.shape, 2) if one.dim() else (3,), 1)


# Makes an `out=` argument from the expected result. Its values are arbitrary.
OUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "same": lambda one: torch.full_like(one, 1),
    "strided": lambda one: spaced(one).fill_(1),
    "transposed": lambda one: transposed(one).fill_(1) if one.dim() > 1 else torch.full_like(one, 1),
    "empty": lambda one: one.new_empty(0),
    "longer": _longer,
    "wider dtype": lambda one: one.new_full(one.shape, 1, dtype=WIDER.get(one.dtype, torch.float64)),
    "integer dtype": lambda one: one.new_full(one.shape, 1, dtype=torch.int32),
}


def significant_strides(found: Outcome) -> list[Any]:
    """Without those of dimensions of size 1, and of results without elements (torch._prims_common).

    Meta kernels, which say what the results of kernels look like, and CPU kernels differ in these.
    """
    return [
        strides and [one for one, size in zip(strides, result.shape, strict=True) if size > 1 and result.numel()]
        for strides, result in zip(found.strides, found.results, strict=True)
    ]


class TestOperatorDatabase(TestCase):
    """Calls have the same results, strides, warnings and errors on bp as on the CPU."""

    def runs_kernels(self) -> bool:
        return torch.bp.get_device_properties(0).driver != "host"

    def check(
        self, op: Any, dtype: torch.dtype, where: str, found: Outcome, expected: Outcome, *, strides: bool = True
    ) -> None:
        self.assertEqual(found.error, expected.error, f"{where}: {found}, and on the CPU {expected}")
        self.assertEqual(found.warned, expected.warned, f"{where}: {found}, and on the CPU {expected}")
        if strides:
            compared = [significant_strides(one) if self.runs_kernels() else one.strides for one in (found, expected)]
            self.assertEqual(*compared, f"{where}: {found}, and on the CPU {expected}")
        for one, other in zip(found.results, expected.results, strict=True):
            if op.name in RANDOM:
                self.assertEqual((one.shape, one.dtype), (other.shape, other.dtype), where)
                continue
            relative, absolute = self.tolerance(dtype, other)
            self.assertEqual(one, other, msg=lambda text: f"{where}: {text}", rtol=relative, atol=absolute)

    def tolerance(self, dtype: torch.dtype, result: torch.Tensor) -> tuple[float, float]:
        """Returns the relative and absolute tolerance of a result whose operator computes in `dtype`."""
        if not (result.is_floating_point() or result.is_complex()):
            return 0.0, 0.0
        relative, absolute = max(TOLERANCES.get(one, (0.0, 0.0)) for one in (dtype, result.dtype))
        values = result.to(torch.complex128 if result.is_complex() else torch.float64).abs()
        finite = values[values.isfinite()]
        return relative, absolute * (1 + (finite.max().item() if finite.numel() else 0))

    def are_close(self, dtype: torch.dtype, found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return False
            relative, absolute = self.tolerance(dtype, other)
            return torch.allclose(one, other, relative, absolute, equal_nan=True)

        return len(found) == len(expected) and all(map(is_close, found, expected))

    def compare(
        self,
        op: Any,
        dtype: torch.dtype,
        where: str,
        device: str,
        call: Callable[..., Any],
        *arguments: Any,
        strides: bool = True,
    ) -> None:
        """Compares `call(*arguments)` on `device` and on the CPU. `dtype` is the operator's compute dtype."""
        found, expected = (outcome(call, *to_device(arguments, one)) for one in (device, "cpu"))
        self.check(op, dtype, where, found, expected, strides=strides)

    @ops(WITH_OUT, dtypes=OpDTypes.any_common_cpu_cuda_one)
    def test_out(self, device: str, dtype: torch.dtype, op: Any) -> None:
        for sample in samples_of(op, dtype, 3):
            result = op(sample.input, *sample.args, **sample.kwargs)
            if not is_tensors(result):
                continue
            for name, made in OUTS.items():
                if (op.name, name) in CRASHES_ON_CPU:
                    continue
                def call(out: Any, input_: Any, args: Any, kwargs: Any) -> Any:
                    op(input_, *args, **kwargs, out=out)
                    return out

                for _ in range(2):  # the second call can be a replay
                    arguments = (mapped(made, result), sample.input, sample.args, sample.kwargs)
                    found, expected = (outcome(call, *to_device(arguments, one)) for one in (device, "cpu"))
                    right = [one.detach().resolve_conj().resolve_neg() for one in tensors(result)]
                    if self.runs_kernels() and (op.name, name) in REFUSED_BY_CPU:
                        expected.error, expected.results = None, right
                        expected.strides = [one.stride() for one in right]
                    elif (
                        self.runs_kernels()
                        and op.name not in RANDOM
                        and not self.are_close(dtype, found.results, expected.results)
                    ):
                        expected.results = right  # some CPU kernels, such as avg_pool3d's, ignore the strides of out=
                    self.check(op, dtype, f"out= {name}", found, expected)

    @ops(WITH_OUT, dtypes=OpDTypes.any_common_cpu_cuda_one)
    def test_out_on_another_device(self, device: str, dtype: torch.dtype, op: Any) -> None:
        for sample in samples_of(op, dtype, 1):
            result = op(sample.input, *sample.args, **sample.kwargs)
            given = to_device((sample.input, sample.args, sample.kwargs), device)
            if not is_tensors(result) or not tensors(given):
                continue  # factories run on the device of their result
            out = mapped(lambda one: torch.full_like(one, 1), result)
            with self.assertRaises(RuntimeError):
                op(given[0], *given[1], **given[2], out=out)
            for one in tensors(out):
                self.assertEqual(one, torch.full_like(one, 1))

    @ops(OPERATORS, dtypes=OpDTypes.any_common_cpu_cuda_one)
    def test_layouts(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def call(input_: Any, args: Any, kwargs: Any) -> Any:
            return op(input_, *args, **kwargs)

        for sample in samples_of(op, dtype, SAMPLES):
            given = (sample.input, sample.args, sample.kwargs)
            for name, layout in (("contiguous", None), ("strided", spaced), ("transposed", transposed)):
                arguments = given if layout is None else noncontiguous(given, layout)
                self.compare(op, dtype, name, device, call, *arguments)

    @ops(OPERATORS, dtypes=OpDTypes.any_common_cpu_cuda_one)
    def test_variants(self, device: str, dtype: torch.dtype, op: Any) -> None:
        variants = {"method": op.method_variant, "in place": op.inplace_variant, "operator": op.operator_variant,
                    "operator in place": op.inplace_operator_variant}  # fmt: skip
        for name, variant in variants.items():
            if variant is None:
                continue

            def call(input_: Any, args: Any, kwargs: Any, variant: Any = variant) -> Any:
                return variant(input_, *args, **kwargs)

            for sample in samples_of(op, dtype, 3):
                if "in place" in name and sample.broadcasts_input:
                    continue
                self.compare(op, dtype, name, device, call, sample.input, sample.args, sample.kwargs)

    @ops([op for op in OPERATORS if op.error_inputs_func is not None], dtypes=OpDTypes.none)
    def test_errors(self, device: str, op: Any) -> None:
        for case in op.error_inputs("cpu"):
            sample = case.sample_input
            call = (sample.input, sample.args, sample.kwargs)
            if any(one.is_meta for one in tensors(call)):
                continue
            moved = to_device(call, device)
            found, expected = (outcome(op, one[0], *one[1], **one[2]) for one in (moved, call))
            self.assertEqual(found.error, expected.error, f"{found}, and on the CPU {expected}")
            if case.error_regex and re.search(case.error_regex, expected.text):
                self.assertRegex(found.text, case.error_regex)
        for case in op.error_inputs(device):
            sample = case.sample_input
            if len({one.device.type for one in tensors((sample.input, sample.args, sample.kwargs))}) > 1:
                with self.assertRaisesRegex(case.error_type, case.error_regex):
                    op(sample.input, *sample.args, **sample.kwargs)

    @ops(DIFFERENTIABLE, allowed_dtypes=(torch.float64,))
    def test_gradients(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def call(input_: Any, args: Any, kwargs: Any) -> Any:
            result = op(input_, *args, **kwargs)
            inputs = [one for one in tensors((input_, args, kwargs)) if one.requires_grad]
            outputs = [one for one in tensors(result) if one.requires_grad]
            if not inputs or not outputs:
                return result
            given = [torch.linspace(-1, 1, o.numel()).view(o.shape).to(o.device, o.dtype) for o in outputs]
            gradients = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
            return [result, [one for one in gradients if one is not None]]

        for sample in samples_of(op, dtype, SAMPLES, requires_grad=True):
            self.compare(op, dtype, "gradients", device, call, sample.input, sample.args, sample.kwargs, strides=False)

    @ops([op for op in DIFFERENTIABLE if op.supports_forward_ad], allowed_dtypes=(torch.float64,))
    def test_forward_derivatives(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def call(input_: Any, args: Any, kwargs: Any) -> Any:
            with torch.autograd.forward_ad.dual_level():
                dual = tree_map_only(
                    torch.Tensor,
                    lambda one: torch.autograd.forward_ad.make_dual(one.detach(), torch.full_like(one, 0.5))
                    if one.is_floating_point() else one,
                    input_,
                )
                result = op(dual, *args, **kwargs)
                return [torch.autograd.forward_ad.unpack_dual(one).tangent for one in tensors(result)]

        for sample in samples_of(op, dtype, 3):
            self.compare(op, dtype, "jvp", device, call, sample.input, sample.args, sample.kwargs, strides=False)

    @ops(OPERATORS, dtypes=OpDTypes.any_common_cpu_cuda_one)
    def test_vmap(self, device: str, dtype: torch.dtype, op: Any) -> None:
        def call(input_: Any, args: Any, kwargs: Any) -> Any:
            return torch.vmap(lambda one: op(one, *args, **kwargs), randomness="same")(input_)

        for sample in samples_of(op, dtype, 2):
            if isinstance(sample.input, torch.Tensor):
                many = torch.stack([sample.input.detach(), sample.input.detach().flip(list(range(sample.input.dim())))])
                self.compare(op, dtype, "vmap", device, call, many, sample.args, sample.kwargs, strides=False)


with mock.patch.dict(os.environ, PYTORCH_TESTING_DEVICE_ONLY_FOR="bp"):
    instantiate_device_type_tests(TestOperatorDatabase, globals())
