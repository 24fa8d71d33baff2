"""Models that are known to fail, with the reason. A model of this table that passes is an error, too."""

from __future__ import annotations

from typing import NamedTuple


class Case(NamedTuple):
    """A model, as library/name, on a driver, compiled or not."""

    model: str
    driver: str
    compiled: bool


INDEX_ON_THE_CPU = "relative positions are indices on the CPU; indexing with these falls back"

EXPECTED_FAILURES: dict[Case, str] = {
    Case("torchvision/mvit", "opencl", compiled=False): INDEX_ON_THE_CPU,
    Case("torchvision/mvit", "opencl", compiled=True): INDEX_ON_THE_CPU,
}
