"""PyTorch Geometric's DataParallel on top of ours, by inheritance, as in the example."""

import copy
import importlib
import sys

import pytest
import torch

pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data
from torch_geometric.nn import DataParallel as GeometricsDataParallel

import pyparallel

EXAMPLE = "03_graphs.py"
pytestmark = pytest.mark.filterwarnings("ignore:'DataParallel' is usually much slower")


def graph(nodes):
    ring = torch.arange(nodes)
    edge_index = torch.stack([ring, ring.roll(1)])
    return Data(torch.randn(nodes, 1, dtype=torch.float64), edge_index)


@pytest.fixture
def wrap(example):
    def wrapper(n, **kwargs):
        torch.manual_seed(0)
        module = example(EXAMPLE).MeanDegree().double()
        return example(EXAMPLE).GraphDataParallel(module, pyparallel.virtual_devices(n), **kwargs)

    return wrapper


def test_both_parents_work_in_it(wrap):
    model = wrap(2)
    assert isinstance(model, GeometricsDataParallel)
    assert isinstance(model, pyparallel.DataParallel)
    assert model.src_device == torch.device("cpu")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 1], [9, 1, 1, 1, 1], [2, 3], [5], [1, 2, 3, 4, 50]])
def test_outputs_and_gradients_are_those_of_one_device(n, sizes, wrap):
    model = wrap(n)
    reference = copy.deepcopy(model.module)
    for _ in range(2):
        graphs = [graph(size) for size in sizes]
        output, expected = model(graphs), reference(Batch.from_data_list(graphs))
        torch.testing.assert_close(output, expected)
        for network, result in ((model, output), (reference, expected)):
            network.zero_grad()
            result.square().sum().backward()
        for ours, theirs in zip(model.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    "sizes, n, parts",
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([10, 1, 1, 8], 2, [1, 3]),
        ([1, 1, 1, 1, 20], 4, [4, 1]),
        ([3, 3], 4, [1, 1]),
    ],
)
def test_graphs_are_cut_by_nodes(sizes, n, parts, wrap):
    model = wrap(n)
    batches = model.scatter([graph(size) for size in sizes], model.device_ids)
    assert [batch.num_graphs for batch in batches] == parts


def test_scatter_cuts_as_theirs(wrap, monkeypatch):
    # Theirs sends each part to a GPU; here it stays where it is.
    monkeypatch.setattr(Data, "to", lambda data, device: data)
    generator = torch.Generator().manual_seed(0)
    for n in (2, 3, 4):
        model = wrap(n)
        for _ in range(20):
            sizes = torch.randint(1, 30, (9,), generator=generator).tolist()
            graphs = [graph(size) for size in sizes]
            theirs = GeometricsDataParallel.scatter(model, graphs, model.device_ids)
            ours = model.scatter(graphs, model.device_ids)
            assert [b.num_graphs for b in ours] == [b.num_graphs for b in theirs]


def test_follow_batch_and_exclude_keys(wrap):
    model = wrap(2, follow_batch=["x"], exclude_keys=["note"])
    graphs = [graph(3) for _ in range(4)]
    for one in graphs:
        one.note = "x"
    batch, _ = model.scatter(graphs, model.device_ids)
    assert batch.x_batch.tolist() == [0, 0, 0, 1, 1, 1]
    assert "note" not in batch


def test_an_empty_list(wrap):
    assert wrap(2)([]) is None


def test_imported_for_the_first_time_while_patched_it_derives_from_ours():
    module = sys.modules["torch_geometric.nn.data_parallel"]
    try:
        with pyparallel.patched(device_ids=pyparallel.virtual_devices(2)):
            importlib.reload(module)
            model = module.DataParallel(torch.nn.Linear(1, 1))
        assert isinstance(model, pyparallel.DataParallel) and model.device_ids == [0, 1]
    finally:
        importlib.reload(module)


def test_the_example_learns(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [EXAMPLE, "--epochs", "3"])
    example(EXAMPLE).main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 3 and losses[-1] < losses[0] / 3
