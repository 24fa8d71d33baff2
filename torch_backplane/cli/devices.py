"""`devices`: lists all devices."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer


def devices(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all properties of each device.")] = False,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the list as JSON; - is stdout.")] = "",
) -> None:
    """List the devices of all drivers, one per line."""
    from rich.console import Console
    from rich.table import Table

    from torch_backplane import drivers
    from torch_backplane.cli import facts
    from torch_backplane.cli.console import bytes_text, fail, write_json

    try:
        found = facts.devices()
    except ValueError as error:
        fail(str(error))
    if json_file:
        write_json([asdict(device) for device in found], json_file)
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("device", "driver", "name", "memory"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for device in found:
        table.add_row(f"bp:{device.index}", device.driver, device.name, bytes_text(device.total_memory))
    if not found:
        console.print("No devices. `python -m torch_backplane doctor` shows what to do.")
    elif not verbose:
        console.print(table)
    for device in found if verbose else ():
        console.print(f"bp:{device.index} {device.name}", markup=False)
        for title, value in {
            "driver": device.driver,
            "software": device.software or "–",
            "memory": f"{bytes_text(device.total_memory)}, {bytes_text(device.free_memory)} free",
            "host-accessible": "yes" if device.host_accessible else "no",
            "compute units": str(device.compute_units),
            "capability": ".".join(map(str, device.capability)),
            "dtypes": facts.dtype_summary(device.dtypes),
        }.items():
            console.print(f"  {title + ':':17}{value}", markup=False, soft_wrap=True)
    for name, reason in drivers.reasons().items():
        console.print(f"[yellow]driver {name} has no devices.[/] ", end="")
        console.print(reason, markup=False)
