"""Forward-mode AD and other transforms: refused with a clear error, wherever they come from."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from pyparallel import DataParallel, comm
from pyparallel.forward_ad import refuse_tangents

TEXT = "Trying to use forward AD with {} that does not support it"


def dual(tensor):
    return forward_ad.make_dual(tensor, torch.ones_like(tensor))


def test_only_tensors_with_a_tangent_are_refused():
    plain = [torch.ones(2), torch.ones(2, dtype=torch.int64), torch.eye(2).to_sparse()]
    refuse_tangents("op", plain)
    with forward_ad.dual_level():
        refuse_tangents("op", plain)
        with pytest.raises(NotImplementedError, match=TEXT.format("op") + r".*\[2\]"):
            refuse_tangents("op", [*plain, dual(plain[0])])


@pytest.fixture(params=[False, True], ids=["frozen", "trained"])
def model(request, make_devices):
    torch.manual_seed(0)
    names = make_devices(2)
    where = "cpu" if names[0].startswith("cpu") else names[0]
    module = nn.Linear(3, 2).to(where).requires_grad_(request.param)
    return DataParallel(module, device_ids=names)


def batch(model):
    return torch.ones(4, 3, device=model.module.bias.device)


@pytest.mark.report("pytorch#94896")
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_input(model, wants_gradient):
    x = batch(model).requires_grad_(wants_gradient)
    with forward_ad.dual_level():
        for args, kwargs in (((dual(x),), {}), ((), {"input": dual(x)})):
            with pytest.raises(NotImplementedError, match=TEXT.format("scatter")):
                model(*args, **kwargs)
        assert model(x).shape == (4, 2)
    assert model(x).shape == (4, 2)


def test_parameter_and_buffer(model):
    x, module = batch(model), model.module
    with forward_ad.dual_level():
        for entries in (module._parameters, module._buffers):
            entries["extra"] = dual(torch.ones(2, device=x.device))
            with pytest.raises(NotImplementedError, match=TEXT.format("broadcast")):
                model(x)
            del entries["extra"]


def test_output(model):
    x = batch(model)

    def add_tangent(module, args, output):
        return dual(output.detach())

    model.module.register_forward_hook(add_tangent)
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match=TEXT.format("gather")),
    ):
        model(x)


def test_without_devices_tangents_pass():
    model = DataParallel(nn.Linear(3, 2), device_ids=[])
    weight = model.module.weight
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(model(dual(batch(model)))).tangent
    torch.testing.assert_close(tangent, weight.sum(1).expand(4, 2))


def test_collectives(make_devices, put):
    names = make_devices(2)
    with forward_ad.dual_level():
        tensors = [dual(put(torch.ones(2), d)) for d in names]
        for operation, call in (
            ("broadcast", lambda: comm.broadcast(tensors[0], names)),
            ("broadcast", lambda: comm.broadcast_coalesced(tensors[:1], names)),
            ("reduce_add", lambda: comm.reduce_add(tensors, names[0])),
            ("all_reduce", lambda: comm.all_reduce(tensors)),
            ("gather", lambda: comm.gather(tensors, 0, names[0])),
            ("scatter", lambda: comm.scatter(tensors[0], names)),
            ("scatter", lambda: comm.scatter(tensors[0], out=[t.clone() for t in tensors])),
        ):
            with pytest.raises(NotImplementedError, match=TEXT.format(operation)):
                call()


def sums(call):
    return lambda x: call(x).sum()


TRANSFORMS = {
    "vmap": lambda call, x: torch.func.vmap(call)(x[None]),
    "grad": lambda call, x: torch.func.grad(sums(call))(x),
    "vjp": lambda call, x: torch.func.vjp(call, x)[0],
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,))[0],
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
}


@pytest.mark.behaviour(166)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_on_several_devices_only(name, model, make_devices):
    """Wherever what is transformed comes in: as an input or from outside."""
    transform, x, module = TRANSFORMS[name], batch(model), model.module
    for call in (model, lambda t: t[0, 0] * model(x)):
        with pytest.raises(NotImplementedError, match=r"cannot be transformed by torch\.func"):
            transform(call, x)
    expected = transform(module, x)
    torch.testing.assert_close(transform(DataParallel(module, make_devices(1)), x), expected)
    assert model(x).shape == (4, 2)


@pytest.mark.behaviour(166)
def test_a_transform_of_the_weights_is_refused(model):
    around, x = nn.Sequential(model), batch(model)
    weights = {name: p.detach() for name, p in around.named_parameters()}
    assert torch.func.functional_call(around, weights, (x,)).shape == (4, 2)
    with pytest.raises(NotImplementedError, match=r"cannot be transformed by torch\.func"):
        torch.func.grad(lambda w: torch.func.functional_call(around, w, (x,)).sum())(weights)


@pytest.mark.behaviour(54)
@pytest.mark.parametrize("wanted", ["input", "weight"])
def test_batched_gradients_are_refused(wanted, model):
    x = batch(model).requires_grad_()
    if wanted == "weight" and not model.module.weight.requires_grad:
        pytest.skip("the weights are frozen")
    y = model(x)
    with pytest.raises(NotImplementedError, match="scatter: a tensor of shape .* is_grads_batched"):
        torch.autograd.grad(
            y,
            x if wanted == "input" else model.module.weight,
            torch.ones(3, *y.shape, device=y.device),
            is_grads_batched=True,
        )
