"""Helpers that compare the results of an OpenCL device with those of the CPU."""

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
LAYOUTS = 2  # number of layouts in which `agrees` calls a function, and so of plans per call


def had(dtypes: Iterable[torch.dtype]) -> list[torch.dtype]:
    """Returns the `dtypes` that the device supports, for tests that loop over several."""
    return [dtype for dtype in dtypes if dtype in torch.bp.get_device_properties(DEVICE).dtypes]


def why_not(dtypes: Iterable[torch.dtype]) -> str | None:
    """Returns the skip reason of a test that needs all of `dtypes`; None if the device supports them."""
    dtypes = list(dtypes)
    there = had(dtypes)
    lacking = [str(dtype).removeprefix("torch.") for dtype in dtypes if dtype not in there]
    return f"the device has no {lacking[0]}" if lacking else None


def lacks_a_dtype_of(values: Any) -> bool:
    """Returns whether the device lacks the dtype of a tensor in `values`, a pytree."""
    return why_not(one.dtype for one in tree_iter(values) if isinstance(one, torch.Tensor)) is not None


def need(*dtypes: torch.dtype) -> None:
    """Skips the test if the device lacks one of `dtypes`. For dtypes among a test's parameters, `conftest.py` does
    this."""
    reason = why_not(dtypes)
    if reason:
        pytest.skip(reason)


def need_memory(bytes_: int) -> None:
    """Skips the test if the device cannot allocate this many bytes in one block."""
    try:
        torch.empty(bytes_, dtype=torch.uint8, device=DEVICE)
    except torch.OutOfMemoryError as error:
        pytest.skip(str(error).splitlines()[0])
    torch.accelerator.empty_cache()


def peak_memory(function: Callable[..., Any], *arguments: Any) -> int:
    """Returns the peak number of bytes that a call allocates, including its result. Garbage of earlier tests is
    collected first, because memory freed during the call would reduce the number.
    """
    gc.collect()
    torch.bp.synchronize()  # type: ignore[attr-defined]
    torch.bp.reset_peak_memory_stats()  # type: ignore[attr-defined]
    before = torch.bp.memory_allocated()  # type: ignore[attr-defined]
    result = function(*arguments)
    peak = torch.bp.max_memory_allocated()  # type: ignore[attr-defined]
    del result  # kept alive until here
    return int(peak - before)


def placed(
    tensor: torch.Tensor, device: str, strides: Sequence[int] | None = None, offset: int | None = None
) -> torch.Tensor:
    """Returns a copy with these strides and this storage offset; by default the same strides, and the same offset
    modulo 16.
    """
    strides = tensor.stride() if strides is None else strides
    offset = tensor.storage_offset() % 16 if offset is None else offset
    reach = (
        1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True)) if tensor.numel() else 0
    )
    memory = torch.empty(offset + reach, dtype=tensor.dtype, device=device)
    result = memory.as_strided(tensor.shape, strides, offset)
    single = tuple(
        slice(0, None if step else 1) for step in strides
    )  # PyTorch refuses writes to elements that share memory
    result[single].copy_(tensor[single])
    return result


def on_device(value: Any) -> Any:
    """Moves the tensors in `value` to the device, with the same strides and offset."""

    return tree_map_only(torch.Tensor, lambda tensor: placed(tensor, DEVICE), value)


def to_cpu(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), value)


@contextmanager
def plans_from_the_start() -> Iterator[None]:
    """Clears the plans and enables them, whatever TORCH_BACKPLANE_PLANS says. For tests that count plans."""
    mode = plans.mode()
    plans.clear()
    plans.set_mode("1")
    try:
        yield
    finally:
        plans.set_mode(mode)
        plans.clear()  # tests change the input of planners, such as the device's dialect


def agrees(function: Callable[..., Any], *arguments: Any, fallbacks: int | None = 0, **tolerances: float) -> None:
    """Asserts that `function` gives equal results, and leaves equal arguments, on the device and on the CPU.

    Calls it four times, because one call makes a plan and others replay it: with the arguments as they are, with other
    numbers, with another layout or fewer rows, and with the original arguments again. If the CPU refuses the changed
    arguments, the device must refuse them too.

    Args:
        fallbacks: the exact number of fallbacks in the first and the last call; None accepts any number.
    """
    _agrees_once(function, arguments, fallbacks, tolerances)
    for given in (other_numbers(arguments), elsewhere(arguments)):
        error = _raised(function, copied(given))
        if error is None:
            try:
                _agrees_once(function, given, None, tolerances)
            except AssertionError:
                # Some CPU kernels are wrong for some strides: compare with the CPU's result for the original layout.
                if not _same_numbers(given, arguments):
                    raise
                _agrees_once(function, given, None, tolerances, reference=copied(arguments))
        else:
            found = _raised(function, on_device(given))
            # CPU kernels of one operator differ in the exception type for an index out of bounds.
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
    """Compares one call on the device with one on the CPU, which gets `reference` if given, else `arguments`."""
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
    """Copies the tensors in `value`, with the same strides and offset."""
    return tree_map_only(torch.Tensor, lambda tensor: placed(tensor, "cpu"), value)


def other_numbers(arguments: Any) -> Any:
    """Returns the arguments with the elements of some tensors rotated by one, so that they stay valid (probabilities,
    indices in range). Rotates each floating-point or complex tensor, and the first tensor whatever its dtype. Other
    integers stay: they may be indices that depend on each other."""
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
    """Returns the arguments with other strides, another alignment or fewer rows. The test's seed decides which."""
    return _chances().choice(_CHANGES)(arguments)


def _chances() -> random.Random:
    """Returns this test's random generator. Its state continues from call to call."""
    if _chance.get("seed") != torch.initial_seed():
        _chance.update(seed=torch.initial_seed(), random=random.Random(torch.initial_seed()))
    return _chance["random"]


_chance: dict[str, Any] = {}


def _with_gaps(arguments: Any) -> Any:
    """Adds a gap after every element."""

    def spaced(tensor: torch.Tensor) -> torch.Tensor:
        return placed(tensor, "cpu", [2 * step for step in tensor.stride()])

    return tree_map_only(torch.Tensor, spaced, arguments)


def _transposed(arguments: Any) -> Any:
    """Makes the first dimension the fastest-varying one."""

    def transposed(tensor: torch.Tensor) -> torch.Tensor:
        return placed(
            tensor, "cpu", list(accumulate((1, *(max(1, size) for size in tensor.shape[:-1])), mul))[: tensor.dim()]
        )

    return tree_map_only(torch.Tensor, transposed, arguments)


def _shifted(arguments: Any) -> Any:
    """Places each tensor at storage offset 1, which is not aligned to 16 bytes."""

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return placed(tensor, "cpu", tensor.stride(), 1)

    return tree_map_only(torch.Tensor, shifted, arguments)


def _fewer(arguments: Any) -> Any:
    """Removes the last row of the first tensor, and of those with the same number of rows. The CPU may refuse that."""
    rows = next(
        (tensor.shape[0] for tensor in tree_iter(arguments) if isinstance(tensor, torch.Tensor) and tensor.dim()), 0
    )

    def without(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:-1] if tensor.dim() and tensor.shape[0] == rows > 1 else tensor

    return tree_map_only(torch.Tensor, without, arguments)


_CHANGES = (_with_gaps, _transposed, _shifted, _fewer)


def refused_alike(function: Callable[..., Any], *arguments: Any) -> None:
    """Asserts that the CPU refuses the call and that the device refuses it twice (planned, and with its signature
    known) with the same error type and message, and that no tensor changes."""
    with pytest.raises((RuntimeError, IndexError)) as expected:
        function(*arguments)
    given = on_device(arguments)
    for _ in range(2):
        with pytest.raises(expected.type) as found:
            function(*given)
        assert str(found.value) == str(expected.value)
    torch.testing.assert_close(to_cpu(given), arguments, rtol=0, atol=0, equal_nan=True)
