"""Drawn modules in three steps, with changes of the weights between them."""

import torch
from changes import CHANGES, apply_change
from comparison import backward, compare, grad_mode, state_of, watch, wrappers
from drawing import examples
from hypothesis import given
from hypothesis import strategies as st
from layers import TORCH_IS_WRONG, WIDTH, architectures, build, names

STEPS = 3


@examples(1200)
@given(
    architecture=architectures(),
    n=st.integers(1, 5),
    batches=st.lists(st.integers(0, 9), min_size=STEPS, max_size=STEPS),
    changes=st.lists(st.sampled_from(list(CHANGES)), min_size=STEPS - 1, max_size=STEPS - 1),
    modes=st.lists(st.sampled_from(["grad", "grad", "no grad"]), min_size=STEPS, max_size=STEPS),
    dispatch=st.sampled_from(["sequential", "threads", "auto"]),
    bucket_cap_mb=st.sampled_from([None, 1e-4]),
    leaf=st.booleans(),
)
def test_modules(architecture, n, batches, changes, modes, dispatch, bucket_cap_mb, leaf):
    if "dropout" in names(architecture) and dispatch == "threads":
        dispatch = "auto"  # with threads at once, nobody knows who draws first
    sides = wrappers(
        lambda: build(architecture),
        n,
        # Where a nested backward does not reach a parameter, torch adds zeros, which are dense.
        torch_too=not TORCH_IS_WRONG & names(architecture)
        and not {"sparse embedding", "reentrant checkpoint"} <= names(architecture),
        dispatch=dispatch,
        bucket_cap_mb=bucket_cap_mb,
    )
    for i, (batch, mode, change) in enumerate(
        zip(batches, modes, ["nothing", *changes], strict=True)
    ):

        def inputs(batch=batch, seed=i):
            generator = torch.Generator().manual_seed(seed)
            x = torch.rand(batch, WIDTH, generator=generator, dtype=torch.float64)
            return ((x - 0.5).requires_grad_(leaf),), {}

        seen = {}
        for who, wrapper in sides.items():
            apply_change(change, wrapper.module, i)
            with grad_mode(mode):
                seen[who] = watch(
                    wrapper, wrapper.module, inputs, backward if mode == "grad" else None
                )
            seen[who].state = state_of(wrapper.module)
        ours = seen.pop("ours")
        for who, theirs in seen.items():
            compare(ours, theirs, torchs=who == "torch's")
        if ours.error is not None:
            break
