"""What a program may do to a module between two forwards, for every way that weights change."""

import random

import torch
from torch import nn


def _noise(tensor, generator):
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) - 0.5
    return noise.to(tensor.dtype)


def step(module, chance, noise):
    """As an optimizer does."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.01)


def foreach_step(module, chance, noise):
    """As an optimizer does for all parameters at once."""
    dense = [p for p in module.parameters() if p.grad is not None and not p.grad.is_sparse]
    if dense:
        with torch.no_grad():
            torch._foreach_add_(dense, [p.grad for p in dense], alpha=-0.01)


def write_data(module, chance, noise):
    """Behind the back of autograd, which counts no version."""
    for parameter in module.parameters():
        parameter.data.add_(noise(parameter))


def write_one(module, chance, noise):
    parameters = [p for p in module.parameters() if p.dim()]
    if parameters:
        parameter = chance.choice(parameters)
        parameter.data[:1].add_(1)


def other_data(module, chance, noise):
    parameters = list(module.parameters())
    if parameters:
        parameter = chance.choice(parameters)
        parameter.data = parameter.data + noise(parameter)


def load(module, chance, noise):
    state = {name: tensor + noise(tensor) for name, tensor in module.state_dict().items()}
    module.load_state_dict(state)


def assign(module, chance, noise):
    state = {name: tensor + noise(tensor) for name, tensor in module.state_dict().items()}
    module.load_state_dict(state, assign=True)


def new_parameter(module, chance, noise):
    owners = [
        (m, name) for m in module.modules() for name, p in m._parameters.items() if p is not None
    ]
    if owners:
        owner, name = chance.choice(owners)
        old = getattr(owner, name)
        owner._parameters[name] = nn.Parameter(old.detach() + noise(old), old.requires_grad)


def freeze(module, chance, noise):
    parameters = list(module.parameters())
    if parameters:
        parameter = chance.choice(parameters)
        parameter.requires_grad_(not parameter.requires_grad)


def freeze_all(module, chance, noise):
    module.requires_grad_(False)


def write_buffers(module, chance, noise):
    for buffer in module.buffers():
        with torch.no_grad():
            buffer.add_(noise(buffer).abs().to(buffer.dtype))


def new_buffer(module, chance, noise):
    for m in module.modules():
        for name, buffer in m._buffers.items():
            if buffer is not None and not buffer.requires_grad:
                m._buffers[name] = buffer.clone()


def mode(module, chance, noise):
    module.train(not module.training)


def mode_of_one(module, chance, noise):
    one = chance.choice(list(module.modules()))
    one.training = not one.training


def new_module(module, chance, noise):
    """Appends a layer, or replaces one."""
    containers = [m for m in module.modules() if isinstance(m, (nn.Sequential, nn.ModuleList))]
    if containers:
        container = chance.choice(containers)
        layer = nn.Linear(4, 4, dtype=torch.float64)
        if len(container) > 1 and chance.random() < 0.5:
            container[chance.randrange(len(container))] = layer
        else:
            container.append(layer)


def add_hook(module, chance, noise):
    layer = chance.choice(list(module.modules()))
    layer.register_forward_hook(
        lambda module, args, output: output * 2 if isinstance(output, torch.Tensor) else output
    )


def add_parameter_hook(module, chance, noise):
    trainable = [p for p in module.parameters() if p.requires_grad]
    if trainable:
        chance.choice(trainable).register_hook(lambda grad: grad * 3)


def zero_grad(module, chance, noise):
    module.zero_grad(set_to_none=False)


def no_grads(module, chance, noise):
    module.zero_grad()


def nothing(module, chance, noise):
    pass


CHANGES = {
    change.__name__: change
    for change in (
        step,
        foreach_step,
        write_data,
        write_one,
        other_data,
        load,
        assign,
        new_parameter,
        freeze,
        freeze_all,
        write_buffers,
        new_buffer,
        mode,
        mode_of_one,
        new_module,
        add_hook,
        add_parameter_hook,
        zero_grad,
        no_grads,
        nothing,
    )
}


def apply_change(name, module, seed):
    """Makes the change; with the same seed the same one to modules that are built alike."""
    generator = torch.Generator().manual_seed(seed)
    torch.default_generator.manual_seed(seed)
    CHANGES[name](module, random.Random(seed), lambda tensor: _noise(tensor, generator))
