"""Drawn options: devices, dimensions, splits, ways to go back, autocast, and the function."""

import contextlib

import pytest
import torch
from comparison import (
    Seen,
    backward,
    compare,
    state_of,
    watch,
    weighted_sum,
    wrappers,
)
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch_on_cpu import torch_data_parallel

import pyparallel
from pyparallel import virtual_devices

WIDTH = 6


class Net(nn.Module):
    """Works along the last dimension but one, whatever is split."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.second = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.unused = nn.Linear(WIDTH, 1, dtype=dtype)
        self.register_buffer("total", torch.zeros((), dtype=dtype))

    def forward(self, x, *, scale):
        self.total += scale.detach().sum()
        hidden = torch.tanh(self.first(x))
        return {"y": self.second(hidden) * x, "sum": hidden.sum(), "scale": scale * 2}


def build(dtype=torch.float64):
    torch.default_generator.manual_seed(0)
    return Net(dtype)


def plain(inputs, output, module):
    return backward(inputs, output, module)


def grad_of(inputs, output, module):
    wanted = [*inputs, *module.first.parameters(), *module.unused.parameters()]
    return list(torch.autograd.grad(weighted_sum(output), wanted, allow_unused=True))


def penalty(inputs, output, module):
    """Backward through the gradient, as WGAN-GP and MAML do."""
    wanted = [*inputs, *module.first.parameters(), *module.second.parameters()]
    grads = torch.autograd.grad(weighted_sum(output), wanted, create_graph=True)
    sum(grad.square().sum() for grad in grads).backward()
    return [tensor.grad for tensor in inputs]


def twice(inputs, output, module):
    loss = weighted_sum(output)
    loss.backward(retain_graph=True)
    (loss * 2).backward()
    return [tensor.grad for tensor in inputs]


def with_weights(inputs, output, module):
    """The loss also has a term of the weights themselves."""
    decay = sum(p.square().sum() for p in module.parameters())
    (weighted_sum(output) + decay).backward()
    return [tensor.grad for tensor in inputs]


def one_output(inputs, output, module):
    output["sum"].sum().backward()
    return [tensor.grad for tensor in inputs]


WAYS_BACK = [plain, grad_of, penalty, twice, with_weights, one_output]


def make_inputs(batch, dim, dtype, leaf, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = [2, 3, WIDTH]
    shape[dim] = batch
    x = torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    scale = torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
    return (x.requires_grad_(leaf),), {"scale": scale}


def modes(mode):
    stack = contextlib.ExitStack()
    if mode == "bfloat16":
        stack.enter_context(torch.autocast("cpu", torch.bfloat16))
    if mode == "no grad":
        stack.enter_context(torch.no_grad())
    return stack


@examples(1500)
@given(
    n=st.integers(1, 5),
    batches=st.lists(st.integers(1, 11), min_size=2, max_size=2),
    dim=st.sampled_from([0, 1, -2, -3]),
    split=st.sampled_from(["chunk", "chunk", "balanced"]),
    output=st.sampled_from(["first", "last", "none", "host"]),
    dispatch=st.sampled_from(["auto", "sequential", "threads"]),
    bucket_cap_mb=st.sampled_from([None, 1e-4, 1e-5]),
    resend=st.sampled_from(["auto", "always"]),
    mode=st.sampled_from(["plain", "plain", "bfloat16", "no grad"]),
    back=st.sampled_from(WAYS_BACK),
    dtype=st.sampled_from([torch.float64, torch.float64, torch.float32]),
    leaf=st.booleans(),
)
def test_options(
    n,
    batches,
    dim,
    split,
    output,
    dispatch,
    bucket_cap_mb,
    resend,
    mode,
    back,
    dtype,
    leaf,
):
    if mode == "bfloat16" and back is penalty:
        back = plain  # terms that cancel leave few digits
    sides = wrappers(
        lambda: build(dtype),
        n,
        output_device={"first": 0, "last": n - 1, "none": None, "host": None}[output],
        dim=dim,
        split=split,
        torch_too=split == "chunk" and dim == 0,
        dispatch=dispatch,
        bucket_cap_mb=bucket_cap_mb,
        resend=resend,
    )
    if output == "host":
        sides["ours"].output_device = torch.device("cpu")
    for i, batch in enumerate(batches):

        def inputs(batch=batch, seed=i):
            return make_inputs(batch, dim, dtype, leaf, seed)

        seen = {}
        for who, wrapper in sides.items():
            with torch.no_grad():
                wrapper.module.first.weight.mul_(0.9)
                wrapper.module.second.bias.data = wrapper.module.second.bias.data + 0.5
            with modes(mode):
                seen[who] = watch(
                    wrapper, wrapper.module, inputs, back if mode != "no grad" else None
                )
            seen[who].state = state_of(wrapper.module)
        ours = seen.pop("ours")
        assert ours.error is None, ours.error
        for who, theirs in seen.items():
            if who == "on chunks":  # which does not gather
                theirs.warnings += [w for w in ours.warnings if "tensors were scalars" in w[1]]
            # In bfloat16 a weight has one gradient for all chunks, or one for each.
            tolerance = 0.05 if mode == "bfloat16" else None
            compare(ours, theirs, torchs=who == "torch's", tolerance=tolerance)


@examples(700)
@given(
    n=st.integers(1, 5),
    batch=st.integers(0, 11),
    back=st.sampled_from([plain, grad_of, with_weights]),
    leaf=st.booleans(),
    mode=st.sampled_from(["plain", "no grad"]),
)
def test_as_a_function(n, batch, back, leaf, mode):
    nets = build(), build()

    def ours(x, scale):
        return pyparallel.data_parallel(
            nets[0], x, virtual_devices(n), module_kwargs={"scale": scale}
        )

    def theirs(x, scale):
        return torch_data_parallel(nets[1], x, range(n), module_kwargs={"scale": scale})

    for seed in range(2):
        seen = []
        for call, net in zip((ours, theirs), nets, strict=True):
            with torch.no_grad():
                net.first.weight.mul_(0.9)
            with modes(mode):
                seen.append(
                    watch(
                        call,
                        net,
                        lambda seed=seed: make_inputs(batch, 0, torch.float64, leaf, seed),
                        back if mode != "no grad" else None,
                    )
                )
            seen[-1].state = state_of(net)
        assert seen[0].error is None
        # torch's function copies weights with a gradient even where none is recorded.
        compare(*seen, torchs=True)


@pytest.mark.filterwarnings("ignore:Was asked to gather")
@examples(500)
@given(
    n=st.integers(2, 5),
    batches=st.lists(st.integers(1, 11), min_size=2, max_size=2),
    between=st.sampled_from(
        ["nothing", "write", "other data", "other parameter", "no grad forward"]
    ),
    order=st.permutations([0, 1]),
    bucket_cap_mb=st.sampled_from([None, 1e-4]),
)
def test_two_forwards_before_backward(n, batches, between, order, bucket_cap_mb):
    """Graphs keep the weights with which they were made, or notice that they were written."""
    sides = wrappers(build, n, bucket_cap_mb=bucket_cap_mb)
    seen = {}
    for who, wrapper in sides.items():
        module, losses = wrapper.module, []
        for i, batch in enumerate(batches):
            args, kwargs = make_inputs(batch, 0, torch.float64, False, i)
            losses.append(weighted_sum({**wrapper(*args, **kwargs), "sum": torch.zeros(1)}))
            if i == 0 and between == "write":
                with torch.no_grad():
                    module.second.bias.add_(1)  # no gradient depends on it
            if i == 0 and between == "other data":
                module.second.weight.data = module.second.weight.data * 2
            if i == 0 and between == "other parameter":
                module.second.weight = nn.Parameter(module.second.weight.detach() * 2)
            if i == 0 and between == "no grad forward":
                with torch.no_grad():
                    wrapper(*args, **kwargs)
        for i in order:
            losses[i].backward()
        seen[who] = Seen(state=state_of(module))
    for who in ("torch's", "on chunks"):
        compare(seen["ours"], seen[who], torchs=who == "torch's")
