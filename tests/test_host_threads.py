"""The threads, and the memory, with which the host computes its part of a device's work. Each test is a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from test_opencl import Run, platform, run  # noqa: F401  # fixtures, and their type


def test_the_hosts_part_of_streams_has_one_team_of_threads(run: Run) -> None:  # noqa: F811
    """Each thread of the device's would have one else, and they would hinder each other; small parts need none."""
    code = """
import os, torch
from torch_backplane.drivers import builds
torch.set_num_threads(4)

def threads():
    torch.bp.synchronize()
    return len(os.listdir("/proc/self/task"))

def product(size):
    x = operands[size]
    streams = [torch.bp.Stream() for _ in range(4)]
    for _ in range(10):
        for stream in streams:
            with stream:
                x @ x
    torch.bp.synchronize()

def copy():  # by all threads: it is large
    streams = [torch.bp.Stream() for _ in range(4)]
    for _ in range(10):
        for to, stream in zip(copies, streams):
            with stream:
                to.copy_(large)
    torch.bp.synchronize()

operands = {size: torch.ones(size, size, device="bp") for size in (96, 500, 501, 502, 503)}
large, *copies = torch.ones(5, 1 << 20, device="bp")
torch.bp.synchronize()
builds.wait_for_all()  # no threads of theirs are new from here on
torch.backends.bp.preferred_blas_library("host")
counts = [threads()]
product(96)  # 27,648 elements
counts.append(threads())
product(500)
counts.append(threads())
product(501)
counts.append(threads())
copy()
counts.append(threads())
torch.ones(2000, 2000).add_(1)  # the program's own team, which goes when there is work for the other
counts.append(threads())
product(502)
counts.append(threads())
torch.set_num_threads(1)
product(503)
print(*[later - before for before, later in zip(counts, counts[1:])])
x = torch.randint(9, (503, 503)).float()  # sums are exact, whatever library multiplies
torch.testing.assert_close((x.to("bp") @ x.to("bp")).cpu(), x @ x, rtol=0, atol=0)
"""
    assert run(code, drivers="opencl").stdout.splitlines() == ["0 4 0 0 3 -3"]  # the thread with the team, and the team


@pytest.mark.parametrize("count", [1, 2])
def test_the_team_is_where_the_program_may_be(run: Run, count: int) -> None:  # noqa: F811
    """Threads that wake up on one processor move apart, and may go on from there."""
    allowed = sorted(os.sched_getaffinity(0))[:count]
    if len(allowed) < count:
        pytest.skip(f"there are no {count} processors")
    code = f"""
import os, subprocess, sys, time, torch
allowed = {set(allowed)}
os.sched_setaffinity(0, allowed)
torch.set_num_threads(2)
torch.backends.bp.preferred_blas_library("host")
x = torch.randint(9, (500, 500)).float()  # sums are exact, whatever library multiplies
there, expected = x.to("bp"), x @ x
before = set(os.listdir("/proc/self/task"))
busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])  # so that it is the first one that threads wake on
os.sched_setaffinity(busy.pid, {{max(allowed)}})
try:
    for _ in range(100):
        time.sleep(0.003)
        assert torch.equal((there @ there).cpu(), expected)
finally:
    busy.kill()
team = [int(one) for one in set(os.listdir("/proc/self/task")) - before]
print(len(team) >= 2, {{*map(frozenset, map(os.sched_getaffinity, team))}} == {{frozenset(allowed)}})
"""
    assert run(code, drivers="opencl").stdout == "True True\n"


@pytest.mark.parametrize("threads", ["1", "2"])
@pytest.mark.parametrize("environment", [{}, {"MALLOC_MMAP_THRESHOLD_": "131072"}], ids=["", "as the environment says"])
def test_what_the_host_frees_is_kept_for_its_next_work(
    platform: None, threads: str, environment: dict[str, str]  # noqa: F811
) -> None:
    """Fresh memory comes page by page, each with a fault. What the environment has told glibc, at its start, holds."""
    code = """
import resource, torch
x, w = torch.rand(16, 64, 32, 32, device="bp"), torch.rand(128, 64, 1, 1, device="bp")
grad = torch.rand_like(torch.nn.functional.conv2d(x, w, None, 2))

def faults(calls):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(calls):
        torch.ops.aten.convolution_backward(
            grad, x, w, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    torch.bp.synchronize()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls

faults(50)  # each thread of the device's has memory of its own
print(faults(20) < 500)
"""
    given = {"TORCH_BACKPLANE_DRIVERS": "opencl", "OMP_NUM_THREADS": threads} | environment
    result = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | given, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == f"{not environment}\n", result.stderr
