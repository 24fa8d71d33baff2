"""Compares torch.compile on a device with eager PyTorch there, and with eager and compiled PyTorch on the CPU.

    python benchmarks/compile.py --driver opencl
    python benchmarks/compile.py --match softmax --json
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import interleaving
import report
import torch
import torch.nn.functional as F
import training
import typer
from torch import nn

Case = Callable[[torch.device], tuple[Callable[..., Any], list[torch.Tensor]]]  # a function and its arguments


@dataclasses.dataclass
class Result:
    """Median milliseconds of a compiled call, and the others' times divided by it (median over the rounds)."""

    title: str
    compiled_ms: float
    eager: float
    eager_cpu: float
    compiled_cpu: float
    first_call_s: float  # of the compiled function: compilation, and building kernels if they are not on disk
    first_call_cpu_s: float


def chain(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """20 elementwise operators, 4 M elements"""

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.sigmoid(x * 1.5) + 0.5
            x = x.abs()
        return x

    return function, [torch.randn(1 << 22, device=device)]


def softmax(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """softmax, 4,096 rows of 4,096"""
    return partial(torch.softmax, dim=-1), [torch.randn(4096, 4096, device=device)]


def swiglu(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """RMS norm and SwiGLU, 4,096 rows of 1,024"""

    def function(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return F.silu(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight) * gate

    x, gate = torch.randn(2, 4096, 1024, device=device)
    return function, [x, torch.ones(1024, device=device), gate]


def layer_norm(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """layer norm, GELU and a residual, 4,096 rows of 1,024"""
    x, residual = torch.randn(2, 4096, 1024, device=device)
    return (lambda x, residual: F.gelu(F.layer_norm(x, (1024,))) + residual), [x, residual]


def adamw(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """a step of AdamW, 40 parameters of 64 K elements"""
    parameters = [nn.Parameter(torch.randn(256, 256, device=device)) for _ in range(40)]
    for one in parameters:
        one.grad = torch.randn_like(one)
    return torch.optim.AdamW(parameters, lr=1e-4).step, []


def _training_step(build: training.Model, device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Forward and backward pass. The optimizer is another row."""
    model, x, target = build()
    model = model.to(device)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x).flatten(0, -2), target.flatten())

    return step, [x.to(device), target.to(device)]


def gpt(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """forward and backward pass of a GPT, 4 layers of 128"""
    return _training_step(training.gpt, device)


def cnn(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """forward and backward pass of two convolutions"""
    return _training_step(training.cnn, device)


def vit(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """inference of a ViT, 4 layers of 128"""
    model, x, _ = training.vit()
    model = model.to(device).eval().requires_grad_(False)
    return model, [x.to(device)]


class _LlamaLayer(nn.Module):
    """A decoder layer that attends to a cache of LENGTH positions. 4 heads of 64."""

    LENGTH = 256
    cache: torch.Tensor  # keys and values

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(256), nn.RMSNorm(256)
        self.qkv, self.out = nn.Linear(256, 768, bias=False), nn.Linear(256, 256, bias=False)
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(512, 256, bias=False)
        self.register_buffer("cache", torch.zeros(2, 1, 4, self.LENGTH, 64))

    def forward(self, x: torch.Tensor, position: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm(x)).view(1, 1, 3, 4, 64).permute(2, 0, 3, 1, 4)
        query, key = ((one * cos + torch.cat([-one[..., 32:], one[..., :32]], -1) * sin) for one in (query, key))
        self.cache[0].index_copy_(2, position, key)
        self.cache[1].index_copy_(2, position, value)
        mask = torch.arange(self.LENGTH, device=x.device) <= position
        attended = F.scaled_dot_product_attention(query, self.cache[0], self.cache[1], mask[None, None, None])
        x = x + self.out(attended.transpose(1, 2).reshape(1, 1, 256))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def llama(device: torch.device) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """decoding a token with a Llama, 4 layers of 256"""
    layers = nn.ModuleList(_LlamaLayer() for _ in range(4)).to(device).requires_grad_(False)
    head = nn.Linear(256, 1000, bias=False, device=device).requires_grad_(False)

    def step(x: torch.Tensor, position: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        angles = torch.cat([position * angle] * 2, -1)
        for layer in layers:
            x = layer(x, position, angles.cos(), angles.sin())
        return head(x).argmax(-1)

    position = torch.tensor([100], device=device)
    angle = 10000.0 ** (torch.arange(32, device=device) / -32)
    return step, [torch.randn(1, 1, 256, device=device), position, angle]


def make(case: Case, compiles: bool, device: torch.device) -> interleaving.Body:
    function, arguments = case(device)
    called = torch.compile(function) if compiles else function
    trains = case in (gpt, cnn)

    def body() -> None:
        found = called(*arguments)
        if trains:
            found.backward()

    return body


def _compare(case: Case, place: torch.device, rounds: int) -> Result:
    side = interleaving.Side(place)
    compiled = make(case, True, place)
    start = time.perf_counter()
    interleaving.seconds(compiled, place, 1)
    first = time.perf_counter() - start
    once = interleaving.seconds(compiled, place, 1)
    calls = max(1, int(0.1 / once))
    ratios, times, first_cpu = {}, [], 0.0
    for name, compiles, device in (
        ("eager", False, place),
        ("eager_cpu", False, interleaving.CPU),
        ("compiled_cpu", True, interleaving.CPU),
    ):
        apart = device == interleaving.CPU
        build = partial(make, case, compiles)
        other = interleaving.RemoteBody(build) if apart else build(device)
        start = time.perf_counter()
        interleaving.seconds(other, device, 1)
        first_cpu = time.perf_counter() - start
        pair = interleaving.interleaved_times(
            [compiled, other], [side, interleaving.Side(device, is_apart=apart)], calls, rounds
        )
        ratios[name] = interleaving.ratio(*pair)
        times += pair[0]
    milliseconds = statistics.median(times) * 1e3
    return Result(str(case.__doc__), milliseconds, **ratios, first_call_s=first, first_call_cpu_s=first_cpu)


CASES: tuple[Case, ...] = (chain, softmax, swiglu, layer_norm, adamw, gpt, cnn, vit, llama)


def main(
    driver: report.Driver = None,
    match: report.Match = "",
    rounds: report.Rounds = 5,
    threads: report.Threads = 0,
    as_json: report.AsJson = False,
) -> None:
    """Compares torch.compile on a device with eager PyTorch there, and with PyTorch on the CPU."""
    chosen = report.chosen(CASES, match, lambda case: str(case.__doc__))
    place, environment = report.begin(driver, threads)
    results = [_compare(case, place, rounds) for case in chosen]
    environment |= {"rounds": rounds}
    cells = [
        [
            one.title, f"{one.compiled_ms:.3f}", f"{one.eager:.2f}", f"{one.eager_cpu:.2f}", f"{one.compiled_cpu:.2f}",
            f"{one.first_call_s:.1f}", f"{one.first_call_cpu_s:.1f}",
        ]
        for one in results
    ]  # fmt: skip
    header = ("", "compiled ms", f"eager {place} ÷", "eager cpu ÷", "compiled cpu ÷", "first call s", "cpu's s")
    title = "time of compiled calls, and other times divided by it"
    report.print_report(environment, results, title, header, cells, as_json, {})


if __name__ == "__main__":
    typer.run(main)
