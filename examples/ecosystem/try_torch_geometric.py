"""PyTorch Geometric: training graph convolutions, and attention over a batch of graphs."""

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATv2Conv, GCNConv, global_mean_pool
from trial import Program, Results, falls, main, on


def ring(nodes: int) -> torch.Tensor:
    first = torch.arange(nodes)
    second = (first + 1) % nodes
    return torch.cat([torch.stack([first, second]), torch.stack([second, first])], 1)


class Convolutions(torch.nn.Module):
    """Two graph convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 16), GCNConv(16, 3)

    def forward(self, data: Data) -> torch.Tensor:
        hidden = self.first(data.x, data.edge_index).relu()
        return self.second(hidden, data.edge_index)


def convolutions(device: torch.device) -> Results:
    torch.manual_seed(1)
    data = Data(x=torch.randn(60, 8), edge_index=ring(60), y=torch.arange(60) // 20).to(device)
    model = Convolutions().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.cross_entropy(model(data), data.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": falls(losses)}


def attention(device: torch.device) -> Results:
    torch.manual_seed(2)
    graphs = [Data(x=torch.randn(nodes, 8), edge_index=ring(nodes)) for nodes in (5, 8, 13)]
    batch = Batch.from_data_list(graphs).to(device)
    layer = GATv2Conv(8, 4, heads=2).to(device)
    pooled = on(global_mean_pool(layer(batch.x, batch.edge_index), batch.batch), device)
    pooled.square().sum().backward()
    return {"pooled": pooled, "gradient": layer.att.grad}


main(
    "torch_geometric",
    [Program("training GCNConv", convolutions, tolerance=1e-3), Program("GATv2Conv on a batch", attention)],
    distribution="torch-geometric",
)
