"""Libraries that compute operators on a device, such as a vendor's BLAS or FFT library.

A routine is a C function `int routine(void* queue, const argument_t* arguments, uint64_t count)`, with the same
signature as other library functions that planners call (docs/write-an-operator.md). It enqueues its work on the native
queue and returns 0 or an error status, so the device needs a native launcher. Its arguments are those of its family:
memory, numbers, and 64-bit integers. If the routine has a workspace query, the workspace memory and its
size in bytes follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, Protocol

import torch


def _strides(*tensors: str) -> tuple[str, ...]:
    return tuple(f"{tensor}_{axis}" for tensor in tensors for axis in ("batch", "head", "row"))


_ATTENTION = (
    "causal", "has_bias", "batch", "heads", "key_heads", "queries", "keys", "columns", "value_columns",
    *_strides("query", "key", "value", "bias", "out"),
)  # fmt: skip


_PRODUCT = (
    "batch", "rows", "columns", "depth", "c_row", "a_row", "b_row", "a_transposed", "b_transposed",
    "c_step", "a_step", "b_step", "allowed", "alignment", "form",
)  # fmt: skip


class Family(NamedTuple):
    """A family of routines: what they compute, and the names of their arguments in order.

    The first memory argument is the result. Routines only read the others, unless the family specifies otherwise
    (docs/driver-contract.md).
    Numbers have the dtype of the routine, but float32 for float16 and bfloat16. A complex number is two numbers, its
    real and its imaginary part.
    """

    computes: str
    memory: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    integers: tuple[str, ...] = ()


# docs/driver-contract.md documents the arguments. Families without arguments are reserved: no planner calls them, and
# their arguments are not defined yet.
FAMILIES: Mapping[str, Family] = {
    "matmul": Family(
        "matrix products",
        memory=("c", "a", "b"),
        numbers=("alpha", "beta"),
        integers=_PRODUCT,
    ),
    "linear": Family(
        "matrix products with a bias",
        memory=("c", "a", "b", "bias"),
        numbers=("alpha",),
        integers=(*_PRODUCT, "activation"),
    ),
    "fft": Family(
        "Fourier transforms",
        memory=("out", "x"),
        integers=("kind", "inverse", "batch", "outer", "middle", "inner"),
    ),
    "cholesky": Family(
        "Cholesky decompositions",
        memory=("a", "info"),
        integers=("upper", "batch", "n"),
    ),
    "lu": Family(
        "LU decompositions",
        memory=("a", "pivots", "info"),
        integers=("batch", "rows", "columns"),
    ),
    "lu_solve": Family(
        "solutions of systems from LU decompositions",
        memory=("b", "a", "pivots"),
        integers=("operation", "batch", "n", "columns"),
    ),
    "triangular_solve": Family(
        "solutions of triangular systems",
        memory=("b", "a"),
        integers=("left", "upper", "operation", "unit", "batch", "rows", "columns", "a_column", "a_step"),
    ),
    "eigh": Family(
        "eigenvalues of symmetric matrices",
        memory=("a", "values", "info"),
        integers=("vectors", "upper", "batch", "n"),
    ),
    "convolution": Family(
        "convolutions",
        memory=("out", "a", "b"),
        integers=(
            "kind", "channels_last", "groups", "batch", "image_channels", "channels",
            "image_depth", "image_height", "image_width", "window_depth", "window_height", "window_width",
            "stride_depth", "stride_height", "stride_width", "padding_depth", "padding_height", "padding_width",
            "dilation_depth", "dilation_height", "dilation_width", "allowed",
        ),
    ),
    "attention": Family(
        "attention",
        memory=("out", "logarithm", "query", "key", "value", "bias"),
        numbers=("scale",),
        integers=_ATTENTION,
    ),
    "attention_backward": Family(
        "gradients of attention",
        memory=(
            "query_grad", "key_grad", "value_grad", "grad", "query", "key", "value", "bias", "out", "logarithm",
        ),
        numbers=("scale",),
        integers=(*_ATTENTION, *_strides("grad", "query_grad", "key_grad", "value_grad")),
    ),
    "rnn": Family("recurrent layers"),
    "sort": Family("sorting"),
    "collectives": Family("collective communication"),
}  # fmt: skip


class Transform(IntEnum):
    """The `kind` of an fft routine. "Half" is the non-redundant half of the spectrum of real numbers."""

    COMPLEX = 0
    REAL_TO_HALF = 1
    HALF_TO_REAL = 2


class Allowed(IntFlag):
    """What the user allows routines of products and convolutions. Their `guard` refuses what they cannot compute so."""

    TF32 = 1  # round float32 operands to TF32 (complex64 likewise)
    ROUNDED_SUMS = 2  # round the parts of a divided sum to float16 or bfloat16
    HALF_SUMS = 4  # accumulate float16 products in float16
    DIVIDED_SUMS = 8  # divide the sum of a product among groups (split-K)


class Activation(IntEnum):
    """The `activation` of a linear routine: what it computes of each sum."""

    NONE = 0
    RELU = 1


class Convolution(IntEnum):
    """The `kind` of a convolution routine: what it computes from what."""

    VALUES = 0  # a convolution: from the image and the weight
    IMAGE = 1  # the gradient of the image, or a transposed convolution: from the values and the weight
    WEIGHT = 2  # the gradient of the weight: from the values and the image


class MatrixOperation(IntEnum):
    """The `operation` of lu_solve and triangular_solve: what a is replaced with."""

    NONE = 0
    TRANSPOSE = 1
    CONJUGATE_TRANSPOSE = 2


class PlanCache(Protocol):
    """An LRU cache of a routine's plans. That of the fft family is torch.backends.bp.fft_plan_cache."""

    def size(self) -> int:
        """Return the number of cached plans."""

    def max_size(self) -> int:
        """Return the maximum number of cached plans. The least recently used plans are evicted."""

    def set_max_size(self, most: int) -> None:
        """Set the maximum to `most`, 0 or more. Plans that the device still uses are freed when it is done."""


@dataclass(frozen=True, kw_only=True)
class Routine:
    """The functions of a library for one family, one for each supported dtype.

    `guard`, `workspace`, `cost` and `forms` are called as `guard(dtype, **integers)`, with the integers that the family
    names. Sizes can be `torch.SymInt`: each comparison, and each `int(size)`, then becomes a guard of the plan.
    """

    # The function address for each supported dtype. The library must stay loaded.
    addresses: Mapping[torch.dtype, int]
    # Returns None if the routine accepts the call, else the reason as a predicate, such as "takes up to 1024 rows".
    # Without a guard, the routine accepts all calls.
    guard: Callable[..., str | None] | None = None
    # Returns the bytes of device memory that the routine needs in addition to its operands. Can raise
    # torch.AcceleratorError if the library does not work: it then counts as failed.
    workspace: Callable[..., int] | None = None
    # Returns the cost of the call relative to generated kernels, which cost 100: 50 is twice as fast. Without it, or if
    # it returns None: 50 on GPUs, 101 on processors.
    cost: Callable[..., int | None] | None = None
    # Returns how many algorithms compute the call: the integer `form` selects one of them, from 0 on. Without it: one.
    forms: Callable[..., int] | None = None
    cache: PlanCache | None = None  # of the routine's own plans
    # Whether the routine computes float32 in TF32 if that is allowed, for torch.bp.is_tf32_supported.
    tf32: bool = False


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library for a device, such as cuBLAS, CLBlast or VkFFT."""

    name: str  # for messages: "CLBlast"
    routines: Mapping[str, Routine]  # by family, a key of FAMILIES
    explain: Callable[[int], str] | None = None  # returns the meaning of a status other than 0

    @property
    def key(self) -> str:
        """The name by which users and results of tuning select the library: "clblast"."""
        return "".join(filter(str.isalnum, self.name.lower()))


def unproven(dtype: torch.dtype, **integers: int) -> int:
    """Return a cost above that of generated kernels, for routines that no measurement shows to be faster.

    The routine then runs only if the user or the tuner selects it.
    """
    return 101


def routines_of(device: Any, family: str) -> Iterator[tuple[Library, Routine]]:
    """Yield the libraries and routines of a `Device` for a family, in the order of `Device.libraries`."""
    for library in getattr(device, "libraries", ()):
        if family in library.routines:
            yield library, library.routines[family]
