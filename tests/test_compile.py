"""torch.compile inside the wrapper, around it, and in place, each against the bare module."""

import pytest
import torch
from trained import Net, gradients, make_pair, train

from pyparallel import DataParallel

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`",
    "ignore:In Dynamo, calling `functools",
)


@pytest.fixture
def pair(make_devices):
    """Returns a function that makes a bare module, the same module wrapped, and a batch."""
    return lambda module=Net, n=3, rows=7: make_pair(make_devices(n), module, rows)


def compile_inside(dp, backend):
    return DataParallel(torch.compile(dp.module, backend=backend), dp.device_ids)


def compile_a_part(dp, backend):
    dp.module.first = torch.compile(dp.module.first, backend=backend)
    return dp


def compile_in_place(dp, backend):
    dp.module.compile(backend=backend)
    return dp


def compile_a_part_in_place(dp, backend):
    dp.module.second.compile(backend=backend)
    return dp


def compile_around(dp, backend):
    return torch.compile(dp, backend=backend)


def compile_around_in_place(dp, backend):
    dp.compile(backend=backend)
    return dp


COMPILATIONS = [
    compile_inside,
    compile_a_part,
    compile_in_place,
    compile_a_part_in_place,
    compile_around,
    compile_around_in_place,
]


@pytest.fixture
def counting_backend():
    """A backend that runs graphs as they are, and its list of them."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    yield backend, graphs
    torch._dynamo.reset()


@pytest.mark.behaviour(88, 89, 90)
@pytest.mark.parametrize("compilation", COMPILATIONS)
def test_compiled_code_trains_as_the_bare_module(compilation, pair, counting_backend):
    backend, graphs = counting_backend
    net, dp, x = pair()
    inner = dp.module
    names = [name for name, _ in inner.named_parameters()]
    model = compilation(dp, backend)
    torch.testing.assert_close(train(model, x), train(net, x))
    if compilation not in (compile_around, compile_around_in_place):
        assert graphs, "nothing was compiled"
    assert len(list(inner.parameters())) == len(names), "the user's module lost its parameters"
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x))


@pytest.mark.parametrize("compilation", [compile_inside, compile_in_place])
def test_graphs_with_autograd_see_the_weights_of_their_replica(compilation, pair):
    torch._dynamo.reset()
    net, dp, x = pair()
    torch.testing.assert_close(train(compilation(dp, "aot_eager"), x), train(net, x))


def test_a_compiled_function_that_calls_the_wrapper(pair):
    net, dp, x = pair()

    @torch.compile(backend="eager")
    def loss(model, x):
        return model(x * 2).square().sum() + 1

    torch.testing.assert_close(loss(dp, x), loss(net, x))
    for model in (net, dp):
        loss(model, x).backward()
    torch.testing.assert_close(gradients(dp), gradients(net))


@pytest.mark.parametrize("n", [1, 3])
def test_a_compiled_wrapper_is_not_compiled_again_and_again(n, pair, counting_backend):
    backend, graphs = counting_backend
    net, dp, _ = pair(n=n)
    model = torch.compile(dp, backend=backend)
    # dynamo gives up after eight versions of one function, with a warning.
    names = ("fail_on_recompile_limit_hit", "fail_on_cache_limit_hit")  # the second in torch 2.6
    (limit, *_) = (name for name in names if hasattr(torch._dynamo.config, name))
    with torch._dynamo.config.patch({limit: True}):
        for mode in (torch.enable_grad, torch.no_grad):
            for rows in (8, 7, 6, 5, 4, 3):
                x = torch.randn(rows, 3, dtype=torch.float64, device=dp.module.first.weight.device)
                with mode():
                    torch.testing.assert_close(model(x), net(x))
                model.train(not model.training)
    assert n > 1 or graphs, "with one device the module is compiled"


def test_checkpoints_of_a_compiled_module(pair):
    net, dp, x = pair()
    compiled = compile_inside(dp, "eager")
    compiled(x).sum().backward()
    keys = list(compiled.state_dict())
    assert keys == ["module._orig_mod." + key for key in net.state_dict()]
    compiled.load_state_dict({k: torch.ones_like(v) for k, v in compiled.state_dict().items()})
    assert dp.module.first.weight.eq(1).all()
