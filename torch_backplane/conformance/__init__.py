"""Runs PyTorch's operator database on a device, with the CPU as judge. No terminal code here: see cli/conformance.py.

    settings.py   what to run            catalogue.py  which operators and dtypes that means
    pool.py       crash-isolated workers worker.py     the loop inside one of them
    check.py      one operator           calls.py      the ways to call it with one sample
    transfer.py   one tensor, two places judge.py      are these the same?
    sanitize.py    bounds and races of launches
    forms.py, forms_check.py  the forms that a call can take   sizes.py  sizes that do not fit
    report.py     what was found         coverage.py   where each ATen operator comes from

The parent process of a run imports only settings, pool and report: whatever an operator does, a worker does.
"""

from torch_backplane.conformance.pool import ConformanceError, WorkerPool, run
from torch_backplane.conformance.report import EntryResult, Finding, Report
from torch_backplane.conformance.settings import Settings

__all__ = ["ConformanceError", "EntryResult", "Finding", "Report", "Settings", "WorkerPool", "run"]
