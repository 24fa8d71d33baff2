"""What both examples need: choosing the device, reading its counters, and printing the closing report."""

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
  - Is TORCH_DEVICE_BACKEND_AUTOLOAD=0 set? Then PyTorch does not load it by itself: unset it."""

NO_BP_DEVICE = """Backplane is loaded, and none of its drivers found a device.
`python -m torch_backplane info` says what each driver looked for. TORCH_BACKPLANE_DRIVERS is {drivers}."""


def open_device(name: str, driver: str | None = None) -> torch.device:
    """The device called `name`, ready for use; `driver` limits Backplane to the drivers named (comma-separated).

    Exits with advice where `bp` is asked for and absent. A name that PyTorch does not know gets PyTorch's own message.
    """
    if driver:
        os.environ["TORCH_BACKPLANE_DRIVERS"] = driver  # read when the devices are first needed
    if name.split(":")[0] == "bp":
        if not hasattr(torch, "bp"):
            sys.exit(NO_BP.format(python=sys.executable))
        if not torch.bp.is_available():
            sys.exit(NO_BP_DEVICE.format(drivers=os.environ.get("TORCH_BACKPLANE_DRIVERS", "not set")))
    try:
        device = torch.device(name)
        torch.empty(1, device=device)  # an index out of range is reported here, before any work
    except (RuntimeError, AssertionError) as error:
        sys.exit(f"--device {name}: {str(error).splitlines()[0]}")
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    return device


def device_title(device: torch.device) -> str:
    """What people call the device: its type and index, and the hardware's own name where there is one."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    return f"{device} ({torch.get_device_module(device).get_device_name(device)})"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors have held on the device so far; None on the CPU, where nobody counts them."""
    return None if device.type == "cpu" else torch.get_device_module(device).max_memory_allocated(device)


def fallback_counts(device: torch.device) -> dict[str, int] | None:
    """How often each operator ran on the CPU's kernel in place of the device's own; None off Backplane."""
    if device.type != "bp":
        return None
    import torch_backplane

    return torch_backplane._C.fallback_counts()


def planner_calls(device: torch.device) -> int:
    """How often Backplane has run an operator's planner in Python, rather than its plan; 0 off Backplane."""
    if device.type != "bp":
        return 0
    from torch_backplane import plans

    return plans.total()["planner_calls"]


def kernel_builds(device: torch.device) -> dict[str, int]:
    """How many kernels the device's compiler has built, and how many came from the disk; empty where there are none."""
    if device.type != "bp" or not torch.bp.get_device_properties(device).dialect:  # type: ignore[attr-defined]
        return {}
    from torch_backplane import drivers

    driver_device = drivers.device(torch.empty(0, device=device).device.index)
    return driver_device.build_counts() if isinstance(driver_device, drivers.Device) else {}


def median_seconds(actions: list[Callable[[], object]], rounds: int) -> list[float]:
    """The median time of each action in seconds. They take turns, so that a busy moment hits all of them alike."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, record in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in times]


def progress_bar() -> Progress:
    """A progress bar whose description is the latest figures."""
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip


def describe_fallbacks(counts: dict[str, int], most: int = 5) -> str:
    """One line: the total, and the operators that make up most of it."""
    top = sorted(counts.items(), key=lambda item: -item[1])[:most]
    names = ", ".join(f"{name} {count:,}" for name, count in top)
    return f"{sum(counts.values()):,} calls of {len(counts)} operators" + (f" (most: {names})" if names else "")


def print_report(title: str, rows: list[tuple[str, str]]) -> None:
    """The closing table."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)


def write_json(path: pathlib.Path, report: object) -> None:
    """A report (dataclass) as JSON, for whoever compares runs."""
    path.write_text(json.dumps(dataclasses.asdict(report), indent=2, default=str) + "\n")  # type: ignore[call-overload]
