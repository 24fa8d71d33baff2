"""What discovery checks of a driver's device before the runtime gets it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from torch_backplane import _C
from torch_backplane.drivers.base import (
    ADDRESS_SPACES,
    ASYNCHRONOUS_METHODS,
    EVENT_METHODS,
    EVENTS,
    GROUP_METHODS,
    GROUP_NEEDS,
    KINDS,
    LEAST_LARGEST,
    NATIVE_APIS,
    NATIVE_EXTRAS,
    NATIVE_GROUPS,
    NATIVE_METHODS,
    PINNING_METHODS,
    RESERVING_METHODS,
    Device,
    DeviceProperties,
    NativeDevice,
    NativeLauncher,
)
from torch_backplane.drivers.libraries import FAMILIES, Library, Routine

LARGEST_MEMORY = 2**63 - 1


def checked_properties(driver: str, device: Any) -> Any:
    """The `_C.DeviceProperties` of a device.

    Raises:
        TypeError, ValueError: the device breaks the contract; the message says where.
    """
    if not isinstance(device, (Device, NativeDevice)):
        raise TypeError(f"devices() returned {device!r}, which is no torch_backplane.drivers.Device")
    properties = device.properties
    if not isinstance(properties, DeviceProperties):
        raise TypeError(f"{type(device).__name__}.properties is {properties!r}, and must be a DeviceProperties")
    for field, accepted, is_good in RULES:
        value = getattr(properties, field)
        if not is_good(value):
            raise ValueError(f"{type(device).__name__}.properties.{field} is {value!r}, and must be {accepted}")
    dialect = dialect_name(type(device).__name__, properties.dialect)
    if isinstance(device, Device):
        check_kernels(device, dialect)
        check_libraries(device)
        check_methods(device, properties)
    return _C.DeviceProperties(
        driver=driver,
        name=properties.name,
        total_memory=properties.total_memory,
        address_space=properties.address_space,
        compute_units=properties.compute_units,
        capability=tuple(properties.capability),
        dtypes=properties.dtypes,
        dialect=dialect,
        kind=properties.kind,
        local_memory=local_memory(properties) if dialect else 0,
    )


def local_memory(properties: DeviceProperties) -> int:
    from torch_backplane.kernels.target import Target  # which is not loaded for devices that run no kernels

    return (properties.target or Target.of_kind(properties.kind)).local_memory


def check_methods(device: Device, properties: DeviceProperties) -> None:
    """Methods that only make sense together. Those of events are not needed where a native launcher has events."""
    cls, launcher = type(device), device.native_launcher
    for group, method in GROUP_METHODS.items():
        if launcher is not None and launcher.has(group) and getattr(cls, method) is getattr(Device, method):
            raise TypeError(f"{cls.__name__}.native_launcher has functions for {group}, and there is no {method}()")
    unneeded = EVENT_METHODS if launcher is not None and launcher.has(EVENTS) else ()
    if properties.address_space != "synthetic" and cls.address is Device.address:
        raise TypeError(
            f"{cls.__name__} has the address space {properties.address_space!r}, and has no address() method"
        )
    if properties.address_space == "synthetic" and properties.dlpack_device is not None:
        raise ValueError(
            f"{cls.__name__} has a dlpack_device, and its synthetic addresses mean nothing to others: "
            "the address space must be 'host' or 'device'"
        )
    if properties.address_space == "device" and launcher is not None and launcher.api == "opencl":
        raise ValueError(
            f"{cls.__name__} has the address space 'device', and OpenCL's launches take buffers, not pointers"
        )
    for methods, kind in (
        (ASYNCHRONOUS_METHODS, "an asynchronous device"),
        (RESERVING_METHODS, "a device that reserves address space"),
        (PINNING_METHODS, "a device that pins host memory"),
    ):
        own = [name for name in methods if getattr(cls, name) is not getattr(Device, name)]
        missing = [name for name in methods if name not in own and name not in unneeded]
        if own and missing:
            raise TypeError(f"{cls.__name__} has its own {', '.join(own)}; {kind} also needs {', '.join(missing)}")


def dialect_name(owner: str, dialect: Any) -> str:
    """Of `properties.dialect`; empty for none.

    Raises:
        ValueError, TypeError: it is no dialect that Backplane has, and none that could be a driver's.
    """
    if isinstance(dialect, str) and not dialect:
        return ""
    # Not loaded for devices that run no kernels.
    from torch_backplane.kernels.dialects import DIALECTS, WORDS, Dialect

    if isinstance(dialect, str):
        if dialect not in DIALECTS:
            raise ValueError(
                f"{owner}.properties.dialect is {dialect!r}, which nobody brought: Backplane has "
                f"{', '.join(DIALECTS)}, and a driver brings its own as a subclass of torch_backplane.kernels.Dialect"
            )
        return dialect
    if not (isinstance(dialect, type) and issubclass(dialect, Dialect)):
        raise TypeError(
            f"{owner}.properties.dialect is {dialect!r}, and must be a name or a subclass of "
            "torch_backplane.kernels.Dialect"
        )
    name = getattr(dialect, "name", None)
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f"the dialect {dialect.__name__} needs a name, and has {name!r}")
    missing = sorted(dialect.__abstractmethods__) + [one for one in ("types",) if not hasattr(dialect, one)]
    if missing:
        raise TypeError(f"the dialect {name} lacks what every kernel needs: {', '.join(missing)}")
    unknown = sorted(set(dialect.words) - set(WORDS))
    if unknown:
        raise ValueError(f"the dialect {name} has {', '.join(unknown)} among its words, which are {', '.join(WORDS)}")
    return name


def check_kernels(device: Device, dialect: str) -> None:
    """What a device needs to run kernels, if it says that it does."""
    cls, launcher = type(device), device.native_launcher
    if not dialect and launcher is None:
        return
    if not dialect:
        raise ValueError(f"{cls.__name__} has a native_launcher, and its properties name no dialect")
    needed: tuple[str, ...] = ("compile", "launch")
    if launcher is not None:
        if not isinstance(launcher, NativeLauncher):
            raise TypeError(f"{cls.__name__}.native_launcher is {launcher!r}, and must be a NativeLauncher or None")
        if launcher.api not in NATIVE_APIS:
            raise ValueError(f"NativeLauncher.api is {launcher.api!r}, and must be one of {', '.join(NATIVE_APIS)}")
        check_functions(launcher)
        needed = NATIVE_METHODS
    missing = [name for name in needed if getattr(cls, name) is getattr(Device, name)]
    if missing:
        raise TypeError(f"{cls.__name__} takes kernels in {dialect}, and has no {', '.join(missing)}")


def check_functions(launcher: NativeLauncher) -> None:
    """Those of a native launcher, whose api is known.

    Raises:
        TypeError, ValueError: they are no dictionary, one that is needed is missing, or nobody knows it.
    """
    api, functions = launcher.api, launcher.functions
    if not isinstance(functions, dict):
        raise TypeError(f"NativeLauncher.functions is {functions!r}, and must be a dictionary of names and addresses")
    for name in NATIVE_APIS[api]:
        if not _is_whole(functions.get(name), 1, 2**64 - 1):
            raise ValueError(f"NativeLauncher.functions has no address of {name}, which {api} needs")
    known = [*NATIVE_APIS[api], *NATIVE_EXTRAS[api]]
    for purpose, group in NATIVE_GROUPS[api].items():
        known += group
        own = [name for name in group if name in functions]
        missing = [name for name in group if name not in own]
        if own and missing:
            raise ValueError(
                f"NativeLauncher.functions has {', '.join(own)}; {purpose} of {api} also need {', '.join(missing)}"
            )
        needed = GROUP_NEEDS.get(purpose, purpose)
        if own and not launcher.has(needed):
            raise ValueError(
                f"NativeLauncher.functions has {', '.join(own)}; {purpose} of {api} also need the functions of "
                f"{needed}: {', '.join(NATIVE_GROUPS[api][needed])}"
            )
    for name, address in functions.items():
        if name not in known:
            raise ValueError(f"NativeLauncher.functions has {name!r}, and {api} knows {', '.join(known)}")
        if not _is_whole(address, 1, 2**64 - 1):
            raise ValueError(f"NativeLauncher.functions[{name!r}] is {address!r}, and must be an address above 0")


def check_libraries(device: Device) -> None:
    """Those that a device lists.

    Raises:
        TypeError, ValueError: one breaks the contract of `drivers.libraries`; the message says where.
    """
    cls, libraries = type(device).__name__, device.libraries
    if not isinstance(libraries, (list, tuple)):
        raise TypeError(f"{cls}.libraries is {libraries!r}, and must be a sequence of Library")
    if libraries and device.native_launcher is None:
        raise ValueError(f"{cls} has libraries, whose routines need a native queue, and no native_launcher")
    for library in libraries:
        if not isinstance(library, Library):
            raise TypeError(f"{cls}.libraries has {library!r}, and each must be a Library")
        if not isinstance(library.name, str) or not library.name.strip():
            raise ValueError(f"Library.name is {library.name!r}, and must be a string that is not empty")
        owner = f"the library {library.name}"
        if [other.name for other in libraries].count(library.name) > 1:
            raise ValueError(f"{cls}.libraries has {owner} more than once")
        if library.explain is not None and not callable(library.explain):
            raise TypeError(f"explain of {owner} is {library.explain!r}, and must be a function of a status, or None")
        if not isinstance(library.routines, Mapping) or not library.routines:
            raise TypeError(f"{owner} has the routines {library.routines!r}, and needs a dictionary by families")
        for family, routine in library.routines.items():
            if family not in FAMILIES:
                raise ValueError(f"{owner} has a routine for {family!r}; the families are {', '.join(FAMILIES)}")
            check_routine(f"the {family} routine of {owner}", routine)
            if not FAMILIES[family].memory:
                warnings.warn(f"torch_backplane: no planner calls {family} routines yet: {owner} has one", stacklevel=2)


def check_routine(owner: str, routine: Any) -> None:
    if not isinstance(routine, Routine):
        raise TypeError(f"{owner} is {routine!r}, and must be a Routine")
    if not isinstance(routine.addresses, Mapping) or not _are_dtypes(tuple(routine.addresses)):
        raise TypeError(f"{owner} has the addresses {routine.addresses!r}, and needs one for each dtype it computes")
    for dtype, address in routine.addresses.items():
        if not _is_whole(address, 1, 2**64 - 1):
            raise ValueError(f"{owner} has the address {address!r} for {dtype}, and needs one above 0")
    for name in ("guard", "workspace", "cost"):
        query = getattr(routine, name)
        if query is not None and not callable(query):
            raise TypeError(f"{owner} has the {name} {query!r}, and it must be a function of a call, or None")
    if routine.cache is not None:
        missing = [name for name in ("size", "max_size", "set_max_size") if not hasattr(routine.cache, name)]
        if missing:
            raise TypeError(f"{owner} has a cache without {', '.join(missing)}")


def _is_whole(value: Any, least: int, most: int = LARGEST_MEMORY) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_dtypes(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and bool(value) and all(
        isinstance(item, torch.dtype) for item in value
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(_is_whole(part, 0, 2**31 - 1) for part in value)


def _is_target(value: Any) -> bool:
    if value is None:
        return True
    from torch_backplane.kernels.target import Target  # which is not loaded for devices that run no kernels

    return isinstance(value, Target)


# (field, what is accepted in words, the test)
RULES = (
    ("name", "a string that is not empty", lambda value: isinstance(value, str) and value.strip() != ""),
    ("total_memory", "a whole number of bytes above 0", lambda value: _is_whole(value, 1)),
    (
        "largest_allocation",
        f"a whole number of bytes, {LEAST_LARGEST} or more",
        lambda value: _is_whole(value, LEAST_LARGEST),
    ),
    ("dtypes", "a sequence of torch.dtype with at least one element", _are_dtypes),
    (
        "address_space",
        f"one of {', '.join(ADDRESS_SPACES)}",
        lambda value: isinstance(value, str) and value in ADDRESS_SPACES,
    ),
    (
        "dlpack_device",
        "a pair (type, id) of whole numbers as in dlpack.h, or None",
        lambda value: value is None or _is_pair(value),
    ),
    ("compute_units", "a whole number above 0", lambda value: _is_whole(value, 1, 2**31 - 1)),
    ("capability", "a pair (major, minor) of whole numbers", _is_pair),
    ("kind", f"one of {', '.join(KINDS)}", lambda value: value in KINDS),
    ("target", "a torch_backplane.kernels.Target, or None", _is_target),
    ("software", "a string", lambda value: isinstance(value, str)),
)
