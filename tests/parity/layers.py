"""Modules to draw: layers from (rows, 4) to (rows, 4), in float64, and containers of them."""

import functools

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

WIDTH = 4


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2, padding=1, stride=2).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(2, momentum=None)

    def forward(self, x):
        return self.norm(self.conv(x.reshape(-1, 1, 2, 2))).reshape(len(x), -1)[:, :WIDTH]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(2, WIDTH, batch_first=True)

    def forward(self, x):
        return self.rnn(x.reshape(-1, 2, 2))[0][:, -1]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        x = x.reshape(-1, 2, 2)
        return self.attention(x, x, x, need_weights=False)[0].reshape(-1, WIDTH)


class Lookup(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, **options)

    def forward(self, x):
        return x * self.table(torch.arange(len(x)) % 3)


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(2)])
        self.shifts = nn.ParameterDict({"a": nn.Parameter(torch.rand(())), "b": torch.rand(WIDTH)})

    def forward(self, x):
        for scale in self.scales:
            x = x * scale
        return x + self.shifts["a"] + self.shifts["b"]


class Buffers(nn.Module):
    """Buffers written in place, bound anew, not saved, of integers, and one with a gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("factor", torch.rand(WIDTH).requires_grad_())
        self.register_buffer("none", None)

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().sum(0))
            self.calls += 1
            self.last = x.detach().sum(0)
        return x * self.factor - self.mean + self.calls + self.last


class Gaps(nn.Module):
    """Parameters and modules that are None, unused, frozen, empty, and of other types."""

    def __init__(self):
        super().__init__()
        self.register_parameter("none", None)
        self.nothing = None
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.rand(()))
        self.small = nn.Parameter(torch.rand(WIDTH).half(), requires_grad=False)
        self.single = nn.Parameter(torch.rand(WIDTH, dtype=torch.float32))
        self.phase = nn.Parameter(torch.rand(WIDTH, dtype=torch.complex128))

    def forward(self, x):
        x = x * self.frozen + self.scalar * self.small * self.single
        return x + (self.phase * 1j).real + self.empty.sum()


class Sometimes(nn.Module):
    """Uses one parameter for some chunks, and another one for the others."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.other = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return x * self.weight if len(x) % 2 else x + self.other


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.rand(WIDTH, 2 * WIDTH)[:, ::2])
        self.turned = nn.Parameter(torch.rand(WIDTH, WIDTH).t())

    def forward(self, x):
        return x @ self.wide @ self.turned


class Cube(nn.Module):
    def forward(self, weight):
        return weight**3


class Noted(nn.Module):
    """Writes to a list that it holds."""

    def __init__(self):
        super().__init__()
        self.notes = []

    def forward(self, x):
        self.notes.append(len(x))
        return x


class Counting(nn.Module):
    """Sets attributes, which only this forward may see."""

    def __init__(self):
        super().__init__()
        self.count = 1

    def forward(self, x):
        self.count += 1
        self.kept = x
        return x * self.count


class OwnMethods(nn.Module):
    """Holds methods of its own, and modules in a list and a dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.run = self._run
        self.partial = functools.partial(self._run, factor=2)
        self.stages = [self.linear, torch.tanh]
        self.table = {"linear": self.linear}

    def _run(self, x, factor=1):
        return factor * self.table["linear"](x)

    def forward(self, x):
        return self.run(x) + self.partial(x) + self.stages[1](self.stages[0](x))


class SeesParameters(nn.Module):
    """Reads its parameters as a module does, which torch's replicas do not have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        penalty = sum(p.square().sum() for p in self.parameters())
        return x.to(next(self.parameters()).dtype) + penalty + len(self.state_dict())


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant and not (torch.is_grad_enabled() and x.requires_grad):
            return self.linear(x).tanh()
        call = torch.utils.checkpoint.checkpoint
        return call(self.linear, x, use_reentrant=self.use_reentrant).tanh()


def hooked():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_pre_hook(lambda module, args: (args[0] + module.bias,))
    layer.register_forward_hook(lambda module, args, output: output * module.weight.sum())
    layer.register_full_backward_hook(
        lambda module, grads, outer: (None if grads[0] is None else grads[0] * 2,)
    )
    return layer


def parametrized():
    layer = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(layer, "weight", Cube())
    return layer


def frozen():
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.requires_grad = False
    return layer


# All are continuous: where outputs differ in the last bit, they and their gradients stay close.
LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "tanh": nn.Tanh,
    "silu in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True)),
    "dropout": lambda: nn.Dropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "batch norm without statistics": lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "conv": Conv,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "embedding": Lookup,
    "sparse embedding": lambda: Lookup(sparse=True),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "parametrized": parametrized,
    "lists": Lists,
    "buffers": Buffers,
    "gaps": Gaps,
    "sometimes": Sometimes,
    "strided": Strided,
    "hooked": hooked,
    "frozen": frozen,
    "noted": Noted,
    "counting": Counting,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
    "own methods": OwnMethods,
    "sees parameters": SeesParameters,
}

# Where torch's replicas are wrong: there only the module on its own tells what is right.
TORCH_IS_WRONG = {"own methods", "sees parameters"}


class Sum(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return sum(part(x) for part in self.parts)


class Named(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = nn.ModuleDict({str(i): part for i, part in enumerate(parts)})

    def forward(self, x):
        for name in sorted(self.parts):
            x = torch.tanh(x) + self.parts[name](x)
        return x


class Twice(nn.Module):
    """One module under two names, and its parameters under another one."""

    def __init__(self, parts):
        super().__init__()
        self.first = nn.Sequential(*parts)
        self.second = self.first
        for parameter in self.first.parameters():
            self.tied = parameter

    def forward(self, x):
        x = self.second(F.softsign(self.first(x)))
        return x + self.tied.sum() if hasattr(self, "tied") else x


CONTAINERS = {
    "sequential": lambda parts: nn.Sequential(*parts),
    "sum": Sum,
    "named": Named,
    "twice": Twice,
}


@st.composite
def architectures(draw, depth=2):
    """(container, parts), where a part is the name of a layer or another architecture."""
    parts = draw(st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=3))
    if depth > 1 and draw(st.booleans()):
        parts.append(draw(architectures(depth - 1)))
    return draw(st.sampled_from(list(CONTAINERS))), parts


def build(architecture, seed=0):
    """The module, with the same weights at each call."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.default_generator.manual_seed(seed)
        return _build(architecture)
    finally:
        torch.set_default_dtype(default)


def _build(architecture):
    if isinstance(architecture, str):
        return LAYERS[architecture]()
    container, parts = architecture
    return CONTAINERS[container]([_build(part) for part in parts])


def names(architecture):
    if isinstance(architecture, str):
        return {architecture}
    return set().union(*map(names, architecture[1]))
