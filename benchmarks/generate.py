"""Measures how fast a small Llama generates text on a device and on the CPU, in tokens per second.

    pip install transformers
    python benchmarks/generate.py --driver opencl
    python benchmarks/generate.py --driver opencl --tokens 100 --long 0 --json

The model has random weights. The greedy search of `generate` is timed until all tokens are available. Each length of
the text is another shape. One pass builds or loads the kernels; then all plans are dropped. The first pass of a prompt
has new shapes, and repeated passes have seen ones; the first should reach at least 0.85 of their speed. A prompt of
another length follows, whose first pass uses known operators with new shapes. The last is a long text, which should not
slow down more than on the CPU. If the tokens on the CPU and on the device differ, the program ends with an error,
unless the scores of the first two differing tokens are equal up to rounding.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import machine
import torch
import typer
from rich.console import Console
from rich.table import Table

VOCABULARY = 1000
PROMPTS = (16, 37)  # tokens
PART = 500  # tokens per part of the long text, for which a speed is reported
AIM = 0.85  # speed of the first pass divided by that of repeated ones
TIE = 1e-4  # scores usually differ by some tenths; rounding changes them by 1e-6 to 1e-5

Tokens = torch.Tensor  # (1, length), on the CPU


@dataclasses.dataclass
class Pass:
    """One generation: the text, the time at which each token was started, and the time of the last one's end."""

    text: Tokens
    times: list[float]

    def speed(self, first: int = 0, last: int | None = None) -> float:
        """Tokens per second, from token `first` to token `last`."""
        last = len(self.times) - 1 if last is None else last
        return (last - first) / (self.times[last] - self.times[first])


@dataclasses.dataclass
class Prompt:
    """Tokens per second."""

    length: int
    device_first: float
    device_repeated: float
    cpu_first: float
    cpu_repeated: float

    @property
    def ratio(self) -> float:
        return self.device_first / self.device_repeated


Generator = Callable[[torch.device, Tokens, int], Pass]


def small_llama(layers: int, longest: int) -> Any:
    """A model on the CPU with random weights, which are the same each time."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        sys.exit("benchmarks/generate.py needs transformers: pip install transformers")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        initializer_range=0.1,  # with the default of 0.02, a few tokens repeat, and their scores get too close
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def generator(model: Any, device: torch.device) -> Generator:
    """A function that generates with `model`, which is on the CPU, or with a copy of it on `device`."""
    models = {device: copy.deepcopy(model).to(device), torch.device("cpu"): model}

    def generate(place: torch.device, prompt: Tokens, tokens: int) -> Pass:
        times: list[float] = []

        def clock(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            """Called before each token is chosen."""
            times.append(time.perf_counter())
            return scores

        start = time.perf_counter()
        text = models[place].generate(
            prompt.to(place),
            attention_mask=torch.ones_like(prompt).to(place),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=[clock],
        )
        text = text.cpu()
        return Pass(text, [start, *times[1:], time.perf_counter()])

    return generate


Gap = Callable[[Tokens, int, int], float]


def gaps(model: Any) -> Gap:
    """A function that computes, in float64, the difference of two tokens' scores after a text."""

    def gap(text: Tokens, one: int, other: int) -> float:
        with torch.no_grad():
            scores = copy.deepcopy(model).double()(text).logits[0, -1]
        return float((scores[one] - scores[other]).abs())

    return gap


def check_equal(here: Pass, cpu: Pass, gap: Gap) -> None:
    """Exits if the texts differ, unless the first difference is a tie, which rounding decides."""
    unequal = (here.text != cpu.text).flatten().nonzero()
    if len(unequal) == 0:
        return
    where = int(unequal[0])
    one, other = int(here.text[0, where]), int(cpu.text[0, where])
    apart = gap(cpu.text[:, :where], one, other)
    message = f"token {where} is {one} on the device and {other} on the CPU; their scores are {apart:.2g} apart"
    if apart > TIE:
        sys.exit(message)
    print(f"{message}: a tie, so that nothing after it was compared", file=sys.stderr)


def prompt_of(length: int) -> Tokens:
    """A random prompt, which is the same each time."""
    return torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def measure(generate: Generator, device: torch.device, length: int, tokens: int, repeats: int, gap: Gap) -> Prompt:
    """Runs a prompt of `length` tokens for the first time and repeatedly, on the device and on the CPU in turn."""
    prompt = prompt_of(length)
    passes: list[tuple[Pass, Pass]] = []
    for _ in range(1 + repeats):
        passes.append((generate(device, prompt, tokens), generate(torch.device("cpu"), prompt, tokens)))
        check_equal(*passes[-1], gap)
    first, *repeated = [(here.speed(), cpu.speed()) for here, cpu in passes]
    again = [statistics.median(column) for column in zip(*repeated, strict=True)]
    return Prompt(length, first[0], again[0], first[1], again[1])


def parts(here: Pass, cpu: Pass, tokens: int) -> list[dict[str, float]]:
    """Tokens per second of each part of a long text, and its ratio to the first part's."""
    found: list[dict[str, float]] = []
    for start in range(0, tokens, PART):
        end = min(start + PART, tokens)
        part = {"from": start, "to": end, "device": here.speed(start, end), "cpu": cpu.speed(start, end)}
        for place in ("device", "cpu"):
            part[f"{place}_to_first_part"] = part[place] / (found[0] if found else part)[place]
        found.append(part)
    return found


def coverage() -> dict[str, Any]:
    """Classes of calls that met a second shape, how many have a dynamic-shape plan, and why others have none."""
    from torch_backplane import plans

    classes = served = 0
    exact: dict[str, list[str]] = {}
    planners: dict[str, int] = {}
    for name, one in plans.stats().items():
        classes += one.get("classes", 0)
        served += one.get("dynamic_shape_classes", 0)
        if one.get("reasons_for_exact"):
            exact[name] = one["reasons_for_exact"]
        if one["planner_calls"] + one["unplannable_calls"] > 3:
            planners[name] = one["planner_calls"] + one["unplannable_calls"]
    return {
        "classes that met a second shape": classes,
        "with a dynamic-shape plan": served,
        "exact": exact,
        "planner calls, where more than 3": dict(sorted(planners.items(), key=lambda item: -item[1])),
        "total": plans.total(),
    }


def main(
    device: Annotated[str, typer.Option(help="the device to compare with cpu")] = "bp",
    driver: Annotated[str | None, typer.Option(help="use only these Backplane drivers, comma-separated")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="tokens to generate from each prompt")] = 200,
    long: Annotated[int, typer.Option(min=0, help="tokens of the long text; 0: none")] = 3000,
    repeats: Annotated[int, typer.Option(min=1, help="passes after the first one")] = 3,
    layers: Annotated[int, typer.Option(min=1, help="layers of the model")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="PyTorch's CPU threads")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measures tokens per second of a small Llama on a device and on the CPU."""
    place = machine.place(device, driver, threads)
    longest = max(PROMPTS) + max(tokens, long)
    model = small_llama(layers, longest)
    generate, gap = generator(model, place), gaps(model)
    with_kernels = generate(place, prompt_of(PROMPTS[0]), tokens)
    if place.type == "bp":
        from torch_backplane import plans

        plans.clear()
    prompts = [measure(generate, place, length, tokens, repeats, gap) for length in PROMPTS]
    text: list[dict[str, float]] = []
    if long:
        here, cpu = (generate(each, prompt_of(PROMPTS[0]), long) for each in (place, torch.device("cpu")))
        check_equal(here, cpu, gap)
        text = parts(here, cpu, long)
    environment = machine.environment(place, threads) | {
        "layers": layers,
        "tokens": tokens,
        "repeats": repeats,
        "tokens/s of the pass that builds or loads kernels": round(with_kernels.speed(), 1),
    }
    served = coverage() if place.type == "bp" else None
    if as_json:
        rows = [dataclasses.asdict(prompt) | {"ratio": prompt.ratio} for prompt in prompts]
        print(json.dumps(environment | {"prompts": rows, "long": text, "plans": served}, indent=2))
        return
    console = Console()
    caption = ", ".join(f"{key} {value}" for key, value in environment.items())
    table = Table(title="tokens per second", caption=caption)
    for heading in ("prompt", "first", "repeated", f"ratio (aim {AIM})", "cpu first", "cpu repeated", "repeated/cpu"):
        table.add_column(heading, justify="right")
    for one in prompts:
        speeds = [one.device_first, one.device_repeated, one.cpu_first, one.cpu_repeated]
        first, repeated, cpu_first, cpu_repeated = (f"{speed:.0f}" for speed in speeds)
        versus_cpu = f"{one.device_repeated / one.cpu_repeated:.2f}"
        table.add_row(str(one.length), first, repeated, f"{one.ratio:.2f}", cpu_first, cpu_repeated, versus_cpu)
    console.print(table)
    if text:
        table = Table(title=f"one text of {long:,} tokens, tokens per second")
        for heading in ("tokens", "device", "to its first", "cpu", "to its first", "device/cpu"):
            table.add_column(heading, justify="right")
        for part in text:
            table.add_row(
                f"{part['from']}–{part['to']}",
                f"{part['device']:.0f}",
                f"{part['device_to_first_part']:.2f}",
                f"{part['cpu']:.0f}",
                f"{part['cpu_to_first_part']:.2f}",
                f"{part['device'] / part['cpu']:.2f}",
            )
        console.print(table)
    for name, value in (served or {}).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    typer.run(main)
