"""What the benchmarks have in common: which device is measured, and what a table says of it."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch


def place(device: str, driver: str | None, threads: int) -> torch.device:
    """The device that `--device` names, with `--driver` and `--threads` set; ends the program where there is none."""
    if driver:
        os.environ["TORCH_BACKPLANE_DRIVERS"] = driver  # read when the devices are first needed
    torch.set_num_threads(threads)
    try:
        return torch.empty(1, device=device).device
    except RuntimeError as error:
        sys.exit(f"--device {device}: {str(error).splitlines()[0]}")


def environment(device: torch.device, threads: int) -> dict[str, Any]:
    """What figures are to be told with."""
    return {
        "device": str(device),
        "name": "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": threads,
    }
