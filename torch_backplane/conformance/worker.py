"""A worker process: checks entries one after the other, as requested by its parent.

    python -m torch_backplane.conformance.worker

The protocol is JSON lines: settings and requests on stdin, answers on the original stdout. Output of operators goes to
stderr. Answers: ``ready`` (with the environment), ``entries``, ``at`` (the call that is about to run), ``result``,
``fatal`` (the worker cannot run).
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import platform
import sys
import warnings
from typing import Any, TextIO

from torch_backplane.conformance.settings import Settings


def _claim_stdout() -> TextIO:
    """Return the channel to the parent, and redirect file descriptor 1 to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return channel


def _fallback_counters(device_type: str) -> Any:
    """The module that counts fallbacks to the CPU, or None if the device under test is the CPU."""
    if device_type == "cpu":
        return None
    from torch_backplane import _C

    return _C


def _launch_watch() -> Any:
    from torch_backplane.conformance.sanitize import LaunchWatch

    return LaunchWatch()


class Worker:
    """The state of a worker: the operators and the device under test."""

    def __init__(self, settings: Settings, channel: TextIO) -> None:
        import torch

        from torch_backplane.conformance import database

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.settings = settings
        self.channel = channel
        self.ops = database.load(settings.database)
        self.device = torch.empty(0, device=settings.device).device  # with its index; fails if there is no such device
        self.watch = _launch_watch() if settings.sanitize else None

    def send(self, **message: Any) -> None:
        self.channel.write(json.dumps(message) + "\n")
        self.channel.flush()

    def environment(self) -> dict[str, Any]:
        import torch

        module = getattr(torch, self.device.type, None)
        name = getattr(module, "get_device_name", lambda device: None)(self.device)
        return {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": str(self.device),
            "device_name": name,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }

    def answer(self, request: dict[str, Any]) -> None:
        from torch_backplane.conformance import database
        from torch_backplane.conformance.check import EntryCheck
        from torch_backplane.conformance.cuda_dtypes import CudaDtypeCheck
        from torch_backplane.conformance.forms_check import check_forms
        from torch_backplane.conformance.libraries import count_library_calls
        from torch_backplane.conformance.report import EntryResult
        from torch_backplane.conformance.sizes import check_sizes

        if "list" in request:
            self.send(entries=database.entries(self.ops, self.settings))
            return
        counters = _fallback_counters(self.device.type)
        if counters:
            counters.reset_fallback_counts()
        op, dtype = self.ops[request["op"]], database.named_dtype(request["dtype"])

        def announce(text: str) -> None:
            if self.watch:
                self.watch.announced(text)
            self.send(at=text)

        def check() -> EntryResult:
            if self.settings.forms:
                return check_forms(op, dtype, self.settings, self.device, announce)
            if self.settings.sizes:
                return check_sizes(op, dtype, self.settings, self.device, announce)
            entry_check = CudaDtypeCheck if self.settings.cuda_dtypes else EntryCheck
            return entry_check(op, dtype, self.settings, self.device, announce=announce).run(
                errors=request["errors"] and not self.settings.cuda_dtypes
            )

        if self.watch:
            self.watch.begin()
        result, libraries = count_library_calls(check) if counters else (check(), {})
        if self.watch:
            self.watch.end(result)
        if counters:
            result.fallbacks, result.libraries = dict(counters.fallback_counts()), libraries
        self.send(result=result.to_json())


def main() -> None:
    """Answer requests until stdin closes."""
    faulthandler.enable()
    channel = _claim_stdout()
    try:
        worker = Worker(Settings(**json.loads(sys.stdin.readline())), channel)
        worker.send(ready=worker.environment())
        for line in sys.stdin:
            worker.answer(json.loads(line))
    except Exception as error:
        channel.write(json.dumps({"fatal": f"{type(error).__name__}: {error}"}) + "\n")
        channel.flush()
        raise


if __name__ == "__main__":
    main()
