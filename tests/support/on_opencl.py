"""What `pytest --on opencl` runs: the tests of this folder on OpenCL devices, except those that are listed here.

PoCL shows the processor as four devices, bp:0 to bp:3. Where there are fewer, host devices follow, up to four. The host
does not see their memory (TORCH_BACKPLANE_DISCRETE=1), so that they are as GPUs are.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest

DEVICES = 4  # the tests count on bp:0 to bp:3

_TEXT = "reaches no bp device: kernel text alone"
_OWN = "its programs choose their devices themselves"
_REPORTS = "tests a tool, whose output it expects of host devices"

# Left out as a whole. A file that is not here runs, except for the tests below.
FILES = {
    "test_allocator_model.py": _OWN,
    "test_audit.py": _OWN,
    "test_benchmarks.py": _REPORTS,
    "test_benchmarks_of_graphs.py": _REPORTS,
    "test_benchmarks_of_shapes.py": _REPORTS,
    "test_cli.py": _REPORTS,
    "test_conformance_pool.py": _REPORTS,
    "test_deferred_results.py": _OWN,
    "test_device_faults.py": _OWN,
    "test_device_loss.py": _OWN,
    "test_docs.py": _OWN,
    "test_drivers_contract.py": _OWN,
    "test_drivers_discovery.py": _OWN,
    "test_empty_operands.py": _OWN,
    "test_examples.py": _REPORTS,
    "test_exit.py": _OWN,
    "test_faults.py": _OWN,
    "test_graphs_on_host.py": "tests of opencl/ on host devices",
    "test_host_async.py": _OWN,
    "test_image_layouts.py": _OWN,
    "test_kernel_launch.py": _OWN,
    "test_kernel_sanitizer.py": _OWN,
    "test_kernels_complex.py": _TEXT,
    "test_kernels_expression.py": _TEXT,
    "test_kernels_pointwise.py": _TEXT,
    "test_kernels_reductions.py": _TEXT,
    "test_list_lengths.py": _OWN,
    "test_missing_dtypes.py": _OWN,
    "test_modelled_devices.py": _OWN,
    "test_modelled_targets.py": _TEXT,
    "test_mixed_devices_with_planners.py": _OWN,
    "test_neighbours.py": _OWN,
    "test_numbers_in_kernels.py": _OWN,
    "test_oclgrind_agrees.py": _OWN,
    "test_null_driver.py": _OWN,
    "test_optional_contract.py": _OWN,
    "test_optional_groups.py": _OWN,
    "test_opencl.py": _OWN,
    "test_overloads.py": _OWN,
    "test_opencl_staging.py": _OWN,
    "test_operator_formulas.py": _TEXT,
    "test_packaging.py": "tests what is installed",
    "test_plain_c_driver.py": _OWN,
    "test_target.py": _OWN,
    "test_templates_attention.py": _TEXT,
    "test_templates_compact.py": _TEXT,
    "test_templates_convolution.py": _TEXT,
    "test_templates_images.py": _TEXT,
    "test_templates_indexing.py": _TEXT,
    "test_templates_losses.py": _TEXT,
    "test_templates_margin_losses.py": _TEXT,
    "test_templates_matmul.py": _TEXT,
    "test_templates_norms.py": _TEXT,
    "test_templates_random.py": _TEXT,
    "test_templates_reduce.py": _TEXT,
    "test_templates_scan.py": _TEXT,
    "test_templates_sort_resample.py": _TEXT,
    "test_templates_softmax.py": _TEXT,
    "test_templates_strides.py": _TEXT,
    "test_templates_winograd.py": _TEXT,
    "test_torch_bp_environment.py": _OWN,
    "test_pluggable_allocators.py": "of devices in host memory",
    "test_process_unchanged.py": _OWN,
    "test_toy_driver.py": _OWN,
}
# These folders have processes with devices of their own.
FOLDERS = ("discrete", "fuzz", "opencl")

_CPU_KERNELS = "about the CPU's kernels, which host devices run; here a planner has the operator"

_DATA_PTR = "the operator reads and writes through data_ptr, where only host devices have memory for the CPU"

# "file::test", without parameters: why it is about host devices.
TESTS = {
    "test_custom_operators.py::test_cpp_operator": _DATA_PTR,
    "test_custom_operators.py::test_cpp_operator_with_a_derivative_from_python": _DATA_PTR,
    "test_fallback.py::test_cpu_kernels_are_preferred_to_composite_ones": _CPU_KERNELS,
    "test_fallback.py::test_zero_copy_fallbacks_do_not_warn": "OpenCL devices have no zero-copy: their fallbacks warn",
}


_LATER = "PyTorch's meta kernel does not look, so that the CPU's refuses when the stream gets there"

# What `pytest --on late-host` leaves out of these.
LATE_TESTS = {
    "test_conformance_forms.py::test_a_sample[linspace]": "an out= that PyTorch's meta kernel gives another shape",
    "test_cuda_dtypes.py::test_overlapping_destinations_are_refused": _LATER,
    "test_custom_operators.py::test_cpp_operator": "the operator reads through data_ptr, which waits for nothing",
    "test_fallback.py::test_empty_and_zero_dimensional_tensors": _LATER,
}

# Files whose tests `pytest --on late-host` runs in so many threads at once, all of them on the default stream.
THREADS = 4
THREADED_FILES = (
    "test_autograd.py",
    "test_elementwise.py",
    "test_modules.py",
    "test_rms_norm.py",
    "test_transformer_encoder.py",
    "test_views.py",
)

# Tests of these files that are for one thread, besides those that seed PyTorch's generators, which are the process's.
ALONE = {
    "test_autograd.py::test_anomaly_mode_names_the_function_that_returned_nan": "warnings are the process's",
    "test_autograd.py::test_checkpointing_restores_the_generator_state": "so are generators",
    "test_modules.py::test_embedding": "the first thread that synchronizes with the stream gets the error",
}


def runs_in_threads(test: pytest.Function) -> bool:
    if test.path.name not in THREADED_FILES or f"{test.path.name}::{test.originalname}" in ALONE:
        return False
    return "manual_seed" not in test.function.__code__.co_names


WITHOUT = "without OpenCL: "


def missing(what: str) -> NoReturn:
    """No OpenCL device for a test: it skips, and the run says so at its end; with REQUIRE_OPENCL=1 it fails."""
    if required():
        pytest.fail(f"{WITHOUT}{what}, and REQUIRE_OPENCL is set", pytrace=False)
    pytest.skip(f"{WITHOUT}{what}")


def required() -> bool:
    return os.environ.get("REQUIRE_OPENCL", "0") not in ("", "0")


def require_platform() -> list[Any]:
    """PyOpenCL's devices; `missing` where there are none."""
    try:
        import pyopencl as cl
    except ImportError:
        missing("needs PyOpenCL (pip install pyopencl)")
    try:
        devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error:
        devices = []
    if not devices:
        missing("needs an OpenCL device, such as PoCL's (apt-get install pocl-opencl-icd)")
    return devices


def choose_devices() -> int:
    """Puts this process, and those that it starts, on OpenCL devices; before bp is used. How many of them there are."""
    os.environ.setdefault("TORCH_BACKPLANE_DISCRETE", "1")
    os.environ.setdefault("POCL_DEVICES", " ".join(["pthread"] * DEVICES))
    from torch_backplane.drivers.opencl import OpenCLDriver

    found = len(OpenCLDriver().devices())
    os.environ["TORCH_BACKPLANE_DRIVERS"] = "opencl" if found >= DEVICES else "opencl,host"
    os.environ["TORCH_BACKPLANE_HOST_DEVICES"] = str(max(1, DEVICES - found))
    if found > DEVICES:
        os.environ["TORCH_BACKPLANE_VISIBLE_DEVICES"] = ",".join(f"opencl:{index}" for index in range(DEVICES))
    return found
