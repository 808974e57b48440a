"""Collectives on tensors, and a training step, in a mode that is known to break transfers.

staged: what ranks share lies in host memory (PYPARALLEL_P2P=off), on one GPU too.
expandable: torch maps memory piece by piece, where peers do not reach it.
blocking: each launch waits for its kernel (CUDA_LAUNCH_BLOCKING=1).

The report tells how the mode was seen to be in force: for staged by the speed of a broadcast.
"""

import os
import time

import part

VARIABLES = {
    "staged": ("PYPARALLEL_P2P", "off"),
    "expandable": ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    "blocking": ("CUDA_LAUNCH_BLOCKING", "1"),
}
# Growing, so that segments expand after ranks have used them; the last is no multiple of 16 bytes.
COUNTS = (1, 1000, 1 << 18, (1 << 22) + 1)
DTYPES = ("float32", "float16", "bfloat16", "float64", "int64")


def collectives(ranks: str) -> int:
    """Checks the five collectives in closed form. Returns how many results were compared."""
    import torch

    from pyparallel import comm

    devices = ranks.split(",")
    n, compared = len(devices), 0

    def same(result, expected, what: str) -> None:
        nonlocal compared
        compared += 1
        part.check(torch.equal(result.cpu(), expected), f"{what} gave wrong values")

    for name in DTYPES:
        dtype = getattr(torch, name)
        for count in COUNTS:
            what = f"of {count} {name}"
            base = (torch.arange(count) % 8).to(dtype)  # sums of 16 stay exact in every type
            tensors = [(base + rank % 2).to(device) for rank, device in enumerate(devices)]
            total = base * n + n // 2
            for copy in comm.broadcast(tensors[0], devices):
                same(copy, base, f"broadcast {what}")
            same(comm.reduce_add(tensors), total, f"reduce_add {what}")
            for result in comm.all_reduce(tensors):
                same(result, total, f"all_reduce {what}")
            pieces = comm.scatter(tensors[0], devices) if count >= n else ()
            for piece, expected in zip(pieces, base.chunk(n), strict=bool(pieces)):
                same(piece, expected, f"scatter {what}")
            joined = torch.cat([t.cpu() for t in tensors])
            same(comm.gather(tensors, destination=devices[0]), joined, f"gather {what}")
    return compared


def training_step(ranks: str) -> float:
    """Returns how far gradients of all ranks are from those of one device, in float64."""
    import torch

    import pyparallel

    devices = ranks.split(",")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8)]
    model = torch.nn.Sequential(*layers).double().to(devices[0])
    x = torch.randn(8 * len(devices), 64, dtype=torch.float64, device=devices[0])
    gradients = []
    for forward in (model, pyparallel.DataParallel(model, device_ids=devices)):
        model.zero_grad()
        forward(x).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
    difference = (gradients[0] - gradients[1]).abs().max().item()
    part.check(difference < 1e-12, f"gradients differ by {difference:.1e}")
    return difference


def in_force(mode: str, ranks: str) -> str:
    """Sees whether the mode is really on. Returns how."""
    import torch

    if mode == "expandable":
        segments = torch.cuda.memory_snapshot()
        expandable = sum(1 for s in segments if s.get("is_expandable"))
        part.check(expandable > 0, f"none of torch's {len(segments)} segments is expandable")
        return f"{expandable} of {len(segments)} segments are expandable"
    if mode == "blocking":
        torch.cuda._sleep(1)
        start = time.perf_counter()
        torch.cuda._sleep(100_000_000)
        seconds = time.perf_counter() - start
        part.check(seconds > 0.01, f"a launch of about 0.05 s returned after {seconds:.4f} s")
        return f"a launch blocked for {seconds:.3f} s"
    return f"a broadcast ran at {broadcast_gbps(ranks):.1f} GB/s"


def broadcast_gbps(ranks: str) -> float:
    """Returns GB/s that each rank gets of a large tensor, the best of three."""
    import torch
    from devices import synchronize

    from pyparallel import comm

    devices = ranks.split(",")
    tensor = torch.ones(16 << 20, device=devices[0])
    seconds = []
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        comm.broadcast(tensor, devices)
        synchronize()
        seconds.append(time.perf_counter() - start)
    return tensor.nbytes / min(seconds) / 1e9


def body(args) -> dict[str, object]:
    part.require_gpu(args.ranks)
    name, value = VARIABLES[args.mode]
    os.environ[name] = value  # before torch and the core read it
    compared = collectives(args.ranks)
    difference = training_step(args.ranks)
    how = in_force(args.mode, args.ranks)
    note = f"{compared} results right, gradients differ by {difference:.1e}; {how}"
    return {"note": note, "compared": compared, "gradient_difference": difference}


if __name__ == "__main__":
    parser = part.parser()
    parser.add_argument("mode", choices=sorted(VARIABLES))
    part.run(parser.parse_args(), body)
