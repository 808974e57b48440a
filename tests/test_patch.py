"""``patched``: torch's class is exchanged wherever a module holds it, and comes back."""

import abc
import copy
import io
import pickle
import sys
import threading
import types

import pytest
import torch
from torch import nn

import pyparallel
from pyparallel import patched, virtual_devices

TORCHS = (nn.DataParallel,)  # in a tuple, which no patch looks into
TORCHS_HOME = "cuda" if torch.cuda.is_available() else "cpu"  # where its wrappers run
PLACES = [
    ("torch.nn", "DataParallel"),
    ("torch.nn.parallel", "DataParallel"),
    ("torch.nn.parallel.data_parallel", "DataParallel"),
    ("some_library", "Parallel"),
]


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """A library that took the class under another name when it was imported."""
    module = types.ModuleType("some_library")
    module.Parallel = TORCHS[0]
    monkeypatch.setitem(sys.modules, "some_library", module)
    yield module
    assert held() == {TORCHS[0]}, "a test left its patch"


def held():
    """What the modules hold."""
    return {vars(sys.modules[module])[name] for module, name in PLACES}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)


def test_every_module_that_holds_the_class_makes_ours_and_gets_its_own_back(library):
    with patched(device_ids=virtual_devices(2)):
        assert len(held()) == 1 and held() != {TORCHS[0]}
        for cls in (nn.DataParallel, nn.parallel.DataParallel, library.Parallel):
            model = cls(Net())
            assert type(model) is pyparallel.DataParallel and model.device_ids == [0, 1]
    assert held() == {TORCHS[0]}
    assert type(nn.DataParallel(Net())) is TORCHS[0]
    assert model(torch.ones(4, 3)).shape == (4, 2), "a wrapper outlives the patch"


def test_arguments_of_the_call_win_and_none_leaves_the_default():
    two, three = virtual_devices(2), virtual_devices(3)
    with patched(device_ids=two, split="balanced", dim=1):
        model = nn.DataParallel(Net(), three)
        assert (model.device_ids, model.split, model.dim) == ([0, 1, 2], "balanced", 1)
        model = nn.DataParallel(Net(), None, dim=0)
        assert (model.device_ids, model.split, model.dim) == ([0, 1], "balanced", 0)
        model = nn.DataParallel(module=Net(), output_device="cpu:1", split="chunk")
        assert (model.output_device, model.split) == (1, "chunk")


def test_an_iterator_of_devices_serves_all_calls():
    with patched(device_ids=(device for device in virtual_devices(2))):
        assert [nn.DataParallel(Net()).device_ids for _ in range(2)] == [[0, 1], [0, 1]]


def test_without_defaults_the_wrapper_is_as_if_made_by_hand(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", "3")
    with patched():
        assert nn.DataParallel(Net()).device_ids == [0, 1, 2]
        assert nn.DataParallel[Net](Net()).device_ids == [0, 1, 2]


@pytest.mark.parametrize("name", ["spilt", "module"])
def test_unknown_defaults_are_refused_before_anything_changes(name):
    with pytest.raises(TypeError, match=f"unexpected argument '{name}'; it takes device_ids, "):
        patched(**{name: 1})


def test_bad_calls_are_refused():
    with patched():
        with pytest.raises(TypeError, match="missing a required argument: 'module'"):
            nn.DataParallel()
        with pytest.raises(TypeError, match="too many positional arguments"):
            nn.DataParallel(Net(), None, None, 0, "balanced")


@pytest.mark.behaviour(172)
def test_isinstance_and_issubclass_answer_as_without_the_patch():
    class Torchs(TORCHS[0]):
        pass

    wrappers = [TORCHS[0](Net()), Torchs(Net()), pyparallel.DataParallel(Net())]
    with patched():
        wrappers.append(nn.DataParallel(Net()))
        for wrapper in wrappers:
            assert isinstance(wrapper, nn.DataParallel)
            assert issubclass(type(wrapper), nn.DataParallel)
            assert type(wrapper) is not nn.DataParallel
        assert not isinstance(Net(), nn.DataParallel)
        assert not issubclass(Net, nn.DataParallel)
        assert not isinstance(wrappers[0], pyparallel.DataParallel)
        assert issubclass(nn.DataParallel, pyparallel.DataParallel)
    assert all(isinstance(wrapper, nn.DataParallel) for wrapper in wrappers)


def test_everything_is_restored_after_an_exception(library):
    with pytest.raises(ZeroDivisionError), patched():
        assert library.Parallel is not TORCHS[0]
        raise ZeroDivisionError
    assert held() == {TORCHS[0]}


def test_the_patch_entered_last_counts():
    with patched(dim=1, split="balanced"):
        outer = nn.DataParallel
        with patched(dim=2):
            assert len(held()) == 1
            model = nn.DataParallel(Net())
            assert (model.dim, model.split) == (2, "chunk")
        assert held() == {outer}
        assert nn.DataParallel(Net()).dim == 1


def test_patches_may_end_in_any_order():
    first, second, third = patched(dim=1), patched(dim=2), patched(dim=3)
    for patch in (first, second, third):
        patch.start()
    second.stop()
    assert nn.DataParallel(Net()).dim == 3
    third.stop()
    assert nn.DataParallel(Net()).dim == 1
    first.stop()
    first.stop()
    assert held() == {TORCHS[0]}


def test_start_and_stop_for_notebooks():
    patch = patched().start()
    try:
        assert type(nn.DataParallel(Net())) is pyparallel.DataParallel
        with pytest.raises(RuntimeError, match="active already"), patch:
            pass
    finally:
        patch.stop()
    with patch:
        assert type(nn.DataParallel(Net())) is pyparallel.DataParallel


def test_the_patch_is_seen_in_other_threads():
    seen = []
    with patched(dim=1):
        thread = threading.Thread(target=lambda: seen.append(nn.DataParallel(Net()).dim))
        thread.start()
        thread.join(10)
    assert seen == [1]


def test_patches_of_several_threads_leave_nothing_behind():
    wrong = []

    def work(dim):
        for _ in range(20):
            with patched(dim=dim):
                if type(nn.DataParallel(Net())) is not pyparallel.DataParallel:
                    wrong.append(dim)

    threads = [threading.Thread(target=work, args=[dim]) for dim in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and held() == {TORCHS[0]}


def test_as_a_decorator_of_a_function_that_calls_itself():
    @patched(dim=1)
    def dims(depth):
        return [nn.DataParallel(Net()).dim] + (dims(depth - 1) if depth else [])

    assert dims(2) == [1, 1, 1]
    assert held() == {TORCHS[0]}


def test_a_module_imported_meanwhile_gets_torchs_class_at_the_end(monkeypatch):
    late = types.ModuleType("late_library")
    with patched():
        exec("from torch.nn import DataParallel", late.__dict__)
        monkeypatch.setitem(sys.modules, "late_library", late)
        assert type(late.DataParallel(Net())) is pyparallel.DataParallel
    assert late.DataParallel is TORCHS[0]


def test_a_class_derived_meanwhile_derives_from_ours_with_the_defaults():
    with patched(device_ids=virtual_devices(2), split="balanced"):

        class Derived(nn.DataParallel, abc.ABC):
            def __init__(self, module, device_ids=None):
                super().__init__(module, device_ids)

            def gather(self, outputs, output_device):
                return len(outputs), super().gather(outputs, output_device)

    model = Derived(Net())
    assert type(model) is Derived and isinstance(model, pyparallel.DataParallel)
    assert (model.device_ids, model.split) == ([0, 1], "balanced")
    count, output = model(torch.ones(3, 3))
    assert count == 2 and output.shape == (3, 2)
    assert Derived(Net(), virtual_devices(3)).device_ids == [0, 1, 2]
    assert not isinstance(TORCHS[0](Net()), Derived)
    assert not issubclass(pyparallel.DataParallel, Derived)


class NamesItsBase:
    """Code of the time before ``super()`` had no arguments."""

    def __init__(self, module):
        nn.DataParallel.__init__(self, module)

    def forward(self, x):
        return nn.DataParallel.forward(self, x) + 1


def test_classes_derived_before_may_name_their_base_class():
    class Old(NamesItsBase, TORCHS[0]):
        pass

    with patched():
        model = Old(Net().to(TORCHS_HOME))
        assert not isinstance(model, pyparallel.DataParallel)
        x = torch.ones(4, 3, device=TORCHS_HOME)
        assert torch.equal(model(x), model.module(x) + 1)


def test_classes_derived_meanwhile_may_name_their_base_class():
    with patched(device_ids=virtual_devices(2)):

        class New(NamesItsBase, nn.DataParallel):
            def gather(self, outputs, output_device):
                assert len(outputs) == 2
                return nn.DataParallel.gather(self, outputs, output_device)

        model = New(Net())
        x = torch.ones(4, 3)
        torch.testing.assert_close(model(x), model.module(x) + 1)


def test_our_wrappers_can_be_copied_and_saved_meanwhile_and_loaded_afterwards():
    with patched(device_ids=virtual_devices(2)):
        model = nn.DataParallel(Net())
        assert type(copy.deepcopy(model)) is pyparallel.DataParallel
        buffer = io.BytesIO()
        torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert type(loaded) is pyparallel.DataParallel
    x = torch.ones(4, 3)
    assert torch.equal(loaded(x), model(x))


def test_wrappers_of_torchs_that_were_saved_before_stay_torchs():
    model = TORCHS[0](Net().to(TORCHS_HOME))
    saved = pickle.dumps(model)
    x = torch.ones(4, 3, device=TORCHS_HOME)
    with patched():
        loaded = pickle.loads(saved)
        assert type(loaded) is TORCHS[0]
        assert type(copy.deepcopy(model)) is TORCHS[0]
        assert torch.equal(loaded(x), model(x))
        with pytest.raises(pickle.PicklingError, match="not the same object"):
            pickle.dumps(model)
    assert type(pickle.loads(pickle.dumps(loaded))) is TORCHS[0]


def test_the_stand_in_looks_like_the_class():
    with patched():
        assert nn.DataParallel.__name__ == "DataParallel"
        assert nn.DataParallel.__module__ == "torch.nn.parallel.data_parallel"
        assert nn.DataParallel.__doc__ == pyparallel.DataParallel.__doc__


def test_modules_of_any_kind_are_no_obstacle(monkeypatch):
    class Odd:
        __slots__ = ()

    class Unequal:
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    module = types.ModuleType("odd_library")
    module.thing = Unequal()
    monkeypatch.setitem(sys.modules, "odd_library", module)
    monkeypatch.setitem(sys.modules, "odd", Odd())
    monkeypatch.setitem(sys.modules, "none", None)
    with patched():
        assert type(nn.DataParallel(Net())) is pyparallel.DataParallel
