"""The operators that run as kernels on bp, one file for each family. Importing this declares them all."""

from torch_backplane.operators import (
    activations,
    arithmetic,
    bitwise,
    comparison,
    copies,
    foreach,
    losses,
    reductions,
    selection,
    special,
    transcendental,
)

__all__ = [
    "activations",
    "arithmetic",
    "bitwise",
    "comparison",
    "copies",
    "foreach",
    "losses",
    "reductions",
    "selection",
    "special",
    "transcendental",
]
