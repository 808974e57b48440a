"""Lightning Fabric with the strategy of the example, and with its own while patched."""

import copy
import sys

import pytest
import torch
from networks import Recording

pytest.importorskip("lightning")

from lightning.fabric import Fabric
from lightning.fabric.strategies import DataParallelStrategy

import pyparallel

EXAMPLE = "04_fabric.py"


@pytest.fixture
def fabric_of(example):
    """Returns a function that makes a Fabric, by the name that the example registers."""

    def make(precision="32-true", devices=2):
        example(EXAMPLE)
        fabric = Fabric(
            accelerator="cpu", devices=devices, strategy="pyparallel", precision=precision
        )
        fabric.launch()
        return fabric

    return make


def train(fabric, net, steps=3, rows=5):
    """Returns the wrapped model and its optimizer."""
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, rows * 3).view(rows, 3)
    for _ in range(steps):
        optimizer.zero_grad()
        fabric.backward(model(x).square().sum())
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", "bf16-true"])
@pytest.mark.parametrize("devices", [2, 3])
def test_training_is_that_of_one_device(precision, devices, fabric_of):
    net = Recording()
    reference = copy.deepcopy(net)
    model, _ = train(fabric_of(precision, devices), net)
    assert type(model._forward_module) is pyparallel.DataParallel
    assert model._forward_module.device_ids == list(range(devices))
    expected, _ = train(Fabric(accelerator="cpu", devices=1, precision=precision), reference)
    tolerance = 1e-6 if precision in ("32-true", "64-true") else 0.02
    torch.testing.assert_close(
        model.linear.weight, expected.linear.weight, rtol=tolerance, atol=tolerance
    )


def test_mixed_precision_reaches_the_replicas(fabric_of):
    Recording.seen.clear()
    model, _ = train(fabric_of("bf16-mixed"), Recording(), steps=1)
    assert Recording.seen == [torch.bfloat16] * 2
    assert model.linear.weight.dtype == torch.float32


def test_checkpoints_have_no_prefix_and_load_anywhere(fabric_of, tmp_path):
    fabric = fabric_of()
    model, optimizer = train(fabric, Recording())
    fabric.save(tmp_path / "saved.pt", {"model": model, "optimizer": optimizer})
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    assert list(saved["model"]) == ["linear.weight", "linear.bias"]

    for other in (fabric_of(), Fabric(accelerator="cpu", devices=1)):
        fresh, its_optimizer = train(other, Recording(), steps=0)
        other.load(tmp_path / "saved.pt", {"model": fresh, "optimizer": its_optimizer})
        assert torch.equal(fresh.linear.weight, model.linear.weight)
        assert its_optimizer.state_dict()["state"][0]["step"] == 3


def test_other_calls(fabric_of):
    fabric = fabric_of()
    assert (fabric.world_size, fabric.is_global_zero) == (1, True)
    assert fabric.all_reduce(torch.tensor([1.0, 3.0])) == 2.0
    model, optimizer = train(fabric, Recording(), steps=1)
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert norm == pytest.approx(0.5, rel=1e-4)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(range(4)))
    assert len(list(loader)) == 4


def test_gradients_accumulate_without_sums_in_between(fabric_of):
    x = torch.linspace(-1, 1, 12).view(4, 3)
    reference = Recording()
    (reference(x).sum() + reference(2 * x).sum()).backward()
    fabric = fabric_of()
    model, _ = train(fabric, Recording(), steps=0)
    with fabric.no_backward_sync(model):
        fabric.backward(model(x).sum())
    first_device_alone = Recording()
    first_device_alone(x[:2]).sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, first_device_alone.linear.weight.grad)
    with fabric.no_backward_sync(model, enabled=False):
        fabric.backward(model(2 * x).sum())
    torch.testing.assert_close(model.linear.weight.grad, reference.linear.weight.grad)


def test_fabrics_own_strategy_while_patched():
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DataParallelStrategy())
    fabric.launch()
    with pyparallel.patched():
        model, _ = train(fabric, Recording(), steps=1)
    assert type(model._forward_module) is pyparallel.DataParallel
    assert model._forward_module.device_ids == [0, 1]
    assert list(fabric.strategy.get_module_state_dict(model._forward_module)) == [
        "linear.weight",
        "linear.bias",
    ]


def test_the_example_learns(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--steps", "100"])
    example(EXAMPLE).main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert float(lines[-1].split()[-1]) < 1
