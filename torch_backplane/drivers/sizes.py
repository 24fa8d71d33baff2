"""Parsing of sizes such as "512MiB"."""

from __future__ import annotations

import re
from fractions import Fraction

from torch_backplane.drivers.base import SettingError

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": 1024**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix in ("", "B", "iB")
}


def parse_size(text: str, name: str) -> int:
    """Parse a size such as "2GiB", "512 MB" or "1.5G". All units are powers of 1024.

    Args:
        text: the size.
        name: the name of the setting, for the error message.

    Returns:
        The size in bytes.

    Raises:
        SettingError: `text` is not a size above zero.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(Fraction(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if not 0 < size < 2**63:
        raise SettingError(f"{name}={text!r} is not a size: write a number above 0 with a unit, such as 512MiB or 2GiB")
    return size
