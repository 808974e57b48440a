"""The command line: nccl-tests' letters, checked before anything is allocated."""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from operations import OPERATIONS, Operation

from pyparallel import _C

# nccl-tests' names, then torch's; the core can add these and no others.
DTYPES = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
ALIASES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
CPU_RANKS = 4


@dataclass(frozen=True)
class Options:
    """What to run. Sizes are bytes, ``timeout_s`` bounds each wait inside a collective."""

    plan: list[tuple[Operation, str]]
    device: str
    nranks: int
    sizes: list[int]
    dtypes: list[torch.dtype]
    roots: list[int]
    iterations: int
    warmup: int
    checks: int
    unalign: int
    timeout_s: float
    json: Path | None


def parse_size(text: str) -> int:
    """Reads ``4``, ``64K``, ``1.5M`` or ``2G``; the suffixes are powers of 1024."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    number = text if unit == 1 else text[:-1]
    try:
        size = float(number) * unit if unit > 1 else int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; write bytes, or 64K, 1M, 2G"
        ) from None
    if not 0 <= size < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range")
    return int(size)


def size_steps(first: int, last: int, factor: int | None, step: int | None) -> Iterator[int]:
    """Yields the sizes from first to last, by a factor or by a fixed step."""
    size = first
    while size <= last:
        yield size
        size = size + step if step else max(size, 1) * (factor or 2)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench/collectives.py",
        description="Times and checks pyparallel's collectives, with nccl-tests' flags and table.",
        epilog="Suffixes K, M, G are binary. Exit codes: 0 right, 1 wrong values, 2 bad arguments, "
        "or a run that failed, for want of memory for instance.",
    )
    add = parser.add_argument
    add("operation", choices=[*OPERATIONS, "all"])
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--algorithm", default="auto", help="auto (default), all, or a name: " + _algorithm_help())
    add(
        "-g",
        "--ngpus",
        type=int,
        metavar="RANKS",
        help="ranks; GPUs are shared where there are fewer (all GPUs; cpu: 4)",
    )
    add("-b", "--minbytes", type=parse_size, default=8, metavar="SIZE", help="first size (8)")
    add(
        "-e",
        "--maxbytes",
        type=parse_size,
        default=128 << 20,
        metavar="SIZE",
        help="last size (128M)",
    )
    step = parser.add_mutually_exclusive_group()
    step.add_argument(
        "-f", "--stepfactor", type=int, metavar="N", help="each size is N times the one before (2)"
    )
    step.add_argument(
        "-i", "--stepbytes", type=parse_size, metavar="SIZE", help="each size is SIZE more"
    )
    add(
        "-d",
        "--datatype",
        default="float",
        help="all, or one of: " + " ".join(DTYPES) + " (float); or torch's name",
    )
    add("-r", "--root", default="0", help="root rank, or all (0)")
    add(
        "-n",
        "--iters",
        type=int,
        default=20,
        help="timed iterations, within about half a second (20)",
    )
    add("-w", "--warmup_iters", type=int, default=5, help="untimed iterations before (5)")
    add("-c", "--check", type=int, default=1, help="checked iterations after timing; 0: none (1)")
    add(
        "-u",
        "--unalign",
        type=int,
        default=0,
        metavar="N",
        help="shift buffers by N elements (0)",
    )
    add(
        "-T",
        "--timeout",
        type=float,
        default=30,
        metavar="SECONDS",
        help="bound of each wait (30)",
    )
    add(
        "-G",
        "--cudagraph",
        type=int,
        default=0,
        help="refused: no CUDA graphs yet",
    )
    add(
        "-J",
        "--json",
        type=Path,
        metavar="FILE",
        help="write the rows as a JSON list; command and machine go to FILE's .meta.json",
    )
    return parser


def _algorithm_help() -> str:
    return "; ".join(f"{op.name} {' '.join(op.algorithms)}" for op in OPERATIONS.values())


def _plan(
    parser: argparse.ArgumentParser, operation: str, algorithm: str
) -> list[tuple[Operation, str]]:
    chosen = list(OPERATIONS.values()) if operation == "all" else [OPERATIONS[operation]]
    if algorithm == "auto":
        return [(op, "auto") for op in chosen]
    plan = [(op, name) for op in chosen for name in op.algorithms if algorithm in ("all", name)]
    if not plan:
        parser.error(
            f"--algorithm {algorithm}: {operation} has none of this name; there are: "
            + _algorithm_help()
        )
    return plan


def _check_device(parser: argparse.ArgumentParser, device: str, cudagraph: int) -> None:
    if cudagraph and device == "cpu":
        parser.error("-G/--cudagraph: virtual devices have no CUDA graphs")
    if cudagraph:
        parser.error("-G/--cudagraph: the collectives are not captured in CUDA graphs yet")
    if device == "cpu":
        return
    if not _C.build_info()["cuda"]:
        parser.error(
            "--device cuda: pyparallel was built without CUDA (no nvcc at build time). "
            "Rebuild: pip install --force-reinstall --no-deps ."
        )
    if torch.version.cuda is None:
        parser.error(
            f"--device cuda: torch {torch.__version__} was built without CUDA; "
            "install a CUDA build of torch"
        )
    if not torch.cuda.is_available():
        parser.error(
            "--device cuda: torch sees no GPU; python -m pyparallel.info shows what is missing"
        )


def _check_output(parser: argparse.ArgumentParser, path: Path) -> None:
    """Finds out before the run what writing afterwards would find out."""
    if path.is_dir():
        parser.error(f"--json {path}: this is a folder; name a file in it")
    parent = path.resolve().parent
    if not os.access(path if path.exists() else parent, os.W_OK):
        parser.error(f"--json {path}: cannot write into {parent}")


def parse(argv: list[str] | None) -> Options:
    """Reads and checks the command line; exits with code 2 and one sentence where it is wrong."""
    parser = _parser()
    args = parser.parse_args(argv)
    _check_device(parser, args.device, args.cudagraph)
    nranks = args.ngpus
    if nranks is None:
        nranks = CPU_RANKS if args.device == "cpu" else torch.cuda.device_count()
    if nranks < 1:
        parser.error(f"-g {nranks}: at least one rank is needed")
    if args.minbytes > args.maxbytes:
        parser.error(f"-b {args.minbytes} is more than -e {args.maxbytes}")
    if (args.stepfactor is not None and args.stepfactor < 2) or args.stepbytes == 0:
        parser.error("-f must be at least 2, and -i at least 1")
    for flag, value, least in (
        ("-n", args.iters, 1),
        ("-w", args.warmup_iters, 0),
        ("-c", args.check, 0),
    ):
        if value < least:
            parser.error(f"{flag} {value}: must be at least {least}")
    if args.unalign < 0 or args.timeout <= 0:
        parser.error("-u must not be negative, and -T must be more than 0")
    names = {**DTYPES, **ALIASES}
    if args.datatype != "all" and args.datatype not in names:
        parser.error(f"-d {args.datatype}: unknown type; there are: all {' '.join(names)}")
    if args.root != "all" and not (args.root.isdecimal() and int(args.root) < nranks):
        parser.error(f"-r {args.root}: must be all, or a rank from 0 to {nranks - 1}")
    if args.json:
        _check_output(parser, args.json)
        _check_output(parser, args.json.with_suffix(".meta.json"))
    return Options(
        plan=_plan(parser, args.operation, args.algorithm),
        device=args.device,
        nranks=nranks,
        sizes=list(size_steps(args.minbytes, args.maxbytes, args.stepfactor, args.stepbytes)),
        dtypes=list(DTYPES.values()) if args.datatype == "all" else [names[args.datatype]],
        roots=list(range(nranks)) if args.root == "all" else [int(args.root)],
        iterations=args.iters,
        warmup=args.warmup_iters,
        checks=args.check,
        unalign=args.unalign,
        timeout_s=args.timeout,
        json=args.json,
    )
