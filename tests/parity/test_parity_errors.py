"""Drawn faults: errors of replicas, of inputs and of outputs, against those of torch."""

import torch
from comparison import compare, watch, wrappers
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from on_chunks import used
from torch import nn


class Custom(Exception):
    pass


# Of those that can be built from one string; torch makes a RuntimeError of the others.
ERRORS = [
    ValueError,
    RuntimeError,
    TypeError,
    IndexError,
    ZeroDivisionError,
    NotImplementedError,
    StopIteration,
    AssertionError,
    torch.OutOfMemoryError,
    Custom,
]


class Fails(nn.Module):
    """Raises for the chunks whose numbers are marked."""

    def __init__(self, error, text):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.error, self.text = error, text

    def forward(self, x):
        if x.min() < 0:
            raise self.error(self.text)
        return self.weight * x


@examples(400)
@given(
    error=st.sampled_from(ERRORS),
    text=st.sampled_from(["", "here", "two\nlines", "ünïcode %s {}"]),
    n=st.integers(1, 5),
    batch=st.integers(1, 9),
    marked=st.sets(st.integers(0, 8), min_size=1, max_size=3),
    dispatch=st.sampled_from(["sequential", "threads", "auto"]),
)
def test_errors_of_replicas(error, text, n, batch, marked, dispatch):
    sides = wrappers(lambda: Fails(error, text), n, dispatch=dispatch)
    marked = {row % batch for row in marked}
    for fails in (True, False, True):

        def inputs(fails=fails):
            x = torch.ones(batch, 1)
            if fails:
                x[list(marked)] = -1
            return (x,), {}

        seen = {who: watch(side, side.module, inputs) for who, side in sides.items()}
        assert (seen["ours"].error is not None) == fails
        for who in ("torch's", "on chunks"):
            compare(seen["ours"], seen[who], torchs=who == "torch's")


class Returns(nn.Module):
    """Returns what each chunk's first number says."""

    def __init__(self, first, others):
        super().__init__()
        self.first, self.others = first, others

    def forward(self, x):
        return self.make(self.first if x[0] == 0 else self.others, x)

    def make(self, kind, x):
        return {
            "rows": x,
            "more columns": x.reshape(-1, 1).expand(-1, 2),
            "scalar": x.sum(),
            "none": None,
            "pair": (x, x),
            "triple": (x, x, x),
            "dict": {"a": x},
            "two keys": {"a": x, "b": x},
            "other key": {"b": x},
            "nested": [{"a": (x, None)}],
        }[kind]


KINDS = [
    "rows",
    "more columns",
    "scalar",
    "none",
    "pair",
    "triple",
    "dict",
    "two keys",
    "other key",
    "nested",
]


@examples(400)
@given(
    first=st.sampled_from(KINDS),
    others=st.sampled_from(KINDS),
    n=st.integers(2, 4),
    batch=st.integers(1, 9),
)
def test_outputs_that_do_not_fit(first, others, n, batch):
    """What torch joins is joined; what it refuses is refused."""
    sides = wrappers(lambda: Returns(first, others), n)
    seen = {
        who: watch(side, side.module, lambda: ((torch.arange(batch),), {}))
        for who, side in sides.items()
        if who != "on chunks"
    }
    ours, theirs = seen["ours"], seen["torch's"]
    if {first, others} == {"rows", "none"} or (first == "none" and others != "none"):
        return  # torch drops what the others returned
    if theirs.error is None and ours.error is not None:
        # torch takes rows of a tensor for elements, and older torch as many as all replicas have.
        assert first in ("pair", "triple", "nested") and others != first
        return
    assert (ours.error is None) == (theirs.error is None), (ours.error, theirs.error)
    if ours.error is None:
        compare(ours, theirs, torchs=True)
    elif {first, others} == {"two keys", "dict"} or {first, others} == {"two keys", "other key"}:
        assert isinstance(ours.error, ValueError)
        assert str(ours.error).startswith(str(theirs.error))
    elif type(theirs.error) is RuntimeError and "shape" in str(theirs.error):
        assert isinstance(ours.error, RuntimeError)
        assert str(theirs.error) in str(ours.error)


@examples(300)
@given(
    sizes=st.lists(st.integers(2, 9), min_size=2, max_size=3),
    n=st.integers(2, 5),
    split=st.sampled_from(["chunk", "balanced"]),
)
def test_inputs_of_different_sizes_lose_nothing(sizes, n, split):
    """Every row arrives, or there is an error that names the sizes."""

    class Sums(nn.Module):
        def forward(self, *xs, last):
            return torch.stack([x.sum() for x in (*xs, last)]).reshape(1, -1)

    xs = [torch.arange(1.0, size + 1) for size in sizes]
    wrapper = wrappers(Sums, n, split=split)["ours"]
    seen = watch(wrapper, wrapper.module, lambda: (xs[:-1], {"last": xs[-1]}))
    if seen.error is None:
        assert torch.equal(seen.output.sum(0), torch.stack([x.sum() for x in xs]))
    else:
        assert isinstance(seen.error, ValueError) and str(sizes) in str(seen.error)
        assert len({used(torch.empty(size), n, 0, split) for size in sizes}) > 1


@examples(200)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dim=st.integers(-4, 3),
    n=st.integers(2, 4),
)
def test_dimensions_that_are_not_there(shape, dim, n):
    sides = wrappers(nn.Identity, n, dim=dim)
    seen = {
        who: watch(side, side.module, lambda: ((torch.ones(shape),), {}))
        for who, side in sides.items()
        if who != "on chunks"
    }
    ours, theirs = seen["ours"], seen["torch's"]
    assert type(ours.error) is type(theirs.error)
    assert (ours.error is None) == (-len(shape) <= dim < len(shape))
    if ours.error is None:
        compare(ours, theirs, torchs=True)
    else:
        assert str(theirs.error) in str(ours.error)
