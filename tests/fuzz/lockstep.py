"""Runs a program line by line on the CPU and on the device, and compares them after each line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from fuzz import comparison
from fuzz.last_call import has_batches_apart, overlaps_itself
from fuzz.programs import Finding, Step, fresh_plans, living, namespace

# PyTorch's CPU kernel reads the weights as if they were contiguous.
WEIGHTS = re.compile(r"(\btorch\.native_group_norm\([^,()]+), (t\d+(?:\[\d+\])?), (t\d+(?:\[\d+\])?),")
GRADIENTS = re.compile(r"backward\(|autograd\.grad\(|\.grad\b")
MISSING_ON_CPU = re.compile(
    r"not implemented for|not supported on CPU|Could not run|does not support .* on CPU|on CPU does not support"
    r"|Unsupported dtype"
)


class Lockstep:
    """A running program on the CPU, which is the reference, and on a device.

    After each line, the CPU's tensors adopt the device's values, so that later lines do not amplify rounding
    differences.
    """

    def __init__(self, device: str, other: str) -> None:
        fresh_plans()
        self.cpu = namespace("cpu", "cpu")
        self.bp = namespace(device, other)
        self.devices = {torch.device(device), torch.device(other)}
        self.steps: list[Step] = []
        self.raised: set[int] = set()

    def run(self, step: Step) -> list[Finding]:
        """Runs a line on both and returns the findings."""
        self.steps.append(step)
        code = compile(step.line, "<program>", "exec")
        self.before = {name: copied(self.cpu[name]) for name in _touched(self.cpu, step.used)}
        expected = run_line(self._safe(step), self.cpu)
        found = run_line(code, self.bp)
        late = None
        for device in self.devices:
            try:
                torch.bp.synchronize(device)
            except Exception as error:
                late = late or error
        found = found or late
        if expected is not None:
            self.raised.add(len(self.steps) - 1)
        differences = list(self._errors(expected, found, step))
        apart = expected is not None or found is not None
        confused = self._resizes_operand(step)
        as_without_out = not apart and (confused or self._as_without_writing(step))
        differences += self._tensors(step, apart)
        if not apart and any(kind.endswith("values") for kind, _ in differences) and as_without_out:
            # The CPU read values that it had already overwritten, or rounded to another dtype than that of out=.
            differences = [(kind, message) for kind, message in differences if not kind.endswith("values")]
        if not apart and any(kind == "values" for kind, _ in differences) and self._as_right_form(step):
            differences = [(kind, message) for kind, message in differences if kind != "values"]
        one_refused = (expected is None) != (found is None)
        if confused and one_refused:
            differences = []
        if one_refused or (expected is not None and (late is not None or MISSING_ON_CPU.search(str(expected)))):
            # If only one side raised an error, tensors differ. The same holds if the CPU lacks a kernel for one tensor
            # of a list and the device rejects a later one. After an asynchronous error, the contents of written tensors
            # are unspecified.
            differences = [(kind, message) for kind, message in differences if not kind.startswith("after an error")]
        if apart and (parts := comparison.without_out(step.line)) is not None:
            # An out= that was resized before the error has unspecified contents.
            written = re.findall(r"\bt\d+\b", parts[1])
            differences = [
                (kind, message)
                for kind, message in differences
                if not (kind.startswith("after an error") and message.partition(":")[0] in written)
            ]
        return [Finding(kind, step.operator, message, list(self.steps)) for kind, message in dict(differences).items()]

    def _safe(self, step: Step) -> Any:
        """Returns the line for the CPU. Replaces triu and tril where PyTorch's CPU kernels write out of bounds."""
        parts = comparison.without_out(step.line)
        if parts is None or step.operator not in ("triu out=", "tril out=") or parts[1] not in self.cpu:
            return compile(step.line, "<program>", "exec")
        computed, written = parts
        line, given = step.line, self.cpu[written]
        try:
            result = eval(computed, self.cpu)
        except Exception:
            result = None
        is_like = isinstance(result, torch.Tensor) and result.shape == given.shape and result.dtype == given.dtype
        if is_like and has_batches_apart(given) and not (result.requires_grad or given.requires_grad):
            # With overlapping elements, any value can be written last: known.py accepts such differences.
            line = "pass" if overlaps_itself(given) else f"{written}.copy_({computed})"
        return compile(line, "<program>", "exec")

    def _as_right_form(self, step: Step) -> bool:
        """Whether the device's result is that of the CPU with contiguous weights, which the CPU computes correctly."""
        found = WEIGHTS.search(step.line)
        if found is None or step.assigned is None:
            return False
        line = WEIGHTS.sub(r"\1, \2.contiguous(), \3.contiguous(),", step.line)
        names = self.cpu | self.before
        if run_line(compile(line, "<program>", "exec"), names) is not None:
            return False
        return not list(comparison.compare(names[step.assigned], self.bp[step.assigned], grad=False))

    def _as_without_writing(self, step: Step) -> bool:
        """Whether the device's `out=` or in-place result is what the CPU computes out of place."""
        parts = comparison.without_writing(step.line)
        if parts is None:
            return False
        computed, written = parts
        try:
            with torch.no_grad():
                return comparison.as_computed(eval(computed, self.cpu | self.before), eval(written, self.bp))
        except Exception:
            return False

    def _resizes_operand(self, step: Step) -> bool:
        """Whether `out=` shares memory with an operand and was resized. The operand's values are then unspecified."""
        parts = comparison.without_out(step.line)
        if parts is None:
            return False
        operands, written = (re.findall(r"\bt\d+\b", part) for part in parts)
        read = {memory for name in operands for memory in _memories(self.cpu.get(name))}
        shapes = comparison.shapes
        return any(
            shapes(self.before[name]) != shapes(names.get(name)) and bool(read & _memories(self.cpu.get(name)))
            for name in written
            for names in (self.cpu, self.bp)
        )

    def _errors(self, expected: Exception | None, found: Exception | None, step: Step) -> Iterator[tuple[str, str]]:
        if found is None and expected is None:
            return
        if found is None:
            if not MISSING_ON_CPU.search(str(expected)):
                yield "no error", _say(expected)
        elif expected is None:
            yield f"error {type(found).__name__}", _say(found)
        elif type(found) is not type(expected) and not MISSING_ON_CPU.search(str(expected)):
            yield (
                f"error {type(found).__name__} for {type(expected).__name__}",
                f"{_say(found)}; the CPU: {_say(expected)}",
            )
        elif comparison.plain(str(found)) != comparison.plain(str(expected)) and not MISSING_ON_CPU.search(
            str(expected)
        ):
            yield "error text", f"{_say(found)}; the CPU: {_say(expected)}"

    def _tensors(self, step: Step, apart: bool) -> list[tuple[str, str]]:
        """Compares all live tensors, and makes the CPU's adopt the device's values."""
        differences: list[tuple[str, str]] = []
        for names, others in ((self.cpu, self.bp), (self.bp, self.cpu)):
            for name in [name for name, _ in living(names) if name not in others]:
                del names[name]
        for name, expected in list(living(self.cpu)):
            found = self.bp[name]
            is_result = name == step.assigned
            as_before = (
                apart and name in self.before and not list(comparison.compare(self.before[name], found, grad=False))
            )
            # An out= that was resized before the error has unspecified contents.
            resized = (
                apart and name in self.before and comparison.shapes(self.before[name]) != comparison.shapes(expected)
            )
            values = not (step.random or resized or (name != step.assigned and self._shows_bits(expected, step)))
            gradients = bool(GRADIENTS.search(step.line))
            compared = comparison.compare(expected, found, values=values, gradients=gradients)
            for kind, message in () if as_before else compared:
                where = "" if is_result else "argument " if name in step.used else "other "
                after = "after an error, " if apart else ""
                differences.append((f"{after}{where}{kind}", f"{name}: {message}"))
            if not comparison.adopt(expected, found):
                del self.cpu[name], self.bp[name]
        differences += self._aliases()
        return differences

    def _shows_bits(self, value: Any, step: Step) -> bool:
        """Whether the value has integers in the memory of floats that the step used, whose last digits can differ."""
        used = [self.cpu.get(name) for name in {*step.used, step.assigned} if name is not None]
        tensors = [leaf for leaf in tree_iter(used) if _has_memory(leaf)]
        floats = {_memory(one) for one in tensors if one.dtype in comparison.TOLERANCES}
        integers = [leaf for leaf in tree_iter(value) if _has_memory(leaf) and leaf.dtype not in comparison.TOLERANCES]
        return any(_memory(one) in floats for one in integers)

    def _aliases(self) -> Iterator[tuple[str, str]]:
        shared = [_sharing(names) for names in (self.cpu, self.bp)]
        for first, second in shared[0].symmetric_difference(shared[1]):
            on_cpu = (first, second) in shared[0]
            yield "aliasing", f"{first} and {second} share memory on {'the CPU' if on_cpu else 'the device'} only"
            for names in (self.cpu, self.bp):
                names.pop(second, None)


def _sharing(names: dict[str, Any]) -> set[tuple[str, str]]:
    """Returns pairs of names whose tensors share memory: each name with the first one of that memory."""
    first: dict[int, str] = {}
    pairs = set()
    for name, value in living(names):
        for leaf in tree_iter(value):
            if _has_memory(leaf) and leaf.numel():
                owner = first.setdefault(_memory(leaf), name)
                if owner != name:
                    pairs.add((owner, name))
    return pairs


def _touched(names: dict[str, Any], used: set[str]) -> list[str]:
    """Returns the used names, and the names whose tensors share memory with theirs."""
    memory = {name: _memories(value) for name, value in living(names)}
    written = set().union(*(memory.get(name, set()) for name in used))
    return [name for name, found in memory.items() if name in used or found & written]


def _memories(value: Any) -> set[int]:
    return {_memory(leaf) for leaf in tree_iter(value) if _has_memory(leaf)}


def _has_memory(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def copied(value: Any) -> Any:
    """Returns a value with copies of its tensors."""

    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)


def run_line(code: Any, names: dict[str, Any]) -> Exception | None:
    try:
        exec(code, names)
    except Exception as error:
        error.__traceback__ = None  # keeps tensors alive
        return error
    return None


def _say(error: Exception | None) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"
