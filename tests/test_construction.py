"""The constructor: devices, attributes, what it does to the module, and pass-through."""

import inspect
import types
import warnings

import pytest
import torch
from networks import Scaled
from torch import nn

from pyparallel.data_parallel import DataParallel
from pyparallel.devices import virtual_devices

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without GPUs")


class Anything(nn.Module):
    """Returns its arguments, and knows where it was moved."""

    def forward(self, *args, **kwargs):
        return args, kwargs

    def to(self, device):
        self.moved_to = device
        return self


@pytest.fixture
def four_virtual_devices(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "4")


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs in name, of which the second is current; returns a function that sizes them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)

    def size(*memory_and_cores):
        properties = [
            types.SimpleNamespace(total_memory=memory, multi_processor_count=cores)
            for memory, cores in memory_and_cores
        ]
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)

    size((80, 100), (80, 100))
    return size


def warned(make):
    """Returns what ``make`` returns, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = make()
    return result, [(entry.category, str(entry.message)) for entry in caught]


@pytest.mark.behaviour(1)
def test_the_signature_begins_with_torchs():
    ours = list(inspect.signature(DataParallel.__init__).parameters.values())
    torchs = list(inspect.signature(nn.DataParallel.__init__).parameters.values())
    for our, their in zip(ours, torchs, strict=False):
        assert (our.name, our.kind, our.default) == (their.name, their.kind, their.default)
    assert all(more.kind is more.KEYWORD_ONLY for more in ours[len(torchs) :])


@pytest.mark.behaviour(1)
def test_the_class_can_be_subscripted():
    model: DataParallel[Scaled] = DataParallel[Scaled](Scaled(), virtual_devices(2))
    assert type(model) is DataParallel


@pytest.mark.behaviour(5, 7, 9, 10, 11, 13)
@pytest.mark.parametrize("output_device", [None, 1, "cuda:0", torch.device("cuda"), -1])
@pytest.mark.parametrize(
    "device_ids",
    [
        None,
        [1, 0],
        [0, 0, 1],
        (1,),
        range(2),
        ["cuda:1", torch.device("cuda", 0)],
        ["cuda"],
        [torch.device("cuda"), 0],
    ],
)
def test_attributes_are_torchs(gpus, device_ids, output_device):
    ours, theirs = (
        cls(Anything(), device_ids, output_device, dim=3) for cls in (DataParallel, nn.DataParallel)
    )
    for name in ("device_ids", "output_device", "dim", "src_device_obj"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert all(type(index) is int for index in [*ours.device_ids, ours.output_device])
    # One device: the module goes there. Several: the user moves it.
    assert vars(ours.module).get("moved_to") == vars(theirs.module).get("moved_to")
    assert hasattr(ours.module, "moved_to") == (len(ours.device_ids) == 1)


@pytest.mark.behaviour(12, 185)
@pytest.mark.parametrize(
    "sizes, culprits",
    [
        ([(80, 100), (80, 100)], []),
        ([(80, 100), (60, 75)], []),
        ([(80, 100), (59, 10)], [(1, 0)]),
        ([(40, 10), (80, 100)], [(0, 1)]),
        ([(80, 74), (60, 100)], [(0, 1)]),
    ],
)
def test_unequal_gpus_warn_in_torchs_words(gpus, sizes, culprits):
    gpus(*sizes)
    _, ours = warned(lambda: DataParallel(Anything()))
    _, theirs = warned(lambda: nn.DataParallel(Anything()))
    assert ours == theirs and len(ours) == len(culprits)
    for (kind, text), (weak, strong) in zip(ours, culprits, strict=True):
        assert kind is UserWarning
        assert f"exclude GPU {weak} which" in text and f"cores of GPU {strong}." in text


@pytest.mark.behaviour(6)
@pytest.mark.parametrize("output_device", [None, 1])
def test_an_empty_list_passes_through_where_there_are_gpus(gpus, output_device):
    model = DataParallel(Anything(), [], output_device)
    thing = object()
    assert model(thing, key=thing) == ((thing,), {"key": thing})
    assert model.device_ids == [] and model.output_device is None


@pytest.mark.behaviour(8)
def test_the_cpu_is_a_virtual_device_but_not_beside_gpus(gpus):
    assert DataParallel(Scaled(), ["cpu", CPU]).device_ids == [0, 1]
    with pytest.raises(ValueError, match="either GPUs or virtual devices.*cuda:0, cpu:1"):
        DataParallel(Scaled(), [0, "cpu:1"])
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        nn.DataParallel(Scaled(), ["cpu", CPU])


@pytest.mark.behaviour(9, 131)
@pytest.mark.parametrize("output_device", ["cpu", CPU])
def test_gpus_may_join_in_host_memory(gpus, output_device):
    model = DataParallel(Anything(), output_device=output_device)
    assert model.output_device == CPU
    with pytest.raises(ValueError, match="Expected a non cpu device, but got: cpu"):
        nn.DataParallel(Anything(), output_device=output_device)


@pytest.mark.report("pytorch#143239")
@pytest.mark.behaviour(3)
@no_gpu
def test_accelerators_that_are_no_gpus_of_cuda(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert DataParallel(Anything()).device_ids == nn.DataParallel(Anything()).device_ids == []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert DataParallel(Anything()).device_ids == []
    with pytest.raises(ValueError, match="Expected a GPU or a virtual device, but got: xpu:0"):
        DataParallel(Anything(), ["xpu:0"])


@pytest.mark.report("pytorch#17065", "pytorch#17129", "pytorch#17362", "pytorch#17363")
@pytest.mark.behaviour(14)
def test_the_module_may_be_moved_after_it_was_wrapped():
    net = nn.Linear(3, 2, device="meta")
    weight = net.weight
    model = DataParallel(net, virtual_devices(2))
    assert net.weight is weight
    model.to_empty(device="cpu")
    nn.init.ones_(net.weight), nn.init.zeros_(net.bias)
    assert model(torch.ones(4, 3)).tolist() == [[3, 3]] * 4


@pytest.mark.behaviour(15)
def test_repr_is_torchs():
    ours, theirs = (cls(nn.ReLU()) for cls in (DataParallel, nn.DataParallel))
    assert repr(ours) == repr(theirs) == "DataParallel(\n  (module): ReLU()\n)"


@pytest.mark.behaviour(7, 8, 10, 172)
@pytest.mark.parametrize(
    "device_ids, indices",
    [
        (["cpu:0", "cpu:1"], [0, 1]),
        ([torch.device("cpu", 2), torch.device("cpu", 0)], [2, 0]),
        ([CPU] * 3, [0, 1, 2]),
        (["cpu", "cpu"], [0, 1]),
        (virtual_devices(4), [0, 1, 2, 3]),
        (("cpu:1", "cpu:1"), [1, 1]),
    ],
)
def test_attributes_with_virtual_devices(device_ids, indices):
    net = Scaled()
    model = DataParallel(net, device_ids, dim=1)
    assert model.module is net
    assert model.device_ids == indices and all(type(i) is int for i in model.device_ids)
    assert model.output_device == indices[0] and type(model.output_device) is int
    assert model.src_device_obj == CPU and model.src_device_obj.index is None
    assert model.dim == 1
    assert isinstance(model, nn.DataParallel)


@pytest.mark.behaviour(5)
def test_ints_and_none_are_virtual_devices_if_the_environment_says_so(four_virtual_devices):
    assert DataParallel(Scaled()).device_ids == [0, 1, 2, 3]
    model = DataParallel(Scaled().eval(), device_ids=[2, 1], output_device=1)
    assert (model.device_ids, model.output_device) == ([2, 1], 1)
    assert model(torch.ones(4, 3)).shape == (4, 2)


def test_ints_keep_their_meaning_when_the_environment_changes(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "2")
    model = DataParallel(Scaled())
    monkeypatch.delenv("PYPARALLEL_VIRTUAL_DEVICES")
    assert model(torch.ones(4, 3)).shape == (4, 2)


@pytest.mark.report("pytorch#50510", "pytorch#51104")
@pytest.mark.parametrize(
    "output_device, expected",
    [("cpu:1", 1), (torch.device("cpu", 1), 1), (1, 1), ("cpu", 0), (CPU, 0), (None, 0)],
)
def test_output_device(four_virtual_devices, output_device, expected):
    model = DataParallel(Scaled().eval(), output_device=output_device)
    assert model.output_device == expected
    assert model(torch.ones(4, 3)).shape == (4, 2)


@pytest.mark.behaviour(9, 131, 185)
@pytest.mark.parametrize("n", [1, 2])
def test_output_device_minus_1_is_host_memory_with_torchs_warning(n):
    model, caught = warned(lambda: DataParallel(nn.ReLU(), virtual_devices(n), output_device=-1))
    assert caught == [] and model.output_device == -1
    for _ in range(2):
        out, caught = warned(lambda: model(torch.ones(2)))
        assert out.tolist() == [1, 1]
        # One device joins nothing.
        assert [kind for kind, _ in caught] == [FutureWarning] * (n > 1)
    assert all(
        text == "Using -1 to represent CPU tensor is deprecated. Please use a device object or "
        'string instead, e.g., "cpu".'
        for _, text in caught
    )


@pytest.mark.behaviour(4, 17)
@no_gpu
@pytest.mark.parametrize("device_ids", [None, [], [0, 1], ["cuda:0"], [torch.device("cuda", 1)]])
def test_without_devices_the_module_runs_as_it_is(device_ids):
    model = DataParallel(Anything(), device_ids, dim=2)
    assert model.device_ids == [] and model.dim == 2
    assert model.output_device is None and model.src_device_obj is None
    x, thing = torch.ones(3), object()
    args, kwargs = model(x, thing, key=x)
    assert args[0] is x and args[1] is thing and kwargs["key"] is x


@no_gpu
def test_bad_devices_are_refused(four_virtual_devices):
    with pytest.raises(ValueError, match="4 is not there"):
        DataParallel(Scaled(), [4])
    with pytest.raises(ValueError, match="0 is not there"):
        DataParallel(Scaled(), ["cpu:0", "cuda:0"])
    with pytest.raises(RuntimeError, match="non-negative device index, but got -3"):
        DataParallel(Scaled(), [0, -3])
    with pytest.raises(ValueError, match="but got: mps"):
        DataParallel(Scaled(), ["mps:0"])
