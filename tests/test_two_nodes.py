"""DistributedDataParallel around DataParallel: two processes stand for two nodes."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn

import pyparallel
from pyparallel import rank_values
from pyparallel.gradient_bucket import GradientBucket

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


OPTIONS: list[dict[str, object]] = [
    {},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"bucket_cap_mb": 1e-5, "broadcast_buffers": False},
]


def node(rank: int, folder: str, named_devices: list[str]) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    inputs = batches()[:, 8 * rank : 8 * rank + 8]
    for i, options in enumerate(OPTIONS):
        model = build_model()
        parallel = pyparallel.DataParallel(model, device_ids=named_devices)
        train(nn.parallel.DistributedDataParallel(parallel, **options), inputs)
        torch.save(model.state_dict(), f"{folder}/weights{rank}-{i}")
    check_accumulation(inputs, named_devices)
    check_order(inputs[0], named_devices)
    distributed.destroy_process_group()
    # Without the end of the interpreter: gloo's thread drops Python callbacks when it likes, and
    # torch aborts if the interpreter ends at that moment.
    os._exit(0)


def check_accumulation(inputs: torch.Tensor, named_devices: list[str]) -> None:
    """Without synchronization between nodes, then with it."""
    grads = []
    for wrap in (lambda m: m, lambda m: pyparallel.DataParallel(m, device_ids=named_devices)):
        model = build_model()
        outer = nn.parallel.DistributedDataParallel(wrap(model))
        with outer.no_sync():
            outer(inputs[0]).square().mean().backward()
        outer(inputs[1]).square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def check_order(inputs: torch.Tensor, named_devices: list[str]) -> None:
    """The all-reduce of a bucket starts before the next bucket's sum."""
    log = []

    class Logged(GradientBucket):
        def launch(self, grads):
            log.append("sum")
            return super().launch(grads)

    def hook(state: object, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        log.append("all-reduce")
        return (
            distributed.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    rank_values.GradientBucket = Logged  # type: ignore[misc]
    parallel = pyparallel.DataParallel(
        build_model(), named_devices, bucket_cap_mb=1e-6, dispatch="sequential"
    )
    outer = nn.parallel.DistributedDataParallel(parallel, bucket_cap_mb=1e-6)
    outer.register_comm_hook(None, hook)
    for _ in range(2):
        log.clear()
        outer(inputs).sum().backward()
    assert log == ["sum", "all-reduce"] * 4, log


@pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")
def test_two_nodes_train_as_one_device(tmp_path: Path) -> None:
    devices = pyparallel.virtual_devices(2)
    multiprocessing.spawn(node, (str(tmp_path), devices), nprocs=2)
    expected = build_model()
    train(expected, batches())
    for rank in range(2):
        for i in range(len(OPTIONS)):
            weights = torch.load(tmp_path / f"weights{rank}-{i}")
            for name, parameter in expected.state_dict().items():
                torch.testing.assert_close(weights[name], parameter, rtol=1e-12, atol=1e-12)
