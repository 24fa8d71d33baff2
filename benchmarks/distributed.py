"""Measures torch.distributed: all_reduce of bp tensors versus CPU tensors over Gloo, and the overlap in DDP.

    python benchmarks/distributed.py --driver host --ranks 2

Each rank is a process with one thread. The two kinds of tensors take turns. A figure is the median over the rounds of
the slowest rank.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Annotated, Any

import machine
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CPU_GROUP: list[Any] = []  # filled by each rank
SIZES = [1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26]  # bytes


def slowest(seconds: float) -> float:
    """Return the largest value of all ranks."""
    value = torch.tensor(seconds)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def timed(function: Callable[[], object], device: torch.device) -> float:
    dist.barrier(CPU_GROUP[0])
    begin = time.perf_counter()
    function()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return slowest(time.perf_counter() - begin)


def all_reduce(x: torch.Tensor, calls: int) -> None:
    for _ in range(calls):
        dist.all_reduce(x)


def all_reduce_times(device: torch.device, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        tensors = {name: torch.ones(size // 4, device=name) for name in (str(device), "cpu")}
        calls = max(1, min(20, (1 << 22) // size))
        found: dict[str, list[float]] = {name: [] for name in tensors}
        for number in range(rounds + 1):
            for name, x in tensors.items():
                seconds = timed(lambda x=x, calls=calls: all_reduce(x, calls), x.device) / calls  # type: ignore[misc]
                if number > 0:  # the first round warms up
                    found[name].append(seconds)
                x.fill_(1)
        ours, other = (1e6 * statistics.median(found[name]) for name in (str(device), "cpu"))
        title = f"all_reduce of {size:,} bytes"
        rows.append({"title": title, "device_us": ours, "gloo_us": other, "ratio": ours / other})
    return rows


def ddp_times(device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of a step: alone, with DDP, and with gradients that are reduced after the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8))).to(device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=1)
    x = torch.randn(64, 512, device=device)

    def step(forward: Callable[[torch.Tensor], torch.Tensor], reduce: bool) -> None:
        model.zero_grad()
        forward(x).square().mean().backward()
        if reduce:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

    def without_sync() -> None:
        with parallel.no_sync():
            step(parallel, False)

    kinds = {
        "without_communication": without_sync,
        "overlapped": lambda: step(parallel, False),
        "not_overlapped": lambda: step(model, True),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 2):
        for name, kind in kinds.items():
            seconds = timed(kind, device)
            if number > 1:
                found[name].append(seconds)
    return {name: 1e3 * statistics.median(times) for name, times in found.items()}


def rank_main(rank: int, ranks: int, store: str, driver: str | None, sizes: list[int], rounds: int, path: str) -> None:
    device = machine.place("bp", driver, threads=1)
    dist.init_process_group("cpu:gloo,bp:backplane", init_method=f"file://{store}", rank=rank, world_size=ranks)
    CPU_GROUP.append(dist.new_group(backend="gloo"))
    found = {"results": all_reduce_times(device, sizes, rounds), "ddp_ms": ddp_times(device, rounds)}
    if rank == 0:
        report = {**found, "ranks": ranks, "rounds": rounds, **machine.environment(device, threads=1)}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(report, file)
    dist.destroy_process_group()


def main(
    driver: Annotated[str | None, typer.Option(help="Use only this driver.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds per size.")] = 9,
    largest: Annotated[int, typer.Option(help="Size of the largest tensor in bytes.")] = SIZES[-1],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measures collectives and data parallel training on several ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sizes = [size for size in SIZES if size <= largest]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "report.json")
        store = os.path.join(folder, "store")
        multiprocessing.spawn(rank_main, (ranks, store, driver, sizes, rounds, path), nprocs=ranks)
        with open(path, encoding="utf-8") as file:
            report = json.load(file)
    if as_json:
        print(json.dumps(report))
        return
    print(f"all_reduce on {ranks} ranks, {report['device']} versus CPU tensors over Gloo")
    for row in report["results"]:
        print(f"{row['title']:>32} {row['device_us']:>10.0f} µs {row['gloo_us']:>10.0f} µs {row['ratio']:>6.2f}")
    print("a training step with DistributedDataParallel")
    for name, milliseconds in report["ddp_ms"].items():
        print(f"{name.replace('_', ' '):>24} {milliseconds:>8.1f} ms")


if __name__ == "__main__":
    typer.run(main)
