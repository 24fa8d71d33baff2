"""Runs code as in a fresh interpreter, without importing torch each time.

A server process imports torch once, which also imports torch_backplane, and forks for each request. It does not
discover devices, so a fork behaves like a new interpreter for everything that is decided at discovery.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch"])


def run(code: str, site: Path, timeout: float = 120, **env: str | None) -> subprocess.CompletedProcess[str]:
    """Runs `code` with `env` added to the environment (None removes a variable) and `site` on sys.path."""
    with tempfile.TemporaryDirectory() as folder:
        process = _context.Process(target=_child, args=(code, str(site), env, folder))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"still running after {timeout} s: {(Path(folder) / 'stderr').read_text()}")
        output = [(Path(folder) / name).read_text() for name in ("stdout", "stderr")]
        return subprocess.CompletedProcess([code], process.exitcode, *output)


def _child(code: str, site: str, env: dict[str, str | None], folder: str) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), descriptor)
    for name, value in env.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    sys.path.insert(0, site)
    status = 0
    try:
        exec(compile(code, "<test>", "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
