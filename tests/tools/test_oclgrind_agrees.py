"""Compares the kernel sanitizer's findings with those of Oclgrind, an OpenCL simulator, for sample kernels.

Run it with `make test-oclgrind`: Oclgrind must be the only OpenCL platform.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import test_kernel_sanitizer as ours
from test_kernel_sanitizer import GLOBAL_EXCHANGE, LOCAL_EXCHANGE, VALUES, kernel

# Runs a kernel in a separate process, because Oclgrind writes its log until the process ends. Reads from stdin: text,
# values, number of results, global size, group size.
RUN = """
import json, sys
import numpy as np, pyopencl as cl
text, values, results, items, group = json.load(sys.stdin)
(platform,) = cl.get_platforms()
assert platform.name == "Oclgrind", platform.name
context = cl.Context(platform.get_devices())
queue = cl.CommandQueue(context)
given = np.asarray(values, dtype=np.float32)
source = cl.Buffer(context, cl.mem_flags.READ_ONLY | cl.mem_flags.COPY_HOST_PTR, hostbuf=given)
out = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=np.zeros(results, np.float32))
known = cl.Kernel(cl.Program(context, text).build(), "bp_known")
known(queue, (items,), (group,), source, np.uint64(0), out, np.uint64(0), np.uint32(len(values)))
queue.finish()
"""

# Kind of finding → Oclgrind's message.
WORDS = {"out of bounds": r"Invalid (read|write)", "race": r"data race", "barrier": r"divergence"}

SAMPLE: dict[str, tuple[str, str, int]] = {  # name → (kind of the finding, "" for none; body; number of results)
    "copy": ("", "out[i] = in[i];", 32),
    "behind the end": ("out of bounds", "out[i] = in[i + 1];", 32),
    "before the beginning": ("out of bounds", "out[i - 1] = in[i];", 32),
    "vectors": ("", "if (i < 8) vstore4(vload4(i, in), i, out);", 32),
    "vectors, behind the end": ("out of bounds", "if (i < 8) vstore4(vload4(i, in), i, out);", 31),
    "two writes": ("race", "out[i / 2] = in[i];", 32),
    "two groups": ("race", "if (i < 8) out[i] = in[i]; else if (i >= 24) out[i - 16] = out[i - 24];", 32),
    "barrier of device memory": ("", GLOBAL_EXCHANGE.format(barrier="barrier(CLK_GLOBAL_MEM_FENCE);"), 32),
    "no barrier of device memory": ("race", GLOBAL_EXCHANGE.format(barrier=""), 32),
    "barrier of local memory": ("", LOCAL_EXCHANGE.format(barrier="barrier(CLK_LOCAL_MEM_FENCE);"), 32),
    "no barrier of local memory": ("race", LOCAL_EXCHANGE.format(barrier=""), 32),
    "a barrier for some": ("barrier", "out[i] = in[i]; if (at < 5) barrier(CLK_LOCAL_MEM_FENCE);", 32),
    "swaps": ("", "atomic_cmpxchg((volatile global uint*)out, (uint)i, (uint)i + 1u);", 1),
}


def oclgrind(text: str, results: int, log: Path) -> str:
    """Returns Oclgrind's log for the kernel."""
    environment = {**os.environ, "OCLGRIND_DATA_RACES": "1", "OCLGRIND_LOG": str(log)}
    subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps([text, VALUES, results, 32, 8]), env=environment, text=True,
        check=True, timeout=120,
    )  # fmt: skip
    return log.read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def _is_oclgrind() -> None:
    cl = pytest.importorskip("pyopencl")
    try:
        names = [platform.name for platform in cl.get_platforms()]
    except cl.Error:
        names = []
    if names != ["Oclgrind"]:
        pytest.skip(f"needs Oclgrind as the only OpenCL platform, found {names}: run make test-oclgrind")


@pytest.mark.parametrize("name", SAMPLE)
def test_oclgrind_and_the_sanitizer_agree(name: str, tmp_path: Path) -> None:
    expected, body, results = SAMPLE[name]
    text = kernel(body)
    found = {one.kind for one in ours.launched(text, VALUES, results, 32)[0]}
    message = oclgrind(text, results, tmp_path / "log")
    assert found == ({expected} if expected else set())
    assert {kind for kind, words in WORDS.items() if re.search(words, message)} == found, message[:2000]
