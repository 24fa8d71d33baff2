"""The c10d backend of bp, `backplane`: torch.distributed for bp tensors.

Registered when torch_backplane is imported. `init_process_group()` selects it for bp tensors, and Gloo for CPU tensors.
A driver can bring its own collectives (Device.collectives), or a communication library such as NCCL
(Device.communication). Otherwise an engine for CPU tensors does the communication, on host memory that it shares with
the device, or on copies in pinned memory (csrc/distributed/).

TORCH_BACKPLANE_COLLECTIVES=gloo          the engine: gloo, or mpi or ucc if PyTorch was built with it
TORCH_BACKPLANE_HOST_LINK=1GiB/s,20us     a modelled link: collectives of host devices take at least as long as over it
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torch_backplane import _C, drivers
from torch_backplane.drivers.base import SettingError

NAME = "backplane"
ENGINES = ("gloo", "mpi", "ucc")
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def register() -> None:
    """Register the backend with torch.distributed, as the default for bp."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["bp"])
    for name, wrapped in (
        ("init_process_group", _with_default_backend(dist.init_process_group)),
        ("new_group", _with_backend_type(dist.new_group)),
        ("split_group", _with_split(dist.split_group)),
    ):
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)


def _with_default_backend(init_process_group: Callable[..., None]) -> Callable[..., None]:
    """Give `init_process_group()` a backend for CPU tensors and, if the process has bp devices, for bp tensors.

    Without a name, PyTorch would create a group for bp tensors only, of the type of Gloo, which
    DistributedDataParallel does not find.
    """

    @functools.wraps(init_process_group)
    def function(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if backend is None and kwargs.get("device_id") is None and _accelerator_is_bp():
            backend = default_backend()
        init_process_group(backend, *args, **kwargs)
        _set_backend_type(dist.group.WORLD)

    return function


def _with_backend_type(new_group: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(new_group)
    def function(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        _set_backend_type(group)
        return group

    return function


def _with_split(split_group: Callable[..., Any]) -> Callable[..., Any]:
    """Make `split_group()` create groups of `backplane`, whose engines cannot be split, with new connections.

    The ranks of the parent call it, and each rank gets its own group or None. PyTorch names such a group after its
    ranks and the number of groups that the process has: the ranks of a group must have equally many.
    """

    @functools.wraps(split_group)
    def function(
        parent_pg: Any = None,
        split_ranks: list[list[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Any:
        names = ""
        if split_ranks and dist.is_initialized():
            parent = dist.group.WORLD if parent_pg is None else parent_pg
            names = dist.get_backend_config(parent)
        if not split_ranks or f"bp:{NAME}" not in names.split(","):
            since_2_13 = {} if backend is None else {"backend": backend}
            return split_group(parent_pg, split_ranks, timeout, pg_options, group_desc, **since_2_13)
        ranks = dist.get_process_group_ranks(parent)
        mine = [sorted(given) for given in split_ranks if ranks.index(dist.get_rank()) in given]
        if not mine:
            return None
        return dist.new_group(
            [ranks[index] for index in mine[0]],
            timeout=timeout,
            backend=backend or names,
            pg_options=pg_options,
            use_local_synchronization=True,
            group_desc=group_desc,
        )

    return function


def _set_backend_type(group: Any) -> None:
    """Give a group of several backends a type if one is ours. PyTorch does so for its own backends only, and warns."""
    types = {device.type for device in getattr(group, "_device_types", ())}
    if "bp" in types and len(types) > 1:
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)


def _accelerator_is_bp() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "bp"


def default_backend() -> str:
    """Return what `init_process_group()` uses: a backend for CPU tensors and, with a bp device, one for bp tensors."""
    if not torch.accelerator.is_available():  # the process has no bp device
        return "gloo"
    return f"cpu:gloo,bp:{NAME}" if dist.is_gloo_available() else NAME


def engine_name() -> str:
    """Return TORCH_BACKPLANE_COLLECTIVES, "gloo" by default.

    Raises:
        SettingError: it is not the name of an engine, or this PyTorch was built without it.
    """
    name = os.environ.get("TORCH_BACKPLANE_COLLECTIVES", "gloo").strip()
    if name not in ENGINES:
        raise SettingError(f"TORCH_BACKPLANE_COLLECTIVES={name!r} is not one of {', '.join(ENGINES)}")
    if not getattr(dist, f"is_{name}_available")():
        raise SettingError(f"TORCH_BACKPLANE_COLLECTIVES={name!r}: this PyTorch was built without {name}")
    return name


def host_link() -> tuple[float, float] | None:
    """Return the modelled link, TORCH_BACKPLANE_HOST_LINK.

    Returns:
        The delay of a transfer in seconds, and the speed in bytes per second. None if the variable is not set.

    Raises:
        SettingError: it is malformed.
    """
    text = os.environ.get("TORCH_BACKPLANE_HOST_LINK")
    if text is None:
        return None
    found = re.fullmatch(r"\s*([^,/]+)/s\s*(?:,\s*(\d+(?:\.\d+)?)\s*(s|ms|us)\s*)?", text)
    if found is None:
        raise SettingError(
            f"TORCH_BACKPLANE_HOST_LINK={text!r} is not a link: write a speed, or a speed and a delay, "
            "such as 1GiB/s,20us"
        )
    from torch_backplane.drivers.sizes import parse_size  # not at import of torch_backplane: few programs need it

    delay = float(found[2]) * _TIMES[found[3]] if found[2] else 0.0
    return delay, float(parse_size(found[1], "TORCH_BACKPLANE_HOST_LINK"))


def _create(options: Any, backend_options: Any) -> Any:
    """Create the backend of a process group, for torch.distributed.

    Args:
        options: c10d's DistributedBackendOptions.
        backend_options: not supported; None.

    Raises:
        ValueError: `backend_options` is not None.
        RuntimeError: there is no bp device.
    """
    if backend_options is not None:
        raise ValueError(f"the {NAME} backend has no options, but got pg_options={backend_options!r}")
    index = torch.accelerator.current_device_index()
    device = drivers.device(index)
    own = device.collectives(options) if isinstance(device, drivers.Device) else None
    if own is not None:
        return own
    link = host_link() if _C.device_properties(index).driver == "host" else None
    staged = _C.make_distributed_backend(_engine(options), link)
    libraries = _communication_libraries()
    if libraries:
        return _C.make_library_backend(staged, options.store, libraries, _timeout(options))
    options.store.set(f"place/{options.group_rank}", "")  # other ranks can have a library: see library_backend.cpp
    return staged


def _communication_libraries() -> dict[int, Any]:
    """Return the communication libraries of the devices, by index."""
    devices = [drivers.device(index) for index in range(torch.accelerator.device_count())]
    found = {index: one.communication for index, one in enumerate(devices) if isinstance(one, drivers.Device)}
    return {index: library for index, library in found.items() if library is not None}


def _timeout(options: Any) -> timedelta:
    return options.timeout if isinstance(options.timeout, timedelta) else timedelta(seconds=options.timeout)


def _engine(options: Any) -> Any:
    c10d = dist.distributed_c10d
    timeout = _timeout(options)
    match engine_name():
        case "mpi":
            return c10d.ProcessGroupMPI.create(list(options.global_ranks_in_group))
        case "ucc":
            return c10d.ProcessGroupUCC(options.store, options.group_rank, options.group_size, timeout=timeout)
    engine = c10d.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=timeout)
    engine.options.global_ranks_in_group = list(options.global_ranks_in_group)
    engine.options.group_name = options.group_id
    engine._set_sequence_number_for_group()
    return engine
