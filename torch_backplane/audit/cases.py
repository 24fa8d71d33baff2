"""All cases of the audit: the benchmark's, and others that are for no timing."""

from __future__ import annotations

from torch_backplane.audit.workloads import WORKLOADS, Workload


def CASES() -> list[Workload]:
    return WORKLOADS
