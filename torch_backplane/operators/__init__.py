"""The operators that run as kernels on bp, one file for each family. Importing this declares them all."""

from torch_backplane.operators import (
    arithmetic,
    copies,
    foreach,
    indexing,
    matmul,
    nll_loss,
    norms,
    reductions,
    softmax,
)

__all__ = ["arithmetic", "copies", "foreach", "indexing", "matmul", "nll_loss", "norms", "reductions", "softmax"]
