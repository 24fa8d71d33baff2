"""Training steps of small models, eager and compiled, in float32 and with autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Build = Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]]  # a model, a batch and its targets


class Transformer(nn.Module):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.1, "gelu", batch_first=True, norm_first=True)
        self.embed, self.layers = nn.Embedding(100, 128), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        result: torch.Tensor = self.head(self.layers(self.embed(tokens), mask, is_causal=True)).flatten(0, 1)
        return result


class Residual(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, 1, 1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norms[0](self.first(x)).relu()
        result: torch.Tensor = (self.norms[1](self.second(inner)) + x).relu()
        return result


class Tagger(nn.Module):
    """A bidirectional LSTM over embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(100, 64), nn.LSTM(64, 128, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(256, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.lstm(self.embed(tokens))[0]).flatten(0, 1)
        return result


def _transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Transformer(), torch.randint(100, (4, 64)), torch.randint(100, (256,))


def _resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layers = [nn.Conv2d(3, 32, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Residual(32), nn.Conv2d(32, 64, 1, 2), Residual(64)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model, torch.randn(8, 3, 64, 64), torch.randint(10, (8,))


def _lstm() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Tagger(), torch.randint(100, (8, 32)), torch.randint(20, (256,))


def _step(build: Build, compiled: bool, mixed: bool, device: torch.device) -> None:
    """Train for a step. `mixed`: with autocast to bfloat16."""
    torch.manual_seed(0)
    model, batch, targets = build()
    model, batch, targets = model.to(device), batch.to(device), targets.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            return F.cross_entropy(model(batch), targets)

    if compiled:
        torch.compiler.reset()
    (torch.compile(loss) if compiled else loss)().backward()
    optimizer.step()


MODELS: dict[str, Callable[[torch.device], None]] = {
    f"{name}, {'compiled' if compiled else 'eager'}, {'bfloat16' if mixed else 'float32'}": functools.partial(
        _step, build, compiled, mixed
    )
    for name, build in (("Transformer", _transformer), ("ResNet", _resnet), ("LSTM", _lstm))
    for compiled in (False, True)
    for mixed in (False, True)
}
