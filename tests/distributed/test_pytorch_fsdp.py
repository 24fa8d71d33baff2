"""Sharded training and DTensor on bp, with PyTorch's base classes, models and comparisons (renamed_tests.py)."""

# ruff: noqa: PT009 - the classes are PyTorch's TestCase

from __future__ import annotations

import copy
import os
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from renamed_tests import InForks, fsdp
from torch.distributed.checkpoint import state_dict as checkpoint_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

fsdp.get_cycles_per_ms = lambda: 1_000_000  # of torch.bp._sleep

RECURSIVE, BEFORE = fsdp.FSDPInitMode.RECURSIVE, fsdp.DEVICEInitMode.DEVICE_BEFORE


class TestFullyShardedDataParallel(InForks, fsdp.FSDPTest):
    """FSDP1: the losses and parameters of each model are those of DistributedDataParallel."""

    SHARDED: ClassVar = (None, ShardingStrategy.SHARD_GRAD_OP)

    def check(self, model: Any, strategies: Any = (*SHARDED, ShardingStrategy.NO_SHARD), **options: Any) -> None:
        for strategy in strategies:
            self._test_fsdp_parity(model, RECURSIVE, BEFORE, sharding_strategy=strategy, **options)

    def test_nested_modules(self) -> None:
        self.check(fsdp.NestedWrappedModule)

    def test_always_wrapped_modules(self) -> None:
        self.check(fsdp.AlwaysWrapNestedWrappedModule, use_orig_params=True)

    def test_a_transformer_with_shared_parameters(self) -> None:
        self.check(fsdp.TransformerWithSharedParams)

    def test_parameters_without_gradients(self) -> None:
        # With NO_SHARD, PyTorch loses parameters of this model in state dicts, also on the CPU.
        self.check(fsdp.NonUniformReqGradNWM, self.SHARDED, use_orig_params=True)

    def test_a_mixture_of_experts(self) -> None:
        self.check(fsdp.MixtureOfExperts, ref_init_fn=fsdp.DummyDDP)  # which does not reduce the experts' gradients

    def test_delays_after_the_loss_and_before_the_reduction(self) -> None:
        self.check(
            fsdp.NestedWrappedModuleWithDelay,
            init_kwargs={"delay_after_loss_ms": 20, "delay_before_reduction_ms": 20},
        )

    def test_parameters_on_the_cpu(self) -> None:
        self._test_fsdp_parity(fsdp.NestedWrappedModule, RECURSIVE, BEFORE, cpu_offload=CPUOffload(offload_params=True))

    def test_mixed_precision(self) -> None:
        half = MixedPrecision(torch.float16, torch.float16, torch.float16)
        self.check(fsdp.NestedWrappedModule, mixed_precision=half)


class TestFullyShard(InForks, fsdp.FSDPTest, VerifyStateDictMixin):
    """FSDP2: a sharded model trains like one whose gradients are averaged over all ranks."""

    def models(self, **options: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(fsdp.MLP(8, device="bp") for _ in range(3)))
        sharded = copy.deepcopy(model)
        for layer in sharded:
            fully_shard(layer, **options)
        return model, fully_shard(sharded, **options)

    def train(self, model: Any, sharded: Any, steps: int = 3, factor: float = 0.0) -> None:
        optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (model, sharded)]
        torch.manual_seed(self.rank + 1)
        for _ in range(steps):
            inputs = torch.randn(4, 8, device="bp")
            losses = [one(inputs).square().sum() for one in (model, sharded)]
            for loss in losses:
                loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= factor or self.world_size
            self.assertEqual(losses[0], losses[1])
            fsdp.check_sharded_parity(self, model, sharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def test_training(self) -> None:
        for reshard in (True, False, 2):
            self.train(*self.models(reshard_after_forward=reshard))

    def test_replicated_shards(self) -> None:
        mesh = init_device_mesh("bp", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.train(*self.models(mesh=mesh))

    def test_a_factor_of_the_gradients(self) -> None:
        model, sharded = self.models()
        for layer in (*sharded, sharded):
            layer.set_gradient_divide_factor(3.0)
        self.train(model, sharded, factor=3.0)

    def test_parameters_on_the_cpu(self) -> None:
        model, sharded = self.models(offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.01)
        sharded(torch.ones(2, 8, device="bp")).sum().backward()
        optimizer.step()
        for parameter, before in zip(sharded.parameters(), model.parameters(), strict=True):
            self.assertEqual(parameter.device.type, "cpu")
            self.assertEqual(parameter.shape, before.shape)
        self.assertEqual(sharded(torch.ones(2, 8, device="bp")).device.type, "bp")

    def test_gradients_reduced_in_another_dtype(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        _, sharded = self.models(mp_policy=policy)
        out = sharded(torch.ones(2, 8, device="bp"))
        self.assertEqual(out.dtype, torch.bfloat16)
        out.sum().backward()
        for parameter in sharded.parameters():
            self.assertEqual(parameter.grad.dtype, torch.float32)
            self.assertEqual(parameter.grad.to_local().device.type, "bp")

    def test_gradients_accumulate_without_communication(self) -> None:
        model, sharded = self.models()
        torch.manual_seed(self.rank + 1)
        for last in (False, True):
            sharded.set_requires_gradient_sync(last)
            inputs = torch.randn(4, 8, device="bp")
            for one in (model, sharded):
                one(inputs).square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        fsdp.check_sharded_parity(self, model, sharded)
        norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (model, sharded)]
        self.assertEqual(norms[0], norms[1].full_tensor())
        fsdp.check_sharded_parity(self, model, sharded)

    def test_state_dicts(self) -> None:
        model, sharded = self.models()
        whole = torch.optim.AdamW(model.parameters(), lr=0.01)
        parts = torch.optim.AdamW(sharded.parameters(), lr=0.01)
        for one, optimizer in ((model, whole), (sharded, parts)):
            one(torch.ones(2, 8, device="bp")).square().sum().backward()
            optimizer.step()
        model_state, optimizer_state = checkpoint_state.get_state_dict(sharded, parts)
        self._verify_msd(model.state_dict(), model_state)
        self._verify_osd(model, whole, whole.state_dict(), optimizer_state)
        full = checkpoint_state.StateDictOptions(full_state_dict=True, cpu_offload=True)
        on_cpu = checkpoint_state.get_model_state_dict(sharded, options=full)
        if self.rank == 0:
            for name, value in model.state_dict().items():
                self.assertEqual(on_cpu[name], value.cpu())
        again, _ = self.models()
        fully_shard(again)
        checkpoint_state.set_model_state_dict(again, model_state)
        self._verify_msd(model.state_dict(), again.state_dict())


class TestThreads(fsdp.FSDPTestMultiThread):
    """PyTorch's process group of threads: ranks share bp:0."""

    @classmethod
    def setUpClass(cls) -> None:
        environment = mock.patch.dict(os.environ)  # restores what PyTorch's class sets for the process
        environment.start()
        cls.addClassCleanup(environment.stop)
        super().setUpClass()

    def test_sharded_tensors_on_threads(self) -> None:
        mesh = init_device_mesh("bp", (self.world_size,))
        whole = torch.arange(16.0, device="bp").view(8, 2)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert isinstance(sharded, DTensor)
        self.assertEqual(sharded.to_local(), whole[2 * self.rank : 2 * self.rank + 2])
        self.assertEqual(sharded.full_tensor(), whole)
        self.assertEqual(sharded.sum().full_tensor(), whole.sum())

    def test_sharded_training_on_threads(self) -> None:
        torch.manual_seed(0)
        model = fsdp.MLP(8, device="bp")
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)
        sharded = fully_shard(copy.deepcopy(model), mesh=init_device_mesh("bp", (self.world_size,)))
        inputs = torch.full((2, 8), float(self.rank), device="bp")
        for one in (model, sharded):
            one(inputs).square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        fsdp.check_sharded_parity(self, model, sharded)


pytestmark = pytest.mark.slow
