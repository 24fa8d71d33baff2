"""How many work groups of a kernel a compute unit holds, by the limits of NVIDIA's architectures.

The limits are in the tables of the CUDA C++ Programming Guide, «Compute Capabilities», and the units of allocation in
the Occupancy Calculator of Nsight Compute.
"""

from __future__ import annotations

from dataclasses import dataclass

SUBGROUP = 32  # work items of a warp
REGISTERS = 64 << 10  # of a compute unit
REGISTER_UNIT = 256  # registers are allocated to a warp in multiples of this
SCHEDULERS = 4  # of a compute unit; each has a part of the registers


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The limits of a compute unit (SM).

    Args:
        items: maximum number of work items.
        groups: maximum number of work groups.
        shared: bytes of shared memory.
        shared_unit: shared memory is allocated to a group in multiples of this number of bytes.
        reserved: bytes of shared memory that the system takes for each group.
    """

    items: int
    groups: int
    shared: int
    shared_unit: int = 128
    reserved: int = 1 << 10


ARCHITECTURES = {
    "sm_75": Architecture(items=1024, groups=16, shared=64 << 10, shared_unit=256, reserved=0),
    "sm_80": Architecture(items=2048, groups=32, shared=164 << 10),
    "sm_90": Architecture(items=2048, groups=32, shared=228 << 10),
    "sm_100": Architecture(items=2048, groups=32, shared=228 << 10),
}


def occupancy(architecture: Architecture, group: int, registers: int, shared: int) -> float:
    """Return the work items that a compute unit holds, divided by its maximum; 0 if a group does not fit.

    Args:
        group: work items of a group.
        registers: per work item.
        shared: bytes of shared memory per group.
    """
    warps = _up(group, SUBGROUP) // SUBGROUP
    per_warp = _up(max(registers, 1) * SUBGROUP, REGISTER_UNIT)
    by_registers = REGISTERS // SCHEDULERS // per_warp * SCHEDULERS // warps
    by_items = architecture.items // SUBGROUP // warps
    each = _up(shared + architecture.reserved, architecture.shared_unit)
    by_shared = architecture.shared // each if each else architecture.groups
    groups = min(by_registers, by_items, by_shared, architecture.groups)
    return groups * warps * SUBGROUP / architecture.items


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
