"""A step as events of the Chrome trace format: torch's profiler, and the sums beside it."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sums import SumSpans
from torch.profiler import ProfilerActivity, profile, record_function

_CLOCK = "clocks meet here"


def sees_all_threads() -> bool:
    """Whether torch's profiler can see what workers do. That of torch 2.6 cannot."""
    try:
        _all_threads()
    except TypeError:
        return False
    return True


def trace_events(mode: str, step: Callable[[], object]) -> list[dict[str, Any]]:
    """Runs a step; returns its events, as a process of their own that is named after the mode."""
    with (
        SumSpans() as sums,
        profile(activities=[ProfilerActivity.CPU], experimental_config=_all_threads()) as profiler,
    ):
        with record_function(_CLOCK):
            clock = time.perf_counter()
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("ph") == "X"]
    # The profiler's clock has another origin than Python's.
    meeting = next(e for e in events if e["name"] == _CLOCK)
    origin = meeting["ts"] + meeting["dur"] - clock * 1e6
    events = [e for e in events if e is not meeting and "Profiler" not in e["name"]]
    for start, end in sums.spans():
        events.append(
            {
                "ph": "X",
                "cat": "sum",
                "name": "sum of gradients",
                "tid": "pp-comm",
                "ts": origin + start * 1e6,
                "dur": (end - start) * 1e6,
            }
        )
    for event in events:
        event["pid"] = mode
    return events


def _all_threads() -> Any:
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
