"""Named ranges for profilers, and a line that says where the time of the first steps went."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.profiler import record_function

from pyparallel import env
from pyparallel.devices import Device

logger = logging.getLogger("pyparallel")

# Forwards per line. The first one, which allocates and starts threads, is not counted.
_STEPS = 10
_PARTS = ("scatter", "replicate", "parallel_apply", "gather", "reduce")

# The public record_function takes 20 us where nobody profiles, this one 0.4 us.
_record = getattr(torch._C._profiler, "_RecordFunctionFast", record_function)


class Span:
    """A range named ``pyparallel.DataParallel.<part>``: for torch's profiler, and NVTX with CUDA.

    Attributes:
        seconds: How long it lasted, on the CPU.
    """

    def __init__(self, part: str) -> None:
        self._name = f"pyparallel.DataParallel.{part}"
        self._range = _record(self._name)
        self.seconds = 0.0

    def __enter__(self) -> "Span":
        self._nvtx = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]
        self._range.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.seconds = time.perf_counter() - self._start
        self._range.__exit__(*error)
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


_reduce_seconds = 0.0


@contextmanager
def reducing() -> Iterator[None]:
    """Names the range in which backward sums gradients; the time counts for all wrappers."""
    global _reduce_seconds
    span = Span("reduce")
    try:
        with span:
            yield
    finally:
        _reduce_seconds += span.seconds


class Steps:
    """Measures the first steps of a wrapper, and logs one line about them.

    A step lasts from the start of a forward to the start of the next. The line comes at INFO from
    the logger "pyparallel", which PYPARALLEL_DEBUG=INFO turns on. Without it nothing is measured.

    Args:
        name: What the line calls the wrapper.
    """

    def __init__(self, name: str) -> None:
        _set_level()
        self._name = name
        self._measuring = logger.isEnabledFor(logging.INFO)
        self._forwards = 0
        self._start = 0.0
        self._reduced_before = 0.0
        self._parts: dict[str, float] = {}
        self._devices: dict[Device, float] = {}
        # (device, start, end) of forwards on GPUs, read at the end.
        self._events: list[tuple[Device, torch.cuda.Event, torch.cuda.Event]] = []

    def __reduce__(self) -> tuple[type["Steps"], tuple[str]]:
        return type(self), (self._name,)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward."""
        if self._measuring:
            self._begin()
        # The first name is what people search for in traces of torch's class.
        with _record("DataParallel.forward"), Span("forward"):
            yield

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Around a part of a forward."""
        span = Span(name)
        try:
            with span:
                yield
        finally:
            if self._measuring:
                self._parts[name] = self._parts.get(name, 0.0) + span.seconds

    @contextmanager
    def rank(self, device: Device) -> Iterator[None]:
        """Around the forward of a rank, in its thread."""
        if not self._measuring:
            yield
        elif device.kind == "cuda":
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((device, begin, end))
        else:
            start = time.perf_counter()
            yield
            seconds = time.perf_counter() - start
            self._devices[device] = self._devices.get(device, 0.0) + seconds

    def _begin(self) -> None:
        now = time.perf_counter()
        self._forwards += 1
        if self._forwards == 2:
            self._start, self._reduced_before = now, _reduce_seconds
            self._parts.clear()
            self._devices.clear()
            self._events.clear()
        elif self._forwards > _STEPS:
            self._measuring = False
            logger.info(self._line(now - self._start, _STEPS - 1))

    def _line(self, seconds: float, steps: int) -> str:
        for device, begin, end in self._events:
            end.synchronize()
            milliseconds = begin.elapsed_time(end)
            self._devices[device] = self._devices.get(device, 0.0) + milliseconds / 1000
        self._events.clear()
        times = {**self._parts, "reduce": _reduce_seconds - self._reduced_before}
        parts = [f"{part} {times[part] / steps * 1e3:.2f}" for part in _PARTS if part in times]
        devices = [f"{d} {s / steps * 1e3:.2f}" for d, s in sorted(self._devices.items(), key=str)]
        rest = seconds - sum(times.values())
        return (
            f"{self._name}: steps 2 to {steps + 1} took {seconds / steps * 1e3:.2f} ms each: "
            f"{', '.join(parts)}, the rest of backward and everything else "
            f"{rest / steps * 1e3:.2f}; forward on {', '.join(devices) or 'no device'}"
        )


def _set_level() -> None:
    if env.debug() != "INFO" or logger.isEnabledFor(logging.INFO):
        return
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
