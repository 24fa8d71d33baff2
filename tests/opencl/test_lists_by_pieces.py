"""Operators on lists that wait in a queue after one another are done piece by piece, with the results of each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from agreement import DEVICE
from test_host_work import needs_sight

from torch_backplane import preferences

PIECE = 1 << 15  # elements: csrc/devices/piecewise.cpp
Lists = list[list[torch.Tensor]]

# Of the tensors of each list: at the borders of pieces, small ones between large ones, none at all.
SIZES: dict[str, list[tuple[int, ...]]] = {
    "one piece more or less": [(PIECE,), (PIECE - 1,), (PIECE + 1,), (2 * PIECE,), (3 * PIECE - 1,)],
    "small and large": [(3,), (), (5, 7), (4 * PIECE + 5,), (0,), (PIECE - 3,), (2,), (1,), (300, 400), (9,)],
    "many small": [(size,) for size in range(1, 900, 7)] * 3,
    "one": [(1000, 331)],
}


@contextmanager
def queued(threads: int) -> Iterator[None]:
    """What is called meanwhile waits behind something that takes long, so that it comes to be done together."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with preferences.preferring("lists", "host"):
            torch.bp._sleep(50_000_000)  # type: ignore[attr-defined]
            yield
            torch.bp.synchronize()  # type: ignore[attr-defined]
    finally:
        torch.set_num_threads(before)


def random(sizes: list[tuple[int, ...]], lists: int, seed: int, dtype: torch.dtype = torch.float32) -> Lists:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.rand(size, generator=generator, dtype=dtype) + 0.5 for size in sizes] for _ in range(lists)]


def there(lists: Lists) -> Lists:
    return [[one.to(DEVICE) for one in each] for each in lists]


def step(lists: Lists, rate: float) -> None:
    """As AdamW's."""
    params, grads, first, second = lists
    torch._foreach_mul_(params, 1 - rate / 10)
    torch._foreach_lerp_(first, grads, 0.1)
    torch._foreach_mul_(second, 0.99)
    torch._foreach_addcmul_(second, grads, grads, 0.01)
    roots = torch._foreach_sqrt(second)
    torch._foreach_div_(roots, [1 + at / 7 for at in range(len(roots))])
    torch._foreach_add_(roots, 1e-8)
    torch._foreach_addcdiv_(params, first, roots, [-rate * (1 + at) for at in range(len(roots))])


def same(found: Lists, expected: Lists) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_steps_of_an_optimizer(sizes: str, dtype: torch.dtype, threads: int) -> None:
    needs_sight()
    if dtype not in torch.bp.get_device_properties(DEVICE).dtypes:  # type: ignore[attr-defined]
        pytest.skip(f"this device has no {dtype}")
    expected = random(SIZES[sizes], 4, 0, dtype)
    found = there(expected)
    for rate in (0.5, 0.25):
        with queued(threads):
            for _ in range(2):
                step(found, rate)
        for _ in range(2):
            step(expected, rate)
        same(found, expected)


def shifted(a: torch.Tensor, b: torch.Tensor) -> None:
    """The second operator reads other elements than the first has changed at the same place."""
    half = a.numel() // 2
    torch._foreach_mul_([a[:half]], 2.0)
    torch._foreach_add_([b[:half]], [a[100 : half + 100]])


def elsewhere(a: torch.Tensor, b: torch.Tensor) -> None:
    """It reads what is changed at another place of the list."""
    half = a.numel() // 2
    torch._foreach_mul_([a[:half], a[half:]], 2.0)
    torch._foreach_add_([b[half:], b[:half]], [a[half:], a[:half]])
    torch._foreach_mul_([a[:half], b[:half]], 3.0)


def of_another_size(a: torch.Tensor, b: torch.Tensor) -> None:
    half = a.numel() // 2
    torch._foreach_mul_([a[:half], a[half:]], 2.0)
    torch._foreach_add_([b], [a])
    torch._foreach_mul_([a], 0.5)


def strided(a: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_mul_([a[::2], a[1::2]], [2.0, 3.0])
    torch._foreach_add_([b], [a])


def others_between(a: torch.Tensor, b: torch.Tensor) -> None:
    torch._foreach_mul_([a], 2.0)
    b.add_(a.sum())
    torch._foreach_add_([a], [b])
    torch.mm(a[:90_000].view(300, 300), b[:90_000].view(300, 300), out=a[:90_000].view(300, 300).clone())
    torch._foreach_add_([b], [a])


def many(a: torch.Tensor, b: torch.Tensor) -> None:
    for number in range(200):
        torch._foreach_add_([a], [b], alpha=1 / (1 + number))
        torch._foreach_mul_([a, b][number % 2 :][:1], 0.99)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("change", [shifted, elsewhere, of_another_size, strided, others_between, many])
def test_what_has_memory_in_common(change: Callable[..., Any], threads: int) -> None:
    needs_sight()
    for seed in range(3):
        expected = random([(20 * PIECE + 6,)] * 2, 1, seed)
        found = there(expected)
        with queued(threads):
            change(*found[0])
        change(*expected[0])
        same(found, expected)
