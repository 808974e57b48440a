"""What DataParallel costs beside the model, as ratios of things measured in turns in one run.

    python bench/overhead.py --json overhead.json
    python bench/overhead.py linear trainable

Sections: linear and perceptron time forwards and training steps against the bare module, and
against torch's own Python code of nn.DataParallel on CPU ranks; replicate times bringing replicas
up to date, in up to 10 GiB of memory; trainable counts bytes. All on virtual devices, with one
torch thread.

Prints the lower quartile, the median and the upper quartile of each line. "ok": the median meets
the bar; "unsure": only the lower quartile does, as happens beside other programs; "missed": not
even that one. Results are checked, too. Exit codes: 0 fine, 1 wrong values, 2 bad arguments, 3 a
bar was missed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bars import Line
from models import gpt2, linears, perceptron, resnet
from replication import replication_rows, trainable_row
from sections import run_sections
from torch import nn
from training import training_rows


@dataclass(frozen=True)
class Sizes:
    """How much is measured. The bars hold for FULL; TINY shows that every line works."""

    linears: int
    perceptron: int
    training_rounds: tuple[int, int]  # of forward, and of step
    large: dict[str, Callable[[], nn.Module]]
    replicate_rounds: tuple[int, int, int]


FULL = Sizes(500, 100, (31, 15), {"GPT-2 small": gpt2, "ResNet-50": resnet}, (31, 5, 15))
TINY = Sizes(
    3,
    2,
    (2, 2),
    {"GPT-2": lambda: gpt2(1, 8, 10, 4), "ResNet": lambda: resnet((1, 1), 2)},
    (2, 2, 2),
)


def _linear(sizes: Sizes) -> list[Line]:
    name = f"{sizes.linears} x Linear(32, 32)"
    x = torch.randn(32, 32)
    return training_rows(name, linears(sizes.linears), x, (1.10, 1.15), sizes.training_rounds)


def _perceptron(sizes: Sizes) -> list[Line]:
    name = f"{sizes.perceptron} x (Linear(128, 128), ReLU)"
    x = torch.randn(256, 128)
    return training_rows(name, perceptron(sizes.perceptron), x, (0.9, 1.2), sizes.training_rounds)


def _replicate(sizes: Sizes) -> list[Line]:
    rows = []
    for name, model in sizes.large.items():
        rows += replication_rows(name, model(), sizes.replicate_rounds)
    return rows


def _trainable(sizes: Sizes) -> list[Line]:
    model = perceptron(100)
    return [trainable_row(model, model[-2], torch.randn(8, 128), steps=3)]


SECTIONS: dict[str, Callable[[Sizes], list[Line]]] = {
    "linear": _linear,
    "perceptron": _perceptron,
    "replicate": _replicate,
    "trainable": _trainable,
}


def main(argv: list[str] | None = None) -> int:
    description = "Measures what DataParallel costs on virtual devices beside the model itself."
    return run_sections("bench/overhead.py", description, SECTIONS, FULL, TINY, argv)


if __name__ == "__main__":
    sys.exit(main())
