"""Compares training steps of five small models, including the optimizer, with PyTorch on the CPU.

    python benchmarks/training.py --driver opencl
    python benchmarks/training.py --match LSTM --json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import interleaving
import torch
from torch import nn

Model = Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]  # model, batch, targets


class Transformer(nn.Module):
    """An encoder of tokens (causal) or image patches. Logits are the last dimension of the output."""

    def __init__(self, embed: nn.Module, length: int, classes: int, layers: int, width: int, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.embed, self.place = embed, nn.Parameter(torch.zeros(length, width))
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head, self.causal = nn.Linear(width, classes), causal
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if x.dim() == 4:
            x = x.flatten(2).mT
        x = self.layers(x + self.place, self.mask if self.causal else None, is_causal=self.causal)
        return self.head(x if self.causal else x.mean(1))


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int, results: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, results, 3, stride, 1, bias=False),
            nn.BatchNorm2d(results),
            nn.ReLU(),
            nn.Conv2d(results, results, 3, 1, 1, bias=False),
            nn.BatchNorm2d(results),
        )
        same = stride == 1 and channels == results
        self.skip = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(channels, results, 1, stride, bias=False), nn.BatchNorm2d(results)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.body(x) + self.skip(x)).relu()


class Tagger(nn.Module):
    """A bidirectional LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(1000, 64), nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(x))[0])


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """a GPT, 4 layers of 128, 8 × 64 tokens"""
    tokens = torch.randint(100, (8, 65))
    return Transformer(nn.Embedding(100, 128), 64, 100, 4, 128, causal=True), tokens[:, :-1], tokens[:, 1:]


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """convolutions of 16 and 32 channels, 64 images of 28 × 28"""
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10))
    return model, torch.randn(64, 1, 28, 28), torch.randint(10, (64,))


def resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """a ResNet-18, 16 images of 32 × 32"""
    blocks, before = [], 64
    for width in (64, 128, 256, 512):
        blocks += [Residual(before, width, 1 if width == 64 else 2), Residual(width, width, 1)]
        before = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, *head), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def lstm() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """an LSTM of 2 layers, both directions, 16 × 48 tokens"""
    return Tagger(), torch.randint(1000, (16, 48)), torch.randint(20, (16, 48))


def vit() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """a ViT, 4 layers of 128, 16 images of 32 × 32 in patches of 4"""
    model = Transformer(nn.Conv2d(3, 128, 4, 4), 64, 10, 4, 128, causal=False)
    return model, torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def make(build: Model, device: torch.device) -> interleaving.Body:
    """A training step. The batch is on the device, and each step reads the loss, as programs do."""
    model, x, target = build()
    model, x, target = model.to(device), x.to(device), target.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def rows() -> list[interleaving.Row]:
    """Compares training steps on a device and on the CPU."""
    return [interleaving.Row(str(model.__doc__), partial(make, model), 0.3) for model in (gpt, cnn, resnet, lstm, vit)]


if __name__ == "__main__":
    interleaving.main(rows, "1/s")
