"""Lazy clones share memory until one of them is written: it gets its own memory first. Reads keep memory shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

is_shared = torch._C._is_cow_tensor


def numbers(device: str = "bp") -> Tensor:
    return torch.arange(24.0).view(4, 6).to(device)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "fill_": lambda t: t.fill_(3.0),
    "zero_": lambda t: t.zero_(),
    "add_": lambda t: t.add_(1.0),
    "mul_ by itself": lambda t: t.mul_(t),
    "add_ of a view": lambda t: t[0].add_(t[1]),
    "copy_ from the CPU": lambda t: t.copy_(torch.ones(4, 6)),
    "copy_ of a dtype": lambda t: t.copy_(torch.ones(4, 6, dtype=torch.int64, device=t.device)),
    "copy_": lambda t: t.copy_(torch.ones(4, 6, device=t.device)),
    "copy_ of a part": lambda t: t[0].copy_(t[2]),
    "copy_ to a stride": lambda t: t[:, ::2].copy_(t[:, 1::2]),
    "copy_ across devices": lambda t: t.copy_(torch.ones(4, 6, device="bp:1")),
    "an assignment": lambda t: t.__setitem__((slice(None), 2), 9.0),
    "index_put_": lambda t: t.index_put_((torch.tensor([1], device=t.device),), torch.ones(6, device=t.device)),
    "out=": lambda t: torch.add(t, t, out=t),
    "out= of a part, from another": lambda t: torch.add(t[0], t[1], out=t[2]),
    "out= that the input aliases": lambda t: torch.sub(t.view(-1), 1.0, out=t.view(-1)),
    "addcdiv_": lambda t: t.addcdiv_(t + 1.0, t + 2.0),
    "a fallback in place": lambda t: t.lgamma_().erfinv_(),
    "a fallback to out=": lambda t: torch.linalg.inv(t[:, :4] + torch.eye(4, device=t.device) * 50, out=t[:, :4]),
    "sort to out=": lambda t: torch.sort(t, descending=True, out=(t, torch.zeros_like(t, dtype=torch.int64))),
    "cumsum_": lambda t: t.cumsum_(0),
    "normal_ and zero_": lambda t: t.normal_().zero_(),
    "_foreach_add_": lambda t: torch._foreach_add_([t[0], t[1]], 2.0),
    "resize_": lambda t: t.resize_(5, 6)[4].fill_(7.0),
    "a storage that grows": lambda t: (t.untyped_storage().resize_(200), t[0].fill_(2.0)),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("side", ["the clone", "the original", "a clone of the clone", "a clone of a view"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_does_not_change_other_clones(name: str, side: str, times: int) -> None:
    """Twice: with plans, the first call records one and the second replays it."""
    expected = numbers("cpu")
    WRITES[name](expected)
    for _ in range(times):
        base = numbers()
        whole = torch._lazy_clone(base)
        sides = {
            "the clone": whole,
            "the original": base,
            "a clone of the clone": torch._lazy_clone(whole),
            "a clone of a view": torch._lazy_clone(base.view(2, 12)).view(4, 6),
        }
        WRITES[name](sides[side])
        found = sides.pop(side).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        for other in sides.values():
            assert torch.equal(other.cpu(), numbers("cpu"))


def test_plans_of_reads_keep_memory_shared() -> None:
    """A plan must not treat a clone's memory as its own and hand it out at the next call."""
    base = numbers()
    clone = torch._lazy_clone(base)
    for _ in range(3):
        found = clone + 1
        assert torch.equal((torch.zeros(4, 6, device="bp") + 1).cpu(), torch.ones(4, 6))
        assert torch.equal(found.cpu(), numbers("cpu") + 1)
    assert is_shared(base)
    assert is_shared(clone)
    assert torch.equal(base.cpu(), numbers("cpu"))


READS: dict[str, Callable[[Tensor], Any]] = {
    "to the CPU": lambda t: t.cpu(),
    "item": lambda t: t[0, 1].item(),
    "a clone": lambda t: t.clone(),
    "a dtype": lambda t: t.to(torch.int64),
    "another device": lambda t: t.to("bp:1"),
    "contiguous": lambda t: t.t().contiguous(),
    "a view": lambda t: t.view(2, 12)[1],
    "an operator": lambda t: t * 2 + t,
    "a reduction": lambda t: t.sum(0),
    "a product": lambda t: t @ t.t(),
    "a fallback": lambda t: torch.special.bessel_j0(t),
    "set_": lambda t: torch.empty(0, device=t.device).set_(t),
    "printing": repr,
    "record_stream": lambda t: t.record_stream(torch.accelerator.current_stream(t.device)),
}


@pytest.mark.parametrize("name", READS)
def test_reads_keep_memory_shared(name: str) -> None:
    base = numbers()
    clone = torch._lazy_clone(base)
    for _ in range(2):
        READS[name](clone)
        assert is_shared(clone)
        assert is_shared(base)
        assert torch.equal(clone.cpu(), numbers("cpu"))


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("index", [0, 1])
def test_a_clones_own_memory_is_on_its_device(index: int, current: int) -> None:
    base = numbers(f"bp:{index}")
    clone = torch._lazy_clone(base)
    with torch.accelerator.device_index(current):
        before = torch.accelerator.memory_allocated(index)
        clone.data_ptr()  # the pointer allows writes
        assert torch.accelerator.memory_allocated(index) == before + 512
        base.add_(1.0)
    assert torch.equal(clone.cpu(), numbers("cpu"))
    assert torch.equal(base.cpu(), numbers("cpu") + 1)


def test_record_stream_keeps_shared_memory_until_the_stream_completes() -> None:
    side = torch.Stream(device="bp")
    base = numbers()
    address = base.data_ptr()
    clone = torch._lazy_clone(base)
    with side:
        torch.bp._sleep(200_000_000)
        clone.record_stream(side)
    del base, clone
    assert numbers().data_ptr() != address
    side.synchronize()
