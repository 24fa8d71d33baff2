"""The thread pool that builds kernels in the background: one thread per processor, started on first use.

The runtime submits builds here (csrc/drivers/driver_device.cpp). If a kernel is needed before a pool thread has started
its build, the thread that needs it does the build. So pending builds can be dropped at the end of the program, which
must not wait for unused kernels. Tasks with low priority, such as writing to the kernel cache, run when no build is
pending.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_changed = threading.Condition()
_builds = 0  # pending builds
_later: deque[Callable[[], None]] = deque()
_later_runs = False  # a task of _later is running


def submit(build: Callable[[], None]) -> None:
    """Run `build` in a thread of the pool. Pending builds are dropped when the program ends."""
    global _builds
    with _changed:
        _builds += 1
    _enqueue(functools.partial(_run_build, build))


def submit_later(task: Callable[[], None]) -> None:
    """Run `task` in a thread of the pool when no build is pending, one task at a time.

    Pending tasks are dropped when the program ends.
    """
    with _changed:
        _later.append(task)
    _start_later()


def wait_for_all() -> None:
    """Wait until all submitted builds and tasks are done. Must not be called by a build or a task."""
    with _changed:
        _changed.wait_for(lambda: not (_builds or _later or _later_runs))


def _run_build(build: Callable[[], None]) -> None:
    global _builds
    try:
        build()
    finally:
        with _changed:
            _builds -= 1
            _changed.notify_all()
        _start_later()


def _start_later() -> None:
    global _later_runs
    with _changed:
        if _builds or _later_runs or not _later:
            return
        _later_runs = True
        task = _later.popleft()
    _enqueue(functools.partial(_run_later, task))


def _run_later(task: Callable[[], None]) -> None:
    global _later_runs
    try:
        task()
    finally:
        with _changed:
            _later_runs = False
            _changed.notify_all()
        _start_later()


def _enqueue(work: Callable[[], None]) -> None:
    try:
        _pool().submit(work)
    except RuntimeError:  # the interpreter is exiting
        return


@functools.cache
def _pool() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torch_backplane build")
    # Drops pending builds when the main thread has ended, before the interpreter waits for the pool. The function is
    # private, and concurrent.futures itself uses it. Without it, the interpreter waits for all pending builds.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(functools.partial(pool.shutdown, wait=False, cancel_futures=True))
    return pool
