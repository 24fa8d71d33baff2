"""Runs PyTorch's module and optimizer databases on bp and compares the results with the CPU."""

# ruff: noqa: PT009 - the classes are PyTorch's TestCase

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from outcome import to_device
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import module_db, modules
from torch.testing._internal.common_optimizers import optim_db, optims
from torch.testing._internal.common_utils import TestCase, parametrize

from torch_backplane.conformance.transfer import tensors


class TestModuleDatabase(TestCase):
    """Modules give the same results, gradients and buffers on the device as on the CPU."""

    @modules(module_db, allowed_dtypes=(torch.float32,))
    def test_agrees_with_cpu(self, device: str, dtype: torch.dtype, module_info: Any, training: bool) -> None:
        cases = module_info.module_inputs_func(
            module_info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for case in cases:
            if case.forward_input is not None:
                found, expected = (self.run_once(case, module_info, one, dtype, training) for one in (device, "cpu"))
                self.assertEqual(found, expected, case.desc, atol=2e-5, rtol=1e-5)

    def run_once(self, case: Any, info: Any, device: str, dtype: torch.dtype, training: bool) -> list[Any]:
        """Runs a module and returns its results, gradients (of inputs and parameters) and buffers on the CPU."""
        torch.manual_seed(0)
        module = info.module_cls(*case.constructor_input.args, **case.constructor_input.kwargs)
        module = module.to(dtype).train(training)
        args, kwargs = case.forward_input.args, case.forward_input.kwargs
        if isinstance(module, LazyModuleMixin):  # the first call initializes the parameters
            module(*args, **kwargs)
        module = module.to(device)
        args, kwargs = to_device((args, kwargs), device)
        result = module(*args, **kwargs)
        leaves = [one for one in tensors((args, kwargs)) if one.requires_grad] + list(module.parameters())
        outputs = [one for one in tensors(result) if one.requires_grad]
        for one in tensors(result):
            self.assertEqual(one.device.type, torch.device(device).type)
        gradients: Any = []
        if outputs and leaves:
            given = [torch.linspace(0, 1, one.numel()).view(one.shape).to(device) for one in outputs]
            gradients = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
        return [
            None if one is None else one.detach().cpu()
            for one in (*tensors(result), *gradients, *module.buffers())
        ]


class TestOptimizerDatabase(TestCase):
    """Optimizer steps on the device give the same parameters as on the CPU, with each implementation."""

    @parametrize("implementation", ["default", "foreach", "forloop", "fused", "capturable"])
    @optims([one for one in optim_db if not one.only_supports_sparse_grads], dtypes=[torch.float64])
    def test_steps_agree_with_cpu(self, device: str, dtype: torch.dtype, optim_info: Any, implementation: str) -> None:
        supported = {"default", *optim_info.supported_impls}
        supported |= {"forloop"} if "foreach" in supported else set()
        supported |= {"capturable"} if optim_info.has_capturable_arg else set()
        options = {"default": {}, "forloop": {"foreach": False}}.get(implementation, {implementation: True})
        if implementation not in supported:
            self.skipTest(f"{optim_info.optim_cls.__name__} has no {implementation} implementation")
        for case in optim_info.optim_inputs_func(device="cpu"):
            given = {**case.kwargs, **options}
            expected = self.train(optim_info, case.kwargs, "cpu", dtype)
            found = self.train(optim_info, given, device, dtype)
            self.assertEqual(found, expected, case.desc, atol=1e-6, rtol=1e-5)  # a counter may be float32

    def train(self, info: Any, options: dict[str, Any], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        starts = [torch.linspace(-1, 1, n, dtype=dtype).reshape(n // 4, 4) for n in (12, 4, 20)]
        weights = [one.to(device).requires_grad_() for one in starts]
        moved = {
            name: value.to(device) if isinstance(value, torch.Tensor) and options.get("capturable") else value
            for name, value in options.items()
        }
        optimizer = info.optim_cls(weights, **moved)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.stack([(one * (at + 1) - 0.3).square().sum() for at, one in enumerate(weights)]).sum()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
        return [one.detach().cpu() for one in weights]


with mock.patch.dict(os.environ, PYTORCH_TESTING_DEVICE_ONLY_FOR="bp"):
    instantiate_device_type_tests(TestModuleDatabase, globals())
    instantiate_device_type_tests(TestOptimizerDatabase, globals())
