"""Special functions that no dialect provides, as formulas: `from torch_backplane.kernels import special`.

They support float32 and float64. Smooth parts are Chebyshev series (tables.py, which tools/chebyshev_tables.py writes).
The rest uses classical identities, cited as DLMF: NIST's Digital Library of Mathematical Functions,
https://dlmf.nist.gov.
"""

from torch_backplane.kernels.special.bessel import (
    airy_ai,
    i0,
    i0e,
    i1,
    i1e,
    j0,
    j1,
    k0,
    k0e,
    k1,
    k1e,
    spherical_j0,
    y0,
    y1,
)
from torch_backplane.kernels.special.errors import erfcx, erfinv, log_ndtr, ndtri, normal_distribution
from torch_backplane.kernels.special.gamma import (
    digamma,
    gammainc,
    gammaincc,
    mvlgamma,
    mvlgamma_constant,
    polygamma_factor,
    trigamma,
    zeta,
)
from torch_backplane.kernels.special.polynomials import (
    chebyshev_t,
    chebyshev_u,
    chebyshev_v,
    chebyshev_w,
    hermite_h,
    hermite_he,
    laguerre_l,
    legendre_p,
)

__all__ = [
    "airy_ai",
    "chebyshev_t",
    "chebyshev_u",
    "chebyshev_v",
    "chebyshev_w",
    "digamma",
    "erfcx",
    "erfinv",
    "gammainc",
    "gammaincc",
    "hermite_h",
    "hermite_he",
    "i0",
    "i0e",
    "i1",
    "i1e",
    "j0",
    "j1",
    "k0",
    "k0e",
    "k1",
    "k1e",
    "laguerre_l",
    "legendre_p",
    "log_ndtr",
    "mvlgamma",
    "mvlgamma_constant",
    "ndtri",
    "normal_distribution",
    "polygamma_factor",
    "spherical_j0",
    "trigamma",
    "y0",
    "y1",
    "zeta",
]
