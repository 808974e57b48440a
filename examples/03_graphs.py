"""Trains a graph network of PyTorch Geometric on all GPUs, or on two virtual devices.

    pip install '.[frameworks]' && python examples/03_graphs.py

Copy ``GraphDataParallel``. On GPUs its body may be ``pass``. See docs/frameworks.md.
"""

import argparse
from typing import Any

import torch
import torch_geometric.nn as geometric
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataListLoader

import pyparallel


class GraphDataParallel(geometric.DataParallel, pyparallel.DataParallel):
    """Takes a list of graphs and cuts it by numbers of nodes; our replicas run the parts."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        self.src_device = self.src_device_obj  # theirs is always a GPU

    def scatter(self, data_list: list[Data], device_ids: list[int]) -> list[Batch]:
        if self.src_device.type == "cuda":
            return super().scatter(data_list, device_ids)
        # A graph belongs to the device whose share of all nodes holds its middle.
        nodes = torch.tensor([data.num_nodes for data in data_list])
        middles = nodes.cumsum(0) - nodes / 2
        count = min(len(device_ids), len(data_list))
        owners = (middles * count / nodes.sum()).int().tolist()
        parts = [
            [data for data, owner in zip(data_list, owners, strict=True) if owner == device]
            for device in sorted(set(owners))
        ]
        return [Batch.from_data_list(part, self.follow_batch, self.exclude_keys) for part in parts]


class MeanDegree(nn.Module):
    """Two graph convolutions and a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = geometric.GraphConv(1, 16)
        self.second = geometric.GraphConv(16, 16)
        self.last = nn.Linear(16, 1)

    def forward(self, data: Batch) -> Tensor:
        x = self.first(data.x, data.edge_index).relu()
        x = self.second(x, data.edge_index).relu()
        return self.last(geometric.global_mean_pool(x, data.batch)).squeeze(1)


def random_graph(generator: torch.Generator) -> Data:
    """A graph of 4 to 20 nodes, whose target is its mean degree."""
    nodes = int(torch.randint(4, 21, (), generator=generator))
    edges = torch.rand(nodes, nodes, generator=generator) < torch.rand((), generator=generator)
    edge_index = edges.triu(1).nonzero().T
    edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    degree = torch.tensor([edge_index.size(1) / nodes])
    return Data(torch.ones(nodes, 1), edge_index, y=degree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    loader = DataListLoader([random_graph(generator) for _ in range(512)], batch_size=32)
    on_gpus = torch.cuda.is_available()
    model = GraphDataParallel(
        MeanDegree().to("cuda:0" if on_gpus else "cpu"),
        None if on_gpus else pyparallel.virtual_devices(2),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        total = 0.0
        for graphs in loader:
            output = model(graphs)
            target = torch.cat([graph.y for graph in graphs]).to(output.device)
            loss = (output - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() / len(loader)
        print(f"epoch {epoch + 1}  loss {total:.4f}")


if __name__ == "__main__":
    main()
