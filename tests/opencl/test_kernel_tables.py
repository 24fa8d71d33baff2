"""The caches of compiled kernels and kernel texts evict old entries, but not kernels that plans hold."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from agreement import DEVICE, plans_from_the_start

from torch_backplane import _C, plans
from torch_backplane.planning import operator, run_kernel, run_pointwise
from torch_backplane.planning.lru_cache import LruCache

launch = importlib.import_module("torch_backplane.planning.launch")  # the package has a function of this name
LIBRARY = torch.library.Library("backplane_tables", "FRAGMENT")  # never released: planners stay declared
MOST = 8


@contextmanager
def small_tables() -> Iterator[None]:
    """Uses empty caches with room for MOST kernels."""
    before = launch._compiled, launch._generated
    launch._compiled, launch._generated = LruCache(MOST, _C.is_planned), LruCache(MOST)
    try:
        yield
    finally:
        launch._compiled, launch._generated = before


def _by_text(call: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    """A kernel with n in its text: one text per number, which operators should avoid."""
    out = torch.empty_like(x)
    run_kernel(
        "tables",
        f"store_out(item, load_x(item) + {n});",
        items=x.numel(),
        outputs={"out": out},
        inputs={"x": x},
        value=torch.float32,
    )
    return out


def _by_formula(call: Any, x: torch.Tensor, n: int) -> torch.Tensor:
    out = torch.empty_like(x)
    run_pointwise(lambda a: a + float(n), [out], [x], key=("tables", n), name="tables")
    return out


def _declared(name: str, planner: Any) -> Any:
    LIBRARY.define(f"{name}(Tensor x, int n) -> Tensor")
    operator(f"backplane_tables::{name}", variants=False)(planner)
    return getattr(torch.ops.backplane_tables, name)


KINDS = [_declared("by_text", _by_text), _declared("by_formula", _by_formula)]


def adds(function: Any, numbers: Any, size: int = 100) -> None:
    x = torch.arange(float(size), device=DEVICE)
    found = [(n, function(x, n)) for n in numbers]
    for n, result in found:
        assert torch.equal(result.cpu(), torch.arange(float(size)) + n)


def test_evicted_kernels_work_in_old_plans_and_new_calls() -> None:
    with plans_from_the_start(), small_tables():
        for function in KINDS:
            adds(function, range(3 * MOST))
            # Plans hold all the kernels. Texts are evicted.
            assert len(launch._compiled) >= 3 * MOST
            assert len(launch._generated) <= MOST
            adds(function, range(3 * MOST))
            adds(function, range(3), size=1000)  # new plans with the same kernels
        held = len(launch._compiled)
        plans.clear()
        gc.collect()
        adds(KINDS[0], range(1000, 1000 + MOST + held // 8))  # no plan holds the earlier kernels now
        plans.clear()
        adds(KINDS[0], range(2000, 2000 + MOST))
        assert len(launch._compiled) <= 2 * MOST
        for function in KINDS:
            adds(function, range(3))


def test_check_mode_compares_held_kernels() -> None:
    with plans_from_the_start(), small_tables():
        for function in KINDS:
            adds(function, [7])
            adds(function, range(100, 100 + 2 * MOST))
            plans.set_mode("check")
            adds(function, [7])  # raises if a planner launches another kernel than the plan
            plans.set_mode("1")


def test_caches_stay_small_without_plans() -> None:
    with plans_from_the_start(), small_tables():
        plans.set_mode("0")
        for function in KINDS:
            adds(function, range(2 * MOST))  # kernels of pending launches stay in the cache
            for n in range(2 * MOST, 4 * MOST):
                adds(function, [n])  # each call completes before the next one
            assert len(launch._compiled) <= MOST
            assert len(launch._generated) <= MOST


def test_eviction_while_kernels_of_the_same_text_run() -> None:
    """In three threads, with pending launches. The same kernels run with more work items each time."""
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for size in (1_000, 50_000, 400_000):
                adds(KINDS[first % 2], [first + n for n in range(MOST // 2)], size)
        except BaseException as error:
            errors.append(error)

    with plans_from_the_start(), small_tables():
        plans.set_mode("0")
        launch._compiled = LruCache(3, _C.is_planned)
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors


def test_recently_used_entries_stay() -> None:
    made: list[int] = []
    table: LruCache[int, list[int]] = LruCache(8)

    def get(n: int) -> list[int]:
        return table.get(n, lambda: made.append(n) or [n])

    for n in range(8):
        assert get(n) == [n]
    get(0)
    get(8)  # evicts 1 and 2: one over the limit, and an eighth of the limit
    assert len(table) == 7
    made.clear()
    for n in (0, 3, 4, 8, 1):
        assert get(n) == [n]
    assert made == [1]


def test_held_entries_stay() -> None:
    held = set(range(20))
    table: LruCache[int, list[int]] = LruCache(8, lambda value: value[0] in held)
    first = [table.get(n, lambda n=n: [n]) for n in range(20)]
    assert len(table) == 20
    assert all(table.get(n, lambda: [-1]) is one for n, one in enumerate(first))
    assert table.get(20, lambda: [20]) is table.get(20, lambda: [-1])  # not held yet
    held.clear()
    for n in range(21, 24):
        table.get(n, lambda n=n: [n])
    assert len(table) <= 9
