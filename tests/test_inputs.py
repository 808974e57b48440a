"""What replicas get of the arguments: memory, devices, dtypes, classes, and gradients back."""

import warnings

import pytest
import torch
from tensors import COPIED, same_bits, values
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from pyparallel import DataParallel
from pyparallel.devices import resolve_devices
from pyparallel.scatter_gather import gather, scatter_kwargs


class Recorder(nn.Module):
    """Keeps the arguments of each replica, in the order of calls."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, *args, **kwargs):
        self.seen.append((*args, *kwargs.values()))
        return args


@pytest.fixture
def seen_by(make_devices):
    """Returns a function from a number of ranks and arguments to what the ranks got."""

    def run(n, *args, dim=0, **kwargs):
        module = Recorder()
        DataParallel(module, make_devices(n), dim=dim, dispatch="sequential")(*args, **kwargs)
        return module.seen

    return run


@pytest.mark.behaviour(32)
def test_every_tensor_is_split_whatever_it_means(seen_by):
    """A mask of (tokens, tokens) beside a batch of as many sentences is cut too."""
    x, mask = torch.randn(4, 6), torch.randn(4, 4)
    for rank, (_, part) in enumerate(seen_by(2, x, mask=mask)):
        assert torch.equal(part.cpu(), mask[2 * rank : 2 * rank + 2])


@pytest.mark.behaviour(42)
@pytest.mark.parametrize("n", [1, 3])
def test_arguments_come_in_two_tuples(n, make_devices):
    parts = scatter_kwargs(([torch.ones(3)],), {"a": 1}, resolve_devices(make_devices(n)))
    assert type(parts) is tuple
    for part, kind in zip(parts, (tuple, dict), strict=True):
        assert type(part) is tuple and [type(entry) for entry in part] == [kind] * n


@pytest.mark.behaviour(50)
@pytest.mark.parametrize("dtype", COPIED, ids=str)
def test_any_dtype(dtype, seen_by):
    x = values(dtype, 5, 2)
    parts = [part for (part,) in seen_by(3, x)]
    assert all(part.dtype == dtype for part in parts)
    assert same_bits(torch.cat([part.cpu().view(torch.uint8) for part in parts]), x)


@pytest.mark.behaviour(46)
def test_only_the_rank_that_holds_the_input_writes_to_it(make_devices, put):
    class Write(nn.Module):
        def forward(self, x):
            return x.add_(1)

    devices = make_devices(3)
    x = put(torch.zeros(6, 2), devices[0])
    DataParallel(Write(), devices)(x)
    assert x.cpu().sum(1).tolist() == [2, 2, 0, 0, 0, 0]


@pytest.mark.behaviour(30, 46)
def test_a_number_that_requires_a_gradient_is_the_callers_own():
    """No rank can change it, while autograd thinks that nothing did."""
    leaf = torch.tensor(2.0, requires_grad=True)
    number = leaf * 1
    args, _ = scatter_kwargs((number,), None, resolve_devices(["cpu:0", "cpu:1"]))
    for rank, (part,) in enumerate(args):
        part.mul_(rank + 3)
    assert number == 2
    (args[0][0] + args[1][0]).backward()
    assert leaf.grad == 7


class Labelled(torch.Tensor):
    """Hands its label on to what operations make of it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        for piece in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(piece, Labelled) and args and isinstance(args[0], Labelled):
                piece.label = getattr(args[0], "label", None)
        return result


@pytest.mark.behaviour(40)
@pytest.mark.parametrize("grad", [False, True])
def test_subclasses_of_tensor_stay_what_they_are(grad, make_devices, put):
    devices = resolve_devices(make_devices(3))
    batch, number = (
        put(t, make_devices(1)[0]).as_subclass(Labelled)
        for t in (torch.arange(5.0), torch.ones(()))
    )
    batch.label = number.label = "mine"
    batch.requires_grad_(grad)
    args, _ = scatter_kwargs((batch, number), None, devices)
    addresses = set()
    for (part, one), device in zip(args, devices, strict=True):
        for piece in (part, one):
            assert type(piece) is Labelled and piece.label == "mine"
            assert piece.device == device.torch_device
            addresses.add(piece.data_ptr())
    assert len(addresses) == 6
    joined = gather([part for part, _ in args], devices, devices[0])
    assert type(joined) is Labelled and joined.tolist() == batch.tolist()
    if grad:
        (joined * torch.arange(5.0, device=joined.device)).sum().backward()
        assert batch.grad.tolist() == [0, 1, 2, 3, 4]
    else:
        args[0][0].add_(torch.ones(1, device=batch.device, requires_grad=True))


@pytest.mark.behaviour(52)
@pytest.mark.parametrize("n", [1, 4])
def test_gradients_arrive_at_the_input_wherever_it_is(n, make_devices):
    """In host memory too, without torch's warning about -1."""
    x = torch.randn(5, 2, requires_grad=True)
    scale = torch.arange(10.0).view(5, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (y,) = DataParallel(Recorder(), make_devices(n))(x)
        (y * scale.to(y.device)).sum().backward()
    assert x.grad.device == x.device and torch.equal(x.grad, scale)


@pytest.mark.behaviour(52)
@pytest.mark.parametrize("size", [(5, 2), ()], ids=str)
def test_forward_may_turn_gradients_on_for_itself(size, make_devices):
    """As models do that compute forces as gradients of an energy, also in evaluation."""

    class Force(nn.Module):
        def forward(self, batch, x):
            assert x.requires_grad
            with torch.enable_grad():
                energy = (x**2).sum() + batch.sum()
            return torch.autograd.grad(energy, x)[0].expand(len(batch), 2)

    x = torch.randn(size, requires_grad=True)
    with torch.no_grad():
        y = DataParallel(Force(), make_devices(3))(torch.ones(5), x)
    torch.testing.assert_close(y, (2 * x.detach()).expand(5, 2).to(y.device))
    assert x.grad is None and not y.requires_grad


def test_one_device_gets_what_the_caller_has(make_devices, put):
    """Also what several could not share."""
    device = make_devices(1)[0]
    x = put(torch.ones(3, 2), device).requires_grad_() * 1
    packed = pack_sequence([x[0], x[1]])
    inputs = x, x.detach().to_sparse(), torch.ones((), device=x.device), packed
    module = Recorder()
    DataParallel(module, [device])(*inputs)
    for part, expected in zip(module.seen[0], inputs, strict=True):
        if isinstance(part, PackedSequence):
            assert part.data is packed.data and torch.equal(part.batch_sizes, packed.batch_sizes)
        else:
            assert part is expected
    module.seen[0][0].add_(1)  # as without the wrapper


@pytest.mark.cuda
@pytest.mark.behaviour(48)
@pytest.mark.parametrize("pinned", [False, True])
def test_host_memory_goes_to_gpus_in_the_background_if_pinned(pinned, make_devices):
    devices = resolve_devices(make_devices(2))
    x = torch.arange(2.0**24).view(2, -1)
    x = x.pin_memory() if pinned else x
    scatter_kwargs((x,), None, devices)  # loads what is loaded once
    for device in devices:
        torch.cuda.synchronize(device.torch_device)
    events = [torch.cuda.Event() for _ in devices]
    for device in devices:
        with torch.cuda.device(device.torch_device):
            torch.cuda._sleep(10**8)
    args, _ = scatter_kwargs((x,), None, devices)
    for event, device in zip(events, devices, strict=True):
        event.record(torch.cuda.current_stream(device.torch_device))
    assert not pinned or not events[-1].query()
    for rank, (part,) in enumerate(args):
        assert torch.equal(part.cpu(), x[rank : rank + 1])


@pytest.mark.cuda
@pytest.mark.behaviour(49)
def test_gpu_memory_is_read_after_the_work_on_the_current_streams(make_devices):
    devices = resolve_devices(make_devices(2))
    x = torch.zeros(2, 2**20, device=devices[0].torch_device)
    with torch.cuda.stream(torch.cuda.Stream(devices[0].torch_device)):
        torch.cuda._sleep(10**8)
        x.add_(1)
        args, _ = scatter_kwargs((x,), None, devices)
        for (part,) in args:
            assert bool((part == 1).all())
