"""Differences that are known: those that are meant, which are no findings, and those that wait to be mended."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """Findings whose key and message these expressions match."""

    key: str
    message: str
    reason: str

    def covers(self, key: str, message: str) -> bool:
        return bool(re.search(self.key, key) and re.search(self.message, message))


# Counted under their reasons.
MEANT: list[Known] = [
    Known(
        r"^error RuntimeError: ",
        r"cannot resize variables that require grad",
        "PyTorch resizes out= of the CPU and CUDA directly, and of other devices by resize_, which refuses this",
    ),
    Known(
        r"^error text: ",
        r"index -?\d+ is out of bounds for dimension with size \d+; the CPU: IndexError: .*out of (bounds|range)",
        "found by a kernel, which tells operator and index, and does not know the call's dimension",
    ),
    Known(
        r"^no error: histc$",
        r"value cannot be converted to type u?int(8_t|16_t|64_t)? without overflow",
        "integers, of which the CPU has no histc: it refuses some ranges before it says so",
    ),
]

# Findings of the command; `make test` lets them pass, and nothing else. Whoever mends one takes it out.
OPEN: list[Known] = [
    Known(
        r"^(no error|error RuntimeError): ",
        r"unsupported operation: (some elements|more than one element)",
        "memory that overlaps, within a tensor or between two, is not refused just where the CPU refuses it",
    ),
    Known(r"^no error: .* out=$", r"Found dtype|for result", "out= of a dtype that the CPU refuses"),
    Known(
        r"^error text: ",
        r"torch\.(u?int|b?float|bool|complex)|Number of dimensions of tensors|expected a matrix|list assignment index",
        "PyTorch's decompositions in Python refuse in other words than its C++ does",
    ),
    Known(r"^error text: index_fill", r"Expected dtype int64 for index", "an int32 index is taken"),
    Known(
        r"^error (TypeError|AssertionError|AttributeError) for |^error RuntimeError for IndexError: index_",
        r"",
        "an error of another type, which speaks of what is inside",
    ),
    Known(
        r"^error IndexError: index_", r"dimension with size 0", "the CPU ignores an index where there are no elements"
    ),
    Known(r"shape: (linspace|logspace|arange) out=$", r"", "out= keeps a shape of as many elements"),
    Known(r"^after an error, .* out=$", r"", "out= is resized or written before the call is refused"),
]


def reason_for(key: str, message: str) -> str | None:
    """Why this difference is meant; None where it is a finding."""
    return next((known.reason for known in MEANT if known.covers(key, message)), None)


def is_open(key: str, message: str) -> bool:
    return any(known.covers(key, message) for known in OPEN)
