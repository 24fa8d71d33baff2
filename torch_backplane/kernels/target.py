"""What a device says of itself that kernels depend on.

A kernel has two forms at most, and which one a device gets is one figure, `Target.simt`. All else is a size that text
and launches choose within. Nothing above this file asks what hardware there is: it asks the target what that hardware
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from torch_backplane.kernels.layouts import RowLimits

# Where numbers without a device are, as PyTorch has it: no device of a driver.
CPU = torch.device("cpu")


class LimitExceeded(RuntimeError):
    """A kernel needs more than the device has. Raised when it is planned; nothing has been launched then."""


def _is_whole(value: Any, least: int, most: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_power_of_two(value: Any, most: int) -> bool:
    return _is_whole(value, 1, most) and value & (value - 1) == 0


def _are_dtypes(value: Any) -> bool:
    return isinstance(value, frozenset) and all(isinstance(one, torch.dtype) for one in value)


_TRUTH = ("True or False", lambda value: isinstance(value, bool))
_BYTES = ("a whole number of bytes, 0 or more", lambda value: _is_whole(value, 0))

# What is accepted of each figure, in words, and the test.
_RULES = {
    "simt": _TRUTH,
    "max_group_size": ("a whole number of work items from 1 to 65,536", lambda value: _is_whole(value, 1, 1 << 16)),
    "group_multiple": ("a whole number of work items from 1 to 1,024", lambda value: _is_whole(value, 1, 1 << 10)),
    "subgroup_size": ("a power of two from 1 to 1,024", lambda value: _is_power_of_two(value, 1 << 10)),
    "subgroup_shuffles": _TRUTH,
    "local_memory": _BYTES,
    "compute_units": ("a whole number above 0", lambda value: _is_whole(value, 1, 2**31 - 1)),
    "max_argument_bytes": ("a whole number of bytes, 128 or more", lambda value: _is_whole(value, 128)),
    "atomics": ("a frozenset of torch.dtype", _are_dtypes),
    "float64": _TRUTH,
    "native_float16": _TRUTH,
    "cache_bytes": _BYTES,
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The figures of a device. All have a default that a device of its kind most likely has (`Target.of_kind`).

    Args:
        simt: whether neighbouring work items of a group run in lockstep, and what they read and write side by side is
            one access to memory: GPUs. Then a work item has one element, and the items of a group share a row. If not,
            a group runs in one thread of a processor, one work item after another, and compilers make vectors of it:
            then a work item goes through a run of neighbouring elements by vectors.
        max_group_size: work items of a group, in all dimensions together, at most.
        group_multiple: work items; groups that are a multiple of it leave no lanes of the hardware empty.
        subgroup_size: work items of a subgroup (warp, wavefront, SIMD group); 1 where the device has none.
        subgroup_shuffles: whether work items of a subgroup exchange values without local memory. Subgroups then have
            exactly `subgroup_size` items, which are neighbours in their group.
        local_memory: bytes that a group can share.
        compute_units: how many of them there are. Planning takes it from `DeviceProperties.compute_units`.
        max_argument_bytes: of all arguments of a kernel together.
        atomics: dtypes for which there is an atomic compare-and-swap, or addition, in device memory.
        float64: whether arithmetic in float64 is the hardware's. Without it no kernel is given any; planning takes that
            from `DeviceProperties.dtypes`.
        native_float16: whether instructions convert between float16 and float32. Without them kernels do it in integer
            arithmetic. Either way they compute in float32, as PyTorch does.
        cache_bytes: of the largest cache that all compute units share, 0 where it is not known.

    Raises:
        ValueError: a figure is missing or absurd. The message names it, its value, and what is accepted.
    """

    simt: bool = True
    max_group_size: int = 256
    group_multiple: int = 1
    subgroup_size: int = 1
    subgroup_shuffles: bool = False
    local_memory: int = 32 << 10  # the least of OpenCL's full profile
    compute_units: int = 1
    max_argument_bytes: int = 1024  # the least of OpenCL's full profile
    atomics: frozenset[torch.dtype] = frozenset({torch.int32, torch.uint32})
    float64: bool = True
    native_float16: bool = False
    cache_bytes: int = 0

    # What a device of each kind (`DeviceProperties.kind`) is taken for where its driver says nothing.
    KINDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gpu": {},
        "accelerator": {},
        "cpu": {"simt": False, "native_float16": True},  # its compiler has the last word
        "host": {"simt": False},
    }

    @classmethod
    def of_kind(cls, kind: str, **figures: Any) -> Target:
        """The target of a device of this kind, where `figures` do not say otherwise. ValueError for no such kind."""
        if kind not in cls.KINDS:
            raise ValueError(f"the kind of a device is one of {', '.join(cls.KINDS)}, and got {kind!r}")
        return cls(**{**cls.KINDS[kind], **figures})

    @staticmethod
    def accepts(name: str, value: Any) -> bool:
        """Whether `value` can be the figure `name`."""
        return _RULES[name][1](value)

    def __post_init__(self) -> None:
        for one in fields(self):
            accepted, is_good = _RULES[one.name]
            value = getattr(self, one.name)
            if not is_good(value):
                raise ValueError(f"Target.{one.name} is {value!r}, and must be {accepted}")
        for name in ("group_multiple", "subgroup_size"):
            if getattr(self, name) > self.max_group_size:
                most = f"at most max_group_size, which is {self.max_group_size}"
                raise ValueError(f"Target.{name} is {getattr(self, name)}, and must be {most}")

    def check(self, name: str, *, arguments: int = 0, local: int = 0, group: int = 1) -> None:
        """Raises LimitExceeded where a kernel of the operator `name` needs more than there is.

        Args:
            arguments: bytes of all its arguments.
            local: bytes of local memory.
            group: work items of a group.
        """
        for need, most, limit, unit in (
            (arguments, self.max_argument_bytes, "max_argument_bytes", "bytes of arguments"),
            (local, self.local_memory, "local_memory", "bytes of local memory"),
            (group, self.max_group_size, "max_group_size", "work items in a group"),
        ):
            if need > most:
                raise LimitExceeded(f"{name} needs {need:,} {unit}, and its device takes {most:,} (Target.{limit})")

    # What kernels decide by these figures.

    def group(self, wanted: int) -> int:
        """`wanted` work items for a group, or as many as it can have."""
        return min(wanted, self.max_group_size)

    def small_group(self, few: int) -> int:
        """Work items of a group where each has much to do: where a group is a thread, `few`, so that few items are
        spread over the compute units.
        """
        return self.group_size if self.simt else self.group(few)

    @property
    def group_size(self) -> int:
        """Work items of a group in one dimension where items share nothing: 64, or what leaves no lanes empty.

        Few different sizes: some compilers build a kernel again for each.
        """
        least = self.group_multiple if self.simt else 1
        return self.group(-(-64 // least) * least)

    @property
    def element_group_size(self) -> int:
        """The same where an item is nothing but an element: compilers make vectors of neighbouring items of a group."""
        return self.group_size if self.simt else self.group(256)

    @property
    def enough_groups(self) -> int:
        """How many groups of a launch fill the device, for work that can be divided into as many as one likes.

        In lockstep, so many as keep a compute unit busy while others wait for memory; of threads, so many that all end
        at about the same time.
        """
        return (16 if self.simt else 4) * self.compute_units

    def enough_groups_of(self, size: int) -> int:
        """The same of groups of `size` work items: one that is larger than `group_size` counts as several."""
        return -(-self.enough_groups * self.group_size // max(size, self.group_size))

    def should_divide(self, groups: int, steps: int) -> bool:
        """Whether work of so many groups, each item of which goes through `steps` elements one after another, should be
        divided among more groups, although that takes further launches and goes through memory once more.

        In lockstep, where groups fill no more than half of the device and the steps take longer than launches; of
        threads, where hardly any of them had something to do for long.
        """
        if self.simt:
            return groups * 2 <= self.enough_groups and steps >= 128
        return groups * 16 <= self.enough_groups and steps >= 1 << 15

    @property
    def team_size(self) -> int:
        """How many work items share a row, through local memory: a power of two, 64 at most. 1 where each has its own,
        as on a processor's threads, or where there is next to no local memory.
        """
        if not self.simt or self.local_memory < _TEAM_MEMORY:
            return 1
        return self.team_of(16)

    def team_of(self, bytes_each: int) -> int:
        """How many work items meet in a tree in local memory, with `bytes_each` for each: a power of two, 64 at most.
        1 where not even one has its place.
        """
        size = 64
        while size > 1 and (size > self.max_group_size or size * bytes_each > self.local_memory):
            size //= 2
        return size

    def run(self, elements: int) -> int:
        """How many neighbouring elements a work item goes through, one after another: `elements`, or one where
        neighbouring items read neighbouring elements at once.
        """
        return 1 if self.simt else elements

    @property
    def register_bytes(self) -> int:
        """Of the vectors that hand-written kernels have in a work item; 0: work items are the lanes. Compilers for
        hardware with shorter vectors make several of one.
        """
        return 0 if self.simt else 64

    @property
    def element_width(self) -> int:
        """Elements that a work item reads and writes at once where all are contiguous."""
        return 4 if self.simt else 1

    @property
    def row_limits(self) -> RowLimits:
        """For launches in rows."""
        return RowLimits() if self.simt else _ROWS_OF_THREADS

    def row_group(self, length: int, rows: int, strided: bool) -> tuple[int, int]:
        """The work items of a group in a launch in rows: elements of a row, and rows.

        Few different ones, as some compilers build a kernel again for each.

        Args:
            strided: whether an operand's neighbours in a row are no neighbours in memory.
        """
        if self.simt:
            # Rows that do not begin with a sector have one more than their elements take: long runs, few of these.
            wanted = (16 if length < 64 else 32 if length < 256 else 64, 4)
        elif rows < 4:
            wanted = (self.element_group_size, 1)
        elif length < 16:
            wanted = (8, 8)
        else:
            wanted = (16 if strided else 64, 16)
        along = self.group(wanted[0])
        return along, max(1, min(wanted[1], self.max_group_size // along))

    @property
    def tile_memory(self) -> int:
        """Bytes for tiles of operands that are in another order than the results: of local memory no more than leaves
        a compute unit room for some groups; a thread has its tile for itself. 0: no tiles.
        """
        return min(self.local_memory, _TILE_MEMORY) if self.simt else 64 << 10

    @property
    def tile_side(self) -> int:
        """Of all tiles, which are made of matrices of half as much at least; 0: as the sizes ask.

        A thread gains nothing by less than a square in registers, and one text serves all sizes.
        """
        return 0 if self.simt else 32

    @property
    def large_group(self) -> int:
        """Work items of a group that reads what neighbours read, too: in a tile, of which each item has several
        elements, and where operands have strides.
        """
        return self.group(256)

    @property
    def has_wide_sums(self) -> bool:
        """Whether sums of float32 may be kept in float64, for what little that costs: not where float64 is slow."""
        return self.float64 and not self.simt


# A division for each element costs a thread more than items that have nothing to do.
_ROWS_OF_THREADS = RowLimits(shortest=2, most=2**31 - 1)

_TILE_MEMORY = 20 << 10
_TEAM_MEMORY = 2 << 10  # bytes: for each of 64 work items two numbers of up to 16 bytes
