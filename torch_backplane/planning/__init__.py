"""The API for writing planners: operator declarations, launches, library calls. Guide: `docs/write-an-operator.md`.

Imported when a device that runs kernels is discovered. The planners themselves are in `torch_backplane.operators`.
"""

from torch_backplane import _C
from torch_backplane._C import Number, Refused, RunOnCPU
from torch_backplane.drivers.libraries import Activation, Convolution, MatrixOperation, Transform
from torch_backplane.planning.call import Call, check, check_apart, check_same_dtype, same_storage
from torch_backplane.planning.candidates import Candidate, Candidates, try_library
from torch_backplane.planning.declare import operator, part
from torch_backplane.planning.host import LibraryFunction, call_on_cpu, host_sees_memory
from torch_backplane.planning.launch import dialect_of, launch, random_numbers
from torch_backplane.planning.library_calls import LibraryCall, allowed
from torch_backplane.planning.pointwise import (
    as_bits,
    check_fits,
    check_number,
    copy_elements,
    each_once,
    plan_pointwise,
    pointwise,
    run_pointwise,
)
from torch_backplane.planning.queue_functions import QueueFunction, queue_api
from torch_backplane.planning.reduce import run_reduction
from torch_backplane.planning.template import (
    contiguous_result,
    error_report,
    error_words,
    expect_values,
    run_kernel,
    run_template,
)
from torch_backplane.planning.tracing import trace
from torch_backplane.preferences import divided, workspace

__all__ = [
    "Activation",
    "Call",
    "Candidate",
    "Candidates",
    "Convolution",
    "LibraryCall",
    "LibraryFunction",
    "MatrixOperation",
    "Number",
    "QueueFunction",
    "Refused",
    "RunOnCPU",
    "Transform",
    "allowed",
    "as_bits",
    "call_on_cpu",
    "check",
    "check_apart",
    "check_fits",
    "check_number",
    "check_same_dtype",
    "contiguous_result",
    "copy_elements",
    "dialect_of",
    "divided",
    "each_once",
    "error_report",
    "error_words",
    "expect_values",
    "host_sees_memory",
    "launch",
    "operator",
    "part",
    "plan_pointwise",
    "pointwise",
    "queue_api",
    "random_numbers",
    "run_kernel",
    "run_pointwise",
    "run_reduction",
    "run_template",
    "same_storage",
    "try_library",
    "workspace",
]

_C.set_tracer(trace)
