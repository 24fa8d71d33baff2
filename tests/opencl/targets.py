"""The device taken for another one, within a test."""

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
from torch_backplane.kernels import OpenCLC, Target
from torch_backplane.operators import kernel_capabilities
from torch_backplane.planning import costs

launch = importlib.import_module("torch_backplane.planning.launch")  # the package has a function of this name


@contextmanager
def target(kind: str, **figures: Any) -> Iterator[None]:
    """With kernels as for such a device. Skips the test where a compiler makes lanes of work items and the test wants
    the forms of processors, whose vectors it takes minutes for.
    """
    index = torch.device(DEVICE).index
    own = launch.dialect_of(index)
    if own.target.simt and not Target.of_kind(kind).simt:
        pytest.skip("the device's compiler is none for kernels of processors")
    launch._generated.clear()
    launch._dialects[index] = OpenCLC(Target.of_kind(kind, float64=own.target.float64, **figures))
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
    """As if it cost nothing to begin work on the host: what it has libraries for is the host's, however small."""
    with mock.patch.dict(costs.HOST_FROM, dict.fromkeys(costs.HOST_FROM, 0)):
        _C.advance_configuration_epoch()  # plans were made otherwise
        try:
            yield
        finally:
            _C.advance_configuration_epoch()
