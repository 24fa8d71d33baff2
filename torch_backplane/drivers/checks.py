"""Checks of a driver's device, which discovery makes before it adds the device to the runtime."""

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
    SENSORS,
    Device,
    DeviceProperties,
    NativeDevice,
    NativeLauncher,
)
from torch_backplane.drivers.libraries import FAMILIES, Library, Routine

LARGEST_MEMORY = 2**63 - 1


def checked_properties(driver: str, device: Any) -> Any:
    """Check a device and return its `_C.DeviceProperties`.

    Raises:
        TypeError, ValueError: the device violates the driver contract; the message says how.
    """
    if not isinstance(device, (Device, NativeDevice)):
        raise TypeError(f"devices() returned {device!r}, which is not a torch_backplane.drivers.Device")
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
        check_sensors(device)
        check_methods(device, properties)
    return _C.DeviceProperties(
        driver=driver,
        name=properties.name,
        total_memory=properties.total_memory,
        largest_allocation=properties.largest_allocation,
        address_space=properties.address_space,
        compute_units=properties.compute_units,
        capability=tuple(properties.capability),
        dtypes=properties.dtypes,
        dialect=dialect,
        kind=properties.kind,
        local_memory=local_memory(properties) if dialect else 0,
    )


def local_memory(properties: DeviceProperties) -> int:
    from torch_backplane.kernels.target import Target  # imported late: devices without kernels do not need it

    return (properties.target or Target.of_kind(properties.kind)).local_memory


def check_methods(device: Device, properties: DeviceProperties) -> None:
    """Check methods that depend on each other. Event methods are not required if the native launcher has events."""
    cls, launcher = type(device), device.native_launcher
    for group, method in GROUP_METHODS.items():
        if launcher is not None and launcher.has(group) and getattr(cls, method) is getattr(Device, method):
            raise TypeError(f"{cls.__name__}.native_launcher has functions for {group}, but there is no {method}()")
    unneeded = EVENT_METHODS if launcher is not None and launcher.has(EVENTS) else ()
    if properties.address_space != "synthetic" and cls.address is Device.address:
        raise TypeError(
            f"{cls.__name__} has the address space {properties.address_space!r} but no address() method"
        )
    if properties.address_space == "synthetic" and properties.dlpack_device is not None:
        raise ValueError(
            f"{cls.__name__} has a dlpack_device, but other libraries cannot use its synthetic addresses: "
            "set address_space to 'host' or 'device'"
        )
    if properties.address_space == "device" and launcher is not None and launcher.api == "opencl":
        raise ValueError(
            f"{cls.__name__} has the address space 'device', but OpenCL launches take buffers, not pointers"
        )
    for methods, kind in (
        (ASYNCHRONOUS_METHODS, "an asynchronous device"),
        (RESERVING_METHODS, "a device that reserves address space"),
        (PINNING_METHODS, "a device that pins host memory"),
    ):
        own = [name for name in methods if getattr(cls, name) is not getattr(Device, name)]
        missing = [name for name in methods if name not in own and name not in unneeded]
        if own and missing:
            raise TypeError(f"{cls.__name__} overrides {', '.join(own)}; {kind} also needs {', '.join(missing)}")


def dialect_name(owner: str, dialect: Any) -> str:
    """Return the name of `properties.dialect`; empty for none.

    Raises:
        ValueError, TypeError: it is neither a built-in dialect nor a valid subclass of `Dialect`.
    """
    if isinstance(dialect, str) and not dialect:
        return ""
    # Imported late: devices without kernels do not need it.
    from torch_backplane.kernels.dialects import DIALECTS, WORDS, Dialect

    if isinstance(dialect, str):
        if dialect not in DIALECTS:
            raise ValueError(
                f"{owner}.properties.dialect is {dialect!r}, which is not a built-in dialect ({', '.join(DIALECTS)}); "
                "for another language, use a subclass of torch_backplane.kernels.Dialect"
            )
        return dialect
    if not (isinstance(dialect, type) and issubclass(dialect, Dialect)):
        raise TypeError(
            f"{owner}.properties.dialect is {dialect!r}, and must be a name or a subclass of "
            "torch_backplane.kernels.Dialect"
        )
    name = getattr(dialect, "name", None)
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f"the dialect {dialect.__name__} has the name {name!r}; it needs a string that is not empty")
    missing = sorted(dialect.__abstractmethods__) + [one for one in ("types",) if not hasattr(dialect, one)]
    if missing:
        raise TypeError(f"the dialect {name} does not define {', '.join(missing)}, which all kernels need")
    unknown = sorted(set(dialect.words) - set(WORDS))
    if unknown:
        raise ValueError(f"the dialect {name} has the unknown words {', '.join(unknown)}; known are {', '.join(WORDS)}")
    return name


def check_kernels(device: Device, dialect: str) -> None:
    """Check what a device needs to run kernels, if it has a dialect."""
    cls, launcher = type(device), device.native_launcher
    if not dialect and launcher is None:
        return
    if not dialect:
        raise ValueError(f"{cls.__name__} has a native_launcher, but its properties have no dialect")
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
        raise TypeError(f"{cls.__name__} takes kernels in {dialect}, but does not override {', '.join(missing)}")


def check_functions(launcher: NativeLauncher) -> None:
    """Check the functions of a native launcher whose api is known.

    Raises:
        TypeError, ValueError: they are not a dictionary, or a function is missing, unknown or not an address.
    """
    api, functions = launcher.api, launcher.functions
    if not isinstance(functions, dict):
        raise TypeError(f"NativeLauncher.functions is {functions!r}, and must be a dictionary of names and addresses")
    for name in NATIVE_APIS[api]:
        if not _is_whole(functions.get(name), 1, 2**64 - 1):
            raise ValueError(f"NativeLauncher.functions has no address for {name}, which {api!r} needs")
    known = [*NATIVE_APIS[api], *NATIVE_EXTRAS[api]]
    for purpose, group in NATIVE_GROUPS[api].items():
        known += group
        own = [name for name in group if name in functions]
        missing = [name for name in group if name not in own]
        if own and missing:
            raise ValueError(
                f"NativeLauncher.functions has {', '.join(own)}; {purpose} also need {', '.join(missing)}"
            )
        needed = GROUP_NEEDS.get(purpose, purpose)
        if own and not launcher.has(needed):
            raise ValueError(
                f"NativeLauncher.functions has {', '.join(own)}; {purpose} also need the functions of "
                f"{needed}: {', '.join(NATIVE_GROUPS[api][needed])}"
            )
    for name, address in functions.items():
        if name not in known:
            raise ValueError(f"NativeLauncher.functions has the unknown name {name!r}; {api!r} has {', '.join(known)}")
        if not _is_whole(address, 1, 2**64 - 1):
            raise ValueError(f"NativeLauncher.functions[{name!r}] is {address!r}, and must be an address above 0")


def check_libraries(device: Device) -> None:
    """Check the libraries of a device.

    Raises:
        TypeError, ValueError: one violates the contract in `drivers.libraries`; the message says how.
    """
    cls, libraries = type(device).__name__, device.libraries
    if not isinstance(libraries, (list, tuple)):
        raise TypeError(f"{cls}.libraries is {libraries!r}, and must be a sequence of Library")
    if libraries and device.native_launcher is None:
        raise ValueError(f"{cls} has libraries but no native_launcher; routines need a native queue")
    for library in libraries:
        if not isinstance(library, Library):
            raise TypeError(f"{cls}.libraries has {library!r}; each element must be a Library")
        if not isinstance(library.name, str) or not library.name.strip():
            raise ValueError(f"Library.name is {library.name!r}, and must be a string that is not empty")
        owner = f"the library {library.name}"
        if [other.name for other in libraries].count(library.name) > 1:
            raise ValueError(f"{cls}.libraries has {owner} more than once")
        if library.explain is not None and not callable(library.explain):
            raise TypeError(f"explain of {owner} is {library.explain!r}, and must be a function of a status, or None")
        if not isinstance(library.routines, Mapping) or not library.routines:
            raise TypeError(f"{owner} has the routines {library.routines!r}; it needs a dictionary by family")
        for family, routine in library.routines.items():
            if family not in FAMILIES:
                raise ValueError(f"{owner} has a routine for {family!r}; the families are {', '.join(FAMILIES)}")
            check_routine(f"the {family} routine of {owner}", routine)
            if not FAMILIES[family].memory:
                warnings.warn(f"torch_backplane: no planner calls the {family} routine of {owner} yet", stacklevel=2)


def check_sensors(device: Device) -> None:
    """Check the sensors of a device.

    Raises:
        TypeError, ValueError: one is unknown, or cannot be read.
    """
    cls, sensors = type(device), device.sensors
    if not isinstance(sensors, (list, tuple, set, frozenset)):
        raise TypeError(f"{cls.__name__}.sensors is {sensors!r}, and must be a sequence or set of names")
    for name in sensors:
        if name not in SENSORS:
            raise ValueError(f"{cls.__name__}.sensors has {name!r}; known are {', '.join(SENSORS)}")
    if bool(sensors) != (cls.read_sensor is not Device.read_sensor):
        raise TypeError(f"{cls.__name__} must have both sensors and read_sensor(), or neither")


def check_routine(owner: str, routine: Any) -> None:
    if not isinstance(routine, Routine):
        raise TypeError(f"{owner} is {routine!r}, and must be a Routine")
    if not isinstance(routine.addresses, Mapping) or not _are_dtypes(tuple(routine.addresses)):
        raise TypeError(f"{owner} has the addresses {routine.addresses!r}; it needs one for each supported dtype")
    for dtype, address in routine.addresses.items():
        if not _is_whole(address, 1, 2**64 - 1):
            raise ValueError(f"{owner} has the address {address!r} for {dtype}; it must be above 0")
    for name in ("guard", "workspace", "cost", "forms"):
        query = getattr(routine, name)
        if query is not None and not callable(query):
            raise TypeError(f"{owner} has the {name} {query!r}; it must be a function of a call, or None")
    if not isinstance(routine.tf32, bool):
        raise TypeError(f"{owner} has tf32 = {routine.tf32!r}, which must be a bool")
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
    from torch_backplane.kernels.target import Target  # imported late: devices without kernels do not need it

    return isinstance(value, Target)


# (field, description of the accepted values, predicate)
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
