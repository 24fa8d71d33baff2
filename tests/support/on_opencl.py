"""Lists the tests that `pytest --on opencl` and `pytest --on late-host` leave out, and selects the OpenCL devices.

PoCL presents the CPU as four devices, bp:0 to bp:3. If OpenCL has fewer devices, host devices fill up to four.
TORCH_BACKPLANE_DISCRETE=1 makes their memory inaccessible to the host, as on GPUs.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest

DEVICES = 4  # tests use bp:0 to bp:3

_TEXT = "tests kernel text only; uses no bp device"
_OWN = "its programs select their devices themselves"
_REPORTS = "tests a tool and expects its output for host devices"

# Files that are left out as a whole.
FILES = {
    "test_allocator_model.py": _OWN,
    "test_audit.py": _OWN,
    "test_as_cuda.py": _OWN,
    "test_benchmarks.py": _REPORTS,
    "test_benchmarks_of_graphs.py": _REPORTS,
    "test_benchmarks_of_shapes.py": _REPORTS,
    "test_cli.py": _REPORTS,
    "test_collectives.py": _OWN,
    "test_conformance_worker_pool.py": _REPORTS,
    "test_deferred_results.py": _OWN,
    "test_cuda_programs.py": _OWN,
    "test_device_faults.py": _OWN,
    "test_device_loss.py": _OWN,
    "test_diagnosis.py": _OWN,
    "test_docs.py": _OWN,
    "test_doctor.py": _OWN,
    "test_drivers_contract.py": _OWN,
    "test_drivers_discovery.py": _OWN,
    "test_empty_operands.py": _OWN,
    "test_examples.py": _REPORTS,
    "test_exit.py": _OWN,
    "test_faults.py": _OWN,
    "test_graphs_on_host.py": "runs tests of opencl/ on host devices",
    "test_host_async.py": _OWN,
    "test_gpu.py": _OWN,
    "test_image_layouts.py": _OWN,
    "test_kernel_launch.py": _OWN,
    "test_kernel_sanitizer.py": _OWN,
    "test_kernels_complex.py": _TEXT,
    "test_kernels_expression.py": _TEXT,
    "test_kernels_pointwise.py": _TEXT,
    "test_kernels_reductions.py": _TEXT,
    "test_killed_ranks.py": _OWN,
    "test_list_lengths.py": _OWN,
    "test_missing_dtypes.py": _OWN,
    "test_modelled_devices.py": _OWN,
    "test_modelled_targets.py": _TEXT,
    "test_mixed_devices_with_planners.py": _OWN,
    "test_nccl.py": _OWN,
    "test_neighbours.py": _OWN,
    "test_numbers_in_kernels.py": _OWN,
    "test_oclgrind_agrees.py": _OWN,
    "test_null_driver.py": _OWN,
    "test_optional_contract.py": _OWN,
    "test_optional_groups.py": _OWN,
    "test_opencl.py": _OWN,
    "test_overloads.py": _OWN,
    "test_opencl_implementations.py": _OWN,
    "test_opencl_staging.py": _OWN,
    "test_operator_formulas.py": _TEXT,
    "test_packaging.py": "tests the installed files",
    "test_plain_c_driver.py": _OWN,
    "test_ptxas.py": _OWN,
    "test_run.py": _OWN,
    "test_settings.py": _OWN,
    "test_target.py": _OWN,
    "test_templates_attention.py": _TEXT,
    "test_templates_compact.py": _TEXT,
    "test_templates_convolution.py": _TEXT,
    "test_templates_images.py": _TEXT,
    "test_templates_indexing.py": _TEXT,
    "test_templates_losses.py": _TEXT,
    "test_templates_margin_losses.py": _TEXT,
    "test_templates_matmul.py": _TEXT,
    "test_templates_matrix.py": _TEXT,
    "test_templates_norms.py": _TEXT,
    "test_templates_random.py": _TEXT,
    "test_templates_reduce.py": _TEXT,
    "test_templates_scan.py": _TEXT,
    "test_templates_sort_resample.py": _TEXT,
    "test_templates_softmax.py": _TEXT,
    "test_templates_strides.py": _TEXT,
    "test_templates_winograd.py": _TEXT,
    "test_torch_bp_environment.py": _OWN,
    "test_training.py": _OWN,
    "test_pluggable_allocators.py": "needs devices in host memory",
    "test_process_unchanged.py": _OWN,
    "test_toy_driver.py": _OWN,
}
# Folders whose tests run in processes with their own devices.
FOLDERS = ("cuda", "cuda_emulator", "discrete", "fuzz", "hip", "opencl")

_CPU_KERNELS = "tests CPU kernels, which host devices run; on OpenCL devices a planner implements the operator"

_DATA_PTR = "the operator uses data_ptr on the CPU, which works only with the memory of host devices"

# "file::test" without parameters → why the test needs host devices.
TESTS = {
    "test_custom_operators.py::test_cpp_operator": _DATA_PTR,
    "test_custom_operators.py::test_cpp_operator_with_a_derivative_from_python": _DATA_PTR,
    "test_fallback.py::test_cpu_kernels_are_preferred_to_composite_ones": _CPU_KERNELS,
    "test_fallback.py::test_zero_copy_fallbacks_do_not_warn": "OpenCL devices have no zero-copy: their fallbacks warn",
}


_LATER = "PyTorch's meta kernel does not check this; the CPU kernel raises the error later, in stream order"

_WARNS_LATER = "deferred operators warn when they run"

# Tests that `pytest --on late-host` leaves out.
LATE_TESTS = {
    "test_conformance_forms.py::test_operators_pass_in_all_forms[linspace]": "the meta kernel resizes out= differently",
    "test_cuda_dtypes.py::test_overlapping_destinations_are_refused": _LATER,
    "test_custom_operators.py::test_cpp_operator": "the operator reads through data_ptr, which does not synchronize",
    "test_fallback.py::test_empty_and_zero_dimensional_tensors": _LATER,
    "test_operators.py::test_errors_complex_bp": _LATER,
    "test_operators.py::test_layouts_fft_hfft2_bp_float32": "the meta kernel has other strides",
    "test_operators.py::test_out_linalg_solve_triangular_bp_float32": _LATER,
    "test_refused_dtypes.py::test_adaptive_pooling_of_integers_is_refused": _LATER,
    "test_warnings.py::test_warnings_are_issued_at_every_call[expanded]": _WARNS_LATER,
    "test_warnings.py::test_warnings_are_issued_at_every_call[no degrees of freedom]": _WARNS_LATER,
}

# `pytest --on late-host` runs each test of these files in THREADS threads concurrently, all on the default stream.
THREADS = 4
THREADED_FILES = (
    "test_autograd.py",
    "test_elementwise.py",
    "test_modules.py",
    "test_rms_norm.py",
    "test_transformer_encoder.py",
    "test_views.py",
)

# Tests of these files that run in one thread, besides those that seed PyTorch's generators, which are per process.
ALONE = {
    "test_autograd.py::test_anomaly_mode_names_the_function_that_returned_nan": "warnings are captured per process",
    "test_autograd.py::test_checkpointing_restores_the_generator_state": "generators are per process",
    "test_modules.py::test_attention_with_all_backends_disabled_raises_pytorchs_error": "the switches are per process",
    "test_modules.py::test_choosing_the_attention_backend": "the switches are per process",
    "test_modules.py::test_embedding": "the first thread that synchronizes with the stream gets the error",
}


def runs_in_threads(test: pytest.Function) -> bool:
    if test.path.name not in THREADED_FILES or f"{test.path.name}::{test.originalname}" in ALONE:
        return False
    return "manual_seed" not in test.function.__code__.co_names


WITHOUT = "without OpenCL: "


def missing(what: str) -> NoReturn:
    """Skips a test that needs an OpenCL device, or fails it if REQUIRE_OPENCL=1. pytest's summary counts the skips."""
    if required():
        pytest.fail(f"{WITHOUT}{what}, and REQUIRE_OPENCL is set", pytrace=False)
    pytest.skip(f"{WITHOUT}{what}")


def required() -> bool:
    return os.environ.get("REQUIRE_OPENCL", "0") not in ("", "0")


def require_platform() -> list[Any]:
    """Returns PyOpenCL's devices; calls `missing` if there are none."""
    try:
        import pyopencl as cl
    except ImportError:
        missing("needs PyOpenCL (pip install pyopencl)")
    try:
        devices = [device for platform in cl.get_platforms() for device in platform.get_devices()]
    except cl.Error:
        devices = []
    if not devices:
        missing("needs an OpenCL device, for example PoCL's (apt-get install pocl-opencl-icd)")
    return devices


def choose_devices() -> int:
    """Makes this process and its children use OpenCL devices. Call before bp is used. Returns the number of devices."""
    os.environ.setdefault("TORCH_BACKPLANE_DISCRETE", "1")
    os.environ.setdefault("POCL_DEVICES", " ".join(["pthread"] * DEVICES))
    from torch_backplane.drivers.opencl import OpenCLDriver

    found = len(OpenCLDriver().devices())
    os.environ["TORCH_BACKPLANE_DRIVERS"] = "opencl" if found >= DEVICES else "opencl,host"
    os.environ["TORCH_BACKPLANE_HOST_DEVICES"] = str(max(1, DEVICES - found))
    if found > DEVICES:
        os.environ["TORCH_BACKPLANE_VISIBLE_DEVICES"] = ",".join(f"opencl:{index}" for index in range(DEVICES))
    return found
