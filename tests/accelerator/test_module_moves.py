"""Moving a module keeps its Parameter objects, so tied layers and optimizers still refer to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Tied(nn.Module):
    """An embedding and an output layer that share one weight, of shape (5, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("place", ["bp", "cpu"])
def test_weights_stay_tied(place: str) -> None:
    model = Tied().to("cpu" if place == "bp" else "bp")
    weight = model.embedding.weight
    assert model.to(place) is model
    assert model.embedding.weight is weight
    assert model.head.weight is weight
    assert weight.device.type == place
    assert sum(parameter.numel() for parameter in model.parameters()) == 15


def test_an_optimizer_created_before_the_move_trains_the_model() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.to("bp")
    before = model.embedding.weight.detach().clone()
    model(torch.tensor([1, 2], device="bp")).square().sum().backward()
    optimizer.step()
    assert not model.embedding.weight.equal(before)


def test_gradients_move_with_their_parameters() -> None:
    model = Tied()
    model(torch.tensor([1])).sum().backward()
    expected = model.embedding.weight.grad.clone()
    model.to("bp")
    assert model.embedding.weight.grad.device.type == "bp"
    assert model.embedding.weight.grad.cpu().equal(expected)


def test_data_can_be_set_across_devices() -> None:
    x = torch.zeros(3)
    x.data = torch.ones(2, device="bp")
    assert x.device.type == "bp"
    assert x.cpu().equal(torch.ones(2))


@pytest.mark.parametrize("other", [torch.empty(2, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_data_cannot_be_set_to_incompatible_tensors(other: torch.Tensor) -> None:
    x = torch.zeros(2, device="bp")
    assert not torch._has_compatible_shallow_copy_type(x, other)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = other
