"""torch.use_deterministic_algorithms: results are bitwise equal every time, also from the kernels for GPUs, which
otherwise add with atomics.

The operators are those that PyTorch's documentation of this function lists as nondeterministic on CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agreement import DEVICE, plans_from_the_start
from torch.nn import functional as F

from torch_backplane.kernels import Target

launch = importlib.import_module("torch_backplane.planning.launch")  # the package has a function of this name
Function = Callable[..., Any]


@contextmanager
def kernels_for_gpus() -> Iterator[list[str]]:
    """Generates kernels for GPUs. Yields the names of the kernels that are requested."""
    index = torch.device(DEVICE).index
    own, compiled = launch.dialect_of(index), launch.compiled
    names: list[str] = []

    def noted(index: int, kernel: Any, name: str) -> Any:
        names.append(kernel.name)
        return compiled(index, kernel, name)

    launch._generated.clear()
    launch._dialects[index] = type(own)(Target(float64=own.target.float64))
    launch.compiled = noted
    try:
        with plans_from_the_start():
            yield names
    finally:
        launch._generated.clear()
        launch._dialects[index], launch.compiled = own, compiled


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradient(function: Function) -> Function:
    def call(x: torch.Tensor, *others: Any) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = function(x, *others)
        return torch.autograd.grad(y, x, torch.cos(torch.arange(y.numel(), device=y.device).view(y.shape) * 1.0))[0]

    return call


def images(rank: int) -> torch.Tensor:
    return torch.randn(2, 3, *[8] * rank)


def places(size: int, *shape: int) -> torch.Tensor:
    return torch.randint(size, shape)


CALLS: dict[str, tuple[Function, Callable[[], tuple[Any, ...]]]] = {
    "index_put": (lambda x, i, s: x.index_put((i,), s), lambda: (torch.randn(9), places(9, 4000), torch.randn(4000))),
    "index_put accumulate": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda: (torch.randn(9), places(9, 4000), torch.randn(4000)),
    ),
    "index_put of a row": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda: (torch.randn(9, 5), places(9, 4000), torch.randn(5)),
    ),
    "put": (lambda x, i, s: x.put(i, s), lambda: (torch.randn(9), places(9, 4000), torch.randn(4000))),
    "put accumulate": (
        lambda x, i, s: x.put(i, s, accumulate=True),
        lambda: (torch.randn(9), places(9, 4000), torch.randn(4000)),
    ),
    "scatter": (
        lambda x, i, s: x.scatter(0, i, s),
        lambda: (torch.randn(9), places(9, 4000), torch.randn(4000)),
    ),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(0, i, s),
        lambda: (torch.randn(9), places(9, 4000), torch.randn(4000)),
    ),
    **{
        f"scatter_reduce {reduce}": (
            lambda x, i, s, reduce=reduce: x.scatter_reduce(0, i, s, reduce),
            lambda: (torch.randn(9), places(9, 4000), torch.rand(4000) + 0.5),
        )
        for reduce in ("sum", "prod", "mean", "amax")
    },
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s, alpha=0.3),
        lambda: (torch.randn(9, 3), places(9, 4000), torch.randn(4000, 3)),
    ),
    "index_copy": (
        lambda x, i, s: x.index_copy(0, i, s),
        lambda: (torch.randn(9, 3), places(9, 4000), torch.randn(4000, 3)),
    ),
    "index_reduce": (
        lambda x, i, s: x.index_reduce(0, i, s, "prod"),
        lambda: (torch.randn(9, 3), places(9, 400), torch.rand(400, 3) + 0.5),
    ),
    "indices, gradient": (gradient(lambda x, i: x[i]), lambda: (torch.randn(9, 3), places(9, 4000))),
    "gather, gradient": (gradient(lambda x, i: x.gather(0, i)), lambda: (torch.randn(9), places(9, 4000))),
    "index_select, gradient": (
        gradient(lambda x, i: x.index_select(0, i)),
        lambda: (torch.randn(9, 3), places(9, 4000)),
    ),
    "repeat_interleave, gradient": (
        gradient(lambda x, i: x.repeat_interleave(i, 0)),
        lambda: (torch.randn(9, 3), places(99, 9)),
    ),
    "embedding, gradient": (gradient(lambda w, i: F.embedding(i, w)), lambda: (torch.randn(9, 3), places(9, 4000))),
    "embedding by frequency, gradient": (
        gradient(lambda w, i: F.embedding(i, w, scale_grad_by_freq=True)),
        lambda: (torch.randn(9, 3), places(9, 4000)),
    ),
    "embedding_bag, gradient": (
        gradient(lambda w, i: F.embedding_bag(i, w, mode="max")),
        lambda: (torch.randn(9, 3), places(9, 40, 50)),
    ),
    "histc": (lambda x: torch.histc(x, 5), lambda: (torch.randn(9000),)),
    "bincount": (torch.bincount, lambda: (places(9, 4000), torch.randn(4000))),
    "median": (lambda x: torch.median(x, 0), lambda: (torch.randperm(400).float(),)),
    "nanmedian": (lambda x: torch.nanmedian(x, 0), lambda: (torch.randperm(400).float(),)),
    "kthvalue": (lambda x: torch.kthvalue(x, 30, 0), lambda: (torch.randperm(400).float(),)),
    "cumsum": (lambda x: x.cumsum(0), lambda: (torch.randn(3000),)),
    "nll_loss": (F.nll_loss, lambda: (torch.randn(3000, 5), places(5, 3000))),
    "ctc_loss, gradient": (
        gradient(lambda x, t: F.ctc_loss(x.log_softmax(-1), t, (20, 20), (5, 5))),
        lambda: (torch.randn(20, 2, 6), 1 + places(5, 2, 5)),
    ),
    "grid_sample, gradient": (
        gradient(lambda x, g: F.grid_sample(x, g, align_corners=False)),
        lambda: (images(2), torch.rand(2, 9, 9, 2)),
    ),
    **{
        f"{kind}{rank}d, gradient": (
            gradient(lambda x, kind=kind, rank=rank: getattr(F, f"{kind}{rank}d")(x, 3)),
            lambda rank=rank: (images(rank),),
        )
        for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
        for rank in (1, 2, 3)
    },
    **{
        f"overlapping max_pool{rank}d, gradient": (
            gradient(lambda x, rank=rank: getattr(F, f"max_pool{rank}d")(x, 3, 1)),
            lambda rank=rank: (images(rank),),
        )
        for rank in (1, 2, 3)
    },
    **{
        f"fractional_max_pool{rank}d, gradient": (
            gradient(
                lambda x, r, rank=rank: getattr(F, f"fractional_max_pool{rank}d")(x, 3, 5, _random_samples=r)
            ),
            lambda rank=rank: (images(rank), torch.rand(2, 3, rank)),
        )
        for rank in (2, 3)
    },
    **{
        f"max_unpool{rank}d": (
            lambda x, i, rank=rank: getattr(F, f"max_unpool{rank}d")(x, i, 2),
            lambda rank=rank: (images(rank), places(8**rank, 2, 3, *[8] * rank)),
        )
        for rank in (1, 2, 3)
    },
    **{
        f"interpolate {mode}, gradient": (
            gradient(lambda x, mode=mode: F.interpolate(x, scale_factor=1.7, mode=mode)),
            lambda rank=rank: (images(rank),),
        )
        for mode, rank in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3), ("nearest", 2))
    },
    **{
        f"{mode} pad {rank}d, gradient": (
            gradient(lambda x, mode=mode, rank=rank: F.pad(x, (2, 1) * rank, mode)),
            lambda rank=rank: (images(rank),),
        )
        for mode in ("reflect", "replicate")
        for rank in (1, 2, 3)
    },
    "conv2d, gradient": (gradient(F.conv2d), lambda: (images(2), torch.randn(4, 3, 3, 3))),
    "conv_transpose2d, gradient": (gradient(F.conv_transpose2d), lambda: (images(2), torch.randn(3, 4, 3, 3))),
}


def run(name: str) -> list[torch.Tensor]:
    function, inputs = CALLS[name]
    torch.manual_seed(0)
    given = [one.to(DEVICE) for one in inputs()]
    results = []
    for _ in range(3):
        found = function(*given)
        results.append(joined(found))
    return results


def joined(found: Any) -> torch.Tensor:
    """Returns all elements of a tensor or a tuple of tensors, as one float64 tensor on the CPU."""
    parts = found if isinstance(found, tuple) else (found,)
    return torch.cat([one.cpu().flatten().double() for one in parts])


@pytest.mark.parametrize("name", CALLS)
def test_results_repeat(name: str) -> None:
    with kernels_for_gpus() as kernels, deterministic():
        first, *others = run(name)
        assert not [kernel for kernel in kernels if kernel.endswith("_anyhow")]
        assert all(torch.equal(first, other) for other in others)
    function, inputs = CALLS[name]
    torch.manual_seed(0)
    with deterministic(warn_only=True):  # otherwise the order of the CPU's threads affects results
        expected = joined(function(*inputs()))
    torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-3)


def test_nondeterministic_kernels_run_only_without_the_mode() -> None:
    """Plans of one mode are not replayed in the other."""
    with kernels_for_gpus() as kernels:
        run("scatter_add")
        (anyhow,) = {kernel for kernel in kernels if kernel.endswith("_anyhow")}
        with deterministic():
            kernels.clear()
            run("scatter_add")
            assert kernels
            assert anyhow not in kernels
        kernels.clear()
        run("scatter_add")
        assert not kernels or anyhow in kernels


# Uninitialized memory


def new_memory(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns tensors from factories and from resize_, some of which keep elements from before."""
    there = torch.ones(2, 3, dtype=dtype, device=device)
    part = torch.ones(8, dtype=dtype, device=device)[2:6]
    return [
        torch.empty(3, dtype=dtype, device=device),
        torch.empty((), dtype=dtype, device=device),
        torch.empty_strided((3, 2), (1, 4), dtype=dtype, device=device),
        torch.empty_like(there),
        there.new_empty(2),
        torch.ones(2, 3, dtype=dtype, device=device).resize_(4, 5),
        torch.ones(2, 3, dtype=dtype, device=device).resize_(2),
        torch.ones(6, dtype=dtype, device=device).resize_(2).resize_(6),
        torch.ones(0, dtype=dtype, device=device).resize_(2, 2),
        torch.ones((), dtype=dtype, device=device).resize_(1, 3, 2, 2, memory_format=torch.channels_last),
        torch.ones(2, dtype=dtype, device=device).resize_as_(there),
        part.resize_(9),
        torch.ones(3, dtype=dtype, device=device).t_().resize_(4),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str
)
def test_uninitialized_memory_is_filled(dtype: torch.dtype) -> None:
    with deterministic():
        expected, found = new_memory("cpu", dtype), new_memory(DEVICE, dtype)
    for want, got in zip(expected, found, strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)
