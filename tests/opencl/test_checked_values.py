"""Values in memory that PyTorch refuses: the next synchronization raises the error, and the device stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from agreement import DEVICE
from torch import Tensor
from torch.nn import functional as F

NAN, INFINITY = float("nan"), float("inf")


class Case(NamedTuple):
    function: Callable[[Tensor], Any]  # takes the values; its result does not depend on random numbers
    good: list[Any]
    bad: list[list[Any]]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


def like(values: Tensor, *data: float) -> Tensor:
    """Returns `data` on the device of the values, in their dtype if it is a floating-point dtype, else in float32."""
    dtype = values.dtype if values.is_floating_point() else torch.float32
    return torch.tensor(data, dtype=dtype, device=values.device)


INTEGERS = (torch.int64,)
CHANCES = [[0.0, -0.25], [NAN, 1.0], [0.5, 1.25], [-INFINITY, 0.0], [1.0, INFINITY]]
WEIGHTS = [[0.0, -1.0], [NAN, 1.0], [INFINITY, 1.0], [0.0, 0.0]]
SINGLE = (torch.float32,)

CASES: dict[str, Case] = {
    "bernoulli": Case(lambda p: torch.bernoulli(p), [0.0, 1.0], CHANCES),
    "bernoulli_": Case(lambda p: torch.empty(3, 2, device=p.device).bernoulli_(p), [0.0, 1.0], CHANCES),
    "bernoulli_ of integers": Case(
        lambda p: torch.empty(2, dtype=torch.int32, device=p.device).bernoulli_(p), [0.0, 1.0], CHANCES
    ),
    "bernoulli out=": Case(
        lambda p: torch.bernoulli(p, out=torch.empty(2, dtype=torch.bool, device=p.device)), [0.0, 1.0], CHANCES
    ),
    "multinomial": Case(lambda w: torch.multinomial(w, 1), [0.0, 2.0], WEIGHTS),
    "multinomial of rows": Case(
        lambda w: torch.multinomial(torch.stack([like(w, 1, 0), w]), 1, replacement=True), [0.0, 2.0], WEIGHTS
    ),
    "multinomial of several": Case(lambda w: torch.multinomial(w, 2).sort()[0], [1.0, 2.0], WEIGHTS),
    "binary_cross_entropy": Case(lambda x: F.binary_cross_entropy(x, like(x, 0, 1)), [0.0, 1.0], CHANCES),
    "binary_cross_entropy target": Case(lambda x: F.binary_cross_entropy(like(x, 0.25, 1), x), [0.0, 1.0], CHANCES),
    "binary_cross_entropy without reduction": Case(
        lambda x: F.binary_cross_entropy(x, like(x, 0, 1), like(x, 1, 2), reduction="none"), [0.0, 1.0], CHANCES
    ),
    "normal": Case(lambda s: torch.normal(1.0, s), [0.0, 0.0], [[0.0, -1.0], [NAN, 1.0]]),
    "normal of two": Case(lambda s: torch.normal(like(s, 2, 3), s), [0.0, 0.0], [[0.0, -1.0], [NAN, 1.0]]),
    "poisson": Case(lambda r: torch.poisson(r), [0.0, 0.0], [[0.0, -1.0], [NAN, 1.0]]),
    "searchsorted": Case(
        lambda s: torch.searchsorted(like(s, 3, 1, 2), like(s, 2.5), sorter=s),
        [1, 2, 0],
        [[1, 2, 3], [-1, 0, 2], [1, 2, 2**40]],
        INTEGERS,
    ),
    "repeat_interleave": Case(lambda n: torch.repeat_interleave(n), [1, 2], [[1, -1], [-3, 9]], INTEGERS),
    "repeat_interleave of a known size": Case(
        lambda n: torch.repeat_interleave(n, output_size=3), [1, 2], [[1, 3], [1, 1]], INTEGERS
    ),
    "negative repeat_interleave of a known size": Case(
        lambda n: torch.repeat_interleave(n, output_size=3), [0, 1, 2], [[0, -1, 4]], INTEGERS
    ),
    "bincount": Case(lambda n: torch.bincount(n), [1, 2], [[1, -1]], INTEGERS),
    "histc": Case(lambda x: torch.histc(x, 4), [1.0, 2.0], [[1.0, NAN], [1.0, INFINITY]], SINGLE),
}


def outcome(function: Callable[[Tensor], Any], values: Tensor) -> Any:
    """Returns the result, or the error's type and message."""
    try:
        result = function(values)
        torch.bp.synchronize()
        return result.cpu()
    except (RuntimeError, IndexError) as error:
        return type(error), str(error)


@pytest.mark.filterwarnings("ignore:.* has no kernel for")
@pytest.mark.parametrize("name", CASES)
def test_bad_values_between_good_ones_are_refused_like_on_the_cpu(name: str) -> None:
    function, good, bad, dtypes = CASES[name]
    for dtype in dtypes:
        for values in [good, *(one for each in bad for one in (each, good))]:
            given = torch.tensor(values, dtype=dtype)
            expected, found = outcome(function, given), outcome(function, given.to(DEVICE))
            assert isinstance(expected, tuple) == (values != good)
            if isinstance(expected, tuple):
                assert found == expected, values
            else:
                torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("at", [0, 15, 16, 1023, 1024, 4999])
@pytest.mark.parametrize("shape", [(5000,), (50, 100), (100, 50, 2)])
def test_bad_value_is_found_at_any_position(at: int, shape: tuple[int, ...]) -> None:
    whole = torch.full(shape, 0.5)
    given = whole if len(shape) == 1 else whole.transpose(0, 1) if len(shape) == 2 else whole[..., 0]
    given = given.to(DEVICE) if len(shape) < 3 else whole.to(DEVICE)[..., 0]
    torch.bernoulli(given)
    torch.bp.synchronize()
    given[tuple(index.item() for index in torch.unravel_index(torch.tensor(at), given.shape))] = 2
    torch.bernoulli(given)
    with pytest.raises(RuntimeError, match="Expected p_in >= 0 && p_in <= 1"):
        torch.bp.synchronize()
    torch.bernoulli(given.clamp(max=1))
    torch.bp.synchronize()


def test_reading_a_valid_result_synchronizes_once() -> None:
    """The memory words in which kernels report errors are copied before the wait for the result."""
    from torch_backplane.drivers.opencl.device import Stream

    table = torch.arange(12.0, device=DEVICE).reshape(4, 3)
    good, bad = torch.tensor([0, 3], device=DEVICE), torch.tensor([0, 4], device=DEVICE)
    found = []
    for index in (good, good, bad, good, bad):
        with mock.patch.object(Stream, "synchronize", autospec=True, side_effect=Stream.synchronize) as wait:
            result: Any = F.embedding(index, table).sum()
            try:
                result = result.item()
            except IndexError:
                result = "refused"
        found.append((result, wait.call_count))
    # The first call builds kernels. After an error, a second wait is for the commands that are still pending.
    assert found[1:] == [(33.0, 1), ("refused", 2), (33.0, 1), ("refused", 2)], found
