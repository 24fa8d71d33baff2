"""Runs the audit's cases in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch_backplane.audit.processes import Work, run_cases

# The worker's driver. Its devices are the targets of this run.
_DRIVER = """\
from torch_backplane.audit.driver import AuditDevice
from torch_backplane.drivers import Driver
from torch_backplane.kernels.modelled import read_target


class WorkerDriver(Driver):
    def devices(self):
        return [AuditDevice(read_target(one)) for one in {targets!r}]
"""


def run(
    titles: Sequence[str], targets: Sequence[str], nbytes: int, on_case: Callable[[str], None] = lambda title: None
) -> Iterator[dict[str, Any]]:
    """Run cases, and yield one result per case and target. A case that crashes the worker is reported as wrong.

    Raises:
        AuditError: a worker ended before it started a case.
    """
    request = {"targets": list(targets), "bytes": nbytes}
    work = Work("torch_backplane.audit.worker", _DRIVER.format(targets=list(targets)), request)
    for message in run_cases(work, titles, on_case):
        if "ended" not in message:
            yield message
            continue
        yield {
            "case": message["case"],
            "target": "",
            "wrong": f"the process ended: {message['ended']}",
            "figures": None,
            "fallbacks": [],
        }
