"""Named ranges for profilers, and a line that says where the time of the first steps went.

Exceptions of the user's pass through what is entered here. So these are classes:
``contextlib.contextmanager`` assigns to an exception, which one of a frozen dataclass refuses.
"""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
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


class _Reducing(Span):
    def __exit__(self, *error: Any) -> None:
        global _reduce_seconds
        super().__exit__(*error)
        _reduce_seconds += self.seconds


def reducing() -> Span:
    """Names the range in which backward sums gradients; the time counts for all wrappers."""
    return _Reducing("reduce")


class _Forward(Span):
    def __enter__(self) -> "Span":
        # The name that people search for in traces of torch's class.
        self._outer = _record("DataParallel.forward")
        self._outer.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._outer.__exit__(*error)


class _Part(Span):
    def __init__(self, part: str, seconds: dict[str, float]) -> None:
        super().__init__(part)
        self._part, self._sums = part, seconds

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sums[self._part] = self._sums.get(self._part, 0.0) + self.seconds


class _RankOnCpu:
    def __init__(self, device: Device, seconds: dict[Device, float]) -> None:
        self._device, self._sums = device, seconds

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        seconds = time.perf_counter() - self._start
        self._sums[self._device] = self._sums.get(self._device, 0.0) + seconds


class _RankOnGpu:
    def __init__(
        self, device: Device, events: list[tuple[Device, torch.cuda.Event, torch.cuda.Event]]
    ) -> None:
        self._device, self._events = device, events

    def __enter__(self) -> None:
        self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._begin.record()

    def __exit__(self, *error: Any) -> None:
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end.record()
        self._events.append((self._device, self._begin, end))


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

    def forward(self) -> Span:
        """Around a forward."""
        if self._measuring:
            self._begin()
        return _Forward("forward")

    def part(self, name: str) -> Span:
        """Around a part of a forward."""
        return _Part(name, self._parts) if self._measuring else Span(name)

    def rank(self, device: Device) -> AbstractContextManager[Any]:
        """Around the forward of a rank, in its thread."""
        if not self._measuring:
            return nullcontext()
        if device.kind == "cuda":
            return _RankOnGpu(device, self._events)
        return _RankOnCpu(device, self._devices)

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
