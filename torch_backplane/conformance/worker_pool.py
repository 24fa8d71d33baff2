"""A pool of worker processes. A crash or hang fails one entry and replaces one worker; the run continues."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch_backplane.conformance.report import EntryResult, Report
from torch_backplane.conformance.settings import Settings

STARTUP_SECONDS = 300.0  # importing torch and its operator database on a busy machine

Entry = tuple[str, str]  # operator, dtype


class ConformanceError(RuntimeError):
    """The run cannot start: the device, operators, dtype or database do not exist, or options conflict."""


class WorkerDied(Exception):
    """The worker process crashed, or was killed after the time limit."""

    def __init__(self, kind: str, message: str, where: str) -> None:
        super().__init__(message)
        self.kind = kind  # "crash" or "hang"
        self.where = where  # the call that was running


class WorkerProcess:
    """A worker: a new Python process that shares nothing with this one. Used by one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        environment = {**os.environ, **settings.environment}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "torch_backplane.conformance.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=environment, encoding="utf-8",
        )  # fmt: skip
        self._timed_out = False
        self._where = "starting"
        self._settings = settings
        self.environment: dict[str, Any] = {}

    def wait_ready(self) -> WorkerProcess:
        """Wait until the worker has started. It then has filled ``environment``.

        Raises:
            ConformanceError: the worker cannot run, because the device or the list of operators does not exist.
        """
        if not self.environment:
            try:
                self.environment = self._exchange(asdict(self._settings), "ready", STARTUP_SECONDS)
            except WorkerDied as death:
                raise ConformanceError(f"a worker could not start: {death}") from death
        return self

    def entries(self) -> list[Entry]:
        """Return the entries that the settings select."""
        try:
            return [(op, dtype) for op, dtype in self._exchange({"list": True}, "entries", STARTUP_SECONDS)]
        except WorkerDied as death:
            raise ConformanceError(f"a worker died while it listed the operators: {death}") from death

    def check(self, entry: Entry, timeout: float, errors: bool) -> EntryResult:
        """Check one entry.

        Raises:
            WorkerDied: the process crashed, or was killed because it did not finish within ``timeout`` seconds.
        """
        request = {"op": entry[0], "dtype": entry[1], "errors": errors}
        return EntryResult.from_json(self._exchange(request, "result", timeout))

    def _exchange(self, request: dict[str, Any], wanted: str, timeout: float) -> Any:
        """Send a request and read answers until the wanted one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stderr.seek(0, os.SEEK_END)
        begin = self._stderr.tell()
        timer = threading.Timer(timeout, self._kill_for_time)
        timer.daemon = True
        timer.start()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                answer = json.loads(line)
                if "fatal" in answer:
                    raise ConformanceError(answer["fatal"])
                if wanted in answer:
                    return answer[wanted]
                self._where = answer.get("at", self._where)
        except OSError:  # broken pipe: the process has ended
            pass
        finally:
            timer.cancel()
        code = self._process.wait()
        if self._timed_out:
            raise WorkerDied("hang", f"not finished after {timeout:g} s", self._where)
        raise WorkerDied("crash", f"{_exit_name(code)}{self._stderr_tail(begin)}", self._where)

    def _kill_for_time(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _stderr_tail(self, begin: int) -> str:
        """The last line on stderr before Python's own report of the signal."""
        self._stderr.seek(begin)
        text = self._stderr.read().decode(errors="replace").partition("Fatal Python error")[0]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # buffered bytes for a process that has ended
                    stream.close()


def _exit_name(code: int) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


class WorkerPool:
    """Checks entries in several workers in parallel and replaces those that die."""

    def __init__(self, settings: Settings, jobs: int) -> None:
        self.settings = settings
        self.jobs = jobs
        self._closing = False
        self._end = time.monotonic() + settings.minutes * 60 if settings.minutes else math.inf
        self._workers: list[WorkerProcess | None] = [WorkerProcess(settings) for _ in range(jobs)]
        self._first = self._workers[0]

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and device, as reported by the first worker."""
        assert self._first is not None
        return self._first.wait_ready().environment

    def entries(self) -> list[Entry]:
        """Return the entries that the settings select."""
        assert self._first is not None
        return self._first.wait_ready().entries()

    def check(self, entries: Sequence[Entry], on_result: Callable[[EntryResult], None]) -> list[EntryResult]:
        """Check all entries and return the results in order of completion. Each is also passed to ``on_result``.

        When the minutes of the settings are over, the remaining entries have no result.

        Raises:
            ConformanceError: a worker could not be started.
        """
        waiting: queue.SimpleQueue[tuple[Entry, bool]] = queue.SimpleQueue()
        seen: set[str] = set()
        for entry in entries:
            waiting.put((entry, entry[0] not in seen))  # error inputs once per operator: they do not depend on dtypes
            seen.add(entry[0])
        done: queue.SimpleQueue[EntryResult | Exception] = queue.SimpleQueue()
        for slot in range(min(self.jobs, len(entries))):
            threading.Thread(target=self._serve, args=(slot, waiting, done), daemon=True).start()
        results: list[EntryResult] = []
        while len(results) < len(entries):
            left = self._end - time.monotonic()
            try:
                result = done.get(timeout=None if math.isinf(left) else max(0.0, left))
            except queue.Empty:
                break
            if isinstance(result, Exception):
                raise result
            results.append(result)
            on_result(result)
        return results

    def _serve(self, slot: int, waiting: Any, done: Any) -> None:
        """Thread function: feed one worker until no entry waits."""
        try:
            while not self._closing:
                try:
                    entry, errors = waiting.get_nowait()
                except queue.Empty:
                    return
                worker = self._workers[slot] or WorkerProcess(self.settings)
                self._workers[slot] = worker
                worker.wait_ready()
                start = time.monotonic()
                try:
                    result = worker.check(entry, self.settings.timeout, errors)
                except WorkerDied as death:
                    self._workers[slot] = None
                    worker.close()
                    result = EntryResult(entry[0], entry[1], seconds=round(time.monotonic() - start, 4))
                    result.add(death.kind, death.where.partition(", ")[2], death.where.partition(",")[0], str(death))
                done.put(result)
        except Exception as error:
            done.put(error)

    def close(self) -> None:
        """Kill all workers."""
        self._closing = True
        for worker in self._workers:
            if worker is not None:
                worker.close()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def run(
    settings: Settings,
    jobs: int | None = None,
    on_start: Callable[[int], None] = lambda entries: None,
    on_result: Callable[[EntryResult], None] = lambda result: None,
) -> Report:
    """Run a complete conformance check.

    Args:
        settings: what to run.
        jobs: number of workers; default: one per core.
        on_start: called with the number of entries.
        on_result: called with the result of each entry when it is complete.

    Raises:
        ConformanceError: the device, a dtype or the database does not exist, or no operator matches.
    """
    begin = time.monotonic()
    with WorkerPool(settings, jobs or os.cpu_count() or 1) as pool:
        entries = pool.entries()
        on_start(len(entries))
        results = pool.check(entries, on_result)
        order = {entry: place for place, entry in enumerate(entries)}
        results.sort(key=lambda result: order[result.op, result.dtype])
        left_out = len(entries) - len(results)
        return Report(asdict(settings), pool.environment, time.monotonic() - begin, results, left_out)
