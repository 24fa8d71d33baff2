"""Tests the accepted differences from the CPU: they match narrowly and are reported separately."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from torch_backplane.conformance import accepted, numbers
from torch_backplane.conformance.report import KINDS

TABLES = {"database": accepted.DATABASE, "numbers": accepted.NUMBERS, "forms": accepted.FORMS}
KNOWN = accepted.Accepted(r"add\..*", ("values",), "because", ("float16",), r"alpha=\d+", r"overflow")


@pytest.mark.parametrize("name", TABLES)
def test_each_entry_has_a_reason(name: str) -> None:
    failing = {kind for kind, fails in KINDS.items() if fails}
    kinds = {"values", "no error", "error", "words"} if name == "numbers" else failing
    for one in TABLES[name]:
        assert len(one.reason) > 10
        assert set(one.kinds) <= kinds
        assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in one.dtypes)
        for pattern in (one.operators, one.calls, one.words):
            re.compile(pattern)
        assert one.calls or one.words or one.dtypes


@pytest.mark.parametrize(
    ("changed", "covered"),
    [
        ({}, True), ({"operator": "radd.Tensor"}, False), ({"dtype": "float32"}, False), ({"kind": "error"}, False),
        ({"call": "alpha=3.5"}, False), ({"call": "beta=3"}, False), ({"message": "nothing"}, False),
    ],
)  # fmt: skip
def test_entries_match_narrowly(changed: dict[str, str], covered: bool) -> None:
    finding = {"operator": "add.Tensor", "dtype": "float16", "kind": "values", "call": "alpha=3", "message": "overflow"}
    assert (accepted.reason((KNOWN,), **{**finding, **changed}) == "because") == covered


def test_accepted_differences_of_numbers_are_not_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = numbers.answer

    def wrong(function: Any, arguments: dict[str, Any], device: str) -> Any:
        given = answer(function, arguments, device)
        return tree_map_only(torch.Tensor, lambda one: one + (device != "cpu"), given)

    monkeypatch.setattr(numbers, "answer", wrong)
    known = accepted.Accepted(r"fill\.Scalar", ("values",), "for this test", ("float32",), r"value=1")
    monkeypatch.setattr(accepted, "NUMBERS", (known,))
    (overload,) = (one for one in numbers.overloads() if one.name() == "aten::fill.Scalar")
    outcome = numbers.compare(overload, "bp", [torch.float32], [1, 2])
    assert outcome.accepted == {"for this test": 1}
    assert [(one.kind, one.number) for one in outcome.findings] == [("values", "2")]
