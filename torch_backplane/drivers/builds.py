"""The threads that build kernels while Python runs ahead: one for each processor, started when first needed.

The socket submits builds here (csrc/python_kernel.cpp) and builds a kernel itself where somebody needs it before a thread
has come to it. So nothing is lost where builds are dropped: at the end of the program, which should not wait for kernels
that nobody uses.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def submit(build: Callable[[], None]) -> None:
    """Call `build` in a thread of the pool, soon; at the end of the program never."""
    try:
        _pool().submit(build)
    except RuntimeError:  # the interpreter is exiting
        return


@functools.cache
def _pool() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="torch_backplane build")
    # Called when the main thread has ended, before the interpreter waits for the pool to do all it was given. Private, and
    # what concurrent.futures itself uses; without it the wait is longer, and nothing else.
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(functools.partial(pool.shutdown, wait=False, cancel_futures=True))
    return pool
