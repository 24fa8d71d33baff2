"""Are these two results the same? The CPU's is right, unless float64 says that the device's is nearer."""

from __future__ import annotations

import cmath
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from torch_backplane.conformance.transfer import WIDER, Transfer, leaves

# Tests of PyTorch's whose tolerances are about comparing values between implementations; an OpInfo's tolerances for
# others (gradcheck, tracing, extremal inputs) do not apply here.
_VALUE_TESTS = {None, "test_compare_cpu", "test_out", "test_noncontiguous_samples", "test_reference_numerics_small"}
_CPU = torch.device("cpu")
# Words about a kernel, which a call that is refused needs none of, and Python's own about what nobody has checked.
_BROKEN = re.compile(
    "could not be built|(tuple|list) index out of range|values to unpack|has no attribute|unsupported operand type|"
    "not supported between|is not subscriptable|object is not|division or modulo by zero|division by zero|NoneType"
)

Difference = tuple[str, str]  # a kind of finding, and what to say
Exact = Callable[[], Any]  # what the CPU has in float64, a tree of results or a tensor; None where it has nothing


def is_broken(words: str, expected: str) -> bool:
    """Whether an error of the device, where the CPU said what is `expected`, comes from within and is no refusal."""
    return words != expected and _BROKEN.search(words) is not None


def tolerances(op: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """(atol, rtol) that the OpInfo itself asks for in this dtype on CPU or CUDA, the loosest of each; else None."""
    wanted = []
    for info in op.decorators:
        if getattr(info, "test_name", None) not in _VALUE_TESTS or getattr(info, "device_type", None) == "mps":
            continue
        for decorator in getattr(info, "decorators", [info]):
            overrides = getattr(decorator, "d", {})
            if type(decorator).__name__ == "toleranceOverride" and dtype in overrides:
                wanted.append(overrides[dtype])
    return (max(t.atol for t in wanted), max(t.rtol for t in wanted)) if wanted else None


def significant_strides(tensor: torch.Tensor) -> list[int]:
    """The strides that decide where elements lie: none of an empty tensor, none of dimensions of size 1."""
    if tensor.numel() == 0:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def same_values(expected: torch.Tensor, actual: torch.Tensor, allowed: tuple[float, float] | None) -> str | None:
    """None when two CPU tensors of one shape and dtype agree (NaN equals NaN), else the difference in one line."""
    if expected.dtype == torch.complex32:  # compared nowhere in PyTorch
        expected, actual = (torch.view_as_real(tensor.resolve_conj()) for tensor in (expected, actual))
    if expected.layout == torch.strided and torch.equal(expected, actual):
        return None
    inexact = expected.dtype.is_floating_point or expected.dtype.is_complex
    atol, rtol = allowed if allowed and inexact else (None, None)
    try:
        torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol, equal_nan=True, check_stride=False)
    except AssertionError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:] if line.strip()]
        return "; ".join(lines) or str(error)
    return None


def compare_values(
    expected: torch.Tensor, actual: torch.Tensor, allowed: tuple[float, float] | None, exact: Exact
) -> Iterator[Difference]:
    """The difference between the values of two CPU tensors of one shape and dtype, if there is one.

    ``exact`` is called then, for the tensor that the CPU has in float64.
    """
    message = same_values(expected, actual, allowed)
    if message:
        nearer, compared = against_float64(expected, actual, exact(), allowed)
        yield ("nearer", compared) if nearer else ("values", "; ".join(filter(None, [message, compared])))


def against_float64(
    expected: torch.Tensor, actual: torch.Tensor, exact: Any, allowed: tuple[float, float] | None
) -> tuple[bool, str]:
    """Whether the device is nearer to the truth than the CPU, and what to say of it; "" where nobody can tell.

    In float32 and below, the CPU's kernels round, cancel and approximate too. PyTorch's benchmarks let float64 decide
    then (``fp64_ref`` in ``torch._dynamo.utils.same``), by the root mean square over the tensor, and accept an error
    of several times the reference's. Here no factor is given, and every single element counts: of those in which the
    two differ beyond the tolerance, each must be as near to float64's as the CPU's is, or within the tolerance of it;
    and the largest error among them must be no larger than the CPU's.

    Args:
        expected: the CPU's result.
        actual: the device's, on the CPU, of the same shape and dtype.
        exact: the CPU's from the same inputs in float64 or complex128; anything else decides nothing.
        allowed: (atol, rtol) in place of the dtype's defaults.
    """
    wide = WIDER.get(expected.dtype)
    if wide is None or not isinstance(exact, torch.Tensor) or exact.dtype != wide or exact.shape != expected.shape:
        return False, ""
    if any(tensor.layout != torch.strided for tensor in (expected, actual, exact)):
        return False, ""
    defaults = torch.testing._comparison.default_tolerances(expected.dtype)  # type: ignore[attr-defined]
    rtol, atol = (allowed[1], allowed[0]) if allowed else defaults
    exact = exact.detach()
    beyond = ~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)  # as assert_close
    of_device, of_cpu = (_distance(tensor[beyond], exact[beyond]) for tensor in (actual, expected))
    if not len(of_device):
        return False, ""
    within = torch.isclose(actual, exact.to(actual.dtype), rtol=rtol, atol=atol, equal_nan=True)[beyond]
    right = ((of_device <= of_cpu) & torch.isfinite(of_cpu)) | within  # being nearer than NaN is no merit
    largest, largest_of_cpu = of_device.max().item(), of_cpu.max().item()
    return bool(right.all()) and largest <= largest_of_cpu, (
        f"by float64, right in {int(right.sum())} of the {len(right)} elements that differ; largest error "
        f"{largest:.2g}, and {largest_of_cpu:.2g} on the CPU"
    )


def _distance(rounded: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How far each element is from the exact one. NaN and infinity are right or infinitely wrong."""
    exact = torch.where(torch.isfinite(exact.to(rounded.dtype)), exact, exact.to(rounded.dtype).to(exact.dtype))
    rounded = rounded.to(exact.dtype)
    same = (rounded == exact) | (torch.isnan(rounded) & torch.isnan(exact))
    distance = (rounded - exact).abs()
    return torch.where(same, 0.0, torch.where(torch.isfinite(distance), distance, torch.inf))


def metadata(expected: torch.Tensor, actual: torch.Tensor, device: torch.device, owned: bool) -> Iterator[Difference]:
    """Differences between two tensors other than their values; ``owned``: the caller passed the tensor in."""
    if actual.device != device:
        yield "device", f"on {actual.device}, not on {device}"
    if actual.layout != expected.layout:
        yield "structure", f"layout {actual.layout}, expected {expected.layout}"
    if actual.dtype != expected.dtype:
        yield "dtype", f"{actual.dtype}, expected {expected.dtype}"
    if actual.shape != expected.shape:
        yield "shape", f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    elif expected.layout == actual.layout == torch.strided and significant_strides(expected) != significant_strides(
        actual
    ):
        yield "strides" if owned else "layout", f"strides {actual.stride()}, expected {expected.stride()}"
    for bit in ("conj", "neg"):
        if getattr(expected, f"is_{bit}")() != getattr(actual, f"is_{bit}")():
            yield "layout", f"lazy {bit} bit is {getattr(actual, f'is_{bit}')()}"


def compare(
    expected: Any,
    actual: Any,
    device: torch.device,
    *,
    values: bool = True,
    owned: bool = False,
    allowed: tuple[float, float] | None = None,
    exact: Exact = lambda: None,
) -> Iterator[Difference]:
    """Every difference between the CPU's result and the device's.

    Args:
        expected: the CPU's tree of results.
        actual: the device's, as it came.
        device: where the device's tensors must be.
        values: compare the numbers too, not only what kind of tensors they are.
        owned: the tensors are the caller's (in-place, ``out=``): their strides are part of the promise.
        allowed: (atol, rtol) in place of the dtype's defaults.
        exact: called where values differ.

    Yields:
        (kind, message) pairs; the message begins with the path of the leaf.
    """
    wanted, found = list(leaves(expected)), list(leaves(actual))
    if [path for path, _ in wanted] != [path for path, _ in found]:
        yield "structure", f"{_describe(actual)}, expected {_describe(expected)}"
        return
    host = Transfer(_CPU)
    for index, ((path, want), (_, got)) in enumerate(zip(wanted, found, strict=True)):
        where = f"result{path}: " if path else ""
        if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
            different = list(metadata(want, got, device, owned))
            yield from ((kind, where + message) for kind, message in different)
            if values and not any(kind in ("dtype", "shape", "structure") for kind, _ in different):
                exact_leaf = partial(_leaf, exact, index, path)
                for kind, message in compare_values(want.detach(), host(got.detach()), allowed, exact_leaf):
                    yield kind, where + message
        elif type(want) is not type(got):
            yield "structure", f"{where}{_describe(got)}, expected {_describe(want)}"
        elif values and not _same_object(want, got, device):
            yield "values", f"{where}{got!r}, expected {want!r}"


def _leaf(exact: Exact, index: int, path: str) -> Any:
    """The leaf of the exact results that stands at this place; None where there is another one or none."""
    found, leaf = next(islice(leaves(exact()), index, None), ("", None))
    return leaf if found == path else None


def _same_object(want: Any, got: Any, device: torch.device) -> bool:
    if isinstance(want, (float, complex)):
        return bool(cmath.isclose(want, got, rel_tol=1.3e-6, abs_tol=1e-5)) or (want != want and got != got)
    if isinstance(want, torch.device):
        return bool(got == device)
    return bool(want == got)


def _describe(tree: Any) -> str:
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__} of {len(tree)}"
    return type(tree).__name__


def aliasing(arguments: Any, results: Any) -> list[str]:
    """For each tensor of the results: which argument it is, or is a view of and where, or «new»."""
    known = tensors_by_identity(arguments)
    signature = []
    for path, leaf in leaves(results):
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            continue
        owner = next((name for name, tensor in known if tensor is leaf), None)
        if owner:
            signature.append(f"result{path} is {owner}")
            continue
        storage = leaf.untyped_storage()._cdata
        owner = next((name for name, tensor in known if tensor.untyped_storage()._cdata == storage), None)
        signature.append(f"result{path} is " + (f"a view of {owner} at {leaf.storage_offset()}" if owner else "new"))
    return signature


def tensors_by_identity(tree: Any) -> list[tuple[str, torch.Tensor]]:
    """(``argument[…]``, tensor) for every strided tensor of a tree."""
    return [
        (f"argument{path}", leaf)
        for path, leaf in leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]
