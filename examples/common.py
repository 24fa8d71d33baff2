"""Shared code of the training examples: opening the device, reading its counters, and printing the report."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

console = Console()

NO_BP = """No device type 'bp' in this PyTorch. What to check:
  - Is torch-backplane installed in this Python ({python})?   pip show torch-backplane
  - Is TORCH_DEVICE_BACKEND_AUTOLOAD=0 set? It keeps PyTorch from loading Backplane: unset it."""

NO_BP_DEVICE = """Backplane is loaded, but none of its drivers found a device.
`python -m torch_backplane info` shows what each driver looked for. TORCH_BACKPLANE_DRIVERS is {drivers}."""


def open_device(name: str, driver: str | None = None) -> torch.device:
    """Return the device `name` and make it the current device.

    Exits with an error message if the device does not exist. For an unknown name, this is PyTorch's message.

    Args:
        name: a PyTorch device, such as "bp" or "bp:1".
        driver: the Backplane drivers to use, separated by commas. None: all.
    """
    if driver:
        os.environ["TORCH_BACKPLANE_DRIVERS"] = driver  # read at discovery, when bp is first used
    if name.split(":")[0] == "bp":
        if not hasattr(torch, "bp"):
            sys.exit(NO_BP.format(python=sys.executable))
        if not torch.bp.is_available():
            sys.exit(NO_BP_DEVICE.format(drivers=os.environ.get("TORCH_BACKPLANE_DRIVERS", "not set")))
    try:
        device = torch.device(name)
        torch.empty(1, device=device)  # fails early for an index out of range
    except (RuntimeError, AssertionError) as error:
        sys.exit(f"--device {name}: {str(error).splitlines()[0]}")
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    return device


def device_title(device: torch.device) -> str:
    """Return a title for a device: its type and index, and the name of the hardware."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return f"{device} ({torch.get_device_module(device).get_device_name(device)})"


def synchronize(device: torch.device) -> None:
    """Wait until all commands of the device are complete."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of tensors on the device in bytes. None on the CPU, which has no such counter."""
    return None if device.type == "cpu" else torch.get_device_module(device).max_memory_allocated(device)


def fallback_counts(device: torch.device) -> dict[str, int] | None:
    """Return how often each operator fell back to the CPU. None for devices of other backends."""
    if device.type != "bp":
        return None
    import torch_backplane

    return torch_backplane._C.fallback_counts()


def planner_calls(device: torch.device) -> int:
    """Return how often Backplane ran a planner instead of replaying a plan. 0 for devices of other backends."""
    if device.type != "bp":
        return 0
    from torch_backplane import plans

    return plans.total()["planner_calls"]


def kernel_builds(device: torch.device) -> dict[str, int]:
    """Return how many kernels were built and how many were loaded from disk. Empty for devices without kernels."""
    if device.type != "bp" or not torch.bp.get_device_properties(device).dialect:  # type: ignore[attr-defined]
        return {}
    from torch_backplane import drivers

    driver_device = drivers.device(torch.empty(0, device=device).device.index)
    return driver_device.build_counts() if isinstance(driver_device, drivers.Device) else {}


def median_seconds(actions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median time of each action in seconds. The actions alternate, so that noise affects all equally."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, record in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in times]


def progress_bar() -> Progress:
    """Return a progress bar whose description shows the latest figures."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip


def describe_fallbacks(counts: dict[str, int], most: int = 5) -> str:
    """Return a line with the number of fallbacks and the `most` operators with the largest counts."""
    top = sorted(counts.items(), key=lambda item: -item[1])[:most]
    names = ", ".join(f"{name} {count:,}" for name, count in top)
    return f"{sum(counts.values()):,} calls of {len(counts)} operators" + (f" (most: {names})" if names else "")


def print_report(title: str, rows: list[tuple[str, str]]) -> None:
    """Print the final report as a table."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def write_json(path: pathlib.Path, report: object) -> None:
    """Write a report (a dataclass) as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(report), indent=2, default=str) + "\n")  # type: ignore[call-overload]
