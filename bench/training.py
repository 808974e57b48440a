"""Forwards and training steps of one model, run by three: the bare module, ours, and torch's.

The bare module takes each rank's chunk in turn, in one thread. Its step computes the same: one
backward through the joined outputs, then SGD. All three start from equal weights.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import astuple

import torch
from bars import Sample, in_turns, sample
from rows import Row, compared
from torch import Tensor, nn
from torch_ranks import TorchRanks

import pyparallel

NRANKS = 4
# Calls before the first that counts: "auto" has then measured both ways.
WARM_UP = 20
# Calls of one side in a round, as in a loop: the first finds CPUs as another side left them.
IN_A_ROW = 5

Model = Callable[[Tensor], Tensor]
Call = Callable[[], object]


def training_rows(
    name: str, model: nn.Module, x: Tensor, bars: tuple[float, float], rounds: tuple[int, int]
) -> list[Row]:
    """Measures forward without gradients, and step.

    Args:
        name: Of the model.
        model: Is not changed.
        x: A batch for all ranks.
        bars: Largest ratios to the bare module, of forward and step.
        rounds: How many measurements of each.
    """
    return [
        _row(name, "forward without grad", _forward, model, x, bars[0], rounds[0]),
        _row(name, "step", _step, model, x, bars[1], rounds[1]),
    ]


def _row(
    name: str,
    mode: str,
    prepare: Callable[[Model, nn.Module, Tensor], Call],
    model: nn.Module,
    x: Tensor,
    bar: float,
    rounds: int,
) -> Row:
    modules = {side: copy.deepcopy(model) for side in SIDES}
    calls = {
        side: prepare(wrap(modules[side], NRANKS), modules[side], x) for side, wrap in SIDES.items()
    }
    results = {side: [call(), *modules[side].parameters()] for side, call in calls.items()}
    wrong = sum(_wrong(result, results["bare"]) for result in results.values())
    for _ in range(WARM_UP):
        calls["ours"]()
    samples = in_turns({side: functools.partial(_in_a_row, calls[side]) for side in SIDES}, rounds)
    return compared(name, NRANKS, mode, samples, bar, wrong)


def _in_a_row(call: Call) -> Sample:
    """One call, on average."""
    samples = [sample(call) for _ in range(IN_A_ROW)]
    return Sample(*(sum(times) / IN_A_ROW for times in zip(*map(astuple, samples), strict=True)))


def _bare(module: nn.Module, nranks: int) -> Model:
    return lambda x: torch.cat([module(chunk) for chunk in x.chunk(nranks)])


def _ours(module: nn.Module, nranks: int) -> Model:
    return pyparallel.DataParallel(module, device_ids=pyparallel.virtual_devices(nranks))


SIDES: dict[str, Callable[[nn.Module, int], Model]] = {
    "bare": _bare,
    "ours": _ours,
    "torch": TorchRanks,
}


def _forward(model: Model, module: nn.Module, x: Tensor) -> Call:
    def forward() -> Tensor:
        with torch.no_grad():
            return model(x)

    return forward


def _step(model: Model, module: nn.Module, x: Tensor) -> Call:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _wrong(found: list[Tensor], expected: list[Tensor]) -> int:
    """Counts values that differ by more than float32 rounds."""
    return sum(
        int((~torch.isclose(a, b, rtol=1e-4, atol=1e-6)).sum())
        for a, b in zip(found, expected, strict=True)
    )
