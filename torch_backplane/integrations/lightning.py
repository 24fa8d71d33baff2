"""Lightning: `Trainer(accelerator="bp")` and `Fabric(accelerator="bp")`; `"auto"` chooses bp before the CPU.

The accelerator is registered in Lightning's public registries. The rest has no hook. Changed:

- `accelerator="auto"`: bp instead of the CPU.
- The strategy for one device: Lightning uses the CPU for accelerators other than its own.
- `precision="16-mixed"` and `"bf16-mixed"`: autocast and gradient scaler for bp instead of CUDA.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning.fabric.accelerators
import lightning.fabric.connector
import lightning.fabric.plugins.precision
import lightning.fabric.strategies
import lightning.fabric.utilities.device_parser
import lightning.pytorch.accelerators
import lightning.pytorch.plugins.precision
import lightning.pytorch.strategies
import lightning.pytorch.trainer.connectors.accelerator_connector
import torch

from torch_backplane import accelerator as bp
from torch_backplane.integrations._overrides import replace


class BackplaneAccelerator(lightning.pytorch.accelerators.Accelerator):  # type: ignore[misc]
    """Lightning's description of bp devices. `devices` is a number of devices, or a list of their indices."""

    def setup_device(self, device: torch.device) -> None:
        """Makes `device` the current device."""
        bp.set_device(device)

    def teardown(self) -> None:
        """Frees the cached memory."""
        bp.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """The statistics of the device's memory."""
        return bp.memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """The indices of the devices: the first ones for a number, all for "auto" or -1."""
        if devices in ("auto", -1, "-1"):
            return list(range(bp.device_count()))
        if isinstance(devices, str):
            devices = [int(one) for one in devices.split(",")] if "," in devices else int(devices)
        return list(range(devices)) if isinstance(devices, int) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """The devices with these indices."""
        return [torch.device("bp", index) for index in devices]

    @staticmethod
    def auto_device_count() -> int:
        """One, because several devices need several processes."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Whether there is a bp device."""
        return bp.is_available()

    @staticmethod
    def name() -> str:
        """The name in Lightning's registries."""
        return "bp"


def _auto(original: Any) -> Any:
    @functools.wraps(original)
    def choose() -> str:
        found: str = original()
        return "bp" if found == "cpu" and bp.is_available() else found

    return choose


def _uses_bp(connector: Any) -> bool:
    return connector._accelerator_flag == "bp" or isinstance(connector._accelerator_flag, BackplaneAccelerator)


def _strategy(original: Any, single_device: Any) -> Any:
    @functools.wraps(original)
    def _choose_strategy(self: Any) -> Any:
        found = original(self)
        is_single = _uses_bp(self) and isinstance(found, single_device)
        return single_device(device=self._parallel_devices[0]) if is_single else found

    return _choose_strategy


def _precision(original: Any, mixed_precision: Any) -> Any:
    @functools.wraps(original)
    def _check_and_init_precision(self: Any) -> Any:
        found = original(self)
        if _uses_bp(self) and isinstance(found, mixed_precision) and found.device == "cuda":
            return mixed_precision(found.precision, "bp")
        return found

    return _check_and_init_precision


@functools.cache
def enable() -> None:
    """Makes Lightning know bp devices."""
    registered = {"name": "bp", "accelerator": BackplaneAccelerator, "description": "Backplane's devices"}
    for registry, connector, package in (
        (
            lightning.fabric.accelerators.ACCELERATOR_REGISTRY,
            lightning.fabric.connector._Connector,
            lightning.fabric,
        ),
        (
            lightning.pytorch.accelerators.AcceleratorRegistry,
            lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector,
            lightning.pytorch,
        ),
    ):
        registry.register(**registered)
        connector._choose_strategy = _strategy(connector._choose_strategy, package.strategies.SingleDeviceStrategy)
        connector._check_and_init_precision = _precision(
            connector._check_and_init_precision, package.plugins.precision.MixedPrecision
        )
    connector = lightning.fabric.connector._Connector
    connector._choose_auto_accelerator = staticmethod(_auto(connector._choose_auto_accelerator))
    original = lightning.fabric.utilities.device_parser._select_auto_accelerator
    replace(original, _auto(original))


enable()
