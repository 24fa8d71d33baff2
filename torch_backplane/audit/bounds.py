"""What is held against operators, by their family, and what is known to be beyond that."""

from __future__ import annotations

from dataclasses import dataclass

FULL = 1.0  # of the device
CHAIN = 4.0  # times the square root of the elements


@dataclass(frozen=True, kw_only=True)
class Family:
    """How operators of a family are run, and bounded.

    Args:
        traffic: bytes moved beside the least; None: not bounded.
        only_samples: groups that are not looked at compute nothing at the large size, as it does not depend on data.
        samples_inputs: nor when the inputs are made, of which nobody reads values.
        most_bytes: the size, if that is less than what was asked for.
        random: results cannot be compared.
    """

    traffic: float | None = None
    only_samples: bool = False
    samples_inputs: bool = False
    most_bytes: int = 1 << 40
    random: bool = False


FAMILIES = {
    "pointwise": Family(traffic=1.25, only_samples=True),
    "copies": Family(traffic=1.25, only_samples=True),
    "reductions": Family(traffic=1.25),
    "scans": Family(traffic=2.0),
    "rows": Family(traffic=1.25),
    "sorting": Family(),
    "compaction": Family(),
    "indexing": Family(),
    "images": Family(only_samples=True),
    "products": Family(only_samples=True, samples_inputs=True),
    "random": Family(traffic=1.25, random=True),
    "optimizers": Family(traffic=1.25, only_samples=True),
}
