"""Checks the forms of the ATen calls that an operator of the database makes: refused alike, or the same values."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from torch_backplane.conformance import judge
from torch_backplane.conformance.calls import _brief
from torch_backplane.conformance.check import SEED, _finish, _line, is_refusal
from torch_backplane.conformance.forms import Arguments, Form, forms
from torch_backplane.conformance.report import EntryResult
from torch_backplane.conformance.settings import Settings
from torch_backplane.conformance.transfer import Transfer, tensors

_CPU = torch.device("cpu")
MOST_ELEMENTS = 2_000  # of a tensor in a call that is taken
SAMPLES = 6  # of an operator that are looked at for calls, unless the settings say another number

# Results that are memory as it was found, reads of single numbers, and what makes one storage of another.
_UNINTERESTING = (
    "empty", "new_empty", "resize", "set_", "_local_scalar_dense", "_to_copy", "record_stream", "is_same_size",
)  # fmt: skip

OVERLAP = "some elements of the input tensor and the written-to tensor refer to a single memory location"
WRITTEN_TWICE = "more than one element of the written-to tensor refers to a single memory location"

BETWEEN = ", between or around the elements"

# What has been checked in this process: many operators of the database make the same calls.
_seen: set[Any] = set()


class Recording(TorchDispatchMode):
    """Notes the calls of ATen that are not like an earlier one, with copies of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[OpOverload, Arguments]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        base = func._schema.name.partition("::")[2]
        if isinstance(func, OpOverload) and func.namespace == "aten" and not base.startswith(_UNINTERESTING):
            arguments = by_name(func, args, kwargs)
            key = (func, *(_kind(value) for value in arguments.values()))
            if key not in _seen and all(one.numel() <= MOST_ELEMENTS for one in tensors(arguments)):
                _seen.add(key)
                self.calls.append((func, Transfer(_CPU)(arguments)))
        return func(*args, **kwargs)


def by_name(overload: OpOverload, args: Any, kwargs: Any) -> Arguments:
    """All arguments by their names in the schema, with the defaults of those that were not given."""
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
    """One operator in one dtype: the calls of ATen that its samples make, and the forms of each."""

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
        except Exception as error:  # the check itself broke: that must not look like a pass
            self.result.add("error", "check", "", f"could not be checked: {_line(error)}")
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
                continue  # that is another check's finding
            yield from recording.calls

    def _check(self, overload: OpOverload, arguments: Arguments) -> None:
        torch.manual_seed(SEED)  # as each call does
        random_before = torch.default_generator.get_state()
        results, error = self._invoke(Form("", overload, arguments), arguments, _CPU)
        is_random = not torch.equal(random_before, torch.default_generator.get_state())
        if error is not None:
            return
        made = [one for one in results if isinstance(one, torch.Tensor)] if isinstance(results, tuple) else [results]
        if not all(isinstance(one, torch.Tensor) and one.layout == torch.strided for one in made):
            made = []
        for form in forms(overload, arguments, made):
            self._compare(form, values=not is_random)

    def _invoke(self, form: Form, arguments: Arguments, device: torch.device) -> tuple[Any, Exception | None]:
        try:
            torch.manual_seed(SEED)
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = form(arguments)
                _finish(device)
            return found, None
        except Exception as error:
            return None, error

    def _compare(self, form: Form, values: bool) -> None:
        described = f"{form.overload}(" + ", ".join(
            f"{name}={_brief(value)}" for name, value in form.arguments.items() if value is not None
        ) + ")"  # fmt: skip
        note = lambda kind, message: self.result.add(kind, form.name, described, message)  # noqa: E731
        self.announce(f"{form.name}: {described} (on the CPU)")
        on_cpu, on_device = Transfer(_CPU)(form.arguments), Transfer(self.device)(form.arguments)
        expected, refusal = self._invoke(form, on_cpu, _CPU)
        self.announce(f"{form.name}: {described}")
        actual, error = self._invoke(form, on_device, self.device)
        if refusal is not None and error is not None:
            self.result.both_raised += 1
        elif refusal is not None:
            if not isinstance(refusal, NotImplementedError) and "not implemented for" not in str(refusal):
                read_first = OVERLAP in str(refusal) and values and self._is_right(self._functional(form), actual)
                note("read first" if read_first else "no error", f"the CPU raised {_line(refusal)}")
        elif error is not None:
            looks_closer = (form.wrong and is_internal(form.overload)) or WRITTEN_TWICE in str(error)
            kind = "stricter" if looks_closer else "error"
            note("refused" if is_refusal(error, self.device, self.dtype) else kind, _line(error))
        else:
            self.result.compared += 1
            differences = list(judge.compare(expected, actual, self.device, values=values))
            if not differences:
                differences = list(self._memory(on_cpu, on_device, values))
            right = cache(lambda: self._functional(form))
            for kind, message in differences:
                if kind in ("values", "mutation") and BETWEEN not in message and self._is_right(right(), actual):
                    kind = "cpu out="
                note(kind, message)

    def _memory(self, on_cpu: Arguments, on_device: Arguments, values: bool) -> Iterator[judge.Difference]:
        """The arguments afterwards, with all of the memory behind them, also where no element of theirs lies."""
        for wanted, found in zip(tensors(on_cpu), tensors(on_device), strict=True):
            if wanted.layout != torch.strided:
                continue
            yield from (("mutation", text) for _, text in judge.metadata(wanted, found, self.device, owned=True))
            host = Transfer(_CPU)(found.detach())
            pairs = [("", wanted.detach(), host)]
            if wanted.untyped_storage().nbytes() == host.untyped_storage().nbytes():
                pairs.append((BETWEEN, _storage(wanted), _storage(host)))
            for where, one, other in pairs:
                message = judge.same_values(one, other, None) if values and one.shape == other.shape else None
                if message:
                    yield "mutation", f"memory afterwards{where}: {message}"
                    break

    def _functional(self, form: Form) -> Any:
        """What the CPU returns without `out=`; some of its kernels write rubbish to tensors that are not contiguous."""
        written = {one.name for one in form.overload._schema.arguments if one.is_out}
        kept = {name: value for name, value in form.arguments.items() if name not in written}
        packet = getattr(torch.ops.aten, form.overload._schema.name.partition("::")[2])
        for name in packet.overloads():
            other = getattr(packet, name)
            if written and {one.name for one in other._schema.arguments} == set(kept):
                found, error = self._invoke(Form("", other, kept), Transfer(_CPU)(kept), _CPU)
                return found if error is None else None
        return None

    def _is_right(self, right: Any, actual: Any) -> bool:
        if right is None:
            return False
        found = [one.cpu() for one in tensors((actual,))]
        wanted = tensors((right,))
        return len(found) == len(wanted) and all(
            one.shape == other.shape and judge.same_values(one.to(other.dtype), other, None) is None
            for one, other in zip(wanted, found, strict=True)
        )


def is_internal(overload: OpOverload) -> bool:
    """Whether people reach the operator only through others, which give it the right arguments."""
    name = overload._schema.name.partition("::")[2]
    return name.startswith("_") or "backward" in name or name.startswith("native_")


def _storage(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    return whole.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def check_forms(
    op: Any, dtype: torch.dtype, settings: Settings, device: torch.device, announce: Callable[[str], None]
) -> EntryResult:
    """Checks the forms of the calls that operator `op` (an `OpInfo`) makes in one dtype, but for those like earlier
    ones in this process.

    Args:
        announce: told before each call which one it is.
    """
    return FormsCheck(op, dtype, settings, device, announce).run()
