"""Records a training step on bp:0 with torch.profiler and draws its trace: docs/images/profile.svg.

TORCH_BACKPLANE_DRIVERS=opencl python tools/profile_picture.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "profile", "font.size": 8}

from matplotlib import pyplot  # noqa: E402

PATH = Path(__file__).resolve().parents[1] / "docs" / "images" / "profile.svg"
ROWS = ("program", "operators", "runtime calls", "kernels on bp:0")
COLOURS = dict(zip(ROWS, ("#dddddd", "#8fb1d9", "#e0a458", "#6aa56a"), strict=True))
CHARACTER = 0.006  # width of a letter, as a part of the picture's width


def trace() -> list[dict[str, Any]]:
    """The complete events of the fastest of several training steps of a small network."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).to("bp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(256, 512, device="bp"), torch.randint(256, (256,), device="bp")

    def step() -> None:
        with record_function("forward"):
            loss = F.cross_entropy(model(x), y)
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        with record_function("synchronize"):
            torch.bp.synchronize()  # type: ignore[attr-defined]

    for _ in range(5):  # plans the operators and builds the kernels
        step()
    found = []
    for _ in range(20):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]) as recorded:
            step()
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            recorded.export_chrome_trace(file.name)
            events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
        found.append([one for one in events if one.get("ph") == "X" and one.get("cat") != "Trace"])
    return min(found, key=lambda events: end(events) - start(events))


def start(events: list[dict[str, Any]]) -> float:
    return float(min(one["ts"] for one in events if one["name"] == "forward"))


def end(events: list[dict[str, Any]]) -> float:
    return float(max(one["ts"] + one["dur"] for one in events if one["name"] == "synchronize"))


def row_of(event: dict[str, Any], calls: list[dict[str, Any]]) -> str | None:
    """The row of an event; None: not shown. Of operators, those are shown that launch one kernel."""
    category, name = event["cat"], event["name"]
    if category == "user_annotation":
        return "program" if "#" not in name else None
    if category == "cpu_op" and name.startswith("aten::"):
        inside = [one for one in calls if one["tid"] == event["tid"] and within(one, event)]
        return "operators" if len(inside) == 1 else None
    return {"privateuse1_runtime": "runtime calls", "kernel": "kernels on bp:0"}.get(category)


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return bool(outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"])


def draw(events: list[dict[str, Any]]) -> None:
    begin, width = start(events), end(events) - start(events)
    calls = [one for one in events if one["cat"] == "privateuse1_runtime"]
    figure, axes = pyplot.subplots(figsize=(10, 2.2), layout="constrained")
    for event in sorted(events, key=lambda one: -one["dur"]):  # inner operators on top of outer ones
        row = row_of(event, calls)
        if row is None or not event["dur"]:
            continue
        place, title = len(ROWS) - 1 - ROWS.index(row), event["name"].removeprefix("aten::").removeprefix("bp_")
        left = (event["ts"] - begin) / 1000
        axes.barh(place, event["dur"] / 1000, 0.8, left, color=COLOURS[row], edgecolor="white", linewidth=0.3)
        if event["dur"] / width > CHARACTER * len(title):
            axes.text(left + event["dur"] / 2000, place, title, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(len(ROWS)), reversed(ROWS))
    axes.set_xlim(0, width / 1000)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PATH, metadata={"Date": None})


if __name__ == "__main__":
    draw(trace())
