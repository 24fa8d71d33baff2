"""Which libraries there are for heavy operators, and which of them the user prefers (`torch.backends.bp`).

Kept apart from the operators, which are declared when a device that runs kernels is found.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from torch_backplane import _C

DEFAULT = "default"

# The libraries of each family of operators, in the order in which they are tried; the last one takes every call.
# "host" is PyTorch's own for the CPU, on devices whose memory it sees; "driver" is one for the hardware, which the
# device's driver brings (CLBlast and VkFFT on OpenCL's); "generated" are our kernels.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "products": ("host", "driver", "generated"),
    "convolutions": ("host", "generated"),
    "attention": ("host", "generated"),
    "recurrent layers": ("host", "generated"),
    "transforms": ("host", "driver", "generated"),
    # Decompositions, solvers, eigenvalues: PyTorch's on the CPU, with copies where the host does not see the memory.
    "linear algebra": ("host",),
}
_preferred = dict.fromkeys(LIBRARIES, DEFAULT)


def preferred(family: str) -> str:
    """The library that is tried first; "default" where the order is that of LIBRARIES."""
    return _preferred[family]


def prefer(family: str, library: str) -> None:
    """Has `library` tried first from now on, on all devices.

    Raises:
        ValueError: the family has no such library; the message names those that it has.
    """
    accepted = (DEFAULT, *LIBRARIES[family])
    if library not in accepted:
        raise ValueError(f"{family} have no library {library!r}: accepted are {', '.join(accepted)}")
    if library != _preferred[family]:
        _preferred[family] = library
        _C.advance_configuration_epoch()  # plans were made with another one


@contextmanager
def preferring(family: str, library: str) -> Iterator[None]:
    """`prefer`, and as it was before afterwards."""
    before = _preferred[family]
    prefer(family, library)
    try:
        yield
    finally:
        prefer(family, before)


class Divided(NamedTuple):
    """How products of a dtype may divide their sums.

    Args:
        reduced: parts are kept in the dtype, which rounds them, and not in float32 with what they have lost.
        divides: whether sums may be divided at all.
    """

    reduced: bool = False
    divides: bool = True


_divided: dict[torch.dtype, Divided] = dict.fromkeys((torch.float16, torch.bfloat16), Divided())


def divided(dtype: torch.dtype) -> Divided:
    """Of float16 and bfloat16 as was set; others are divided and not rounded."""
    return _divided.get(dtype, Divided())


def divide(dtype: torch.dtype, how: Divided) -> None:
    """From now on, on all devices. Of float16 or bfloat16."""
    if _divided[dtype] != how:
        _divided[dtype] = how
        _C.advance_configuration_epoch()


NO_LIMIT = sys.maxsize
_workspace: int | None = None  # until the environment was asked


def workspace() -> int | None:
    """Bytes that a product or a convolution may take beside operands and results; None: any number.

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
    """`size` from now on, whatever the environment says; NO_LIMIT: any number.

    Raises:
        TypeError, ValueError: it is no number of bytes.
    """
    global _workspace
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"a workspace has a whole number of bytes, and got {size!r}")
    if not 0 <= size <= NO_LIMIT:
        raise ValueError(f"a workspace has 0 bytes or more, and got {size}")
    if size != _workspace:
        _workspace = size
        _C.advance_configuration_epoch()


_without_room: Counter[str] = Counter()


def count_without_room(candidate: str) -> None:
    """Once more a planner has left this one out, as it needs more than `workspace()`."""
    _without_room[candidate] += 1


def without_room() -> dict[str, int]:
    """Which candidates were left out for want of workspace, such as "convolutions: generated/winograd", and how often
    planners did so: a plan that is replayed counts once.
    """
    return dict(_without_room)
