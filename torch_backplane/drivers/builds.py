"""The threads that build kernels while Python runs ahead: one for each processor, started when first needed.

The runtime submits builds here (csrc/drivers/driver_device.cpp), and does a build itself where somebody needs the
kernel before a thread has come to it. So nothing is lost where builds are dropped: at the end of the program, which
should not wait for kernels that nobody uses. What can wait until there is nothing to build, such as writing a cache, is
done later.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_changed = threading.Condition()
_builds = 0  # submitted and not done
_later: deque[Callable[[], None]] = deque()
_later_runs = False  # one of those is being done


def submit(build: Callable[[], None]) -> None:
    """Call `build` in a thread of the pool, soon; at the end of the program never."""
    global _builds
    with _changed:
        _builds += 1
    _give(functools.partial(_run_build, build))


def submit_later(task: Callable[[], None]) -> None:
    """Call `task` in a thread of the pool, one at a time and when there is nothing to build; or never, at the end."""
    with _changed:
        _later.append(task)
    _start_later()


def wait_for_all() -> None:
    """Wait until all that was submitted is done. Not to be called by a build or a task."""
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
    _give(functools.partial(_run_later, task))


def _run_later(task: Callable[[], None]) -> None:
    global _later_runs
    try:
        task()
    finally:
        with _changed:
            _later_runs = False
            _changed.notify_all()
        _start_later()


def _give(work: Callable[[], None]) -> None:
    try:
        _pool().submit(work)
    except RuntimeError:  # the interpreter is exiting
        return


@functools.cache
def _pool() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torch_backplane build")
    # Called when the main thread has ended, before the interpreter waits for the pool to do all it was given. Private,
    # and what concurrent.futures itself uses; without it the wait is longer, and nothing else.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(functools.partial(pool.shutdown, wait=False, cancel_futures=True))
    return pool
