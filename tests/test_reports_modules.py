"""Modules as users reported them: parameters in forward, state, methods, hooks, checkpoints."""

import contextlib
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pyparallel
from pyparallel import virtual_devices


class Properties(nn.Module):
    """As models of many libraries ask for their device and dtype."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    @property
    def device(self):
        return next(self.parameters()).device

    @property
    def dtype(self):
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x):
        names = [name for name, _ in self.named_parameters()]
        assert names == ["inner.weight", "inner.bias"] == list(self.state_dict())
        return self.inner(x.to(self.device, self.dtype))


@pytest.mark.report(
    "pytorch#40457",
    "pytorch#49828",
    "pytorch#38493",
    "transformers#8145",
    "transformers#10215",
    "transformers#42446",
    "espnet#2169",
    "BS-RoFormer#25",
    "transformer-xl#123",
    "layout-dm#2",
    "GraphGPT#72",
    "iglue#15",
    "Transformer-TTS#39",
    "detm-arxiv#3",
    "pytorch-meta#82",
    "pytorch-meta#86",
    "pytorch-meta#87",
    "lightning#6413",
    "lightning#6414",
)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dispatch", ["threads", "sequential"])
def test_device_and_dtype_in_forward(dispatch, grad):
    model = Properties().double()
    dp = pyparallel.DataParallel(model, virtual_devices(3), dispatch=dispatch)
    x = torch.randn(6, 2)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(dp(x), model(x))


@pytest.mark.report("lightning#565", "lightning#3301")
def test_a_buffer_written_in_place_counts_steps():
    """An attribute that forward sets is forgotten, on every device, as in torch."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))
            self.attribute = 0

        def forward(self, x):
            self.steps += 1
            self.attribute += 1
            return x

    model = Counting()
    dp = pyparallel.DataParallel(model, virtual_devices(2))
    for _ in range(3):
        dp(torch.ones(4))
    assert model.steps == 3 and model.attribute == 0


def with_method(model, forward):
    model.forward = types.MethodType(forward, model)


def with_partial(model, forward):
    model.forward = functools.update_wrapper(functools.partial(forward, model), model.forward)


def with_decorator(model, forward):
    with_method(model, forward)
    model.forward = torch.autocast("cpu", enabled=False)(model.forward)


def with_closure(model, forward):
    model.forward = lambda x: forward(model, x)


@pytest.mark.behaviour(74)
@pytest.mark.report(
    "trl#6836", "trl#6841", "nncf#3310", "fastai#1435", "peft#805", "peft#1296", "peft#114"
)
@pytest.mark.parametrize("replace", [with_method, with_partial, with_decorator, with_closure])
def test_a_replaced_forward_runs_each_replica(replace):
    used = []

    def forward(self, x):
        used.append(self.weight.data_ptr())
        return F.linear(x, self.weight, self.bias)

    model, x = nn.Linear(2, 2), torch.randn(4, 2)
    replace(model, forward)
    out = pyparallel.DataParallel(model, virtual_devices(2))(x)
    assert len(set(used)) == 2
    out.sum().backward()
    torch.testing.assert_close(model.weight.grad, x.sum(0).expand(2, 2))


@pytest.mark.behaviour(89)
@pytest.mark.report("pytorch#94636", "transformers#25152")
def test_a_compiled_forward_runs_each_replica():
    torch._dynamo.reset()  # it compiles one function, as nn.Linear.forward, eight times only
    used = []

    def backend(graph, inputs):
        def run(*args):
            used.extend(arg.data_ptr() for arg in args if arg.shape == (5, 3))
            return graph(*args)

        return run

    model, x = nn.Linear(3, 5), torch.randn(4, 3)
    model.forward = torch.compile(model.forward, backend=backend)
    out = pyparallel.DataParallel(model, virtual_devices(2))(x)
    assert len(set(used)) == 2
    torch.testing.assert_close(out, F.linear(x, model.weight, model.bias))


@pytest.mark.report("trl#6836")
def test_a_method_call_through_the_wrapper():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)

        def forward(self, model, inputs):
            assert model is self
            return model.lin(inputs["x"]) * inputs["beta"]

    model, x = Model(), torch.randn(4, 2)
    dp = pyparallel.DataParallel(model, virtual_devices(2))
    out = dp(model, {"x": x, "beta": torch.tensor(2.0)})
    torch.testing.assert_close(out, 2 * model.lin(x))


class Hook:
    """Keeps what it has seen, as the hooks of fastai's U-Net."""

    def __init__(self):
        self.stored = None

    def __call__(self, module, args, output):
        self.stored = output


def keep_on_module(module, args, output):
    module.stored = output


class UNet(nn.Module):
    def __init__(self, on_module):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(2, 2), nn.Linear(4, 2)
        self.hook = Hook()
        self.hooked = [self.encoder]
        self.on_module = on_module
        self.encoder.register_forward_hook(keep_on_module if on_module else self.hook)

    def forward(self, x):
        out = self.encoder(x)
        holder = self.hooked[0] if self.on_module else self.hook
        return self.decoder(torch.cat([out, holder.stored], dim=1))


@pytest.mark.report("fastai#1435", "fastai2#450", "peft#3043")
@pytest.mark.parametrize(
    "on_module, dispatch", [(True, "threads"), (True, "sequential"), (False, "sequential")]
)
def test_hooks_keep_what_they_see_on_the_module_or_in_sequence(on_module, dispatch):
    """One object for all replicas holds one value: in threads that is anybody's."""
    model = UNet(on_module)
    dp = pyparallel.DataParallel(model, virtual_devices(3), dispatch=dispatch)
    for _ in range(3):
        x = torch.randn(6, 2)
        torch.testing.assert_close(dp(x), model(x))


@pytest.mark.report("aimet#2708")
def test_what_forward_patches_on_a_replica_stays_there():
    class Patching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            with contextlib.ExitStack() as stack:
                old = self.inner.forward
                stack.callback(setattr, self.inner, "forward", old)
                self.inner.forward = lambda x: 2 * old(x)
                return self.inner(x)

    model, x = Patching(), torch.randn(4, 2)
    dp = pyparallel.DataParallel(model, virtual_devices(2), dispatch="threads")
    for _ in range(3):
        torch.testing.assert_close(dp(x), 2 * F.linear(x, model.inner.weight, model.inner.bias))
    assert "forward" not in model.inner.__dict__


@pytest.mark.report("pytorch#17540", "pytorch#4216")
def test_every_change_between_forwards_reaches_the_replicas():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.pool = nn.Module()
            self.pool.scale = 1.0
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.pool.scale

    model, x = Scaled(), torch.randn(4, 2)
    dp = pyparallel.DataParallel(model, virtual_devices(2))
    torch.testing.assert_close(dp(x), model(x))
    dp.module.pool.scale *= 2
    torch.testing.assert_close(dp(x), model(x))
    dp.module.layers.append(nn.Linear(2, 2))
    torch.testing.assert_close(dp(x), model(x))


class Passthrough(pyparallel.DataParallel):
    """Has the attributes of the module, too, where it has none of that name."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@pytest.mark.report(
    "pytorch#16885",
    "pytorch#1341",
    "pytorch#8071",
    "pytorch#43329",
    "mlf-core#41",
    "tutorials#445",
    "tutorials#836",
    "fastai#1231",
    "transformers#20583",
    "alexa-slu#3",
    "Mask_RCNN#2",
    "peft#114",
)
def test_a_subclass_hands_attributes_through():
    class Model(nn.Linear):
        config = "config"

        def reset(self):
            return self.in_features

    plain = pyparallel.DataParallel(Model(2, 3), virtual_devices(2))
    with pytest.raises(AttributeError, match="'DataParallel' object has no attribute 'config'"):
        _ = plain.config
    assert plain.module.reset() == 2
    dp = Passthrough(Model(2, 3), virtual_devices(2))
    assert dp.config == "config" and dp.reset() == 2 and dp.device_ids == [0, 1]
    assert dp(torch.ones(4, 2)).shape == (4, 3)
    with pytest.raises(AttributeError, match="nothing"):
        _ = dp.nothing


@pytest.mark.report(
    "pytorch#3805",
    "pytorch#9176",
    "pytorch#41048",
    "pytorch#53224",
    "pytorch-classification#27",
    "ray#30705",
    "ST-TR#17",
)
def test_checkpoints_with_and_without_the_prefix():
    model = nn.Linear(2, 2)
    dp = pyparallel.DataParallel(nn.Linear(2, 2), virtual_devices(2))
    dp.module.load_state_dict(model.state_dict())
    assert torch.equal(dp.module.weight, model.weight)
    saved = dp.state_dict()
    assert list(saved) == ["module.weight", "module.bias"]
    other = nn.Linear(2, 2)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
    other.load_state_dict(saved)
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(RuntimeError, match="Missing key.*module.weight"):
        dp.load_state_dict(model.state_dict())


@pytest.mark.report("apex#160", "SimSiam#24", "Synchronized-BatchNorm#42", "HRNet#183")
@pytest.mark.report("Synchronized-BatchNorm#1", "pytorch#2584", "pytorch#38940")
def test_norms_that_do_not_depend_on_the_chunk():
    """SyncBatchNorm is DistributedDataParallel's; GroupNorm gives the same on any devices."""
    net, x = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4)), torch.randn(10, 4)
    torch.testing.assert_close(pyparallel.DataParallel(net, virtual_devices(4))(x), net(x))
