"""How a kernel reports an index out of range, a division by zero or a value that an operator refuses: into four words
of device memory, which the host reads later.

The words are int32: a code (0: nothing has happened), the number of the operator, or of the text that says it all, and
of an index out of range the index and the size that it is out of.
The kernel that finds the code 0 and swaps it writes the rest; later errors are
dropped. Whoever synchronizes with the device reads the words, raises `error`, and writes zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INDEX_OUT_OF_RANGE = 1
DIVISION_BY_ZERO = 2
SOURCE_TOO_SHORT = 3
REFUSED_VALUE = 4
WORDS = 4

# Operators whose indices out of range are a RuntimeError in PyTorch; of all others they are an IndexError.
RUNTIME_ERRORS = frozenset({
    "gather", "scatter", "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward",
})  # fmt: skip

class Report(NamedTuple):
    """Where a kernel reports, and for which operator.

    Args:
        words: the device's words, int32.
    """

    words: torch.Tensor
    operator: str


_operators: list[str] = []
_texts: list[str] = []


def operator_number(name: str) -> int:
    """The number that stands for the operator `name` in this process."""
    return _number_of(name, _operators)


def text_number(text: str) -> int:
    """The number that stands for the text of an error, REFUSED_VALUE, in this process."""
    return _number_of(text, _texts)


def _number_of(text: str, known: list[str]) -> int:
    if text not in known:
        known.append(text)
    return known.index(text)


def error(words: list[int]) -> Exception:
    """The error that the words stand for."""
    is_index = words[0] == INDEX_OUT_OF_RANGE and _operators[words[1]] not in RUNTIME_ERRORS
    return (IndexError if is_index else RuntimeError)(message(words))


def message(words: list[int]) -> str:
    """What the words of an error say."""
    code, operator, index, size = words
    if code == DIVISION_BY_ZERO:
        return f"ZeroDivisionError: {_operators[operator]}: an integer was divided by zero"
    if code == SOURCE_TOO_SHORT:
        return "Number of elements of source < number of ones in mask"
    if code == REFUSED_VALUE:
        return _texts[operator]
    if code != INDEX_OUT_OF_RANGE:
        raise ValueError(f"unknown error code {code} of a kernel")
    return f"{_operators[operator]}: index {index} is out of bounds for dimension with size {size}"


# checked_index (needs the type int64 and the constant WRAPS): the index, counted from the end where it is negative and
# WRAPS; or -1, and the error is written down.
FUNCTIONS = f"""
#define INT32_MOST 0x7fffffff
#define INT32_LEAST (-INT32_MOST - 1)
FUNCTION index_t checked_index(GLOBAL int* errors, const int operator_number, const int64 index, const int64 size) {{
  if (index >= 0 && index < size) return (index_t)index;
  if (WRAPS && index < 0 && index >= -size) return (index_t)(index + size);
  if (atomic_swap(errors, 0u, {INDEX_OUT_OF_RANGE}u) == 0u) {{
    errors[1] = operator_number;
    errors[2] = (int)(index < INT32_LEAST ? INT32_LEAST : index > INT32_MOST ? INT32_MOST : index);
    errors[3] = (int)size;
  }}
  return -1;
}}
"""
