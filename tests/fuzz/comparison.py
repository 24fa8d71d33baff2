"""Compares the device's tensors with the CPU's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from torch_backplane.conformance.transfer import Transfer

# (relative, absolute). The absolute tolerance is multiplied by the largest value, because sums can cancel.
TOLERANCES = {
    torch.float64: (1e-9, 1e-10),
    torch.complex128: (1e-9, 1e-10),
    torch.float32: (2e-6, 4e-6),
    torch.complex64: (1e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
    torch.complex32: (2e-3, 1e-3),
}
WORSE = 20  # accepted multiple of the CPU's error
SHAKEN = 4  # accepted multiple of the change that rounding the operands causes
_WIDER = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex64": "complex128"}
_DEVICE = re.compile(r"bp:\d|bp\b|PrivateUse1|privateuseone(:\d)?|\bcpu\b|\bCPU\b")

Difference = tuple[str, str]


def plain(text: str) -> str:
    """Returns an error's text without devices, addresses and stack traces."""
    first = text.split("\nException raised from")[0].strip()
    first = re.sub(r"\b(?:torch\.(\w+)Tensor|(?:bp|CPU)(\w+)Type)\b", r"\1\2", first)
    return re.sub(r"0x[0-9a-f]+", "0x", _DEVICE.sub("DEVICE", first))


def compare(
    expected: Any, found: Any, values: bool = True, grad: bool = True, gradients: bool = False
) -> Iterator[Difference]:
    """Yields the differences between a value on the CPU and on the device.

    Args:
        values: compare values.
        grad: compare layouts and autograd properties; otherwise only values, dtypes and shapes.
        gradients: the value is a gradient: its layout is not compared, and its tolerance is larger, because it can be
            the small difference of large numbers.
    """
    wanted, structure = tree_flatten(expected)
    got, other_structure = tree_flatten(found)
    if str(structure) != str(other_structure) or [type(leaf) for leaf in wanted] != [type(leaf) for leaf in got]:
        yield "structure", f"{_brief(found)}, expected {_brief(expected)}"
        return
    for want, have in zip(wanted, got, strict=True):
        if isinstance(want, torch.Tensor):
            yield from _compare_tensors(want, have, values, grad, gradients)
        elif values and not _same_object(want, have):
            yield "values", f"{have!r}, expected {want!r}"


def shapes(value: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _same_object(want: Any, have: Any) -> bool:
    if isinstance(want, torch.device):
        return True
    if isinstance(want, (float, complex)):
        pair = [torch.tensor(number, dtype=torch.complex128) for number in (want, have)]
        return bool(torch.allclose(*pair, rtol=1e-4, atol=1e-4, equal_nan=True))
    return bool(want == have) or want != want


def _compare_tensors(
    want: torch.Tensor, have: torch.Tensor, values: bool, grad: bool, gradients: bool
) -> Iterator[Difference]:
    if want.dtype != have.dtype:
        yield "dtype", f"{have.dtype}, expected {want.dtype}"
        return
    if want.shape != have.shape:
        yield "shape", f"{tuple(have.shape)}, expected {tuple(want.shape)}"
        return
    if grad and (want.requires_grad != have.requires_grad or _is_leaf(want) != _is_leaf(have)):
        found, wanted = ((tensor.requires_grad, _is_leaf(tensor)) for tensor in (have, want))
        yield "grad", f"requires_grad and leaf: {found}, expected {wanted}"
    if want.layout != torch.strided:
        return
    if not grad:
        pass
    elif want.is_conj() != have.is_conj() or want.is_neg() != have.is_neg():
        yield "layout", "another lazy conjugate or negative bit"
    elif not gradients and _significant(want) != _significant(have):
        yield "layout", f"strides {have.stride()}, expected {want.stride()} of {tuple(want.shape)}"
    if values:
        want, have = want.detach(), have.detach().cpu()
        message = differ(want, have, least=10.0 if gradients else 1e-3)
        if message:
            yield "values", message


def _is_leaf(tensor: torch.Tensor) -> bool | str:
    """Returns `is_leaf`, or the error's text: PyTorch raises it for views whose base was modified in some ways."""
    try:
        return tensor.is_leaf
    except RuntimeError as error:
        return plain(str(error))


def _significant(tensor: torch.Tensor) -> list[int]:
    sizes = tensor.shape
    return [] if 0 in sizes else [stride for size, stride in zip(sizes, tensor.stride(), strict=True) if size > 1]


def differ(want: torch.Tensor, have: torch.Tensor, least: float = 1e-3) -> str | None:
    """Describes the difference between two CPU tensors of the same dtype and shape; None if it is within tolerance.

    The tolerance depends on the dtype and on the largest value, which counts as at least `least`.
    """
    dtype = want.dtype
    want, have = (_computable(tensor.resolve_conj().resolve_neg()) for tensor in (want, have))
    if torch.equal(want, have):
        return None
    if dtype not in TOLERANCES:
        apart = want != have
    else:
        relative, absolute = TOLERANCES[dtype]
        finite = want[torch.isfinite(want)].abs()
        largest = min(max(finite.max().item(), least), 1e4) if finite.numel() else 1.0
        apart = ~torch.isclose(have, want, rtol=relative, atol=absolute * largest, equal_nan=True)
    count = int(apart.sum())
    if not count:
        return None
    place = tuple(apart.nonzero()[0].tolist())
    numbers = f"{have[place].item()!r}, expected {want[place].item()!r} at {place}"
    return f"{numbers}; {count} of {want.numel()} differ ({dtype})"


def _computable(tensor: torch.Tensor) -> torch.Tensor:
    """Converts complex32, which has nearly no CPU operators, to complex64."""
    return tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor


_PLACE = r"\w+(?:\[\d+\])*"  # a name, or an element of a list


def without_out(line: str) -> tuple[str, str] | None:
    """Returns (the call without `out=`, the value of `out=`); None if the line has no `out=`."""
    found = re.fullmatch(rf"(?:\w+ = )?(.*), out=({_PLACE}|\(.*\))\)", line.strip())
    return (f"{found[1]})", found[2]) if found else None


def without_writing(line: str) -> tuple[str, str] | None:
    """Like `without_out`; also converts in-place methods to their out-of-place form."""
    found = re.fullmatch(rf"(?:\w+ = )?({_PLACE})\.([a-z]\w*[a-z0-9])_\((.*)\)", line.strip())
    return (f"{found[1]}.{found[2]}({found[3]})", found[1]) if found else without_out(line)


def as_computed(computed: Any, written: Any) -> bool:
    """Whether the `out=` tensors contain what the CPU computes without `out=`, in the CPU's compute dtype."""
    wanted, got = tree_flatten(computed)[0], tree_flatten(written)[0]
    if len(wanted) != len(got):
        return False
    for want, have in zip(wanted, got, strict=True):
        have = have.detach().cpu()
        if have.is_complex() and not want.is_complex():
            if bool(have.imag.any()):
                return False
            have = have.real
        if want.shape != have.shape or not torch.can_cast(have.dtype, want.dtype):
            return False
        if want.dtype != have.dtype and want.itemsize < 4 and not torch.equal(have.to(want.dtype).to(have.dtype), have):
            return False  # rounding to 16 bits must remain visible in a wider dtype
        if differ(want.detach(), have.to(want.dtype)) is not None:
            return False
    return True


def adopt(want: Any, have: Any) -> bool:
    """Copies the device's values to the CPU's tensors, bypassing autograd. Returns False if that is not possible."""
    for mine, theirs in zip(tree_flatten(want)[0], tree_flatten(have)[0], strict=False):
        if not isinstance(mine, torch.Tensor):
            continue
        if not isinstance(theirs, torch.Tensor) or mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return False
        if mine.layout != torch.strided or not mine.numel():
            continue
        if _significant(mine) != _significant(theirs):
            return False
        numbers = theirs.detach().cpu().resolve_conj().resolve_neg()
        mine_now, numbers_now = _computable(mine.detach()), _computable(numbers)
        if torch.equal(mine_now, numbers_now) and _same_zeros(mine_now, numbers_now):
            continue
        if mine.is_conj() or mine.is_neg():
            return False
        sizes = [1 if stride == 0 else size for size, stride in zip(mine.shape, mine.stride(), strict=True)]
        alias = torch.empty(0, dtype=mine.dtype)
        alias.set_(mine.untyped_storage(), mine.storage_offset(), sizes, mine.stride())
        try:
            alias.copy_(numbers[tuple(slice(0, size) for size in sizes)])
        except RuntimeError:  # an error of PyTorch for a lazy clone that out= has resized
            return False
    return True


def _same_zeros(want: torch.Tensor, have: torch.Tensor) -> bool:
    """Whether equal values also have the same signs of zeros, which some functions do not specify and others depend on.
    """
    if not want.is_floating_point() and not want.is_complex():
        return True
    parts = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in (want, have)]
    return torch.equal(*(part.resolve_neg().signbit() for part in parts))


def in_float64(names: dict[str, Any], line: str, shaken: bool = False) -> dict[str, Any]:
    """Runs a line on the CPU with all lower precisions replaced by float64. Returns the names, or {} if it cannot run.

    Args:
        shaken: first change each value randomly up or down by the relative precision of its dtype.
    """
    found = [dtype for dtype in _dtypes(names, line) if dtype.is_floating_point or dtype.is_complex]
    if len({torch.finfo(dtype).eps for dtype in found}) > 1 and "._foreach_" not in line:
        return {}  # the intended precision is unknown; foreach operators compute each tensor in its own precision
    wide = re.sub(r"torch\.(float16|bfloat16|float32|complex64)\b", lambda m: "torch." + _WIDER[m[1]], line)
    transfer = Transfer(torch.device("cpu"), wider=True)
    torch.set_default_dtype(torch.float64)  # PyTorch converts integers to the default dtype
    try:
        moved = {name: transfer(value) if re.fullmatch(r"t\d+", name) else value for name, value in names.items()}
        if shaken:
            eps = torch.finfo(found[0] if found else torch.float32).eps
            _shake([moved[name] for name in re.findall(r"\bt\d+\b", line) if name in moved], eps)
        exec(wide, moved)
    except Exception:
        return {}
    finally:
        torch.set_default_dtype(torch.float32)
    return moved


def _shake(values: list[Any], eps: float) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for leaf in {id(leaf): leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)}.values():
            if leaf.is_floating_point() or leaf.is_complex():
                signs = torch.randint(0, 2, leaf.shape, generator=generator, dtype=torch.int8) * 2 - 1
                leaf.mul_(1 + eps * signs)


def _dtypes(names: dict[str, Any], line: str) -> Iterator[torch.dtype]:
    """Yields the dtypes of the tensors in the line. For an element of a list, only that of the element."""
    for name, place in re.findall(r"\b(t\d+)(?:\[(\d+)\])?", line):
        value = names.get(name)
        if place and isinstance(value, (list, tuple)):
            value = value[int(place)]
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, torch.Tensor):
                yield leaf.dtype


def excused(exact: Any, want: Any, have: Any, shaken: Any = None) -> bool:
    """Whether the device's result `have` is about as close to `exact` (float64) as the CPU's result `want`, or as the
    precision of the operands allows. `shaken` is the float64 result of changed operands.
    """
    trees = [tree_flatten(tree)[0] for tree in (exact, want, have, exact if shaken is None else shaken)]
    if len({len(leaves) for leaves in trees}) > 1:
        return False
    for truth, mine, theirs, near in zip(*trees, strict=True):
        if not isinstance(mine, torch.Tensor):
            continue
        mine, theirs = mine.detach(), theirs.detach().cpu()
        if mine.shape != theirs.shape:
            return False
        if mine.dtype != theirs.dtype:  # for example batch norm's statistics; compare in the lower precision
            if not (mine.is_floating_point() and theirs.is_floating_point()):
                return False
            fewer = max(mine.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            mine, theirs = mine.to(fewer), theirs.to(fewer)
        message = differ(mine, theirs)
        if message is None:
            continue
        if not isinstance(truth, torch.Tensor) or truth.shape != mine.shape or mine.dtype not in TOLERANCES:
            return False
        truth = truth.detach().to(torch.complex128 if truth.dtype.is_complex else torch.float64)
        rounded = truth.to(mine.dtype).to(truth.dtype)
        of_cpu, of_bp = (_distance(tensor.to(truth.dtype), truth, rounded) for tensor in (mine, theirs))
        scale = truth[torch.isfinite(truth)].abs()
        allowed = TOLERANCES[mine.dtype][1] * (scale.max().item() if scale.numel() else 1.0)
        moves = (near.detach().to(truth.dtype) - truth).abs().nan_to_num()
        if bool((of_bp > WORSE * of_cpu + SHAKEN * moves + allowed).any()):
            return False
    return True


def _distance(numbers: torch.Tensor, truth: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    same = (numbers == rounded) | (torch.isnan(numbers) & torch.isnan(truth))
    distance = (numbers - truth).abs()
    return torch.where(same, 0.0, torch.where(torch.isfinite(distance), distance, torch.inf))


def _brief(value: Any) -> str:
    leaves = tree_flatten(value)[0]
    return f"{type(value).__name__} of {[type(leaf).__name__ for leaf in leaves]}"
