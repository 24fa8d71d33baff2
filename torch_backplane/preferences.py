"""Libraries of heavy operators, and the user's preferences among them. `torch.backends.bp` is the users' API.

Separate from the operators, which are only declared when a device that runs kernels is discovered.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from torch_backplane import _C

DEFAULT = "default"

# The libraries of each family of operators. Of candidates with equal cost the first runs. The last one accepts every
# call. "host" is PyTorch's CPU library, on devices whose memory the host can access. "driver" is a library for the
# hardware that the device's driver provides, such as CLBlast and VkFFT on OpenCL. "generated" is Backplane's kernels.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "products": ("host", "driver", "generated"),
    "convolutions": ("host", "driver", "generated"),
    "attention": ("host", "driver", "generated"),
    "recurrent layers": ("host", "generated"),
    "transforms": ("host", "driver", "generated"),
    # Here "host" copies if the host cannot access the memory.
    "decompositions and solvers": ("driver", "host"),
}
_preferred = dict.fromkeys(LIBRARIES, DEFAULT)


def preferred(family: str) -> str:
    """The library that the user prefers for a family; "default" if none; "driver/KEY" for one of a driver's."""
    return _preferred[family]


def prefer(family: str, library: str, keys: Sequence[str] = ()) -> None:
    """Sets the preferred library of a family, on all devices.

    Args:
        family: a key of LIBRARIES.
        library: one of the family's libraries, or "default".
        keys: of the libraries that drivers have for the family (`drivers.libraries.Library`), which are accepted, too.

    Raises:
        ValueError: the family has no such library.
    """
    accepted = (DEFAULT, *LIBRARIES[family], *keys)
    if library not in accepted:
        raise ValueError(f"{family} have no library {library!r}: accepted are {', '.join(accepted)}")
    library = f"driver/{library}" if library in keys else library
    _set(family, library)


def _set(family: str, library: str) -> None:
    if library != _preferred[family]:
        _preferred[family] = library
        _C.advance_configuration_epoch()  # invalidates plans that use another library


@contextmanager
def preferring(family: str, library: str) -> Iterator[None]:
    """Context manager that sets the preferred library of a family, and restores it on exit."""
    before = _preferred[family]
    prefer(family, library)
    try:
        yield
    finally:
        _set(family, before)


class Divided(NamedTuple):
    """How matrix products of a dtype divide their sums among groups (split-K).

    Args:
        reduced: whether partial sums are rounded to the dtype. If not, they are kept in float32 together with their
            rounding errors.
        divides: whether sums can be divided at all.
    """

    reduced: bool = False
    divides: bool = True


_divided: dict[torch.dtype, Divided] = dict.fromkeys((torch.float16, torch.bfloat16), Divided())


def divided(dtype: torch.dtype) -> Divided:
    """The setting for a dtype. Only float16 and bfloat16 have one; other dtypes use the default."""
    return _divided.get(dtype, Divided())


def divide(dtype: torch.dtype, how: Divided) -> None:
    """Sets how products of float16 or bfloat16 divide their sums, on all devices."""
    if _divided[dtype] != how:
        _divided[dtype] = how
        _C.advance_configuration_epoch()


PRECISIONS = ("none", "ieee", "tf32")
_float32 = {"products": "none", "convolutions": "none"}
_half_sums = False


def float32_precision(family: str) -> str:
    """The precision in which libraries may compute float32: "ieee" or "tf32".

    If it was not set, it is what PyTorch allows CUDA, which `torch.set_float32_matmul_precision` also sets.

    Args:
        family: "products" or "convolutions".
    """
    if _float32[family] != "none":
        return _float32[family]
    return "tf32" if _C.float32_in_tf32()[tuple(_float32).index(family)] else "ieee"


def has_float32_precision(family: str) -> bool:
    """Whether float32 has a precision in a family of operators."""
    return family in _float32


def set_float32_precision(family: str, precision: str) -> None:
    """Sets the precision on all devices.

    Args:
        family: "products" or "convolutions".
        precision: one of PRECISIONS; "none" for that of PyTorch.

    Raises:
        ValueError: `precision` is none of these.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"fp32_precision must be one of {', '.join(PRECISIONS)}, but got {precision!r}")
    if precision != _float32[family]:
        _float32[family] = precision
        _C.advance_configuration_epoch()


@contextmanager
def computing_float32_in(family: str, precision: str | None) -> Iterator[None]:
    """Context manager that sets the precision, unless it is None, and restores it on exit."""
    before = _float32[family]
    set_float32_precision(family, before if precision is None else precision)
    try:
        yield
    finally:
        set_float32_precision(family, before)


def half_sums() -> bool:
    """Whether libraries may accumulate float16 products in float16."""
    return _half_sums


def allow_half_sums(allowed: bool) -> None:
    """Sets whether libraries may accumulate float16 products in float16, on all devices."""
    global _half_sums
    if allowed != _half_sums:
        _half_sums = allowed
        _C.advance_configuration_epoch()


NO_LIMIT = sys.maxsize
_workspace: int | None = None  # None until the environment has been read


def workspace() -> int | None:
    """The workspace limit of matrix products and convolutions in bytes; None for no limit.

    Raises:
        SettingError: TORCH_BACKPLANE_WORKSPACE is not a size.
    """
    global _workspace
    if _workspace is None:
        from torch_backplane.drivers.sizes import parse_size  # the import of the package imports no driver

        text = os.environ.get("TORCH_BACKPLANE_WORKSPACE")
        _workspace = parse_size(text, "TORCH_BACKPLANE_WORKSPACE") if text else NO_LIMIT
    return None if _workspace == NO_LIMIT else _workspace


def set_workspace(size: int) -> None:
    """Sets the workspace limit. It overrides the environment variable.

    Args:
        size: bytes; NO_LIMIT for no limit.

    Raises:
        TypeError: `size` is not an int.
        ValueError: `size` is negative or greater than NO_LIMIT.
    """
    global _workspace
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"the workspace size must be an int, but got {size!r}")
    if not 0 <= size <= NO_LIMIT:
        raise ValueError(f"the workspace size must not be negative, but got {size}")
    if size != _workspace:
        _workspace = size
        _C.advance_configuration_epoch()


INDUCTOR_BACKENDS = ("dialect", "triton")
_inductor_backend = INDUCTOR_BACKENDS[0]


def inductor_backend() -> str:
    """What torch.compile generates kernels in: one of INDUCTOR_BACKENDS."""
    return _inductor_backend


def set_inductor_backend(backend: str) -> None:
    """Sets what torch.compile generates kernels in from now on.

    Raises:
        ValueError: `backend` is none of INDUCTOR_BACKENDS.
    """
    global _inductor_backend
    if backend not in INDUCTOR_BACKENDS:
        raise ValueError(f"the backend of Inductor must be one of {', '.join(INDUCTOR_BACKENDS)}, but got {backend!r}")
    _inductor_backend = backend


_without_room: Counter[str] = Counter()


def count_without_room(candidate: str) -> None:
    """Counts a candidate that a planner skipped because its workspace exceeds the limit."""
    _without_room[candidate] += 1


def without_room() -> dict[str, int]:
    """How often planners skipped a candidate because its workspace exceeds the limit. Replays of plans do not count.

    The keys are candidates such as "convolutions: generated/winograd".
    """
    return dict(_without_room)
