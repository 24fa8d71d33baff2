"""Tests transfers through pinned staging memory, as on OpenCL devices with separate memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import driver_packages
import pytest

Run = Callable[..., str]


@pytest.fixture
def run(platform: None, tmp_path: Path) -> Run:
    preamble = "import torch\nfrom torch_backplane.drivers import discovery\n"
    return driver_packages.opencl_runner(tmp_path, "staging", preamble)


def test_transfers_of_sizes_around_the_piece_size(run: Run) -> None:
    run("""
for size in (0, 1, 65_535, 65_536, 99_999, 100_000, 100_001, 200_000, 1_234_567):
    data = torch.randint(256, (size,), dtype=torch.uint8)
    there = torch.zeros(size + 7, dtype=torch.uint8, device="bp")
    there[3 : size + 3] = data.to("bp")
    assert torch.equal(there[3 : size + 3].cpu(), data), size
    assert not there[:3].any() and not there[size + 3 :].any()
""")


def test_source_can_be_overwritten_after_a_non_blocking_copy(run: Run) -> None:
    run("""
data, there = torch.ones(1 << 20), torch.empty(1 << 20, device="bp")
for i in range(5):
    torch.bp._sleep(20_000_000)
    there.copy_(data, non_blocking=True)
    data.add_(1)
    assert (there.cpu() == i + 1).all()
""")


def test_transfers_run_in_stream_order(run: Run) -> None:
    run("""
side = torch.bp.Stream()
x = torch.arange(300_000.0, device="bp")
side.wait_stream(torch.bp.current_stream())
with torch.bp.stream(side):
    for i in range(4):
        x += 1
        host = x.cpu()
        assert torch.equal(host, torch.arange(300_000.0) + i + 1)
        x.copy_(host * 1, non_blocking=True)
torch.bp.current_stream().wait_stream(side)
assert torch.equal(x.cpu(), torch.arange(300_000.0) + 4)
""")


def test_threads_share_the_staging_memory(run: Run) -> None:
    run("""
import threading
wrong = []
def work(seed):
    data = torch.full((250_000,), float(seed))
    with torch.bp.stream(torch.bp.Stream()):
        for _ in range(10):
            if not torch.equal(data.to("bp").cpu(), data):
                wrong.append(seed)
threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong
""")


def test_cpu_devices_do_not_use_staging(run: Run) -> None:
    run("""
torch.bp.init()
device = discovery.device(0)
assert device.staging is not None
from torch_backplane.drivers.opencl.device import OpenCLDevice
plain = OpenCLDevice(device.device)
assert (plain.staging is None) == (plain.properties.kind == "cpu")
""")
