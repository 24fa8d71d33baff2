"""Bits of integers and bools."""

from __future__ import annotations

from torch_backplane.planning import pointwise

pointwise("bitwise_and.Tensor", lambda a, b: a & b)
pointwise("bitwise_or.Tensor", lambda a, b: a | b)
pointwise("bitwise_xor.Tensor", lambda a, b: a ^ b)
pointwise("bitwise_not", lambda a: ~a)
pointwise("bitwise_left_shift.Tensor", lambda a, b: a << b)
pointwise("bitwise_right_shift.Tensor", lambda a, b: a >> b)

# Python's << and >>.
for overload in ("Tensor", "Scalar"):
    pointwise(f"__lshift__.{overload}", lambda a, b: a << b)
    pointwise(f"__rshift__.{overload}", lambda a, b: a >> b)
