"""The operators that programs call, and their arguments, from the table below and from PyTorch's operator database.

A row is the name of a function of `torch` and a letter for each argument:

    T  a tensor                         s  a number                        d  a dimension
    L  a tensor that broadcasts         N  a number, or L                  D  one or several dimensions
    M  a mask of the first's shape      b  True or False                   i  a small integer
    x=…  an optional keyword argument, used half of the time

Letters after a colon restrict the first tensor: f floating point or complex, n not bool, w small non-negative integers,
v one dimension, 2 two dimensions, m two or more dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Row:
    name: str
    arguments: tuple[str, ...]
    only: str = ""
    in_place: bool = False
    out: bool = False


_TABLE = """
add T N alpha=s                  | sub T N alpha=s                | rsub T N alpha=s
addcmul T L L value=s            | addcdiv T L L value=s :f       | lerp T L N :f
clamp T N max=N                  | clamp T N N                    | clamp_min T N | clamp_max T N
div T N rounding_mode=r          | floor_divide T N               | true_divide T N
where M T N                      | masked_fill T M n              | masked_select T M
nan_to_num T nan=s               | logical_not T                  | bitwise_not T
isclose T L                      | equal T L                      | allclose T L
cumsum T d dtype=t               | cumprod T d                    | logcumsumexp T d :f
cummax T d :n                    | cummin T d :n                  | softmax T d dtype=t :f
log_softmax T d :f               | logsumexp T D :f               | diff T dim=d
sort T dim=d descending=b stable=True | argsort T dim=d stable=True | flip T D | fliplr T :m | roll T i D
tril T i :m                      | triu T i :m                    | diag T i | trace T :m
diag_embed T i                   | repeat_interleave T i dim=d    | tile T I
norm T dim=D                     | linalg.vector_norm T s dim=D   | renorm T 2 d s :f
var T dim=D correction=i :f      | std T dim=D correction=i :f    | var_mean T dim=D :f
aminmax T dim=d :n               | max T d                        | min T d | argmax T d | argmin T d
median T :n                      | count_nonzero T D              | nonzero T
unique T return_inverse=b        | unique T dim=d                 | unique_consecutive T return_counts=b
bincount T :w                    | histc T bins=i :f              | bucketize T v
mm T m :2                        | matmul T m                     | mv T v :2 | dot T L :v | outer T v :v
kron T L                         | cross T L dim=d                | cdist T m :2f
nn.functional.relu T             | nn.functional.gelu T :f        | nn.functional.silu T :f
nn.functional.leaky_relu T s inplace=b | nn.functional.elu T s inplace=b | nn.functional.hardtanh T inplace=b
nn.functional.softplus T s       | nn.functional.softshrink T s :f | nn.functional.hardshrink T s :f
nn.functional.threshold T s s    | nn.functional.celu T s inplace=b :f      | nn.functional.logsigmoid T :f
nn.functional.glu T d :f         | nn.functional.normalize T dim=d :f | nn.functional.mish T :f
nn.functional.mse_loss T L reduction=R | nn.functional.l1_loss T L reduction=R
nn.functional.huber_loss T L reduction=R
nn.functional.smooth_l1_loss T L reduction=R beta=s | nn.functional.soft_margin_loss T L reduction=R
nn.functional.binary_cross_entropy_with_logits T L reduction=R :f
nn.functional.binary_cross_entropy T L reduction=R :f
nn.functional.cosine_similarity T L dim=d :f
arange i                         | linspace s s i                 | logspace 0 2 i | eye i | full I n
zeros_like T dtype=t             | full_like T n dtype=t          | ones_like T
_foreach_add A A                 | _foreach_mul A s               | _foreach_neg A | _foreach_addcmul A A A
_foreach_lerp A A s              | _foreach_sqrt A                | _foreach_norm A | _foreach_maximum A A
cat A dim=d                      | stack A dim=d                  | hstack A | vstack A | cartesian_prod v v
broadcast_tensors T L            | meshgrid v v indexing='ij'     | block_diag A
clone T                          | angle T                        | signbit T | isfinite T | isin T L
polar L L                        | complex T L                    | view_as_real T | real T | conj_physical T
combinations v                   | trapezoid T dim=d :f           | gradient v :f | histogram T i :f
quantile T 0.5 dim=d :f          | nansum T D                     | nanmean T D :f | mode T d :n
dist T L                         | vdot v v                       | inner T m
"""

_IN_PLACE_NAMES = """
add sub mul div addcmul addcdiv lerp clamp clamp_min clamp_max masked_fill cumsum cumprod tril triu renorm
nan_to_num floor_divide logical_not bitwise_not true_divide copysign
"""
_IN_PLACE = set(_IN_PLACE_NAMES.split())
_NO_OUT = {
    "equal",
    "allclose",
    "unique",
    "unique_consecutive",
    "bincount",
    "isclose",
    "full_like",
    "zeros_like",
    "clone",
}
# Operators that programs do not call, for example because their results are random or uninitialized.
_LEFT_OUT_NAMES = """
empty_like rand_like randn_like randint_like bernoulli nn.functional.dropout float_power __rpow__ igamma
igammac bitwise_left_shift bitwise_right_shift __rlshift__ __rrshift__ polygamma special.zeta heaviside
native_dropout_backward jiterator_unary jiterator_binary nn.functional.rrelu masked.softmax
"""
_LEFT_OUT = set(_LEFT_OUT_NAMES.split())


@cache
def rows() -> list[Row]:
    found = {}
    for line in _TABLE.strip().splitlines():
        for cell in line.split("|"):
            text, _, only = cell.partition(":")
            name, *arguments = text.split()
            has_out = not name.startswith(("nn.", "_foreach")) and name not in _NO_OUT
            row = Row(name, tuple(arguments), only.strip(), name in _IN_PLACE, has_out)
            found[name, row.arguments] = row
    for row in _from_database():
        if not any(name == row.name for name, _ in found):
            found[row.name, row.arguments] = row
    return list(found.values())


def _from_database() -> list[Row]:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    shapes: dict[type, tuple[str, ...]] = {
        UnaryUfuncInfo: ("T",),
        BinaryUfuncInfo: ("T", "N"),
        ReductionOpInfo: ("T", "dim=D", "keepdim=b"),
    }
    found = []
    for op in op_db:
        arguments = next((row for kind, row in shapes.items() if isinstance(op, kind)), None)
        if arguments is None or op.variant_test_name or op.name in _LEFT_OUT or function(op.name) is None:
            continue
        in_place = op.get_inplace() is not None and "." not in op.name
        found.append(Row(op.name, arguments, in_place=in_place, out=op.supports_out))
    return found


def function(name: str) -> Any:
    """Returns torch's function of this name, or None."""
    import torch

    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part, None)
    return value if callable(value) else None
