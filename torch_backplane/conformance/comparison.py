"""Compares two results. The CPU's is the reference, unless the device's is closer to the result in float64."""

from __future__ import annotations

import cmath
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from torch_backplane.conformance.transfer import WIDER, Transfer, leaves

# PyTorch's tests whose tolerances are for comparing values between implementations. The tolerances of an OpInfo for
# other tests (gradcheck, tracing, extremal inputs) do not apply here.
_VALUE_TESTS = {None, "test_compare_cpu", "test_out", "test_noncontiguous_samples", "test_reference_numerics_small"}
_CPU = torch.device("cpu")
# Errors that show a bug instead of a refusal: a kernel failed to build, or Python code did not check its arguments.
_BROKEN = re.compile(
    "could not be built|(tuple|list) index out of range|values to unpack|has no attribute|unsupported operand type|"
    "not supported between|is not subscriptable|object is not|division or modulo by zero|division by zero|NoneType"
)

Difference = tuple[str, str]  # kind of finding, message
Exact = Callable[[], Any]  # returns the CPU's result in float64, a tree or a tensor; None if there is none


def is_broken(words: str, expected: str) -> bool:
    """Whether the text of a device's error shows a bug instead of a refusal. `expected` is the CPU's text."""
    return words != expected and _BROKEN.search(words) is not None


def tolerances(op: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the loosest (atol, rtol) that the OpInfo sets for this dtype on CPU or CUDA, or None."""
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
    """Return the strides that affect addresses: none for empty tensors, and none of dimensions of size 1."""
    if tensor.numel() == 0:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def same_values(expected: torch.Tensor, actual: torch.Tensor, allowed: tuple[float, float] | None) -> str | None:
    """Compare two CPU tensors of the same shape and dtype. NaN equals NaN.

    Returns:
        None if they agree, else the difference in one line.
    """
    if expected.dtype == torch.complex32:  # which PyTorch cannot compare
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
    """Yield the difference between the values of two CPU tensors of the same shape and dtype, if there is one.

    ``exact`` is called if they differ. It returns the CPU's tensor in float64.
    """
    message = same_values(expected, actual, allowed)
    if message:
        nearer, compared = against_float64(expected, actual, exact(), allowed)
        yield ("nearer", compared) if nearer else ("values", "; ".join(filter(None, [message, compared])))


def against_float64(
    expected: torch.Tensor, actual: torch.Tensor, exact: Any, allowed: tuple[float, float] | None
) -> tuple[bool, str]:
    """Decide whether the device's result is at least as close to the result in float64 as the CPU's.

    In float32 and narrower dtypes, the CPU's kernels have rounding, cancellation and approximation errors, too.
    PyTorch's benchmarks then compare with float64 (``fp64_ref`` in ``torch._dynamo.utils.same``), by the root mean
    square over the tensor, and accept an error of several times the reference's. This function is stricter: every
    element that differs beyond the tolerance must be as close to float64's as the CPU's, or within the tolerance of
    it. The largest error among these elements must not exceed the CPU's.

    Args:
        expected: the CPU's result.
        actual: the device's result, copied to the CPU, of the same shape and dtype.
        exact: the CPU's result from the same inputs in float64 or complex128; the answer is False for anything else.
        allowed: (atol, rtol) in place of the dtype's defaults.

    Returns:
        The decision, and a message; the message is empty if ``exact`` cannot decide.
    """
    wide = WIDER.get(expected.dtype)
    if wide is None or not isinstance(exact, torch.Tensor) or exact.dtype != wide or exact.shape != expected.shape:
        return False, ""
    if any(tensor.layout != torch.strided for tensor in (expected, actual, exact)):
        return False, ""
    defaults = torch.testing._comparison.default_tolerances(expected.dtype)  # type: ignore[attr-defined]
    rtol, atol = (allowed[1], allowed[0]) if allowed else defaults
    exact = exact.detach()
    beyond = ~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=True)  # as in assert_close
    of_device, of_cpu = (_distance(tensor[beyond], exact[beyond]) for tensor in (actual, expected))
    if not len(of_device):
        return False, ""
    within = torch.isclose(actual, exact.to(actual.dtype), rtol=rtol, atol=atol, equal_nan=True)[beyond]
    right = ((of_device <= of_cpu) & torch.isfinite(of_cpu)) | within  # being closer than NaN does not count
    largest, largest_of_cpu = of_device.max().item(), of_cpu.max().item()
    return bool(right.all()) and largest <= largest_of_cpu, (
        f"compared with float64, right in {int(right.sum())} of the {len(right)} elements that differ; largest error "
        f"{largest:.2g}, on the CPU {largest_of_cpu:.2g}"
    )


def _distance(rounded: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the error of each element. It is 0 or infinite where either value is NaN or infinite."""
    exact = torch.where(torch.isfinite(exact.to(rounded.dtype)), exact, exact.to(rounded.dtype).to(exact.dtype))
    rounded = rounded.to(exact.dtype)
    same = (rounded == exact) | (torch.isnan(rounded) & torch.isnan(exact))
    distance = (rounded - exact).abs()
    return torch.where(same, 0.0, torch.where(torch.isfinite(distance), distance, torch.inf))


def metadata(expected: torch.Tensor, actual: torch.Tensor, device: torch.device, owned: bool) -> Iterator[Difference]:
    """Yield the differences between two tensors except values. ``owned``: the caller passed the tensor."""
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
    """Yield every difference between the CPU's result and the device's.

    Args:
        expected: the CPU's tree of results.
        actual: the device's tree of results, on the device.
        device: the device that the tensors must be on.
        values: whether to compare values, and not only metadata.
        owned: whether the caller passed the tensors (in-place, ``out=``), so that their strides must match.
        allowed: (atol, rtol) in place of the dtype's defaults.
        exact: called if values differ; returns the CPU's tree of results in float64.

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
    """Return the leaf of the exact results with this index, or None if its path differs."""
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
    """Describe each tensor of the results: the same as an argument, a view of one with an offset, or new."""
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
    """Return (``argument[…]``, tensor) for every strided tensor of a tree."""
    return [
        (f"argument{path}", leaf)
        for path, leaf in leaves(tree)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
    ]
