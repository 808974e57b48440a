"""What dispatch wants to know about a tree of modules, without searching it at each call."""

import sys
import weakref

import torch
from torch import nn


class Contents:
    """The modules of a tree when this was made; keeps none of them alive."""

    def __init__(self, tree: nn.Module) -> None:
        modules = list(tree.modules())
        self._modules = [weakref.ref(module) for module in modules]
        self._has_compiled = any(_is_compiled(module) for module in modules)

    def training(self) -> bytes:
        """A byte for each module: is it in training mode?"""
        return bytes([ref().training for ref in self._modules])  # type: ignore[union-attr]

    def may_draw(self) -> bool:
        """Whether a module is known to draw random numbers, such as dropout in training."""
        return any(_draws(ref()) for ref in self._modules)

    def compiled(self) -> bool:
        """Whether there is code of torch.compile, ``Module.compile`` or torch.jit."""
        return self._has_compiled or any(
            getattr(ref(), "_compiled_call_impl", None) is not None for ref in self._modules
        )


def _is_compiled(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return True
    # If nobody imported dynamo, nothing else is compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    if isinstance(module, dynamo.OptimizedModule):
        return True
    functions = (type(module).forward, *module.__dict__.values())
    return any(hasattr(function, "_torchdynamo_orig_callable") for function in functions)


def _draws(module: nn.Module | None) -> bool:
    if module is None or not module.training:
        return False
    # Recurrent and attention modules, and many of other packages, have the rate as an attribute.
    rate = module.__dict__.get("dropout")
    has_rate = isinstance(rate, (int, float)) and rate > 0
    return has_rate or isinstance(module, (nn.modules.dropout._DropoutNd, nn.RReLU))
