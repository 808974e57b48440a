"""Outputs of buckets that persist, and memory under them."""

import copy

import pytest
import torch
from nets import N, close, compare_grads, other_data
from networks import TwoLayers
from torch import nn
from torch.func import functional_call

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
@pytest.mark.parametrize("kind", [TwoLayers, Direct])
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

    class Keeps(TwoLayers):
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
