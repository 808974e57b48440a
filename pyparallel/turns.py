"""Ranks that take turns: who runs which rank when, in which thread."""

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pyparallel import watchdog, workers
from pyparallel.caller_state import CallerState
from pyparallel.devices import Device

# How long the running ranks must have waited before the next one starts, in seconds, once ranks
# are known to wait for each other.
PATIENCE = 0.05


@dataclass(frozen=True)
class Lane:
    """Ranks that start in order.

    Attributes:
        ranks: In the order in which they start.
        width: How many of them run at once.
        workers: The kind of workers that run them; see ``workers.submit``. None: the calling
            thread runs them, and only one lane is there.
        share: torch's CPU threads of each worker.
        with_caller: Whether the calling thread runs ranks beside the workers, of which there is
            one less then. Only if there are no other lanes.
    """

    ranks: tuple[int, ...]
    width: int
    workers: str | None
    share: int
    with_caller: bool = False


def take_turns(
    lanes: Sequence[Lane],
    run: Callable[[int], None],
    failed: Callable[[int, BaseException], None],
    devices: Sequence[Device],
    patience: float,
) -> int:
    """Runs every rank, each from the state of the calling thread; returns when all have ended.

    A rank that waits for another one, which has not had its turn, would wait for ever. So when all
    running ranks of a lane have waited for ``patience`` seconds without working, one more starts,
    in a worker, and so on.

    After a rank has failed no higher ones start, unless others are running, which may wait for
    them.

    Args:
        lanes: All ranks.
        run: Runs a rank.
        failed: Gets a rank and what running it raised, in the thread in which it ran.
        devices: The device of each rank.
        patience: In seconds.

    Returns:
        How many ranks were started because others waited.

    Raises:
        KeyboardInterrupt: While the caller waited for workers. Running ranks have ended, and no
            further ones were started. A second interrupt does not wait for them.
    """
    turns = _Turns(lanes, run, failed, devices, patience)
    try:
        watchdog.watch(turns)
        turns.start()
        turns.wait()
    except BaseException:
        turns.abandon()
        turns.wait()
        raise
    finally:
        watchdog.unwatch(turns)
        turns.release()
    return turns.extra


class _Turns:
    """One call of ``take_turns``.

    Attributes:
        extra: How many ranks were started because others waited.
        patience: In seconds.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        run: Callable[[int], None],
        failed: Callable[[int, BaseException], None],
        devices: Sequence[Device],
        patience: float,
    ) -> None:
        self.extra = 0
        self._lanes = lanes
        self._devices = devices
        self.patience = patience
        # The state is taken in the caller's thread, for all threads that may be needed.
        self._calls: _Calls | None = _Calls(run, failed, CallerState(devices))
        self._lock = threading.Lock()
        self._pending = [deque(lane.ranks) for lane in lanes]
        # Who works for each lane or soon will, and who has begun to: interrupts may come anywhere.
        self._caller = object()
        self._active: list[set[object]] = [set() for _ in lanes]
        self._begun: set[object] = set()
        self._starting = True
        self._progress: list[dict[int, watchdog.Progress]] = [{} for _ in lanes]
        self._lowest_failed = len(devices)
        self._done = threading.Event()

    def start(self) -> None:
        """Starts the workers, and runs ranks in the calling thread if that is one of the lane's."""
        try:
            first = self._lanes[0]
            if first.workers is None or first.with_caller:
                self._active[0].add(self._caller)
                try:
                    followers = min(first.width, len(first.ranks)) - 1
                    self._work(0, self._caller, in_worker=False, followers=followers)
                finally:
                    self._leave(0, self._caller)
            else:
                for i, lane in enumerate(self._lanes):
                    self._start_worker(i, followers=min(lane.width, len(lane.ranks)) - 1)
        finally:
            self._starting = False
            self._finish_if_idle()

    def wait(self) -> None:
        """Waits until nobody runs any more."""
        if self._done.is_set():
            return
        watchdog.waits_for(self)
        try:
            self._done.wait()
        finally:
            watchdog.waits_no_more()

    def abandon(self) -> None:
        """Starts no more ranks; called by the caller, which runs none any more."""
        self._start_no_more()
        with self._lock:
            self._begun.discard(self._caller)
            for active in self._active:
                active &= self._begun
        self._starting = False
        self._finish_if_idle()

    def release(self) -> None:
        """Lets go of everything: the watchdog may hold this object a little longer."""
        self._calls = None

    def look(self) -> None:
        """Starts one more rank in each lane whose running ranks all wait."""
        for i in range(len(self._lanes)):
            if self._pending[i] and self._idle_seconds([i]) >= self.patience:
                self.patience = min(self.patience, PATIENCE)
                self.extra += 1
                self._start_worker(i)

    def idle_seconds(self) -> float:
        """For how long the running ranks of all lanes have waited."""
        return self._idle_seconds(range(len(self._lanes)))

    def _idle_seconds(self, lanes: Iterable[int]) -> float:
        running = [p for i in lanes for p in list(self._progress[i].values())]
        if not running or len(running) != sum(len(self._active[i]) for i in lanes):
            return 0.0  # somebody is about to start or to end
        return min(progress.idle_seconds() for progress in running)

    def _start_worker(self, i: int, followers: int = 0) -> None:
        """Starts a worker, which starts the next one, as many as there are followers.

        By then the caller sleeps and its CPU is free. If the caller woke all of them, Linux would
        put two on one CPU, where they stay for milliseconds.
        """
        lane, worker = self._lanes[i], object()
        try:
            with self._lock:
                self._active[i].add(worker)
            workers.submit(
                lane.workers or "helper",
                lane.share,
                functools.partial(self._work, i, worker, in_worker=True, followers=followers),
                functools.partial(self._leave, i, worker),
            )
        except BaseException:
            with self._lock:
                self._active[i] -= {worker} - self._begun
            self._finish_if_idle()
            raise

    def _work(self, i: int, worker: object, in_worker: bool, followers: int = 0) -> None:
        with self._lock:
            if worker not in self._active[i]:
                return  # the caller was interrupted
            self._begun.add(worker)
        if followers:
            # Where the system gives us no thread, this one takes over all ranks.
            with suppress(RuntimeError):
                self._start_worker(i, followers - 1)
        ident = threading.get_ident()
        try:
            while (rank := self._next(i)) is not None:
                self._progress[i][ident] = watchdog.Progress()
                if not self._run(rank, in_worker):
                    with self._lock:
                        self._lowest_failed = min(rank, self._lowest_failed)
        finally:
            self._progress[i].pop(ident, None)

    def _next(self, i: int) -> int | None:
        with self._lock:
            pending = self._pending[i]
            if not pending:
                return None
            if pending[0] > self._lowest_failed and sum(map(len, self._active)) == 1:
                return None
            return pending.popleft()

    def _run(self, rank: int, in_worker: bool) -> bool:
        calls, device = self._calls, self._devices[rank]
        if calls is None:  # the caller was interrupted twice
            return False
        try:
            if in_worker:
                workers.name_thread(f"pp-{device}")
                calls.state.run(device, functools.partial(calls.run, rank))
            else:
                calls.state.run_here(device, functools.partial(calls.run, rank))
        except BaseException as error:
            calls.failed(rank, error)
            if not in_worker and issubclass(type(error), KeyboardInterrupt):
                self._start_no_more()
            return False
        return True

    def _start_no_more(self) -> None:
        with self._lock:
            for pending in self._pending:
                pending.clear()

    def _leave(self, i: int, worker: object) -> None:
        with self._lock:
            self._active[i].discard(worker)
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        if not self._starting and not any(self._active):
            self._done.set()


@dataclass(frozen=True)
class _Calls:
    """What a rank needs to run."""

    run: Callable[[int], None]
    failed: Callable[[int, BaseException], None]
    state: CallerState
