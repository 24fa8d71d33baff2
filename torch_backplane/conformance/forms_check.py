"""Checks variants ("forms", see forms.py) of the ATen calls that an operator of the database makes.

The device must reject the forms that the CPU rejects, and compute the same values for the others. Some forms make
PyTorch's CPU kernels access memory out of bounds and crash, so the CPU's calls run in child processes.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backplane.conformance import accepted, child_processes, comparison
from torch_backplane.conformance.calls import _brief
from torch_backplane.conformance.check import SEED, _finish, _line, is_refusal
from torch_backplane.conformance.forms import Arguments, Form, forms
from torch_backplane.conformance.report import EntryResult
from torch_backplane.conformance.settings import Settings
from torch_backplane.conformance.transfer import Transfer, tensors

_CPU = torch.device("cpu")
MAX_ELEMENTS = 2_000  # of a tensor; calls with larger ones are skipped
SAMPLES = 6  # per operator, unless the settings specify another number

# Operators with uninitialized results, reads of single numbers, and operators that change a tensor's storage.
_UNINTERESTING = (
    "empty", "new_empty", "resize", "set_", "_local_scalar_dense", "_to_copy", "record_stream", "is_same_size",
)  # fmt: skip

OVERLAP = "some elements of the input tensor and the written-to tensor refer to a single memory location"
WRITTEN_TWICE = "more than one element of the written-to tensor refers to a single memory location"

BETWEEN = ", between or around the elements"

# The tensors of the arguments after a call, its results, and its error.
Reference = tuple[list[torch.Tensor], Any, Exception | None]

# Keys of the calls already recorded in this process. Many operators of the database make the same calls.
_seen: set[Any] = set()


class Recording(TorchDispatchMode):
    """Records the ATen calls that differ in kind from all earlier ones, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, Arguments]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        base = func._schema.name.partition("::")[2]
        if isinstance(func, OpOverload) and func.namespace == "aten" and not base.startswith(_UNINTERESTING):
            arguments = by_name(func, args, kwargs)
            key = (func, *(_kind(value) for value in arguments.values()))
            if key not in _seen and all(one.numel() <= MAX_ELEMENTS for one in tensors(arguments)):
                _seen.add(key)
                self.calls.append((func, Transfer(_CPU)(arguments)))
        return func(*args, **kwargs)


def by_name(overload: OpOverload, args: Any, kwargs: Any) -> Arguments:
    """Return all arguments by schema name, with defaults for those that were not given."""
    found = {}
    for position, one in enumerate(overload._schema.arguments):
        default = one.default_value if one.has_default_value() else None
        found[one.name] = args[position] if position < len(args) else kwargs.get(one.name, default)
    return found


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.numel() > 1
    if isinstance(value, (list, tuple)):
        return len(value) if value and isinstance(value[0], int) else tuple(_kind(item) for item in value[:2])
    return type(value)


class FormsCheck:
    """Checks the forms of the ATen calls that one operator's samples make in one dtype."""

    def __init__(
        self, op: Any, dtype: torch.dtype, settings: Settings, device: torch.device, announce: Callable[[str], None]
    ) -> None:
        self.op = op
        self.dtype = dtype
        self.settings = settings
        self.device = device
        self.announce = announce
        self.result = EntryResult(op.full_name, str(dtype).removeprefix("torch."))

    def run(self) -> EntryResult:
        start = time.perf_counter()
        try:
            for overload, arguments in self._calls():
                self._check(overload, arguments)
        except Exception as error:  # the check itself failed, which must not count as a pass
            kind = "refused" if is_refusal(error, self.device, self.dtype) else "error"  # refused: a sparse sample
            self.result.add(kind, "check", "", f"could not be checked: {_line(error)}")
        self.result.seconds = round(time.perf_counter() - start, 4)
        return self.result

    def _calls(self) -> Iterator[tuple[OpOverload, Arguments]]:
        random.seed(SEED)
        torch.default_generator.manual_seed(SEED)
        grad = self.op.supports_autograd and self.dtype in self.op.supported_backward_dtypes("cpu")
        samples = self.op.sample_inputs("cpu", self.dtype, requires_grad=grad)
        for sample in list(islice(samples, self.settings.samples or SAMPLES)):
            self.result.samples += 1
            recording = Recording()
            try:
                with recording:
                    found = self.op.op(sample.input, *sample.args, **sample.kwargs)
                    roots = [one for one in tensors(found) if one.requires_grad]
                    if grad and roots:
                        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
            except Exception:
                continue  # check.py reports this
            yield from recording.calls

    def _check(self, overload: OpOverload, arguments: Arguments) -> None:
        torch.manual_seed(SEED)  # as _invoke does
        random_before = torch.default_generator.get_state()
        results, error = self._invoke(Form("", overload, arguments), arguments, _CPU)
        is_random = not torch.equal(random_before, torch.default_generator.get_state())
        if error is not None:
            return
        made = [one for one in results if isinstance(one, torch.Tensor)] if isinstance(results, tuple) else [results]
        if not all(isinstance(one, torch.Tensor) and one.layout == torch.strided for one in made):
            made = []
        made_of = list(forms(overload, arguments, made))
        for form, reference in zip(made_of, self._on_cpu(made_of), strict=True):
            if reference is None:
                words = "the CPU's call crashed its process, or its results cannot be read"
                self.result.add("cpu crash", form.name, _described(form), words)
            else:
                self._compare(form, *reference, values=not is_random)

    def _on_cpu(self, made_of: Sequence[Form]) -> Iterator[Reference | None]:
        """Yield the CPU's outcome of each form, or None if the call crashes the process."""

        def answer(form: Form) -> Reference:
            given = Transfer(_CPU)(form.arguments)
            found, error = self._invoke(form, given, _CPU)
            return tensors(given), found, _sendable(error)

        return child_processes.in_children(made_of, answer)

    def _invoke(self, form: Form, arguments: Arguments, device: torch.device) -> tuple[Any, Exception | None]:
        try:
            torch.manual_seed(SEED)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = form(arguments)
                _finish(device)
            return found, None
        except Exception as error:
            with contextlib.suppress(Exception):  # a second error of this call must not be reported by the next one
                _finish(device)
            return None, error

    def _compare(
        self, form: Form, on_cpu: list[torch.Tensor], expected: Any, refusal: Exception | None, values: bool
    ) -> None:
        described = _described(form)

        def note(kind: str, message: str) -> None:
            name = form.overload.name().removeprefix("aten::")
            if reason := accepted.reason(accepted.FORMS, name, self.result.dtype, kind, form.name, message):
                kind, message = "accepted", reason
            self.result.add(kind, form.name, described, message)

        on_device = Transfer(self.device)(form.arguments)
        self.announce(f"{form.name}: {described}")
        actual, error = self._invoke(form, on_device, self.device)
        if error is not None and comparison.is_broken(str(error), str(refusal)):
            note("error", _line(error))
        elif refusal is not None and error is not None:
            self.result.both_raised += 1
        elif refusal is not None:
            if not isinstance(refusal, NotImplementedError) and "not implemented for" not in str(refusal):
                read_first = OVERLAP in str(refusal) and values and self._is_right(self._functional(form), actual)
                note("read first" if read_first else "no error", f"the CPU raised {_line(refusal)}")
        elif error is not None:
            overlaps = WRITTEN_TWICE in str(error) or OVERLAP in str(error)
            kind = "stricter" if overlaps or (form.wrong and is_internal(form.overload)) else "error"
            note("refused" if is_refusal(error, self.device, self.dtype) else kind, _line(error))
        else:
            self.result.compared += 1
            allowed = _allowed(form)
            exact = cache(lambda: self._exactly(form))
            compared = comparison.compare(expected, actual, self.device, values=values, allowed=allowed, exact=exact)
            differences = list(compared) or list(self._memory(on_cpu, on_device, values, allowed))
            right = cache(lambda: self._functional(form))
            for kind, message in differences:
                if kind in ("values", "mutation") and BETWEEN not in message and self._is_right(right(), actual):
                    kind = "cpu out="
                note(kind, message)

    def _exactly(self, form: Form) -> Any:
        """The CPU's results for the same inputs in float64, or None if it raises."""
        found, error = self._invoke(form, Transfer(_CPU, wider=True)(form.arguments), _CPU)
        return found if error is None else None

    def _memory(
        self, on_cpu: list[torch.Tensor], on_device: Arguments, values: bool, allowed: tuple[float, float] | None
    ) -> Iterator[comparison.Difference]:
        """Compare the arguments after the call, including the bytes of their storages outside of their elements."""
        for wanted, found in zip(on_cpu, tensors(on_device), strict=True):
            if wanted.layout != torch.strided:
                continue
            yield from (("mutation", text) for _, text in comparison.metadata(wanted, found, self.device, owned=True))
            host = Transfer(_CPU)(found.detach())
            pairs = [("", wanted.detach(), host)]
            if wanted.untyped_storage().nbytes() == host.untyped_storage().nbytes():
                pairs.append((BETWEEN, _storage(wanted), _storage(host)))
            for where, one, other in pairs:
                message = comparison.same_values(one, other, allowed) if values and one.shape == other.shape else None
                if message:
                    yield "mutation", f"memory after the call{where}: {message}"
                    break

    def _functional(self, form: Form) -> Any:
        """The CPU's results from the functional overload, or None if there is none.

        Some of its kernels write wrong values to non-contiguous tensors, or read elements that they have overwritten.
        """
        written = {one.name for one in form.overload._schema.arguments if one.is_out}
        kept = {name: value for name, value in form.arguments.items() if name not in written}
        name = form.overload._schema.name.partition("::")[2]
        in_place = not written and name.endswith("_")
        packet = getattr(torch.ops.aten, name.removesuffix("_") if in_place else name, None)
        if packet is None:
            return None
        for name in packet.overloads():
            other = getattr(packet, name)
            if (written or in_place) and {one.name for one in other._schema.arguments} == set(kept):
                found, error = self._invoke(Form("", other, kept), Transfer(_CPU)(kept), _CPU)
                return found if error is None else None
        return None

    def _is_right(self, right: Any, actual: Any) -> bool:
        if right is None:
            return False
        found = [one.cpu() for one in tensors((actual,))]
        wanted = tensors((right,))
        return len(found) == len(wanted) and all(
            one.shape == other.shape and comparison.same_values(one.to(other.dtype), other, None) is None
            for one, other in zip(wanted, found, strict=True)
        )


def _described(form: Form) -> str:
    given = (f"{name}={_brief(value)}" for name, value in form.arguments.items() if value is not None)
    return f"{form.overload}({', '.join(given)})"


def _allowed(form: Form) -> tuple[float, float] | None:
    """(atol, rtol) of the inputs' dtypes, for results that are written to a tensor; None for the default."""
    written = {one.name for one in form.overload._schema.arguments if one.is_out}
    read = tensors([value for name, value in form.arguments.items() if name not in written])
    found = [
        torch.testing._comparison.default_tolerances(one.dtype)  # type: ignore[attr-defined]
        for one in read
        if one.is_floating_point() or one.is_complex()
    ]
    return (max(atol for _, atol in found), max(rtol for rtol, _ in found)) if written and found else None


def _sendable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # cannot be pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def is_internal(overload: OpOverload) -> bool:
    """Whether users reach the operator only through other operators, which pass valid arguments."""
    name = overload._schema.name.partition("::")[2]
    return name.startswith("_") or "backward" in name or name.startswith("native_")


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    return whole.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def check_forms(
    op: Any, dtype: torch.dtype, settings: Settings, device: torch.device, announce: Callable[[str], None]
) -> EntryResult:
    """Check the forms of the ATen calls that operator `op` (an `OpInfo`) makes in one dtype.

    Calls of the same kind as an earlier one in this process are skipped.

    Args:
        announce: called with a description of each call before it runs.
    """
    return FormsCheck(op, dtype, settings, device, announce).run()
