"""The Python code of ``torch.nn.DataParallel`` on ranks that are all the CPU, to compare ours with.

torch's class refuses the CPU, and what it calls to move tensors needs GPUs. Here only that is
replaced: the four autograd functions, the questions which devices there are, and streams. How
inputs are split, how modules are copied, how replicas run and fail, and how outputs are joined is
torch's own code. As on GPUs, the first rank works on the tensors of the module, and every other
rank on copies.
"""

import contextlib
import importlib
import threading
import warnings
from unittest import mock

import torch
from torch import nn

# Functions hide the modules of the same name.
_data_parallel = importlib.import_module("torch.nn.parallel.data_parallel")
_parallel_apply = importlib.import_module("torch.nn.parallel.parallel_apply")
_replicate = importlib.import_module("torch.nn.parallel.replicate")
_scatter_gather = importlib.import_module("torch.nn.parallel.scatter_gather")


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, devices, sizes, dim, tensor):
        ctx.dim = dim
        if sizes is None:
            pieces = tensor.chunk(len(devices), dim)
        else:
            pieces = tensor.split_with_sizes(sizes, dim)
        return pieces[0], *(piece.clone() for piece in pieces[1:])

    @staticmethod
    def backward(ctx, *grads):
        return None, None, None, Gather.apply(0, ctx.dim, *grads)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, target, dim, *tensors):
        ctx.dim = dim
        ctx.scalars = dim == 0 and all(tensor.dim() == 0 for tensor in tensors)
        if ctx.scalars:
            tensors = tuple(tensor.view(1) for tensor in tensors)
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; will "
                "instead unsqueeze and return a vector.",
                stacklevel=2,
            )
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        _check_shapes(tensors, dim)
        return torch.cat([tensor.to(tensors[0].dtype) for tensor in tensors], dim)

    @staticmethod
    def backward(ctx, grad):
        grads = Scatter.apply(range(len(ctx.sizes)), ctx.sizes, ctx.dim, grad)
        return None, None, *((g[0] for g in grads) if ctx.scalars else grads)


def _check_shapes(tensors, dim):
    """What ``torch.cuda.comm.gather`` refuses, with its texts."""
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dim() != first.dim():
            raise RuntimeError(
                "Expected all input tensors to have the same number of dimensions, but tensor at "
                f"index {i}has {tensor.dim()} dimensions, (expected {first.dim()})"
            )
        expected = list(first.shape)
        expected[dim] = tensor.size(dim)
        if list(tensor.shape) != expected:
            raise RuntimeError(
                f"Input tensor at index {i} has invalid shape {list(tensor.shape)}, but expected "
                f"{expected}"
            )


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, devices, *tensors):
        ctx.count = len(tensors)
        copies = _copies(tensors, devices)
        frozen = [i for i, needed in enumerate(ctx.needs_input_grad[1:]) if not needed]
        ctx.mark_non_differentiable(*(rank[i] for rank in copies for i in frozen))
        return tuple(copy for rank in copies for copy in rank)

    @staticmethod
    def backward(ctx, *grads):
        return None, *ReduceAdd.apply(ctx.count, *grads)


class ReduceAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, count, *grads):
        ranks = [grads[i : i + count] for i in range(0, len(grads), count)]
        ctx.devices = range(len(ranks))
        sums = []
        for column in zip(*ranks, strict=True):
            total = column[0].clone()
            for grad in column[1:]:
                total = total + grad
            sums.append(total)
        return tuple(sums)

    @staticmethod
    def backward(ctx, *grads):
        return None, *Broadcast.apply(ctx.devices, *grads)


def _copies(tensors, devices):
    copies = [[tensor.detach().clone() for tensor in tensors] for _ in devices[1:]]
    return [list(tensors), *copies]


def _broadcast_coalesced_reshape(tensors, devices, detach=False):
    if not tensors:
        return []
    if detach:
        return _copies(tensors, devices)
    copies = Broadcast.apply(devices, *tensors)
    return [list(copies[i : i + len(tensors)]) for i in range(0, len(copies), len(tensors))]


class _InTurn(threading.Thread):
    """A thread that has ended when ``start`` returns, so that random numbers have an order."""

    def start(self):
        super().start()
        self.join()


class _Accelerator:
    def is_available(self):
        return True

    def current_accelerator(self):
        return torch.device("cpu")

    def current_stream(self, device=None):
        return contextlib.nullcontext()

    def device_index(self, device):
        return contextlib.nullcontext()


class _Cuda:
    """What older torch, as 2.6, asks instead of ``torch.accelerator``."""

    Stream = torch.cuda.Stream

    def current_stream(self, device=None):
        return contextlib.nullcontext()

    def device(self, device):
        return contextlib.nullcontext()

    def stream(self, stream):
        return stream


class _Amp:
    def autocast(self, device_type, enabled):
        return torch.amp.autocast("cpu", enabled=enabled)


class _Torch:
    """The module ``torch``, on a machine whose accelerator is the CPU."""

    accelerator = _Accelerator()
    cuda = _Cuda()
    amp = _Amp()

    def __getattr__(self, name):
        return getattr(torch, name)

    def is_autocast_enabled(self):
        return torch.is_autocast_enabled("cpu")


class _TorchWithoutIndices(_Torch):
    def device(self, kind, index):
        return torch.device(kind)  # where CPU tensors are; "cpu:0" is another device


class _Threading:
    """The module ``threading``, with other threads."""

    Thread = _InTurn
    Lock = threading.Lock


def _index(device, *_):
    return 0 if device is None else device


@contextlib.contextmanager
def torch_on_cpu(ranks=1, in_turn=True):
    """While active, the functions of ``torch.nn.parallel`` take ints as CPU ranks.

    Args:
        ranks: What ``device_ids=None`` means.
        in_turn: Replicas run one after the other, although each in its thread.
    """
    fakes = {
        _data_parallel: {
            "torch": _TorchWithoutIndices(),
            "_get_available_device_type": lambda: "cpu",
            "_get_all_device_indices": lambda: list(range(ranks)),
            "_get_device_index": _index,
        },
        _replicate: {
            "_broadcast_coalesced_reshape": _broadcast_coalesced_reshape,
            "_get_device_index": _index,
        },
        _parallel_apply: {"torch": _Torch(), "_get_device_index": _index},
        _scatter_gather: {"Scatter": Scatter, "Gather": Gather},
    }
    if in_turn:
        fakes[_parallel_apply]["threading"] = _Threading
    with contextlib.ExitStack() as stack:
        for module, names in fakes.items():
            stack.enter_context(mock.patch.multiple(module, **names))
        yield


class TorchDataParallel(nn.DataParallel):
    """torch's class on CPU ranks; ``device_ids`` are ints."""

    def __init__(self, module, device_ids, output_device=None, dim=0, *, in_turn=True):
        with torch_on_cpu():
            super().__init__(module, device_ids, output_device, dim)
        self.in_turn = in_turn

    def forward(self, *inputs, **kwargs):
        with torch_on_cpu(in_turn=self.in_turn):
            return super().forward(*inputs, **kwargs)


def torch_data_parallel(module, inputs, device_ids, *args, **kwargs):
    """``torch.nn.parallel.data_parallel`` on CPU ranks."""
    with torch_on_cpu():
        return nn.parallel.data_parallel(module, inputs, device_ids, *args, **kwargs)
