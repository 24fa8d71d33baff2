"""Tests the comparisons of the conformance engine in this process: every kind of fault is found, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance_faulty_ops import FAULTS, info, rubbish_out, two_samples
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backplane.conformance import EntryResult, Report, Settings
from torch_backplane.conformance.check import check_entry, is_refusal
from torch_backplane.conformance.comparison import against_float64, same_values, tolerances
from torch_backplane.conformance.database import entries, load, named_dtype
from torch_backplane.conformance.report import KINDS, Finding, group_findings
from torch_backplane.conformance.steps import carried
from torch_backplane.conformance.transfer import Transfer, noncontiguous

CPU = torch.device("cpu")
BP = torch.device("bp", 0)


def check(op: object, device: torch.device, dtype: torch.dtype = torch.float32) -> EntryResult:
    return check_entry(op, dtype, Settings(device=str(device), grad=True), device, errors=True)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_on_the_device(name: str) -> None:
    op, kind = FAULTS[name]
    result = check(op, BP)
    kinds = {finding.kind for finding in result.findings}
    assert kind in kinds, result.findings
    assert result.status == ("refused" if kind == "refused" else "failed" if KINDS[kind] else "passed")


@pytest.mark.parametrize("name", FAULTS)
def test_faulty_operator_passes_on_the_cpu(name: str) -> None:
    result = check(FAULTS[name][0], CPU)
    assert result.status == "passed", result.findings
    assert result.compared > 0
    assert not result.findings


def test_device_may_share_a_wrong_out_result_of_the_cpu() -> None:
    result = check(info("same_rubbish_out", rubbish_out, supports_out=True), BP)
    assert result.status == "passed"
    assert not result.findings


@pytest.mark.parametrize("factor", [-1, 2])
def test_results_that_are_unique_only_up_to_a_sign(factor: int) -> None:
    """Its samples say what is unique, of a tuple only. What is written to `out` need not be equal either."""

    def direction(x: torch.Tensor, out: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
        found = (x.sum(), x * (1 if x.device.type == "cpu" else factor))
        if out is None:
            return found
        return tuple(place.resize_(one.shape).copy_(one) for place, one in zip(out, found, strict=True))

    def samples(*given: Any, **named: Any) -> Iterator[SampleInput]:
        for sample in two_samples(*given, **named):
            sample.output_process_fn_grad = lambda made: (made[0], abs(made[1])) if isinstance(made, tuple) else made
            yield sample

    result = check_entry(
        info("direction", direction, sample_inputs_func=samples, supports_out=True), torch.float32, Settings(), BP
    )
    assert {one.kind for one in result.findings} == ({"values"} if factor == 2 else set()), result.findings


@pytest.mark.parametrize("times", [1.0, 1 + 1.2e-6])
def test_chain_is_accepted_only_if_each_step_is_accurate(times: float) -> None:
    """The error of a step is not accepted if it exceeds rounding, even within the tolerance of results."""
    x = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5
    library = torch.library.Library("conformance_steps", "FRAGMENT")
    name = f"double_{times != 1}"
    library.define(f"{name}(Tensor x) -> Tensor")
    library.impl(name, lambda x: x * 2, "CPU")
    library.impl(name, lambda x: x * (2 * times), "PrivateUse1")
    double = getattr(torch.ops.conformance_steps, name)

    def call(device: torch.device, mode: TorchDispatchMode) -> torch.Tensor:
        there = x.to(device)
        with mode:
            return double(there) / 3 + 0.1

    steps_message = carried(call, BP, lambda: (x.double() * 2) / 3 + 0.1)
    assert steps_message == ("" if times != 1 else "each of the 2 steps with rounding is as exact as the CPU's")


def test_chain_is_not_accepted_if_a_step_fails_under_the_check() -> None:
    def call(device: torch.device, mode: TorchDispatchMode) -> torch.Tensor:
        if device == BP:
            raise ValueError("only under a mode")
        return torch.ones(3) / 3

    assert carried(call, BP, lambda: torch.ones(3) / 3) == ""


def test_gradients_are_compared_only_on_request() -> None:
    op, _ = FAULTS["wrong_gradient"]
    without = check_entry(op, torch.float32, Settings(grad=False), BP)
    assert without.status == "passed"
    variants = ["backward", "backward, strided", "backward, transposed"]
    assert [finding.variant for finding in check(op, BP).findings] == variants


@pytest.mark.parametrize("name", ["argument_as_if_contiguous", "cotangent_as_if_contiguous"])
def test_gradients_are_compared_in_other_layouts(name: str) -> None:
    variants = {finding.variant for finding in check(FAULTS[name][0], BP).findings}
    assert variants == {"backward, strided", "backward, transposed"}


def test_error_inputs_must_raise() -> None:
    findings = check(FAULTS["swallows_error"][0], BP).findings
    assert ("no error", "error input") in [(finding.kind, finding.variant) for finding in findings]


def test_finding_names_one_sample_and_counts_all() -> None:
    (finding,) = (f for f in check(FAULTS["wrong_values"][0], BP).findings if f.variant == "forward")
    assert finding.sample == "#0: float32[3, 4]"
    assert finding.count == 2


def test_sample_limit() -> None:
    op = info("sin", torch.sin)
    assert check_entry(op, torch.float32, Settings(samples=1), BP).samples == 1
    assert check_entry(op, torch.float32, Settings(), BP).samples == 2


def test_broken_sample_function_is_a_failure() -> None:
    def no_samples(*_: object, **__: object) -> object:
        raise RuntimeError("out of ideas")

    result = check_entry(info("broken", torch.sin, sample_inputs_func=no_samples), torch.float32, Settings(), BP)
    assert result.status == "failed"
    assert "out of ideas" in result.findings[0].message


def test_entry_without_comparisons_does_not_pass() -> None:
    def unsupported(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("only on other devices")

    assert check_entry(info("nowhere", unsupported), torch.float32, Settings(), BP).status == "empty"


# --- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotImplementedError("sparse tensors are not supported on bp"), True),
        (RuntimeError("bp: no Sparse layout"), True),
        (RuntimeError("sparse tensors are not supported here"), False),  # does not name the device
        (RuntimeError("not supported on bp"), False),  # does not name the unsupported feature
        (ValueError("no sparse on bp"), False),
        (TypeError("device bp:0 has no float32"), True),
        (TypeError("device bp:0 has no float64"), False),  # not the tested dtype
    ],
)
def test_refusal_names_device_and_reason(error: Exception, expected: bool) -> None:
    assert is_refusal(error, BP, torch.float32) is expected


def test_wide_dtype_is_refused_only_if_the_device_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that always computes in float64 does not fail on a device without float64."""
    error = TypeError("bp:0 (Small) does not support Double; `torch.bp.get_device_properties(0).dtypes` lists")
    for missing, expected in (((), False), ((torch.float64,), True), ((torch.complex128,), False)):
        monkeypatch.setattr("torch_backplane.conformance.check._missing", lambda device, missing=missing: missing)
        assert is_refusal(error, BP, torch.float32) is expected
        assert not is_refusal(RuntimeError(str(error)), BP, torch.float32)


# --- moving tensors -------------------------------------------------------------------------------
@pytest.mark.parametrize("device", [CPU, BP], ids=str)
def test_transfer_keeps_layout_aliasing_and_bits(device: torch.device) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tree = {
        "views": [base[1:, ::2], base.t(), base[0].expand(3, 6)],
        "conj": torch.conj(torch.randn(3, dtype=torch.complex64)),
        "neg": torch._neg_view(torch.ones(2)),
        "leaf": torch.ones(2, requires_grad=True),
        "index": (slice(None, torch.tensor(2)), torch.device("cpu"), "cpu", torch.Size([1]), None, 7),
    }
    moved = Transfer(device)(tree)
    for before, after in zip(tree["views"], moved["views"], strict=True):
        assert after.device == device
        assert after.stride() == before.stride()
        assert after.storage_offset() == before.storage_offset()
        assert torch.equal(after.cpu(), before)
    moved["views"][0].zero_()
    assert moved["views"][1][0, 1] == 0
    assert base.sum() != 0  # the original is unchanged
    assert moved["conj"].is_conj()
    assert moved["neg"].is_neg()
    assert moved["leaf"].requires_grad
    assert moved["leaf"].is_leaf
    limits, named, text, *rest = moved["index"]
    assert limits.stop.device == device
    assert (named, text, rest) == (device, str(device), [torch.Size([1]), None, 7])


def test_noncontiguous_keeps_values() -> None:
    tree = (torch.randn(3, 4, requires_grad=True), [torch.tensor(1.0)])
    spaced = noncontiguous(tree)
    assert torch.equal(spaced[0], tree[0])
    assert spaced[0].stride() == (8, 2)
    assert spaced[0].requires_grad


# --- comparing ------------------------------------------------------------------------------------
def test_values_agree_within_tolerance_and_nan_equals_nan() -> None:
    one = torch.tensor([1.0, float("nan"), float("inf")])
    assert same_values(one, one + 1e-7, None) is None
    assert "Mismatched elements: 1 / 3" in str(same_values(one, torch.tensor([1.1, float("nan"), float("inf")]), None))
    assert same_values(one, one * 1.05, (0.0, 0.1)) is None
    assert same_values(torch.tensor([1]), torch.tensor([2]), (5.0, 5.0))  # integers must be equal for any tolerance


EXACT = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
ROUGH = torch.tensor([1.0, 2.1, 3.1, 4.0])


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        ([1.0, 2.0, 3.0, 4.0], True),
        ([1.0, 2.05, 2.95, 4.0], True),  # inexact, but closer than the CPU
        ([1.0, 2.2, 3.1, 4.0], False),  # one element is less accurate than the CPU's
        ([1.0, 2.0, 3.0, 4.0001], False),  # closer in total, but one element is less accurate than the CPU's
        ([1.0, 1.85, 3.0, 4.0], False),
        ([1.0, float("nan"), 3.0, 4.0], False),
        ([1.0, float("inf"), 3.0, 4.0], False),
    ],
)
def test_float64_reference_decides_for_each_element(found: list[float], is_right: bool) -> None:
    right, message = against_float64(ROUGH, torch.tensor(found), EXACT, None)
    assert right is is_right
    assert message.startswith("compared with float64, right in ")


def test_result_within_float64_tolerance_needs_a_less_accurate_cpu() -> None:
    exact = torch.tensor([1.0, 1.0], dtype=torch.float64)
    rough, found = torch.tensor([0.95, 0.7]), torch.tensor([1.06, 1.0])
    assert against_float64(rough, found, exact, (0.1, 0.0))[0]
    assert not against_float64(rough[:1], found[:1], exact[:1], (0.1, 0.0))[0]  # within tolerance; the CPU is closer


def test_infinity_and_nan_are_accepted_for_unrepresentable_values() -> None:
    exact = torch.tensor([1e300, float("nan"), -1e300], dtype=torch.float64)
    inf, nan = float("inf"), float("nan")
    rough = torch.tensor([3e38, 0.0, -3e38])
    assert against_float64(rough, torch.tensor([inf, nan, -inf]), exact, None)[0]
    assert not against_float64(rough, torch.tensor([inf, nan, inf]), exact, None)[0]


def test_wrong_value_is_rejected_if_the_cpu_returns_nan() -> None:
    exact, rough = torch.tensor([5.0], dtype=torch.float64), torch.tensor([float("nan")])
    assert against_float64(rough, torch.tensor([5.0]), exact, None)[0]
    assert not against_float64(rough, torch.tensor([5.1]), exact, None)[0]


@pytest.mark.parametrize("exact", [None, 2.0, EXACT.float(), EXACT[:3], EXACT.to(torch.complex128)])
def test_only_float64_is_a_reference(exact: object) -> None:
    assert against_float64(ROUGH, EXACT.float(), exact, None) == (False, "")
    assert against_float64(EXACT, EXACT + 1, EXACT + 1, None) == (False, "")  # float64 has no better reference


def test_wider_arguments_keep_layout_and_aliasing() -> None:
    base = torch.randn(4, 6)
    tree = {
        "views": [base[1:, ::2], base.t()],
        "dtype": torch.float32,
        "complex": torch.conj(torch.randn(3, dtype=torch.complex64)),
        "half": torch.randn(3, dtype=torch.bfloat16, requires_grad=True),
        "exact": torch.arange(3),
    }
    wide = Transfer(CPU, wider=True)(tree)
    for before, after in zip(tree["views"], wide["views"], strict=True):
        assert (after.dtype, after.stride(), after.storage_offset()) == (
            torch.float64, before.stride(), before.storage_offset(),
        )  # fmt: skip
        assert torch.equal(after, before.double())
    wide["views"][0].zero_()
    assert wide["views"][1][0, 1] == 0
    assert base.all()
    assert (wide["dtype"], wide["exact"].dtype) == (torch.float64, torch.int64)
    assert wide["complex"].is_conj()
    assert torch.equal(wide["complex"], tree["complex"].to(torch.complex128))
    assert wide["half"].requires_grad
    assert wide["half"].is_leaf


def test_tolerances_come_from_the_operator() -> None:
    from torch.testing._internal.common_device_type import tol, toleranceOverride
    from torch.testing._internal.opinfo.core import DecorateInfo

    op = info(
        "loose",
        torch.sin,
        decorators=(
            DecorateInfo(toleranceOverride({torch.float32: tol(atol=1e-3, rtol=1e-4)}), "TestCommon", "test_out"),
            DecorateInfo(toleranceOverride({torch.float32: tol(atol=9, rtol=9)}), "TestGradients", "test_fn_grad"),
            DecorateInfo(toleranceOverride({torch.float32: tol(atol=9, rtol=9)}), device_type="mps"),
        ),
    )
    assert tolerances(op, torch.float32) == (1e-3, 1e-4)
    assert tolerances(op, torch.float64) is None


# --- selection of entries and settings ------------------------------------------------------------
def test_database_dtype_and_match_are_checked() -> None:
    ops = load("conformance_faulty_ops:FATAL")
    assert entries(ops, Settings(match="good_", dtypes=("float32", "int64"))) == [
        ("good_before", "float32"),
        ("good_after", "float32"),
    ]
    for database in ("conformance_faulty_ops:NOTHING", "no.such.module:ops", "conformance_faulty_ops"):
        with pytest.raises(ValueError, match="module:attribute"):
            load(database)
    with pytest.raises(ValueError, match=r"unknown dtype 'float31'; use one of .*float32"):
        named_dtype("float31")
    with pytest.raises(ValueError, match="malformed --match"):
        entries(ops, Settings(match="("))
    with pytest.raises(ValueError, match=r"no operator of .* matches 'zzz' in float32"):
        entries(ops, Settings(match="zzz"))


@pytest.mark.parametrize("wrong", [{"dtypes": ()}, {"samples": -1}, {"timeout": 0}])
def test_settings_are_checked(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Settings(**wrong)


# --- the report -----------------------------------------------------------------------------------
def sample_report() -> Report:
    passed = EntryResult("add", "float32", compared=3, fallbacks={"aten::add.out": 4})
    native = EntryResult("mul", "float32", compared=3)
    failures = [EntryResult(name, "float32", compared=1) for name in ("sin", "cos")]
    failures[0].add("values", "forward", "#0", "Mismatched elements: 3 / 25 (12.0%)")
    failures[1].add("values", "forward", "#1", "Mismatched elements: 1 / 5 (20.0%)")
    refused = EntryResult("to_sparse", "float32")
    refused.add("refused", "forward", "#0", "sparse is not supported on bp")
    environment = {"torch": "2.13.0", "device": "bp:0", "device_name": None, "date": "2026-01-01T00:00:00+00:00"}
    return Report({"device": "bp"}, environment, 1.0, [passed, native, *failures, refused])


def test_report_counts_and_groups() -> None:
    report = sample_report()
    assert report.totals() == {
        "entries": 5, "passed": 2, "failed": 2, "refused": 1, "empty": 0, "left_out": 0,
        "layout": 0, "nearer": 0, "carried": 0, "cpu_out": 0, "without_fallback": 1, "compared_calls": 8,
    }  # fmt: skip
    assert not report.ok
    assert report.fallbacks() == {"aten::add.out": {"calls": 4, "entries": 1}}
    (group,) = group_findings(report.results)
    assert [result.op for result in group.entries] == ["sin", "cos"]
    assert group.message == "Mismatched elements: 1 / 5 (20.0%)"  # the shorter one
    (soft,) = group_findings(report.results, failing=False)
    assert soft.kind == "refused"


def test_report_survives_json() -> None:
    data = json.loads(json.dumps(sample_report().to_json()))
    assert set(data) == {"schema", "settings", "environment", "seconds", "totals", "fallbacks", "entries"}
    assert set(data["entries"][0]) == {
        "status", "op", "dtype", "seconds", "samples", "compared", "both_raised", "findings", "fallbacks",
        "libraries", "launches", "accesses",
    }  # fmt: skip
    back = [EntryResult.from_json(entry) for entry in data["entries"]]
    assert back == sample_report().results
    assert back[2].findings == [Finding("values", "forward", "#0", "Mismatched elements: 3 / 25 (12.0%)")]


def test_empty_run_is_not_ok() -> None:
    assert not Report({}, {}, 0.0, []).ok
