"""The audit's model of a GPU: bytes moved, time, and how full the device is.

Each constant has its source here, or is marked as assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_backplane.kernels.modelled import Modelled
from torch_backplane.kernels.target import Target

if TYPE_CHECKING:
    from torch_backplane.audit.driver import Launch, Operand

# NVIDIA's CUDA C++ Best Practices Guide, «Coalesced Access to Global Memory»: as many 32-byte transactions as a warp's
# accesses need. Assumed for all targets. Some move lines of 64 or 128 bytes, which makes uncoalesced accesses slower
# still.
SECTOR_BYTES = 32
# CUDA C++ Best Practices Guide, «Shared Memory and Memory Banks»: 32 banks of 32 bits. AMD's RDNA has the same number
# («RDNA Performance Guide», LDS). Assumed for the other targets.
LOCAL_BANKS = 32
# Assumed: a group's share of the first-level cache, which replaces first in, first out. An RTX 4090 has 128 KiB for up
# to 24 groups of 64 work items on a compute unit, RDNA 3 has 32 KiB for two units, and Mali 16 KiB per core.
FIRST_CACHE_BYTES = 8 << 10
# Assumed: an operand that all groups read stays in the last-level cache if it fits this share of `Target.cache_bytes`.
SHARED_CACHE_SHARE = 0.5
# Assumed time of an access in a chain. Measured memory latencies are 200 to 500 ns («Dissecting the NVIDIA Volta GPU
# Architecture via Microbenchmarking», arXiv 1804.06826; for local memory 20 to 30 cycles), but several accesses of a
# chain overlap.
GLOBAL_SECONDS = 100e-9
LOCAL_SECONDS = 15e-9
LAUNCH_SECONDS = 5e-6
# Launches that move less than this share of an operator's bytes need not fill the device.
SMALL_LAUNCH = 0.05

SAMPLED_GROUPS = 16
MAX_RECORDS = 1 << 19  # accesses recorded per sampled group; the others are extrapolated from these


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of an operator with operands of one size on one target.

    Args:
        launches: number of kernel launches, and of copies and fills by the device.
        groups, items: work groups and work items of the launch that moves the most bytes.
        fill: work groups relative to the number that keeps the device busy (`fill`), of the launch with the fewest;
            launches below SMALL_LAUNCH do not count. From 1 on, the device is full. If the operator ran at a smaller
            size than requested, this is for the launches at the requested size.
        chain: the longest chain of accesses (`Launch.chain`) of any launch.
        traffic: bytes moved, relative to the minimum.
        coalescing: sectors that the accesses of warps touch, relative to the minimum for the same bytes.
        conflicts: cycles of local memory, relative to the minimum without bank conflicts.
        seconds, ideal_seconds: modelled time, and the time of one launch that moves the minimum.
    """

    launches: int
    groups: int
    items: int
    fill: float
    chain: int
    bytes: float
    min_bytes: float
    traffic: float
    coalescing: float
    local_bytes: int
    barriers: int
    divergent: int
    conflicts: float
    seconds: float
    ideal_seconds: float
    kernels: tuple[str, ...]


def cache_bytes(target: Target) -> int:
    """Return the cache size of a group: its share of the first-level cache, or if larger, of the last-level cache
    divided among as many groups as fill the device.
    """
    return max(FIRST_CACHE_BYTES, target.cache_bytes // target.enough_groups)


def moved(launch: Launch, modelled: Modelled) -> float:
    """Return the bytes that a launch moves.

    Operands that all groups use and that fit the shared cache move once, or if they are read and written, twice.
    """
    most = modelled.target.cache_bytes * SHARED_CACHE_SHARE
    return launch.bytes + sum(_moved_of(one, most) for one in launch.operands)


def _moved_of(operand: Operand, most: float) -> float:
    if not operand.by_all or operand.extent > most:
        return operand.bytes
    return sum(min(each, operand.extent) for each in (operand.bytes - operand.written, operand.written))


def fill(launch: Launch, modelled: Modelled) -> float:
    """Return the groups of a launch, relative to `Target.enough_groups`, the number that keeps the device busy.

    A group larger than `Target.group_size` counts as several.
    """
    target = modelled.target
    return launch.groups * max(1.0, launch.group / target.group_size) / target.enough_groups


def seconds(launch: Launch, modelled: Modelled) -> float:
    """Return the modelled time: launch overhead, plus the time of memory or of the longest chain, whichever is longer.

    A compute unit cannot use more than its share of the memory bandwidth.
    """
    share = 1.0 if launch.groups == 0 else min(1.0, launch.groups / modelled.target.compute_units)
    streaming = moved(launch, modelled) / (modelled.bytes_per_second * share)
    local = launch.chain - launch.chain_global
    return LAUNCH_SECONDS + max(streaming, launch.chain_global * GLOBAL_SECONDS + local * LOCAL_SECONDS)


def _large(launches: Sequence[Launch], modelled: Modelled) -> list[Launch]:
    """Return the kernel launches that move at least SMALL_LAUNCH of all bytes."""
    bytes_ = [moved(one, modelled) for one in launches]
    least = SMALL_LAUNCH * sum(bytes_)
    return [one for one, size in zip(launches, bytes_, strict=True) if size >= least and one.groups]


def fill_of_planned(launches: Sequence[Launch], planned: Sequence[Launch], modelled: Modelled) -> float:
    """Return the fill at the requested size.

    Args:
        launches: measured at a smaller size.
        planned: at the requested size, where no group computed.
    """
    large = _large(launches, modelled)
    if [one.kernel for one in launches] == [one.kernel for one in planned]:
        chosen = [other for one, other in zip(launches, planned, strict=True) if any(one is each for each in large)]
    else:
        names = {one.kernel for one in large}
        chosen = [one for one in planned if one.kernel in names]
    return min((fill(one, modelled) for one in chosen), default=1.0)


def figures(launches: Sequence[Launch], modelled: Modelled, min_bytes: float) -> Figures:
    """Compute the figures of an operator.

    Args:
        launches: the operator's launches.
        modelled: the target.
        min_bytes: bytes of its operands and results, the minimum to move.

    Raises:
        ValueError: there are no launches.
    """
    if not launches:
        raise ValueError("nothing was launched")
    bytes_ = [moved(one, modelled) for one in launches]
    total = sum(bytes_)
    large = _large(launches, modelled)
    main = max(zip(bytes_, range(len(launches)), strict=True))[1]
    sectors, min_sectors = sum(one.sectors for one in launches), sum(one.min_sectors for one in launches)
    turns, min_turns = sum(one.local_turns for one in launches), sum(one.min_local_turns for one in launches)
    return Figures(
        launches=len(launches),
        groups=launches[main].groups,
        items=launches[main].groups * launches[main].group,
        fill=min((fill(one, modelled) for one in large), default=1.0),
        chain=max(one.chain for one in launches),
        bytes=total,
        min_bytes=min_bytes,
        traffic=total / min_bytes if min_bytes else 1.0,
        coalescing=sectors / min_sectors if min_sectors else 1.0,
        local_bytes=max(one.local_bytes for one in launches),
        barriers=max(one.barriers for one in launches),
        divergent=sum(one.divergent for one in launches),
        conflicts=turns / min_turns if min_turns else 1.0,
        seconds=sum(seconds(one, modelled) for one in launches),
        ideal_seconds=LAUNCH_SECONDS + min_bytes / modelled.bytes_per_second,
        kernels=tuple(dict.fromkeys(one.kernel for one in launches)),
    )
