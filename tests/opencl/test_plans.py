"""Plans: which calls are planned or replayed, what belongs to a signature, and which planners are rejected."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from agreement import DEVICE, agrees

from torch_backplane import _C, plans

LIBRARY = torch.library.Library("backplane_plans", "FRAGMENT")  # never released: planners stay declared


def counts(name: str) -> dict[str, Any]:
    return _C.plan_counts()[name]


def fresh() -> None:
    plans.clear()
    plans.set_mode("1")


def test_second_call_is_a_replay() -> None:
    fresh()
    a, b = torch.ones(5, device=DEVICE), torch.ones(5, device=DEVICE)
    for _ in range(3):
        a * b
    assert counts("aten::mul.Tensor")["planner_calls"] == 1
    assert counts("aten::mul.Tensor")["replays"] == 2


@pytest.mark.parametrize("difference", ["size", "dtype", "stride", "alignment", "rank"])
def test_tensor_properties_are_part_of_the_signature(difference: str) -> None:
    fresh()
    other = {
        "size": torch.ones(6, device=DEVICE),
        "dtype": torch.ones(5, device=DEVICE, dtype=torch.float16),
        "stride": torch.ones(10, device=DEVICE)[::2],
        "alignment": torch.ones(8, device=DEVICE)[1:6],
        "rank": torch.ones(1, 5, device=DEVICE),
    }
    torch.ones(5, device=DEVICE).neg()
    other[difference].neg()
    assert counts("aten::neg")["planner_calls"] == 2


def test_sharing_memory_is_part_of_the_signature() -> None:
    fresh()
    whole = torch.arange(12.0, device=DEVICE)
    left, right, apart = whole[:4], whole[4:8], torch.arange(4.0, device=DEVICE)
    torch.add(left, right)
    torch.add(left, apart)
    torch.add(left, left)
    torch.add(left, whole[8:])
    assert counts("aten::add.Tensor")["planner_calls"] == 4
    torch.add(apart, apart)  # the same sharing as (left, left)
    assert counts("aten::add.Tensor")["planner_calls"] == 4


def test_numbers_are_passed_through() -> None:
    fresh()
    a = torch.ones(5, device=DEVICE)
    for alpha in (1, 2, 7):
        torch.testing.assert_close(torch.add(a, a, alpha=alpha).cpu(), torch.full((5,), 1.0 + alpha))
    torch.add(a, a, alpha=0.5)
    assert counts("aten::add.Tensor")["planner_calls"] == 2  # an integer and a float
    for factor in (2.0, 3.0):
        torch.testing.assert_close((a * factor).cpu(), torch.full((5,), factor))
    assert counts("aten::mul.Tensor")["planner_calls"] == 1
    for value in (torch.tensor(4.0), torch.tensor(5.0)):
        torch.testing.assert_close((a * value).cpu(), torch.full((5,), value.item()))
    assert counts("aten::mul.Tensor")["planner_calls"] == 2  # a CPU tensor takes part in type promotion as a tensor


def test_option_values_are_part_of_the_signature() -> None:
    fresh()
    x = torch.linspace(-2, 2, 9, device=DEVICE)
    for approximate in ("none", "tanh"):
        expected = torch.nn.functional.gelu(x.cpu(), approximate=approximate)
        torch.testing.assert_close(torch.nn.functional.gelu(x, approximate=approximate).cpu(), expected)
    assert counts("aten::gelu")["planner_calls"] == 2


def test_plans_can_write_to_arguments_and_return_them() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = a.mul_(b)
        assert c is a
        d = torch.add(a, b, out=out)
        assert d is out
        return c, d

    agrees(function, torch.randn(4, 3), torch.randn(3), torch.empty(4, 3))


def test_out_of_another_shape_is_resized_and_not_planned() -> None:
    fresh()
    a = torch.ones(4, device=DEVICE)
    for _ in range(2):
        out = torch.empty(0, device=DEVICE)
        torch.add(a, a, out=out)
        assert out.tolist() == [2.0] * 4
    assert counts("aten::add.out")["replays"] == 0
    assert counts("aten::add.out")["reasons"] == ["it resizes a tensor that it was given"]


def test_temporaries_and_operators_inside_a_planner_are_replayed() -> None:
    fresh()
    agrees(lambda t: torch._foreach_norm([t, t[0]]), torch.randn(3, 4))
    assert counts("aten::_foreach_norm.Scalar")["replays"] == 2
    agrees(lambda t: t.tril(), torch.randn(5, 5))
    assert counts("aten::tril")["replays"] == 2


def test_memory_of_a_replay_is_freed() -> None:
    fresh()
    x = torch.randn(500, 500, device=DEVICE)
    x.tril()
    before = torch.bp.memory_allocated(DEVICE)
    for _ in range(5):
        x.tril()
    assert torch.bp.memory_allocated(DEVICE) == before


def test_plans_run_in_autograd_and_user_threads() -> None:
    fresh()
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        x = torch.full((6,), float(number), device=DEVICE, requires_grad=True)
        for _ in range(20):
            (x * x).sum().backward()
        results[number] = x.grad.cpu()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, grad in results.items():
        assert grad.tolist() == [40.0 * number] * 6
    assert counts("aten::mul.Tensor")["replays"] > 100


def test_plans_run_in_inference_mode() -> None:
    with torch.inference_mode():
        agrees(lambda t: (t + 1).relu_().sum(0), torch.randn(4, 5))


def test_streams_share_plans() -> None:
    fresh()
    stream = torch.bp.Stream(DEVICE)
    x = torch.ones(1000, device=DEVICE)
    y = x + x
    torch.bp.synchronize(DEVICE)
    with torch.bp.stream(stream):
        z = y + y
    stream.synchronize()
    assert z.sum().item() == 4000
    assert counts("aten::add.Tensor")["planner_calls"] == 1


def test_without_plans_planners_run_each_time() -> None:
    fresh()
    plans.set_mode("0")
    try:
        agrees(lambda a, b: a * b + a.sum(), torch.randn(7), torch.randn(7))
        assert counts("aten::mul.Tensor")["planner_calls"] == 4  # once per call in `agrees`
        assert counts("aten::mul.Tensor")["plans"] == 0
    finally:
        plans.set_mode("1")


def test_check_mode_detects_planners_that_depend_on_other_state() -> None:
    from torch_backplane.planning import Call, operator, run_pointwise

    fresh()
    calls: list[int] = []
    LIBRARY.define("counting(Tensor self) -> Tensor")

    @operator("backplane_plans::counting", variants=False)
    def plan(call: Call, self: torch.Tensor) -> Any:
        calls.append(len(calls))
        out = torch.empty_like(self)
        run_pointwise(lambda x: x * float(len(calls)), [out], [self], key=("test", len(calls)))
        return out

    x = torch.ones(3, device=DEVICE)
    plans.set_mode("check")
    try:
        torch.ops.backplane_plans.counting(x)
        with pytest.raises(RuntimeError, match="the plan of backplane_plans::counting is not what its planner does"):
            torch.ops.backplane_plans.counting(x)
    finally:
        plans.set_mode("1")
        plans.clear()


def test_check_mode_accepts_correct_planners() -> None:
    fresh()
    plans.set_mode("check")
    try:
        agrees(lambda a: torch.softmax(a.tril() * 2 + 1, -1).sum(), torch.randn(5, 5), fallbacks=None)
        agrees(lambda a: torch.var_mean(torch.cat([a, a.t()]), dim=1), torch.randn(5, 5))
    finally:
        plans.set_mode("1")


def test_explain_shows_signature_commands_and_reasons() -> None:
    fresh()
    a = torch.ones(3, 4, device=DEVICE)
    first = plans.explain(lambda: a.add_(1))
    assert "aten::add_.Tensor: planned" in first
    second = plans.explain(lambda: a.add_(2))
    assert "aten::add_.Tensor: replayed" in second
    assert "argument 0: Float, sizes [3, 4], strides [4, 1]" in second
    assert "launch bp_add" in second
    assert "return argument 0" in second
    complex_ = torch.ones(3, dtype=torch.complex32, device=DEVICE)
    assert "not planned: kernels have no complex32" in plans.explain(lambda: complex_ + complex_)


WAITING = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "a mask as an index": lambda x: x[x > 0],
    "a mask of rows": lambda x: x[x.sum(1) > 0, 1:],
    "bincount": lambda x: x.abs().to(torch.int64).view(-1).bincount(),
    "histc": lambda x: x.histc(5),
    "unique": lambda x: x.round().unique(),
}


@pytest.mark.parametrize("name", WAITING)
def test_work_before_and_after_a_synchronization_is_replayed(name: str) -> None:
    """Only the planner of the operator itself runs again. The operators that it calls are replayed."""
    plans.set_mode("1")  # check mode would also run the other planners
    for size in (40, 50, 60, 50):
        x = torch.randn(size, 6)
        torch.testing.assert_close(WAITING[name](x.to(DEVICE)).cpu(), WAITING[name](x))
    given = x.to(DEVICE)
    outcomes = [line for line in plans.explain(WAITING[name], given).splitlines() if ": " in line and line[0] != " "]
    assert len([line for line in outcomes if not line.partition(": ")[2].startswith("replayed")]) == 1
    assert sum("backplane::" in line for line in outcomes) >= 1


def test_number_of_plans_is_bounded() -> None:
    fresh()
    x = torch.ones(3000, device=DEVICE)
    for size in range(1, 1100):
        for _ in range(3):  # a dynamic-shape plan serves a size until it gets its own plan
            x[:size].abs()
    assert counts("aten::abs")["plans"] <= 1024
    assert counts("aten::abs")["evictions"] >= 1099 - 1024


def test_configuration_changes_invalidate_plans() -> None:
    fresh()
    x = torch.ones(3, device=DEVICE)
    x.neg()
    _C.advance_configuration_epoch()
    x.neg()
    assert counts("aten::neg")["planner_calls"] == 2


def test_overlapping_memory_raises_pytorchs_errors() -> None:
    x = torch.ones(8, device=DEVICE)
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer to"):
        x[1:].add_(x[:-1])
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single memory"):
        x[:1].expand(4).add_(1)


def test_shape_errors_are_pytorchs() -> None:
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        torch.ones(3, device=DEVICE) + torch.ones(4, device=DEVICE)


def test_explain_can_be_nested() -> None:
    fresh()
    x = torch.ones(3, device=DEVICE)
    inner: list[str] = []

    def explained() -> None:
        x.neg()
        inner.append(plans.explain(x.exp))
        with pytest.raises(ZeroDivisionError):
            plans.explain(lambda: (x.sin(), 1 // 0))
        x.cos()

    outer = plans.explain(explained)
    assert [line.partition(":")[0] for line in inner[0].splitlines() if line.startswith("aten")] == ["aten"]
    assert "aten::exp: planned" in inner[0]
    assert "neg" not in inner[0]
    names = [line.split(": ")[0] for line in outer.splitlines() if line.startswith("aten")]
    assert names == ["aten::neg", "aten::exp", "aten::sin", "aten::cos"]
    assert "aten" not in plans.explain(lambda: None)


# --- side effects of planners


@pytest.mark.parametrize("mode", ["0", "1"])
@pytest.mark.parametrize("effect", ["launch", "nested", "copy", "host", "fallback", "random", "nested random"])
def test_run_on_cpu_after_a_side_effect_is_an_error(effect: str, mode: str) -> None:
    from torch_backplane.planning import (
        Call,
        RunOnCPU,
        call_on_cpu,
        host_sees_memory,
        operator,
        random_numbers,
        run_pointwise,
    )

    name = f"late_{effect}_{mode}".replace(" ", "_")
    LIBRARY.define(f"{name}(Tensor(a!) self, bool hand_over) -> Tensor(a!)")
    LIBRARY.impl(name, lambda self, hand_over: self.add_(1.0), "CPU")
    effects = {
        "launch": lambda x: run_pointwise(lambda a: a + 1.0, [x], [x], key="late", name="late"),
        "nested": lambda x: x[1:].add_(1.0),
        "copy": lambda x: x[1:].copy_(torch.ones_like(x[1:])),
        "host": lambda x: call_on_cpu(torch.ops.aten.add.out, x, torch.ones_like(x), out=x),
        "fallback": lambda x: x.lgamma_(),
        "random": lambda x: random_numbers(4),
        "nested random": lambda x: torch.empty_like(x).normal_(),
    }

    @operator(f"backplane_plans::{name}", variants=False)
    def plan(call: Call, self: torch.Tensor, hand_over: bool) -> torch.Tensor:
        effects[effect](self)
        if hand_over:
            raise RunOnCPU("second thoughts")
        return self

    x = torch.ones(4, device=DEVICE)
    if effect == "host" and not host_sees_memory(x.device):
        return
    late = getattr(torch.ops.backplane_plans, name)
    plans.set_mode(mode)
    try:
        for _ in range(2):
            late(x, False)
            with pytest.raises(RuntimeError, match=rf"planner of backplane_plans::{name} leaves .*thoughts.*before"):
                late(x, True)
    finally:
        plans.set_mode("1")


def test_run_on_cpu_after_writes_to_own_memory_falls_back() -> None:
    from torch_backplane.planning import Call, RunOnCPU, operator

    LIBRARY.define("early(Tensor self) -> Tensor")
    LIBRARY.impl("early", lambda self: self + 1.0, "CPU")

    @operator("backplane_plans::early", variants=False)
    def plan(call: Call, self: torch.Tensor) -> torch.Tensor:
        (self * 2.0).add_(self)
        raise RunOnCPU("only temporaries were written")

    x = torch.ones(4, device=DEVICE)
    for _ in range(3):
        assert torch.ops.backplane_plans.early(x).tolist() == [2.0] * 4


def test_writes_that_the_schema_does_not_declare_are_errors() -> None:
    from torch_backplane.planning import Call, operator

    LIBRARY.define("sly(Tensor self) -> Tensor")

    @operator("backplane_plans::sly", variants=False)
    def plan(call: Call, self: torch.Tensor) -> torch.Tensor:
        return self.add_(1.0).clone()

    x = torch.ones(4, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"backplane_plans::sly writes to an argument that .* does not declare"):
        torch.ops.backplane_plans.sly(x)
