"""Sizes in bytes as people write them."""

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
    """Bytes in `text`, such as «2GiB», «512 MB» or «1.5G»; all units are powers of 1024.

    Raises:
        SettingError: `text` is not a size above zero; the message names `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(Fraction(match[1]) * UNITS[match[2]]) if match and match[2] in UNITS else 0
    if not 0 < size < 2**63:
        raise SettingError(f"{name}={text!r} is not a size: write a number above 0 with a unit, such as 512MiB or 2GiB")
    return size
