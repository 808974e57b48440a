"""Absent and late ranks on the GPUs, and a user's long kernel, which is no fault."""

import os
import subprocess

import part
from build import FAULT_TEST

TIMEOUT_MS = 500
SLEEP_CYCLES = 3_000_000_000  # about 1.5 s, several timeouts


def planted(ranks: str) -> list[str]:
    """Runs the C++ test that makes ranks absent and late. Returns what was reported."""
    if not FAULT_TEST.exists():
        raise part.PartFailed(f"{FAULT_TEST} is not there: run the part build first")
    environment = {**os.environ, "PYPARALLEL_TEST_DEVICES": ranks}
    result = subprocess.run([FAULT_TEST], env=environment, capture_output=True, text=True)
    print(result.stdout, result.stderr)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        raise part.PartFailed(f"{FAULT_TEST.name} ended with {result.returncode}: {last}")
    return [line for line in result.stdout.splitlines() if " waited " in line]


def long_kernels_are_no_fault(ranks: str) -> float:
    """Work of a user that lasts several timeouts must not make a wait of ours expire.

    Returns how long it lasted, in seconds.
    """
    import torch
    from devices import synchronize

    from pyparallel import _C

    devices = [torch.device(name) for name in ranks.split(",")]
    core = _C.Communicator("cuda", [d.index for d in devices], timeout_ms=TIMEOUT_MS)
    buffers = [torch.full((1 << 20,), float(rank), device=d) for rank, d in enumerate(devices)]
    nbytes = buffers[0].numel() * 4
    streams = [torch.cuda.Stream(d) for d in devices]  # also on one GPU each rank has its own
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    synchronize()
    with torch.cuda.stream(streams[-1]):
        begin.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        end.record()
    pointers = [b.data_ptr() for b in buffers]
    handles = [s.cuda_stream for s in streams]
    core.broadcast(0, pointers[:1], [0], [nbytes], [0, *pointers[1:]], handles, "chain")
    synchronize()
    core.synchronize()
    lasted = begin.elapsed_time(end) / 1e3
    part.check(lasted > 2e-3 * TIMEOUT_MS, f"the long kernel lasted only {lasted:.2f} s")
    part.check(all((b == 0).all().item() for b in buffers), "a broadcast behind it was wrong")
    core.close()
    return lasted


def body(args) -> dict[str, object]:
    part.require_gpu(args.ranks)
    reports = planted(args.ranks)
    lasted = long_kernels_are_no_fault(args.ranks)
    note = f"{len(reports)} planted faults reported, each next call right; "
    note += f"a user's kernel of {lasted:.1f} s expired no wait of {TIMEOUT_MS / 1e3} s"
    return {"note": note, "reports": reports}


if __name__ == "__main__":
    part.run(part.parser().parse_args(), body)
