"""Tests the comparison of random programs with the CPU, the accepted differences, and the shrinking of programs."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fuzz import campaign, comparison
from fuzz.calls import attempt
from fuzz.campaign import Report
from fuzz.known import reason_for
from fuzz.lockstep import Lockstep
from fuzz.programs import Finding, Step, as_program, needed
from fuzz.random_arguments import RandomArguments
from fuzz.shrinking import excused, replayed, shrink


def kinds(line: str, right: Callable[..., Any], wrong: Callable[..., Any], before: tuple[str, ...] = ()) -> list[str]:
    """Returns the findings of a line that calls `f`, which is `right` on the CPU and `wrong` on the device."""
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


def test_in_place_results_are_compared_with_out_of_place_results() -> None:
    """The CPU's products write to their tensor before they read it as another operand."""
    run = Lockstep("bp:0", "bp:1")
    for text in ("t0 = torch.arange(4.).view(2, 2).to(d)", "t1 = t0 + 1"):
        assert run.run(Step(text, "made")) == []
    assert run.run(Step("t0.addmm_(t1, t0)", "addmm_")) == []
    run.bp["t1"].add_(1)
    assert "argument values: addmm_" in [finding.key for finding in run.run(Step("t0.addmm_(t1, t0)", "addmm_"))]


def test_integer_views_of_floats_are_not_compared() -> None:
    """Integer views of floats are not compared after a write to the floats, which can differ in the last digit."""

    def next_number(x: torch.Tensor) -> None:
        x.copy_(torch.nextafter(x.cpu(), torch.tensor(9.0)))

    before = ("t3 = t0.view(torch.uint8)", "t4 = t1.view(torch.int32) + 0")
    assert kinds("f(t0)", lambda x: None, next_number, before) == []
    assert kinds("f(t4)", lambda x: None, lambda x: x.add_(1), before) == ["argument values: f"]


def test_out_results_are_compared_with_results_without_out() -> None:
    """The CPU's reductions initialize `out=` before they read an operand in the same memory."""

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

    of_reals = torch.tensor([3.7621956])
    for near, is_right in ((3.7621958 + 0j, True), (3.77 + 0j, False), (3.7621958 + 1e-3j, False)):
        assert comparison.as_computed(of_reals, torch.tensor([near], dtype=torch.complex128)) == is_right

    half = ("t3 = t0.half()", "t4 = torch.zeros_like(t0)")
    assert kinds("f(t3, out=t4)", of_half, of_float, half) == ["argument values: f"]


def test_resized_out_that_is_an_operand_is_not_compared() -> None:
    def resized(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(2, 6)

    def another(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.resize_(2, 6).fill_(7)

    assert kinds("f(t2, out=t0)", resized, another) == []
    assert kinds("f(t1, out=t0)", resized, another) == ["argument values: f"]


def test_out_that_is_an_operand_is_compared_with_results_without_out() -> None:
    def zeroed_first(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 if out is None else out.zero_()  # overwrites x

    def read_first(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(x * 2)

    def another(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(x * 3)

    lists = ("t3 = [t0, t1]",)
    for place in ("t0", "t3[0]"):
        assert kinds(f"f({place}, out={place})", zeroed_first, read_first, lists) == []
        assert set(kinds(f"f({place}, out={place})", zeroed_first, another, lists)) != set()


def test_out_resized_before_an_error_is_not_compared() -> None:
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
    "requires_grad": (lambda x: x * 2, lambda x: (x * 2).requires_grad_(), ["grad: f"]),
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
    "a kernel that the CPU lacks": (refuse(RuntimeError("\"f\" not implemented for 'Half'")), lambda x: x * 2),
    "a kernel that the CPU lacks, and another error after a write": (
        refuse(RuntimeError("\"f\" not implemented for 'Half'")), changed_first(ValueError("no")),
    ),
    "a write before an error on the CPU only": (changed_first(ValueError("no")), refuse(ValueError("no"))),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    right, wrong, expected = FAULTS[fault]
    assert kinds("t3 = f(t0)", right, wrong) == expected


@pytest.mark.parametrize("same", SAME)
def test_accepted_differences_are_not_findings(same: str) -> None:
    right, other = SAME[same]
    assert kinds("t3 = f(t0)", right, other) == []


def test_rounding_differences_do_not_propagate() -> None:
    """floor() of values that differ in the last digit: the CPU adopts the device's values before."""
    above = torch.nextafter(torch.tensor(2.0), torch.tensor(3.0))
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(1.0))
    run = Lockstep("bp:0", "bp:1")
    run.cpu["f"], run.bp["f"] = (lambda: above.clone()), (lambda: below.to("bp:0"))
    lines = ["t0 = f()", "t1 = t0.floor()", "t2 = t0 * 2"]
    assert [run.run(Step(line, "f")) for line in lines] == [[], [], []]
    assert run.cpu["t1"].item() == run.bp["t1"].item() == 1


def test_float64_accepts_results_as_accurate_as_the_cpu() -> None:
    exact = {"t0": torch.tensor([1e-3, 5.0], dtype=torch.float64)}
    cpu = torch.tensor([1.0001e-3, 5.0])
    assert comparison.excused(exact["t0"], cpu, torch.tensor([0.9999e-3, 5.0]))
    assert not comparison.excused(exact["t0"], cpu, torch.tensor([1e-3, 5.01]))
    assert not comparison.excused(exact["t0"], cpu, torch.tensor([1e-3, torch.nan]))


def test_float64_accepts_results_of_another_dtype() -> None:
    """Batch norm's bfloat16 statistics are float32 on devices. This is accepted, but wrong values are still found."""
    exact = [torch.tensor([2.1640625], dtype=torch.float64), torch.tensor([0.08984375], dtype=torch.float64)]
    cpu = [torch.tensor([2.15625], dtype=torch.bfloat16), torch.tensor([0.09375], dtype=torch.bfloat16)]
    ours = [torch.tensor([2.1640625]), torch.tensor([0.08984375], dtype=torch.bfloat16)]
    assert comparison.excused(exact, cpu, ours)
    assert not comparison.excused(exact, cpu, [torch.tensor([2.5]), ours[1]])
    assert not comparison.excused(exact, cpu, [ours[0], torch.tensor([0.5], dtype=torch.bfloat16)])
    assert not comparison.excused(exact, cpu, [torch.tensor([2]), ours[1]])


def test_float64_accepts_errors_within_the_operands_precision() -> None:
    """1 - 0.99999 has few digits. Integers are converted to float64 for the reference."""
    names = {"t0": torch.tensor([0.99999, 0.5]), "t1": torch.tensor([3]), "torch": torch}
    exact, shaken = (comparison.in_float64(names, "t2 = 1 - t0", moved)["t2"] for moved in (False, True))
    cpu, off = (1 - names["t0"]), (1 - names["t0"]) * torch.tensor([1.01, 1.0])
    assert comparison.excused(exact, cpu, off, shaken)
    assert not comparison.excused(exact, cpu, off * torch.tensor([1.0, 1.001]), shaken)
    assert comparison.in_float64(names, "t2 = t1.sqrt()")["t2"].dtype == torch.float64
    names["t3"] = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    assert comparison.in_float64(names, "t4 = t3[0].std()")["t4"] == 0
    assert comparison.in_float64(names, "t4 = t3[0] + t3[1]") == {}  # the intended precision is unknown
    assert torch.get_default_dtype() == torch.float32


def test_gradients_are_compared_with_float64() -> None:
    """The CPU's factor is inaccurate. The device's factor is accurate, or wrong."""

    def program(factor: str) -> list[Step]:
        lines = (
            "t0 = make((4,), torch.float32, 1).to(d)",
            "t1 = t0.detach().requires_grad_()",
            f"t2 = t1 * ((t1 + 1e4) - 1e4 if d == 'cpu' else {factor})",
            "t3 = torch.autograd.grad(t2, [t1], torch.ones_like(t2))",
        )
        return [Step(line, "f") for line in lines]

    kept = (Step("t2.sum().backward()", "f"), Step("t3 = t1.grad", "f"))
    for factor, is_right in (("t1 * 1", True), ("t1 * 1.1", False)):
        for steps in (program(factor), [*program(factor)[:-1], *kept]):
            assert replayed(steps, "values: f", "bp:0", "bp:1") is not None
            assert excused(steps, "bp:0", "bp:1") == is_right


def test_mixed_precisions_have_no_float64_reference() -> None:
    """torch.exp(float16, out=float32) has float16's precision; a computation in float32 would be closer to float64."""
    names = {"t0": torch.ones(2, dtype=torch.float16), "t1": torch.zeros(2)}
    assert comparison.in_float64({**names, "torch": torch}, "torch.exp(t0, out=t1)") == {}
    assert (
        comparison.in_float64({"t0": torch.ones(2), "torch": torch}, "t1 = torch.exp(t0)")["t1"].dtype == torch.float64
    )
    each = comparison.in_float64({**names, "torch": torch}, "t2 = torch._foreach_norm([t0, t1])")["t2"]
    assert [one.dtype for one in each] == [torch.float64, torch.float64]


PROGRAM = [
    Step(line, "made")
    for line in (
        "t0 = torch.ones(3, device=d)", "t1 = torch.zeros(3, device=d)", "t2 = t0 + t1", "t3 = t0[1:]", "del t1",
        "t3.add_(2)", "t4 = t2 * 2", "t5 = t3 + 1",
    )
]  # fmt: skip


def test_lines_with_missing_names_are_removed() -> None:
    assert [step.line for step in needed(PROGRAM[1:])] == ["t1 = torch.zeros(3, device=d)", "del t1"]


def test_programs_shrink_to_the_lines_of_the_finding() -> None:
    """The finding here needs a line on other tensors, as can happen with reused memory of a freed tensor."""
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


def test_printed_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_report_groups_findings_by_key() -> None:
    report = Report("host")
    item = {"finding": "values: exp", "message": "", "verdict": "repeats", "steps": [{"line": "t0"}] * 3}
    assert report.add(item)
    assert not report.add({**item, "steps": [{"line": "t0"}]})
    assert not report.add({**item, "verdict": "excused", "finding": "values: other"})
    assert not report.add({**item, "verdict": "does not repeat", "finding": "values: once"})
    assert report.counts == {"values: exp": 2}
    assert report.findings["values: exp"]["steps"] == [{"line": "t0"}]
    assert (report.rounding, len(report.unrepeated)) == (1, 1)


# --- accepted differences that depend on the operands


NORM = "t9 = torch.native_group_norm(t0, t1, t1, 1, 2, 3, 1, 0.5)"
OUT = "t0 = torch.ones(3, dtype=torch.int64).to(d)"
# name → key, message, a program whose difference is accepted, and one whose difference is not
ACCEPTED_OF: dict[str, tuple[str, str, list[str], list[str]]] = {
    "one tensor": (
        "argument layout: max out=", "t0: strides (2,), expected (1,) of (3,)",
        [OUT, "torch.max(t0, 0, out=(t0, t0,))"], [OUT, "t1 = t0 + 1", "torch.max(t0, 0, out=(t0, t1,))"],
    ),
    "overlap": (
        "other values: softmax out=", "t0: 1.0, expected 2.0 at (0,); 1 of 3 differ (torch.float32)",
        ["t0 = torch.ones(4).to(d)", "t1 = t0.unfold(0, 3, 1)", "torch.softmax(t1, 0, out=t1)"],
        ["t0 = torch.ones(4, 3).to(d)", "t1 = t0.t()", "torch.softmax(t1, 0, out=t1)"],
    ),
    "windows": (
        "other values: index_put", "t0: 2.0, expected -0.0 at (1,); 1 of 4 differ (torch.float32)",
        ["t0 = torch.ones(4).to(d)", "t1 = t0.unfold(0, 3, 1)", "t2 = torch.tensor([0]).to(d)", "t1[t2, ...] = t0[:3]"],
        ["t0 = torch.ones(4, 3).to(d)", "t1 = t0.t()", "t2 = torch.tensor([0]).to(d)", "t1[t2, ...] = t0[:, 0]"],
    ),
    "one element": (
        "error RuntimeError: fill_", "RuntimeError: value cannot be converted to type c10::Half without overflow",
        ["t0 = torch.ones(1, 1).half().to(d)", "t0.fill_(1e30)"], ["t0 = torch.ones(2).half().to(d)", "t0.fill_(1e30)"],
    ),
    "NaN": (
        "values: unique", "t1: 1, expected 2 at (0,); 1 of 3 differ (torch.int64)",
        ["t0 = torch.tensor([nan, nan, 1.0]).to(d)", "t1 = torch.unique(t0, return_inverse=True)"],
        ["t0 = torch.tensor([nan, 2.0, 1.0]).to(d)", "t1 = torch.unique(t0, return_inverse=True)"],
    ),
    "products": (
        "values: prod", "t1: nan, expected 0.0 at (); 1 of 1 differ (torch.float32)",
        ["t0 = torch.tensor([1e30, 1e30, 0.0]).to(d)", "t1 = t0.prod()"],
        ["t0 = torch.tensor([1e30, 1e-30, 0.0]).to(d)", "t1 = t0.prod()"],
    ),
    "batches": (
        "crash (status -11): triu out=", "",
        ["t0 = torch.ones(3, 4, 2, 2).to(d)", "t1 = t0.permute(3, 2, 0, 1)", "torch.triu(t1, out=t1)"],
        ["t0 = torch.ones(3, 4, 2, 2).to(d)", "t1 = t0.mT", "torch.triu(t1, out=t1)"],
    ),
    "converted": (
        "layout: pow", "t2: strides (3, 6, 1), expected (9, 3, 1) of (2, 3, 3)",
        ["t0 = torch.ones(1, 3, 3).bool().to(d).expand(2, 3, 3)", "t1 = torch.ones(3, 2, 3).to(d).permute(1, 0, 2)",
         "t2 = torch.pow(t0, t1)"],
        ["t0 = torch.ones(1, 3, 3).to(d).expand(2, 3, 3)", "t1 = torch.ones(3, 2, 3).to(d).permute(1, 0, 2)",
         "t2 = torch.pow(t0, t1)"],
    ),
    "sums of halves": (
        "argument values: logsumexp out=", "t1: 3.49858, expected 3.49862 at (0,); 1 of 1 differ (torch.float32)",
        ["t0 = torch.ones(3, 4).half().to(d)", "t1 = torch.ones(3).to(d)", "torch.logsumexp(t0, 1, out=t1)"],
        ["t0 = torch.ones(3, 4).to(d)", "t1 = torch.ones(3).to(d)", "torch.logsumexp(t0, 1, out=t1)"],
    ),
    "orders": (
        "values: linalg.vector_norm", "t1: 5.679144, expected 5.679480 at (); 1 of 1 differ (torch.float32)",
        ["t0 = torch.tensor(5.67948).to(d)", "t1 = torch.linalg.vector_norm(t0, 0.001, dim=[0])"],
        ["t0 = torch.tensor(5.67948).to(d)", "t1 = torch.linalg.vector_norm(t0, 2.5, dim=[0])"],
    ),
    "lists": (
        "layout: vstack", "t2: strides (12, 4, 4, 1), expected (12, 1, 12, 3) of (2, 3, 1, 4)",
        ["t0 = torch.ones(1, 4, 3, 1).to(d).permute(3, 2, 0, 1)", "t1 = torch._foreach_sqrt([t0, t0])",
         "t2 = torch.vstack([t1[1], t1[0]])"],
        ["t0 = torch.ones(1, 4, 3, 1).to(d).permute(3, 2, 0, 1)", "t1 = torch._foreach_sqrt([t0, t0])",
         "t2 = torch.vstack([t0, t0])"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED_OF)
def test_accepted_differences_depend_on_the_operands(name: str) -> None:
    key, message, meant, other = ACCEPTED_OF[name]
    assert reason_for(key, message, meant, "host") is not None
    assert reason_for(key, message, other, "host") is None
    assert (reason_for(key, message, meant, "opencl") is None) == (name == "batches")


@pytest.mark.parametrize("key", ["values: native_group_norm", "values: signbit", "values: atan2", "values: view_dtype"])
def test_differences_that_are_never_accepted(key: str) -> None:
    assert reason_for(key, "t9: 0, expected -128 at (0,)", [NORM], "opencl") is None


def test_crashes_of_the_cpu_are_recognized() -> None:
    ends = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
    for where, is_cpus in (("d == 'cpu'", True), ("d != 'cpu'", False)):
        program = f"def program(d, e):\n    if {where}:\n        exec({ends!r})\n" + "".join(
            f'program("{one}", "{other}")\n' for one, other in (("cpu", "cpu"), ("bp:0", "bp:1"))
        )
        assert campaign._ends_on_cpu(program, ("bp:0", "bp:1"), dict(os.environ)) == is_cpus
    report = Report("host")
    item = {"finding": "crash (status -11): f", "message": "", "seed": 0, "steps": [], "program": ""}
    assert report.add({**item, "verdict": "repeats"})
    assert not report.add({**item, "finding": "crash (status -11): g", "verdict": "the CPU's"})
    assert len(report.findings) == sum(report.meant.values()) == 1


def test_cpu_adopts_the_device_sign_of_zeros() -> None:
    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 0.0)

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, -0.0)

    run = Lockstep("bp:0", "bp:1")
    run.cpu["f"], run.bp["f"] = right, wrong
    for line in ("t0 = torch.ones(3).to(d)", "t1 = f(t0)", "t2 = torch.signbit(t1)", "t3 = torch.atan2(t1, t1)"):
        assert run.run(Step(line, "f")) == []


def test_group_norm_is_compared_with_contiguous_weights() -> None:
    def right(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *sizes: Any) -> Any:
        return torch.native_group_norm(x, weight.contiguous(), bias.contiguous(), *sizes)

    def wrong(*arguments: Any) -> Any:
        return tuple(one + 1 for one in right(*arguments))

    for on_device, expected in ((right, []), (wrong, ["values: native_group_norm"])):
        run = Lockstep("bp:0", "bp:1")
        for line in ("t0 = make((1, 2, 3), torch.float32, 1).to(d)", "t2 = make((4,), torch.float32, 2).to(d)",
                     "t1 = t2[::2]"):  # fmt: skip
            assert run.run(Step(line, "made")) == []
        run.bp["torch"] = SimpleNamespace(native_group_norm=on_device)
        assert [finding.key for finding in run.run(Step(NORM, "native_group_norm"))] == expected


def test_triangles_of_batches_with_gaps() -> None:
    """PyTorch's CPU kernel writes out of bounds for these tensors. The device is given another function."""
    run = Lockstep("bp:0", "bp:1")
    for line in ("t0 = make((4, 3, 2, 2), torch.float32, 1).to(d)", "t1 = t0.permute(3, 2, 1, 0)",
                 "t2 = make((2, 2, 3, 4), torch.float32, 2).to(d)"):  # fmt: skip
        assert run.run(Step(line, "made")) == []

    def right(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.triu(x) if out is None else out.copy_(torch.triu(x))

    run.bp["torch"] = SimpleNamespace(triu=right)
    assert run.run(Step("torch.triu(t2, out=t1)", "triu out=")) == []
    run.bp["torch"] = SimpleNamespace(triu=lambda x, out: out.zero_())
    assert [one.key for one in run.run(Step("torch.triu(t2, out=t1)", "triu out="))] == ["other values: triu out="]


def test_triangles_written_to_overlapping_elements() -> None:
    """PyTorch's CPU kernel writes to them; which value is written last is unspecified."""
    run = Lockstep("bp:0", "bp:1")
    for line in ("t0 = torch.ones(3, 4, 2, 5).to(d)", "t1 = torch.zeros(3, 1, 2, 5).to(d).expand(3, 4, 2, 5)"):
        assert run.run(Step(line, "made")) == []
    run.bp["torch"] = SimpleNamespace(triu=lambda x, out: out)
    assert run.run(Step("torch.triu(t0, out=t1)", "triu out=")) == []


def test_attempted_calls_change_nothing() -> None:
    run = Lockstep("bp:0", "bp:1")
    assert run.run(Step("t0 = torch.ones(2, 2).to(d)", "made")) == []
    draw = cast(RandomArguments, SimpleNamespace(run=run))
    assert torch.equal(cast(torch.Tensor, attempt(draw, "t0.mul_(2)")), torch.full((2, 2), 2.0))
    assert torch.equal(run.cpu["t0"], torch.ones(2, 2))
