"""The device that a benchmark measures, and the environment that it reports."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch


def place(device: str, driver: str | None, threads: int) -> torch.device:
    """Applies `--driver` and `--threads` and returns the device `--device`. Exits if it does not exist."""
    if driver:
        os.environ["TORCH_BACKPLANE_DRIVERS"] = driver  # read when the devices are first needed
    torch.set_num_threads(threads)
    try:
        return torch.empty(1, device=device).device
    except RuntimeError as error:
        sys.exit(f"--device {device}: {str(error).splitlines()[0]}")


def environment(device: torch.device, threads: int) -> dict[str, Any]:
    """The environment to report with the figures."""
    return {
        "device": str(device),
        "name": "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
    }
