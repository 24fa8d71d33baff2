"""Generates kernel text: traces scalar formulas in Python and writes them in the dialect of a device's compiler.

Nothing here uses a device or the runtime. The guide is `docs/kernels.md`.
"""

from torch_backplane.kernels import complex_operations, functions, torch_names  # noqa: F401  (two register themselves)
from torch_backplane.kernels.dialects import DIALECTS, CudaCpp, Dialect, HipCpp, MissingOperation, OpenCLC
from torch_backplane.kernels.expression import Expression, Program, trace
from torch_backplane.kernels.kernel import Kernel, Parameter
from torch_backplane.kernels.layouts import Geometry, Layout, ReductionGeometry, geometry, reduction_geometry
from torch_backplane.kernels.pointwise import pointwise
from torch_backplane.kernels.reductions import Reduction
from torch_backplane.kernels.target import LimitExceeded, Target
from torch_backplane.kernels.templates.reduce import reduction

__all__ = [
    "DIALECTS",
    "CudaCpp",
    "Dialect",
    "Expression",
    "Geometry",
    "HipCpp",
    "Kernel",
    "Layout",
    "LimitExceeded",
    "MissingOperation",
    "OpenCLC",
    "Parameter",
    "Program",
    "Reduction",
    "ReductionGeometry",
    "Target",
    "functions",
    "geometry",
    "pointwise",
    "reduction",
    "reduction_geometry",
    "trace",
]
