"""The ranks of a benchmark: devices, streams, communicator, and guarded buffers."""

import torch
from torch import Tensor

from pyparallel import _C

POISON = -1  # no input and no sum of inputs has this value
# Elements on each side of a buffer that no collective may touch; at least 128 bytes keep alignment.
GUARD = 64


class Ranks:
    """Ranks on virtual devices, or on GPUs: rank r uses GPU r modulo the number of GPUs."""

    def __init__(self, device: str, nranks: int, timeout_s: float) -> None:
        if device == "cuda":
            indices = [rank % torch.cuda.device_count() for rank in range(nranks)]
            self.devices = [torch.device("cuda", index) for index in indices]
            self.streams = [torch.cuda.current_stream(d).cuda_stream for d in self.devices]
        else:
            indices = list(range(nranks))
            self.devices = [torch.device("cpu")] * nranks
            self.streams = [0] * nranks
        backend = "cuda" if device == "cuda" else "host"
        self.core = _C.Communicator(backend, indices, timeout_ms=max(1, round(timeout_s * 1000)))

    def __len__(self) -> int:
        return len(self.devices)

    def synchronize(self) -> None:
        """Waits until everything launched has finished, and raises what went wrong."""
        self.core.synchronize()
        for device in {d for d in self.devices if d.type == "cuda"}:
            torch.cuda.synchronize(device)


class Buffer:
    """``count`` elements on a device between two guards, ``unalign`` elements off alignment."""

    def __init__(self, device: torch.device, count: int, dtype: torch.dtype, unalign: int) -> None:
        start = GUARD + unalign
        self._memory = torch.full((start + count + GUARD,), POISON, dtype=dtype, device=device)
        self.body = self._memory[start : start + count]
        self._guards = (self._memory[:start], self._memory[start + count :])

    @property
    def pointer(self) -> int:
        return self.body.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.body.numel() * self.body.element_size()

    def fill(self, values: Tensor | None) -> None:
        """Writes values, or the poison."""
        if values is None:
            self.body.fill_(POISON)
        else:
            self.body.copy_(values)

    def wrong(self, expected: Tensor) -> int:
        """Counts elements that are not as expected, and guard elements that somebody wrote."""
        wrong = (self.body != expected.to(self.body)).sum().item()
        return int(wrong + sum((guard != POISON).sum().item() for guard in self._guards))
