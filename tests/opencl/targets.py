"""Replaces the device's target within a test."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from agreement import DEVICE, plans_from_the_start

from torch_backplane import _C
from torch_backplane.kernels import Target
from torch_backplane.operators import kernel_capabilities
from torch_backplane.planning import costs

launch = importlib.import_module("torch_backplane.planning.launch")  # the package has a function of this name


@contextmanager
def target(kind: str, **figures: Any) -> Iterator[None]:
    """Generates kernels for a device of this kind. Skips the test if it wants kernels for processors and the device's
    compiler maps work items to SIMD lanes: such a compiler takes minutes for their vector types.
    """
    index = torch.device(DEVICE).index
    own = launch.dialect_of(index)
    if own.target.simt and not Target.of_kind(kind).simt:
        pytest.skip("the device's compiler is not made for kernels for processors")
    launch._generated.clear()
    launch._dialects[index] = type(own)(Target.of_kind(kind, float64=own.target.float64, **figures))
    kernel_capabilities.declare_kernel_capabilities([index])
    try:
        with plans_from_the_start():
            yield
    finally:
        launch._generated.clear()
        launch._dialects[index] = own
        kernel_capabilities.declare_kernel_capabilities([index])


@contextmanager
def host_first() -> Iterator[None]:
    """Sets the minimum size of work for the host's libraries to 0, so that they are chosen for calls of any size."""
    with mock.patch.dict(costs.HOST_FROM, dict.fromkeys(costs.HOST_FROM, 0)):
        _C.advance_configuration_epoch()  # discards the plans made before
        try:
            yield
        finally:
            _C.advance_configuration_epoch()
