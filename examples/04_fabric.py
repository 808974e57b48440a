"""Trains a small network with Lightning Fabric on all GPUs, or on two virtual devices.

    pip install '.[frameworks]' && python examples/04_fabric.py

Copy both classes, and the line that registers the strategy. See docs/frameworks.md.
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY, DataParallelStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

import pyparallel


class NoSync(_BackwardSyncControl):
    """For ``fabric.no_backward_sync``: gradients stay on their devices while they accumulate."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        return module.no_sync() if enabled else nullcontext()


class PyparallelStrategy(DataParallelStrategy):
    """One process and all devices, as Fabric's "dp", with our replicas."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backward_sync_control = NoSync()

    def setup_module(self, module: nn.Module) -> pyparallel.DataParallel:
        return pyparallel.DataParallel(module, self.parallel_devices)


STRATEGY_REGISTRY.register("pyparallel", PyparallelStrategy, description="one process, n devices")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--precision", default="bf16-mixed")
    options = parser.parse_args()

    on_gpus = torch.cuda.is_available()
    fabric = Fabric(
        accelerator="cuda" if on_gpus else "cpu",
        devices="auto" if on_gpus else 2,  # of the CPU: virtual devices
        strategy="pyparallel",
        precision=options.precision,
    )
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=0.01))
    for step in range(options.steps):
        x = torch.randn(64, 8, device=fabric.device)
        loss = (model(x).squeeze(1) - x.sin().sum(1)).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
