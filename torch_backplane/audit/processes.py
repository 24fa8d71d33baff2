"""Runs cases in a worker process with a separate driver, and starts another worker if one crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Metadata of a package that only the worker can import.
_METADATA = {
    "METADATA": "Metadata-Version: 2.1\nName: backplane_audit\nVersion: 0\n",
    "entry_points.txt": "[torch_backplane.drivers]\naudit = backplane_audit_driver:WorkerDriver\n",
}


class AuditError(RuntimeError):
    """No worker can run."""


@dataclass(frozen=True)
class Work:
    """What a worker process does.

    Args:
        module: a module that runs with the path of a JSON file as argument: `request`, and the `titles` of the cases.
            It prints lines of JSON: {"begins": title} before each case, and any others.
        driver: the text of a module with the class WorkerDriver, which provides the worker's devices.
    """

    module: str
    driver: str
    request: dict[str, Any]


def run_cases(
    work: Work, titles: Sequence[str], on_case: Callable[[str], None] = lambda title: None
) -> Iterator[dict[str, Any]]:
    """Run cases, and yield what the worker prints for them.

    For a case that crashes the worker, yields {"ended": reason, "case": title}, and another worker runs the rest.

    Raises:
        AuditError: a worker ended before it started a case.
    """
    left = list(titles)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        (site / "backplane_audit_driver.py").write_text(work.driver, encoding="utf-8")
        metadata = site / "backplane_audit-0.dist-info"
        metadata.mkdir()
        for name, text in _METADATA.items():
            (metadata / name).write_text(text, encoding="utf-8")
        while left:
            last = ""
            for message in _messages(site, work.module, {**work.request, "titles": left}):
                if "begins" in message:
                    last = message["begins"]
                    left = left[left.index(last) + 1 :]
                    on_case(last)
                elif "ended" not in message:
                    yield message
                elif last:
                    yield {**message, "case": last}
                else:
                    raise AuditError(message["ended"])


def _messages(site: Path, module: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of one worker process. The last one is {"ended": reason} if the process failed."""
    (site / "request.json").write_text(json.dumps(request), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_BACKPLANE_")}
    environment |= {"TORCH_BACKPLANE_DRIVERS": "audit", "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", module, str(site / "request.json")]
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
