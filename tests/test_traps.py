"""Ways to get silently wrong gradients, each of which the step engine avoids.

Every test fails if the remedy named in its comment is taken out.
"""

import copy
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from pyparallel import bucket
from pyparallel.data_parallel import DataParallel
from pyparallel.gradient_bucket import GradientBucket

N = 3
launch, wait = GradientBucket.launch, GradientBucket.wait


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def wrap(make_devices):
    return lambda net, n=N, **options: DataParallel(net, make_devices(n), **options)


@pytest.fixture
def pair(wrap):
    """A net, the wrapper of a copy of it, and an input."""
    net = Net().double()
    return net, wrap(copy.deepcopy(net)), torch.randn(7, 3, dtype=torch.float64)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def compare_grads(model, net):
    for a, b in zip(model.module.parameters(), net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            close(a.grad, b.grad)


@pytest.fixture
def _late_sums(monkeypatch):
    """Sums that are NaN until somebody waits for them."""
    late = {}

    def late_launch(self, grads):
        sums = launch(self, grads)
        wait(self)
        for total in sums:
            if total is not None and total.layout is torch.strided:
                late.setdefault(id(self), []).append((total.data, total.clone()))
                total.data.fill_(float("nan"))
        return sums

    def late_wait(self):
        for alias, total in late.pop(id(self), ()):
            alias.copy_(total)

    monkeypatch.setattr(GradientBucket, "launch", late_launch)
    monkeypatch.setattr(GradientBucket, "wait", late_wait)


# A1: bucket nodes have high sequence numbers. Without, their sums start after the last gradient.


@pytest.mark.behaviour(101)
def test_a1_a_sum_starts_as_soon_as_its_last_gradient_exists(wrap, monkeypatch):
    monkeypatch.setattr(bucket, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(bucket, "BUCKET_BYTES", 1)
    log = []

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(4))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                x.register_hook(lambda grad, i=i: log.append(i))
            return x

    model = wrap(Chain(), 2, dispatch="sequential")
    monkeypatch.setattr(
        GradientBucket, "launch", lambda self, grads: (log.append("sum"), launch(self, grads))[1]
    )
    for _ in range(2):
        log.clear()
        model(torch.randn(4, 3)).sum().backward()
        assert log == [3, 2, 1, 0, 3, "sum", 2, "sum", 1, "sum", 0, "sum"]


# A2, A3: a gate waits before anything reads a sum. Without, each of these reads NaN.


def l2(m, x):
    (m(x).sum() + sum((p**2).sum() for p in m.parameters())).backward()


def existing_grads(m, x):
    for _ in range(2):
        m(x).pow(2).sum().backward()


def zeroed_grads(m, x):
    m(x).sum().backward()
    m.zero_grad(set_to_none=False)
    m(x).pow(2).sum().backward()


def two_forwards(m, x):
    (m(x).sum() + m(x + 1).pow(2).sum()).backward()


def hook_of_a_parameter(m, x):
    for p in m.parameters():
        p.register_hook(lambda grad: grad * 2)
    m(x).sum().backward()


def hook_after_accumulation(m, x):
    for p in m.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
    m(x).sum().backward()


def hook_of_the_accumulating_node(m, x):
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in m.parameters()]
    seen = []
    for node in nodes:
        node.register_prehook(lambda grads: seen.append(grads[0].clone()) or None)
    m(x).sum().backward()
    assert len(seen) == 4 and not any(grad.isnan().any() for grad in seen)


def anomaly_mode(m, x):
    with torch.autograd.detect_anomaly(check_nan=True):
        m(x).sum().backward()


def gradients_as_results(m, x):
    for p, grad in zip(
        m.parameters(), torch.autograd.grad(m(x).sum(), list(m.parameters())), strict=True
    ):
        p.grad = grad * 2


def some_inputs_only(m, x):
    m(x).sum().backward(inputs=[next(m.parameters())])


def create_graph(m, x):
    grads = torch.autograd.grad(m(x).pow(2).sum(), list(m.parameters()), create_graph=True)
    sum(grad.pow(2).sum() for grad in grads).backward()


def retained_graph(m, x):
    loss = m(x).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def reentrant_checkpoint(m, x):
    checkpoint(m, x.clone().requires_grad_(), use_reentrant=True).sum().backward()


def two_threads(m, x):
    losses = [m(x).sum(), m(x + 1).pow(2).sum()]
    # One after the other would do; at once they also run the same nodes at once.
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
        thread.join()


@pytest.mark.usefixtures("_late_sums")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "run",
    [
        l2,
        existing_grads,
        zeroed_grads,
        two_forwards,
        hook_of_a_parameter,
        hook_after_accumulation,
        hook_of_the_accumulating_node,
        anomaly_mode,
        gradients_as_results,
        some_inputs_only,
        create_graph,
        retained_graph,
        reentrant_checkpoint,
        two_threads,
    ],
    ids=lambda run: run.__name__,
)
def test_a3_nobody_reads_a_sum_that_is_not_there_yet(run, pair):
    net, model, x = pair
    run(net, x)
    run(model, x)
    compare_grads(model, net)


@pytest.mark.usefixtures("_late_sums")
def test_a3_after_an_error_in_backward_gradients_are_none(pair, monkeypatch):
    net, model, x = pair

    def fail(grad):
        raise ValueError("stop")

    out = model(x.requires_grad_())
    handle = x.register_hook(fail)
    monkeypatch.setattr(bucket, "FIRST_BUCKET_BYTES", 1)
    with pytest.raises(ValueError, match="stop"):
        out.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    handle.remove()
    model(x).sum().backward()
    net(x).sum().backward()
    compare_grads(model, net)


def test_a3_two_threads_wait_for_each_others_sums(wrap):
    net = nn.Linear(400, 400)
    model = wrap(copy.deepcopy(net))
    x = torch.randn(6, 400)
    losses = [model(x).sum() for _ in range(8)]
    grads = [None] * len(losses)

    def backward(i):
        grads[i] = torch.autograd.grad(losses[i], list(model.parameters()))

    threads = [threading.Thread(target=backward, args=(i,)) for i in range(len(losses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    for pair_of_grads in grads:
        for a, b in zip(pair_of_grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a3_gradients_are_kept_without_a_copy_and_count_their_own_versions(wrap, monkeypatch):
    addresses = []

    def spying(self, grads):
        sums = launch(self, grads)
        addresses.extend(total.data_ptr() for total in sums)
        return sums

    monkeypatch.setattr(GradientBucket, "launch", spying)
    net = nn.Sequential(nn.Conv2d(2, 60, 3), nn.Conv2d(60, 60, 3))  # long enough to be queued
    net = net.to(memory_format=torch.channels_last)
    model = wrap(net)
    kept = []
    for _ in range(2):
        addresses.clear()
        model.zero_grad()
        model(torch.randn(6, 2, 5, 5)).sum().backward()
        grads = [p.grad for p in net.parameters()]
        assert sorted(grad.data_ptr() for grad in grads) == sorted(addresses)
        assert all(p.grad.stride() == p.stride() for p in net.parameters())
        grads[0].mul_(2)
        assert [grad._version for grad in grads] == [1, 0, 0, 0]
        kept += grads
    assert len({grad.data_ptr() for grad in kept}) == len(kept)


# A4: outputs persist. What the user does to one is not seen by the next forward.


def outputs_of(model):
    return [list(replica.parameters()) for replica in model.replicate(model.module, range(N))]


def flat(rows):
    return [tensor for row in rows for tensor in row]


@pytest.mark.behaviour(93)
def test_a4_outputs_are_the_same_objects_until_something_changes(pair):
    _, model, _ = pair
    first = outputs_of(model)
    again = outputs_of(model)
    assert all(a is b for a, b in zip(flat(first), flat(again), strict=True))
    with torch.no_grad():
        model.module.first.weight.add_(1)
    # The old ones are held here, so there are new ones with the new values.
    other = outputs_of(model)
    assert not any(a is b for a, b in zip(flat(first), flat(other), strict=True))
    for old, new in zip(first[1:], other[1:], strict=True):
        close(old[0] + 1, new[0])


def in_place(weight):
    with torch.no_grad():
        weight.mul_(3)


def other_memory(weight):
    weight.data = weight.data * 3


def recorded_in_place(weight):
    weight.mul_(3)


def hook(weight):
    weight.register_hook(lambda grad: grad * 100)


def retained_grad(weight):
    weight.retain_grad()


def attribute(weight):
    weight.scale = 3.0


@pytest.mark.parametrize(
    "touch, ranks",
    [
        *((touch, (0, 1, 2)) for touch in (in_place, other_memory, hook, retained_grad, attribute)),
        # Because of its data:
        *((touch, (2,)) for touch in (in_place, recorded_in_place, other_memory, hook)),
    ],
)
def test_a4_a_touched_output_is_as_new_at_the_next_forward(touch, ranks, pair):
    net, model, x = pair

    def forward(values, skip=()):
        for rank, row in enumerate(values):
            if rank in ranks and rank not in skip:
                touch(row[0])

    forward(outputs_of(model), skip=(0,) if touch is in_place else ())
    replicas = model.replicate(model.module, range(N))
    for replica in replicas:
        weight = replica.first.weight
        close(weight, net.first.weight)
        assert weight.grad_fn is replica.first.bias.grad_fn
        assert not weight.retains_grad and not hasattr(weight, "scale")
    del replicas, replica, weight
    model(x).sum().backward()
    net(x).sum().backward()
    compare_grads(model, net)


# A5: rank 0's outputs are detach() of the parameters, not views of them.


def test_a5_old_outputs_can_be_looked_at_after_a_step(pair):
    _, model, x = pair
    weight = model.replicate(model.module, range(N))[0].first.weight
    loss = (weight**2).sum()
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert weight.grad_fn is not None and not weight.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a5_a_step_between_forward_and_backward_is_an_error(pair):
    _, model, x = pair
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
    loss = model(x).pow(2).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# A6: memory that a graph or the user holds is not overwritten.


def swapped_parameter(module):
    for layer in module.modules():
        for name, p in list(layer._parameters.items()):
            layer._parameters[name] = nn.Parameter(p.detach() + 1)


def other_data(module):
    for p in module.parameters():
        p.data = p.data + 1


class Direct(nn.Module):
    """Its graph saves the weights themselves, not views of them."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.gain = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return self.conv((x * self.gain)[:, None])[:, 0].pow(2)


@pytest.mark.behaviour(175)
@pytest.mark.parametrize("change", [swapped_parameter, other_data])
@pytest.mark.parametrize("kind", [Net, Direct])
def test_a6_weights_that_change_between_two_forwards_without_a_write(kind, change, wrap):
    net = kind().double()
    model = wrap(copy.deepcopy(net))
    x = torch.randn(7, 3, dtype=torch.float64)
    model(x).sum().backward()  # once before, so that everything is there

    def grads(m, inner, change):
        old = list(inner.parameters())
        loss = m(x).pow(2).sum()
        change(inner)
        loss = loss + m(x + 1).pow(2).sum()
        new = [p for p in inner.parameters() if not any(p is o for o in old)]
        return torch.autograd.grad(loss, [*old, *new])

    # Not with other data: one device takes those of the old weights that its graph holds, too.
    expected = grads(net, net, swapped_parameter)
    if change is other_data:
        count = len(expected) // 2
        expected = [a + b for a, b in zip(expected[:count], expected[count:], strict=True)]
    for a, b in zip(grads(model, model.module, change), expected, strict=True):
        close(a, b)


def test_a6_values_that_the_user_keeps_are_not_overwritten(pair):
    _, model, x = pair
    kept = []

    class Keeps(Net):
        def forward(self, x):
            kept.append((self.first.weight, self.first.bias.detach()))
            return super().forward(x)

    module = Keeps().double()
    model.module = module
    model(x)
    old = [tuple(t.detach().clone() for t in tensors) for tensors in kept]
    other_data(module)
    model(x)
    assert len(kept) == 2 * N
    for tensors, before in zip(kept[1:N], old[1:], strict=True):
        for a, b in zip(tensors, before, strict=True):
            assert torch.equal(a, b)


def test_a6_ordinary_steps_take_no_new_memory(pair):
    _, model, x = pair
    optimizer = torch.optim.Adam(model.parameters())
    addresses = set()
    for _ in range(5):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(x)
        addresses.add(outputs_of(model)[1][0].data_ptr())
    assert len(addresses) == 1


def test_a6_fast_weights(pair):
    net, model, x = pair
    outer = nn.Module()
    outer.inner = model
    outer.forward = model.forward
    reference = nn.Module()
    reference.inner = net
    reference.forward = net.forward
    for m in (reference, outer):
        names, weights = zip(*m.inner.named_parameters(), strict=True)
        fast = list(weights)
        for _ in range(2):
            out = functional_call(
                m, {"inner." + n: w for n, w in zip(names, fast, strict=True)}, (x,)
            )
            grads = torch.autograd.grad(out.pow(2).sum(), fast, create_graph=True)
            fast = [w - 0.1 * g for w, g in zip(fast, grads, strict=True)]
            m(x)  # with the ordinary weights
        out = functional_call(m, {"inner." + n: w for n, w in zip(names, fast, strict=True)}, (x,))
        (out.sum() + m(x).sum()).backward()
    compare_grads(model, net)


# A7: a replica that somebody may still run is not used by another forward.


class Checkpointed(Net):
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
    class Writes(Net):
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

    class Slow(Net):
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

    class Waits(Net):
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
        expected = Net.forward(net, x[2:])
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
    class Messy(Net):
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
    expected = Net.forward(net, x)
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(model(x), expected)
    assert net.n == 0 and net.training and net.first.weight is not None


def test_a8_activations_written_to_a_replica_are_freed(wrap):
    kept = []

    class Keeps(Net):
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

    class Points(Net):
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
