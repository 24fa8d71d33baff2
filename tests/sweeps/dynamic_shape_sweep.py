"""PyTorch's operator database with changing shapes: each replayed plan is compared with its planner.

Each example is called as it is and in variants: all sizes increased, one size 0, 1 or larger, other layouts and storage
offsets, other integers where arguments equal sizes, in place and with `out=`. So classes of calls get many shapes and
dynamic-shape plans, and TORCH_BACKPLANE_PLANS=check reports plans that differ from their planners, or that are replayed
where their planners refuse the call. Results are not checked.

    python tests/sweeps/dynamic_shape_sweep.py --match '^(add|sum)$' --dtypes float32,int64

exits with status 1 if there are findings, and prints which classes have no dynamic-shape plan, and why.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from torch_backplane import _C, plans

DEVICE = "bp:0"
DTYPES = ("float32", "int64", "bool")  # the first that an operator supports
_WORDS = ("has a plan, and its planner now", "is not what its planner does")
# These fall back to PyTorch's CPU kernels, which crash on some variants, on the CPU, too.
_LEFT_OUT = (
    "_segment_reduce.lengths", "_segment_reduce.offsets", "linalg.lstsq", "linalg.lstsq.grad_oriented", "linalg.lu",
    "lu_unpack",
)  # fmt: skip
_MAX_ELEMENTS = 20_000  # per tensor of an example
_MAX_TENSORS = 40

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Finding(NamedTuple):
    operator: str
    dtype: str
    text: str  # the error of the check, with the arguments


def findings(
    info: Any, dtype: torch.dtype, *, samples: int = 40, seconds: float = 20.0, seed: int = 0
) -> list[Finding]:
    """Returns the findings of one entry of the database, one for each first line of an error."""
    torch.manual_seed(seed)
    chance, found, until = random.Random(seed), dict[str, Finding](), time.monotonic() + seconds
    try:
        examples = list(info.sample_inputs("cpu", dtype))
    except Exception:
        return []  # needs a library that is not installed
    chance.shuffle(examples)
    mode = plans.mode()
    plans.set_mode("check")
    try:
        for sample in examples[:samples]:
            given = (sample.input, *sample.args), dict(sample.kwargs)
            if not _is_small(given):
                continue
            for function, arguments in _calls(info, given, chance):
                try:
                    function(*arguments[0], **arguments[1])
                except Exception as error:
                    text = str(error)
                    if any(words in text for words in _WORDS):
                        found.setdefault(text.partition("\n")[0], Finding(full_name(info), str(dtype), text))
                _forget_errors()
            if time.monotonic() > until:
                break
    finally:
        plans.set_mode(mode)
    return list(found.values())


def full_name(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else str(info.name)


def _forget_errors() -> None:
    """Discards errors of kernels, such as an index out of range in a variant."""
    with contextlib.suppress(Exception):
        torch.accelerator.synchronize(DEVICE)


def _is_small(given: Arguments) -> bool:
    leaves = tree_leaves(given)
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    strided = all(one.layout == torch.strided for one in tensors)
    return strided and 0 < len(tensors) <= _MAX_TENSORS and max(one.numel() for one in tensors) <= _MAX_ELEMENTS


def _calls(info: Any, given: Arguments, chance: random.Random) -> Iterator[tuple[Callable[..., Any], Arguments]]:
    """Yields functions and their arguments on the device."""
    for variant in _variants(given, chance):
        yield info.op, _placed(variant)
        if info.inplace_variant is not None:
            yield info.inplace_variant, _placed(variant)
        if info.supports_out:
            yield from _with_out(info, variant, chance)


def _with_out(info: Any, given: Arguments, chance: random.Random) -> Iterator[tuple[Callable[..., Any], Arguments]]:
    positional, named = _placed(given)
    try:
        result = info.op(*positional, **named)
    except Exception:
        return
    finally:
        _forget_errors()
    layout = chance.choice(LAYOUTS)
    if all(isinstance(one, torch.Tensor) for one in tree_leaves(result)):
        out = tree_map_only(torch.Tensor, lambda one: layout(torch.zeros(one.shape, dtype=one.dtype)), result)
        out = _placed(out)
        yield info.op, (positional, {**named, "out": out if isinstance(out, torch.Tensor) else tuple(out)})


# --- variants


def _variants(given: Arguments, chance: random.Random) -> Iterator[Arguments]:
    yield given
    sizes = {size for one in tree_leaves(given) if isinstance(one, torch.Tensor) for size in one.shape if size > 1}
    grown = [{size: size + by for size in sizes} for by in (1, 2, 5)]
    for change in grown:
        yield _resized(given, change)
        yield _with_numbers(_resized(given, change), change)
    for layout in LAYOUTS:
        for change in ({}, *chance.sample(grown, 2)):
            yield tree_map_only(torch.Tensor, layout, _resized(given, change))
    tensors = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
    for position, tensor in enumerate(tensors[:3]):
        for dim in range(min(tensor.dim(), 3)):
            for size in chance.sample([0, 1, tensor.shape[dim] + 1, tensor.shape[dim] + 3], 2):
                yield _resized_alone(given, position, dim, size)
        yield _changed_alone(given, position, chance.choice(LAYOUTS))


def _filled(tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Repeats the tensor's elements, so they stay valid for the operator: indices, probabilities."""
    if list(tensor.shape) == shape:
        return tensor
    flat = tensor.detach().reshape(-1)
    count = torch.Size(shape).numel()
    if not flat.numel():
        return torch.zeros(shape, dtype=tensor.dtype)
    return flat[torch.arange(count) % flat.numel()].reshape(shape)


def _resized(given: Arguments, change: dict[int, int]) -> Any:
    """Changes sizes in all tensors."""
    return tree_map_only(torch.Tensor, lambda one: _filled(one, [change.get(size, size) for size in one.shape]), given)


def _with_numbers(given: Arguments, change: dict[int, int]) -> Any:
    """Changes integer arguments that equal a changed size."""
    return tree_map(lambda one: change.get(one, one) if type(one) is int else one, given)


def _resized_alone(given: Arguments, position: int, dim: int, size: int) -> Any:
    def resized(tensor: torch.Tensor) -> torch.Tensor:
        if dim >= tensor.dim():
            return tensor
        return _filled(tensor, [*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]])

    return _changed_alone(given, position, resized)


def _changed_alone(given: Arguments, position: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Changes the tensor at one position."""
    at = iter(range(_MAX_TENSORS + 1))
    return tree_map_only(torch.Tensor, lambda one: change(one) if next(at) == position else one, given)


def _as_it_lies(tensor: torch.Tensor, memory: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Copies the tensor into memory with the strides of `memory`, at an offset."""
    room = torch.zeros(offset + memory.numel(), dtype=tensor.dtype)
    return room[offset:].view(memory.shape).as_strided(tensor.shape, memory.stride(), offset).copy_(tensor.detach())


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    return _as_it_lies(tensor, torch.empty(tensor.shape), 1)


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        return tensor
    return _as_it_lies(tensor, torch.empty(*tensor.shape[:-1], tensor.shape[-1] + 3))


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    return tensor.detach().transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()[:1].clone().expand(tensor.shape) if tensor.dim() and tensor.shape[0] else tensor


LAYOUTS = (shifted, spaced, transposed, channels_last, expanded)


def _placed(given: Any) -> Any:
    """Copies to the device, with the same strides and the same storage offset modulo 16."""

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        offset = tensor.storage_offset() % 16
        room = torch.empty(offset + (reach if tensor.numel() else 0), dtype=tensor.dtype, device=DEVICE)
        found = room.as_strided(tensor.shape, tensor.stride(), offset)
        single = tuple(slice(0, None if step else 1) for step in tensor.stride())
        found[single].copy_(tensor.detach()[single])
        return found

    return tree_map_only(torch.Tensor, placed, given)


# --- the command


def entries(pattern: str, dtypes: list[str]) -> Iterator[tuple[Any, torch.dtype]]:
    """Yields matching operators with each supported dtype of `dtypes`, or the first supported of DTYPES."""
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if re.search(pattern, full_name(info)) and full_name(info) not in _LEFT_OUT:
            taken = [dtype for name in dtypes or DTYPES if (dtype := getattr(torch, name)) in info.dtypes]
            yield from ((info, dtype) for dtype in (taken if dtypes else taken[:1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--match", default="", help="regular expression of operator names")
    parser.add_argument(
        "--dtypes", default="", help=f"dtypes to test (default: the first supported of {','.join(DTYPES)})"
    )
    parser.add_argument("--samples", type=int, default=40, help="maximum per operator and dtype")
    parser.add_argument("--seconds", type=float, default=20.0, help="maximum per operator and dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", default="1/1", help="2/3: the second third, for parallel processes")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    part, parts = map(int, options.part.split("/"))
    chosen = list(entries(options.match, [one for one in options.dtypes.split(",") if one]))[part - 1 :: parts]
    found: list[Finding] = []
    for info, dtype in chosen:
        begin = time.monotonic()
        new = findings(info, dtype, samples=options.samples, seconds=options.seconds, seed=options.seed)
        found += new
        for one in new:
            print(f"FOUND {one.operator} {one.dtype}: {one.text[:1500]}\n", flush=True)
        print(f"{full_name(info)} {dtype}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    _tell_coverage()
    print(f"{len(found)} findings in {len(chosen)} entries")
    return 1 if found else 0


def _tell_coverage() -> None:
    counts = _C.plan_counts()
    classes, served = (sum(one[count] for one in counts.values()) for count in ("classes", "dynamic_shape_classes"))
    reasons: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name, one in counts.items():
        for reason in one["reasons_for_exact"]:
            reasons[re.sub(r"[\[(].*", "", reason)[:120]][name] += 1
    for reason, names in sorted(reasons.items(), key=lambda pair: -pair[1].total()):
        print(f"{names.total():5} {reason}: {', '.join(name for name, _ in names.most_common(6))}")
    print(f"{served} of {classes} classes that met a second shape have a dynamic-shape plan")


if __name__ == "__main__":
    sys.exit(main())
