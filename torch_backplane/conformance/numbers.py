"""Scalar arguments of every operator: are they converted as on the CPU, or refused with the same error?

Each ATen operator with a parameter of type Scalar is called with tensors of each dtype and each of NUMBERS, on the
device and on the CPU. The other arguments are generated from the schema, once with elements and once with empty
tensors. In addition, tensors of every dtype are converted to every other dtype.

Results that C leaves undefined are not compared: the conversion of a float to an integer type that cannot represent it,
which differs between processors. Neither are calls for which the CPU has no kernel. For float16 and bfloat16, two
results are accepted: with the number rounded to the dtype, as on the CPU in most operators, or in float32, as on CUDA.

Where values differ beyond the tolerance, float64 decides which are closer, as in comparison.py. Accepted differences
and their reasons are in accepted.py.

The command line runs this module as `python -m torch_backplane.conformance.numbers DEVICE DTYPES REGEX JOBS JSON`.
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

from torch_backplane.conformance import accepted, comparison
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

# Makes the argument for a parameter that is not a Scalar, given the dtype of the tensors.
Argument = Callable[[torch.dtype], Any]


def values(dtype: torch.dtype, shape: Sequence[int] = (2, 3)) -> torch.Tensor:
    """Return a tensor of this shape with the values 1, 2, 3, …; for bool, whether they are odd."""
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
# Overrides for the operators with these names, including all overloads and in-place variants.
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

# Operators whose numbers are not converted to a dtype, or that only other backends have. `range` crashes the process if
# its step is converted to 0.
_LEFT_OUT = re.compile(
    r"_?assert|_functional|sym_|_?sparse|cudnn|miopen|_?segment|_addmm_activation|item|native_norm|range$"
)

# Parameters whose tensors must be on the CPU for every device.
_STAYS_ON_CPU = {"batch_sizes"}

# The number is a degree, which is converted to int64. For _BY_STEPS, PyTorch's CPU kernels take one step per degree.
_OF_DEGREE = re.compile(r"special_\w+_polynomial_\w+\.n_scalar")
_BY_STEPS = re.compile(r"special_(hermite|laguerre|legendre)_polynomial_\w+\.n_scalar")


class Finding(NamedTuple):
    operator: str
    dtype: str
    parameter: str
    number: str
    kind: str  # "values", "no error", "error" (only the device raised), "words" (different error messages)
    expected: str
    found: str


class Outcome(NamedTuple):
    calls: int
    undefined: int  # calls whose results C leaves undefined
    in_float32: int  # half-precision results that agree with the number in float32
    nearer: int  # results that differ from the CPU's and are closer to float64's
    accepted: Counter[str]  # accepted findings by reason (accepted.py)
    has_sample: bool  # whether any generated call ran on the CPU
    findings: list[Finding]


def overloads() -> Iterator[OpOverload]:
    """Yield every ATen overload with a parameter of type Scalar."""
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
    """Return (arguments, names of the Scalar arguments). All Scalars are 1."""
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
    """Return the arguments with empty tensors: first or last size 0, whichever the CPU accepts; None if neither."""
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
    """Call the function on the device. Returns (results, arguments after the call) on the CPU, or `Raised`."""
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
        if device != "cpu":  # a second error of this call must not be reported by the next one
            with contextlib.suppress(Exception):
                torch.accelerator.synchronize(device)
        return Raised(type(error).__name__, str(error).partition("\n")[0])


def in_float32(overload: OpOverload, arguments: dict[str, Any], dtype: torch.dtype) -> Any:
    """The CPU's outcome if the operator computes in float32, and only operands and results are rounded to `dtype`."""

    def to(before: torch.dtype, after: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda one: one.to(after) if one.dtype == before else one

    answered = answer(overload, tree_map_only(torch.Tensor, to(dtype, torch.float32), arguments), "cpu")
    return tree_map_only(torch.Tensor, to(torch.float32, dtype), answered)


def is_nearer(overload: OpOverload, arguments: dict[str, Any], expected: Any, found: Any) -> bool:
    """Whether all values that differ are closer to float64's or within the tolerance (`comparison.against_float64`)."""

    def widened(one: Any) -> Any:
        return one.to(WIDER.get(one.dtype, one.dtype)) if isinstance(one, torch.Tensor) else WIDER.get(one, one)

    exact = answer(overload, tree_map_only((torch.Tensor, torch.dtype), widened, arguments), "cpu")
    if isinstance(exact, Raised):
        return False
    for one, other, right in zip(*(tree_leaves(answered) for answered in (expected, found, exact)), strict=True):
        if isinstance(one, torch.Tensor) and one.shape != other.shape:
            return False
        if isinstance(one, torch.Tensor) and comparison.same_values(one, other, None):
            nearer, _ = comparison.against_float64(one, other, right, None)
            if not nearer:
                return False
    return True


def difference(expected: Any, found: Any) -> str | None:
    """Return the kind of the finding, or None if the outcomes agree."""
    if isinstance(expected, Raised) or isinstance(found, Raised):
        words = expected.words if isinstance(expected, Raised) else ""
        if isinstance(found, Raised) and comparison.is_broken(found.words, words):
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
    """Whether C leaves the conversion of the number to an integer undefined."""
    if kind != "values" or isinstance(number, complex):
        return False
    if _OF_DEGREE.match(name):  # converted from a float, to which 2**63 - 1 is rounded
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
    """Call one overload with every dtype and number; with `empty`, with empty tensors."""
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
                call = f"{parameter}={number!r}" + (" with empty tensors" if empty else "")
                if reason := accepted.reason(accepted.NUMBERS, name, finding.dtype, kind, call, finding.expected):
                    known[reason] += 1
                else:
                    findings.append(finding)
    calls, undefined, wide, nearer = (counts[one] for one in ("calls", "open", "in float32", "nearer"))
    return Outcome(calls, undefined, wide, nearer, known, counts["samples"] > 0, findings)


def _is_too_much(name: str, number: Any) -> bool:
    """Whether the call would allocate a huge tensor, or take minutes or longer. PyTorch refuses larger sizes."""
    if isinstance(number, complex):
        return False
    if _BY_STEPS.match(name):
        return abs(number) > 10**5
    return name.startswith("arange") and 10**6 < abs(number) < 10**12


def _short(answered: Any) -> str:
    text = f"{answered.kind}: {answered.words}" if isinstance(answered, Raised) else str(answered[0])
    return re.sub(r"\s+", " ", text)[:200]


def compare_conversions(device: str, dtypes: Sequence[torch.dtype] = DTYPES) -> Outcome:
    """Compare `to` and `copy_` between all dtypes. Floats that the integer dtype cannot represent are left out."""
    counts: Counter[str] = Counter()
    findings: list[Finding] = []
    for source, target in itertools.product(dtypes, dtypes):
        if source.is_complex and not target.is_complex:
            continue  # PyTorch warns and takes the real part
        given = values_of(source)
        if source.is_floating_point and not target.is_floating_point and not target.is_complex and target != torch.bool:
            # PyTorch converts to int64 first for uint8, and wraps.
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
    """Convert with `to`; or if `copied`, with `copy_` into both rows of a tensor of the new dtype."""
    if not copied:
        return tensor.to(dtype)
    return torch.zeros(2, len(tensor), dtype=dtype, device=tensor.device).copy_(tensor)


def integer_bounds(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest value, and the largest plus 1."""
    facts = torch.iinfo(dtype)
    return float(facts.min), float(facts.max) + 1 if facts.bits < 64 else 2.0**63


def values_of(dtype: torch.dtype) -> torch.Tensor:
    """Return values of the dtype that are edge cases of conversions."""
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
    """Run the sweep and print its results.

    Returns:
        The exit code: 1 if values differ or only one side raised, 2 if the device does not exist, else 0.
    """
    warnings.simplefilter("ignore")
    try:
        torch.empty(0, device=device)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    if json_file == "-":  # stdout gets only the findings
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
    """Return the outcomes of one overload, with elements and with empty tensors; for None, of the conversions."""
    dtypes = [getattr(torch, one) for one in named] or DTYPES
    if name is None:
        return {"conversions of tensors": compare_conversions(device, dtypes)}
    (overload,) = (one for one in overloads() if one.name() == f"aten::{name}")
    of_none = f"{name} with empty tensors"
    return {name: compare(overload, device, dtypes), of_none: compare(overload, device, dtypes, empty=True)}


def sweep(device: str, dtypes: str, match: str, jobs: int) -> list[Finding]:
    """Compare all matching overloads in `jobs` processes. Prints findings as they occur, and totals at the end."""
    named = tuple(name for name in dtypes.split(",") if name)
    names = [name for one in overloads() if re.search(match, name := one.name().removeprefix("aten::"))]
    outcomes: dict[str, Outcome] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin) as pool:
        pending = [pool.submit(_outcomes_of, name, device, named) for name in (*([] if match else [None]), *names)]
        for done in pending:
            for called, outcome in done.result().items():
                outcomes[called] = outcome
                for kind, count in Counter(one.kind for one in outcome.findings).items():
                    example = next(one for one in outcome.findings if one.kind == kind)
                    print(f"{called}: {kind}, {count}, e.g. {example.dtype} {example.parameter}={example.number}")
                    print(f"    CPU    {example.expected}\n    device {example.found}", flush=True)
    findings = [one for outcome in outcomes.values() for one in outcome.findings]
    kinds = Counter(one.kind for one in findings)
    calls = sum(one.calls for one in outcomes.values())
    undefined = sum(one.undefined for one in outcomes.values())
    wide = sum(one.in_float32 for one in outcomes.values())
    nearer = sum(one.nearer for one in outcomes.values())
    print(f"{calls} calls of {len(outcomes)} operators compared; {undefined} results are undefined in C")
    print(f"{wide} half-precision results agree with the number in float32")
    print(f"{nearer} results differ from the CPU's and are closer to float64's")
    known: Counter[str] = sum((one.accepted for one in outcomes.values()), Counter())
    for reason, count in known.most_common():
        print(f"accepted difference, {count}: {reason}")
    print("findings: " + (", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"))
    unsampled = [name for name, outcome in outcomes.items() if not outcome.has_sample]
    if unsampled:
        print(f"no generated call runs on the CPU: {', '.join(unsampled)}")
    return findings


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
