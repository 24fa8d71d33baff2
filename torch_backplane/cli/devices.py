"""`devices`: lists all devices."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer


def devices(
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write the list as JSON; - is stdout.")] = "",
) -> None:
    """List the devices of all drivers."""
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
    columns = ("device", "driver", "name", "memory", "free", "dtypes", "host-accessible", "compute units", "software")
    table = Table(*columns)
    for device in found:
        table.add_row(
            f"bp:{device.index}", device.driver, device.name, bytes_text(device.total_memory),
            bytes_text(device.free_memory), facts.dtype_summary(device.dtypes),
            "yes" if device.host_accessible else "no", str(device.compute_units), device.software,
        )  # fmt: skip
    console.print(table if found else "No devices.")
    for name, reason in drivers.failures().items():
        console.print(f"[yellow]driver {name} was skipped:[/] ", end="")
        console.print(reason, markup=False)
