"""Collects the kernels of programs, which run in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_backplane.audit.processes import Work, run_cases
from torch_backplane.kernels.dialects import CudaCpp
from torch_backplane.ptxas.device import TARGET

_DRIVER = """\
from torch_backplane.drivers import Driver
from torch_backplane.ptxas.device import RecordingDevice


class WorkerDriver(Driver):
    def devices(self):
        return [RecordingDevice({target!r}, {dialect!r})]
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel, the program that first launched it, and the largest group size of its launches."""

    case: str
    entry: str
    text: str
    group: int


def collect(
    titles: Sequence[str],
    on_case: Callable[[str], None] = lambda title: None,
    *,
    target: str = TARGET,
    dialect: str = CudaCpp.name,
) -> tuple[list[Kernel], dict[str, str]]:
    """Run programs, and return their kernels, and the errors of programs that ended early, by title.

    Args:
        target: the name or the path of the target file of the device (`kernels/modelled.py`).
        dialect: the name of the dialect of the kernels.

    Raises:
        AuditError: the worker ended before it started a program.
    """
    found: dict[tuple[str, str], Kernel] = {}
    errors: dict[str, str] = {}
    driver = _DRIVER.format(target=target, dialect=dialect)
    for message in run_cases(Work("torch_backplane.ptxas.worker", driver, {}), titles, on_case):
        if "text" in message:
            key = message["text"], message["entry"]
            first = found[key].case if key in found else message["case"]
            group = max(message["group"], found[key].group if key in found else 0)
            found[key] = Kernel(first, message["entry"], message["text"], group)
        else:
            errors[message["case"]] = message.get("error") or f"the process ended: {message['ended']}"
    return list(found.values()), errors
