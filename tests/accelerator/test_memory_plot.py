"""HTML pages of memory snapshots: they match the allocator's counts, and a browser shows them without a network."""

from __future__ import annotations

import html
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_backplane import memory_plot
from torch_backplane.memory_plot import Allocation, page, read, timeline

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def snapshot() -> Any:
    """A memory snapshot with allocations from before and after recording began, and what the allocator counted."""
    torch.bp.empty_cache()
    before = [torch.ones(1 << size, device="bp") for size in (10, 20)]
    torch.bp.memory._record_memory_history(stacks="python", clear_history=True)
    try:
        kept = [torch.ones(1000 * (size + 1), device="bp") for size in range(20)]
        held = torch.bp.memory_stats()["requested_bytes.all.current"]
        del before[0], kept[::2]
        kept.append(torch.ones(1 << 22, device="bp"))
        found = torch.bp.memory._snapshot()
        found["held"], found["now"] = held, torch.bp.memory_stats()["requested_bytes.all.current"]
        found["reserved"] = torch.bp.memory_reserved()
        yield found
    finally:
        torch.bp.memory._record_memory_history(None)


def test_curves_match_the_allocator(snapshot: Any) -> None:
    found = timeline(snapshot, torch.bp.current_device())
    assert found.allocated[-1] == snapshot["now"]
    assert found.reserved[-1] == snapshot["reserved"]
    assert snapshot["held"] in found.allocated
    assert found.allocated[found.peak] == max(found.allocated)
    assert len(found.allocated) == len(found.reserved) == found.events + 1
    assert all(one >= 0 for one in found.allocated)
    assert sum(one.begin == 0 for one in found.allocations) >= 2  # allocated before recording began
    assert any("test_memory_plot.py" in one.stack for one in found.allocations)


def test_boxes_do_not_overlap(snapshot: Any) -> None:
    found = timeline(snapshot, torch.bp.current_device())
    height = sum(last - first for first, last in found.ranges)
    boxes = [
        (one.begin, found.events + 1 if one.end is None else one.end, found.place(one.address), one.bytes)
        for one in found.allocations
    ]
    for begin, end, place, size in boxes:
        assert begin < end
        assert 0 <= place <= place + size <= height
    for number, (begin, end, place, size) in enumerate(boxes):
        for other_begin, other_end, other, other_size in boxes[:number]:
            apart_in_time = end <= other_begin or other_end <= begin
            assert apart_in_time or place + size <= other or other + other_size <= place


def event(action: str, address: int, size: int, name: str = "f") -> dict[str, Any]:
    frames = [{"filename": "model.py", "line": 7, "name": name}, {"filename": "??", "line": 0, "name": "at::empty"}]
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}


SMALL: dict[str, Any] = {
    "segments": [
        {
            "device": 1, "address": 4096, "total_size": 1024, "stream": 0,
            "blocks": [
                {"size": 512, "requested_size": 500, "state": "active_allocated", "frames": []},
                {"size": 512, "requested_size": 0, "state": "inactive"},
            ],
        }
    ],
    "device_traces": [
        [],
        [
            event("segment_alloc", 8192, 256), event("alloc", 8192, 100, "</script><b>"),
            event("free_requested", 8192, 100), event("free_completed", 8192, 100),
            event("alloc", 8192, 50), event("free_completed", 4608, 300), event("free_completed", 8192, 50),
            event("segment_free", 8192, 256),
        ],
    ],
}  # fmt: skip


def test_a_handwritten_history() -> None:
    assert memory_plot.devices(SMALL) == [1]
    found = timeline(SMALL, 1)
    stacks = {one.stack for one in found.allocations}
    assert stacks == {"model.py:7: </script><b>", "model.py:7: f", memory_plot.UNKNOWN}
    assert found.allocated == [800, 800, 900, 900, 800, 850, 550, 500, 500]
    assert found.reserved == [1024] + [1280] * 7 + [1024]
    assert found.peak == 2
    assert found.ranges == [(4096, 5120), (8192, 8448)]
    assert found.place(8192) == 1024
    assert Allocation(8192, 100, 2, 4, "model.py:7: </script><b>") in found.allocations


def test_text_from_programs_is_escaped(tmp_path: Path) -> None:
    text = page(SMALL, "<b>")
    assert "<title>&lt;b&gt;</title>" in text
    assert text.count("</script>") == 1
    (data,) = re.findall(r"^const snapshot = (.*);$", text, re.MULTILINE)
    read_again = json.loads(data)
    assert "model.py:7: </script><b>" in read_again["stacks"]
    assert html.escape("</script><b>") in read_again["devices"][0]["table"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_backplane", "memory", "plot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Other:
    """An object that no snapshot contains."""


def test_files_that_are_not_snapshots(tmp_path: Path) -> None:
    empty, text, numbers, objects = (tmp_path / name for name in ("empty", "text", "numbers", "objects"))
    empty.write_bytes(b"")
    text.write_text("no pickle")
    numbers.write_bytes(pickle.dumps([1, 2]))
    objects.write_bytes(pickle.dumps({"segments": [], "device_traces": [Other()]}))
    nothing = tmp_path / "nothing"
    nothing.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    for path in (empty, text, numbers, objects):
        with pytest.raises(ValueError, match="is not a memory snapshot"):
            read(path)
    with pytest.raises(ValueError, match="has no segments and no events"):
        page(read(nothing))
    out = tmp_path / "out.html"
    for path in (objects, nothing, tmp_path / "nowhere"):
        done = run(str(path), "-o", str(out))
        assert done.returncode == 2
        assert done.stderr.startswith("Error: ")
        assert not out.exists()


def test_a_browser_shows_the_page_without_a_network(tmp_path: Path, snapshot: Any) -> None:
    file, out = tmp_path / "snapshot.pickle", tmp_path / "out.html"
    file.write_bytes(pickle.dumps({key: snapshot[key] for key in ("segments", "device_traces")}))
    done = run(str(file), "-o", str(out))
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    assert not re.search(r"(src|href|url|import|fetch)\s*[=(]", text)  # no external resources
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium is installed (Debian: chromium-headless-shell)")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    shown = subprocess.run(
        [*command, out.as_uri()], capture_output=True, text=True, check=True, timeout=120
    ).stdout  # after the script has run
    found = timeline(snapshot, torch.bp.current_device())
    said = re.search(r'<span id="said">(.*?)</span>', shown)
    assert said
    assert said[1].startswith(f"{found.events} events, {len(found.allocations)} allocations; at most ")
    assert f"after event {found.peak}" in said[1]
    assert "test_memory_plot.py" in re.findall(r'<tbody id="peak">(.*?)</tbody>', shown, re.DOTALL)[0]
