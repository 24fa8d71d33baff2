"""The properties of a device that kernels depend on.

A kernel has at most two forms, and `Target.simt` selects one. The other figures are sizes and capabilities that kernel
text and launches adapt to. Code above this file does not check for specific hardware; it asks the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from torch_backplane.kernels.layouts import RowLimits

# PyTorch's CPU device, for numbers that have no device. It is not a device of a driver.
CPU = torch.device("cpu")


class LimitExceeded(RuntimeError):
    """A kernel exceeds a limit of the device. Raised during planning, before anything is launched."""


def _is_whole(value: Any, least: int, most: int = 2**63 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_power_of_two(value: Any, most: int) -> bool:
    return _is_whole(value, 1, most) and value & (value - 1) == 0


def _are_dtypes(value: Any, known: frozenset[torch.dtype] | None = None) -> bool:
    return isinstance(value, frozenset) and all(
        isinstance(one, torch.dtype) and (known is None or one in known) for one in value
    )


_HALVES = frozenset({torch.float16, torch.bfloat16})
_TRUTH = ("True or False", lambda value: isinstance(value, bool))
_BYTES = ("a whole number of bytes, 0 or more", lambda value: _is_whole(value, 0))

# For each figure: the accepted values in words, and a test.
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
    "matrix_dtypes": ("a frozenset of torch.float16 and torch.bfloat16", lambda value: _are_dtypes(value, _HALVES)),
    "cache_bytes": _BYTES,
}


@dataclass(frozen=True, kw_only=True)
class Target:
    """The figures of a device. The defaults are those of a GPU; `Target.of_kind` has defaults for other kinds.

    Args:
        simt: whether neighbouring work items of a group run in lockstep and their accesses to neighbouring elements are
            coalesced, as on GPUs. A work item then computes one element, and the items of a group share a row. If
            False, a group runs in one CPU thread, one work item after another, and compilers vectorize the loop over
            them. A work item then processes a run of neighbouring elements with vectors.
        max_group_size: maximum number of work items in a group, in all dimensions together.
        group_multiple: number of work items; groups of a multiple of it leave no hardware lanes idle.
        subgroup_size: number of work items in a subgroup (warp, wavefront, SIMD group); 1 if the device has none.
        subgroup_shuffles: whether work items of a subgroup can exchange values without local memory. Subgroups then
            have exactly `subgroup_size` items, which are neighbours in their group.
        local_memory: bytes that a group can share.
        compute_units: number of compute units. Planning takes it from `DeviceProperties.compute_units`.
        max_argument_bytes: maximum total size of a kernel's arguments.
        atomics: dtypes with an atomic compare-and-swap, or addition, in device memory.
        float64: whether the hardware supports float64 arithmetic. If not, no kernel uses float64. Planning takes it
            from `DeviceProperties.dtypes`.
        native_float16: whether instructions convert between float16 and float32. Without them kernels convert in
            integer arithmetic. Kernels compute in float32 in both cases, as PyTorch does.
        matrix_dtypes: dtypes of operands that subgroups multiply by matrix instructions (tensor cores), which
            accumulate in float32. A dialect that cannot express them ignores this (`Dialect.matrix_functions`).
        cache_bytes: size of the largest cache that all compute units share; 0 if unknown.

    Raises:
        ValueError: a figure is invalid. The message names the figure, its value, and the accepted values.
    """

    simt: bool = True
    max_group_size: int = 256
    group_multiple: int = 1
    subgroup_size: int = 1
    subgroup_shuffles: bool = False
    local_memory: int = 32 << 10  # the minimum of OpenCL's full profile
    compute_units: int = 1
    max_argument_bytes: int = 1024  # the minimum of OpenCL's full profile
    atomics: frozenset[torch.dtype] = frozenset({torch.int32, torch.uint32})
    float64: bool = True
    native_float16: bool = False
    matrix_dtypes: frozenset[torch.dtype] = frozenset()
    cache_bytes: int = 0

    # The figures of each kind of device (`DeviceProperties.kind`) that differ from the defaults.
    KINDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gpu": {},
        "accelerator": {},
        "cpu": {"simt": False, "native_float16": True},  # kernel text checks for F16C
        "host": {"simt": False},
    }

    @classmethod
    def of_kind(cls, kind: str, **figures: Any) -> Target:
        """The default target of a device kind, with `figures` replaced. Raises ValueError for an unknown kind."""
        if kind not in cls.KINDS:
            raise ValueError(f"the kind of a device must be one of {', '.join(cls.KINDS)}, got {kind!r}")
        return cls(**{**cls.KINDS[kind], **figures})

    @staticmethod
    def accepts(name: str, value: Any) -> bool:
        """Whether `value` is valid for the figure `name`."""
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
        """Raises LimitExceeded if a kernel of the operator `name` exceeds a limit of the device.

        Args:
            arguments: total bytes of its arguments.
            local: bytes of local memory that it uses.
            group: number of work items in a group.
        """
        for need, most, limit, unit in (
            (arguments, self.max_argument_bytes, "max_argument_bytes", "bytes of arguments"),
            (local, self.local_memory, "local_memory", "bytes of local memory"),
            (group, self.max_group_size, "max_group_size", "work items in a group"),
        ):
            if need > most:
                raise LimitExceeded(f"{name} needs {need:,} {unit}, and its device takes {most:,} (Target.{limit})")

    # Choices that kernels make by these figures

    def group(self, wanted: int) -> int:
        """`wanted` work items per group, limited to `max_group_size`."""
        return min(wanted, self.max_group_size)

    def small_group(self, few: int) -> int:
        """Work items per group for kernels whose items do much work.

        Where a group is a thread, this is `few`, so that a small number of items is spread over the compute units.
        """
        return self.group_size if self.simt else self.group(few)

    @property
    def group_size(self) -> int:
        """Work items per group in one dimension where items share nothing: 64, rounded up to leave no lanes idle.

        There are few different sizes because some compilers rebuild a kernel for each.
        """
        least = self.group_multiple if self.simt else 1
        return self.group(-(-64 // least) * least)

    @property
    def element_group_size(self) -> int:
        """`group_size` for kernels with one element per item, for which CPU compilers vectorize over items."""
        return self.group_size if self.simt else self.group(256)

    @property
    def enough_groups(self) -> int:
        """The number of groups that fills the device, for work that can be divided into any number of groups.

        With `simt`, it is enough to keep compute units busy while some groups wait for memory; with threads, enough
        that all threads finish at about the same time.
        """
        return (16 if self.simt else 4) * self.compute_units

    def enough_groups_of(self, size: int) -> int:
        """`enough_groups` for groups of `size` work items: one that is larger than `group_size` counts as several."""
        return -(-self.enough_groups * self.group_size // max(size, self.group_size))

    def should_divide(self, groups: int, steps: int) -> bool:
        """Whether to divide the work of `groups` groups among more groups.

        Dividing costs further launches and another pass through memory. With `simt`, it pays off if the groups fill at
        most half of the device and the steps take longer than launches; with threads, if nearly all of them would be
        idle for long.

        Args:
            steps: elements that each work item processes one after another.
        """
        if self.simt:
            return groups * 2 <= self.enough_groups and steps >= 128
        return groups * 16 <= self.enough_groups and steps >= 1 << 15

    @property
    def team_size(self) -> int:
        """The number of work items that share a row through local memory: a power of two, at most 64.

        1 where each item has its own row: with threads, or with very little local memory.
        """
        if not self.simt or self.local_memory < _TEAM_MEMORY:
            return 1
        return self.team_of(16)

    def team_of(self, bytes_each: int) -> int:
        """The number of work items that combine values in a tree in local memory: a power of two, at most 64.

        Each item needs `bytes_each` bytes. The result is 1 even if local memory is too small for one item.
        """
        size = 64
        while size > 1 and (size > self.max_group_size or size * bytes_each > self.local_memory):
            size //= 2
        return size

    def run(self, elements: int) -> int:
        """The number of neighbouring elements that a work item processes one after another.

        `elements` with threads; 1 with `simt`, where neighbouring items access neighbouring elements together.
        """
        return 1 if self.simt else elements

    @property
    def register_bytes(self) -> int:
        """The size of the vectors that hand-written kernels use in a work item; 0 where work items are the lanes.

        Compilers for hardware with shorter vectors split them.
        """
        return 0 if self.simt else 64

    @property
    def element_width(self) -> int:
        """Elements that a work item reads and writes together where all operands are contiguous."""
        return 4 if self.simt else 1

    @property
    def row_limits(self) -> RowLimits:
        """The limits for launches in rows."""
        return RowLimits() if self.simt else _ROWS_OF_THREADS

    def row_group(self, length: int, rows: int, strided: bool) -> tuple[int, int]:
        """The group size of a launch in rows: elements of a row, and rows.

        There are few different sizes because some compilers rebuild a kernel for each.

        Args:
            strided: whether an operand's neighbours in a row are not neighbours in memory.
        """
        if self.simt:
            # A run that does not begin at a sector touches one more sector; with long runs there are few of these.
            wanted = (16 if length < 64 else 32 if length < 256 else 64, 4)
        elif rows < 4:
            wanted = (self.element_group_size, 1)
        elif length < 16:
            wanted = (8, 8)
        else:
            wanted = (16 if strided else 64, 16)
        along = self.group(wanted[0])
        return along, max(1, min(wanted[1], self.max_group_size // along))

    def square_group(self) -> tuple[int, int]:
        """The group size of a launch in rows where neighbours in a row, or in a column, are neighbours in memory.

        With `simt`, a square of 16 fills sectors in both directions.
        """
        along = self.group(16)
        return along, max(1, min(16, self.max_group_size // along))

    @property
    def tile_memory(self) -> int:
        """Bytes for tiles of operands whose order in memory differs from that of the results; 0 for no tiles.

        With `simt`, tiles are in local memory, and a compute unit must have room for several groups. With threads, a
        tile is private.
        """
        return min(self.local_memory, _TILE_MEMORY) if self.simt else 64 << 10

    @property
    def tile_side(self) -> int:
        """The side of all tiles, as `TileLimits.side`; 0 to choose it by the sizes.

        A thread gains nothing from tiles that are smaller than a square in registers, and with one side, one text
        serves all sizes.
        """
        return 0 if self.simt else 32

    @property
    def large_group(self) -> int:
        """Work items per group where items read memory that their neighbours also read.

        These are kernels with tiles, where an item has several elements, and kernels with strided operands.
        """
        return self.group(256)

    @property
    def has_wide_sums(self) -> bool:
        """Whether float64 is cheap enough to accumulate sums of float32 in it; it is slow on GPUs."""
        return self.float64 and not self.simt


# For a thread, idle work items cost less than an index division for each element.
_ROWS_OF_THREADS = RowLimits(shortest=2, most=2**31 - 1)

_TILE_MEMORY = 20 << 10
_TEAM_MEMORY = 2 << 10  # bytes: two numbers of up to 16 bytes for each of 64 work items
