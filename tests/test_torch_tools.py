"""Tools of torch around the wrapper and inside it, each against the bare module."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from trained import Net, gradients, make_pair, parameters, train

from pyparallel import DataParallel

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`",
    "ignore:In Dynamo, calling `functools",
)


@pytest.fixture
def pair(make_devices):
    """Returns a function that makes a bare module, the same module wrapped, and a batch."""
    return lambda module=Net, n=3, rows=7: make_pair(make_devices(n), module, rows)


# torch.func.functional_call.


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


def test_functional_call_of_a_model_that_contains_the_wrapper(pair):
    net, dp, x = pair()
    outputs = []
    for model, prefix in ((Outer(net), "inner."), (Outer(dp), "inner.module.")):
        weights = {
            prefix + name: (p.detach() + 1).requires_grad_() for name, p in net.named_parameters()
        }
        for _ in range(2):
            y = functional_call(model, weights, (x,))
        y.square().sum().backward()
        outputs.append((y, [w.grad for w in weights.values()]))
        assert all(p.grad is None for p in model.parameters())
        own = model(x)
        assert not torch.allclose(own, y)
    torch.testing.assert_close(outputs[1], outputs[0])


def test_functional_call_with_some_of_the_weights(pair):
    net, dp, x = pair()
    bias = torch.ones(2, dtype=torch.float64, device=x.device)
    expected = functional_call(Outer(net), {"inner.second.bias": bias}, (x,))
    output = functional_call(Outer(dp), {"inner.module.second.bias": bias}, (x,))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(dp(x), net(x))


@pytest.mark.behaviour(166, 172)
def test_functional_call_of_the_wrapper_is_refused_by_torch(pair):
    _, dp, x = pair()
    with pytest.raises(RuntimeError, match="can't be used with nn.DataParallel"):
        functional_call(dp, dict(dp.named_parameters()), (x,))


# torch.utils.checkpoint.


@pytest.mark.behaviour(164)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dispatch", ["sequential", "threads"])
def test_checkpoint_around_the_wrapper(use_reentrant, dispatch, pair, make_devices):
    net, dp, x = pair()
    dp = DataParallel(dp.module, make_devices(3), dispatch=dispatch)
    x.requires_grad_()
    net(x).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(dp, x, use_reentrant=use_reentrant).square().sum().backward()
    torch.testing.assert_close(gradients(dp), gradients(net))
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.behaviour(164)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_inside_the_wrapper(use_reentrant, pair):
    class Inside(Net):
        def forward(self, x):
            x = checkpoint(self.first, x, use_reentrant=use_reentrant)
            return checkpoint(self.second, x.tanh(), use_reentrant=use_reentrant)

    net, dp, x = pair(Inside)
    x.requires_grad_()  # reentrant checkpoints need an input with gradients
    torch.testing.assert_close(train(dp, x), train(net, x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_repeats_dropout(use_reentrant, pair):
    _, dp, x = pair(lambda: nn.Sequential(Net(), nn.Dropout(0.5)))
    x.requires_grad_()
    results = []
    for function in (dp, lambda x: checkpoint(dp, x, use_reentrant=use_reentrant)):
        dp.zero_grad()
        torch.manual_seed(1)
        output = function(x)
        output.square().sum().backward()
        results.append((output, gradients(dp)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_sequential_with_wrapped_parts(use_reentrant, pair, make_devices):
    net, _, x = pair(lambda: nn.Sequential(nn.Linear(3, 3).double(), nn.Tanh(), Net()))
    wrapped = nn.Sequential(*(DataParallel(copy.deepcopy(part), make_devices(2)) for part in net))
    x.requires_grad_()
    net(x).sum().backward()
    checkpoint_sequential(wrapped, 2, x, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(gradients(wrapped), gradients(net))


# torch.amp.


@pytest.mark.behaviour(165)
def test_grad_scaler(pair):
    results = []
    net, dp, x = pair()
    for model in (net, dp):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(x.device.type, init_scale=1024.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = model(x).square().sum() * (float("inf") if step == 2 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = clip_grad_norm_(model.parameters(), 1.0)
            assert norm.isfinite() == (step != 2)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 1024.0  # grew after two steps, and shrank
        results.append(parameters(model))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("dispatch", ["sequential", "threads"])
def test_autocast(where, dispatch, make_devices):
    seen = []

    class Module(nn.Linear):
        def forward(self, x):
            if where == "around":
                y = super().forward(x)
            else:
                with torch.autocast(x.device.type, dtype=torch.bfloat16):
                    y = super().forward(x)
            seen.append(y.dtype)
            return y

    home = torch.device(make_devices(1)[0].replace("cpu:0", "cpu"))
    dp = DataParallel(Module(3, 2).to(home), make_devices(2), dispatch=dispatch)
    x = torch.ones(4, 3, device=home)
    with torch.autocast(home.type, dtype=torch.bfloat16, enabled=where == "around"):
        dp(x).sum().backward()
    assert seen == [torch.bfloat16] * 2
    assert dp.module.weight.grad.dtype == torch.float32
    assert torch.equal(dp.module.weight.grad, torch.full_like(dp.module.weight, 4))


# torch.optim.


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_optimizers(name, implementation, pair):
    def make(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.1, **{implementation: True})

    net, dp, x = pair()
    plain = train(net, x, make_optimizer=lambda p: getattr(torch.optim, name)(p, lr=0.1))
    torch.testing.assert_close(train(dp, x, make_optimizer=make), plain)


def test_an_optimizer_with_a_closure(pair):
    results = []
    net, dp, x = pair()
    for model in (net, dp):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        results.append(parameters(model))
    torch.testing.assert_close(results[1], results[0])


def test_an_optimizer_step_in_backward(pair):
    results = []
    net, dp, x = pair()
    for model in (net, dp):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=True)

            def step(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(x).square().sum().backward()
        assert all(p.grad is None for p in model.parameters())
        results.append(parameters(model))
    torch.testing.assert_close(results[1], results[0])


def test_weights_as_one_vector(pair):
    net, dp, x = pair()
    vector = parameters_to_vector(net.parameters()).detach() * 2
    for model in (net, dp):
        model(x)
        vector_to_parameters(vector, model.parameters())
    torch.testing.assert_close(dp(x), net(x))


def test_pruned_weights(pair):
    net, dp, x = pair()
    for model in (net, dp.module):
        prune.l1_unstructured(model.first, "weight", amount=0.5)
    torch.testing.assert_close(train(dp, x), train(net, x))
    assert (dp.module.first.weight == 0).sum() == 6


# torch.optim.swa_utils.


@pytest.mark.parametrize("of", ["the wrapper", "the module"])
def test_averages_of_weights(of, pair):
    net, dp, x = pair()
    expected = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    averaged = AveragedModel(
        dp if of == "the wrapper" else dp.module, multi_avg_fn=get_ema_multi_avg_fn(0.5)
    )
    for _ in range(3):
        train(net, x, steps=1)
        train(dp, x, steps=1)
        expected.update_parameters(net)
        averaged.update_parameters(dp if of == "the wrapper" else dp.module)
        # The copy has its own replicas, which follow the average.
        torch.testing.assert_close(averaged(x), expected(x))
        torch.testing.assert_close(dp(x), net(x))
    assert not torch.allclose(averaged(x), dp(x))


def test_update_bn_sets_the_statistics_of_the_first_device(pair):
    _, dp, x = pair(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), rows=6)
    averaged = AveragedModel(dp)
    update_bn([x, 2 * x], averaged)
    wrapper = averaged.module
    hidden = [wrapper.module[0](part[:2]) for part in (x, 2 * x)]
    mean = torch.stack([h.mean(0) for h in hidden]).mean(0)
    torch.testing.assert_close(wrapper.module[1].running_mean, mean)
    assert wrapper.module[1].num_batches_tracked == 2
    assert dp.module[1].num_batches_tracked == 0


def test_a_copy_of_the_wrapper_goes_its_own_way(pair):
    net, dp, x = pair()
    dp(x).sum().backward()
    other = copy.deepcopy(dp)
    before = parameters(dp)
    train(other, x)
    assert torch.equal(parameters(dp), before)
    torch.testing.assert_close(dp(x), net(x))
    assert not torch.allclose(other(x), net(x))
