"""Guards of dynamic-shape plans: sizes, layouts, storage offsets and numbers for which the planner acts differently,
between calls for which the plan is valid.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from agreement import DEVICE, need_memory, placed, plans_from_the_start
from test_dynamic_shape import CASES, LAYOUTS, Arguments, compare, plain, randn, whole

from torch_backplane import _C, plans

LIBRARY = torch.library.Library("backplane_dynamic_shape", "FRAGMENT")  # kept alive: planners are never undeclared


def counts(name: str) -> dict[str, Any]:
    return _C.plan_counts()[name]


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Makes all rows share the memory of the first row."""
    return plain(tensor[:1]).expand(tensor.shape) if tensor.dim() > 1 and tensor.shape[0] else plain(tensor)


def compared(function: Callable[..., Any], calls: Iterator[Arguments] | Sequence[Arguments]) -> None:
    """Compares each call with the CPU, and again after all others."""
    with plans_from_the_start():
        calls = list(calls)
        for given in (*calls, *calls):
            compare(function, tuple(_copy(one) for one in given), f"{[_shown(one) for one in given]}")


def _copy(value: Any) -> Any:
    return placed(value, "cpu", offset=value.storage_offset()) if isinstance(value, torch.Tensor) else value


def _shown(value: Any) -> Any:
    return (tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CASES)
def test_sizes_0_and_1_and_equal_sizes_between_others(name: str) -> None:
    function, make = CASES[name]
    chance = random.Random(name)
    sizes = [(5, 7), (6, 9)] + [
        (chance.choice((0, 1, 2, 4, 7, 17)), chance.choice((0, 1, 2, 4, 7, 17))) for _ in range(12)
    ]
    found: list[Arguments] = []
    for n, m in sizes:
        try:
            given = make(n, m)
        except RuntimeError:  # there is no random integer below 0
            continue
        layout = chance.choice((*LAYOUTS, plain))
        found.append(tuple(layout(one) for one in given))
    compared(function, found)


# --- operands


def test_broadcasting_begins_and_ends() -> None:
    shapes = [(4, 5), (1, 5), (4, 1), (1, 1), (6, 7), (1, 7), (6, 1), (8, 8), (1, 8), (8, 1), (5, 4)]
    pairs = [(one, other) for one, other in itertools.product(shapes, shapes) if {*one} & {*other}]
    compared(torch.add, [(randn(*one), randn(*other)) for one, other in pairs])  # some are mismatched
    compared(lambda x, y: x.mul_(y), [(randn(*one), randn(*other)) for one, other in pairs])
    triples = [(randn(*one) > 0, randn(*one), randn(*other)) for one, other in pairs[::3]]
    compared(torch.where, triples)


def test_strides_become_contiguous_and_dimensions_collapse() -> None:
    def parts() -> Iterator[Arguments]:
        whole_ = randn(9, 8, 6)
        for rows, columns, depth in itertools.product((2, 8, 9), (3, 8), (1, 4, 6)):
            part = whole_[:rows, :columns, :depth]
            yield (placed(part, "cpu"),)
            yield (placed(part.transpose(0, 1), "cpu"),)
            yield (placed(part.transpose(1, 2), "cpu"),)

    functions: list[Callable[..., Any]] = [
        lambda x: x + 1, lambda x: x.sum((0, 1)), lambda x: x.sum(-1), lambda x: x.clone(), lambda x: x.contiguous(),
        lambda x: x.softmax(-1), lambda x: x.cumsum(1), lambda x: x.abs_(), lambda x: torch.empty_like(x).stride(),
        lambda x: x.reshape(-1) + 1, lambda x: x.amax(0), lambda x: torch.cat((x, x), 1),
        lambda x: x @ x.transpose(1, 2),
    ]  # fmt: skip
    for function in functions:
        compared(function, list(parts()))


def test_equal_sizes_become_unequal_and_back() -> None:
    sizes = [(3, 3, 3), (4, 5, 6), (5, 5, 6), (4, 6, 6), (7, 8, 7), (6, 6, 6), (9, 10, 11), (11, 10, 11)]
    compared(torch.mm, [(randn(n, m), randn(m, k)) for n, m, k in sizes])
    compared(torch.mm, [(randn(n, m), randn(k, m)) for n, m, k in sizes])  # most are mismatched
    compared(torch.bmm, [(randn(2, n, m), randn(2, k, n)) for n, m, k in sizes])
    compared(lambda x, y: torch.cat((x, y)), [(randn(n, m), randn(n, k)) for n, m, k in sizes])
    compared(lambda x, y: x.addmm_(y, y), [(randn(n, m), randn(k, k)) for n, m, k in sizes])
    compared(lambda x, at: x.index_select(0, at), [(randn(n, m), whole(min(n, m), k)) for n, m, k in sizes])
    compared(lambda x, mask: x[mask], [(randn(n, m), randn(k, m) > 0) for n, m, k in sizes])


def over(count: int, *ranges: tuple[int, int, int]) -> Arguments:
    """Returns `count` numbers, and the ranges (start, length, step) of views of their memory."""
    return (torch.arange(float(count)), *ranges)


def test_results_begin_to_overlap_with_operands() -> None:
    def views(base: torch.Tensor, *ranges: tuple[int, int, int]) -> list[torch.Tensor]:
        return [base[start : start + length * step : step] for start, length, step in ranges]

    def added(base: torch.Tensor, *ranges: tuple[int, int, int]) -> torch.Tensor:
        x, y, out = views(base, *ranges)
        return torch.add(x, y, out=out)

    def multiplied(base: torch.Tensor, *ranges: tuple[int, int, int]) -> torch.Tensor:
        x, y = views(base, *ranges)
        return x.mul_(y)

    def summed(base: torch.Tensor, *ranges: tuple[int, int, int]) -> torch.Tensor:
        x, out = views(base, *ranges)
        return torch.cumsum(x, 0, out=out)

    distances = [16, 20, 24, 12, 8, 4, 0, 32, 28]
    compared(added, [over(99, (0, n, 1), (0, n, 1), (d, n, 1)) for d in distances for n in (8, 9)])
    compared(added, [over(99, (0, n, 1), (64, n, 1), (d, n, 1)) for d in distances for n in (12, 5)])
    # For views with gaps PyTorch does not refuse partial overlaps, and results are undefined. At odd distances the
    # elements of one view lie in the gaps of the other.
    apart = [d + 1 if 0 < d < 20 else d for d in distances]
    compared(added, [over(99, (0, n, 2), (64, n, 1), (d, n, 2)) for d in apart for n in (4, 10)])
    compared(multiplied, [over(99, (d, n, 1), (0, n, 1)) for d in distances for n in (8, 13)])
    compared(summed, [over(99, (0, n, 1), (d, n, 1)) for d in distances for n in (8, 13)])


def test_plans_distinguish_a_tensor_used_twice_from_two_views() -> None:
    def of_views(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(base: torch.Tensor, starts: Sequence[int], length: int) -> Any:
            known: dict[int, torch.Tensor] = {}
            views = [known.setdefault(start, base[start : start + length]) for start in starts]
            return function(*views)

        return call

    def mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.view(2, -1) @ y.view(-1, 2)

    starts = [(0, 0), (4, 4), (0, 4), (8, 0), (0, 16), (8, 8), (0, 0)]
    calls = [(torch.arange(64.0), (0, 0), length) for length in (14, 16)]  # these make a dynamic-shape plan
    calls += [(torch.arange(64.0), pair, length) for length in (8, 10, 12, 6) for pair in starts]
    for function in (torch.add, mm, lambda x, y: torch.cat((x, y)), torch.mul, torch.dot, lambda x, y: x.add_(y)):
        compared(of_views(function), calls)


# --- numbers


def test_indices_that_begin_to_need_64_bits() -> None:
    need_memory(2**31 + 2**12)
    base = torch.empty(2**31 + 2**12, dtype=torch.uint8, device=DEVICE)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "add": lambda x: x + 1, "clone": lambda x: x.contiguous(), "sum": lambda x: x.sum(),
        "rows": lambda x: x.view(-1, 1).sum(1), "flip": lambda x: x.flip(0),
        "index_select": lambda x: x.index_select(0, torch.arange(x.numel() - 1, device=x.device)),
        "cat": lambda x: torch.cat((x, x)), "amax": lambda x: x.amax(), "cumsum": lambda x: x.cumsum(0),
        "masked_fill": lambda x: x.masked_fill(x > 3, 0),
        "gather": lambda x: x.gather(0, torch.arange(x.numel(), device=x.device)),
    }  # fmt: skip
    places = [(5, 3), (6, 5), (9, 2**10), (5, 2**29 - 1), (5, 2**29), (5, 2**29 + 3), (6, 7), (3, 2**30 + 64)]
    with plans_from_the_start():
        for name, function in functions.items():
            for length, step in places:
                values = torch.arange(1, length + 1, dtype=torch.uint8)
                x = base.as_strided((length,), (step,))
                x.copy_(values.to(DEVICE))  # a copy from the CPU would include the gaps
                found = function(x).cpu()
                assert found.tolist() == function(values).tolist(), f"{name} of {length} elements, {step} apart"


def test_dimensions_of_size_1_may_have_any_stride() -> None:
    strides = [7, 1, 2**31, 2**62, 2**63 - 1, 0, 9]
    functions: list[Callable[..., Any]] = [
        lambda x: x + 1, lambda x: x.sum(0), lambda x: x.sum(-1), lambda x: x.clone().stride(), lambda x: x.softmax(-1),
        lambda x: torch.cat((x, x)), lambda x: x.mul_(2), lambda x: x.t().contiguous(), lambda x: x.expand(3, -1) * 2,
    ]  # fmt: skip
    for function in functions:
        with plans_from_the_start():
            for length, step in itertools.product((5, 6, 8), strides):
                base = torch.arange(9.0)
                compare(
                    lambda memory, n, s, function=function: function(memory.as_strided((1, n), (s, 1))),
                    (base, length, step),
                    f"{length} elements, stride {step}",
                )


def test_ranges_up_to_the_limits_of_int64() -> None:
    most = 2**63 - 1
    bounds = [
        (0, 5, 1), (2, 9, 2), (9, 2, -3), (most - 4, most, 1), (most - 8, most, 3), (-most - 1, -most + 3, 1),
        (0, 0, 1),
        (0, most // 2, most // 2), (0, most // 2, most // 4), (3, 2, 1), (most, most - 9, -2), (0, 7, 0), (1, 6, 1),
    ]  # fmt: skip

    def ranges(x: torch.Tensor, first: int, last: int, step: int) -> torch.Tensor:
        return torch.arange(first, last, step, device=x.device)

    compared(ranges, [(torch.zeros(1), *one) for one in bounds])


def test_negative_sizes_of_results_are_refused() -> None:
    from torch.nn import functional as F

    images = [randn(1, 2, n, m) for n, m in ((6, 7), (8, 9), (3, 9), (2, 2), (9, 2), (5, 5), (1, 1), (4, 10))]
    weight = randn(3, 2, 4, 4)
    compared(lambda x: F.conv2d(x, weight.to(x.device)), [(one,) for one in images])
    compared(lambda x: F.max_pool2d(x, 4), [(one,) for one in images])
    compared(lambda x: F.avg_pool2d(x, 4, 1), [(one,) for one in images])
    compared(lambda x: F.unfold(x, 4), [(one,) for one in images])
    compared(lambda x: F.pad(x, (-2, -2)), [(one,) for one in images])
    compared(lambda x: F.pad(x, (2, 2), mode="reflect"), [(one,) for one in images])
    compared(lambda x: x.narrow_copy(2, 2, 3), [(one,) for one in images])
    compared(lambda x: x.topk(3).values, [(one,) for one in images])
    compared(lambda x: x.diff(n=3), [(one,) for one in images])


def test_inferred_sizes_and_negative_indices_as_arguments() -> None:
    x = randn(1, 4)
    calls = [(randn(1, n), [rows, columns]) for n in (4, 5) for rows in (2, 3, -1, 1) for columns in (n, -1)]
    compared(lambda x, sizes: torch.ops.aten.expand_copy(x, sizes), calls)
    wanted = [[2, 6], [3, 4], [-1, 6], [4, -1], [12], [-1], [5, -1], [-1, -1], [1, 12]]
    compared(lambda x, sizes: torch.ops.aten.view_copy(x, sizes), [(randn(3, 4), one) for one in wanted])
    places = [(0, 3), (1, 4), (-3, 4), (-2, 2**63 - 1), (0, 2**63 - 1), (2, 1), (-9, 9), (1, -1)]
    compared(lambda x, a, b: torch.ops.aten.slice_copy(x, 1, a, b), [(randn(2, 5), *one) for one in places])
    compared(lambda x, i: torch.ops.aten.select_copy(x, 1, i), [(x, i) for i in (0, 1, 3, -1, -4, 4, -5)])


# --- planners


def declared(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that declares a planner of a new operator and returns the operator."""
    from torch_backplane.planning import operator

    name = schema.partition("(")[0]
    LIBRARY.define(schema)

    def decorate(planner: Callable[..., Any]) -> Callable[..., Any]:
        operator(f"backplane_dynamic_shape::{name}", variants=False)(planner)
        return getattr(torch.ops.backplane_dynamic_shape, name)

    return decorate


def is_traced(tensor: torch.Tensor) -> bool:
    return isinstance(tensor.shape[0], torch.SymInt)


def test_results_are_the_given_tensors() -> None:
    """Also if another argument is the same tensor or a view of the same elements."""

    @declared("add_all(Tensor[] many, Tensor(a!) out) -> Tensor(a!)")
    def add_all(call: Any, many: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        for one in many:
            out.add_(one)
        return out

    aten = torch.ops.aten
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "abs": lambda x, out: aten.abs.out(x, out=out),
        "add": lambda x, out: aten.add.out(x, x, out=out),
        "where": lambda x, out: aten.where.self_out(x > 0, x, out, out=out),
        "in place": lambda x, out: aten.mul_.Tensor(out, x),
        "few": lambda x, out: add_all([x, x], out),
        "many": lambda x, out: add_all([x] * 12, out),  # more than a linear search is used for
        "many others": lambda x, out: add_all([x[:] for _ in range(12)], out),
    }
    for mode, (name, function) in itertools.product(("1", "check"), functions.items()):
        with plans_from_the_start():
            plans.set_mode(mode)
            for n in (5, 6, 7, 5, 6, 8):
                x, other = torch.ones(n, device=DEVICE), torch.ones(n, device=DEVICE)
                for out in (x, x.view(n), x.detach(), other, x, x[:], other):
                    assert function(x, out) is out, f"{name} of {n}, plans {mode}"


def test_guards_that_never_hold_leave_exact_plans() -> None:
    @declared("far(Tensor self) -> Tensor")
    def far(call: Any, self: torch.Tensor) -> torch.Tensor:
        return self + 1 if self.shape[0] * 2**62 % 3 >= 0 else self - 1

    with plans_from_the_start():
        for n in (5, 6, 7, 8, 5, 6):
            assert far(torch.ones(n, device=DEVICE)).tolist() == [2.0] * n
        found = counts("backplane_dynamic_shape::far")
        assert found["dynamic_shape_replays"] == 0
        assert found["planner_calls"] == 4
        assert found["reasons_for_exact"] != [""]


def test_planners_that_raise_in_the_trace_keep_exact_plans() -> None:
    @declared("shy(Tensor self) -> Tensor")
    def shy(call: Any, self: torch.Tensor) -> torch.Tensor:
        if is_traced(self):
            raise ValueError("cannot be traced")
        return self + 1

    with plans_from_the_start():
        for n in (5, 6, 7, 8, 5, 6):
            assert shy(torch.ones(n, device=DEVICE)).tolist() == [2.0] * n
        found = plans.stats()["backplane_dynamic_shape::shy"]
        assert found["planner_calls"] == 4
        assert found["traces"] == 2  # then the class is no longer traced
        assert found["replays"] == 2
        assert found["reasons_for_exact"] == ["ValueError in the trace: cannot be traced"]


@pytest.mark.parametrize("kind", [AttributeError, NameError, AssertionError, KeyError])
def test_programming_errors_in_the_trace_are_raised(kind: type[Exception]) -> None:
    @declared(f"faulty_{kind.__name__}(Tensor self) -> Tensor")
    def faulty(call: Any, self: torch.Tensor) -> torch.Tensor:
        if is_traced(self):
            raise kind("a fault")
        return self + 1

    with plans_from_the_start():
        assert faulty(torch.ones(5, device=DEVICE)).tolist() == [2.0] * 5
        with pytest.raises(kind, match="a fault"):
            faulty(torch.ones(6, device=DEVICE))
        assert faulty(torch.ones(5, device=DEVICE)).tolist() == [2.0] * 5


def test_traced_plan_that_differs_from_the_planners_is_not_used() -> None:
    @declared("sly(Tensor self) -> Tensor")
    def sly(call: Any, self: torch.Tensor) -> torch.Tensor:
        return self * 3 if is_traced(self) else self + 1

    with plans_from_the_start():
        for n in (5, 6, 7, 8, 5, 6):
            assert sly(torch.ones(n, device=DEVICE)).tolist() == [2.0] * n
        found = plans.stats()["backplane_dynamic_shape::sly"]
        assert found["dynamic_shape_replays"] == 0
        (reason,) = found["reasons_for_exact"]
        assert "launch bp_mul" in reason
        assert "launch bp_add" in reason


def test_missing_guard_is_detected_with_the_previous_calls_plan() -> None:
    """A planner that depends on a size without a guard is detected: its traced plan differs from the plan of the
    previous call."""

    @declared("flip(Tensor self) -> Tensor")
    def flip(call: Any, self: torch.Tensor) -> torch.Tensor:
        n = self.shape[0]
        even = n.node.value % 2 == 0 if is_traced(self) else n % 2 == 0  # without a guard
        return self + 1 if even else self - 1

    with plans_from_the_start():
        for n in (5, 6, 7, 8, 5, 6):
            assert flip(torch.ones(n, device=DEVICE)).tolist() == [2.0 if n % 2 == 0 else 0.0] * n


def test_check_mode_names_inconsistent_planners() -> None:
    factor = [2.0]

    @declared("moody(Tensor self) -> Tensor")
    def moody(call: Any, self: torch.Tensor) -> torch.Tensor:
        from torch_backplane.planning import run_pointwise

        out, by = torch.empty_like(self), factor[0]
        run_pointwise(lambda x: x * by, [out], [self], key=("moody", by))
        return out

    with plans_from_the_start():
        plans.set_mode("check")
        for n in (5, 6, 7):
            assert moody(torch.ones(n, device=DEVICE)).tolist() == [2.0] * n
        factor[0] = 3.0
        with pytest.raises(RuntimeError, match=r"the plan of .*::moody is not what its planner does"):
            moody(torch.ones(8, device=DEVICE))


def test_refused_calls_do_not_count_as_traces() -> None:
    with plans_from_the_start():
        for n in (5, 6, 7, 8):
            x = torch.ones(n, 4, device=DEVICE)
            for _ in range(3):
                with pytest.raises(RuntimeError, match="must match"):
                    x + torch.ones(n + 1, 4, device=DEVICE)
            x + torch.ones(n, 4, device=DEVICE)
        found = counts("aten::add.Tensor")
        assert found["dynamic_shape_replays"] == 2
        assert found["reasons_for_exact"] == []


# --- the cache


def test_number_of_classes_is_bounded() -> None:
    @declared("tagged(Tensor self, int tag) -> Tensor")
    def tagged(call: Any, self: torch.Tensor, tag: int) -> torch.Tensor:
        return torch.empty_like(self)

    x = torch.ones(9, device=DEVICE)
    with plans_from_the_start():
        for tag in range(1030):
            for n in (4, 5):
                tagged(x[:n], tag)
        found = counts("backplane_dynamic_shape::tagged")
        assert found["classes"] == found["dynamic_shape_classes"] == 1024
        before = found["planner_calls"]
        for n in (6, 7, 8):
            assert tagged(x[:n], 1029).shape == (n,)  # cached
            assert tagged(x[:n], 0).shape == (n,)  # evicted
        assert counts("backplane_dynamic_shape::tagged")["planner_calls"] == before + 2
        plans.clear()
        assert counts("backplane_dynamic_shape::tagged")["classes"] == 0
        assert tagged(x[:7], 3).shape == (7,)


def test_threads_call_one_operator_with_changing_shapes() -> None:
    wrong: list[Any] = []
    begin = threading.Barrier(5)

    def work(number: int) -> None:
        begin.wait()
        try:
            for n in range(number + 2, 242, 4):
                x = torch.full((n, 3), float(number), device=DEVICE)
                found = ((x + n).sum(0) * 2).tolist()
                if found != [2.0 * n * (number + n)] * 3:
                    wrong.append((number, n, found))
        except Exception as error:
            wrong.append(error)

    def forget() -> None:
        begin.wait()
        for _ in range(20):
            plans.clear()
            torch.ones(3, device=DEVICE).tolist()

    with plans_from_the_start():
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        threads.append(threading.Thread(target=forget))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("name", ["add", "raises"])
def test_traces_hold_no_device_memory(name: str) -> None:
    """Whether or not they result in a plan, and without the garbage collector."""
    functions = {"add": lambda x: x + x, "raises": lambda x: x.unique()}
    with plans_from_the_start():
        functions[name](torch.ones(3, device=DEVICE))
        gc.collect()
        gc.disable()
        try:
            before = torch.bp.memory_allocated()
            for size in (1000, 1001, 1002):
                functions[name](torch.ones(size, device=DEVICE))
            assert torch.bp.memory_allocated() == before
        finally:
            gc.enable()


def test_explain_shows_replays_of_dynamic_shape_plans() -> None:
    with plans_from_the_start():
        x = torch.ones(9, 3, device=DEVICE)
        plan_text = [plans.explain(lambda n=n: x[:n].mul(2)).splitlines()[0] for n in (4, 5, 6, 7, 4)]
    assert plan_text[:2] == ["aten::mul.Tensor: planned"] * 2
    assert plan_text[2:4] == ["aten::mul.Tensor: replayed for any shape"] * 2
    assert plan_text[4] == "aten::mul.Tensor: replayed"
