"""The slot for libraries that compute on a device, such as a vendor's: one slot for all families of operators.

A routine is a function of C, `int routine(void* queue, const argument_t* arguments, uint64_t count)`, as any function
of a library that planners call (docs/write-an-operator.md): it enqueues its work on the native queue, and returns 0 or
a status of its own. So it is used on devices that have a native launcher. Its arguments are those of its family:
memory, numbers of the dtype, and integers of 64 bits; and where it has a workspace query, memory for the workspace and
the number of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch


class Family(NamedTuple):
    """What routines of a family compute, and the names of their arguments in order.

    The first memory is the result. The rest is only read, except where the family says otherwise.
    """

    computes: str
    memory: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()


# docs/write-a-driver.md has the meaning of each argument. The arguments of a family without any are not settled: no
# planner calls it yet.
FAMILIES: Mapping[str, Family] = {
    "matmul": Family(
        "matrix products",
        memory=("c", "a", "b"),
        numbers=("alpha", "beta"),
        integers=(
            "batch", "rows", "columns", "depth", "c_row", "a_row", "b_row", "a_transposed", "b_transposed",
            "c_step", "a_step", "b_step",
        ),
    ),
    "fft": Family(
        "Fourier transforms",
        memory=("out", "x"),
        integers=("kind", "inverse", "batch", "outer", "middle", "inner"),
    ),
    "convolution": Family("convolutions"),
    "attention": Family("attention"),
    "rnn": Family("recurrent layers"),
    "linalg": Family("decompositions and solvers"),
    "sort": Family("sorting"),
    "collectives": Family("collective communication"),
}  # fmt: skip


class Transform(IntEnum):
    """The fft family's `kind`: what is transformed into what. A half is the one that is not redundant."""

    COMPLEX = 0
    REAL_TO_HALF = 1
    HALF_TO_REAL = 2


class PlanCache(Protocol):
    """What a routine keeps for calls like those before, such as torch.backends.bp.fft_plan_cache."""

    def size(self) -> int:
        """How many plans are kept."""

    def max_size(self) -> int:
        """How many may be kept. Beyond that, the least recently used are dropped."""

    def set_max_size(self, most: int) -> None:
        """`most` from now on, 0 or more. What the device still uses stays until it is done."""


@dataclass(frozen=True, kw_only=True)
class Routine:
    """A library's function for one family, for several dtypes.

    `guard`, `workspace` and `cost` are called as `guard(dtype, **integers)` with the names that the family lists. Sizes
    may be `torch.SymInt`: each comparison is then a condition under which a plan serves, and so is `int(size)`.
    """

    # An address in a library that stays loaded, for each dtype that it computes.
    addresses: Mapping[torch.dtype, int]
    # Why it does not take a call, in words that follow «it», such as "takes up to 1024 rows". None: it takes the call.
    guard: Callable[..., str | None] | None = None
    # Bytes of device memory that it needs besides its operands.
    workspace: Callable[..., int] | None = None
    # Of a call, relative to the generated kernels for the same call, which cost 100: 50 is twice as fast. Without it, a
    # library is expected to be faster than generated kernels on GPUs, and slower on processors.
    cost: Callable[..., int | None] | None = None
    cache: PlanCache | None = None


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library for this hardware, such as cuBLAS, CLBlast or VkFFT."""

    name: str  # for people: "CLBlast"
    routines: Mapping[str, Routine]  # by their families, the names in FAMILIES
    explain: Callable[[int], str] | None = None  # what a status other than 0 means


def routines_of(device: Any, family: str) -> Iterator[tuple[Library, Routine]]:
    """Those of a `Device` that compute a family, in the order in which its driver lists the libraries."""
    for library in getattr(device, "libraries", ()):
        if family in library.routines:
            yield library, library.routines[family]
