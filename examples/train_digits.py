"""Train a convolutional network on scikit-learn's handwritten digits (1,797 images of 8 × 8 pixels).

    python examples/train_digits.py                 # on Backplane's device
    python examples/train_digits.py --device cpu    # the same program on the CPU

The images are part of scikit-learn: nothing is downloaded. A quarter of them is the test set.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator
from typing import Annotated, Any

import common
import torch
import torch.nn.functional as F
import typer
from common import console
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

COMPARED_STEPS = 50


class DigitNet(nn.Module):
    """Images (batch, 1, 8, 8) in, logits (batch, 10) out."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(8 * width, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


def load(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set: float32 images (1, 8, 8) from 0 to 1, and labels 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train_images, test_images = (torch.tensor(part / 16, dtype=torch.float32).view(-1, 1, 8, 8) for part in split[:2])
    train_labels, test_labels = (torch.tensor(part, dtype=torch.int64) for part in split[2:])
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


@torch.no_grad()
def evaluate(model: nn.Module, test_set: TensorDataset, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the accuracy (0 to 1) on the test set."""
    model.eval()
    images, labels = (tensor.to(device) for tensor in test_set.tensors)
    logits = model(images)
    model.train()
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


@dataclasses.dataclass
class Report:
    """The results of a run. Memory in bytes, time in seconds."""

    device: str
    torch: str
    parameters: int
    epochs: int
    first_loss: float
    last_loss: float  # mean over the last epoch's batches
    accuracy: float
    reloaded_accuracy: float
    seconds: float
    peak_memory: int | None
    fallbacks: dict[str, int] | None
    planner_calls: int  # in training steps after the third
    kernel_builds: dict[str, int]
    cpu_difference: float | None = None  # largest difference of the first losses from the CPU's


class Training:
    """A model with its data and optimizer on `device`. The seed determines weights and data, on every device."""

    def __init__(self, device: torch.device, *, epochs: int, batch: int, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.train_set, self.test_set = load(seed)
        pin = device.type != "cpu"
        self.loader = DataLoader(self.train_set, batch_size=batch, shuffle=True, drop_last=True, pin_memory=pin)
        self.model = DigitNet().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=1e-2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=epochs * len(self.loader))

    def epoch(self) -> Iterator[float]:
        """Train on all images once. Yields the loss of each batch."""
        for images, labels in self.loader:
            images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            yield loss.item()


def difference_from_cpu(device: torch.device, **settings: Any) -> float:
    """Return the largest difference of the first losses from those on the CPU.

    Both trainings run without dropout, because devices draw different random numbers than the CPU.
    """
    curves = []
    for place in (device, torch.device("cpu")):
        training = Training(place, **settings)
        for module in training.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        endless = itertools.chain.from_iterable(training.epoch() for _ in range(settings["epochs"]))
        curves.append(list(itertools.islice(endless, COMPARED_STEPS)))
    return max(abs(here - there) for here, there in zip(*curves, strict=True))


def train(device: torch.device, *, epochs: int, batch: int, lr: float, seed: int, out: pathlib.Path) -> Report:
    """Train, evaluate and compare with the CPU. Writes report.json and checkpoint.pt to `out`."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    training = Training(device, epochs=epochs, batch=batch, lr=lr, seed=seed)
    images = f"{len(training.train_set):,} training images"
    console.print(f"{common.device_title(device)}, torch {torch.__version__}. {images}.")

    losses: list[float] = []
    planner_calls = 0
    with common.progress_bar() as progress:
        task = progress.add_task("starting", total=epochs)
        for epoch in range(1, epochs + 1):
            planned_before = common.planner_calls(device)
            for loss in training.epoch():
                losses.append(loss)
                planned = common.planner_calls(device)
                planner_calls += planned - planned_before if len(losses) > 3 else 0
                planned_before = planned
            test_loss, accuracy = evaluate(training.model, training.test_set, device)
            figures = f"training {losses[-1]:.3f}   test {test_loss:.3f}   accuracy {accuracy:.2%}"
            progress.update(task, advance=1, description=figures)
            progress.print(f"epoch {epoch:>3}   {figures}")

    torch.save(training.model.state_dict(), out / "checkpoint.pt")
    reloaded = DigitNet().to(device)
    reloaded.load_state_dict(torch.load(out / "checkpoint.pt", map_location=device, weights_only=True))
    _, reloaded_accuracy = evaluate(reloaded, training.test_set, device)
    if reloaded_accuracy != accuracy:
        raise RuntimeError(f"the saved model recognises {accuracy:.2%}, the reloaded one {reloaded_accuracy:.2%}")
    last_epoch = losses[-len(training.loader) :]
    report = Report(
        device=common.device_title(device), torch=torch.__version__, epochs=epochs,
        parameters=sum(parameter.numel() for parameter in training.model.parameters()),
        first_loss=losses[0], last_loss=sum(last_epoch) / len(last_epoch), accuracy=accuracy,
        reloaded_accuracy=reloaded_accuracy, peak_memory=common.peak_memory(device),
        fallbacks=common.fallback_counts(device), seconds=time.perf_counter() - began,
        planner_calls=planner_calls, kernel_builds=common.kernel_builds(device),
    )  # fmt: skip
    if device.type != "cpu":
        report.cpu_difference = difference_from_cpu(device, epochs=epochs, batch=batch, lr=lr, seed=seed)
    common.write_json(out / "report.json", report)
    return report


def print_report(report: Report, out: pathlib.Path) -> None:
    """Print the report as a table."""
    rows = [
        ("device", f"{report.device}, torch {report.torch}"),
        ("model", f"{report.parameters:,} parameters"),
        ("test accuracy", f"{report.accuracy:.2%} after {report.epochs} epochs"),
        ("training loss", f"{report.last_loss:.3f} in the last epoch (initially {report.first_loss:.3f})"),
        ("checkpoint", f"saved, reloaded, same accuracy ({report.reloaded_accuracy:.2%})"),
        ("total time", f"{report.seconds:.1f} s"),
    ]
    if report.peak_memory is not None:
        rows.append(("peak memory", f"{report.peak_memory / 2**20:.1f} MiB"))
    if report.fallbacks is not None:
        rows.append(("fallbacks to the CPU", common.describe_fallbacks(report.fallbacks)))
    if report.cpu_difference is not None:
        difference = f"largest difference {report.cpu_difference:.1e} in the first {COMPARED_STEPS} steps"
        rows.append(("same losses as cpu", difference))
    if report.kernel_builds:
        rows.append(("planner calls", f"{report.planner_calls} in the training steps after the third"))
        rows.append(("kernels", ", ".join(f"{count} {how}" for how, count in report.kernel_builds.items())))
    rows.append(("files", str(out)))
    common.print_report("train_digits", rows)


def main(
    device: Annotated[str, typer.Option(help="PyTorch device: bp, bp:1, cpu, …")] = "bp",
    driver: Annotated[str | None, typer.Option(help="use only these Backplane drivers, separated by commas")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = 12,
    batch: Annotated[int, typer.Option(min=2, max=1347, help="images per update")] = 64,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 5e-3,
    seed: Annotated[int, typer.Option(help="seed of the split, the weights and the image order")] = 1,
    out: Annotated[pathlib.Path, typer.Option(help="folder for the results")] = pathlib.Path("out/train_digits"),
) -> None:
    """Train a convolutional network on scikit-learn's handwritten digits."""
    report = train(common.open_device(device, driver), epochs=epochs, batch=batch, lr=lr, seed=seed, out=out)
    print_report(report, out)


if __name__ == "__main__":
    typer.run(main)
