"""torch.special: Bessel functions and orthogonal polynomials."""

from __future__ import annotations

from torch_backplane.kernels import special
from torch_backplane.planning import pointwise

pointwise("i0", special.i0)
pointwise("special_i0e", special.i0e)
pointwise("special_i1", special.i1)
pointwise("special_i1e", special.i1e)
pointwise("special_modified_bessel_i0", special.i0)
pointwise("special_modified_bessel_i1", special.i1)
pointwise("special_modified_bessel_k0", special.k0)
pointwise("special_modified_bessel_k1", special.k1)
pointwise("special_scaled_modified_bessel_k0", special.k0e)
pointwise("special_scaled_modified_bessel_k1", special.k1e)
pointwise("special_bessel_j0", special.j0)
pointwise("special_bessel_j1", special.j1)
pointwise("special_bessel_y0", special.y0)
pointwise("special_bessel_y1", special.y1)
pointwise("special_spherical_bessel_j0", special.spherical_j0)
pointwise("special_airy_ai", special.airy_ai)

for kind, (polynomial, steps) in {
    "t": (special.chebyshev_t, 6),
    "u": (special.chebyshev_u, 6),
    "v": (special.chebyshev_v, 6),
    "w": (special.chebyshev_w, 4),
}.items():
    pointwise(f"special_chebyshev_polynomial_{kind}", polynomial)
    pointwise(
        f"special_shifted_chebyshev_polynomial_{kind}",
        lambda x, n, polynomial=polynomial, steps=steps: polynomial(2.0 * x - 1.0, n, steps=steps),
    )

pointwise("special_hermite_polynomial_h", special.hermite_h)
pointwise("special_hermite_polynomial_he", special.hermite_he)
pointwise("special_laguerre_polynomial_l", special.laguerre_l)
pointwise("special_legendre_polynomial_p", special.legendre_p)
