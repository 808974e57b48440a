"""Weights of every kind on all ranks: dtypes, sizes and layouts, and their gradients."""

import copy

import pytest
import torch
from torch import nn

from pyparallel import DataParallel
from pyparallel.devices import resolve_devices

pytestmark = pytest.mark.usefixtures("on_the_first_device")

N = 3


@pytest.fixture
def replicas_of(wrap):
    return lambda module: wrap(module).replicate(module, list(range(N)))


def numbers(dtype, *size):
    return torch.arange(1, 1 + torch.Size(size).numel()).view(size).to(dtype)


class Mixed(nn.Module):
    """Complex tensors behind an odd number of real ones, no elements, no dimensions."""

    KINDS = (
        (torch.float32, (3,)),
        (torch.complex64, (2,)),
        (torch.float16, (5,)),
        (torch.complex128, (1,)),
        (torch.float64, ()),
        (torch.bfloat16, (1,)),
        (torch.float32, (0, 4)),
        (torch.complex64, ()),
        (torch.float32, (1,)),
    )

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(numbers(t, *s)) for t, s in self.KINDS)
        for k, (dtype, size) in enumerate(self.KINDS):
            self.register_buffer(f"buffer{k}", numbers(dtype, *size))

    def forward(self, x):
        return x * sum(weight.to(torch.complex128).abs().sum() for weight in self.weights)


@pytest.mark.behaviour(102, 104, 106, 163)
@pytest.mark.parametrize("grad", [False, True])
def test_each_dtype_and_size(grad, wrap, replicas_of):
    module = Mixed()
    with torch.set_grad_enabled(grad):
        for replica in replicas_of(module):
            for name, tensor in module.state_dict().items():
                copied = replica.state_dict()[name]
                assert copied.dtype == tensor.dtype and copied.shape == tensor.shape
                assert torch.equal(copied.to(tensor.device), tensor)
    reference = copy.deepcopy(module)
    if not grad:
        return
    x = numbers(torch.float64, N, 1)
    wrap(module)(x).sum().backward()
    reference(x).sum().backward()
    for parameter, expected in zip(module.parameters(), reference.parameters(), strict=True):
        assert parameter.grad.dtype == parameter.dtype
        torch.testing.assert_close(parameter.grad, expected.grad)


@pytest.mark.behaviour(105)
@pytest.mark.parametrize(
    "dtype",
    [torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int8, torch.complex32],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_dtypes_that_need_not_be_added(dtype, replicas_of):
    module = nn.Module()
    module.frozen = nn.Parameter(numbers(torch.float32, 5).to(dtype), requires_grad=False)
    module.register_buffer("buffer", numbers(torch.float32, 3).to(dtype))
    for replica in replicas_of(module):
        for copied, original in ((replica.frozen, module.frozen), (replica.buffer, module.buffer)):
            assert copied.dtype == dtype
            same = copied.to(original.device).view(torch.uint8) == original.view(torch.uint8)
            assert bool(same.all())
        assert type(replica.frozen) is nn.Parameter


def sparse(layout, coalesced=True):
    if layout == "coo":
        indices = [[0, 1, 2], [1, 2, 0]] if coalesced else [[0, 0, 2], [1, 1, 0]]
        tensor = torch.sparse_coo_tensor(indices, [1.0, 2.0, 3.0], (3, 3), check_invariants=True)
        return tensor.coalesce() if coalesced else tensor
    return torch.tensor([[0.0, 1, 0], [0, 0, 2], [3, 0, 0]]).to_sparse_csr()


class Sparse(nn.Module):
    def __init__(self, tensor, trained):
        super().__init__()
        if trained:
            self.weight = nn.Parameter(tensor)
        else:
            self.register_buffer("weight", tensor)

    def forward(self, x):
        return torch.sparse.mm(self.weight, x.t()).t()


@pytest.mark.behaviour(103)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [lambda: sparse("coo"), lambda: sparse("coo", coalesced=False), lambda: sparse("csr")],
    ids=["coalesced", "uncoalesced", "csr"],
)
def test_sparse_weights(tensor, trained, grad, wrap, replicas_of):
    module = Sparse(tensor(), trained)
    expected = module.weight.detach().to_dense()
    x = torch.randn(2 * N, 3, requires_grad=True)
    with torch.set_grad_enabled(grad):
        for replica in replicas_of(module):
            assert replica.weight.layout == module.weight.layout
            if module.weight.layout is torch.sparse_coo:
                assert replica.weight.is_coalesced() == module.weight.is_coalesced()
        y = wrap(module)(x)
    torch.testing.assert_close(y, x @ expected.t())
    if grad:
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(2 * N, 3) @ expected)
    if grad and trained:
        full = torch.ones(3, 2 * N) @ x.detach()
        found = module.weight.grad.to_dense()
        torch.testing.assert_close(found, torch.where(expected != 0, full, 0))


LAYOUTS = {
    "contiguous": lambda t: t.contiguous(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "with gaps": lambda t: torch.cat([t, t], 3)[..., ::2],
}


@pytest.mark.behaviour(161)
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("float16",) * 2, ("float32", "float16")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_have_the_layout_that_they_have_without_the_wrapper(layout, dtypes, wrap):
    """In the first step, and in the second, which adds to gradients that were zeroed."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            for name, dtype in zip("ab", dtypes, strict=True):
                weight = LAYOUTS[layout](torch.randn(4, 3, 2, 2, dtype=getattr(torch, dtype)))
                setattr(self, name, nn.Parameter(weight))

        def forward(self, x):
            return (x * self.a * self.b).flatten(1).sum(1)

    module = Layers()
    torch.manual_seed(0)
    bare = Layers()  # a deepcopy has no gaps
    x = torch.randn(4, 3, 2, 2)
    model = wrap(module, 2)
    for _ in range(2):
        model(torch.stack([x, x])).sum().backward()
        for _ in range(2):
            bare(x[None]).sum().backward()
        for parameter, expected in zip(module.parameters(), bare.parameters(), strict=True):
            assert parameter.grad.stride() == expected.grad.stride()
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=2e-3, atol=1e-3)
            parameter.grad.zero_()
            expected.grad.zero_()


@pytest.mark.behaviour(157)
def test_gradients_and_the_state_of_the_optimizer_are_on_the_first_device(wrap, make_devices):
    module = nn.Linear(2, 2)
    model = wrap(module)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2 * N, 2)).sum().backward()
    optimizer.step()
    device = module.weight.device
    state = [t for entries in optimizer.state.values() for t in entries.values() if t.dim()]
    assert all(t.device == device for t in (module.weight.grad, module.bias.grad, *state))


@pytest.mark.behaviour(167)
def test_two_runs_have_the_same_bits(wrap):
    module, x = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)), torch.randn(100, 7)
    runs = []
    for _ in range(2):
        model = wrap(copy.deepcopy(module))
        model(x).square().sum().backward()
        runs.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *runs))


@pytest.mark.behaviour(165)
def test_a_gradient_scaler_works_with_the_joined_output(wrap):
    module, x = nn.Linear(4, 2), torch.randn(2 * N, 4)
    bare = copy.deepcopy(module)
    for model, called in ((module, wrap(module)), (bare, bare)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(x.device.type, init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            loss = called(x if step != 1 else x * float("inf")).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**10  # halved once, doubled once
    for parameter, expected in zip(module.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.cuda
@pytest.mark.behaviour(168)
@pytest.mark.parametrize("dispatch", ["sequential", "threads"])
def test_a_stream_of_the_caller(dispatch, make_devices):
    """Work of replicas comes after what is queued on the caller's streams, and before the rest."""
    devices = resolve_devices(make_devices(2))
    streams = {d: torch.cuda.Stream(d.torch_device) for d in devices}
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append((x.device, torch.cuda.current_stream(x.device)))
            return super().forward(x)

    module = Net(2, 2)
    model = DataParallel(module, make_devices(2), dispatch=dispatch)
    x = torch.zeros(4, 2)
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[devices[1]]), torch.cuda.stream(streams[devices[0]]):
        torch.cuda._sleep(10**8)
        x.add_(1)
        y = model(x).sum()
        y.backward()
        assert torch.allclose(y, 4 * (module.weight.sum() + module.bias.sum()))
        assert torch.equal(module.bias.grad, torch.full((2,), 4.0))
    assert set(seen) == {(device.torch_device, stream) for device, stream in streams.items()}


@pytest.mark.behaviour(82)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules_may_flatten_their_weights(kind, grad, wrap):
    """On GPUs that moves them to other memory."""

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = kind(2, 3, num_layers=2, batch_first=True)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    module, x = Flat(), torch.randn(2 * N, 4, 2)
    model = wrap(copy.deepcopy(module), dispatch="sequential")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, model)]
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            expected, y = module(x), model(x)
            torch.testing.assert_close(y, expected)
            for out, optimizer in zip((expected, y), optimizers, strict=True):
                if grad:
                    optimizer.zero_grad()
                    out.pow(2).sum().backward()
                    optimizer.step()
