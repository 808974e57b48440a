"""Gradients equal those of one device on the same chunks, whatever autograd is asked to do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from networks import TwoLayers
from torch import nn
from torch.utils.checkpoint import checkpoint

from pyparallel import bucket
from pyparallel.data_parallel import DataParallel

pytestmark = pytest.mark.usefixtures("on_the_first_device")

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


class Everything(nn.Module):
    """All kinds of layers, with tied, frozen, unused and complex parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.embedding = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.down = nn.Linear(12, 6)
        self.decoder = nn.Linear(6, 11)
        self.decoder.weight = self.embedding.weight
        self.frozen = nn.Linear(3, 6).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.phase = nn.Parameter(torch.randn(6) + 1j * torch.randn(6))
        self.register_buffer("gain", torch.ones(6, requires_grad=True))

    def forward(self, image, tokens):
        features = torch.relu(self.norm(self.conv(image))).mean((2, 3))
        hidden, _ = self.lstm(self.embedding(tokens))
        hidden = self.down(hidden) + self.frozen(features)[:, None]
        hidden = (hidden * self.phase).abs() * self.gain
        return self.decoder(hidden), features


def batch(n, dtype):
    return torch.randn(n, 2, 5, 5, dtype=dtype), torch.randint(11, (n, 4))


def loss_of(logits, features):
    return (logits.logsumexp(-1).sum() + (features**2).sum()) / 50


def close(a, b):
    torch.testing.assert_close(a, b, rtol=TOLERANCE[b.real.dtype], atol=TOLERANCE[b.real.dtype])


def tensors_of(module):
    return dict([*module.named_parameters(), ("gain", module.gain)])


@pytest.fixture(params=["one bucket", "many buckets"])
def _buckets(request, monkeypatch):
    if request.param == "many buckets":
        monkeypatch.setattr(bucket, "FIRST_BUCKET_BYTES", 1)
        monkeypatch.setattr(bucket, "BUCKET_BYTES", 256)


def pair(dtype=torch.float64):
    torch.set_default_dtype(dtype)
    reference = Everything()
    torch.set_default_dtype(torch.float32)
    return reference, copy.deepcopy(reference)


@pytest.mark.behaviour(155)
@pytest.mark.usefixtures("_buckets")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_gradients_equal_one_devices_of_the_same_chunks(n, dtype, make_devices):
    reference, net = pair(dtype)
    model = DataParallel(net, make_devices(n))
    for _ in range(2):  # The second adds to existing gradients.
        image, tokens = batch(11, dtype)
        chunks = zip(image.chunk(n), tokens.chunk(n), strict=True)
        outputs = [reference(*chunk) for chunk in chunks]
        expected = [torch.cat(column) for column in zip(*outputs, strict=True)]
        loss_of(*expected).backward()
        actual = model(image, tokens)
        loss_of(*actual).backward()
        for a, b in zip(actual, expected, strict=True):
            close(a, b)
    for name, parameter in tensors_of(net).items():
        other = tensors_of(reference)[name]
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            close(parameter.grad, other.grad)
            assert parameter.grad.stride() == other.grad.stride()
    assert net.unused.weight.grad is None and net.frozen.weight.grad is None


@pytest.fixture
def small(make_devices):
    """A net that treats each sample alone, the wrapper of its copy, and an input."""
    net = TwoLayers().double()
    return net, DataParallel(copy.deepcopy(net), make_devices(3)), torch.randn(7, 3).double()


def compare_grads(model, net):
    for a, b in zip(model.module.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            close(a.grad, b.grad)


@pytest.mark.behaviour(159)
def test_autograd_grad_of_parameters_and_input(small):
    net, model, x = small
    x.requires_grad_()
    expected = torch.autograd.grad((net(x) ** 2).sum(), [x, *net.parameters()])
    actual = torch.autograd.grad((model(x) ** 2).sum(), [x, *model.parameters()])
    for a, b in zip(actual, expected, strict=True):
        close(a, b)


@pytest.mark.behaviour(158)
def test_gradient_penalty(small):
    net, model, x = small
    for m in (net, model):
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(m(inputs).sum(), inputs, create_graph=True)
        (grad.norm(dim=1) - 1).pow(2).sum().backward()
    compare_grads(model, net)


@pytest.mark.behaviour(158)
def test_double_and_triple_backward_through_the_parameters(small):
    net, model, x = small
    for m in (net, model):
        grads = torch.autograd.grad((m(x) ** 2).sum(), list(m.parameters()), create_graph=True)
        norm = sum((g**2).sum() for g in grads)
        again = torch.autograd.grad(norm, list(m.parameters()), create_graph=True)
        sum((g**2).sum() for g in again).backward()
    compare_grads(model, net)


@pytest.mark.behaviour(27)
def test_two_forwards_before_one_backward(small):
    net, model, x = small
    for m in (net, model):
        (m(x).sum() + (m(x + 1) ** 2).sum()).backward()
    compare_grads(model, net)


def test_a_forward_without_gradients_between_forward_and_backward(small):
    net, model, x = small
    for m in (net, model):
        out = m(x)
        with torch.no_grad():
            m(x + 1)
        out.pow(2).sum().backward()
    compare_grads(model, net)


@pytest.mark.behaviour(159)
def test_retain_graph(small):
    net, model, x = small
    for m in (net, model):
        loss = m(x).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    compare_grads(model, net)


def test_a_term_on_the_parameters_themselves(small):
    net, model, x = small
    for m in (net, model):
        (m(x).sum() + sum((p**2).sum() for p in m.parameters())).backward()
    compare_grads(model, net)


@pytest.mark.behaviour(78)
def test_hooks_of_parameters_run_once_with_the_sum(small):
    net, model, x = small
    seen = {}
    for m in (net, model):
        seen[m] = []
        inner = m.module if m is model else m
        inner.first.weight.register_hook(lambda grad, m=m: seen[m].append(grad.clone()))
        inner.second.weight.register_post_accumulate_grad_hook(
            lambda p, m=m: seen[m].append(p.grad.clone())
        )
        m(x).sum().backward()
    assert len(seen[model]) == len(seen[net]) == 2
    for a, b in zip(seen[model], seen[net], strict=True):
        close(a, b)


def test_parameters_that_are_frozen_and_thawed(small):
    net, model, x = small
    for frozen in (True, False):
        for m in (net, model.module):
            m.first.requires_grad_(not frozen)
        for m in (net, model):
            m(x).sum().backward()
        compare_grads(model, net)


def test_a_module_that_only_some_ranks_use(make_devices):
    class Sometimes(TwoLayers):
        def forward(self, x):
            if (x > 100).any():
                return self.second(x.new_ones(len(x), 4))
            return super().forward(x)

    net = Sometimes().double()
    model = DataParallel(copy.deepcopy(net), make_devices(3))
    x = torch.randn(6, 3).double()
    x[0] = 1000  # Rank 0 does not use the first layer.
    torch.cat([net(chunk) for chunk in x.chunk(3)]).sum().backward()
    model(x).sum().backward()
    compare_grads(model, net)


@pytest.mark.behaviour(160)
@pytest.mark.report("pytorch#1456")
def test_sparse_gradients(make_devices):
    net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2)).double()
    model = DataParallel(copy.deepcopy(net), make_devices(3))
    tokens = torch.randint(9, (7, 2))
    for m in (net, model):
        m(tokens).pow(2).sum().backward()
    sparse, expected = model.module[0].weight.grad, net[0].weight.grad
    assert sparse.is_sparse
    close(sparse.to_dense(), expected.to_dense())
    close(model.module[2].weight.grad, net[2].weight.grad)


def test_a_weight_with_sparse_and_dense_gradients(make_devices):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3, sparse=True)

        def forward(self, tokens):
            if (tokens == 0).all():
                return F.linear(
                    self.embedding.weight.new_ones(len(tokens), 3), self.embedding.weight
                )
            return self.embedding(tokens).sum((1,))[:, :1].expand(-1, 5)

    net = Tied().double()
    model = DataParallel(copy.deepcopy(net), make_devices(2))
    tokens = torch.tensor([[0, 0], [0, 0], [1, 2], [3, 3]])
    torch.cat([net(chunk) for chunk in tokens.chunk(2)]).sum().backward()
    model(tokens).sum().backward()
    grads = [m.embedding.weight.grad for m in (model.module, net)]
    close(*[g.to_dense() if g.is_sparse else g for g in grads])


@pytest.mark.behaviour(161)
def test_channels_last(make_devices):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2)).double()
    net = net.to(memory_format=torch.channels_last)
    model = DataParallel(copy.deepcopy(net), make_devices(2))
    x = torch.randn(4, 3, 6, 6).double().to(memory_format=torch.channels_last)
    for _ in range(2):
        for m in (net, model):
            m(x).pow(2).sum().backward()
    compare_grads(model, net)
    for a, b in zip(model.module.parameters(), net.parameters(), strict=True):
        assert a.grad.stride() == b.grad.stride() == a.stride()


@pytest.mark.behaviour(164)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_and_inside(small, use_reentrant, make_devices):
    class Inside(TwoLayers):
        def forward(self, x):
            hidden = checkpoint(self.first, x, use_reentrant=use_reentrant)
            return self.second(torch.tanh(hidden))

    net, model, x = small
    x.requires_grad_()
    net(x).sum().backward()
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    compare_grads(model, net)
    inside = Inside().double()
    inside.load_state_dict(net.state_dict())
    model = DataParallel(inside, make_devices(3))
    model(x).sum().backward()
    compare_grads(model, net)


def test_weights_written_between_forward_and_backward_are_noticed(small):
    _, model, x = small
    loss = model(x).pow(2).sum()
    with torch.no_grad():
        model.module.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_anomaly_mode(small):
    net, model, x = small
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        model(x).sum().backward()
    net(x).sum().backward()
    compare_grads(model, net)


def test_an_error_in_backward_leaves_no_gradient_and_the_next_backward_works(small):
    net, model, x = small

    def fail(grad):
        raise ValueError("stop")

    handle = model.module.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="stop"):
        model(x).sum().backward()
    assert model.module.first.weight.grad is None
    handle.remove()
    model.zero_grad()
    for m in (net, model):
        m(x).sum().backward()
    compare_grads(model, net)


@pytest.mark.behaviour(155)
def test_one_step_of_adam_equals_one_devices(small):
    net, model, x = small
    for m in (net, model):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            m(x).pow(2).sum().backward()
            optimizer.step()
    for a, b in zip(model.module.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
