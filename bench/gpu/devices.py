"""The ranks' devices in torch's terms, and streams on all of them. Imports torch."""

import contextlib
from collections.abc import Iterator

import torch

from pyparallel.communicator import Communicator, get_communicator
from pyparallel.devices import resolve_devices


def communicator(ranks: str) -> Communicator:
    """Returns the communicator of "cuda:0,cuda:0,..."."""
    return get_communicator(resolve_devices(ranks.split(",")))


class Streams:
    """One new stream on each GPU of the ranks. They wait for no other stream by themselves."""

    def __init__(self, ranks: str) -> None:
        # Rank 0's device last: it is then the current one inside of current().
        names = list(dict.fromkeys(ranks.split(",")))[::-1]
        self._streams = [torch.cuda.Stream(name) for name in names]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


def synchronize() -> None:
    """Waits for all GPUs."""
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)
