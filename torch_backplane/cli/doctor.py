"""`doctor`: what each driver looked for, what is missing, and whether the devices compute what the CPU does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

LONGEST = 600  # seconds for the drivers and all devices; more only if something hangs
NO_DEVICE = 64  # more than the index of any device
HARDWARE = {"gpu": "a GPU", "accelerator": "an accelerator", "cpu": "the CPU, through OpenCL", "host": "the CPU"}


@dataclass
class Report:
    """What the worker processes have found."""

    findings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by driver
    warnings: list[str] = field(default_factory=list)
    devices: list[dict[str, Any]] = field(default_factory=list)
    cpu: float = 0.0  # seconds of the program on the CPU
    crash: str = ""  # how the process ended while the drivers were asked
    setting: str = ""  # the error of a malformed environment variable


def doctor() -> None:
    """Check what each driver needs, and run a small program on each device.

    Names what is missing and the command that installs it. The program is timed, and its results are compared with the
    CPU's. Drivers and devices run in separate processes, which may crash. The exit code is 0 if at least one device
    works, 1 if none does, and 2 if an environment variable is malformed.
    """
    from torch_backplane.cli.console import fail

    report = examine({})
    if report.crash:
        report = examine_others(report.crash)
    if report.setting:
        fail(report.setting)
    show(report)
    if not any(device.get("works") for device in report.devices):
        raise typer.Exit(1)


def examine(settings: dict[str, str], first: int = 0) -> Report:
    """Ask the drivers, and try the devices from `first` on.

    If a device crashes its process or hangs, another process tries the next ones.

    Args:
        settings: environment variables of the processes.
        first: index of the first device.
    """
    report = Report()
    while True:
        lines, ending = work(settings, first)
        facts = {line.pop("kind"): line for line in lines if line["kind"] != "device"}
        report.devices += [line for line in lines if "kind" in line]
        report.findings = facts.get("drivers", {}).get("findings", {})
        report.warnings = facts.get("warnings", {}).get("texts", [])
        report.setting = facts.get("setting", {}).get("text", "")
        report.cpu = facts.get("cpu", {}).get("seconds", report.cpu)
        begun = facts.get("begin")
        if begun is None or any(device["index"] == begun["index"] for device in report.devices):
            report.crash = "" if report.findings or report.setting else ending
            return report
        report.devices.append({**begun, "error": _ended(ending)})
        first = begun["index"] + 1


def examine_others(crash: str) -> Report:
    """Find the drivers that crash their process, and examine the others.

    Args:
        crash: how the process with all drivers ended.
    """
    from torch_backplane import drivers
    from torch_backplane.drivers import discovery

    crashed, others = {}, []
    for name in discovery.selected_drivers(drivers.available()):
        if ending := examine({"TORCH_BACKPLANE_DRIVERS": name}, NO_DEVICE).crash:
            crashed[name] = ending
        else:
            others.append(name)
    report, remedy = Report(), "update the driver"
    if crashed and others:
        report = examine({"TORCH_BACKPLANE_DRIVERS": ",".join(others)})
        remedy += f", or set TORCH_BACKPLANE_DRIVERS={','.join(others)}"
    for name, ending in (crashed or {"all drivers together": crash}).items():
        report.findings[name] = [{"what": "devices", "ok": False, "found": _ended(ending), "remedy": remedy}]
    return report


def work(settings: dict[str, str], first: int) -> tuple[list[dict[str, Any]], str]:
    """Run one worker process.

    Returns:
        What it has written, and how it ended.
    """
    environment = {**os.environ, "TORCH_BACKPLANE_FALLBACK": "silent", **settings}
    if settings:
        environment.pop("TORCH_BACKPLANE_VISIBLE_DEVICES", None)  # it may name drivers that are left out
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "report")
        file.touch()
        command = [sys.executable, "-m", "torch_backplane.cli.doctor_worker", str(file), str(first)]
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, errors="replace", timeout=LONGEST, check=False
            )
        except subprocess.TimeoutExpired:
            ending = f"no result within {LONGEST} s"
        else:
            code = ended.returncode
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            last = ended.stderr.strip().splitlines()[-1:]
            ending += "".join(f": {line}" for line in last)
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()], ending


def show(report: Report) -> None:
    """Print the report."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    for name, findings in report.findings.items():
        console.print(f"[bold]driver {escape(name)}[/]")
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 1, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for one in findings or [{"what": "no findings", "ok": True, "found": "it does not report any", "remedy": ""}]:
            table.add_row(" [green]ok[/]" if one["ok"] else " [red]✗[/]", escape(f"{one['what']}: {one['found']}"))
            if one["remedy"]:
                table.add_row("", f"[bold]→ {escape(one['remedy'])}[/]")
        console.print(table)
    if report.warnings:
        console.print("\n[bold]Warnings that programs get[/]")
        for text in report.warnings:
            console.print(f" - {text}", markup=False)
    if report.devices:
        console.print("\n[bold]A small program on each device[/] (a training step of two layers, float32)")
        console.print(_device_table(report, console.width))
        console.print("speed: the CPU's time divided by the device's; results: compared with the CPU's", style="dim")
    for device in report.devices:
        for line in _remarks(device):
            console.print(f" bp:{device['index']}: {line}", markup=False)
    console.print(f"\n{_verdict(report.devices)}", markup=False)


def _device_table(report: Report, width: int) -> Any:
    from rich.table import Table

    numbers = {"first run": 9, "later": 8, "CPU": 8, "speed": 6}  # columns and their widths
    driver = min(12, max(len("driver"), *(len(device["driver"]) for device in report.devices)))
    name = width - len("device" + "results") - driver - sum(numbers.values()) - 2 * 7  # spaces between columns

    table = Table(box=None, pad_edge=False)
    table.add_column("device", no_wrap=True)
    table.add_column("driver", no_wrap=True, overflow="ellipsis", max_width=driver)
    table.add_column("name", no_wrap=True, overflow="ellipsis", max_width=max(name, 4))
    for column, least in numbers.items():
        table.add_column(column, no_wrap=True, justify="right", min_width=least)
    table.add_column("results", no_wrap=True)
    for device in report.devices:
        cells = ["–", "–", "–", "–", "[red]failed[/]"]
        if "works" in device:
            times = (device["first"], device["seconds"], report.cpu)
            speed = f"{report.cpu / device['seconds']:.2g}×"
            cells = [*map(_time, times), speed, "[green]equal[/]" if device["works"] else "[red]wrong[/]"]
        table.add_row(f"bp:{device['index']}", device["driver"], device["name"], *cells)
    return table


def _remarks(device: dict[str, Any]) -> list[str]:
    if "error" in device:
        return [device["error"]]
    remarks = []
    if not device["works"]:
        remarks.append(f"its results differ from the CPU's by up to {device['difference']:.1e} of the largest element")
    if device["fallbacks"]:
        remarks.append(f"{device['fallbacks']} operators of the program ran on the CPU, with copies")
    return remarks


def _verdict(devices: list[dict[str, Any]]) -> str:
    working = [device for device in devices if device.get("works")]
    if not working:
        return "No device works."
    fast = [device for device in working if device["hardware"] in ("gpu", "accelerator")]
    used = (fast or working)[0]
    told = f"{len(working)} of {len(devices)} devices work. bp:{used['index']} is {HARDWARE[used['hardware']]}."
    return told if fast else f"{told} No GPU is used."


def _ended(ending: str) -> str:
    return f"the process that tried it ended with {ending}"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
