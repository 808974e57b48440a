"""Replicas that persist: who may still use them, and what forward wrote."""

import copy
import threading
import weakref

import pytest
import torch
from nets import N, close, compare_grads, other_data
from networks import TwoLayers
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

# A7: a replica that somebody may still run is not used by another forward.


class Checkpointed(TwoLayers):
    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=self.use_reentrant)
        return self.second(torch.tanh(hidden))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("between", ["validation", "other weights"])
def test_a7_checkpoints_inside_recompute_on_their_own_replicas(between, use_reentrant, wrap):
    net = Checkpointed(use_reentrant).double()
    model = wrap(copy.deepcopy(net))
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        for m in (net, model):
            inner = m.module if m is model else m
            loss = m(x).pow(2).sum()
            if between == "validation":
                inner.eval()
                with torch.no_grad():
                    m(x.detach() + 1)
                inner.train()
            else:
                old = {n: p.data for n, p in inner.named_parameters()}
                other_data(inner)
                m(x)
                for n, p in inner.named_parameters():
                    p.data = old[n]
            loss.backward()
    compare_grads(model, net)


def test_a7_a_checkpoint_finds_what_forward_wrote(wrap):
    class Writes(TwoLayers):
        def forward(self, x):
            self.first.scale = x.abs().max()
            return self.second(checkpoint(self.scaled, x, use_reentrant=False))

        def scaled(self, x):
            return self.first(x) * self.first.scale

    net = Writes().double()
    model = wrap(copy.deepcopy(net), 1 + 1)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        model(x).pow(2).sum().backward()
        for chunk in x.chunk(2):
            net(chunk).pow(2).sum().backward()
    compare_grads(model, net)
    assert not hasattr(model.module.first, "scale")


@pytest.mark.behaviour(177)
def test_a7_threads_do_not_share_replicas(wrap):
    barrier = threading.Barrier(2)

    class Slow(TwoLayers):
        def forward(self, x):
            self.offset = x.flatten()[0]
            barrier.wait(10)
            return x - self.offset

    model = wrap(Slow(), 2, dispatch="sequential")
    results = {}

    def run(value):
        results[value] = model(torch.full((2, 1), value)).flatten().tolist()

    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1.0: [0, 0], 2.0: [0, 0]}


def test_a7_a_replica_that_runs_keeps_its_weights(wrap, monkeypatch):
    monkeypatch.delenv("PYPARALLEL_CHECK_DEVICES", raising=False)  # it holds the weights, too
    entered, go_on = threading.Event(), threading.Event()

    class Waits(TwoLayers):
        def forward(self, x):
            if x[0, 0] == 7:
                entered.set()
                assert go_on.wait(10)
            return super().forward(x)

    net = Waits()
    model = wrap(net, 2, dispatch="sequential")
    x = torch.randn(4, 3)
    x[0, 0] = 7
    results = []

    def run():
        with torch.no_grad():
            results.append(model(x))

    with torch.no_grad():
        model(x + 1)
        expected = TwoLayers.forward(net, x[2:])
        thread = threading.Thread(target=run)
        thread.start()
        assert entered.wait(10)
        for p in net.parameters():
            p.add_(1)
        model(x + 1)
    go_on.set()
    thread.join()
    # Rank 0 has the module's own memory, rank 1 what it was given.
    assert torch.equal(results[0][2:], expected)


# A8: what forward writes to a replica is forgotten.


def test_a8_a_counter_starts_again(wrap):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x + self.calls

    model = wrap(Counts())
    assert [model(torch.zeros(3)).tolist() for _ in range(3)] == [[1, 1, 1]] * 3


def test_a8_nothing_that_forward_writes_survives(wrap):
    class Messy(TwoLayers):
        def __init__(self):
            super().__init__()
            self.n = 0
            self.layers = [self.first, self.second]
            self.register_buffer("state", torch.zeros(2))

        def forward(self, x):
            assert self.n == 0 and not hasattr(self, "kept") and len(self.layers) == 2
            assert torch.equal(self.state, torch.zeros(2))
            assert isinstance(self.second, nn.Linear)
            self.n += 1
            self.kept = x * 2
            self.last = self.first
            self.layers.append(self.first)
            self.state = self.state + 1
            out = super().forward(x)
            self.second = nn.Identity()
            self.first._parameters["bias"] = None
            del self.first.weight
            self.eval()
            return out

    net = Messy()
    model = wrap(net)
    x = torch.randn(6, 3)
    expected = TwoLayers.forward(net, x)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)
    assert net.n == 0 and net.training and net.first.weight is not None


def test_a8_activations_written_to_a_replica_are_freed(wrap):
    kept = []

    class Keeps(TwoLayers):
        def forward(self, x):
            self.kept = super().forward(x)
            kept.append(weakref.ref(self.kept))
            return self.kept.sum(1)

    model = wrap(Keeps())
    for _ in range(3):
        model(torch.randn(6, 3)).sum().backward()
        assert len(kept) == N and not any(ref() is not None for ref in kept)
        kept.clear()


def test_a8_references_that_forward_made_do_not_hold_the_replicas(wrap):
    seen = set()

    class Points(TwoLayers):
        def forward(self, x):
            seen.add(id(self))
            self.last, self.both = self.first, [self.first, self.second]
            self.call = self.second.forward
            return super().forward(x)

    model = wrap(Points())
    for _ in range(5):
        model(torch.randn(6, 3)).sum().backward()
    assert len(seen) == N


@pytest.mark.behaviour(86)
def test_a8_old_style_normalization_of_weights(wrap):
    with pytest.warns(FutureWarning):
        net, module = (nn.utils.weight_norm(nn.Linear(3, 4)).double() for _ in range(2))
    module.load_state_dict(net.state_dict())
    model = wrap(module)
    x = torch.randn(6, 3, dtype=torch.float64)
    for m in (net, model):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            m(x).pow(2).sum().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), net.parameters(), strict=True):
        close(a, b)


# A9: the wrapper is an nn.DataParallel, which torch refuses at the top only.


@pytest.mark.behaviour(166)
def test_a9_functional_call_works_around_the_wrapper(pair):
    net, model, x = pair
    with pytest.raises(RuntimeError, match="can't be used with nn.DataParallel"):
        functional_call(model, dict(model.named_parameters()), (x,))
    outer = nn.Sequential(model)
    weights = {name: p.detach() + 1 for name, p in outer.named_parameters()}
    close(
        functional_call(outer, weights, (x,)),
        functional_call(net, {k.removeprefix("0.module."): v for k, v in weights.items()}, (x,)),
    )
