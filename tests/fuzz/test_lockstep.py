"""The judge of the random programs finds what is wrong, and nothing else; a finding's program becomes short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuzz import judging
from fuzz.campaign import Report
from fuzz.lockstep import Lockstep
from fuzz.programs import Finding, Step, as_program, needed
from fuzz.shrinking import shrink


def kinds(line: str, right: Callable[..., Any], wrong: Callable[..., Any], before: tuple[str, ...] = ()) -> list[str]:
    """What is found of a line that calls `f`, which is one function on the CPU and another on the device."""
    run = Lockstep("bp:0", "bp:1")
    run.cpu["f"], run.bp["f"] = right, wrong
    for text in (
        "t0 = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).to(d)",
        "t1 = t0.clone()",
        "t2 = t0[1]",
        *before,
    ):
        assert run.run(Step(text, "made")) == []
    return sorted(finding.key for finding in run.run(Step(line, "f")))


def refuse(error: Exception) -> Callable[..., Any]:
    def raising(*arguments: Any, **named: Any) -> None:
        raise error

    return raising


def changed_first(error: Exception) -> Callable[..., Any]:
    def raising(x: torch.Tensor) -> None:
        x.zero_()
        raise error

    return raising


def test_out_is_judged_by_what_is_computed_without_it() -> None:
    """The CPU's reductions set an `out=` to their start before they read what lies there, too."""

    def start_first(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x.sum(0) if out is None else out.copy_(x.sum(0)).zero_()

    def right(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(x.sum(0))

    def wrong(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(x.sum(0) + 1)

    assert kinds("f(t0, out=t2)", start_first, right) == []
    assert kinds("f(t0, out=t2)", start_first, wrong) == ["argument values: f"]

    def of_half(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.exp(x) if out is None else out.copy_(torch.exp(x))

    def of_float(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.float()) if out is None else out.copy_(torch.exp(x.float()))

    half = ("t3 = t0.half()", "t4 = torch.zeros_like(t0)")
    assert kinds("f(t3, out=t4)", of_half, of_float, half) == ["argument values: f"]


def test_an_operand_that_out_resizes_is_not_looked_at() -> None:
    def resized(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(2, 6)

    def another(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(2, 6).fill_(7)

    assert kinds("f(t2, out=t0)", resized, another) == []
    assert kinds("f(t1, out=t0)", resized, another) == ["argument values: f"]


def test_out_that_was_resized_before_an_error_is_not_looked_at() -> None:
    def resized(x: torch.Tensor, out: torch.Tensor) -> None:
        out.resize_(7)
        raise ValueError("no")

    assert kinds("f(t0, out=t1)", refuse(ValueError("no")), resized) == []
    assert kinds("f(t0, t1)", refuse(ValueError("no")), resized) == ["after an error, argument shape: f"]


FAULTS = {
    "a wrong number": (lambda x: x + 1, lambda x: x + 1.001, ["values: f"]),
    "a wrong place": (lambda x: x.flip(0), lambda x: x.flip(1), ["values: f"]),
    "NaN": (lambda x: x / 2, lambda x: x / 2 + torch.nan, ["values: f"]),
    "dtype": (lambda x: x * 2, lambda x: (x * 2).double(), ["dtype: f"]),
    "shape": (lambda x: x * 2, lambda x: (x * 2)[None], ["shape: f"]),
    "strides": (lambda x: x * 2, lambda x: (x * 2).mT.contiguous().mT, ["layout: f"]),
    "a list for a tuple": (lambda x: (x * 2,), lambda x: [x * 2], ["structure: f"]),
    "no result": (lambda x: x * 2, lambda x: None, ["structure: f"]),
    "a gradient that is wanted": (lambda x: x * 2, lambda x: (x * 2).requires_grad_(), ["grad: f"]),
    "a view that is a copy": (lambda x: x[:1], lambda x: x[:1].clone(), ["aliasing: f"]),
    "an argument that is written": (lambda x: x * 2, lambda x: x.add_(1) * 2 - 2, ["argument values: f"]),
    "no error": (refuse(ValueError("no")), lambda x: x * 2, ["no error: f"]),
    "an error": (lambda x: x * 2, refuse(ValueError("no")), ["error ValueError: f"]),
    "another error": (refuse(IndexError("no")), refuse(ValueError("no")), ["error ValueError for IndexError: f"]),
    "other words": (refuse(ValueError("x of 3")), refuse(ValueError("x of 4")), ["error text: f"]),
    "a write before an error": (
        refuse(ValueError("no")), changed_first(ValueError("no")),
        ["after an error, argument values: f"],
    ),
}  # fmt: skip

SAME = {
    "rounding": (lambda x: x / 3, lambda x: x * (1 / 3)),
    "the device's name in an error": (refuse(ValueError("x is on cpu")), refuse(ValueError("x is on bp:0"))),
    "what the CPU lacks": (refuse(RuntimeError("\"f\" not implemented for 'Half'")), lambda x: x * 2),
    "what the CPU alone has written before an error": (changed_first(ValueError("no")), refuse(ValueError("no"))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    right, wrong, expected = FAULTS[fault]
    assert kinds("t3 = f(t0)", right, wrong) == expected


@pytest.mark.parametrize("same", SAME)
def test_what_may_differ_is_no_finding(same: str) -> None:
    right, other = SAME[same]
    assert kinds("t3 = f(t0)", right, other) == []


def test_rounding_does_not_grow_into_a_finding() -> None:
    """floor() of what differs in the last digit, which the CPU takes over from the device before."""
    above = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(1.0))
    run = Lockstep("bp:0", "bp:1")
    run.cpu["f"], run.bp["f"] = (lambda: above.clone()), (lambda: below.to("bp:0"))
    lines = ["t0 = f()", "t1 = t0.floor()", "t2 = t0 * 2"]
    assert [run.run(Step(line, "f")) for line in lines] == [[], [], []]
    assert run.cpu["t1"].item() == run.bp["t1"].item() == 1


def test_float64_excuses_what_is_as_near_as_the_cpu() -> None:
    exact = {"t0": torch.tensor([1e-3, 5.0], dtype=torch.float64)}
    cpu = torch.tensor([1.0001e-3, 5.0])
    assert judging.excused(exact["t0"], cpu, torch.tensor([0.9999e-3, 5.0]))
    assert not judging.excused(exact["t0"], cpu, torch.tensor([1e-3, 5.01]))
    assert not judging.excused(exact["t0"], cpu, torch.tensor([1e-3, torch.nan]))


def test_float64_excuses_what_the_operands_precision_leaves_open() -> None:
    """1 - 0.99999 has few digits; integers become float64 for float64 to judge."""
    names = {"t0": torch.tensor([0.99999, 0.5]), "t1": torch.tensor([3]), "torch": torch}
    exact, shaken = (judging.in_float64(names, "t2 = 1 - t0", moved)["t2"] for moved in (False, True))
    cpu, off = (1 - names["t0"]), (1 - names["t0"]) * torch.tensor([1.01, 1.0])
    assert judging.excused(exact, cpu, off, shaken)
    assert not judging.excused(exact, cpu, off * torch.tensor([1.0, 1.001]), shaken)
    assert judging.in_float64(names, "t2 = t1.sqrt()")["t2"].dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32


def test_two_precisions_are_not_for_float64_to_judge() -> None:
    """torch.exp(float16, out=float32) has float16's digits, and float32 would be nearer."""
    names = {"t0": torch.ones(2, dtype=torch.float16), "t1": torch.zeros(2)}
    assert judging.in_float64({**names, "torch": torch}, "torch.exp(t0, out=t1)") == {}
    assert judging.in_float64({"t0": torch.ones(2), "torch": torch}, "t1 = torch.exp(t0)")["t1"].dtype == torch.float64


PROGRAM = [
    Step(line, "made")
    for line in (
        "t0 = torch.ones(3, device=d)", "t1 = torch.zeros(3, device=d)", "t2 = t0 + t1", "t3 = t0[1:]", "del t1",
        "t3.add_(2)", "t4 = t2 * 2", "t5 = t3 + 1",
    )
]  # fmt: skip


def test_lines_without_their_names_are_left_out() -> None:
    assert [step.line for step in needed(PROGRAM[1:])] == ["t1 = torch.zeros(3, device=d)", "del t1"]


def test_a_program_shrinks_to_what_shows_the_finding() -> None:
    """Here a line on other tensors belongs to it, as the memory of one that was freed may."""
    tried = []

    def shows(steps: list[Step]) -> bool:
        tried.append(len(steps))
        lines = [step.line for step in steps]
        return "del t1" in lines and lines[-1] == "t5 = t3 + 1"

    lines = [step.line for step in shrink(PROGRAM, shows)]
    assert lines == [
        "t0 = torch.ones(3, device=d)",
        "t1 = torch.zeros(3, device=d)",
        "t3 = t0[1:]",
        "del t1",
        "t5 = t3 + 1",
    ]
    assert len(tried) < 60


def test_a_program_to_paste_runs(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        Step("t0 = make((2,), torch.int8, 5).to(d)", "make"),
        Step("t0.add_('x')", "add_"),
        Step("t1 = t0 + 1", "add"),
    ]
    text = as_program(steps, Finding("values", "add", "1, expected 2"), "bp:0", "bp:1", {"A": "1"}, {1})
    assert text.startswith("# values: add: 1, expected 2\n# A=1 python …\nimport torch\n")
    exec(compile(text, "<pasted>", "exec"), {"__name__": "pasted"})
    first, second, third, fourth = capsys.readouterr().out.splitlines()
    assert first.startswith("cpu t0 tensor([")
    assert second.startswith("cpu t1 tensor([")
    assert "device='bp:0'" in third
    assert "device='bp:0'" in fourth


def test_findings_are_told_by_their_key() -> None:
    report = Report()
    item = {"finding": "values: exp", "message": "", "verdict": "repeats", "steps": [1, 2, 3]}
    assert report.add(item)
    assert not report.add({**item, "steps": [1]})
    assert not report.add({**item, "verdict": "excused", "finding": "values: other"})
    assert not report.add({**item, "verdict": "does not repeat", "finding": "values: once"})
    assert report.counts == {"values: exp": 2}
    assert report.findings["values: exp"]["steps"] == [1]
    assert (report.rounding, len(report.unrepeated)) == (1, 1)
