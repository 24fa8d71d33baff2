"""Are these two results the same? The CPU's is right by definition."""

from __future__ import annotations

import cmath
from collections.abc import Iterator
from typing import Any

import torch

from torch_backplane.conformance.transfer import Transfer, leaves

# Tests of PyTorch's whose tolerances are about comparing values between implementations; an OpInfo's tolerances for
# others (gradcheck, tracing, extremal inputs) do not apply here.
_VALUE_TESTS = {None, "test_compare_cpu", "test_out", "test_noncontiguous_samples", "test_reference_numerics_small"}
_CPU = torch.device("cpu")

Difference = tuple[str, str]  # a kind of finding, and what to say


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
) -> Iterator[Difference]:
    """Every difference between the CPU's result and the device's.

    Args:
        expected: the CPU's tree of results.
        actual: the device's, as it came.
        device: where the device's tensors must be.
        values: compare the numbers too, not only what kind of tensors they are.
        owned: the tensors are the caller's (in-place, ``out=``): their strides are part of the promise.
        allowed: (atol, rtol) in place of the dtype's defaults.

    Yields:
        (kind, message) pairs; the message begins with the path of the leaf.
    """
    wanted, found = list(leaves(expected)), list(leaves(actual))
    if [path for path, _ in wanted] != [path for path, _ in found]:
        yield "structure", f"{_describe(actual)}, expected {_describe(expected)}"
        return
    host = Transfer(_CPU)
    for (path, want), (_, got) in zip(wanted, found, strict=True):
        where = f"result{path}: " if path else ""
        if isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
            different = list(metadata(want, got, device, owned))
            yield from ((kind, where + message) for kind, message in different)
            if values and not any(kind in ("dtype", "shape", "structure") for kind, _ in different):
                message = same_values(want.detach(), host(got.detach()), allowed)
                if message:
                    yield "values", where + message
        elif type(want) is not type(got):
            yield "structure", f"{where}{_describe(got)}, expected {_describe(want)}"
        elif values and not _same_object(want, got, device):
            yield "values", f"{where}{got!r}, expected {want!r}"


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
