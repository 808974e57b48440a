"""Drawn arguments: nested containers, kinds of numbers, batches of any size, keywords."""

from collections import OrderedDict
from typing import NamedTuple

import torch
from comparison import backward, compare, grad_mode, watch, wrappers
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from on_chunks import like
from torch import nn

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


class Pair(NamedTuple):
    left: object
    right: object


class Mine(OrderedDict):
    pass


CONTAINERS = {
    "tuple": tuple,
    "list": list,
    "pair": lambda parts: Pair(parts[0], parts[-1]),
    "dict": lambda parts: {str(i): part for i, part in enumerate(parts)},
    "ordered": lambda parts: Mine((i, part) for i, part in enumerate(parts)),
}
SHARED = [None, 3, 2.5, "text", (), [], {}, range(3), frozenset("a")]


@st.composite
def structures(draw, depth=2):
    """Nested ("tensor", dtype, further sizes, layout), ("shared", i) or (container, parts)."""
    kind = draw(
        st.sampled_from(["tensor", "tensor", "shared", *CONTAINERS][: 3 if depth == 0 else None])
    )
    if kind == "tensor":
        shape = draw(st.sampled_from([(), (3,), (2, 3), (2, 0), (1, 2, 2)]))
        return kind, draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 3))
    if kind == "shared":
        return kind, draw(st.integers(0, len(SHARED) - 1))
    return kind, draw(st.lists(structures(depth - 1), min_size=1, max_size=3))


def build(structure, batch, dim, generator):
    kind, *rest = structure
    if kind == "shared":
        return SHARED[rest[0]]
    if kind != "tensor":
        return CONTAINERS[kind]([build(part, batch, dim, generator) for part in rest[0]])
    dtype, shape, layout = rest
    shape = {0: (batch, *shape), 1: (2, batch, *shape), -1: (2, batch)}[dim]
    if layout == 1:  # every second element
        shape = (*shape[:-1], 2 * shape[-1])
    x = 10 * torch.rand(shape, generator=generator, dtype=torch.float64) - 3
    x = x.to(dtype) * (1 - 2j) if dtype.is_complex else x.to(dtype)
    if layout == 1:
        x = x[..., ::2]
    if layout == 2:  # another order of memory
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 3 and (dtype.is_floating_point or dtype.is_complex):
        x.requires_grad_()
    return x


class Echo(nn.Module):
    """Returns its arguments, with other numbers in every tensor, and shared things as None."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, *args, **kwargs):
        return self.echo([args, kwargs])

    def echo(self, obj):
        if isinstance(obj, torch.Tensor):
            if obj.is_floating_point() or obj.is_complex():
                return obj * self.weight.to(obj.dtype)
            return obj.clone()
        if isinstance(obj, dict) and obj:
            return like(obj, [self.echo(entry) for entry in obj.values()])
        if isinstance(obj, (tuple, list)) and obj:
            return like(obj, [self.echo(entry) for entry in obj])
        return None


@examples(1800)
@given(
    args=st.lists(structures(), max_size=3),
    kwargs=st.dictionaries(st.sampled_from(["a", "b"]), structures(1), max_size=2),
    n=st.integers(1, 5),
    batches=st.lists(st.integers(0, 11), min_size=2, max_size=2),
    dim=st.sampled_from([0, 0, 1, -1]),
    mode=st.sampled_from(["grad", "no grad"]),
)
def test_structures(args, kwargs, n, batches, dim, mode):
    sides = wrappers(Echo, n, dim=dim, torch_too=torch_can(args, kwargs))
    for i, batch in enumerate(batches):

        def inputs(batch=batch, seed=i):
            generator = torch.Generator().manual_seed(seed)
            built = [build(part, batch, dim, generator) for part in args]
            return built, {
                name: build(part, batch, dim, generator) for name, part in kwargs.items()
            }

        seen = {}
        for who, wrapper in sides.items():
            with torch.no_grad():
                wrapper.module.weight += 0.25
            with grad_mode(mode):
                seen[who] = watch(
                    wrapper, wrapper.module, inputs, backward if mode == "grad" else None
                )
            seen[who].state = {"weight": wrapper.module.weight.grad}
        ours = seen.pop("ours")
        assert ours.error is None
        for who, theirs in seen.items():
            compare(ours, theirs, torchs=who == "torch's")


def torch_can(args, kwargs):
    """Whether torch's own code does the right thing with these arguments."""
    has_tensor = [_has_tensor(["tuple", args]), _has_tensor(["tuple", list(kwargs.values())])]
    # Otherwise it makes different numbers of positional and keyword arguments.
    return not (args and kwargs) or all(has_tensor)


def _has_tensor(structure):
    kind, *rest = structure
    return kind == "tensor" or (kind in CONTAINERS and any(map(_has_tensor, rest[0])))
