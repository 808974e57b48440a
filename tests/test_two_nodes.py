"""DistributedDataParallel around DataParallel: two processes stand for two nodes."""

from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn

import pyparallel

STEPS = 3


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches() -> torch.Tensor:
    """Returns (STEPS, rows, features); the rows of a batch are shared by the nodes."""
    return torch.randn(
        STEPS, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def train(model: nn.Module, inputs: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def node(rank: int, folder: str, named_devices: list[str]) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    model = build_model()
    parallel = pyparallel.DataParallel(model, device_ids=named_devices)
    train(nn.parallel.DistributedDataParallel(parallel), batches()[:, 8 * rank : 8 * rank + 8])
    torch.save(model.state_dict(), f"{folder}/weights{rank}")
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")
def test_two_nodes_train_as_one_device(tmp_path: Path) -> None:
    devices = pyparallel.virtual_devices(2)
    multiprocessing.spawn(node, (str(tmp_path), devices), nprocs=2)
    expected = build_model()
    train(expected, batches())
    for rank in range(2):
        weights = torch.load(tmp_path / f"weights{rank}")
        for name, parameter in expected.state_dict().items():
            torch.testing.assert_close(weights[name], parameter, rtol=1e-12, atol=1e-12)
