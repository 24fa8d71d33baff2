"""Models of PyTorch's own modules: recurrent ones, a Transformer, a U-Net, and what is not about text or images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models.model import Inputs, Model

VOCABULARY = 64
LENGTHS = (12, 20, 31)


class RecurrentLanguageModel(nn.Module):
    """Two recurrent layers between an embedding and a projection on the vocabulary."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = kind(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(tokens))[0])


class Translator(nn.Module):
    """`nn.Transformer` with embeddings, causal and padding masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Embedding(64, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        length, padding = target.shape[1], source == 0
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        found = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=causal,
            src_key_padding_mask=padding, memory_key_padding_mask=padding,
        )  # fmt: skip
        return self.head(found)


def block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels, with transposed convolutions and concatenations (Ronneberger, Fischer and Brox 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = block(3, 8), block(8, 16), block(16, 32)
        self.up_second, self.up_first = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.after_second, self.after_first = block(32, 16), block(16, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        up = self.up_second(self.bottom(F.max_pool2d(second, 2)))
        up = self.up_first(self.after_second(torch.cat([second, up], 1)))
        return self.head(self.after_first(torch.cat([first, up], 1)))


class GraphAttention(nn.Module):
    """Graph attention (Veličković et al. 2018) and mean aggregation, with gathers and scatters over edges."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.source, self.target = nn.Linear(16, 32), nn.Linear(32, 1), nn.Linear(32, 1)
        self.head = nn.Linear(32, 4)

    def forward(self, features: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        nodes = features.shape[0]
        x = self.project(features)
        scores = F.leaky_relu(self.source(x)[source] + self.target(x)[target], 0.2).squeeze(-1)
        largest = scores.new_full((nodes,), -1e9).scatter_reduce(0, target, scores, "amax")
        weights = (scores - largest[target]).exp()
        weights = weights / scores.new_zeros(nodes).index_add(0, target, weights)[target]
        x = F.elu(torch.zeros_like(x).index_add(0, target, weights.unsqueeze(-1) * x[source]))
        degree = torch.zeros(nodes, device=x.device).scatter_add(0, target, torch.ones_like(scores)).clamp_min(1)
        return self.head(torch.zeros_like(x).index_add(0, target, x[source]) / degree.unsqueeze(-1))


class VariationalAutoencoder(nn.Module):
    """A convolutional variational autoencoder. Its noise is an argument, so that all devices have the same."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1), nn.GELU(), nn.Conv2d(8, 16, 4, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(784, 16)
        )
        self.decoder = nn.Sequential(
            nn.Linear(8, 784), nn.Unflatten(1, (16, 7, 7)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.GELU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        found = self.decoder(mean + noise * (0.5 * log_variance).exp())
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return {"loss": F.binary_cross_entropy_with_logits(found, x) + 0.01 * divergence, "images": found.sigmoid()}


class Recommender(nn.Module):
    """Embedding bags and pairwise products of features, as in DLRM (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(22, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = [x, *(bag(one, offsets) for bag, one in zip(self.bags, indices, strict=True))]
        stacked = torch.stack(vectors, 1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        row, column = torch.tril_indices(4, 4, -1, device=x.device)
        return self.top(torch.cat([x, products[:, row, column]], 1))


class PointNet(nn.Module):
    """Classification of point clouds with a learned transformation (Qi et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU())
        self.matrix = nn.Linear(32, 9)
        self.features = nn.Sequential(
            nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64)
        )
        self.head = nn.Linear(64, 5)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix(self.transform(points).amax(-1)).view(-1, 3, 3) + torch.eye(3, device=points.device)
        return self.head(self.features(torch.bmm(matrix, points)).amax(-1))


def tokens(length: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, length))


def translation(length: int) -> Inputs:
    source = tokens(length + 3)
    source[0, -4:] = 0
    return {"source": source, "target": tokens(length)}


def recurrent(kind: type[nn.RNNBase]) -> Model:
    def inputs(length: int) -> Inputs:
        return {"tokens": tokens(length)}

    return Model(build=lambda: RecurrentLanguageModel(kind), inputs=inputs, lengths=LENGTHS)


MODELS = {
    "lstm": recurrent(nn.LSTM),
    "gru": recurrent(nn.GRU),
    "transformer": Model(build=Translator, inputs=translation, lengths=LENGTHS),
    "unet": Model(build=UNet, inputs=lambda length: {"x": torch.randn(2, 3, 32, 32)}),
    "graph_attention": Model(
        build=GraphAttention,
        inputs=lambda length: {"features": torch.randn(30, 16), "edges": torch.randint(0, 30, (2, 120))},
    ),
    "variational_autoencoder": Model(
        build=VariationalAutoencoder,
        inputs=lambda length: {"x": torch.rand(4, 1, 28, 28), "noise": torch.randn(4, 8)},
    ),
    "dlrm": Model(
        build=Recommender,
        inputs=lambda length: {
            "dense": torch.randn(8, 13),
            "indices": torch.randint(0, 50, (3, 24)),
            "offsets": torch.arange(0, 24, 3),
        },
    ),
    "pointnet": Model(build=PointNet, inputs=lambda length: {"points": torch.randn(4, 3, 100)}),
}
