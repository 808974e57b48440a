"""Whether the ranks of a wrapper run at once or one after the other."""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pyparallel import env, workers
from pyparallel.caller_state import bound_to_thread, observed
from pyparallel.contents import Contents
from pyparallel.devices import Device
from pyparallel.shared_generators import SharedGenerators
from pyparallel.timing import Timing
from pyparallel.turns import PATIENCE, Lane, take_turns

Dispatch = Literal["auto", "threads", "sequential"]

# Patience where ranks are not known to wait for each other, in seconds: it only has to be longer
# than what a rank usually waits for, because starting the next one early costs the fixed order.
_FIRST_PATIENCE = 1.0
_MAX_CLASSES = 64


class Dispatcher:
    """Decides in which threads the ranks of a wrapper run.

    - "sequential": one after the other in the calling thread, in the order of ranks.
    - "threads": in workers. Each GPU has one, which runs its ranks in turn. Virtual devices have
      as many as there are CPUs, at most one a rank, and each runs one rank after the other.
    - "auto": whichever of the two is faster, see ``Timing``, as far as that makes no difference to
      results. Calls are timed by classes: grad mode, which modules are training, number of ranks,
      and size of the inputs within a factor of two. All calls of a class run in threads with
      equally many CPU threads, because torch's sums depend on that number: in workers, and also in
      the calling thread if it has as many and ranks are virtual devices. They are sequential as
      soon as ranks have drawn from a random generator that they share. Nothing is timed, and the
      calling thread runs the ranks with all its CPU threads, if virtual devices run modules that
      draw, such as dropout in training; while a mode or a profiler looks at every operator; and
      where only one rank at once could run.

    Whatever is chosen:

    - Ranks that wait for each other do not hang: see ``take_turns``. The first such call takes a
      second for that.
    - Under hooks for saved tensors, which checkpointing uses, under transforms of ``torch.func``,
      and while ``torch.jit`` traces or a CUDA graph is captured, ranks run as with "sequential".
      In a transform, ranks must not wait for each other.
    - Replicas with compiled code run one after the other when their inputs have new shapes, since
      compilers are not made for several threads at once.

    May be used by several threads at once. A copy has measured nothing yet.

    Args:
        dispatch: One of the three.

    Raises:
        ValueError: None of the three.
    """

    def __init__(self, dispatch: Dispatch = "auto") -> None:
        if dispatch not in get_args(Dispatch):
            raise ValueError(
                f"dispatch must be one of {', '.join(get_args(Dispatch))}, but is {dispatch!r}"
            )
        self.dispatch: Dispatch = dispatch
        self._timings: dict[Any, Timing] = {}
        self._compiled_for: set[Any] = set()
        self._ranks_wait = False
        self._contents: weakref.WeakKeyDictionary[nn.Module, Contents] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["Dispatcher"], tuple[Dispatch]]:
        return type(self), (self.dispatch,)

    def run(
        self,
        run: Callable[[int], None],
        failed: Callable[[int, BaseException], None],
        modules: Sequence[nn.Module],
        arguments: Any,
        devices: Sequence[Device],
    ) -> None:
        """Runs every rank; see ``take_turns``.

        Args:
            run: Runs a rank.
            failed: Gets a rank and its error.
            modules: The module of each rank.
            arguments: The arguments of the first rank.
            devices: The device of each rank.
        """

        def take(lanes: Sequence[Lane], patience: float) -> None:
            if self._ranks_wait:
                patience = PATIENCE
            if take_turns(lanes, run, failed, devices, patience):
                self._ranks_wait = True
            elif any(lane.width < len(lane.ranks) for lane in lanes):
                self._ranks_wait = False  # a rank had its turn late, and nobody missed it

        if self.dispatch == "sequential" or len(devices) == 1 or bound_to_thread(devices):
            take(_in_caller(devices), _FIRST_PATIENCE)
            return
        lanes = self._at_once(devices)
        one_by_one = [Lane(tuple(range(len(devices))), 1, lanes[0].workers, lanes[0].share)]
        if self._needs_compilation(modules[0], arguments):
            take(one_by_one, env.timeout_ms() / 1000)
        elif self.dispatch == "threads":
            take(lanes, PATIENCE)
        elif observed() or sum(lane.width for lane in lanes) == 1:
            take(_in_caller(devices), _FIRST_PATIENCE)
        else:
            timing = self._timing(modules[0], arguments, devices)
            if timing is None:
                take(one_by_one, _FIRST_PATIENCE)
            elif timing.may_draw:
                take(_in_caller(devices), _FIRST_PATIENCE)
            else:
                _run_timed(take, _with_caller(lanes), _with_caller(one_by_one), timing)

    def _at_once(self, devices: Sequence[Device]) -> list[Lane]:
        """One lane for each physical device."""
        groups: dict[torch.device, list[int]] = {}
        for rank, device in enumerate(devices):
            groups.setdefault(device.torch_device, []).append(rank)
        if devices[0].kind == "cpu":
            widths = [min(len(devices), workers.cpu_count())]
        else:
            widths = [1] * len(groups)
        share = max(1, torch.get_num_threads() // sum(widths))
        if self._ranks_wait:
            widths = [len(ranks) for ranks in groups.values()]
        return [
            Lane(tuple(ranks), width, str(device), share)
            for (device, ranks), width in zip(groups.items(), widths, strict=True)
        ]

    def _timing(
        self, module: nn.Module, arguments: Any, devices: Sequence[Device]
    ) -> Timing | None:
        """The times of calls like this one; None if there are too many kinds of calls."""
        size = sum(tensor.numel() for tensor in _tensors(arguments)).bit_length()
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = *modes, self._contents_of(module).training(), len(devices), size
        timing = self._timings.get(key)
        if timing is None and len(self._timings) < _MAX_CLASSES:
            # Each GPU has a generator of its own.
            on_cpu = devices[0].kind == "cpu"
            may_draw = on_cpu and self._contents_of(module).may_draw()
            timing = self._timings.setdefault(key, Timing(may_draw))
        return timing

    def _needs_compilation(self, module: nn.Module, arguments: Any) -> bool:
        if not self._contents_of(module).compiled():
            return False
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in _tensors(arguments))
        key = torch.is_grad_enabled(), self._contents_of(module).training(), shapes
        if key in self._compiled_for or len(self._compiled_for) >= 1024:
            return False
        self._compiled_for.add(key)
        return True

    def _contents_of(self, module: nn.Module) -> Contents:
        contents = self._contents.get(module)
        if contents is None:
            contents = self._contents[module] = Contents(module)
        return contents


def _in_caller(devices: Sequence[Device]) -> list[Lane]:
    return [Lane(tuple(range(len(devices))), 1, None, torch.get_num_threads())]


def _with_caller(lanes: Sequence[Lane]) -> Sequence[Lane]:
    """Lets the calling thread run ranks if it has the CPU threads of a worker.

    It would only sleep, and is awake already: to wake a worker takes some ten microseconds, and
    Linux likes to put two that were woken on one CPU.
    """
    if len(lanes) == 1 and lanes[0].share == torch.get_num_threads():
        return [replace(lanes[0], with_caller=True)]
    return lanes


def _run_timed(
    take: Callable[[Sequence[Lane], float], None],
    at_once: Sequence[Lane],
    one_by_one: Sequence[Lane],
    timing: Timing,
) -> None:
    way = timing.next_way()
    generators = None if timing.draws else SharedGenerators(torch_only=timing.decided)
    start = time.perf_counter()
    if way == "threads":
        take(at_once, PATIENCE)
    else:
        take(one_by_one, _FIRST_PATIENCE)
    seconds = time.perf_counter() - start
    if generators is not None:
        timing.draws = generators.moved()
        timing.add(way, seconds)


def _tensors(arguments: Any) -> Iterable[Tensor]:
    if isinstance(arguments, Tensor):
        yield arguments
    elif isinstance(arguments, (list, tuple)):
        for entry in arguments:
            yield from _tensors(entry)
    elif isinstance(arguments, dict):
        yield from _tensors(list(arguments.values()))
