"""Tests `conformance --forms`: the calls that it makes, and the differences that it finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torch_backplane.conformance import EntryResult, Settings, accepted, forms_check
from torch_backplane.conformance.database import load
from torch_backplane.conformance.forms import Form
from torch_backplane.conformance.forms_check import check_forms
from torch_backplane.conformance.settings import OP_DB

CPU, BP = torch.device("cpu"), torch.device("bp", 0)


@pytest.fixture(scope="module")
def ops() -> dict[str, Any]:
    return load(OP_DB)


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms_check, "_seen", set())


def check(op: Any, device: torch.device) -> EntryResult:
    return check_forms(op, torch.float32, Settings(forms=True, samples=1), device, lambda text: None)


def kinds(result: EntryResult) -> set[str]:
    return {finding.kind for finding in result.findings if finding.fails}


def test_cpu_compared_with_itself(ops: dict[str, Any]) -> None:
    result = check(ops["neg"], CPU)
    assert result.findings == []
    assert result.compared > 40
    assert result.both_raised >= 5  # other dtypes for the result, overlaps


@pytest.mark.parametrize("name", ["neg", "cumsum", "masked_fill", "linspace", "nn.functional.leaky_relu"])
def test_operators_pass_in_all_forms(ops: dict[str, Any], name: str) -> None:
    result = check(ops[name], BP)
    assert [finding for finding in result.findings if finding.fails] == []
    assert result.compared > 20


def test_missing_error_is_found(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Form.__call__

    def lenient(self: Form, arguments: dict[str, Any]) -> Any:
        try:
            return call(self, arguments)
        except RuntimeError:
            if arguments["self"].device == CPU:
                raise
            return arguments["self"]

    monkeypatch.setattr(Form, "__call__", lenient)
    assert kinds(check(ops["neg"], BP)) == {"no error"}


def test_writes_between_the_elements_are_found(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Form.__call__

    def careless(self: Form, arguments: dict[str, Any]) -> Any:
        result = call(self, arguments)
        out = arguments.get("out")
        if out is not None and out.device != CPU and self.name == "out with gaps":
            memory = out.untyped_storage()
            torch.empty(0, device=BP).set_(memory, 0, (memory.nbytes() // 4,))[0] = -1.0
        return result

    monkeypatch.setattr(Form, "__call__", careless)
    result = check(ops["neg"], BP)
    assert [(finding.kind, finding.variant) for finding in result.findings] == [("mutation", "out with gaps")]


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str, instead: Callable[[Any], Any]) -> None:
    """Replaces the CPU's result of one form with `instead(result)`."""
    call = Form.__call__

    def wrong(self: Form, arguments: dict[str, Any]) -> Any:
        result = call(self, arguments)
        return instead(result) if self.name == name and result.device == CPU else result

    monkeypatch.setattr(Form, "__call__", wrong)


def test_crash_on_the_cpu_does_not_stop_the_check(
    ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = check(ops["neg"], BP).compared
    forms_check._seen.clear()
    on_the_cpu(monkeypatch, "out with gaps", lambda result: os.abort())
    result = check(ops["neg"], BP)
    assert [(finding.kind, finding.variant) for finding in result.findings] == [("cpu crash", "out with gaps")]
    assert result.status == "passed"
    assert result.compared == compared - result.findings[0].count


def test_views_of_other_dtypes_and_memory_formats_are_compared(ops: dict[str, Any]) -> None:
    """The child processes can send all of the CPU's results."""
    for name in ("view_as_complex", "repeat_interleave", "sgn"):
        assert not any(finding.kind == "cpu crash" for finding in check(ops[name], BP).findings), name


def test_float64_reference_decides(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_cpu(monkeypatch, "self as float64", lambda result: result)
    on_the_cpu(monkeypatch, "self longer", lambda result: result * 1.01 if result.dtype == torch.float32 else result)
    assert {(one.kind, one.variant) for one in check(ops["sinh"], BP).findings} == {("nearer", "self longer")}


def test_results_in_another_dtype_use_the_computed_tolerance(
    ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_cpu(monkeypatch, "out as float64", lambda result: result.mul_(1 + 5e-7))
    assert check(ops["neg"], BP).findings == []
    forms_check._seen.clear()
    on_the_cpu(monkeypatch, "out as float64", lambda result: result.mul_(1.01))
    assert {one.variant for one in check(ops["neg"], BP).findings} == {"out as float64"}


@pytest.mark.parametrize(
    "error", [RuntimeError("the kernel bp_neg could not be built"), IndexError("tuple index out of range")], ids=str
)
def test_internal_errors_are_not_refusals(
    error: Exception, ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Form.__call__

    def broken(self: Form, arguments: dict[str, Any]) -> Any:
        if self.name == "out as bool" and arguments["self"].device != CPU:
            raise error
        return call(self, arguments)

    monkeypatch.setattr(Form, "__call__", broken)
    assert [(one.kind, one.variant) for one in check(ops["neg"], BP).findings] == [("error", "out as bool")]


def test_accepted_differences_of_forms_are_not_failures(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = Form.__call__

    def wrong(self: Form, arguments: dict[str, Any]) -> Any:
        result = call(self, arguments)
        changed = self.name == "self longer" and "neg" in str(self.overload) and result.device != CPU
        return result + 1 if changed else result

    monkeypatch.setattr(Form, "__call__", wrong)
    known = accepted.Accepted(r"neg_?", ("values",), "for this test", calls="self longer")
    for table, kind, passes in (((known,), "accepted", True), ((known._replace(calls="self"),), "values", False)):
        monkeypatch.setattr(accepted, "FORMS", table)
        forms_check._seen.clear()
        result = check(ops["neg"], BP)
        assert {finding.kind for finding in result.findings} == {kind}
        assert (result.status == "passed") == passes
