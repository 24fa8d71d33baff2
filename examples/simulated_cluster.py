"""Data-parallel training on a simulated cluster: devices in host memory, with streams and peer copies.

    python examples/simulated_cluster.py                          # four devices
    python examples/simulated_cluster.py --devices 2 --memory 96MiB --batch 65536 --steps 4

Each device has 512 MiB of memory, a replica of the model and a part of the batch. It computes on one stream and sends
gradients on another. The first device sums the gradients of the others, layer by layer, and sends back the mean. The
initial batch is too large on purpose: if a device runs out of memory, the step is repeated with half the batch. At the
end, the same steps on the CPU check the results.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

console = Console(highlight=False)


def main(
    devices: Annotated[int, typer.Option(min=1, max=16, help="number of simulated devices")] = 4,
    memory: Annotated[str, typer.Option(help="memory of each device")] = "512MiB",
    batch: Annotated[int, typer.Option(min=1, help="initial batch size, for all devices together")] = 1048576,
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 6,
    layers: Annotated[int, typer.Option(min=1, help="hidden layers, of 64 features each")] = 12,
    seed: Annotated[int, typer.Option(help="seed of the data and the initial weights")] = 0,
) -> None:
    """Train on simulated devices in parallel, recover from out-of-memory errors, and compare with the CPU."""
    # Read at discovery, when bp is first used (below).
    os.environ |= {"TORCH_BACKPLANE_DRIVERS": "host", "TORCH_BACKPLANE_HOST_DEVICES": str(devices)}
    os.environ["TORCH_BACKPLANE_HOST_MEMORY"] = memory

    cluster = Cluster(devices, layers, seed)
    table = Table("step", "batch", "loss", "seconds", "largest peak of a device", "halved")
    batches, losses = [], []
    for step in range(steps):
        start, halved = time.perf_counter(), 0
        while True:
            try:
                loss = cluster.step(*data(batch, seed + step))
                break
            except torch.OutOfMemoryError:
                cluster.give_up()
                batch, halved = batch // 2, halved + 1
                if batch < devices:
                    console.print(f"[bold red]Error:[/] {memory} is too little for one example on each device")
                    raise typer.Exit(1) from None
        batches.append(batch)
        losses.append(loss)
        peak = max(torch.accelerator.max_memory_allocated(index) for index in range(devices)) / 2**20
        seconds = time.perf_counter() - start
        table.add_row(str(step), f"{batch:,}", f"{loss:.5f}", f"{seconds:.2f}", f"{peak:.0f} MiB", str(halved))
    console.print(table)

    alone, right = network(layers, seed), []
    optimizer = torch.optim.SGD(alone.parameters(), LEARNING_RATE, MOMENTUM)
    for step, size in enumerate(batches):
        optimizer.zero_grad()
        x, y = data(size, seed + step)
        expected = F.mse_loss(alone(x), y)
        expected.backward()
        optimizer.step()
        right.append(expected.item())
    apart = max(abs(one - other) / other for one, other in zip(losses, right, strict=True))
    weights = max(
        (one.cpu() - other).abs().max().item()
        for model in cluster.models
        for one, other in zip(model.parameters(), alone.parameters(), strict=True)
    )
    console.print(f"compared with the CPU: losses differ by {apart:.1e} at most (relative), weights by {weights:.1e}")
    if apart > 1e-3 or weights > 1e-3:
        console.print("[bold red]Error:[/] the results differ from the CPU's")
        raise typer.Exit(1)


LEARNING_RATE, MOMENTUM = 0.05, 0.9
FEATURES = 64


def network(layers: int, seed: int) -> nn.Module:
    """Return a model with 64 inputs and one output. The same seed gives the same weights."""
    torch.manual_seed(seed)
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(FEATURES, FEATURES), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(FEATURES, 1))


def data(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples (count, 64) and targets (count, 1) on the CPU."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :8].sin().mean(1, keepdim=True)


class Cluster:
    """A replica of the model on each device, with a compute stream and a communication stream."""

    def __init__(self, devices: int, layers: int, seed: int) -> None:
        self.devices = [torch.device("bp", index) for index in range(devices)]
        self.models = [network(layers, seed).to(device) for device in self.devices]
        self.optimizers = [torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM) for model in self.models]
        self.computing = [torch.Stream(device) for device in self.devices]
        self.sending = [torch.Stream(device) for device in self.devices]
        for device in self.devices:
            torch.accelerator.synchronize(device)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Train on a batch in CPU memory and return its mean loss.

        Raises:
            torch.OutOfMemoryError: a device does not have enough memory. No weights have changed.
        """
        parts = zip(x.tensor_split(len(self.devices)), y.tensor_split(len(self.devices)), strict=True)
        losses = []
        for model, stream, (inputs, targets) in zip(self.models, self.computing, parts, strict=True):
            with stream:
                model.zero_grad()
                given, wanted = (one.to(stream.device, non_blocking=True) for one in (inputs, targets))
                share = len(inputs) / len(x)
                loss = F.mse_loss(model(given), wanted) * share
                loss.backward()
                losses.append(loss.detach())
        self._average_gradients()
        for optimizer, stream, sender in zip(self.optimizers, self.computing, self.sending, strict=True):
            stream.wait_stream(sender)
            with stream:
                optimizer.step()
        for stream in self.computing:
            stream.synchronize()
        return sum(loss.item() for loss in losses)

    def _average_gradients(self) -> None:
        """Replace the gradients of each device with the sum over all devices.

        The sum is the gradient of the mean loss, because each device's loss is weighted by its share of the batch.
        """
        first = self.sending[0]
        for sender, stream in zip(self.sending, self.computing, strict=True):
            sender.wait_stream(stream)
        for parameters in zip(*(list(model.parameters())[::-1] for model in self.models), strict=True):
            total, *others = (parameter.grad for parameter in parameters)
            with first:
                for gradient, sender in zip(others, self.sending[1:], strict=True):
                    first.wait_stream(sender)  # also for the broadcast of the previous layer
                    total.add_(gradient.to(total.device, non_blocking=True))
            for gradient, sender in zip(others, self.sending[1:], strict=True):
                sender.wait_stream(first)
                with sender:
                    gradient.copy_(total, non_blocking=True)

    def give_up(self) -> None:
        """Discard a failed step and release its memory."""
        for model, device in zip(self.models, self.devices, strict=True):
            torch.accelerator.synchronize(device)
            model.zero_grad()
        torch.accelerator.empty_cache()


if __name__ == "__main__":
    typer.run(main)
