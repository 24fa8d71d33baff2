"""Bits of integers and bools."""

from __future__ import annotations

from torch_backplane.planning import pointwise

pointwise("bitwise_and.Tensor", lambda a, b: a & b)
pointwise("bitwise_or.Tensor", lambda a, b: a | b)
pointwise("bitwise_xor.Tensor", lambda a, b: a ^ b)
pointwise("bitwise_not", lambda a: ~a)
pointwise("bitwise_left_shift.Tensor", lambda a, b: a << b)
pointwise("bitwise_right_shift.Tensor", lambda a, b: a >> b)

# Python's << and >>, and <<= and >>=.
for overload in ("Tensor", "Scalar"):
    for name in ("__lshift__", "__ilshift__"):
        pointwise(f"{name}.{overload}", lambda a, b: a << b, fitting="any")
    for name in ("__rshift__", "__irshift__"):
        pointwise(f"{name}.{overload}", lambda a, b: a >> b, fitting="any")
