"""nn.functional.grid_sample in two dimensions: interpolates images at the positions of a grid."""

from __future__ import annotations

from typing import Any

import torch

from torch_backplane.kernels.dtypes import value_dtype
from torch_backplane.kernels.templates.indexing import atomically, can_swap
from torch_backplane.planning import Call, Refused, check, contiguous_result, dialect_of, operator, run_kernel

# Along each dimension, a position of the grid reads TAPS elements of the image: at[k] is the index of an element, -1 if
# it is outside the image and counts as zero; weight[k] is its weight; slope[k] is the derivative of the weight with
# respect to the number in the grid.
_TAPS = (2, 1, 4)  # linear, nearest, cubic
_FUNCTIONS = """
FUNCTION value_t padded(value_t x, const index_t size, value_t* slope) {
  *slope = 1;
#if PADDING == 2
  const value_t least = CORNERS ? (value_t)0 : (value_t)-0.5, span = (value_t)(CORNERS ? size - 1 : size);
  if (span == 0) { *slope = 0; return 0; }
  *slope = x < least ? -1 : 1;
  x = fabs(x - least);
  const value_t extra = fmod(x, span), flips = floor(x / span);
  const bool odd = fmod(flips, (value_t)2) != 0;
  *slope = odd ? -*slope : *slope;
  x = (odd ? span - extra : extra) + least;
#endif
#if PADDING != 0
  const value_t last = (value_t)(size - 1);
  *slope = x > 0 && x < last ? *slope : 0;
  x = fmin(fmax(x, (value_t)0), last);
#endif
  return x;
}
FUNCTION index_t place(const value_t x, const index_t size) {
  return x >= 0 && x < (value_t)size ? (index_t)x : -1;
}
FUNCTION void taps(const value_t given, const index_t size, index_t* at, value_t* weight, value_t* slope) {
  const value_t factor = (value_t)(CORNERS ? size - 1 : size) / 2;
  value_t x = CORNERS ? (given + 1) / 2 * (value_t)(size - 1) : ((given + 1) * (value_t)size - 1) / 2, turned;
#if TAPS == 4
  // Factored cubic polynomials avoid cancellation. The fraction is computed without the rounding of x, so it can be
  // outside [0, 1] if x was rounded up to an integer or is too large to have a fraction.
  const value_t base = floor(x), a = (value_t)-0.75, fraction = fma(given, factor, (value_t)(size - 1) / 2 - base);
  const value_t t = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction, s = 1 - t;
  for (int k = 0; k < 4; ++k) at[k] = place(padded(base + (value_t)(k - 1), size, &turned), size);
  weight[0] = a * t * s * s; slope[0] = factor * (a * s * (1 - 3 * t));
  weight[1] = s * (1 + t - (a + 2) * t * t); slope[1] = factor * (t * (3 * (a + 2) * t - 2 * (a + 3)));
  weight[2] = t * (1 + s - (a + 2) * s * s); slope[2] = -factor * (s * (3 * (a + 2) * s - 2 * (a + 3)));
  weight[3] = a * s * t * t; slope[3] = factor * (a * t * (2 - 3 * t));
#else
  x = padded(x, size, &turned);
#if TAPS == 2
  const value_t base = floor(x);
  at[0] = place(base, size); weight[0] = base + 1 - x; slope[0] = -factor * turned;
  at[1] = place(base + 1, size); weight[1] = x - base; slope[1] = factor * turned;
#else
  at[0] = place(rint(x), size); weight[0] = 1; slope[0] = 0;
#endif
#endif
}
"""

_TAPS_OF_BOTH = """
  index_t row[TAPS], column[TAPS]; value_t of_row[TAPS], of_column[TAPS], down[TAPS], right[TAPS];
  taps(load_grid({place} * 2 + 1), height, row, of_row, down);
  taps(load_grid({place} * 2), width, column, of_column, right);
"""


def _check(image: torch.Tensor, grid: torch.Tensor, mode: int, padding: int) -> None:
    """Refuses bad arguments: the CPU kernel raises the error."""
    check(image.dim() == grid.dim() == 4 and grid.shape[3] == 2, "input or grid has the wrong number of dimensions")
    check(image.shape[0] == grid.shape[0], "input and grid have different batch sizes")
    check(image.shape[2] > 0 and image.shape[3] > 0, "input has no rows or no columns")
    check(image.dtype == grid.dtype and image.is_floating_point(), "dtypes differ or are not floating-point")
    if mode not in (0, 1, 2) or padding not in (0, 1, 2):
        raise Refused("unknown interpolation or padding mode")


def _constants(mode: int, padding: int, align_corners: bool) -> dict[str, int | str]:
    return {"TAPS": _TAPS[mode], "PADDING": padding, "CORNERS": int(align_corners)}


def _sizes(image: torch.Tensor, grid: torch.Tensor) -> dict[str, int]:
    _, channels, height, width = image.shape
    return {"channels": channels, "height": height, "width": width, "places": grid.shape[1] * grid.shape[2]}


# Each of these values has its own kernels.
_MODES = {"interpolation_mode": (0, 1, 2), "padding_mode": (0, 1, 2)}


@operator("grid_sampler_2d", static=_MODES)
def grid_sampler_2d(
    call: Call, input: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, align_corners: bool
) -> torch.Tensor:
    _check(input, grid, mode, padding)
    shape = (*input.shape[:2], *grid.shape[1:3])
    (out,) = call.outputs(like=[torch.empty(shape, dtype=input.dtype, device="meta")])
    if not out.numel():
        return out
    with contiguous_result(out) as result:
        run_kernel(
            "grid_sampler_2d",
            _TAPS_OF_BOTH.format(place="item")
            + """
  const index_t image = item / places, place = item % places;
  for (index_t c = 0; c < channels; ++c) {
    const index_t plane = image * channels + c;
    SUM(sum);
    for (int i = 0; i < TAPS; ++i) for (int j = 0; j < TAPS; ++j) {
      const bool inside = row[i] >= 0 && column[j] >= 0;
      ADD(sum, of_row[i] * of_column[j] * (inside ? load_input((plane * height + row[i]) * width + column[j]) : 0))
    }
    store_out(plane * places + place, TOTAL(sum));
  }
""",
            items=input.shape[0] * grid.shape[1] * grid.shape[2],
            outputs={"out": result},
            inputs={"input": input.contiguous(), "grid": grid.contiguous()},
            integers=_sizes(input, grid),
            value=value_dtype(input.dtype),
            functions=_FUNCTIONS,
            constants=_constants(mode, padding, align_corners),
        )
    return out


@operator("grid_sampler_2d_backward", static=_MODES)
def grid_sampler_2d_backward(
    call: Call,
    grad_output: torch.Tensor,
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: int,
    padding: int,
    align_corners: bool,
    output_mask: list[bool],
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Several positions of the grid can read the same element of the image. Where work items run in lockstep, each
    handles one position and adds to the image's gradient atomically, in any order. Elsewhere, and if deterministic
    algorithms are enabled, each work item computes a whole plane of the gradient.
    """
    _check(input, grid, mode, padding)
    shape = (*input.shape[:2], *grid.shape[1:3])
    given = grad_output.shape  # PyTorch reads out of bounds for other shapes
    torch._check(given == torch.Size(shape), lambda: f"expected a gradient of {list(shape)}, but got {list(given)}")
    check(grad_output.dtype == input.dtype, "grad_output has another dtype than input")
    of_grid = torch.empty(grid.shape, dtype=grid.dtype, device=grid.device)
    of_input = torch.zeros(input.shape, dtype=value_dtype(input.dtype), device=input.device) if output_mask[0] else None
    gradient, grid = grad_output.contiguous(), grid.contiguous()
    value, sizes, constants = value_dtype(input.dtype), _sizes(input, grid), _constants(mode, padding, align_corners)
    target = dialect_of(input.device).target
    common: dict[str, Any] = {"integers": sizes, "value": value, "functions": _FUNCTIONS, "constants": constants}
    gradients = {"gradient": gradient, "grid": grid}
    atomic = target.simt and can_swap(target, value) and not torch.are_deterministic_algorithms_enabled()
    if of_input is not None and gradient.numel() and atomic:
        run_kernel(
            "grid_sampler_2d_backward_of_images_anyhow",
            _TAPS_OF_BOTH.format(place="item")
            + f"""
  const index_t image = item / places, place = item % places;
  for (index_t c = 0; c < channels; ++c) {{
    const index_t plane = image * channels + c;
    const value_t g = load_gradient(plane * places + place);
    for (int i = 0; i < TAPS; ++i) for (int j = 0; j < TAPS; ++j)
      if (row[i] >= 0 && column[j] >= 0) {{
        const index_t at = (plane * height + row[i]) * width + column[j];
        const value_t share = of_row[i] * of_column[j] * g;
        {atomically("of_input + at", value, "there + share")}
      }}
  }}
""",
            items=grid.shape[0] * grid.shape[1] * grid.shape[2],
            outputs={"of_input": of_input},
            inputs=gradients,
            **common,
        )
    elif of_input is not None and gradient.numel():
        run_kernel(
            "grid_sampler_2d_backward_of_images",
            """
  const index_t plane = item * height * width, first = item / channels * places;
  for (index_t place = 0; place < places; ++place) {"""
            + _TAPS_OF_BOTH.format(place="(first + place)")
            + """
    const value_t g = load_gradient(item * places + place);
    for (int i = 0; i < TAPS; ++i) for (int j = 0; j < TAPS; ++j)
      if (row[i] >= 0 && column[j] >= 0) {
        const index_t at = plane + row[i] * width + column[j];
        store_of_input(at, load_of_input(at) + of_row[i] * of_column[j] * g);
      }
  }
""",
            items=input.shape[0] * input.shape[1],
            outputs={"of_input": of_input},
            inputs=gradients,
            **common,
        )
    run_kernel(
        "grid_sampler_2d_backward_of_grid",
        _TAPS_OF_BOTH.format(place="item")
        + """
  const index_t image = item / places, place = item % places;
  SUM(x); SUM(y);
  for (index_t c = 0; c < channels; ++c) {
    const index_t plane = image * channels + c;
    const value_t g = load_gradient(plane * places + place);
    for (int i = 0; i < TAPS; ++i) for (int j = 0; j < TAPS; ++j)
      if (row[i] >= 0 && column[j] >= 0) {
        const value_t found = load_input((plane * height + row[i]) * width + column[j]) * g;
        ADD(x, of_row[i] * right[j] * found)
        ADD(y, down[i] * of_column[j] * found)
      }
  }
  store_of_grid(item * 2, TOTAL(x));
  store_of_grid(item * 2 + 1, TOTAL(y));
""",
        items=grid.shape[0] * grid.shape[1] * grid.shape[2],
        outputs={"of_grid": of_grid},
        inputs={**gradients, "input": input.contiguous()},
        **common,
    )
    return of_input.to(input.dtype) if of_input is not None else None, of_grid
