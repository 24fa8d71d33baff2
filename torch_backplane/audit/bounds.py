"""The bounds of operators by family, and the known exceptions."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FULL_BYTES = 64 << 20  # operators must fill the device from this size on
CHAIN = 4.0  # maximum chain, divided by the square root of the number of elements


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the operators of a family run, and their bounds.

    Args:
        traffic: maximum of bytes moved relative to the minimum; None: not bounded.
        fused: the same for each kernel of a compiled graph, relative to the minimum of this kernel.
        only_samples: whether only the sampled groups compute at full size, because accesses do not depend on data.
        samples_inputs: whether this also holds while the inputs are made, because no address depends on their values.
        max_bytes: maximum size of an operand.
        random: whether results are random, so that they cannot be compared.
        bounded: whether fill and chain are bounded.
    """

    traffic: float | None = None
    fused: float | None = None
    only_samples: bool = True
    samples_inputs: bool = False
    max_bytes: int = 1 << 40
    random: bool = False
    bounded: bool = True


FAMILIES = {
    "pointwise": Family(traffic=1.25, samples_inputs=True),
    "formulas": Family(traffic=1.25, max_bytes=8 << 20),
    "copies": Family(traffic=1.25, samples_inputs=True),
    "reductions": Family(traffic=1.25, samples_inputs=True),
    "scans": Family(traffic=2.0, samples_inputs=True),
    "rows": Family(traffic=1.25),
    "sorting": Family(only_samples=False, max_bytes=2 << 20),
    "compaction": Family(only_samples=False, max_bytes=8 << 20),
    "indexing": Family(only_samples=False, max_bytes=8 << 20),
    "images": Family(),
    "products": Family(samples_inputs=True),
    "transforms": Family(samples_inputs=True),
    "random": Family(traffic=1.25, random=True),
    "optimizers": Family(traffic=1.25),
    "compiled graphs": Family(traffic=1.25, fused=1.25, samples_inputs=True),
    "compiled steps": Family(fused=1.25, samples_inputs=True, bounded=False),
    "candidates": Family(samples_inputs=True, bounded=False),
}


# Cases with random results in other families.
RANDOM = frozenset({"randperm", "attention with dropout, heads of 64", "compiled: dropout and residual"})


@dataclass(frozen=True)
class Known:
    """A known exception and its reason, for the cases whose whole titles match the regular expression `match`."""

    match: str
    measure: str
    reason: str


# Known exceptions. The reasons say what exceeds the bound.
_ONE_GROUP = "softmax of one row|layer norm of one row"
_FEW_SETS = "group norm|group norm, backward|batch norm in training|batch norm, backward"
_HALF_FULL = "rows that fill half of the device are not divided; otherwise all rows have the same number of chunks"
_FOUR_READS = "where 64 groups fill the device, each work item reads up to 4 numbers for each of n / 4,096 elements"
_PASSES = "statistics and result need two passes over data that do not fit the cache"
_CHUNKS = "equal numbers of chunks per result leave 5 % of the device idle"
_BY_DIGITS = r"sort|sort of (int64|int8|columns)|sort, descending|randperm|unique.*|median|nanmedian of a vector|topk.*"
_WEIGHTS = "convolution, 3 × 3, 1/16 of the size, backward"
_OF_MASK = "attention, gradient of a mask, 1/16 of the size"
_PARTS = "columns are divided to fill half of the device, and 512 compute units need 8,192 groups"
_INDUCTOR = "Inductor divides columns only if there are fewer than 64 per compute unit, and then into few parts"
KNOWN: tuple[Known, ...] = (
    Known("every second element", "traffic", "sectors are read completely, and half of their elements are not used"),
    Known("padding by a constant", "traffic", "the whole result is filled before the input is copied into it"),
    Known("binary cross entropy", "traffic", "the input is read once more to check that values are between 0 and 1"),
    Known("sum of outer dimensions", "fill", "equal numbers of chunks per result leave 5 % of the device idle"),
    Known("trace", "fill", "a diagonal has only √n elements"),
    Known("variance of columns", "fill", "the second launch combines partial states with one team per result"),
    Known(_ONE_GROUP, "traffic", _PASSES),
    Known("softmax of rows of 50,257", "fill", _HALF_FULL),
    Known("softmax of rows of 50,257", "traffic", f"{_PASSES}; rows are not aligned to sectors"),
    Known("group norm, backward", "fill", _CHUNKS),
    Known("group norm, backward|batch norm, backward|layer norm of rows, backward", "chain", _FOUR_READS),
    Known(_FEW_SETS, "traffic", _PASSES),
    Known("layer norm of rows, backward", "traffic", "the gradients of weight and bias read both operands again"),
    Known(
        "layer norm of rows|softmax of rows, backward|RMS norm of rows, backward",
        "traffic",
        "where a group's share of the caches is 8 KiB, the second pass over a row misses the cache",
    ),
    Known("softmax of columns", "traffic", _PASSES),
    Known("compiled: gradient of GELU.*", "traffic", "Inductor sums the gradient in a separate kernel"),
    Known(
        "compiled: (squared error, mean|sum and maximum) of all",
        "fill",
        "Inductor gives each work item up to 512 elements",
    ),
    *(
        Known("compiled: (gradient of GELU|variance of columns|sum of products of columns).*", measure, _INDUCTOR)
        for measure in ("fill", "chain")
    ),
    Known("compiled: softmax of rows of 16,384", "fill", "Inductor divides no rows: there are 1,024 groups"),
    *(
        Known(
            "compiled: softmax of rows of 16,384",
            measure,
            "rows of more than 4,096 elements are not kept in registers and need two passes, for the statistics and for"
            " the result",
        )
        for measure in ("traffic", "fused")
    ),
    *(
        Known(
            "compiled: gathered columns and a factor",
            measure,
            "16 groups gather a row's 1,024 elements in any order, and each reads two fifths of the row's sectors",
        )
        for measure in ("traffic", "fused")
    ),
    Known(
        "compiled: (log-softmax and loss|cross entropy and gradient)",
        "fused",
        "one element of each row is read, and its sector completely; the kernel moves 1 % of all bytes",
    ),
    Known("renorm|weight norm", "traffic", "norm and product are separate launches, so the operand is read twice"),
    Known(
        "(cumsum|cumprod|cummax|logcumsumexp) of a vector",
        "chain",
        "where 64 groups fill the device, each scans n / 64 elements with 64 work items",
    ),
    Known("(cumsum|cummax) of columns", "fill", _PARTS),
    Known(
        "cumsum of 4 columns",
        "fill",
        "one team scans the sums of each column's parts, 32,768 at most: too few groups for 512 compute units",
    ),
    Known(
        "product of square matrices|linear layer|product of transposed matrices",
        "chain",
        "a work item computes 16 sums, and reads 8 numbers from local memory in each of 2,048 steps",
    ),
    Known(
        "product of square matrices|linear layer|product of transposed matrices",
        "fill",
        "there are 1,024 tiles of 64 × 64, and 512 compute units need twice as many",
    ),
    Known(
        "product of few rows of many columns",
        "chain",
        "where 16 groups of 256 work items fill the device, each computes 1/16 of the 262,144 products of a sum",
    ),
    Known(r"adaptive_(avg|max)_pool2d\(7\)", "fill", "each work item computes one result, and there are 3,136"),
    Known(r"adaptive_avg_pool2d\(1\)", "fill", _CHUNKS),
    Known(
        r"topk\(2\) of rows of 64",
        "fill",
        "the last merge of the top 2 of each row needs only 4,096 groups",
    ),
    Known(
        _BY_DIGITS, "fill", "chunks of a radix sort have at least 4,096 elements, which gives 4,096 groups at 64 MiB"
    ),
    Known(
        _BY_DIGITS, "chain", "where 64 groups fill the device, each sorts n / 64 elements in local memory, 64 at a time"
    ),
    Known("ldexp.Tensor", "traffic", "2 to the power of the second operand is a separate launch"),
    Known("norms of lists", "fill", "each tensor has separate launches, of 1,024 groups at 8 MiB"),
    Known(_WEIGHTS, "fill", "3 tiles have 512 parts at most, and the parts of 2,304 results are summed four at a time"),
    Known(
        _WEIGHTS, "chain", "where 16 groups of 256 items fill the device, each computes 1/6 of a sum's 65,536 products"
    ),
    Known(
        _OF_MASK,
        "chain",
        "where 16 groups of 256 work items fill the device, each computes a tile of scores for all 64 heads",
    ),
    Known(_OF_MASK, "fill", "64 heads of 256 rows, 1/16 of the size, are too few for 512 compute units"),
    Known(
        "attention of one query and 16,384 keys",
        "chain",
        "where 640 groups fill the device, each has 400 keys; a work item computes 4 at a time, in 64 steps each",
    ),
    Known(
        "Bernoulli numbers of given probabilities",
        "traffic",
        "probabilities are read once more to check that values are between 0 and 1",
    ),
    Known(r"kthvalue\(10\) of rows", "fill", "each merge of sorted runs has fewer work items"),
    Known("hash of all", "fallbacks", "the operator needs float64, and falls back to the CPU on devices without it"),
)


@dataclass(frozen=True)
class Finding:
    """A figure of a case on a target that exceeds its bound."""

    case: str
    target: str
    measure: str
    value: float
    bound: float
    reason: str  # empty: no known exception


def beyond(result: Mapping[str, Any]) -> list[Finding]:
    """Return the exceeded bounds of a worker's result. Wrong results are not included."""
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
    most = max((one["traffic"] for one in result.get("fused", ())), default=0.0)
    if family.fused is not None and most > family.fused:
        yield ("fused", most, family.fused)
    if figures["divergent"]:
        yield ("barriers", figures["divergent"], 0)


def reason_of(title: str, measure: str) -> str:
    for one in KNOWN:
        if one.measure == measure and re.fullmatch(one.match, title):
            return one.reason
    return ""
