"""torch's own Python code of ``nn.DataParallel`` on CPU ranks, in a thread a rank as on GPUs."""

import sys
import time
from unittest import mock

from origin import ROOT
from torch import nn

sys.path.insert(0, str(ROOT / "tests"))

import torch_on_cpu


class TorchRanks(torch_on_cpu.TorchDataParallel):
    def __init__(self, module: nn.Module, nranks: int) -> None:
        super().__init__(module, range(nranks), in_turn=False)

    def replicate_seconds(self) -> float:
        """Makes replicas; returns what that took beside the copies of tensors."""
        copies = torch_on_cpu._copies
        copying = 0.0

        def timed_copies(*args):
            nonlocal copying
            start = time.perf_counter()
            result = copies(*args)
            copying += time.perf_counter() - start
            return result

        with torch_on_cpu.torch_on_cpu(), mock.patch.object(torch_on_cpu, "_copies", timed_copies):
            start = time.perf_counter()
            replicas = self.replicate(self.module, self.device_ids)
            seconds = time.perf_counter() - start
        del replicas
        return seconds - copying
