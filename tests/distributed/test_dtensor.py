"""DTensor on bp, in PyTorch's own base class for tests with several processes."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.testing import assert_close
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms


class TestDTensor(DTensorTestBase):
    """Each test starts two processes. `device_type` is PyTorch's default, the accelerator."""

    @property
    def backend(self) -> str:
        return "cpu:gloo,bp:backplane"

    @property
    def world_size(self) -> int:
        return 2

    @with_comms
    def test_redistribute(self) -> None:
        assert self.device_type == "bp"
        mesh = self.build_device_mesh()
        for shape in ((8, 6), (5, 3, 2), (2, 7)):
            whole = torch.arange(float(torch.Size(shape).numel()), device=self.device_type).view(shape)
            placements = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            for source, target in itertools.product(placements, placements):
                sent = distribute_tensor(whole, mesh, [source]).redistribute(mesh, [target])
                assert sent.placements == (target,)
                assert sent.to_local().device.type == "bp"
                assert_close(sent.full_tensor(), whole)

    @with_comms
    def test_operators_and_their_gradients(self) -> None:
        mesh = self.build_device_mesh()
        torch.manual_seed(0)
        x, w = torch.randn(6, 4), torch.randn(4, 8)
        for of_x, of_w in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
            plain = [one.to("bp").requires_grad_() for one in (x, w)]
            spread = [
                distribute_tensor(one.to("bp"), mesh, [how]).requires_grad_()
                for one, how in ((x, of_x), (w, of_w))
            ]
            losses = [torch.softmax(a @ b, dim=1).square().sum() for a, b in (plain, spread)]
            for loss in losses:
                loss.backward()
            assert_close(losses[1].full_tensor(), losses[0])
            for one, other in zip(spread, plain, strict=True):
                assert_close(one.grad.full_tensor(), other.grad)

    @with_comms
    def test_partial_results_are_reduced(self) -> None:
        mesh = self.build_device_mesh()
        x = distribute_tensor(torch.arange(8.0, device="bp"), mesh, [Shard(0)])
        for reduction, expected in (("sum", 28.0), ("mean", 3.5), ("amax", 7.0)):
            result = getattr(x, reduction)()
            assert isinstance(result.placements[0], Partial)
            assert result.full_tensor().item() == expected
