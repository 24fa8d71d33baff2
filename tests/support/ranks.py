"""Runs a program in several processes that form a process group."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

PREAMBLE = """
import faulthandler
import os
import sys
import torch
import torch.distributed as dist

faulthandler.dump_traceback_later(float(os.environ.get("HANGS_AFTER", 300)), exit=True)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if os.environ.get("DEVICE_PER_RANK") == "1":
    torch.bp.set_device(rank)


def start(backend=None, **options):
    ready = dist.FileStore(os.environ["STORE"] + ".ready", size)  # the timeout of a group is short in some tests
    ready.set(str(rank), "")
    ready.wait([str(one) for one in range(size)])
    dist.init_process_group(backend, init_method="file://" + os.environ["STORE"], rank=rank, world_size=size, **options)


def filled(value, *shape, dtype=torch.float32):
    return torch.full(shape, value, device="bp").to(dtype)

"""


@contextlib.contextmanager
def started(code: str, size: int, **env: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts `size` processes that run PREAMBLE and `code`. Kills those that are left at the end."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PREAMBLE + code, encoding="utf-8")
        given = {**os.environ, "WORLD_SIZE": str(size), "STORE": f"{folder}/store", "OMP_NUM_THREADS": "1", **env}
        processes = [
            subprocess.Popen(
                [sys.executable, str(program)], env={**given, "RANK": str(rank)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


def first_output(code: str, size: int, **env: str) -> str:
    """Runs `code` on `size` ranks and returns what rank 0 has printed, whatever the others do."""
    with started(code, size, **env) as processes:
        return processes[0].communicate(timeout=60)[0]


def run(code: str, size: int, timeout: float = 120, **env: str) -> Sequence[str]:
    """Runs `code` on `size` ranks and returns what each has printed.

    Fails if one fails, or has not ended after `timeout` seconds; a rank that hangs then prints its Python stacks.
    """
    with started(code, size, HANGS_AFTER=str(timeout), **env) as processes:
        outputs = [process.communicate()[0] for process in processes]
        failed = [
            f"--- rank {rank} exited with {process.returncode}\n{output}"
            for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
            if process.returncode != 0
        ]
    assert not failed, "\n".join(failed)
    return outputs
