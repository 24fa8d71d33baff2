"""Soak test: many activities concurrently for a long time. Results must be right, and memory must not grow.

Four threads on four devices train, generate, capture, fail, profile, fork and are interrupted.

    python tests/soak.py --seconds 3600 --driver opencl

`make soak SECONDS=…` runs it. The results of each activity are compared with those of the CPU, computed once. Each
activity must free all memory of its device. After the warm-up, the process can grow by at most --growth MiB.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

THREADS = 4
WARM_UP = 0.25  # fraction of the time; caches fill


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16 * 9, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(functional.relu(self.first(x)), 2)
        x = functional.max_pool2d(functional.relu(self.norm(self.second(x))), 2)
        return self.head(x.flatten(1))


class Writer(nn.Module):
    """Scores of the next token after a prompt of any length."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.embed, self.layers = nn.Embedding(40, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embed(tokens), mask, is_causal=True))


torch.manual_seed(0)
CLASSIFIER, WRITER = Classifier(), Writer().eval()
IMAGES, LABELS = torch.rand(16, 1, 12, 12), torch.randint(0, 10, (16,))
PROMPTS = torch.randint(0, 40, (3, 9))


def train(device: torch.device) -> list[float]:
    """Returns the losses of some training steps."""
    model = copy.deepcopy(CLASSIFIER).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = IMAGES.to(device), LABELS.to(device)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def generate(device: torch.device) -> list[float]:
    """Returns the best scores while sequences grow, with a new shape at each step."""
    model, tokens = copy.deepcopy(WRITER).to(device), PROMPTS.to(device)
    scores = []
    for _ in range(6):
        best = model(tokens)[:, -1].max(-1)
        tokens = torch.cat([tokens, best.indices[:, None]], 1)
        scores.extend(best.values.tolist())
    return scores


def chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = torch.tanh(x @ x.t() / 8) + x
    return x


def capture(device: torch.device) -> list[float]:
    """Returns a graph's results for two inputs; on the CPU, results of the same calls without a graph."""
    x = torch.linspace(-1, 1, 64).view(8, 8).to(device)
    if device.type == "cpu":
        return [number for scale in (1, 2) for number in chain(x * scale).flatten().tolist()]
    place, graph = x.clone(), torch.bp.Graph()
    side = torch.bp.Stream(device)
    side.wait_stream(torch.bp.current_stream(device))
    with torch.bp.stream(side):
        chain(place)
    torch.bp.current_stream(device).wait_stream(side)
    with torch.bp.graph(graph):
        out = chain(place)
    found: list[float] = []
    for scale in (1, 2):
        place.copy_(x * scale)
        graph.replay()
        found.extend(out.flatten().tolist())
    return found


def fail(device: torch.device) -> list[float]:
    """Makes calls that raise, each followed by a valid call."""
    found = []
    x = torch.arange(6.0).to(device)
    wrong: list[Callable[[], object]] = [
        lambda: x @ torch.ones(7).to(device),
        lambda: torch.empty(1 << 60, dtype=torch.uint8, device=device),
        lambda: x.view(7),
        lambda: x.to(torch.int64) // torch.zeros(6, dtype=torch.int64).to(device) + x[torch.tensor([9]).to(device)],
    ]
    for call in wrong:
        try:
            call()
            if device.type == "bp":
                torch.bp.synchronize(device)
        except (RuntimeError, IndexError):
            found.append((x * 2).sum().item())
    return found


def profiled(device: torch.device) -> list[float]:
    """Computes under the profiler, unless another thread uses it."""
    if not _profiling.acquire(blocking=False):
        return chain(torch.eye(8).to(device))[0].tolist()
    try:
        with torch.profiler.profile(activities=torch.profiler.supported_activities()):
            return chain(torch.eye(8).to(device))[0].tolist()
    finally:
        _profiling.release()


def fork(device: torch.device) -> list[float]:
    """Forks a child that computes on the CPU and is refused a device."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.ones(3, device="bp")
        except RuntimeError:
            code = 0 if torch.ones(3).sum().item() == 3 else 1
        finally:
            os._exit(code)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return [float(status), *(torch.ones(4).to(device) * 3).tolist()]
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise TimeoutError("a forked child did not exit within a minute")


def interrupt(device: torch.device) -> list[float]:
    """Interrupts work in the main thread with Ctrl-C, and then repeats it."""
    x = torch.eye(32).to(device)
    if threading.current_thread() is threading.main_thread() and device.type == "bp":
        timer = threading.Timer(random.random() * 0.05, signal.raise_signal, (signal.SIGINT,))
        until = time.monotonic() + 1  # Python ignores an interrupt inside a __del__
        try:
            timer.start()
            while time.monotonic() < until:
                chain(x)
            timer.join()
        except KeyboardInterrupt:
            pass
        timer.join()
    return chain(x)[0].tolist()


_profiling = threading.Lock()
ACTIVITIES: dict[str, Callable[[torch.device], list[float]]] = {
    "train": train, "generate": generate, "capture": capture, "fail": fail, "profile": profiled, "fork": fork,
    "interrupt": interrupt,
}  # fmt: skip


def resident() -> float:
    """Resident memory of the process in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def held(device: torch.device) -> int:
    """Bytes allocated on the device."""
    gc.collect()
    torch.bp.synchronize(device)
    return torch.bp.memory_allocated(device)


@dataclasses.dataclass
class Report:
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)

    def say(self, words: str) -> None:
        self.wrong.append(words)
        print(words, file=sys.stderr, flush=True)


def work(
    index: int, names: list[str], expected: dict[str, list[float]], until: float, seed: int, report: Report
) -> None:
    device, chance = torch.device("bp", index), random.Random(seed * THREADS + index)
    torch.bp.set_device(index)
    usual = held(device)
    while time.monotonic() < until and len(report.wrong) < 10:
        name = chance.choice(names)
        try:
            found = ACTIVITIES[name](device)
            torch.testing.assert_close(
                torch.tensor(found), torch.tensor(expected[name]), rtol=2e-3, atol=2e-4, msg=lambda words: words
            )
        except Exception:  # any error is reported
            report.say(f"{name} on {device}: {traceback.format_exc()}")
        report.counts[name] += 1
        if (left := held(device)) > usual:
            report.say(f"{left - usual} bytes are still allocated on {device}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Four threads on four devices, for a long time.")
    parser.add_argument("--seconds", type=float, default=3600, help="duration (default: an hour)")
    parser.add_argument("--driver", choices=["host", "opencl", "cuda"], default="opencl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=64, help="allowed growth after the warm-up, in MiB")
    parser.add_argument("--only", default="", help=f"comma-separated (default: all): {', '.join(ACTIVITIES)}")
    options = parser.parse_args()
    if unknown := set(filter(None, options.only.split(","))) - set(ACTIVITIES):
        parser.error(f"unknown activity {', '.join(unknown)}; activities: {', '.join(ACTIVITIES)}")
    os.environ["TORCH_BACKPLANE_DRIVERS"] = options.driver
    os.environ["TORCH_BACKPLANE_HOST_DEVICES"] = str(THREADS)
    os.environ.setdefault("POCL_DEVICES", " ".join(["pthread"] * THREADS))
    torch.set_num_threads(1)
    faulthandler.enable()
    names = [name for name in ACTIVITIES if not options.only or name in options.only.split(",")]
    expected = {name: ACTIVITIES[name](torch.device("cpu")) for name in names}
    if torch.bp.device_count() < THREADS:
        print(f"needs {THREADS} devices, but there are {torch.bp.device_count()}", file=sys.stderr)
        return 2
    for index in range(THREADS):  # some memory is never freed, such as a device's memory for errors
        for name in names:
            ACTIVITIES[name](torch.device("bp", index))
    report = Report()
    start = time.monotonic()
    sizes = []
    for share, part in ((WARM_UP, "warm-up"), (1 - WARM_UP, "the rest")):
        until = time.monotonic() + share * options.seconds
        threads = [
            threading.Thread(target=work, args=(index, names, expected, until, options.seed, report))
            for index in range(1, THREADS)
        ]
        for thread in threads:
            thread.start()
        work(0, names, expected, until, options.seed, report)
        for thread in threads:
            thread.join()
        gc.collect()
        torch.bp.empty_cache()
        sizes.append(resident())
        print(
            f"{part}: {time.monotonic() - start:.0f} s, {sum(report.counts.values())} activities, {sizes[-1]:.0f} MiB",
            flush=True,
        )
    grown = sizes[1] - sizes[0]
    if grown > options.growth:
        report.say(f"the process grew by {grown:.0f} MiB after the warm-up; {options.growth:.0f} MiB are allowed")
    print(", ".join(f"{name} {count}" for name, count in sorted(report.counts.items())))
    print(f"{len(report.wrong)} failures; the process grew by {grown:.1f} MiB after the warm-up")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
