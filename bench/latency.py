"""The smallest broadcast through the public function, and what idle threads cost."""

import time

import torch
from bars import Line, quartiles, sample
from operations import OPERATIONS, Shape
from ranks import Ranks

import pyparallel
from pyparallel import comm

NRANKS = 4
# A second core that spins would be 100 %; the interpreter itself wakes up now and then.
IDLE_PERCENT = 2.0


def latency_lines(calls: int, idle_s: float) -> list[Line]:
    return [_small_broadcast(calls), _idle(idle_s)]


def _small_broadcast(calls: int) -> Line:
    devices = pyparallel.virtual_devices(NRANKS)
    tensor = torch.ones(1)
    wrong = sum(int(copy != 1) for copy in comm.broadcast(tensor, devices))
    for _ in range(calls // 10):
        comm.broadcast(tensor, devices)
    times = [sample(lambda: comm.broadcast(tensor, devices)).wall * 1e6 for _ in range(calls)]
    return Line("comm.broadcast of 4 bytes", "us", quartiles(times), 25, False, wrong)


def _idle(idle_s: float) -> Line:
    """CPU time of all threads while the process sleeps, in percent of one core."""
    ranks = Ranks("cpu", NRANKS, timeout_s=60)
    wrong = 0
    for operation in OPERATIONS.values():  # every kind of thread exists and has worked
        for algorithm in operation.algorithms:
            nbytes = int(min(operation.limit(algorithm), 1 << 20))
            shape = Shape(root=0, count=nbytes // 4, dtype=torch.float32, unalign=0)
            case = operation.build(ranks, shape, algorithm)
            case.run()
            wrong += case.wrong()
    percent = []
    for _ in range(3):
        time.sleep(idle_s / 10)  # torch's own threads spin for a while after their work
        start = time.process_time()
        time.sleep(idle_s)
        percent.append((time.process_time() - start) / idle_s * 100)
    return Line("CPU time while idle", "%", quartiles(percent), IDLE_PERCENT, False, wrong)
