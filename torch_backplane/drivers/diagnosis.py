"""Diagnosis: what a driver looked for, and why it has no devices. Discovery uses it for its messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch_backplane.drivers.base import Driver, Finding


def examine(driver: Driver | None, failure: str | None) -> list[Finding]:
    """Return the findings of a driver.

    Args:
        driver: the driver, after discovery has called `devices()`. None if it could not be made.
        failure: the reason for which discovery has skipped it, or None.
    """
    found: list[Finding] = []
    if driver is not None:
        try:
            found += driver.diagnose()
        except Exception as error:  # the other drivers and the rest of the message are still of use
            found.append(Finding("diagnose()", False, f"{type(error).__name__}: {error}"))
    if failure is not None and all(finding.ok for finding in found):
        found.append(Finding("devices", False, failure))
    return found


def reason(findings: Sequence[Finding]) -> str:
    """Return the first finding that is not ok as a phrase, for a driver without devices."""
    for finding in findings:
        if not finding.ok:
            return f"{finding.what}: {finding.found}" + (f" ({finding.remedy})" if finding.remedy else "")
    return "it found no device"
