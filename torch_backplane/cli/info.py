"""`info`: the information that a bug report needs, in Markdown."""

from __future__ import annotations


def info() -> None:
    """Print the information that a bug report needs, in Markdown."""
    from torch_backplane.cli import facts

    print("\n".join(["## Backplane", "", *_pairs(facts.versions()), "", "### Environment", ""]))
    variables = {name: f"`{value}`" for name, value in facts.environment().items()}
    print("\n".join([*(_pairs(variables) or ["no relevant variable is set"]), "", "### Drivers", ""]))
    print("\n".join([*_driver_lines(), "", "### Allocator", ""]))
    print(f"- settings: `{facts.allocator_settings()}`")


def _pairs(facts: dict[str, str]) -> list[str]:
    return [f"- {name}: {value}" for name, value in facts.items()]


def _driver_lines() -> list[str]:
    """Return lines about the installed drivers, what they looked for, and the devices."""
    from torch_backplane import drivers
    from torch_backplane.cli import facts
    from torch_backplane.cli.console import bytes_text

    installed = drivers.available()
    try:
        devices = facts.devices()
    except ValueError as error:  # wrong settings: this command must still work
        lines = [f"- {name}: `{point.value}`" for name, point in installed.items()]
        return [*lines, "", f"Devices could not be discovered: {error}"]
    lines = []
    for name, findings in drivers.findings().items():
        lines.append(f"- {name}: `{installed[name].value}`" if name in installed else f"- {name}")
        for finding in findings:
            told = finding.found if finding.ok else f"**{finding.found}**"
            lines.append(f"  - {finding.what}: {told}" + (f" ({finding.remedy})" if finding.remedy else ""))
    lines += ["", "### Devices", ""]
    if not devices:
        return [*lines, "none"]
    lines += ["| device | driver | name | memory | free | dtypes | host-accessible | units | capability | software |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for device in devices:
        cells = [
            f"bp:{device.index}", device.driver, device.name, bytes_text(device.total_memory),
            bytes_text(device.free_memory), facts.dtype_summary(device.dtypes),
            "yes" if device.host_accessible else "no", str(device.compute_units),
            ".".join(map(str, device.capability)), device.software,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines
