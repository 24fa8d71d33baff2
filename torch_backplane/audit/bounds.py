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
        bounded: whether fill and chains are.
    """

    traffic: float | None = None
    only_samples: bool = True
    samples_inputs: bool = False
    most_bytes: int = 1 << 40
    random: bool = False
    bounded: bool = True


FAMILIES = {
    "pointwise": Family(traffic=1.25, samples_inputs=True),
    "formulas": Family(traffic=1.25, most_bytes=8 << 20),
    "copies": Family(traffic=1.25, samples_inputs=True),
    "reductions": Family(traffic=1.25, samples_inputs=True),
    "scans": Family(traffic=2.0, samples_inputs=True),
    "rows": Family(traffic=1.25),
    "sorting": Family(only_samples=False, most_bytes=2 << 20),
    "compaction": Family(only_samples=False, most_bytes=8 << 20),
    "indexing": Family(only_samples=False, most_bytes=8 << 20),
    "images": Family(),
    "products": Family(samples_inputs=True),
    "transforms": Family(samples_inputs=True),
    "random": Family(traffic=1.25, random=True),
    "optimizers": Family(traffic=1.25),
    "candidates": Family(samples_inputs=True, bounded=False),
}


# Cases of other families whose results are random.
RANDOM = frozenset({"randperm", "attention with dropout, heads of 64"})


@dataclass(frozen=True)
class Known:
    """What is beyond its bound, and why: `measure` of the cases whose titles `match` as a whole."""

    match: str
    measure: str
    reason: str


# What is to be mended, or why it is as it is. Titles are those of cases.
_ONE_GROUP = "softmax of one row|layer norm of one row"
_FEW_SETS = "group norm|group norm, backward|batch norm in training|batch norm, backward"
_HALF_FULL = "rows that fill half of a device are divided no more; others into as many chunks each, a whole number"
_FOUR_READS = "where 64 groups fill a device, each item has n / 4,096 elements, and reads up to 4 numbers for each"
_PASSES = "the statistics are one pass over what is too large for a cache, and the result is another"
_CHUNKS = "as many chunks for each result, a whole number, leave 5 % of a device"
_BY_DIGITS = r"sort|sort of (int64|int8|columns)|sort, descending|randperm|unique.*|median|median without NaN|topk.*"
_WEIGHTS = "convolution, 3 × 3, of a sixteenth, backward"
_OF_MASK = "attention, gradient of a mask, of a sixteenth"
_PARTS = "fewer groups than fill a target with 8,192 for 512 compute units: parts of columns are divided to fill half"
KNOWN: tuple[Known, ...] = (
    Known(
        "every second element", "traffic", "a sector has elements that are wanted and others, and is read as a whole"
    ),
    Known("padding by a constant", "traffic", "the whole result is filled before"),
    Known("binary cross entropy", "traffic", "the input is read once more, to refuse numbers beyond 1"),
    Known(
        "sum of both ends of three", "fill", "chunks are a whole number for each result, which leaves 5 % of a device"
    ),
    Known("trace", "fill", "a diagonal has no more than √n elements"),
    Known(
        "variance of columns", "fill", "the second launch, over partial states of 4 numbers, has a team for each result"
    ),
    Known(_ONE_GROUP, "traffic", _PASSES),
    Known("softmax of rows of 50,257", "fill", _HALF_FULL),
    Known("softmax of rows of 50,257", "traffic", f"{_PASSES}; rows begin within a sector"),
    Known("group norm, backward", "fill", _CHUNKS),
    Known("group norm, backward|batch norm, backward|layer norm of rows, backward", "chain", _FOUR_READS),
    Known(_FEW_SETS, "traffic", _PASSES),
    Known("layer norm of rows, backward", "traffic", "the gradients of weight and bias read both operands again"),
    Known(
        "layer norm of rows|softmax of rows, backward|RMS norm of rows, backward",
        "traffic",
        "where a group's share of the caches is 8 KiB, what the first pass over a row read is gone in the second",
    ),
    Known("softmax of columns", "traffic", _PASSES),
    Known("renorm|weight norm", "traffic", "the norm is one launch, the product another: the operand is read twice"),
    Known(
        "(cumsum|cumprod|cummax|logcumsumexp) of a vector",
        "chain",
        "where 64 groups fill a device each has n / 64 elements, by turns of 64 work items",
    ),
    Known("(cumsum|cummax) of columns", "fill", _PARTS),
    Known(
        "cumsum of 4 columns",
        "fill",
        "each column has 32,768 parts at most, whose sums one team scans: too few for 512 compute units",
    ),
    Known(
        "product of square matrices|linear layer|product of transposed matrices",
        "chain",
        "a work item has 16 sums, and reads 8 numbers of local memory for them at each of the 2,048 steps",
    ),
    Known(
        "product of square matrices|linear layer|product of transposed matrices",
        "fill",
        "1,024 tiles of 64 × 64 are what there is; a target with 512 compute units wants as many again",
    ),
    Known(
        "product of few rows of many columns",
        "chain",
        "where 16 groups of 256 work items fill a device each has a 16th of the 262,144 products of a sum",
    ),
    Known(r"adaptive_(avg|max)_pool2d\(7\)", "fill", "a work item has a result, and there are 3,136"),
    Known(r"adaptive_avg_pool2d\(1\)", "fill", _CHUNKS),
    Known(
        r"topk\(2\) of rows of 64",
        "fill",
        "the last merge of the best 2 of each row has 4,096 groups, which is all it wants",
    ),
    Known(
        _BY_DIGITS, "fill", "a chunk of a sort by digits has 4,096 elements or more, which are 4,096 groups at 64 MiB"
    ),
    Known(
        _BY_DIGITS, "chain", "where 64 groups fill a device, one sorts n / 64 elements, 64 at a time, in local memory"
    ),
    Known("ldexp.Tensor", "traffic", "2 to the power of the second operand is a launch of its own"),
    Known("norms of lists", "fill", "each list is launches of its own, of 1,024 groups at 8 MiB"),
    Known(_WEIGHTS, "fill", "3 tiles are of 512 parts at most, and parts of 2,304 results are added up in fours"),
    Known(
        _WEIGHTS, "chain", "where 16 groups of 256 work items fill a device each has a 6th of a sum's 65,536 products"
    ),
    Known(
        _OF_MASK,
        "chain",
        "where 16 groups of 256 work items fill a device, one goes through a tile of scores of 64 heads",
    ),
    Known(_OF_MASK, "fill", "64 heads of 256 rows, a sixteenth of the size, are too few for 512 compute units"),
    Known(
        "attention of one query and 16,384 keys",
        "chain",
        "where 640 groups fill a device, each has 400 keys, of which a work item has 4 at a time, each of 64 steps",
    ),
    Known("coins of probabilities", "traffic", "probabilities are read once more, to refuse those beyond 1"),
    Known("smallest but 10 of rows", "fill", "merges of the best of each row have fewer work items each time"),
    Known("hash of all", "fallbacks", "the operator needs float64, and runs on the CPU where there is none"),
)


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
    if family.bounded and result["bytes"] >= FULL_BYTES and figures["fill"] < 1:
        yield ("fill", figures["fill"], 1.0)
    if family.bounded and figures["chain"] > longest:
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
