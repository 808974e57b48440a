"""Runs ours, torch's and the module on its own side by side, and compares all that can be seen."""

import contextlib
import warnings
from dataclasses import dataclass, field

import torch
from notes import notes_of
from on_chunks import OnChunks
from torch import Tensor
from torch_on_cpu import TorchDataParallel

from pyparallel import DataParallel, virtual_devices

# 16-bit sums are rounded once by us, and after each rank by torch.
_TOLERANCES = {
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float64: 1e-6,  # of modules that also have float32 parameters
    torch.complex128: 1e-6,
}


@dataclass
class Seen:
    """What a program sees of one step."""

    output: object = None
    error: BaseException | None = None
    warnings: list = field(default_factory=list)
    grads: list = field(default_factory=list)
    state: dict = field(default_factory=dict)


def wrappers(build, n, *, output_device=None, dim=0, split="chunk", torch_too=True, **options):
    """Returns ``{"ours": ..., "torch's": ..., "on chunks": ...}``, around equal modules."""
    devices = virtual_devices(n)
    found = {
        "ours": DataParallel(build(), devices, output_device, dim, split=split, **options),
        "on chunks": OnChunks(build(), n, output_device, dim, split),
    }
    if torch_too:
        found["torch's"] = TorchDataParallel(build(), range(n), output_device, dim)
    return found


def watch(call, module, make_inputs, backward=None, seed=0):
    """Calls a wrapper and goes back through it; whatever it raises is part of what is seen.

    Args:
        call: The wrapper.
        module: The module in it.
        make_inputs: Returns positional and keyword arguments.
        backward: Gets tensors that require a gradient, the output, and the module.
    """
    seen = Seen()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        args, kwargs = make_inputs()
        inputs = [t for t in tensors((args, kwargs)) if t.requires_grad]
        torch.default_generator.manual_seed(seed)
        try:
            seen.output = call(*args, **kwargs)
            if backward is not None:
                seen.grads = backward(inputs, seen.output, module)
        except Exception as error:
            seen.error = error
    seen.warnings = sorted((_category(w), str(w.message)) for w in caught)
    return seen


def _category(warning):
    """Ours may be a subclass, so that it can be filtered."""
    return "UserWarning" if issubclass(warning.category, UserWarning) else warning.category.__name__


def weighted_sum(obj):
    """A number that depends on every element of all tensors that require a gradient."""
    total = 0.0
    for i, tensor in enumerate(tensors(obj)):
        if tensor.requires_grad:
            weights = torch.arange(1, tensor.numel() + 1, dtype=torch.float64).cos() + i
            value = tensor.real if tensor.is_complex() else tensor
            total = total + (value.reshape(-1).double() * weights).sum()
    return total


def backward(inputs, output, module):
    """The plain backward; gradients of parameters are compared with the state."""
    loss = weighted_sum(output)
    if isinstance(loss, Tensor):
        loss.backward()
    return [tensor.grad for tensor in inputs]


def state_of(module):
    """Parameters, buffers and gradients by name, and the notes that modules took."""
    state = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        state[name] = parameter
        state[name, "grad"] = parameter.grad
    for name, buffer in module.named_buffers(remove_duplicate=False):
        state[name] = buffer
        state[name, "grad"] = buffer.grad if buffer.is_leaf else None
    for name, part in module.named_modules():
        state[name, "training"] = part.training
        state[name, "attributes"] = part.__dict__.keys()
        if hasattr(part, "notes"):
            state[name, "notes"] = sorted(part.notes)
        if hasattr(part, "count"):
            state[name, "count"] = part.count
    return state


def compare(ours, theirs, *, torchs, tolerance=None):
    """Asserts that two steps look alike.

    Args:
        ours: What was seen of ours.
        theirs: What was seen of the reference.
        torchs: The reference is torch's, where parameters that nothing uses have zeros as gradients
            (ours are None, as on one device), and errors are new ones that hold the text of
            the original.
        tolerance: Relative and absolute; by default that of the dtype.
    """
    compare_errors(ours.error, theirs.error, torchs=torchs)
    assert ours.warnings == theirs.warnings
    if ours.error is not None:
        return  # how far the others came is nobody's promise
    same(ours.output, theirs.output, "output", tolerance)
    assert len(ours.grads) == len(theirs.grads)
    assert ours.state.keys() == theirs.state.keys()
    values = {**dict(enumerate(ours.grads)), **ours.state}
    others = {**dict(enumerate(theirs.grads)), **theirs.state}
    for name, value in values.items():
        other = others[name]
        if torchs and value is None and isinstance(other, Tensor) and not other.any():
            continue
        same(value, other, name, tolerance)


def compare_errors(ours, theirs, *, torchs):
    if ours is None or theirs is None:
        assert ours is theirs is None, (ours, theirs)
        return
    assert type(ours) is type(theirs), (ours, theirs)
    if torchs and str(theirs).startswith("Caught "):
        first_line = str(theirs).split("\n", 1)[0]
        assert first_line in notes_of(ours)
        assert str(ours) in str(theirs)
    else:
        assert str(ours) == str(theirs)


def same(ours, theirs, what, tolerance=None):
    """Asserts that two values are equal, tensors as far as rounding allows."""
    assert type(ours) is type(theirs), (what, ours, theirs)
    if isinstance(ours, Tensor):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, (what, ours, theirs)
        assert ours.requires_grad == theirs.requires_grad, what
        assert ours.layout == theirs.layout, what
        a, b = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (ours, theirs))
        tolerance = tolerance or _TOLERANCES.get(a.dtype, 0)
        assert torch.allclose(a, b, tolerance, tolerance, equal_nan=True), (what, a, b)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs), what
        for key, value in ours.items():
            same(value, theirs[key], f"{what}[{key!r}]", tolerance)
    elif isinstance(ours, (tuple, list)):
        assert len(ours) == len(theirs), what
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same(a, b, f"{what}[{i}]", tolerance)
    else:
        assert ours == theirs, what


def tensors(obj):
    if isinstance(obj, Tensor):
        yield obj
    elif isinstance(obj, (tuple, list)):
        for entry in obj:
            yield from tensors(entry)
    elif isinstance(obj, dict):
        yield from tensors(list(obj.values()))


def grad_mode(name):
    return {"grad": contextlib.nullcontext, "no grad": torch.no_grad}[name]()
