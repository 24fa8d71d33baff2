"""PyTorch's operators on lazy clones: memory that is only read stays shared, and writes do not reach other clones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from agreement import DEVICE, on_device
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_backplane import plans

is_shared = torch._C._is_cow_tensor

# A run tests every SHARDS-th operator of PyTorch's database. The test's seed, and so --seed, selects the first.
SHARDS = 8


def entries() -> Iterator[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [op for op in op_db if torch.float32 in op.dtypes]
    yield from chosen[torch.initial_seed() % SHARDS :: SHARDS]


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def first_sample(op: Any) -> Any:
    sample = next(iter(op.sample_inputs("cpu", torch.float32)), None)
    inputs = [] if sample is None else tensors((sample.input, sample.args, sample.kwargs))
    return sample if all(one.layout == torch.strided for one in inputs) else None


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Like torch.equal, but NaN is equal to NaN."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def lazy(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: torch._lazy_clone(tensor.detach()), value)


def test_operators_keep_memory_shared_that_they_only_read() -> None:
    wrong = []
    for op in entries():
        sample = first_sample(op)
        if sample is None:
            continue
        given = on_device((sample.input, sample.args, sample.kwargs))
        kept = [tensor.clone() for tensor in tensors(given)]
        clones = lazy(given)
        plans.clear()
        try:
            for _ in range(2):
                torch.manual_seed(0)
                first, args, kwargs = clones
                op.op(first, *args, **kwargs)
        except Exception:
            continue
        # Some entries are of operators that write to an argument.
        written = [not is_equal(one, old) for one, old in zip(tensors(clones), kept, strict=True)]
        for name, found in (("clone", tensors(clones)), ("original", tensors(given))):
            read = [one for one, new in zip(found, written, strict=True) if one.numel() and not new]
            if not all(map(is_shared, read)):
                wrong.append(f"{op.full_name}: its {name} is no longer shared")
        if not all(map(is_equal, tensors(given), kept)):
            wrong.append(f"{op.full_name}: it wrote to the original")
        wrong += [
            f"{op.full_name}: {name} {reason}"
            for name, one in plans.stats().items()
            for reason in one["reasons"]
            if "copy-on-write" in reason
        ]
    assert not wrong, "\n".join(wrong)


def test_in_place_operators_do_not_write_to_shared_memory() -> None:
    wrong = []
    for op in entries():
        inplace = op.inplace_variant
        sample = first_sample(op) if inplace is not None else None
        if sample is None or sample.broadcasts_input or not isinstance(sample.input, torch.Tensor):
            continue
        given = on_device((sample.input, sample.args, sample.kwargs))
        kept = given[0].clone()
        try:
            expected, args, kwargs = on_device((sample.input, sample.args, sample.kwargs))
            torch.manual_seed(0)
            torch.bp.manual_seed(0)
            inplace(expected, *args, **kwargs)
        except Exception:
            continue
        for _ in range(2):
            clone, args, kwargs = lazy(given)
            torch.manual_seed(0)
            torch.bp.manual_seed(0)
            inplace(clone, *args, **kwargs)
            if not is_equal(given[0], kept):
                wrong.append(f"{op.full_name}: it wrote to the original")
            if not is_equal(clone, expected):
                wrong.append(f"{op.full_name}: its result differs from that without sharing")
    assert not wrong, "\n".join(wrong)


def test_running_statistics_not_marked_as_written_in_the_schema() -> None:
    x = torch.randn(5, 3, device=DEVICE)
    mean, var = torch.zeros(3, device=DEVICE), torch.ones(3, device=DEVICE)
    for _ in range(2):
        lazy_mean, lazy_var = torch._lazy_clone(mean), torch._lazy_clone(var)
        torch.native_batch_norm(x, None, None, lazy_mean, lazy_var, True, 0.5, 1e-5)
        assert mean.tolist() == [0.0] * 3
        assert var.tolist() == [1.0] * 3
        torch.testing.assert_close(lazy_mean, x.mean(0) / 2)
