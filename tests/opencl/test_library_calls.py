"""Tests which calls of a conformance entry count as calls of a library (conformance/libraries.py)."""

from __future__ import annotations

import pytest
import torch

from torch_backplane import _C, drivers
from torch_backplane.conformance.libraries import count_library_calls
from torch_backplane.drivers.libraries import routines_of
from torch_backplane.preferences import preferring

DEVICE = torch.device("bp")


def product() -> torch.Tensor:
    return torch.ones(3, 4, device=DEVICE) @ torch.ones(4, 2, device=DEVICE)


@pytest.mark.skipif(not _C.host_sees_memory(0), reason="the host cannot access the device's memory")
def test_host_callbacks_count_in_new_and_replayed_plans() -> None:
    with preferring("products", "host"):
        for _ in range(2):
            result, counts = count_library_calls(product)
            assert result.tolist() == [[4.0, 4.0]] * 3
            assert counts == {"host": 1}
        _, counts = count_library_calls(lambda: [product() for _ in range(3)])
        assert counts == {"host": 3}


def test_generated_kernels_and_fallbacks_do_not_count() -> None:
    with preferring("products", "generated"):
        result, counts = count_library_calls(product)
        assert result.tolist() == [[4.0, 4.0]] * 3
        assert counts == {}
    assert count_library_calls(lambda: torch.ones(3, device=DEVICE).sin().shape) == ((3,), {})
    assert count_library_calls(lambda: None) == (None, {})


def test_functions_of_the_drivers_library_count_by_name() -> None:
    if not any(routines_of(drivers.device(0), "matmul")):
        pytest.skip("CLBlast is not installed (Debian: libclblast1)")
    with preferring("products", "driver"):
        result, counts = count_library_calls(product)
    assert result.tolist() == [[4.0, 4.0]] * 3
    assert counts == {"CLBlast matmul": 1}


def test_errors_of_the_function_are_raised_and_later_calls_count() -> None:
    def failing() -> None:
        product()
        raise ValueError("expected")

    with preferring("products", "generated"), pytest.raises(ValueError, match="expected"):
        count_library_calls(failing)
    test_generated_kernels_and_fallbacks_do_not_count()
