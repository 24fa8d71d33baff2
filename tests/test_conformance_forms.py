"""`conformance --forms`: what it makes of a call, and that it finds what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_backplane.conformance import EntryResult, Settings, forms_check
from torch_backplane.conformance.catalogue import load
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


def test_the_cpu_against_itself(ops: dict[str, Any]) -> None:
    result = check(ops["neg"], CPU)
    assert result.findings == []
    assert result.compared > 40
    assert result.both_raised >= 5  # other dtypes for the result, overlaps


@pytest.mark.parametrize("name", ["neg", "cumsum", "masked_fill", "linspace", "nn.functional.leaky_relu"])
def test_a_sample(ops: dict[str, Any], name: str) -> None:
    result = check(ops[name], BP)
    assert [finding for finding in result.findings if finding.fails] == []
    assert result.compared > 20


def test_what_is_not_refused_is_found(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_written_between_the_elements_is_found(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
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
