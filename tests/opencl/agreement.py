"""Comparing what an OpenCL device computes with what the CPU does."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_iter, tree_map_only

import torch_backplane
from torch_backplane import plans

DEVICE = "bp:0"
LAYOUTS = 2  # in which `agrees` calls a function: as many plans there are of a call


def had(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Those of `dtypes` that the device has: for tests that go through several."""
    return [dtype for dtype in dtypes if dtype in torch.bp.get_device_properties(DEVICE).dtypes]


def why_not(dtypes: Iterable[torch.dtype]) -> str | None:
    """Why a test that needs all of `dtypes` skips; None if it does not."""
    dtypes = list(dtypes)
    there = had(dtypes)
    lacking = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in there]
    return f"the device has no {lacking[0]}" if lacking else None


def lacks_a_dtype_of(values: Any) -> bool:
    """Whether the device lacks the dtype of a tensor among `values`, which may be nested."""
    return why_not(one.dtype for one in tree_iter(values) if isinstance(one, torch.Tensor)) is not None


def need(*dtypes: torch.dtype) -> None:
    """Skips the test on a device that lacks one of `dtypes`. Those that a test has among its parameters are needed
    without a call of this (`conftest.py`)."""
    reason = why_not(dtypes)
    if reason:
        pytest.skip(reason)


def need_memory(bytes_: int) -> None:
    """Skips the test on a device that has less, or gives less in one piece."""
    try:
        torch.empty(bytes_, dtype=torch.uint8, device=DEVICE)
    except torch.OutOfMemoryError as error:
        pytest.skip(str(error).splitlines()[0])
    torch.accelerator.empty_cache()


def peak_memory(function: Callable[..., Any], *arguments: Any) -> int:
    """Bytes that a call has at its peak, its result among them. What earlier tests left behind is let go of before:
    memory that came back during the call would count as less.
    """
    gc.collect()
    torch.bp.synchronize()  # type: ignore[attr-defined]
    torch.bp.reset_peak_memory_stats()  # type: ignore[attr-defined]
    before = torch.bp.memory_allocated()  # type: ignore[attr-defined]
    result = function(*arguments)
    peak = torch.bp.max_memory_allocated()  # type: ignore[attr-defined]
    del result  # lived until now
    return int(peak - before)


def placed(
    tensor: torch.Tensor, device: str, strides: Sequence[int] | None = None, offset: int | None = None
) -> torch.Tensor:
    """A copy with the same strides, at the same distance from the start of memory, or with others."""
    strides = tensor.stride() if strides is None else strides
    offset = tensor.storage_offset() % 16 if offset is None else offset
    reach = (
        1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)) if tensor.numel() else 0
    )
    memory = torch.empty(offset + reach, dtype=tensor.dtype, device=device)
    result = memory.as_strided(tensor.shape, strides, offset)
    single = tuple(
        slice(0, None if step else 1) for step in strides
    )  # where elements are one in memory, writes are refused
    result[single].copy_(tensor[single])
    return result


def on_device(value: Any) -> Any:
    """Tensors in `value` moved to the device, with the same strides and at the same offset."""

    return tree_map_only(torch.Tensor, lambda tensor: placed(tensor, DEVICE), value)


def to_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value)


@contextmanager
def plans_from_the_start() -> Iterator[None]:
    """For tests that count plans: there are none, and they are used, whatever TORCH_BACKPLANE_PLANS says."""
    mode = plans.mode()
    plans.clear()
    plans.set_mode("1")
    try:
        yield
    finally:
        plans.set_mode(mode)
        plans.clear()  # tests change what planners go by, such as the device's dialect


def agrees(function: Callable[..., Any], *arguments: Any, fallbacks: int | None = 0, **tolerances: float) -> None:
    """Calls `function` on the device and on the CPU: equal results, and equal arguments afterwards. Four times, as
    plans are made by one call and replayed by others: as it is, with other numbers, in another layout or with fewer
    rows (the CPU may refuse these, and so must the device), and as it is. `fallbacks`: how many operators may run on
    the CPU in the first and the last call; None: any number."""
    _agrees_once(function, arguments, fallbacks, tolerances)
    for given in (other_numbers(arguments), elsewhere(arguments)):
        error = _raised(function, copied(given))
        if error is None:
            try:
                _agrees_once(function, given, None, tolerances)
            except AssertionError:
                # Some of the CPU's kernels are wrong about strides; then it has itself against it.
                if not _same_numbers(given, arguments):
                    raise
                _agrees_once(function, given, None, tolerances, reference=copied(arguments))
        else:
            found = _raised(function, on_device(given))
            # Some of the CPU's kernels of an operator have one type for an index out of bounds, some the other.
            found_late = isinstance(found, IndexError) and "out of bounds" in str(error)
            assert type(found) is type(error) or found_late, f"{found!r}; the CPU: {error!r}"
    _agrees_once(function, arguments, fallbacks, tolerances)


def _same_numbers(first: Any, second: Any) -> bool:
    try:
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def _raised(function: Callable[..., Any], arguments: Any) -> Exception | None:
    try:
        function(*arguments)
        torch.accelerator.synchronize()
    except Exception as error:
        return error
    return None


def _agrees_once(
    function: Callable[..., Any],
    arguments: Any,
    fallbacks: int | None,
    tolerances: dict[str, float],
    reference: Any = None,
) -> None:
    """One call on both; on the CPU with `reference`, or else the same arguments."""
    reference = copied(arguments) if reference is None else reference
    expected = function(*reference)
    given = on_device(arguments)
    torch_backplane._C.reset_fallback_counts()
    found = function(*given)
    fell_back = torch_backplane._C.fallback_counts()
    torch.testing.assert_close(to_cpu(found), expected, equal_nan=True, **tolerances)
    torch.testing.assert_close(to_cpu(given), reference, equal_nan=True, **tolerances)
    if fallbacks is not None:
        assert sum(fell_back.values()) == fallbacks, fell_back


def copied(value: Any) -> Any:
    """Tensors in `value` copied, with the same strides and at the same offset."""
    return tree_map_only(torch.Tensor, lambda tensor: placed(tensor, "cpu"), value)


def other_numbers(arguments: Any) -> Any:
    """The arguments with each number in another place, so that they stay what the function wants (probabilities,
    indices that exist): in each floating-point tensor and in the first, whatever its dtype. Other integers stay: they
    may be indices that belong together."""
    first = True

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal first
        chosen = first or tensor.dtype.is_floating_point or tensor.dtype.is_complex
        first = False
        if not chosen or tensor.numel() < 2:
            return tensor
        rolled = tensor.reshape(-1).roll(1).reshape(tensor.shape)
        return placed(rolled, "cpu", tensor.stride(), tensor.storage_offset() % 16)

    return tree_map_only(torch.Tensor, moved, arguments)


def elsewhere(arguments: Any) -> Any:
    """The arguments with other strides, at another alignment, or fewer: one of these, by the test's seed."""
    return _chances().choice(_CHANGES)(arguments)


def _chances() -> random.Random:
    """Of this test's own, going on from call to call."""
    if _chance.get("seed") != torch.initial_seed():
        _chance.update(seed=torch.initial_seed(), random=random.Random(torch.initial_seed()))
    return _chance["random"]


_chance: dict[str, Any] = {}


def _with_gaps(arguments: Any) -> Any:
    """A gap after every element."""

    def spaced(tensor: torch.Tensor) -> torch.Tensor:
        return placed(tensor, "cpu", [2 * step for step in tensor.stride()])

    return tree_map_only(torch.Tensor, spaced, arguments)


def _turned(arguments: Any) -> Any:
    """The first dimension the fastest."""

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        return placed(
            tensor, "cpu", list(accumulate((1, *(max(1, size) for size in tensor.shape[:-1])), mul))[: tensor.dim()]
        )

    return tree_map_only(torch.Tensor, turned, arguments)


def _shifted(arguments: Any) -> Any:
    """One element behind a multiple of 16 bytes."""

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return placed(tensor, "cpu", tensor.stride(), 1)

    return tree_map_only(torch.Tensor, shifted, arguments)


def _fewer(arguments: Any) -> Any:
    """Without the last row of the first tensor, and of those that have as many. The CPU may refuse that."""
    rows = next(
        (tensor.shape[0] for tensor in tree_iter(arguments) if isinstance(tensor, torch.Tensor) and tensor.dim()), 0
    )

    def without(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-1] if tensor.dim() and tensor.shape[0] == rows > 1 else tensor

    return tree_map_only(torch.Tensor, without, arguments)


_CHANGES = (_with_gaps, _turned, _shifted, _fewer)


def refused_alike(function: Callable[..., Any], *arguments: Any) -> None:
    """The CPU refuses the call, and the device twice (planned, and once it is known) with the same error in the same
    words; no tensor is changed."""
    with pytest.raises((RuntimeError, IndexError)) as expected:
        function(*arguments)
    given = on_device(arguments)
    for _ in range(2):
        with pytest.raises(expected.type) as found:
            function(*given)
        assert str(found.value) == str(expected.value)
    torch.testing.assert_close(to_cpu(given), arguments, rtol=0, atol=0, equal_nan=True)
