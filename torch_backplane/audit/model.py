"""What the audit makes of launches: how much memory is moved, how long that takes at best, and whether all is busy.

Constants of the model are here, each with its source, or said to be assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_backplane.kernels.modelled import Modelled
from torch_backplane.kernels.target import Target

if TYPE_CHECKING:
    from torch_backplane.audit.driver import Launch

# NVIDIA's CUDA C++ Best Practices Guide, «Coalesced Access to Global Memory»: as many 32-byte transactions as a warp's
# accesses need. Assumed of all targets: others move lines of 64 or 128 bytes, which only makes dearer what is not
# coalesced.
SECTOR_BYTES = 32
# CUDA C++ Best Practices Guide, «Shared Memory and Memory Banks»: 32 banks of 32 bits. AMD's RDNA has as many
# («RDNA Performance Guide», LDS). Assumed of the others.
LOCAL_BANKS = 32
# Assumed: what a group finds again in the first cache, first in first out. An RTX 4090 has 128 KiB for as many as 24
# groups of 64 items of a compute unit, RDNA 3 32 KiB for two units, Mali 16 KiB for a core.
FIRST_CACHE_BYTES = 8 << 10
# Assumed: the share of the last cache (`Target.cache_bytes`) in which an operand that all groups read stays.
SHARED_CACHE_SHARE = 0.5
# Assumed. Measured latencies of memory are from 200 to 500 ns («Dissecting the NVIDIA Volta GPU Architecture via
# Microbenchmarking», arXiv 1804.06826; of local memory 20 to 30 cycles), and several of a chain's accesses are under
# way at once.
GLOBAL_SECONDS = 100e-9
LOCAL_SECONDS = 15e-9
LAUNCH_SECONDS = 5e-6
# Launches that move less than this share of an operator's bytes need not fill the device.
SMALL_LAUNCH = 0.05

SAMPLED_GROUPS = 16
MOST_RECORDS = 1 << 19  # accesses of a sampled group that are kept; the rest is taken for the same


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of an operator at a size on a target.

    Args:
        launches: of kernels, and the device's own copies and fills.
        groups, items: of the launch that moves the most.
        fill: of compute units with as many groups as keep them busy, in that of the launches that move anything to
            speak of that has the fewest. 1 and more: the device is full. Of an operator that was run with less than was
            asked for, that of the launches that there would be.
        chain: the longest of any launch.
        traffic: bytes moved beside the least.
        coalescing: sectors that warps touch at once beside the fewest for as many bytes.
        conflicts: turns of local memory beside the fewest.
        seconds, ideal_seconds: by the roofline of this model, and by the least bytes alone.
    """

    launches: int
    groups: int
    items: int
    fill: float
    chain: int
    bytes: float
    least_bytes: float
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
    """What a group finds again of what it had: in the first cache, or in its share of the last one where as many groups
    run as fill the device.
    """
    return max(FIRST_CACHE_BYTES, target.cache_bytes // target.enough_groups)


def moved(launch: Launch, modelled: Modelled) -> float:
    """Bytes that a launch moves: what its groups do, but of what fits the shared cache no byte twice."""
    most = modelled.target.cache_bytes * SHARED_CACHE_SHARE
    operands = (
        min(one.bytes, one.extent) if one.by_all and one.extent <= most else one.bytes for one in launch.operands
    )
    return launch.bytes + sum(operands)


def fill(launch: Launch, modelled: Modelled) -> float:
    """How much of the device a launch keeps busy: its groups beside `Target.enough_groups`, larger ones as several of
    `Target.group_size`.
    """
    target = modelled.target
    return launch.groups * max(1.0, launch.group / target.group_size) / target.enough_groups


def seconds(launch: Launch, modelled: Modelled) -> float:
    """Of the launch, and of memory or of the longest chain, whichever takes longer. A compute unit has its share of the
    memory's speed, and no more.
    """
    share = 1.0 if launch.groups == 0 else min(1.0, launch.groups / modelled.target.compute_units)
    streaming = moved(launch, modelled) / (modelled.bytes_per_second * share)
    local = launch.chain - launch.chain_global
    return LAUNCH_SECONDS + max(streaming, launch.chain_global * GLOBAL_SECONDS + local * LOCAL_SECONDS)


def _large(launches: Sequence[Launch], modelled: Modelled) -> list[Launch]:
    """Those of kernels that move anything to speak of."""
    bytes_ = [moved(one, modelled) for one in launches]
    least = SMALL_LAUNCH * sum(bytes_)
    return [one for one, size in zip(launches, bytes_, strict=True) if size >= least and one.groups]


def fill_of_planned(launches: Sequence[Launch], planned: Sequence[Launch], modelled: Modelled) -> float:
    """The fill of an operator of which `launches` were measured with less, and `planned` would be done."""
    large = _large(launches, modelled)
    if [one.kernel for one in launches] == [one.kernel for one in planned]:
        chosen = [other for one, other in zip(launches, planned, strict=True) if any(one is each for each in large)]
    else:
        names = {one.kernel for one in large}
        chosen = [one for one in planned if one.kernel in names]
    return min((fill(one, modelled) for one in chosen), default=1.0)


def figures(launches: Sequence[Launch], modelled: Modelled, least_bytes: float) -> Figures:
    """Of the launches of an operator whose operands and results have `least_bytes`. ValueError where there is none."""
    if not launches:
        raise ValueError("nothing was launched")
    bytes_ = [moved(one, modelled) for one in launches]
    total = sum(bytes_)
    large = _large(launches, modelled)
    main = max(zip(bytes_, range(len(launches)), strict=True))[1]
    sectors, least_sectors = sum(one.sectors for one in launches), sum(one.least_sectors for one in launches)
    turns, least_turns = sum(one.local_turns for one in launches), sum(one.least_local_turns for one in launches)
    return Figures(
        launches=len(launches),
        groups=launches[main].groups,
        items=launches[main].groups * launches[main].group,
        fill=min((fill(one, modelled) for one in large), default=1.0),
        chain=max(one.chain for one in launches),
        bytes=total,
        least_bytes=least_bytes,
        traffic=total / least_bytes if least_bytes else 1.0,
        coalescing=sectors / least_sectors if least_sectors else 1.0,
        local_bytes=max(one.local_bytes for one in launches),
        barriers=max(one.barriers for one in launches),
        divergent=sum(one.divergent for one in launches),
        conflicts=turns / least_turns if least_turns else 1.0,
        seconds=sum(seconds(one, modelled) for one in launches),
        ideal_seconds=LAUNCH_SECONDS + least_bytes / modelled.bytes_per_second,
        kernels=tuple(dict.fromkeys(one.kernel for one in launches)),
    )
