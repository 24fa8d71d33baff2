"""Sums, products and the like, element by element."""

from __future__ import annotations

from torch_backplane.planning import pointwise

pointwise("add.Tensor", lambda a, b, alpha: a + alpha * b)
pointwise("sub.Tensor", lambda a, b, alpha: a - alpha * b)
pointwise("mul.Tensor", lambda a, b: a * b)
pointwise("div.Tensor", lambda a, b: a / b)
