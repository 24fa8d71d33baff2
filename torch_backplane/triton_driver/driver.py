"""Triton's driver for bp devices. Imported when Triton is; the launcher is imported when Triton uses the driver."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from torch_backplane import accelerator, drivers
from torch_backplane.triton_driver.targets import triton_target

if TYPE_CHECKING:
    from torch_backplane.triton_driver.launcher import Binary

_BENCHMARK_CACHE = 256 << 20  # bytes, as in Triton's own drivers: more than the L2 cache of any GPU


class Utilities:
    """What Triton's kernels call as `driver.utils`. Devices are numbered as bp devices."""

    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        """Return limits and figures of a device."""
        return dict(triton_target(device).properties)

    @staticmethod
    def load_binary(name: str, binary: bytes, shared: int, device: int) -> tuple[Binary, Binary, int, int, int]:
        """Load a kernel.

        Returns:
            The module and the kernel, which are one object here; registers and spilled registers of a work item; the
            greatest number of work items in a group.

        Raises:
            Exception: the device cannot load the binary.
        """
        from torch_backplane.triton_driver.launcher import Binary

        loads: Any = drivers.device(device)
        resources = loads.kernel_resources(loads.load(binary, name)) or drivers.KernelResources()
        loaded = Binary(device, name, binary)
        registers, spilled = resources.registers or 0, (resources.spilled_bytes or 0) // 4
        return loaded, loaded, registers, spilled, resources.max_group_size or 1024

    @staticmethod
    def unload_module(module: Binary) -> None:
        """Do nothing: the runtime unloads a kernel when no command needs it."""


class BackplaneDriver(DriverBase):  # type: ignore[misc]
    """Triton's driver for bp: the current device and stream are those of `torch.bp`."""

    utils = Utilities

    def __init__(self) -> None:
        super().__init__()
        from torch_backplane.triton_driver import launcher  # imports the kernel generator, which is slow

        self.launcher_cls = launcher.Launcher
        self._refuse_in_traces = launcher.refuse_in_traces

    @staticmethod
    def is_active() -> bool:
        """Return whether Triton should use bp by default.

        It should if there is a bp device for it, and either no other driver is active or TRITON_DEFAULT_BACKEND is
        "bp". Devices are only looked for if no other driver is active.
        """
        from triton.backends import backends

        others = [one.driver for one in backends.values() if one.driver is not BackplaneDriver]
        if os.environ.get("TRITON_DEFAULT_BACKEND") != "bp" and any(one.is_active() for one in others):
            return False
        return any(drivers.device(index).triton_target for index in range(accelerator.device_count()))

    def get_current_device(self) -> int:
        """Return the index of the current bp device."""
        self._refuse_in_traces()
        return accelerator.current_device()

    @staticmethod
    def set_current_device(device: int) -> None:
        """Make a bp device the current one."""
        accelerator.set_device(device)

    @staticmethod
    def get_current_stream(device: int) -> int:
        """Return the id of the current stream of a device. Launches use that stream, whatever number they get."""
        return accelerator.current_stream(device).stream_id

    @staticmethod
    def get_device_capability(device: int) -> tuple[int, int]:
        """Return the compute capability of a device."""
        return drivers.device(device).properties.capability

    def get_current_target(self) -> GPUTarget:
        """Return what Triton compiles for on the current device."""
        target = triton_target(self.get_current_device())
        return GPUTarget(target.backend, target.architecture, target.warp_size)

    @staticmethod
    def get_active_torch_device() -> torch.device:
        """Return the current bp device."""
        return torch.device("bp", accelerator.current_device())

    @staticmethod
    def get_device_interface() -> Any:
        """Return the module with streams and events: `torch.bp`."""
        return accelerator

    @staticmethod
    def map_python_to_cpp_type(ty: str) -> str:
        """Return the C type of an argument, as Triton's own driver does."""
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(ty))

    @staticmethod
    def get_benchmarker() -> Any:
        """Return the function that measures configurations for `triton.autotune`."""
        from triton.testing import do_bench

        return do_bench

    @staticmethod
    def get_empty_cache_for_benchmark() -> torch.Tensor:
        """Return the buffer that `clear_cache` fills, on the current device."""
        return torch.empty(_BENCHMARK_CACHE // 4, dtype=torch.int32, device="bp")

    @staticmethod
    def clear_cache(cache: torch.Tensor) -> None:
        """Remove everything else from the device's caches."""
        cache.zero_()


class NoCompiler:
    """The compiler of Triton's backend `bp`: none, because Triton's own backends compile for the targets."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Return False."""
        return False
