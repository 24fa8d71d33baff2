"""Runs PyTorch's operator database on a device and compares the results with the CPU's.

The command line is in cli/conformance.py.

    settings.py      what to run                      database.py        operators and dtypes of a run
    worker_pool.py   crash-isolated workers           worker.py          main loop of a worker
    check.py         checks one operator              calls.py           ways to call it with one sample
    transfer.py      copies tensors between devices   comparison.py      compares two results
    ties.py          indices of equal elements        steps.py           compares a call step by step
    sanitize.py      bounds and races of launches     accepted.py        accepted differences from the CPU
    forms.py         variants of an ATen call         forms_check.py     checks them
    sizes.py         mismatched sizes                 cuda_dtypes.py     dtypes that only CUDA supports
    numbers.py       Scalar arguments                 child_processes.py calls in child processes
    accuracy.py      rounding errors of sums          accuracy_cases.py  their cases
    report.py        findings and totals              coverage.py        source of each ATen operator
    libraries.py     counts calls of libraries

The parent process of a run imports only settings, worker_pool and report. Operators run in workers only.
"""

from torch_backplane.conformance.report import EntryResult, Finding, Report
from torch_backplane.conformance.settings import Settings
from torch_backplane.conformance.worker_pool import ConformanceError, WorkerPool, run

__all__ = ["ConformanceError", "EntryResult", "Finding", "Report", "Settings", "WorkerPool", "run"]
