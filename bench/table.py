"""Prints results in the shape of nccl-tests' table and collects them as rows for JSON."""

import os
import sys
from dataclasses import asdict, dataclass

import torch
from operations import Operation
from options import DTYPES, Options
from ranks import Ranks

import pyparallel
from pyparallel import _C

NCCL_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Row:
    """One measurement. ``bytes``: the whole buffer. ``wrong``: None if nothing was checked."""

    op: str
    algorithm: str
    nranks: int
    bytes: int
    dtype: str
    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    wrong: int | None
    p99_us: float
    root: int | None
    in_place: bool

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def print_header(options: Options, ranks: Ranks, origin: dict[str, object]) -> None:
    for name in ("command", "date", "commit", "platform", "cpu"):
        print(f"# {name} {origin[name]}")
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    built = _C.build_info()["cuda_version"] or "not built"
    print(f"# pyparallel {pyparallel.__version__}  torch {torch.__version__}", end="")
    print(f"  CUDA {built}  GIL {'on' if gil else 'off'}")
    for rank, device in enumerate(ranks.devices):
        if device.type == "cuda":
            print(
                f"# Rank {rank:2d} device {device.index:2d}  {torch.cuda.get_device_name(device)}"
            )
    if options.device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        print(f"# Ranks 0 to {len(ranks) - 1} are virtual devices that share {cores} CPU cores")
    print(f"# times: medians of at most {options.iterations} calls; GB = 1e9 bytes")
    print("# scatter, gather: size is the root's whole buffer, busbw = algbw * (n - 1) / n")


def print_section(operation: Operation, algorithm: str) -> None:
    columns = f"{'time':>9} {'algbw':>7} {'busbw':>7} {'#wrong':>6}"
    units = f"{'(us)':>9} {'(GB/s)':>7} {'(GB/s)':>7} {'':>6}"
    print(f"#\n# {operation.name}, algorithm {algorithm}")
    print(f"#{'':50} {'out-of-place':^32}  {'in-place':>18}")
    print(
        f"#{'size':>12} {'count':>12} {'type':>9} {'redop':>6} {'root':>5}    {columns}  {columns}"
    )
    print(
        f"#{'(B)':>12} {'(elements)':>12} {'':>9} {'':>6} {'':>5}    {units}  {units}", flush=True
    )


def print_row(row: Row, in_place: Row | None, operation: Operation, dtype: torch.dtype) -> None:
    redop = "sum" if operation.reduces else "none"
    root = -1 if row.root is None else row.root
    count = row.bytes // dtype.itemsize
    left = f" {row.bytes:12d} {count:12d} {NCCL_NAMES[dtype]:>9} {redop:>6} {root:5d}"
    absent = f"{'N/A':>9} {'N/A':>7} {'N/A':>7} {'N/A':>6}"
    print(f"{left}    {_numbers(row)}  {_numbers(in_place) if in_place else absent}", flush=True)


def _numbers(row: Row) -> str:
    time = f"{row.time_us:9.2f}" if row.time_us < 1e5 else f"{row.time_us:9.0f}"
    wrong = "N/A" if row.wrong is None else str(row.wrong)
    return f"{time} {row.algbw_gbps:7.2f} {row.busbw_gbps:7.2f} {wrong:>6}"


def print_summary(rows: list[Row]) -> None:
    wrong = sum(row.wrong or 0 for row in rows)
    print(f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}")
    print(f"# Avg bus bandwidth    : {sum(row.busbw_gbps for row in rows) / len(rows):.4g}")
