"""Fixtures that run programs on emulated CUDA devices, each in a separate process."""

from __future__ import annotations

import on_cuda
import pytest
from emulated_programs import result, run  # noqa: F401  # fixtures

# In `make test`, of the tests that run programs. `make test-cuda-emulated` runs all.
QUICK = {
    "test_a_graph_with_library_calls_is_one_cuda_graph",
    "test_addresses_are_cudas",
    "test_an_illegal_access_loses_the_device",
    "test_attention_calls_the_library",
    "test_convolutions_call_the_library",
    "test_decompositions_and_solutions_call_the_libraries",
    "test_findings_are_errors_of_the_device",
    "test_graphs_are_cudas_and_updated_in_place",
    "test_products_and_transforms_call_the_libraries",
    "test_products_with_a_bias_call_the_library",
    "test_products_by_tensor_cores_have_no_findings",
    "test_streams_run_concurrently_and_events_order_them",
    "test_typical_kernels_have_no_findings",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        runs_programs = item.path.parent.name == "cuda" and "emulator" in getattr(item, "fixturenames", ())
        if runs_programs and getattr(item, "originalname", "") not in QUICK:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def emulator() -> dict[str, str]:
    """Returns the environment variables with which a program uses four emulated devices."""
    if on_cuda.missing():
        pytest.skip(on_cuda.missing())
    return on_cuda.environment()
