"""Errors that kernels detect: an index out of range, a division by zero, or a value that an operator rejects.

A kernel reports an error in four int32 words of device memory, which the host reads later:

0. the error code; 0: no error
1. the number of the operator (`operator_number`), or of the error text (`text_number`)
2. the index, if an index is out of range
3. the size of the dimension, if an index is out of range

The work item that swaps the code 0 for its own writes the other words; later errors are dropped. Synchronization with
the device reads the words, raises `error`, and writes zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

INDEX_OUT_OF_RANGE = 1
DIVISION_BY_ZERO = 2
SOURCE_TOO_SHORT = 3
REFUSED_VALUE = 4
WORDS = 4

# Operators for which PyTorch raises RuntimeError if an index is out of range. All others raise IndexError.
RUNTIME_ERRORS = frozenset({
    "gather", "scatter", "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward",
    "multilabel_margin_loss_backward", "embedding_bag", "offsets of embedding_bag",
})  # fmt: skip

class Report(NamedTuple):
    """Where a kernel reports errors, and for which operator.

    Args:
        words: the device's four int32 words.
        operator: the operator's name, for the error message.
    """

    words: torch.Tensor
    operator: str


_operators: list[str] = []
_texts: list[str] = []


def operator_number(name: str) -> int:
    """Returns the number of the operator `name`, constant within this process."""
    return _number_of(name, _operators)


def text_number(text: str) -> int:
    """Returns the number of a message text for a REFUSED_VALUE error, constant within this process."""
    return _number_of(text, _texts)


def _number_of(text: str, known: list[str]) -> int:
    if text not in known:
        known.append(text)
    return known.index(text)


def error(words: list[int]) -> Exception:
    """Returns the exception for the words that a kernel wrote."""
    is_index = words[0] == INDEX_OUT_OF_RANGE and _operators[words[1]] not in RUNTIME_ERRORS
    return (IndexError if is_index else RuntimeError)(message(words))


def message(words: list[int]) -> str:
    """Returns the message for the words that a kernel wrote."""
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


# checked_index returns the index as index_t, or reports an error and returns -1 if it is out of range. If WRAPS is set,
# a negative index counts from the end. Needs the type int64 and the constant WRAPS.
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
