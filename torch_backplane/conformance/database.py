"""Selects the operators and dtypes of a run from a list of OpInfo. Runs in a worker, because that list is large."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import torch

from torch_backplane.conformance.cuda_dtypes import lacking_on_cpu
from torch_backplane.conformance.settings import Settings

# The slowest operators, which start first so that a run does not end with workers waiting for one of them.
_SLOW = (
    "grid_sampler_3d",
    "max_pool2d_with_indices_backward",
    "nn.functional.max_pool2d",
    "logspace.tensor_overload",
    "nn.functional.max_pool1d",
    "masked.norm",
    "linalg.svd",
    "nn.functional.max_pool3d",
    "linalg.solve_triangular",
)


def load(database: str) -> dict[str, Any]:
    """Return the OpInfos of ``module:attribute`` by full name.

    Raises:
        ValueError: there is no such list.
    """
    module_name, _, attribute = database.partition(":")
    try:
        ops = getattr(importlib.import_module(module_name), attribute)
        _leave_seeds_alone()
        return {op.full_name: op for op in ops}
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"no list of OpInfo at {database!r} (expected module:attribute): {error}") from error


def _leave_seeds_alone() -> None:
    """Disable `wrapper_set_seed`, which seeds and restores the generator within a call and hides that it is random."""
    invocations: Any = sys.modules.get("torch.testing._internal.common_methods_invocations")
    if invocations is not None:
        invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)


def named_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name.

    Raises:
        ValueError: there is none. The message lists the names.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        known = sorted(key for key, value in vars(torch).items() if isinstance(value, torch.dtype))
        raise ValueError(f"unknown dtype {name!r}; use one of {', '.join(known)}")
    return dtype


def entries(ops: dict[str, Any], settings: Settings) -> list[tuple[str, str]]:
    """Return the (operator, dtype) pairs that the settings select, slow ones first.

    Raises:
        ValueError: a dtype is unknown, the regular expression is malformed, or nothing is selected.
    """
    try:
        pattern = re.compile(settings.match)
    except re.error as error:
        raise ValueError(f"malformed --match {settings.match!r}: {error}") from error
    wanted = [named_dtype(name) for name in settings.dtypes]
    names = [name for name in ops if pattern.search(name)]
    if settings.cuda_dtypes:
        selected = [(name, dtype) for name in names for dtype in lacking_on_cpu(ops[name])]
    else:
        selected = [
            (name, dtype) for dtype in dict.fromkeys(wanted) for name in names if _supports(ops[name], dtype)
        ]
    if not selected:
        dtypes = "a dtype that only CUDA supports" if settings.cuda_dtypes else ", ".join(settings.dtypes)
        raise ValueError(f"no operator of {settings.database} matches {settings.match!r} in {dtypes}")
    order = {name: rank for rank, name in enumerate(_SLOW)}
    named = [(name, str(dtype).removeprefix("torch.")) for name, dtype in selected]
    return sorted(named, key=lambda entry: order.get(entry[0], len(order)))


def _supports(op: Any, dtype: torch.dtype) -> bool:
    return dtype in op.supported_dtypes("cpu")
