"""All cases of the audit: those of benchmarks/kernels.py, others for the audit only, and those made from schemas."""

from __future__ import annotations

import functools

from torch_backplane.audit import pointwise
from torch_backplane.audit.compiled import COMPILED
from torch_backplane.audit.more_workloads import MORE
from torch_backplane.audit.workloads import WORKLOADS, Workload


@functools.cache
def cases() -> dict[str, Workload]:
    """Return all cases by title."""
    found = {one.title: one for one in (*WORKLOADS, *MORE, *COMPILED)}
    assert len(found) == len(WORKLOADS) + len(MORE) + len(COMPILED)
    return found | {one.title: one for one in pointwise.cases() if one.title not in found}
