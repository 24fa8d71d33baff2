"""Tensors without dimensions or elements as each operand of operators that index, sort, scan, pool and multiply: the
CPU's values, or its errors, immediately. A crash would end the process, and so the test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees, on_device, to_cpu
from torch.nn import functional as F

SHAPES = [(), (0,), (3,), (0, 3), (2, 0), (2, 3)]
INDICES = [(), (0,), (2,), (2, 0), (2, 2)]
DIMS = [0, -1, 1, -3]

Function = Callable[..., Any]


def numbers(*shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 5).float().view(shape)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def outcome(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Returns a call's result and its arguments afterwards, or the type and message of its error."""
    try:
        result = function(*arguments)
        torch.accelerator.synchronize(DEVICE)
    except Exception as error:
        # Some messages name the type of a tensor.
        return f"{type(error).__name__}: {error}".replace("bpFloatType", "torch.FloatTensor")
    return to_cpu((result, arguments))


def alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, str) or isinstance(found, str):
        return bool(found == expected)
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError:
        return False
    return True


def compare(function: Function, cases: Iterator[tuple[Any, ...]]) -> None:
    """Compares each case with the CPU, twice: the second call may replay a plan."""
    wrong = []
    for case in cases:
        expected = outcome(function, tuple(one.clone() if torch.is_tensor(one) else one for one in case))
        for _ in range(2):
            found = outcome(function, on_device(case))
            if not alike(found, expected):
                shown = [tuple(one.shape) if torch.is_tensor(one) else one for one in case]
                wrong.append(f"{shown}: {found}, expected {expected}")
                break
    assert not wrong, "\n".join([f"{len(wrong)} cases", *wrong[:20]])


READS: dict[str, Function] = {
    "take": torch.take,
    "index": lambda x, i: x[i],
    "index of a second dimension": lambda x, i: x[:, i],
    "index behind a new dimension": lambda x, i: x[None, i],
    "two indices": lambda x, i: x[i, i],
    "mask": lambda x, i: x[i > 0],
    "masked_select": lambda x, i: x.masked_select(i == 0),
    "masked_fill": lambda x, i: x.masked_fill(i == 0, 2.0),
    "where": lambda x, i: torch.where(i == 0, x, 7.0),
    "embedding": lambda x, i: F.embedding(i, x),
    "isin": lambda x, i: torch.isin(x, i.float()),
    "searchsorted": lambda x, i: torch.searchsorted(x, i.float()),
    "bucketize": lambda x, i: torch.bucketize(i.float(), x),
    "bincount": lambda x, i: torch.bincount(i, x),
    "repeat_interleave": torch.repeat_interleave,
    "fill by index": lambda x, i: x.__setitem__(i, 2.0),
}


@pytest.mark.parametrize("name", READS)
def test_reading_by_index(name: str) -> None:
    compare(READS[name], ((numbers(*x), zeros(*i)) for x, i in itertools.product(SHAPES, INDICES)))


ALONG: dict[str, Function] = {
    "index_select": torch.index_select,
    "gather": torch.gather,
    "index_fill": lambda x, dim, i: x.index_fill(dim, i, 2.0),
    "index_fill by a tensor": lambda x, dim, i: x.index_fill(dim, i, torch.tensor(2.0, device=x.device)),
    "scatter": lambda x, dim, i: x.scatter(dim, i, 2.0),
    "scatter multiply": lambda x, dim, i: x.scatter(dim, i, 2.0, reduce="multiply"),
    "repeat_interleave": lambda x, dim, i: x.repeat_interleave(i + 2, dim),
}


@pytest.mark.parametrize("name", ALONG)
def test_indices_along_a_dimension(name: str) -> None:
    cases = itertools.product(SHAPES, DIMS, INDICES)
    compare(ALONG[name], ((numbers(*x), dim, zeros(*i)) for x, dim, i in cases))


WRITES: dict[str, Function] = {
    "scatter": torch.Tensor.scatter,
    "scatter_add": torch.Tensor.scatter_add,
    "index_add": torch.Tensor.index_add,
    "index_copy": torch.Tensor.index_copy,
    **{
        f"scatter_reduce {reduce}, {'with' if include else 'without'} self": (
            lambda x, dim, i, s, how=reduce, include=include: x.scatter_reduce(dim, i, s, how, include_self=include)
        )
        for reduce, include in (("sum", True), ("mean", True), ("prod", False))
    },
    **{
        f"index_reduce {reduce}, {'with' if include else 'without'} self": (
            lambda x, dim, i, s, how=reduce, include=include: x.index_reduce(dim, i, s, how, include_self=include)
        )
        for reduce, include in (("amax", True), ("mean", True), ("prod", False))
    },
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_along_a_dimension(name: str) -> None:
    cases = itertools.product(SHAPES, DIMS[:3], INDICES, INDICES)
    compare(WRITES[name], ((numbers(*x), dim, zeros(*i), numbers(*s)) for x, dim, i, s in cases))


PUTS: dict[str, Function] = {
    "index_put": lambda x, i, s: x.index_put_((i,), s),
    "index_put accumulate": lambda x, i, s: x.index_put_((i,), s, accumulate=True),
    "index_put of two indices": lambda x, i, s: x.index_put_((i, i), s, accumulate=True),
    "assign": lambda x, i, s: x.__setitem__(i, s),
    "assign by mask": lambda x, i, s: x.__setitem__(i == 0, s),
    "put": lambda x, i, s: x.put_(i, s),
    "put accumulate": lambda x, i, s: x.put_(i, s, accumulate=True),
    "masked_scatter": lambda x, i, s: x.masked_scatter(i == 0, s),
}


@pytest.mark.parametrize("name", PUTS)
def test_writing_by_index(name: str) -> None:
    cases = itertools.product(SHAPES, INDICES, INDICES)
    compare(PUTS[name], ((numbers(*x), zeros(*i), numbers(*s)) for x, i, s in cases))


# fmt: off
NAMES_ALONG = [
    "sum", "prod", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "median", "nanmedian", "var",
    "std", "all", "any", "logsumexp", "count_nonzero", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp",
    "sort", "argsort", "unique", "softmax", "log_softmax", "unique_consecutive",
]
NAMES_OF_ALL = [
    "sum", "prod", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "median", "nanmedian", "var",
    "std", "all", "any", "nonzero", "unique", "msort", "flatten", "unique_consecutive", "count_nonzero",
    "trace", "tril", "diag",
]
# fmt: on
ALONG_A_DIMENSION: dict[str, Function] = {
    **{
        name: lambda x, dim, name=name: getattr(torch, name)(x, dim=dim)
        for name in NAMES_ALONG
    },
    **{
        f"{name} {k}": lambda x, dim, name=name, k=k: getattr(torch, name)(x, k, dim)
        for name in ("topk", "kthvalue")
        for k in (0, 1, 2)
    },
}
OF_ALL: dict[str, Function] = {
    **{
        name: getattr(torch, name)
        for name in NAMES_OF_ALL
    },
    "unique with counts": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "nonzero_static": lambda x: torch.nonzero_static(x, size=3),
    "histc": lambda x: torch.histc(x, 4),
    "bincount": lambda x: torch.bincount(x.long()),
}
MORE_SHAPES = [*SHAPES, (1,), (0, 0), (2, 0, 3), (2, 3, 4)]


@pytest.mark.parametrize("name", ALONG_A_DIMENSION)
def test_reducing_scanning_and_sorting_along_a_dimension(name: str) -> None:
    function = ALONG_A_DIMENSION[name]
    compare(function, ((numbers(*x), dim) for x, dim in itertools.product(MORE_SHAPES, DIMS)))


@pytest.mark.parametrize("name", OF_ALL)
def test_reducing_and_sorting_all(name: str) -> None:
    compare(OF_ALL[name], ((numbers(*x),) for x in MORE_SHAPES))


def gradient(function: Function) -> Function:
    def call(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    return call


IMAGES = [(), (0,), (3,), (2, 4), (0, 4, 4), (2, 0, 4), (2, 4, 4), (0, 2, 4, 4), (1, 0, 4, 4), (1, 2, 0, 4)]
IMAGES += [(1, 2, 4, 4), (0, 2, 4, 4, 4), (1, 0, 4, 4, 4), (1, 2, 4, 0, 4), (1, 2, 4, 4, 4)]
POOLS: dict[str, Function] = {
    **{
        f"{name}{rank}d": lambda x, name=name, rank=rank: getattr(F, f"{name}{rank}d")(x, 2)
        for name in ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
        for rank in (1, 2, 3)
    },
    **{
        f"max_unpool{rank}d": lambda x, rank=rank: getattr(F, f"max_unpool{rank}d")(x, x.long() * 0, 2)
        for rank in (1, 2, 3)
    },
    "adaptive_max_pool2d to nothing": lambda x: F.adaptive_max_pool2d(x, 0),
    "adaptive_avg_pool2d to nothing": lambda x: F.adaptive_avg_pool2d(x, 0),
}


@pytest.mark.parametrize("name", POOLS)
def test_pooling(name: str) -> None:
    compare(POOLS[name], ((numbers(*x),) for x in IMAGES))
    compare(gradient(POOLS[name]), ((numbers(*x),) for x in IMAGES))


@pytest.mark.parametrize("name", ["mm", "mv", "dot", "matmul", "outer", "bmm", "inner"])
def test_products(name: str) -> None:
    shapes = [(), (0,), (3,), (0, 3), (3, 0), (3, 3), (2, 0, 3), (2, 3, 0), (0, 3, 3)]
    compare(getattr(torch, name), ((numbers(*a), numbers(*b)) for a, b in itertools.product(shapes, shapes)))


@pytest.mark.parametrize(("columns", "count"), [(0, 3), (3, 0), (0, 0)])
def test_gradients_of_embeddings_without_elements(columns: int, count: int) -> None:
    def gradient(weight: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        weight = weight.clone().requires_grad_()
        (found,) = torch.autograd.grad(torch.nn.functional.embedding(index, weight).sum(), weight)
        return found

    agrees(gradient, torch.zeros(2, columns), torch.ones(count, dtype=torch.int64))
