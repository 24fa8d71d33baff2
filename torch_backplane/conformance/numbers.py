"""Numbers in every operator: does one become the tensor's dtype as on the CPU, or raise the same error?

Each ATen operator with a parameter of type Scalar is called with tensors of each dtype and each of NUMBERS, on the
device and on the CPU; the other arguments are made of the schema, of some elements and of none. Then tensors of every
dtype are converted to every other one.

Not compared is what C leaves open: a float that is no value of the integer type it is made, which is another number on
each processor. Nor is what the CPU merely lacks a kernel for. Of float16 and bfloat16 two results are right: that of
the number rounded to them, as the CPU has it in most operators, and that of float32's number, as torch.cuda has it.

Where values differ beyond the tolerance, float64 says whose are nearer, as in judge.py. What is meant to differ is in
meant.py, with the reason.

Run as a program, `python -m torch_backplane.conformance.numbers DEVICE DTYPES REGEX JOBS JSON`, by the command line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_backplane.conformance import judge, meant
from torch_backplane.conformance.transfer import WIDER

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64,
)  # fmt: skip

HALVES = (torch.float16, torch.bfloat16)

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, -1, 3, 200, -200, 40_000, 2**31, 2**63 - 1, -(2**63), True, False, 0.5, -0.5, -0.0, 1.5, 2.7, -2.7, 0.1,
    1e-50, 255.9, 300.0, 70_000.0, 1e10, 1e20, -1e20, 1e39, 1e300, math.nan, math.inf, -math.inf, 0.5j, 1 + 0j,
    2.5 - 1j,
)  # fmt: skip

# What parameters of these names take, if they are no numbers: a function of the dtype of tensors.
Argument = Callable[[torch.dtype], Any]


def values(dtype: torch.dtype, shape: Sequence[int] = (2, 3)) -> torch.Tensor:
    """1, 2, 3, …"""
    numbers = torch.arange(1, 1 + math.prod(shape)).view(tuple(shape))
    return numbers % 2 == 1 if dtype == torch.bool else numbers.to(dtype)


def _tensor(*shape: int) -> Argument:
    return lambda dtype: values(dtype, shape)


def _index(*shape: int) -> Argument:
    return lambda dtype: (torch.arange(math.prod(shape)) % 2).view(shape)


def _sorted(*shape: int) -> Argument:
    return lambda dtype: values(dtype, shape).sort().values if dtype == torch.bool else values(dtype, shape)


def _plain(value: Any) -> Argument:
    return lambda dtype: value


PARAMETERS: dict[str, Argument] = {
    "dim": _plain(0), "index": _index(2), "mask": lambda dtype: torch.tensor([[True, False, True]]),
    "size": _plain([3]), "steps": _plain(5), "pad": _plain([1, 1]), "rounding_mode": _plain("floor"),
    "reduce": _plain("add"), "bins": _plain(4), "mat": _tensor(2, 3), "vec": _tensor(3), "mat1": _tensor(2, 3),
    "mat2": _tensor(3, 3), "batch1": _tensor(2, 2, 3), "batch2": _tensor(2, 3, 3), "vec1": _tensor(2),
    "vec2": _tensor(3), "dtype": _plain(None), "target": _index(2), "sorted_sequence": _sorted(6),
    "boundaries": _sorted(6), "test_elements": _tensor(6), "base": _plain(2.0), "layout": _plain(None),
    "device": _plain(None), "pin_memory": _plain(None), "memory_format": _plain(None), "generator": _plain(None),
    "sorter": _plain(None), "side": _plain(None),
}  # fmt: skip
# Of the operators with these names, overloads and in-place forms included.
PARAMETERS_OF: dict[str, dict[str, Argument]] = {
    "_pad_packed_sequence": {"data": _tensor(6), "batch_sizes": lambda dtype: torch.tensor([3, 2, 1])},
    "addmv": {"self": _tensor(2)},
    "lerp": {"weight": _tensor(2, 3)},
    "multi_margin_loss": {"weight": _plain(None)},
    "multi_margin_loss_backward": {"weight": _plain(None), "grad_output": _tensor()},
    "norm": {"dtype": lambda dtype: dtype if dtype.is_floating_point or dtype.is_complex else torch.float32},
    "scatter": {"index": _index(2, 3)},
    **{
        name: {"dtype": lambda dtype: dtype}
        for name in ("arange", "full", "linspace", "logspace", "range", "scalar_tensor")
    },
}  # fmt: skip
_BY_TYPE: dict[str, Argument] = {
    "Tensor": values, "bool": _plain(False), "int": _plain(1), "float": _plain(1.0),
    "List[Tensor]": lambda dtype: [values(dtype), values(dtype, (4,))],
}  # fmt: skip

# Their numbers are none of a dtype, or they are refused on every device but another one. A step of range that is made 0
# ends the process.
_LEFT_OUT = re.compile(
    r"_?assert|_functional|sym_|_?sparse|cudnn|miopen|_?segment|_addmm_activation|item|native_norm|range$"
)

# Tensors that PyTorch wants on the CPU, whatever the device is.
_STAYS_ON_CPU = {"batch_sizes"}

# The number is a degree, which becomes an int64. Of the latter, PyTorch's CPU kernels compute one polynomial after the
# other.
_OF_DEGREE = re.compile(r"special_\w+_polynomial_\w+\.n_scalar")
_BY_STEPS = re.compile(r"special_(hermite|laguerre|legendre)_polynomial_\w+\.n_scalar")


class Finding(NamedTuple):
    operator: str
    dtype: str
    parameter: str
    number: str
    kind: str  # "values", "no error", "error" (the device's only), "words" (two errors)
    expected: str
    found: str


class Outcome(NamedTuple):
    calls: int
    left_open: int
    in_float32: int  # half precision's results, which are those of float32 numbers
    nearer: int  # results that float64 is nearer to than to the CPU's
    meant: Counter[str]  # findings by the reason that meant.py has
    has_sample: bool  # a call of it ran on the CPU
    findings: list[Finding]


def overloads() -> Iterator[OpOverload]:
    """Every ATen overload that takes a number."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.removeprefix("aten::").partition(".")
        packet = getattr(torch.ops.aten, base, None) if name.startswith("aten::") else None
        found = getattr(packet, overload or "default", None)
        if found is None or _LEFT_OUT.match(base):
            continue
        if any(_type(one) in ("number", "List[number]") for one in found._schema.arguments):
            yield found


def _type(argument: Any) -> str:
    name = str(argument.type)
    name = name.removeprefix("Optional[").removesuffix("]") if name.startswith("Optional[") else name
    return {"Scalar": "number", "List[Scalar]": "List[number]"}.get(name, name)


def sample(overload: OpOverload, dtype: torch.dtype) -> tuple[dict[str, Any], list[str]]:
    """(arguments, the names of those that are numbers, all of which are 1)."""
    own = PARAMETERS_OF.get(overload._schema.name.removeprefix("aten::").removesuffix("_"), {})
    arguments: dict[str, Any] = {}
    numbers: list[str] = []
    for argument in overload._schema.arguments:
        kind, name = _type(argument), argument.name
        if kind in ("number", "List[number]"):
            numbers.append(name)
            arguments[name] = 1 if kind == "number" else [1, 1]
        elif argument.is_out:
            arguments[name] = torch.empty(0, dtype=dtype)
        elif name in own:
            arguments[name] = own[name](dtype)
        elif name in PARAMETERS:
            arguments[name] = PARAMETERS[name](dtype)
        elif argument.has_default_value():
            arguments[name] = argument.default_value
        else:
            arguments[name] = _BY_TYPE.get(kind, _plain(None))(dtype)
    return arguments, numbers


def without_elements(overload: OpOverload, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments with 0 for the first size of each tensor, or the last one, whichever the CPU takes."""
    for at in (0, -1):

        def cut(one: torch.Tensor, at: int = at) -> torch.Tensor:
            return one.narrow(at, 0, 0) if one.dim() else one

        given = tree_map_only(torch.Tensor, cut, arguments)
        if not isinstance(answer(overload, given, "cpu"), Raised):
            return given
    return None


class Raised(NamedTuple):
    kind: str
    words: str


def answer(function: Callable[..., Any], arguments: dict[str, Any], device: str) -> Any:
    """On the CPU: the results and what was written to, or `Raised`."""
    given = {
        name: tree_map_only(torch.Tensor, lambda one: one.clone().to(device), value)
        if name not in _STAYS_ON_CPU
        else value
        for name, value in arguments.items()
    }
    if "device" in given:
        given["device"] = torch.device(device)
    try:
        result = function(**given)
        if device != "cpu":
            torch.accelerator.synchronize(device)
        return tree_map_only(torch.Tensor, lambda one: one.cpu(), (result, list(given.values())))
    except Exception as error:
        if device != "cpu":  # what the call began may report another error, which is not the next call's
            with contextlib.suppress(Exception):
                torch.accelerator.synchronize(device)
        return Raised(type(error).__name__, str(error).partition("\n")[0])


def in_float32(overload: OpOverload, arguments: dict[str, Any], dtype: torch.dtype) -> Any:
    """What the CPU answers if nothing is rounded to `dtype` but operands and results."""

    def to(before: torch.dtype, after: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda one: one.to(after) if one.dtype == before else one

    answered = answer(overload, tree_map_only(torch.Tensor, to(dtype, torch.float32), arguments), "cpu")
    return tree_map_only(torch.Tensor, to(torch.float32, dtype), answered)


def is_nearer(overload: OpOverload, arguments: dict[str, Any], expected: Any, found: Any) -> bool:
    """Whether float64 says so of all that differs, or leaves it within the tolerance, as `judge.against_float64`."""

    def widened(one: Any) -> Any:
        return one.to(WIDER.get(one.dtype, one.dtype)) if isinstance(one, torch.Tensor) else WIDER.get(one, one)

    exact = answer(overload, tree_map_only((torch.Tensor, torch.dtype), widened, arguments), "cpu")
    if isinstance(exact, Raised):
        return False
    for one, other, right in zip(*(tree_leaves(answered) for answered in (expected, found, exact)), strict=True):
        if isinstance(one, torch.Tensor) and one.shape != other.shape:
            return False
        if isinstance(one, torch.Tensor) and judge.same_values(one, other, None):
            nearer, _ = judge.against_float64(one, other, right, None)
            if not nearer:
                return False
    return True


def difference(expected: Any, found: Any) -> str | None:
    """The kind of a finding."""
    if isinstance(expected, Raised) or isinstance(found, Raised):
        words = expected.words if isinstance(expected, Raised) else ""
        if isinstance(found, Raised) and judge.is_broken(found.words, words):
            return "error"
        if not isinstance(found, Raised):
            return None if "not implemented for" in expected.words else "no error"
        if not isinstance(expected, Raised):
            return "error"
        return None if expected == found or "not implemented for" in expected.words else "words"
    plain = [tree_map_only(torch.device, str, answered) for answered in (found, expected)]
    try:
        for one, other in zip(*(tree_leaves(answered) for answered in plain), strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, equal_nan=True)
    except AssertionError:
        return "values"
    return None


def is_open(name: str, number: Any, dtype: torch.dtype, kind: str) -> bool:
    """Whether C leaves open what integer a number is made."""
    if kind != "values" or isinstance(number, complex):
        return False
    if _OF_DEGREE.match(name):  # from a float, to which 2**63 - 1 is rounded
        return not abs(float(number)) < 2.0**63
    integers = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return integers and isinstance(number, float) and not abs(number) < 2.0**63


def compare(
    overload: OpOverload,
    device: str,
    dtypes: Sequence[torch.dtype] = DTYPES,
    numbers: Sequence[Any] = NUMBERS,
    empty: bool = False,
) -> Outcome:
    """Calls one overload with every dtype and number; `empty`: with tensors of no elements."""
    counts: Counter[str] = Counter()
    known: Counter[str] = Counter()
    findings: list[Finding] = []
    name = overload.name().removeprefix("aten::")
    for dtype in dtypes:
        arguments, parameters = sample(overload, dtype)
        if empty:
            if (found := without_elements(overload, arguments)) is None:
                continue
            arguments = found
        counts["samples"] += not isinstance(answer(overload, arguments, "cpu"), Raised)
        for parameter, number in itertools.product(parameters, numbers):
            if _is_too_much(name, number):
                continue
            given = {**arguments, parameter: [number, 1] if isinstance(arguments[parameter], list) else number}
            expected, found = answer(overload, given, "cpu"), answer(overload, given, device)
            counts["calls"] += 1
            kind = difference(expected, found)
            if kind == "values" and dtype in HALVES and difference(in_float32(overload, given, dtype), found) is None:
                counts["in float32"] += 1
            elif kind is not None and is_open(name, number, dtype, kind):
                counts["open"] += 1
            elif kind == "values" and is_nearer(overload, given, expected, found):
                counts["nearer"] += 1
            elif kind is not None:
                about = (str(dtype).removeprefix("torch."), parameter, repr(number), kind)
                finding = Finding(name, *about, _short(expected), _short(found))
                call = f"{parameter}={number!r}" + (" of no elements" if empty else "")
                if reason := meant.reason(meant.NUMBERS, name, finding.dtype, kind, call, finding.expected):
                    known[reason] += 1
                else:
                    findings.append(finding)
    calls, left_open, wide, nearer = (counts[one] for one in ("calls", "open", "in float32", "nearer"))
    return Outcome(calls, left_open, wide, nearer, known, counts["samples"] > 0, findings)


def _is_too_much(name: str, number: Any) -> bool:
    """Whether a tensor of so many elements may exist, and is large (PyTorch refuses larger ones); or it would take
    minutes, if not days.
    """
    if isinstance(number, complex):
        return False
    if _BY_STEPS.match(name):
        return abs(number) > 10**5
    return name.startswith("arange") and 10**6 < abs(number) < 10**12


def _short(answered: Any) -> str:
    text = f"{answered.kind}: {answered.words}" if isinstance(answered, Raised) else str(answered[0])
    return re.sub(r"\s+", " ", text)[:200]


def compare_conversions(device: str, dtypes: Sequence[torch.dtype] = DTYPES) -> Outcome:
    """`to` and `copy_` between all dtypes, of what is a value of the result's dtype, but for integers, which wrap."""
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    for source, target in itertools.product(dtypes, dtypes):
        if source.is_complex and not target.is_complex:
            continue  # PyTorch warns, and takes the real part
        given = values_of(source)
        if source.is_floating_point and not target.is_floating_point and not target.is_complex and target != torch.bool:
            # Made int64 first, and wrapped from there, as PyTorch does for uint8.
            least, greatest = (-(2.0**63), 2.0**63) if target == torch.uint8 else integer_bounds(target)
            defined = (given.double().trunc() >= least) & (given.double().trunc() < greatest)
            counts["open"] += int((~defined).sum())
            given = given[defined]
        for copied in (False, True):
            expected, found = (converted(one, target, copied) for one in (given, given.to(device)))
            found = found.cpu()
            counts["calls"] += len(given)
            same = (expected == found) | ((expected != expected) & (found != found))
            if not same.all():
                wrong = ~same.reshape(-1, len(given)).all(0)
                shown = [str(one.reshape(-1, len(given))[0, wrong][:4].tolist()) for one in (given, expected, found)]
                about = (f"to {target}", str(source).removeprefix("torch."), "copy_" if copied else "to")
                findings.append(Finding(*about, shown[0], "values", *shown[1:]))
    return Outcome(counts["calls"], counts["open"], 0, 0, Counter(), True, findings)


def converted(tensor: torch.Tensor, dtype: torch.dtype, copied: bool) -> torch.Tensor:
    """Of the new dtype; or copied twice, to the rows of a tensor that has it."""
    if not copied:
        return tensor.to(dtype)
    return torch.zeros(2, len(tensor), dtype=dtype, device=tensor.device).copy_(tensor)


def integer_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """The least value, and the number after the greatest."""
    facts = torch.iinfo(dtype)
    return float(facts.min), float(facts.max) + 1 if facts.bits < 64 else 2.0**63


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """Numbers that are hard to convert."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if not (dtype.is_floating_point or dtype.is_complex):
        facts = torch.iinfo(dtype)
        near = [0, 1, 2, 127, 128, 255, 256, 2049, 32767, 65535, 65536, 2**24 + 1, 2**31 - 1, 2**53 + 1, 2**63 - 1]
        both = sorted({sign * one for one in near for sign in (1, -1)} | {facts.min, facts.max})
        return torch.tensor([one for one in both if facts.min <= one <= facts.max], dtype=dtype)
    ends = [0.0, 0.1, 0.5, 0.999, 1.0, 1.5, 2.5, 127.5, 128.0, 255.9, 256.5, 2049.0, 32767.5, 65504.0, 65520.0, 70000.0]
    large = [2.0**24 + 2, 2.0**31 - 0.5, 2.0**31, 2.0**53, 2.0**62, 2.0**63, 1e20, 1e38, 3.4e38, 1e300, math.inf]
    small = [5.9e-8, 2.9e-8, 1e-7, 6e-5, 1e-38, 1e-45, 1e-300]
    every = [sign * one for one in (*ends, *large, *small) for sign in (1.0, -1.0)] + [math.nan]
    return torch.tensor(every, dtype=torch.float64).to(dtype)


def main(device: str, dtypes: str, match: str, jobs: str, json_file: str) -> int:
    """Prints what differs, by operator and kind, and the counts; 1 where values do or one side only raises, 2 where
    there is no such device.
    """
    warnings.simplefilter("ignore")
    try:
        torch.empty(0, device=device)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if json_file == "-":  # the findings alone are there
        with contextlib.redirect_stdout(sys.stderr):
            findings = sweep(device, dtypes, match, int(jobs))
        print(json.dumps([one._asdict() for one in findings], indent=1))
    else:
        findings = sweep(device, dtypes, match, int(jobs))
        if json_file:
            with open(json_file, "w") as file:
                json.dump([one._asdict() for one in findings], file, indent=1)
    return int(any(one.kind != "words" for one in findings))


def _begin() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _outcomes_of(name: str | None, device: str, named: Sequence[str]) -> dict[str, Outcome]:
    """Of an overload, with elements and without; or of conversions."""
    dtypes = [getattr(torch, one) for one in named] or DTYPES
    if name is None:
        return {"conversions of tensors": compare_conversions(device, dtypes)}
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    of_none = f"{name} of no elements"
    return {name: compare(overload, device, dtypes), of_none: compare(overload, device, dtypes, empty=True)}


def sweep(device: str, dtypes: str, match: str, jobs: int) -> list[Finding]:
    """Prints what differs while it goes on, in so many processes, and what came of it."""
    named = tuple(name for name in dtypes.split(",") if name)
    names = [name for one in overloads() if re.search(match, name := one.name().removeprefix("aten::"))]
    outcomes: dict[str, Outcome] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin) as pool:
        under_way = [pool.submit(_outcomes_of, name, device, named) for name in (*([] if match else [None]), *names)]
        for done in under_way:
            for called, outcome in done.result().items():
                outcomes[called] = outcome
                for kind, count in Counter(one.kind for one in outcome.findings).items():
                    example = next(one for one in outcome.findings if one.kind == kind)
                    print(f"{called}: {kind}, {count}, such as {example.dtype} {example.parameter}={example.number}")
                    print(f"    CPU    {example.expected}\n    device {example.found}", flush=True)
    findings = [one for outcome in outcomes.values() for one in outcome.findings]
    kinds = Counter(one.kind for one in findings)
    calls = sum(one.calls for one in outcomes.values())
    left_open = sum(one.left_open for one in outcomes.values())
    wide = sum(one.in_float32 for one in outcomes.values())
    nearer = sum(one.nearer for one in outcomes.values())
    print(f"{calls} calls of {len(outcomes)} operators compared; C leaves open the results of {left_open}")
    print(f"{wide} results of half precision are those of the number in float32")
    print(f"{nearer} results differ and are nearer to float64's than the CPU's")
    known: Counter[str] = sum((one.meant for one in outcomes.values()), Counter())
    for reason, count in known.most_common():
        print(f"meant, {count}: {reason}")
    print("differ: " + (", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"))
    unsampled = [name for name, outcome in outcomes.items() if not outcome.has_sample]
    if unsampled:
        print(f"no call ran on the CPU of: {', '.join(unsampled)}")
    return findings


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
