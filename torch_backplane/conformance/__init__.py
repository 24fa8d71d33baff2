"""Runs PyTorch's operator database on a device, with the CPU as judge. No terminal code here: see cli/conformance.py.

    settings.py   what to run            catalogue.py  which operators and dtypes that means
    pool.py       crash-isolated workers worker.py     the loop inside one of them
    check.py      one operator           transfer.py   the same tensors on two devices    judge.py  are these the same?
    report.py     what was found, as data

The parent process imports only settings, pool and report: whatever an operator does, it does in a worker.
"""

from torch_backplane.conformance.pool import ConformanceError, WorkerPool, run
from torch_backplane.conformance.report import EntryResult, Finding, Report
from torch_backplane.conformance.settings import Settings

__all__ = ["ConformanceError", "EntryResult", "Finding", "Report", "Settings", "WorkerPool", "run"]
