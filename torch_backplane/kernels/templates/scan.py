"""Scans along one dimension of contiguous tensors: cumulative sums, products, extrema and log-sum-exps.

A work item goes through one row in order, or, where the dimension is not the innermost one, on a CPU through some
neighbouring columns side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torch_backplane.kernels.dialects.base import Dialect, Value
from torch_backplane.kernels.dtypes import facts, value_dtype
from torch_backplane.kernels.templates.source import Launch, make_launch, rows_and_columns, split

_COLUMNS, _SMALL_GROUP = 16, 8


class Accumulation(NamedTuple):
    """Args:
    identity: of the state, before the first element.
    step: statements that add `x` to `state`; of floats, what the state lacks is `state_lost`.
    integers: the same of integers.
    """

    identity: str
    step: str
    integers: str = ""


ACCUMULATIONS: Mapping[str, Accumulation] = {
    "cumsum": Accumulation("0", "ADD(state, x)", "state += x;"),
    # Dekker's product, without its splitting: fma says what is rounded off.
    "cumprod": Accumulation(
        "1",
        "const value_t product = state * x; state_lost = fma(state_lost, x, fma(state, x, -product)); state = product;",
        "state *= x;",
    ),
    # From the greater of both, so that nothing overflows. Equal infinities have no difference.
    "logcumsumexp": Accumulation(
        "-{infinity}",
        "const bool greater = x > state || x != x; "
        "const value_t difference = greater ? (state - x) + state_lost : (x - state) - state_lost; "
        "const value_t more = state == x && fabs(x) == {infinity} ? 0 : log1p(exp(difference)); "
        "if (greater) {{ state = x; state_lost = 0; }} "
        "ADD(state, more) if (state_lost - state_lost != 0) state_lost = 0;",
    ),
}
_BETTER = {"cummax": ">=", "cummin": "<="}


def accumulate(dialect: Dialect, out: torch.Tensor, self: torch.Tensor, dim: int, name: str) -> Launch:
    """out[k] = what ACCUMULATIONS[name] makes of self[0] to self[k], along dim. Both of one shape and dtype.

    Numbers are accumulated in two of their dtype, float32 in float64 where that costs nothing (`Target.has_wide_sums`);
    integers modulo 2^64.
    """
    value = value_dtype(out.dtype)
    accumulation = ACCUMULATIONS[name]
    if facts(value).kind != "float":
        value, identity, step, result = torch.uint64, accumulation.identity, accumulation.integers, "state"
    else:
        if dialect.target.has_wide_sums and out.dtype == torch.float32:
            value = torch.float64
        infinity = dialect.infinity(facts(value).bits)
        identity, step = (text.format(infinity=infinity) for text in (accumulation.identity, accumulation.step))
        # What a state that is infinite, or no number, lacks is neither.
        result = "(state_lost - state_lost == 0 && state_lost != 0 ? state + state_lost : state)"  # -0 + 0 is 0
    return _scan(
        name,
        dialect,
        {"out": out},
        self,
        dim,
        value,
        declare="value_t states[WIDTH], lost[WIDTH];",
        begin=f"states[lane] = {identity}; lost[lane] = 0;",
        step="value_t state = states[lane], state_lost = lost[lane]; "
        f"const value_t x = (value_t)load_self(at + lane); {step} "
        f"states[lane] = state; lost[lane] = state_lost; store_out(at + lane, {result});",
    )


def complex_products(dialect: Dialect, out: torch.Tensor, self: torch.Tensor, dim: int) -> Launch:
    """out[k] = the product of self[0] to self[k], along dim; both complex, of one shape and dtype.

    Accumulated in complex128 where that costs nothing, as PyTorch does.
    """
    value = torch.complex128 if dialect.target.has_wide_sums else out.dtype
    one, given = dialect.constant(1, value), dialect.cast(Value("given", self.dtype), value)
    product = dialect.complex("state.x * x.x - state.y * x.y", "state.x * x.y + state.y * x.x", value)
    return _scan(
        "cumprod",
        dialect,
        {"out": out},
        self,
        dim,
        value,
        declare="value_t states[WIDTH];",
        begin=f"states[lane] = {one};",
        step=f"const value_t state = states[lane]; const {dialect.type(self.dtype)} given = load_self(at + lane); "
        f"const value_t x = {given}, product = {product}; "
        f"states[lane] = product; store_out(at + lane, {dialect.cast(Value('product', value), out.dtype)});",
    )


def extremum(
    dialect: Dialect, values: torch.Tensor, indices: torch.Tensor, self: torch.Tensor, dim: int, name: str
) -> Launch:
    """values[k] = the greatest ("cummax") or least ("cummin") of self[0] to self[k], indices[k] where its last one is.

    NaN is beyond all, and the last NaN counts.
    """
    value = value_dtype(self.dtype)
    better = f"x {_BETTER[name]} bests[lane]"
    if facts(value).kind == "float":
        better = f"x != x || {better}"  # no number is better than NaN, as comparisons with it are false
    return _scan(
        name,
        dialect,
        {"values": values, "indices": indices},
        self,
        dim,
        value,
        declare="value_t bests[WIDTH]; index_t places[WIDTH];",
        begin="bests[lane] = 0; places[lane] = 0;",
        step=f"const value_t x = load_self(at + lane); const bool taken = k == 0 || {better}; "
        "bests[lane] = taken ? x : bests[lane]; places[lane] = taken ? k : places[lane]; "
        "store_values(at + lane, bests[lane]); indices[at + lane] = places[lane];",
    )


def _scan(
    name: str,
    dialect: Dialect,
    outputs: Mapping[str, torch.Tensor],
    self: torch.Tensor,
    dim: int,
    value: torch.dtype,
    *,
    declare: str,
    begin: str,
    step: str,
) -> Launch:
    rows, size, columns = rows_and_columns(self.shape, dim)
    width = dialect.target.run(_COLUMNS) if columns > 1 else 1

    def over(lanes: str) -> str:
        return f"""
    for (int lane = 0; lane < {lanes}; ++lane) {{ {begin} }}
    for (index_t k = 0, at = first; k < size; ++k, at += columns)
      for (int lane = 0; lane < {lanes}; ++lane) {{ {step} }}"""

    # Compilers make vectors of the lanes where they know how many there are.
    rest = f"else {{ const index_t lanes = columns - column; {over('lanes')} }}" if width > 1 else ""
    body = f"""
  {split("item", ["rows", "blocks"], ["row", "block"])}
  const index_t column = block * WIDTH, first = row * size * columns + column;
  {declare}
  if (column + WIDTH <= columns) {{ {over("WIDTH")} }}
  {rest}
"""
    blocks = -(-columns // width)
    return make_launch(
        f"{name}_{'columns' if width > 1 else 'rows'}",
        dialect,
        outputs=outputs,
        inputs={"self": self},
        integers={"rows": rows, "size": size, "columns": columns, "blocks": blocks},
        constants={"WIDTH": width},
        value=value,
        body=body,
        items=rows * blocks,
        group_size=dialect.target.small_group(_SMALL_GROUP),
    )
