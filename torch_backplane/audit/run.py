"""Runs the audit in a worker process, and starts another worker if one crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# The driver, as a package that only the worker can import. Its devices are the targets of this run.
_DRIVER = """\
from torch_backplane.audit.driver import AuditDevice
from torch_backplane.drivers import Driver
from torch_backplane.kernels.modelled import read_target


class AuditDriver(Driver):
    def devices(self):
        return [AuditDevice(read_target(one)) for one in {targets!r}]
"""
_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: backplane_audit\nVersion: 0\n",
    "entry_points.txt": "[torch_backplane.drivers]\naudit = backplane_audit_driver:AuditDriver\n",
}


class AuditError(RuntimeError):
    """The audit cannot run."""


def run(
    titles: Sequence[str], targets: Sequence[str], nbytes: int, on_case: Callable[[str], None] = lambda title: None
) -> Iterator[dict[str, Any]]:
    """Run cases, and yield one result per case and target. A case that crashes the worker is reported as wrong.

    Raises:
        AuditError: a worker ended before it started a case.
    """
    left = list(titles)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        (site / "backplane_audit_driver.py").write_text(_DRIVER.format(targets=list(targets)), encoding="utf-8")
        metadata = site / "backplane_audit-0.dist-info"
        metadata.mkdir()
        for name, text in _METADATA.items():
            (metadata / name).write_text(text, encoding="utf-8")
        while left:
            last = ""
            for message in _worker(site, {"targets": list(targets), "titles": left, "bytes": nbytes}):
                if "begins" in message:
                    last = message["begins"]
                    left = left[left.index(last) + 1 :]
                    on_case(last)
                elif "ended" in message:
                    if not last:
                        raise AuditError(message["ended"])
                    yield {
                        "case": last,
                        "target": "",
                        "wrong": f"the process ended: {message['ended']}",
                        "figures": None,
                        "fallbacks": [],
                    }
                else:
                    yield message


def _worker(site: Path, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of one worker process. The last one is {"ended": reason} if the process failed."""
    (site / "request.json").write_text(json.dumps(request), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_BACKPLANE_")}
    environment |= {"TORCH_BACKPLANE_DRIVERS": "audit", "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "torch_backplane.audit.worker", str(site / "request.json")]
    with (
        (site / "stderr").open("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
        if status != 0:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            yield {"ended": f"{lines[-1] if lines else ''} (status {status})".strip()}
