"""Tests the disk cache of compiled kernels: eviction, size limit and concurrent use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_backplane.drivers import SettingError, kernel_cache

SIZE = 10_000  # bytes of a payload; an entry is slightly larger


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_cache, "_written", -1)
    return tmp_path / "kernels"


def name(number: int) -> str:
    return kernel_cache.key([str(number)])


def store(number: int, used_ago: float = 0) -> None:
    kernel_cache.store(name(number), bytes([number % 256]) * SIZE)
    if used_ago:
        path = kernel_cache._path(name(number))
        assert path is not None
        os.utime(path, (time.time() - used_ago,) * 2)


def kept(numbers: range) -> list[int]:
    return [number for number in numbers if kernel_cache.load(name(number)) is not None]


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_least_recently_used_entries_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        store(number, used_ago=1000 - number)
    kernel_cache.load(name(0))  # the oldest entry becomes the most recently used
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_SIZE", "80KB")
    monkeypatch.setattr(kernel_cache, "_written", -1)  # the state of a new process
    store(10)
    assert kept(range(11)) == [0, 5, 6, 7, 8, 9, 10]
    assert total(folder) <= 80 * 1024 * 7 // 8


def test_nothing_is_removed_below_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_SIZE", "200KB")
    for number in range(20):
        store(number)
    assert kept(range(20)) == list(range(20))


def test_size_is_checked_after_writing_a_sixteenth_of_the_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_SIZE", "1MiB")
    for number in range(300):
        store(number, used_ago=1000 - number)
        assert total(folder) <= 1024 * 1024 * 17 // 16
    assert 80 < len(kept(range(300))) < 110
    assert kept(range(290, 300)) == list(range(290, 300))


def test_entry_larger_than_the_limit_is_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_SIZE", "8KB")
    store(1)
    assert kept(range(2)) == []
    assert not folder.exists()


def test_temporary_files_of_killed_processes_are_removed(folder: Path) -> None:
    old, fresh = folder / "ab" / ".abandoned", folder / "ab" / ".being-written"
    old.parent.mkdir(parents=True)
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * kernel_cache.ABANDONED_AFTER,) * 2)
    store(1)
    assert fresh.exists()
    assert not old.exists()


def test_processes_use_the_cache_concurrently(folder: Path) -> None:
    code = f"""
import sys
from torch_backplane.drivers import kernel_cache
start = int(sys.argv[1])
for number in range(start, start + 300):
    for other in (number, number - 7, 1000 - number):
        found = kernel_cache.load(kernel_cache.key([str(other)]))
        assert found is None or found == bytes([other % 256]) * {SIZE}
    kernel_cache.store(kernel_cache.key([str(number)]), bytes([number % 256]) * {SIZE})
"""
    env = {**os.environ, "TORCH_BACKPLANE_CACHE_SIZE": "300KB"}
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(start)], env=env, stderr=subprocess.PIPE, text=True)
        for start in (0, 100, 200)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert not errors
    assert total(folder) <= 300 * 1024 * (16 + len(processes)) // 16
    assert not [path for path in folder.rglob(".*") if path.is_file()]


def test_malformed_cache_size_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_backplane.drivers.opencl import OpenCLDriver

    monkeypatch.setenv("TORCH_BACKPLANE_CACHE_SIZE", "much")
    with pytest.raises(SettingError, match="TORCH_BACKPLANE_CACHE_SIZE='much' is not a size"):
        OpenCLDriver().devices()
