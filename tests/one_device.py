"""The wrapper against one device."""

import torch


def check_as_one_device(model, x):
    """Compares outputs and gradients with the bare module's, with and without gradients."""
    net = model.module.eval()
    grads = []
    for module in (model, net):
        net.zero_grad()
        module(x).pow(2).sum().backward()
        grads.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), net(x))
    net.train()
