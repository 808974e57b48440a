"""Handles of the callers' streams, one a rank; virtual devices have none."""

from collections.abc import Sequence

import torch

from pyparallel.devices import Device


def current_streams(devices: Sequence[Device]) -> list[int]:
    """Returns the handle of each device's current stream; 0 for a virtual device, which has none.

    The calling thread's current streams count, as for any torch operation.
    """
    return [
        torch.cuda.current_stream(d.index).cuda_stream if d.kind == "cuda" else 0 for d in devices
    ]
