"""accelerate: what it unwraps, prepares and saves."""

import copy

import pytest
import torch
from networks import Recording
from torch import nn

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import extract_model_from_parallel

import pyparallel


@pytest.fixture(autouse=True)
def _fresh_state():
    """Accelerate keeps its state for the process; the Trainer's tests have theirs."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def model():
    return pyparallel.DataParallel(Recording(), pyparallel.virtual_devices(2))


def test_the_model_is_found_in_its_wrappers(model):
    net = model.module
    assert extract_model_from_parallel(model) is net
    assert extract_model_from_parallel(nn.Sequential(model), recursive=True)[0] is net
    compiled = torch.compile(model, backend="eager")
    assert extract_model_from_parallel(compiled, keep_torch_compile=False) is net
    again = extract_model_from_parallel(compiled)
    assert again._orig_mod is net
    assert list(net.state_dict()) == ["linear.weight", "linear.bias"]


def test_the_model_is_found_while_patched(model):
    before = nn.DataParallel(Recording())
    with pyparallel.patched():
        assert extract_model_from_parallel(model) is model.module
        assert extract_model_from_parallel(before) is before.module


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepare_trains_as_on_one_device(precision, model, recipe, tmp_path):
    x = torch.linspace(-1, 1, 15).view(5, 3)
    reference = copy.deepcopy(model.module)
    weights = []
    for network in (reference, model):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        prepared, optimizer = accelerator.prepare(network, optimizer)
        Recording.seen.clear()
        for _ in range(3):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(x).square().mean())
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert set(Recording.seen) == {torch.bfloat16 if precision == "bf16" else torch.float32}
        weights.append(accelerator.unwrap_model(prepared).linear.weight.detach())
    tolerance = 1e-6 if precision == "no" else 0.01
    torch.testing.assert_close(weights[1], weights[0], rtol=tolerance, atol=tolerance)
    assert accelerator.unwrap_model(prepared) is model.module
    assert model(x).shape == (5, 2)


def test_checkpoints_have_no_prefix(model, tmp_path):
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    assert list(accelerator.get_state_dict(prepared)) == ["linear.weight", "linear.bias"]
    accelerator.save_model(prepared, tmp_path, safe_serialization=False)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert list(saved) == ["linear.weight", "linear.bias"]

    accelerator.save_state(tmp_path / "state")
    expected = model.module.linear.weight.detach().clone()
    with torch.no_grad():
        model.module.linear.weight.zero_()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.module.linear.weight, expected)


def test_the_recipe(recipe):
    x = torch.ones(4, 3)
    names = recipe("accelerate", net=Recording(), batches=[x, x], torch=torch)
    assert PartialState._shared_state
    assert names["accelerator"].unwrap_model(names["model"]) is names["net"]
    assert not torch.equal(names["net"].linear.weight, Recording().linear.weight)
