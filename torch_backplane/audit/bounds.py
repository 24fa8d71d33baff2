"""What is held against operators, by their family, and what is known to be beyond that."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FULL_BYTES = 64 << 20  # from which size on an operator has to fill the device
CHAIN = 4.0  # times the square root of the elements


@dataclass(frozen=True, kw_only=True)
class Family:
    """How operators of a family are run, and bounded.

    Args:
        traffic: bytes moved beside the least; None: not bounded.
        only_samples: groups that are not looked at compute nothing at the large size, as it does not depend on data.
        samples_inputs: nor when the inputs are made, on whose values no address depends.
        most_bytes: the size, if that is less than what was asked for.
        random: results cannot be compared.
    """

    traffic: float | None = None
    only_samples: bool = True
    samples_inputs: bool = False
    most_bytes: int = 1 << 40
    random: bool = False


FAMILIES = {
    "pointwise": Family(traffic=1.25, samples_inputs=True),
    "formulas": Family(traffic=1.25, most_bytes=16 << 20),
    "copies": Family(traffic=1.25, samples_inputs=True),
    "reductions": Family(traffic=1.25, samples_inputs=True),
    "scans": Family(traffic=2.0, samples_inputs=True),
    "rows": Family(traffic=1.25),
    "sorting": Family(only_samples=False, most_bytes=4 << 20),
    "compaction": Family(only_samples=False, most_bytes=8 << 20),
    "indexing": Family(only_samples=False, most_bytes=8 << 20),
    "images": Family(),
    "products": Family(samples_inputs=True),
    "random": Family(traffic=1.25, random=True),
    "optimizers": Family(traffic=1.25),
}


@dataclass(frozen=True)
class Known:
    """What is beyond its bound, and why: `measure` of the cases whose titles `match` as a whole."""

    match: str
    measure: str
    reason: str


KNOWN: tuple[Known, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A measure of a case on a target that is beyond its bound."""

    case: str
    target: str
    measure: str
    value: float
    bound: float
    reason: str  # empty: not known


def beyond(result: Mapping[str, Any]) -> list[Finding]:
    """What of a worker's result is beyond its bounds; not what is wrong with it."""
    found: list[tuple[str, float, float]] = []
    if result["fallbacks"]:
        found.append(("fallbacks", len(result["fallbacks"]), 0))
    if result["figures"] is not None:
        found += _figures_beyond(result)
    return [
        Finding(result["case"], result["target"], measure, value, bound, reason_of(result["case"], measure))
        for measure, value, bound in found
    ]


def _figures_beyond(result: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    figures, family = result["figures"], FAMILIES[result["family"]]
    longest = CHAIN * math.sqrt(result["elements"])
    if result["bytes"] >= FULL_BYTES and figures["fill"] < 1:
        yield ("fill", figures["fill"], 1.0)
    if figures["chain"] > longest:
        yield ("chain", figures["chain"], longest)
    if family.traffic is not None and figures["traffic"] > family.traffic:
        yield ("traffic", figures["traffic"], family.traffic)
    if figures["divergent"]:
        yield ("barriers", figures["divergent"], 0)


def reason_of(title: str, measure: str) -> str:
    for one in KNOWN:
        if one.measure == measure and re.fullmatch(one.match, title):
            return one.reason
    return ""
