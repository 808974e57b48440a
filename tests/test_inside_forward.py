"""What forward finds in its replica, what it may do there, and what of that stays."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver

from pyparallel import DataParallel

pytestmark = pytest.mark.usefixtures("on_the_first_device")

N = 3


class Body(nn.Module):
    """A layer, and a forward that the test gives."""

    def __init__(self, body=None):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.body = [body]

    def forward(self, x):
        return self.body[0](self, x)


@pytest.fixture
def wrap(make_devices):
    return lambda module, n=N, **options: DataParallel(
        module, make_devices(n), dispatch="sequential", **options
    )


@pytest.mark.behaviour(56)
@pytest.mark.parametrize("own", [False, True])
def test_any_collection_of_devices(own, wrap):
    model = wrap(nn.Linear(2, 2))
    module = model.module if own else nn.Linear(2, 2)
    for ids in (model.device_ids[:2], tuple(model.device_ids[:2]), dict.fromkeys(model.device_ids)):
        replicas = model.replicate(module, ids)
        assert len(replicas) == len(ids)
        assert all(torch.equal(replica.weight, module.weight) for replica in replicas)
    assert model.replicate(module, []) == []


@pytest.mark.behaviour(58)
def test_buffers_get_no_gradient_unless_they_require_one(wrap):
    def body(self, x):
        seen.append([b.requires_grad for b in self.buffers()])
        return x * self.trained * self.fixed

    seen = []
    module = Body(body)
    module.register_buffer("fixed", torch.ones(2))
    module.register_buffer("trained", torch.ones(2, requires_grad=True))
    wrap(module)(torch.ones(N, 2)).sum().backward()
    assert seen == [[False, True]] * N
    assert module.fixed.grad is None and module.trained.grad.tolist() == [N, N]


@pytest.mark.behaviour(63)
@pytest.mark.parametrize("grad", [False, True])
def test_a_replica_is_made_without_its_constructor(grad, wrap):
    made, seen = [], []

    class Made(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            made.append(self)
            self.tag = object()

        def forward(self, x):
            seen.append(self)
            assert type(self) is Made and self.tag is made[0].tag and self._is_replica
            assert list(self._former_parameters) == list(self._parameters) == ["weight", "bias"]
            assert self._former_parameters["weight"] is self.weight is self._parameters["weight"]
            return super().forward(x)

    model = wrap(Made())
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            model(torch.ones(N, 2))
    assert len(made) == 1 and len(seen) == 2 * N and made[0] not in seen
    assert not hasattr(made[0], "_is_replica") and not hasattr(made[0], "_former_parameters")


@pytest.mark.behaviour(64, 65)
@pytest.mark.parametrize("grad", [False, True])
def test_all_replicas_have_parameters_alike(grad, wrap):
    def body(self, x):
        named = dict(self.named_parameters())
        assert list(named) == list(self.state_dict()) == ["layer.weight", "layer.bias"]
        for name, parameter in named.items():
            assert isinstance(parameter, nn.Parameter) and parameter.device == x.device
            assert self.get_parameter(name) is parameter
        assert next(self.parameters()) is self.layer.weight
        return self.layer(x)

    with torch.set_grad_enabled(grad):
        wrap(Body(body))(torch.ones(N, 2))


@pytest.mark.behaviour(64)
def test_parameters_cannot_be_frozen_in_forward(wrap):
    """An error, because the gradients of this forward would flow nevertheless."""
    module = Body(lambda self, x: (self.layer.requires_grad_(False), self.layer(x))[1])
    with pytest.raises(RuntimeError, match="requires_grad flags of leaf variables"):
        wrap(module)(torch.ones(N, 2))
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.behaviour(66, 71)
def test_buffers_are_on_the_replicas_device(wrap):
    module = nn.Sequential(nn.BatchNorm1d(2), Body(lambda self, x: x))
    module[1].register_buffer("hidden", torch.ones(2), persistent=False)
    model = wrap(module)
    for replica, device in zip(
        model.replicate(module, model.device_ids), model._devices(model.device_ids), strict=True
    ):
        assert [name for name, _ in replica.named_buffers()] == [
            n for n, _ in module.named_buffers()
        ]
        assert all(buffer.device == device.torch_device for buffer in replica.buffers())
        assert "1.hidden" not in replica.state_dict()


@pytest.mark.behaviour(67, 68)
def test_frozen_and_unused_parameters_get_no_gradient(wrap):
    """So an optimizer leaves them alone. One that a single replica uses gets its gradient."""

    def body(self, x):
        return self.layer(x) + (self.last(x) if x[0, 0] == N - 1 else 0)

    module = Body(body)
    module.unused, module.last = nn.Linear(2, 2), nn.Linear(2, 2)
    module.layer.weight.requires_grad_(False)
    x = torch.arange(float(N)).view(N, 1).expand(N, 2)
    wrap(module)(x).sum().backward()
    assert module.layer.weight.grad is None and module.layer.bias.grad.tolist() == [N, N]
    assert all(p.grad is None for p in module.unused.parameters())
    assert module.last.bias.grad.tolist() == [1, 1]
    assert module.last.weight.grad.tolist() == [[N - 1.0] * 2] * 2


class Holder:
    def __init__(self, layer):
        self.layer = layer


@pytest.mark.behaviour(73)
def test_what_other_objects_hold_is_shared(wrap):
    """Modules are found in attributes and in lists, dicts and closures there, not in objects."""
    module = Body(lambda self, x: x)
    module.holder, module.scale = Holder(module.layer), torch.ones(2)
    model = wrap(module)
    for replica in model.replicate(module, model.device_ids):
        assert replica.layer is not module.layer
        assert replica.holder.layer is module.layer and replica.scale is module.scale
    module.body = [lambda self, x: self.holder.layer(x)]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        model(torch.ones(N, 2))


@pytest.mark.behaviour(74)
def test_variables_of_closures_are_seen_to_change(wrap):
    """A function in an attribute finds the replica's modules, also after they were exchanged."""

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
            layer, table, calls = self.layers[0], {}, 0

            def forward(x):
                nonlocal calls
                calls += 1
                return table.get("layer", layer)(x)

            def switch(to, by_table=False):
                nonlocal layer
                if by_table:
                    table["layer"] = to
                else:
                    layer = to
                return calls

            self.forward, self.switch = forward, switch

    module, x = Switched(), torch.randn(N, 2)
    model = wrap(module)
    for layer, by_table in ((0, False), (1, False), (2, True)):
        module.switch(module.layers[layer], by_table)
        for _ in range(2):
            torch.testing.assert_close(model(x), module.layers[layer](x))
    assert module.switch(None) == 6 * N  # numbers are shared


@pytest.mark.behaviour(75)
def test_rebound_attributes_are_forgotten_and_lists_are_shared(wrap):
    def body(self, x):
        self.log.append(len(x))
        self.count += 1
        self.text = "changed"
        assert self.count == 1
        return x

    module = Body(body)
    module.log, module.count, module.text = [], 0, "text"
    model = wrap(module)
    for _ in range(2):
        model(torch.ones(2 * N - 1, 2))
    assert module.log == [2] * (N - 1) + [1] + [2] * (N - 1) + [1]
    assert module.count == 0 and module.text == "text"


@pytest.mark.behaviour(76, 77)
def test_hooks_run_in_every_replica_in_order(wrap):
    module, seen = Body(lambda self, x: self.layer(x)), []
    module.layer.register_forward_pre_hook(lambda m, args: seen.append(("pre", len(args[0]))))
    module.layer.register_forward_hook(lambda m, args, out: seen.append(("first", len(out))))
    model = wrap(module)
    model(torch.ones(2 * N - 1, 2))
    last = module.layer.register_forward_hook(lambda m, args, out: seen.append(("last", m)))
    assert seen == [("pre", 2), ("first", 2)] * (N - 1) + [("pre", 1), ("first", 1)]
    seen.clear()
    model(torch.ones(N, 2))
    assert [name for name, _ in seen] == ["pre", "first", "last"] * N
    assert len({id(m) for name, m in seen if name == "last"}) == N
    last.remove()
    model(torch.ones(N, 2))
    assert len(seen) == 5 * N


@pytest.mark.behaviour(76)
def test_a_hook_that_forward_registers_and_removes(wrap):
    """The dict of hooks is the original's, so one that is not removed stays there."""
    seen, keep = [], [False]

    def body(self, x):
        handle = self.layer.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
        out = self.layer(x)
        if not keep[0]:
            handle.remove()
        return out

    module = Body(body)
    model = wrap(module)
    y = model(torch.randn(N, 2))
    assert torch.equal(torch.cat([out.to(y.device) for out in seen]), y)
    assert not module.layer._forward_hooks
    keep[0] = True
    model(torch.randn(N, 2))
    assert len(module.layer._forward_hooks) == N


@pytest.mark.behaviour(78)
def test_backward_hooks_of_modules_run_once_for_each_replica(wrap):
    module, seen = Body(lambda self, x: self.layer(x)), []
    module.layer.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0], go[0])))
    x = torch.ones(2 * N - 1, 2, requires_grad=True)
    wrap(module)(x).sum().backward()
    assert sorted(len(grad) for _, grad in seen) == [1] + [2] * (N - 1)
    for grad_input, grad_output in seen:
        torch.testing.assert_close(grad_input, grad_output @ module.layer.weight.to(grad_output))


@pytest.mark.behaviour(79)
def test_the_mode_is_copied_and_what_forward_makes_of_it_is_forgotten(wrap):
    def body(self, x):
        seen.append((self.training, self.layer.training))
        self.train(not self.training)
        return x

    seen = []
    module = Body(body)
    model = wrap(module)
    for mode in (True, False, True):
        model.train(mode)
        model(torch.ones(N, 2))
        assert seen == [(mode, mode)] * N and module.training is module.layer.training is mode
        seen.clear()


@pytest.mark.behaviour(80)
def test_zero_grad_in_forward_warns_and_does_nothing(wrap):
    def body(self, x):
        self.zero_grad()
        return self.layer(x)

    model = wrap(Body(body))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"has no effect. The parameters are copied") as caught:
            model(torch.ones(N, 2)).sum().backward()
        assert [w.category for w in caught] == [UserWarning] * N
    assert model.module.layer.bias.grad.tolist() == [2 * N, 2 * N]


@pytest.mark.behaviour(81)
@pytest.mark.parametrize("dispatch", ["sequential", "threads"])
def test_backward_in_forward_adds_to_the_originals(dispatch, make_devices):
    def body(self, x):
        self.layer(x).sum().backward()
        return self.layer(x)

    module = Body(body)
    model = DataParallel(module, make_devices(N), dispatch=dispatch)
    y = model(torch.ones(N, 2))
    assert module.layer.bias.grad.tolist() == [N, N]
    y.sum().backward()
    assert module.layer.bias.grad.tolist() == [2 * N, 2 * N]


@pytest.mark.behaviour(81)
def test_backward_in_forward_without_gradients_outside(wrap):
    """An error, because the gradients of other replicas than the first would be lost."""

    def body(self, x):
        with torch.enable_grad():
            self.layer(x).sum().backward()
        return x

    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        wrap(Body(body))(torch.ones(N, 2))


@pytest.mark.behaviour(87)
@pytest.mark.filterwarnings("ignore:Please use quant_min")
def test_observers_of_quantization_work_on_the_first_chunk(wrap):
    """Their buffers are written in place, and change their sizes at the first batch."""

    def make():
        return nn.Sequential(
            nn.Linear(2, 2),
            FakeQuantize(MovingAveragePerChannelMinMaxObserver, ch_axis=1, dtype=torch.qint8),
        )

    module, reference = make(), make()
    reference.load_state_dict(module.state_dict())
    model = wrap(module)
    for _ in range(3):
        x = torch.randn(2 * N, 2)
        reference(x[:2])
        model(x).sum().backward()
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], expected)
    assert module[1].scale.shape == (2,)


@pytest.mark.behaviour(91)
@pytest.mark.parametrize("grad", [False, True])
def test_replicas_can_be_copied(grad, wrap):
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with torch.set_grad_enabled(grad):
        for replica in model.replicate(model.module, model.device_ids):
            twin = copy.deepcopy(replica)
            x = torch.ones(2, 2, device=replica[0].weight.device)
            torch.testing.assert_close(twin(x), replica(x))
            assert twin[0].weight is not replica[0].weight


@pytest.mark.behaviour(92)
def test_a_step_leaves_nothing_to_the_garbage_collector(wrap):
    model = wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)))
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.randn(2 * N, 2)).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()
