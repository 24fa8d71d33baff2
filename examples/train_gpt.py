"""Train a small character-level GPT on the sources of the Python standard library.

    python examples/train_gpt.py                    # on Backplane's device
    python examples/train_gpt.py --device cpu       # the same program on the CPU
    python examples/train_gpt.py --steps 200 --width 64

This is an ordinary PyTorch program: `import torch` loads Backplane, the model and the training do not import it. At the
end, it prints a report and writes report.json, loss.png, sample.txt and checkpoint.pt to the folder given with --out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import sys
import time
from typing import Annotated

import common
import stdlib_text
import torch
import torch.nn.functional as F
import typer
from common import console
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of the model. `context` is the number of characters that it attends to."""

    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 128

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads: {self.width} is not a multiple of {self.heads}")


class Attention(nn.Module):
    """Causal multi-head self-attention on (batch, time, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        split = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """A transformer layer with normalization before attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width, bias=False),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Tokens (batch, time) in, logits (batch, time, alphabet) out. The output layer shares the embedding's weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(len(stdlib_text.ALPHABET), shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, len(stdlib_text.ALPHABET), bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Weights into the residual stream are scaled by 1/√n, where n = 2 · layers is the number of additions.
                into_residual = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers) if into_residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position(positions))))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, in nats per character, of predicting each token (batch, time + 1)."""
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    @torch.no_grad()
    def sample(self, prompt: torch.Tensor, length: int, temperature: float = 0.7) -> torch.Tensor:
        """Return `prompt` (time,) continued by `length` sampled tokens."""
        tokens = prompt[None]
        for _ in range(length):
            logits = self(tokens[:, -self.shape.context :])[:, -1] / temperature
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return tokens[0]


class Batches:
    """Random windows of the training text. The same seed gives the same windows on every device."""

    def __init__(self, text: torch.Tensor, batch: int, context: int, seed: int, device: torch.device) -> None:
        self.text, self.batch, self.context, self.device = text, batch, context, device
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> torch.Tensor:
        starts = torch.randint(len(self.text) - self.context, (self.batch, 1), generator=self.generator)
        return self.text[starts + torch.arange(self.context + 1)].long().to(self.device)


class Trainer:
    """A model with its optimizer, schedule and data. Each call of `step` is one update."""

    def __init__(self, model: GPT, settings: Settings, text: torch.Tensor, device: torch.device) -> None:
        self.model = model
        self.batches = Batches(text, settings.batch, model.shape.context, settings.seed, device)
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98))
        factor = functools.partial(_lr_factor, steps=settings.steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self) -> float:
        """Make an update and return the batch's loss. This synchronizes with the device."""
        loss = self.model.loss(self.batches.next())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def _lr_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first 5% of the steps, then cosine decay to 5% of the peak."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def evaluate(model: GPT, text: torch.Tensor, windows: int, device: torch.device, batch: int = 32) -> float:
    """Return the loss in nats per character on `windows` windows, spread evenly over `text`."""
    context = model.shape.context
    starts = torch.linspace(0, len(text) - context - 1, windows).long()[:, None]
    total = 0.0
    for part in starts.split(batch):
        tokens = text[part + torch.arange(context + 1)].long().to(device)
        total += model.loss(tokens).item() * len(part)
    return total / windows


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to train and what to measure. Lengths are in characters.

    The comparison with the CPU compares the losses of `compare_steps` steps and times `compare_rounds` steps. It is
    omitted if `compare_rounds` is 0.
    """

    steps: int = 1200
    batch: int = 16
    lr: float = 4e-3
    seed: int = 1
    eval_every: int = 250
    sample_length: int = 400
    compare_rounds: int = 10
    compare_steps: int = 50


@dataclasses.dataclass
class Speed:
    """The speed of the same training steps on the device and on the CPU."""

    tokens_per_second: float
    cpu_tokens_per_second: float
    largest_loss_difference: float
    steps: int  # number of compared losses


@dataclasses.dataclass
class Report:
    """The results of a run. Losses are in nats per character, memory in bytes, times in seconds."""

    device: str
    torch: str
    parameters: int
    steps: int
    first_loss: float
    held_out_loss: float
    reloaded_loss: float
    training_seconds: float
    tokens_per_second: float
    peak_memory: int | None
    fallbacks: dict[str, int] | None
    first_step_seconds: float = 0.0
    planner_calls: int = 0  # in training steps after the third
    kernel_builds: dict[str, int] = dataclasses.field(default_factory=dict)
    total_seconds: float = 0.0
    speed: Speed | None = None
    history: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)  # step, training, held-out
    sample: str = ""


def compare_with_cpu(shape: Shape, settings: Settings, text: torch.Tensor, device: torch.device) -> Speed:
    """Compare losses and speed of alternating training steps on `device` and on the CPU.

    The learning rate schedule is that of a training of at least the default length. In a very short one, the learning
    rate rises so fast that the loss jumps, and rounding errors decide where.
    """
    settings = dataclasses.replace(settings, steps=max(settings.steps, Settings.steps))
    trainers = []
    for place in (device, torch.device("cpu")):
        torch.manual_seed(settings.seed)
        trainers.append(Trainer(GPT(shape).to(place), settings, text, place))  # the CPU initializes: the same weights
    difference = 0.0
    for _ in range(settings.compare_steps):  # also a warm-up (threads, caches, optimizer state)
        losses = [trainer.step() for trainer in trainers]
        difference = max(difference, abs(losses[0] - losses[1]))
    on_device, on_cpu = common.median_seconds([trainer.step for trainer in trainers], settings.compare_rounds)
    tokens = settings.batch * shape.context
    return Speed(tokens / on_device, tokens / on_cpu, difference, settings.compare_steps)


def reload(path: pathlib.Path, device: torch.device) -> GPT:
    """Return the model of a checkpoint on `device`."""
    checkpoint = torch.load(path, map_location=device, weights_only=True)
    model = GPT(Shape(**checkpoint["shape"])).to(device)
    model.load_state_dict(checkpoint["model"])
    return model


def plot(report: Report, train_losses: list[float], path: pathlib.Path) -> None:
    """Write the loss curves as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(range(1, len(train_losses) + 1), train_losses, linewidth=0.6, alpha=0.6, label="training batch")
    axes.plot([row[0] for row in report.history], [row[2] for row in report.history], "o-", label="held-out text")
    axes.set(xlabel="step", ylabel="nats per character", title=f"Small GPT on {report.device}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def train(device: torch.device, shape: Shape, settings: Settings, out: pathlib.Path) -> Report:
    """Train, evaluate, sample and compare. Writes report.json, loss.png, sample.txt and checkpoint.pt to `out`."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    train_text, held_out = stdlib_text.load()
    sizes = f"{len(train_text) / 1e6:.1f} million characters for training, {len(held_out) / 1e6:.2f} million held out"
    console.print(f"{common.device_title(device)}, torch {torch.__version__}. Text: {sizes}.")
    torch.manual_seed(settings.seed)
    model = GPT(shape).to(device)
    trainer = Trainer(model, settings, train_text, device)
    steps, tokens_per_step = settings.steps, settings.batch * shape.context

    losses: list[float] = []
    history: list[tuple[int, float, float]] = []
    training_seconds = 0.0
    planner_calls = 0
    with common.progress_bar() as progress:
        task = progress.add_task("starting", total=steps)
        for step in range(1, steps + 1):
            planned_before = common.planner_calls(device)
            start = time.perf_counter()
            losses.append(trainer.step())
            training_seconds += time.perf_counter() - start
            if step == 1:
                first_step_seconds = training_seconds
            elif step > 3:
                planner_calls += common.planner_calls(device) - planned_before
            recent = sum(losses[-50:]) / len(losses[-50:])
            speed = step * tokens_per_step / training_seconds
            progress.update(task, advance=1, description=f"loss {recent:.3f} · {speed:,.0f} tokens/s")
            if step % settings.eval_every == 0 or step == steps:
                history.append((step, recent, evaluate(model, held_out, 128, device)))
                progress.print(f"step {step:>5}   training {recent:.3f}   held-out {history[-1][2]:.3f}")

    held_out_loss = evaluate(model, held_out, 512, device)
    peak, fallbacks = common.peak_memory(device), common.fallback_counts(device)
    torch.save({"shape": dataclasses.asdict(shape), "model": model.state_dict()}, out / "checkpoint.pt")
    reloaded = reload(out / "checkpoint.pt", device)
    reloaded_loss = evaluate(reloaded, held_out, 512, device)
    if not math.isclose(held_out_loss, reloaded_loss, rel_tol=1e-5):
        raise RuntimeError(f"the saved model has loss {held_out_loss}, the reloaded one {reloaded_loss}")

    torch.manual_seed(settings.seed)
    prompt = stdlib_text.encode("\n    def ").long().to(device)
    report = Report(
        device=common.device_title(device), torch=torch.__version__, steps=steps,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        first_loss=losses[0], held_out_loss=held_out_loss, reloaded_loss=reloaded_loss, history=history,
        training_seconds=training_seconds, tokens_per_second=steps * tokens_per_step / training_seconds,
        peak_memory=peak, fallbacks=fallbacks, first_step_seconds=first_step_seconds, planner_calls=planner_calls,
        kernel_builds=common.kernel_builds(device),
        sample=stdlib_text.decode(reloaded.sample(prompt, settings.sample_length)),
    )  # fmt: skip
    if device.type != "cpu" and settings.compare_rounds:
        report.speed = compare_with_cpu(shape, settings, train_text, device)
    plot(report, losses, out / "loss.png")
    (out / "sample.txt").write_text(report.sample + "\n")
    report.total_seconds = time.perf_counter() - began
    common.write_json(out / "report.json", report)
    return report


def print_report(report: Report, out: pathlib.Path) -> None:
    """Print the sample and the report."""
    console.rule("a sample")
    console.print(report.sample.strip("\n"), markup=False, highlight=False)
    console.rule()
    training = f"{report.steps:,} steps in {report.training_seconds:.0f} s, {report.tokens_per_second:,.0f} tokens/s"
    rows = [
        ("device", f"{report.device}, torch {report.torch}"),
        ("model", f"{report.parameters:,} parameters"),
        ("held-out loss", f"{report.held_out_loss:.3f} nats per character (initially {report.first_loss:.3f})"),
        ("checkpoint", f"saved, reloaded, same loss ({report.reloaded_loss:.3f})"),
        ("training", training),
    ]
    if report.speed is not None:
        here, cpu = report.speed.tokens_per_second, report.speed.cpu_tokens_per_second
        rows.append(("compared with the CPU", f"{here:,.0f} tokens/s, {cpu:,.0f} on cpu: {here / cpu:.2f} times"))
        difference = f"largest difference {report.speed.largest_loss_difference:.1e} in {report.speed.steps} steps"
        rows.append(("same losses as cpu", difference))
    if report.peak_memory is not None:
        rows.append(("peak memory", f"{report.peak_memory / 2**20:.1f} MiB"))
    if report.fallbacks is not None:
        rows.append(("fallbacks to the CPU", common.describe_fallbacks(report.fallbacks)))
    if report.kernel_builds:
        rows.append(("planner calls", f"{report.planner_calls} in the training steps after the third"))
        rows.append(("kernels", ", ".join(f"{count} {how}" for how, count in report.kernel_builds.items())))
        rows.append(("first step", f"{report.first_step_seconds:.1f} s"))
    rows += [("total time", f"{report.total_seconds:.0f} s"), ("loss plot", str(out / "loss.png")), ("files", str(out))]
    common.print_report("train_gpt", rows)


def main(
    device: Annotated[str, typer.Option(help="PyTorch device: bp, bp:1, cpu, …")] = "bp",
    driver: Annotated[str | None, typer.Option(help="use only these Backplane drivers, separated by commas")] = None,
    steps: Annotated[int, typer.Option(min=1, help="updates")] = Settings.steps,
    batch: Annotated[int, typer.Option(min=1, help="windows per update")] = Settings.batch,
    context: Annotated[int, typer.Option(help="characters per window")] = Shape.context,
    layers: Annotated[int, typer.Option(help="transformer layers")] = Shape.layers,
    heads: Annotated[int, typer.Option(help="attention heads")] = Shape.heads,
    width: Annotated[int, typer.Option(help="width of the residual stream")] = Shape.width,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = Settings.lr,
    seed: Annotated[int, typer.Option(help="seed of weights, batches and sample")] = Settings.seed,
    eval_every: Annotated[int, typer.Option(min=1, help="steps between evaluations")] = Settings.eval_every,
    sample_length: Annotated[int, typer.Option(min=0, help="characters of the sample")] = Settings.sample_length,
    compare_rounds: Annotated[int, typer.Option(min=0, help="steps timed against cpu")] = Settings.compare_rounds,
    compare_steps: Annotated[int, typer.Option(min=1, help="steps with compared losses")] = Settings.compare_steps,
    out: Annotated[pathlib.Path, typer.Option(help="folder for the results")] = pathlib.Path("out/train_gpt"),
) -> None:
    """Train a small GPT on the sources of the Python standard library."""
    try:
        shape = Shape(context, layers, heads, width)
    except ValueError as error:
        sys.exit(str(error))
    settings = Settings(steps, batch, lr, seed, eval_every, sample_length, compare_rounds, compare_steps)
    print_report(train(common.open_device(device, driver), shape, settings, out), out)


if __name__ == "__main__":
    typer.run(main)
