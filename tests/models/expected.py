"""Models that are known to fail, with the reason. A model of this table that passes is an error, too."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A model, as library/name, on a driver, compiled or not."""

    model: str
    driver: str
    compiled: bool


EXPECTED_FAILURES: dict[Case, str] = {}
