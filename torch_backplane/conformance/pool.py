"""A pool of worker processes that may die: a crash or a hang costs one entry and one worker, never the run."""

from __future__ import annotations

import contextlib
import json
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
    """The run itself is impossible: no such device, operator, dtype or database."""


class WorkerDied(Exception):
    """The worker process is gone; says how and where."""

    def __init__(self, kind: str, message: str, where: str) -> None:
        super().__init__(message)
        self.kind = kind  # "crash" or "hang"
        self.where = where  # the call that it was at


class WorkerProcess:
    """One worker: a fresh interpreter that shares nothing with this one. Used by one thread at a time."""

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
        """Waits until it has imported what it needs; afterwards ``environment`` holds what it says about itself.

        Raises:
            ConformanceError: when it cannot work: no such device, no such list of operators.
        """
        if not self.environment:
            try:
                self.environment = self._exchange(asdict(self._settings), "ready", STARTUP_SECONDS)
            except WorkerDied as death:
                raise ConformanceError(f"a worker could not start: {death}") from death
        return self

    def entries(self) -> list[Entry]:
        """What there is to check, by the settings."""
        try:
            return [(op, dtype) for op, dtype in self._exchange({"list": True}, "entries", STARTUP_SECONDS)]
        except WorkerDied as death:
            raise ConformanceError(f"a worker died listing the operators: {death}") from death

    def check(self, entry: Entry, timeout: float, errors: bool) -> EntryResult:
        """Checks one entry.

        Raises:
            WorkerDied: when the process crashed, or did not finish within ``timeout`` seconds and was killed.
        """
        request = {"op": entry[0], "dtype": entry[1], "errors": errors}
        return EntryResult.from_json(self._exchange(request, "result", timeout))

    def _exchange(self, request: dict[str, Any], wanted: str, timeout: float) -> Any:
        """Sends a request and reads answers until the wanted one."""
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
        except OSError:  # the pipe broke: the process is gone
            pass
        finally:
            timer.cancel()
        code = self._process.wait()
        if self._timed_out:
            raise WorkerDied("hang", f"not done after {timeout:g} s", self._where)
        raise WorkerDied("crash", f"{_exit_name(code)}{self._last_words(begin)}", self._where)

    def _kill_for_time(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _last_words(self, begin: int) -> str:
        """What the process said on stderr before Python's own report of the signal, last line."""
        self._stderr.seek(begin)
        text = self._stderr.read().decode(errors="replace").partition("Fatal Python error")[0]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f": {lines[-1][:300]}" if lines else ""

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with contextlib.suppress(OSError):  # unsent bytes for a process that is gone
                    stream.close()


def _exit_name(code: int) -> str:
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit code {code}"


class WorkerPool:
    """Checks entries in several workers at once and replaces those that die."""

    def __init__(self, settings: Settings, jobs: int) -> None:
        self.settings = settings
        self.jobs = jobs
        self._closing = False
        self._workers: list[WorkerProcess | None] = [WorkerProcess(settings) for _ in range(jobs)]
        self._first = self._workers[0]

    @property
    def environment(self) -> dict[str, Any]:
        """Versions and device, as the first worker saw them."""
        assert self._first is not None
        return self._first.wait_ready().environment

    def entries(self) -> list[Entry]:
        """What there is to check, by the settings."""
        assert self._first is not None
        return self._first.wait_ready().entries()

    def check(self, entries: Sequence[Entry], on_result: Callable[[EntryResult], None]) -> list[EntryResult]:
        """Checks all entries; results come in the order of completion, and ``on_result`` is told of each.

        Raises:
            ConformanceError: when a worker cannot be started any more.
        """
        waiting: queue.SimpleQueue[tuple[Entry, bool]] = queue.SimpleQueue()
        seen: set[str] = set()
        for entry in entries:
            waiting.put((entry, entry[0] not in seen))  # error inputs do not depend on the dtype: once per operator
            seen.add(entry[0])
        done: queue.SimpleQueue[EntryResult | Exception] = queue.SimpleQueue()
        for slot in range(min(self.jobs, len(entries))):
            threading.Thread(target=self._serve, args=(slot, waiting, done), daemon=True).start()
        results: list[EntryResult] = []
        while len(results) < len(entries):
            result = done.get()
            if isinstance(result, Exception):
                raise result
            results.append(result)
            on_result(result)
        return results

    def _serve(self, slot: int, waiting: Any, done: Any) -> None:
        """One thread: feeds one worker until nothing waits."""
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
        """Ends all workers."""
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
    """Runs the whole check.

    Args:
        settings: what to run.
        jobs: number of workers; default: one per core.
        on_start: told the number of entries when it is known.
        on_result: told of every entry when it is done.

    Raises:
        ConformanceError: when the run is impossible (no such device, dtype, database; nothing matches).
    """
    begin = time.monotonic()
    with WorkerPool(settings, jobs or os.cpu_count() or 1) as pool:
        entries = pool.entries()
        on_start(len(entries))
        results = pool.check(entries, on_result)
        order = {entry: place for place, entry in enumerate(entries)}
        results.sort(key=lambda result: order[result.op, result.dtype])
        return Report(asdict(settings), pool.environment, time.monotonic() - begin, results)
