"""Checks one operator in one dtype: runs every sample input in every variant on the CPU and on the device."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch

from torch_backplane.conformance import accepted, comparison, steps, ties
from torch_backplane.conformance.calls import SampleCall
from torch_backplane.conformance.report import EntryResult
from torch_backplane.conformance.settings import Settings
from torch_backplane.conformance.transfer import WIDER, Transfer, leaves, noncontiguous, tensors

SEED = 20260
OTHER_SEEDS = range(4711, 4727)
_CPU = torch.device("cpu")

# Operators with tensor arguments that must be on the CPU for every device (tensor_split: the split positions).
_ARGUMENTS_STAY_ON_CPU = {"tensor_split"}
# Operators with uninitialized results. Releases before 2.13 do not mark them in their OpInfo.
_UNINITIALIZED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_",
}  # fmt: skip


@dataclass
class Outcome:
    """The outcome of one call: its arguments after the call, and its result or error."""

    arguments: Any
    result: Any = None
    error: Exception | None = None


# The C++ names of these dtypes, which appear in errors.
_SCALAR_TYPES = {
    dtype: torch.empty(0, dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")
    for dtype in (torch.float64, torch.complex128)
}


@functools.cache
def _missing(device: torch.device) -> tuple[torch.dtype, ...]:
    """The widest dtypes that the device does not support. Such devices are common."""
    if device.type != "bp":
        return ()
    there = torch.bp.get_device_properties(device).dtypes  # type: ignore[attr-defined]
    return tuple(dtype for dtype in _SCALAR_TYPES if dtype not in there)


def is_refusal(error: Exception, device: torch.device, dtype: torch.dtype) -> bool:
    """True for an error that names the device and states clearly what it does not support.

    A device may refuse sparse layouts (NotImplementedError or RuntimeError) and dtypes that the hardware lacks
    (TypeError): the entry's dtype, or another one that the operator needs.
    """
    text = str(error)
    if not re.search(rf"\b{re.escape(device.type)}\b", text):
        return False
    if isinstance(error, TypeError):
        return str(dtype).removeprefix("torch.") in text or any(
            re.search(rf"does not support {_SCALAR_TYPES[one]}\b", text) for one in _missing(device)
        )
    return isinstance(error, RuntimeError) and "sparse" in text.lower()


def _is_limit_of_cpu(error: Exception | None, call: SampleCall) -> bool:
    """True if the CPU may have raised for a valid call: no kernel for the dtype, or one for contiguous tensors only."""
    return isinstance(error, NotImplementedError) or "not implemented for" in str(error) or call.layout is not None


def _line(error: Exception | None) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:300]}"


class EntryCheck:
    """Checks one operator in one dtype on one device.

    ``announce`` is called with a description of each call before it runs, to identify the call if it crashes.
    """

    def __init__(
        self, op: Any, dtype: torch.dtype, settings: Settings, device: torch.device, announce: Callable[[str], None]
    ) -> None:
        self.op = op
        self.dtype = dtype
        self.settings = settings
        self.device = device
        self.announce = announce
        self.allowed = comparison.tolerances(op, dtype)
        self.uninitialized = getattr(op, "has_nondeterministic_output", False) or op.full_name in _UNINITIALIZED
        self.result = EntryResult(op.full_name, str(dtype).removeprefix("torch."))

    def run(self, errors: bool) -> EntryResult:
        """Check all variants, gradients if the settings request them, and with ``errors`` the error inputs."""
        start = time.perf_counter()
        try:
            with torch.no_grad():
                for call in self._forward_calls():
                    self._check_forward(call)
                if errors:
                    for call in self._error_calls():
                        self._check_call(call)
            if self._has_gradients():
                for call in self._samples("backward", requires_grad=True):
                    self._check_gradients(call)
                    for strided in call.strided():
                        self._check_gradients(strided)
        except Exception as error:  # the check itself failed, which must not count as a pass
            self.result.add("error", "check", "", f"could not be checked: {_line(error)}")
        self.result.seconds = round(time.perf_counter() - start, 4)
        return self.result

    # --- calls -------------------------------------------------------------------------------------------------------
    def _samples(self, variant: str, requires_grad: bool) -> Iterator[SampleCall]:
        random.seed(SEED)
        torch.default_generator.manual_seed(SEED)
        conjugated = self.dtype.is_complex and self.op.test_conjugated_samples
        samples = self.op.sample_inputs("cpu", self.dtype, requires_grad, include_conjugated_inputs=conjugated)
        # Generate all samples first: random numbers drawn by the operator must not change later samples.
        for index, sample in enumerate(list(islice(samples, self.settings.samples or None))):
            self.result.samples += 1
            yield SampleCall(
                self.op.op,
                (sample.input, tuple(sample.args), dict(sample.kwargs)),
                variant,
                index,
                sample.output_process_fn_grad,
                stays_on_cpu=self.op.full_name in _ARGUMENTS_STAY_ON_CPU,
                has_input=not sample.broadcasts_input,
            )

    def _forward_calls(self) -> Iterator[SampleCall]:
        return self._samples("forward", requires_grad=False)

    def _error_calls(self) -> Iterator[SampleCall]:
        if self.op.error_inputs_func is None:
            return
        torch.default_generator.manual_seed(SEED)
        for index, wrong in enumerate(list(islice(self.op.error_inputs("cpu"), self.settings.samples or None))):
            sample = wrong.sample_input
            self.result.samples += 1
            yield SampleCall(self.op.op, (sample.input, tuple(sample.args), dict(sample.kwargs)), "error input", index)

    def _has_gradients(self) -> bool:
        return (
            self.settings.grad
            and self.op.supports_autograd
            and (self.dtype.is_floating_point or self.dtype.is_complex)
            and self.dtype in self.op.supported_backward_dtypes("cpu")
        )

    # --- checking ----------------------------------------------------------------------------------------------------
    def _check_forward(self, call: SampleCall) -> None:
        result = self._check_call(call)
        for strided in call.strided():
            self._check_call(strided)
        in_place = self.op.get_inplace()
        if in_place is not None and call.has_input:
            self._check_call(call.as_variant("in-place", in_place))
        if self.op.supports_out and result is not None:
            for with_out in call.with_out(result):
                self._check_call(with_out, functional=result)

    def _check_call(self, call: SampleCall, functional: Any = None) -> Any:
        """Run and compare one call. Returns the CPU's result, or None if either side raised.

        Args:
            functional: for a call with ``out=``, the CPU's result without it.
        """
        torch.default_generator.manual_seed(SEED)
        before = torch.default_generator.get_state()
        expected = self._invoke(call, _CPU)
        is_random = not torch.equal(before, torch.default_generator.get_state())
        actual = self._invoke(call, self.device, SEED if is_random else None)
        if not self._same_errors(call, expected, actual):
            return None
        values = not (is_random or self.uninitialized)
        if values and functional is not None:
            self._correct_out(call, functional, expected.result, actual.result)
        owned = call.layout is None and call.variant not in ("forward", "error input", "out= resized")
        self._compare(call, expected, actual, values=values, owned=owned)
        if is_random and not self.uninitialized:
            self._check_random(call, expected, actual)
        return expected.result

    def _correct_out(self, call: SampleCall, functional: Any, result: Any, actual: Any) -> None:
        """Overwrite a wrong ``out=`` result of the CPU with its result without ``out``, and add a finding.

        Some of PyTorch's CPU kernels write wrong values to a non-contiguous ``out``. A device that runs the same kernel
        writes the same values, and nothing is overwritten. Other devices are compared with the functional result.
        """

        def differ(expected: Any, found: Any, device: torch.device) -> bool:
            found_kinds = comparison.compare(expected, found, device, allowed=self.allowed)
            return any(kind == "values" for kind, _ in found_kinds)

        if differ(result, actual, self.device) and differ(functional, result, _CPU):
            for out, right in zip(tensors(result), tensors(functional), strict=True):
                out.copy_(right)
            message = "the CPU's result with out= differs from that without; the device was compared with the latter"
            self.result.add("cpu out=", call.variant, call.describe(), message)

    def _exactly(self, call: SampleCall, cotangents: list[torch.Tensor] | None = None) -> Callable[[], Outcome]:
        """Return a function that makes the same call on the CPU in float64 or complex128, at most once.

        It decides which side is closer where values differ. Its outcome has no tensors if the CPU cannot run the call,
        or if the dtype has no wider one.
        """

        @cache
        def invoke() -> Outcome:
            if self.dtype not in WIDER:
                return Outcome(None)
            torch.default_generator.manual_seed(SEED)
            outcome = self._invoke(call.without_out(), _CPU, wider=True)
            if call.has_out and outcome.error is None:
                outcome.arguments[2]["out"] = outcome.result
            if cotangents is not None and outcome.error is None:
                self._differentiate(call, outcome, Transfer(_CPU, wider=True)(cotangents))
            return Outcome(None) if outcome.error else outcome

        return invoke

    def _invoke(
        self,
        call: SampleCall,
        device: torch.device,
        seed: int | None = None,
        *,
        wider: bool = False,
        watching: AbstractContextManager[Any] | None = None,
    ) -> Outcome:
        where = " (on the CPU in float64)" if wider else " (on the CPU)" if device == _CPU else ""
        self.announce(f"sample {call.sample}, {call.variant}{where}")
        outcome = Outcome(None)
        try:
            outcome.arguments = first, args, kwargs = call.copied_to(device, wider=wider)
            if seed is not None:
                torch.manual_seed(seed)
            with watching or nullcontext():
                outcome.result = call.function(first, *args, **kwargs)
            _finish(device)
        except Exception as error:
            outcome.error = error
        return outcome

    def _recheck_in_float64(
        self,
        call: SampleCall,
        exactly: Callable[[], Outcome],
        *,
        values: bool,
        cotangents: list[torch.Tensor] | None = None,
    ) -> Callable[[str, str], comparison.Difference]:
        """Return a function that changes the kind of a difference in values to "carried" if each step of the call is
        right (steps.py). The steps are compared on the first such difference.
        """

        def invoke(device: torch.device, watching: AbstractContextManager[Any]) -> Any:
            torch.default_generator.manual_seed(SEED)
            outcome = self._invoke(call, device, watching=watching)
            if cotangents is not None and outcome.error is None:
                there = Transfer(device)(cotangents)
                with watching:
                    self._differentiate(call, outcome, there)
            if outcome.error is not None:
                raise outcome.error
            return outcome.result, outcome.arguments

        def exact() -> Any:
            return exactly().result, exactly().arguments

        @cache
        def carried() -> str:
            return steps.carried(invoke, self.device, exact) if values and self.dtype in WIDER else ""

        def recheck_in_float64(kind: str, message: str) -> comparison.Difference:
            return ("carried", f"{message}; {carried()}") if kind == "values" and carried() else (kind, message)

        return recheck_in_float64

    def _same_errors(self, call: SampleCall, expected: Outcome, actual: Outcome) -> bool:
        """True if both sides returned a result. Adds a finding if only one raised, or for an internal error."""
        if expected.error is None and actual.error is None:
            self.result.compared += 1
            return True
        if actual.error is None:
            if not _is_limit_of_cpu(expected.error, call):
                self.result.add("no error", call.variant, call.describe(), f"the CPU raised {_line(expected.error)}")
        elif expected.error is not None and not comparison.is_broken(str(actual.error), str(expected.error)):
            self.result.both_raised += 1
        else:
            kind = "refused" if is_refusal(actual.error, self.device, self.dtype) else "error"
            self.result.add(kind, call.variant, call.describe(), _line(actual.error))
        return False

    def _compare(self, call: SampleCall, expected: Outcome, actual: Outcome, *, values: bool, owned: bool) -> None:
        def note(kind: str, message: str) -> None:
            self.result.add(kind, call.variant, call.describe(), message)

        exactly = self._exactly(call)
        recheck_in_float64 = self._recheck_in_float64(call, exactly, values=values)
        try:
            plain = _is_identity(call.output_process)
            differences = list(
                comparison.compare(
                    expected.result, actual.result, self._place_of_results(actual),
                    values=values and plain, owned=owned, allowed=self.allowed, exact=lambda: exactly().result,
                )
            )  # fmt: skip
            if values and not plain and not differences:
                # The result is unique only up to a sign or an order: compare what the sample defines as unique.
                on_host = Transfer(_CPU)(actual.result)
                differences = list(
                    comparison.compare(
                        call.output_process(expected.result),
                        call.output_process(on_host),
                        _CPU,
                        allowed=self.allowed,
                        exact=lambda: call.output_process(exactly().result),
                    )
                )
            places = self._other_places(call, expected, actual, differences)
            for kind, message in differences:
                if kind == "values" and places is not None:
                    kind, message = "accepted", ties.REASON
                known = accepted.reason(accepted.DATABASE, self.op.name, self.result.dtype, kind, call.variant, message)
                note(*(("accepted", known) if known else recheck_in_float64(kind, message)))
            # Where results are not unique, neither is what is written to `out`, which is a result.
            in_arguments = exactly if values and plain else None
            self._compare_arguments(call, expected, actual, in_arguments, recheck_in_float64, places)
        except Exception as error:
            note("error", f"reading the result: {_line(error)}")

    def _other_places(
        self, call: SampleCall, expected: Outcome, actual: Outcome, differences: list[comparison.Difference]
    ) -> Any:
        """The device's indices if they differ from the CPU's only in the choice among equal elements, else None."""
        wrong = [message for kind, message in differences if kind == "values"]
        first, args, kwargs = call.arguments
        if not wrong or not ties.has_ties(self.op.name, args, kwargs):
            return None
        if isinstance(actual.result, tuple) and not all(message.startswith("result[1]: ") for message in wrong):
            return None
        on_host = Transfer(_CPU)(actual.result)
        found = ties.values_and_places(self.op.name, first, args, kwargs, expected.result, on_host)
        if found is None or not ties.are_places(self.op.name, first, args, kwargs, found):
            return None
        return actual.result[1] if isinstance(actual.result, tuple) else actual.result

    def _place_of_results(self, outcome: Outcome) -> torch.device:
        """The device under test, or the CPU if the arguments name no device: ``torch.arange(3)`` is on the CPU."""
        places = (torch.device, torch.Tensor)
        named = any(isinstance(leaf, places) or leaf == str(self.device) for _, leaf in leaves(outcome.arguments))
        return self.device if named else _CPU

    def _compare_arguments(
        self,
        call: SampleCall,
        expected: Outcome,
        actual: Outcome,
        exactly: Callable[[], Outcome] | None,
        recheck_in_float64: Callable[[str, str], comparison.Difference],
        places: torch.Tensor | None,
    ) -> None:
        """Check that both calls changed their arguments alike, and that the results alias them alike.

        Values are compared if ``exactly`` is given, except those of ``places``, which are known to be right.
        """
        on_cpu, on_device = (
            comparison.aliasing(expected.arguments, expected.result),
            comparison.aliasing(actual.arguments, actual.result),
        )
        if on_cpu != on_device:
            pairs = zip(on_cpu, on_device, strict=False)
            wanted, found = next(((a, b) for a, b in pairs if a != b), (on_cpu, on_device))
            self.result.add("aliasing", call.variant, call.describe(), f"{found}, expected: {wanted}")
        for (path, want), (_, got) in zip(leaves(expected.arguments), leaves(actual.arguments), strict=True):
            if not isinstance(want, torch.Tensor) or want.layout != torch.strided:
                continue
            where = f"argument{path}"
            device = _CPU if got.device == _CPU and call.stays_on_cpu else self.device
            different = list(comparison.metadata(want, got, device, owned=True))
            if exactly is not None and not different and got is not places:
                on_host = Transfer(_CPU)(got.detach())
                exact = partial(_leaf, exactly, path)
                different += comparison.compare_values(want.detach(), on_host, self.allowed, exact)
            for kind, message in different:
                kind, message = recheck_in_float64(kind, message)
                if kind not in ("nearer", "carried", "layout"):
                    kind = "layout" if kind == "strides" and "resized" in call.variant else "mutation"
                self.result.add(kind, call.variant, call.describe(), f"{where} after the call: {message}")

    def _check_random(self, call: SampleCall, expected: Outcome, actual: Outcome) -> None:
        """Check that the device's result repeats under one seed, and changes with the seed if the CPU's does."""
        again = self._invoke(call, self.device, SEED)
        if again.error is None and not _same_bits(actual.result, again.result):
            self.result.add("random", call.variant, call.describe(), "a different result under the same seed")
            return
        cpu_changes = 0
        for seed in OTHER_SEEDS:  # several, because two draws of randint(2) can be equal
            other = self._invoke(call, self.device, seed)
            if other.error is not None or not _same_bits(actual.result, other.result):
                return
            torch.default_generator.manual_seed(seed)
            cpu_other = self._invoke(call, _CPU)
            cpu_changes += not _same_bits(expected.result, cpu_other.result)
        if 2 * cpu_changes >= len(OTHER_SEEDS):  # else the result rarely changes, and equal ones can be chance
            self.result.add("random", call.variant, call.describe(), "the same result under every seed")

    # --- gradients ---------------------------------------------------------------------------------------------------
    def _check_gradients(self, call: SampleCall) -> None:
        torch.default_generator.manual_seed(SEED)
        before = torch.default_generator.get_state()
        expected = self._invoke(call, _CPU)
        is_random = not torch.equal(before, torch.default_generator.get_state())
        cotangents: list[torch.Tensor] = []
        if expected.error is None:
            cotangents = self._differentiate(call, expected, None)
        actual = self._invoke(call, self.device, SEED if is_random else None)
        if expected.error is None and actual.error is None:
            self._differentiate(call, actual, Transfer(self.device)(cotangents))
        if self._same_errors(call, expected, actual):
            exactly = self._exactly(call, cotangents)
            values = not (is_random or self.uninitialized)
            recheck_in_float64 = self._recheck_in_float64(call, exactly, values=values, cotangents=cotangents)
            self._compare_gradients(call, expected, actual, exactly, recheck_in_float64, values=values)

    def _differentiate(
        self, call: SampleCall, outcome: Outcome, cotangents: list[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Replace the outcome's result by the gradients of its arguments (None for unused ones).

        Returns:
            The given cotangents, or new random ones on the CPU.
        """
        try:
            outputs = [out for out in tensors(call.output_process(outcome.result)) if out.requires_grad]
            inputs = [leaf for leaf in tensors(outcome.arguments) if leaf.requires_grad]
            if cotangents is None:
                torch.default_generator.manual_seed(SEED)
                cotangents = [torch.randn(out.shape, dtype=out.dtype) for out in outputs]
                cotangents = noncontiguous(cotangents, call.layout) if call.layout else cotangents
            if len(outputs) != len(cotangents):
                raise AssertionError(f"{len(outputs)} differentiable results, expected {len(cotangents)}")
            outcome.result = (
                list(torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)) if outputs and inputs else []
            )
            _finish(outputs[0].device if outputs else _CPU)
        except Exception as error:
            outcome.error = error
        return cotangents or []

    def _compare_gradients(
        self,
        call: SampleCall,
        expected: Outcome,
        actual: Outcome,
        exactly: Callable[[], Outcome],
        recheck_in_float64: Callable[[str, str], comparison.Difference],
        *,
        values: bool,
    ) -> None:
        try:
            for kind, message in comparison.compare(
                expected.result, actual.result, self.device, values=values, allowed=self.allowed,
                exact=lambda: exactly().result,
            ):  # fmt: skip
                if kind == "values" and self._is_of_other_places(call, expected.result, actual.result):
                    kind, message = "accepted", ties.REASON
                kind, message = recheck_in_float64(kind, message)
                self.result.add(kind, call.variant, call.describe(), message.replace("result", "gradient", 1))
        except Exception as error:
            self.result.add("error", call.variant, call.describe(), f"reading the gradients: {_line(error)}")

    def _is_of_other_places(self, call: SampleCall, expected: list[Any], actual: list[Any]) -> bool:
        """Whether the gradients differ only because the operator chose other elements among equal ones."""
        first, args, kwargs = call.arguments
        if not ties.has_ties(self.op.name, args, kwargs) or len(expected) != 1:
            return False
        return ties.same_gradients(self.op.name, first, args, kwargs, expected[0], Transfer(_CPU)(actual[0]))


def _leaf(outcome: Callable[[], Outcome], path: str) -> Any:
    """The argument at this path after a call, or None if there is none."""
    return next((leaf for found, leaf in leaves(outcome().arguments) if found == path), None)


def _finish(device: torch.device) -> None:
    """Synchronize with the device, which can report errors late, such as an index out of range."""
    if device != _CPU:
        torch.accelerator.synchronize(device)


def _is_identity(function: Callable[[Any], Any]) -> bool:
    """True if the function returns its argument, a tuple, too. OpInfo's default is such a lambda, without a name."""
    probes = (object(), (object(), object()))
    try:
        return all(function(probe) is probe for probe in probes)
    except Exception:
        return False


def _same_bits(first: Any, second: Any) -> bool:
    one, two = tensors(Transfer(_CPU)(first)), tensors(Transfer(_CPU)(second))
    return len(one) == len(two) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
        for a, b in zip(one, two, strict=True)
    )


def check_entry(
    op: Any,
    dtype: torch.dtype,
    settings: Settings,
    device: torch.device,
    *,
    errors: bool = False,
    announce: Callable[[str], None] = lambda text: None,
) -> EntryResult:
    """Check operator ``op`` (an ``OpInfo``) in one dtype on ``device`` against the CPU.

    Args:
        errors: also check the operator's error inputs, which do not depend on the dtype.
        announce: called with a description of each call before it runs.
    """
    return EntryCheck(op, dtype, settings, device, announce).run(errors)
