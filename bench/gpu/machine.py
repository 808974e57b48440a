"""Prints the devices of the ranks, writes facts about the machine, and says what is missing."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from part import ROOT

VIRTUAL_RANKS = 4
RANKS_ON_ONE_GPU = 4
MOST_RANKS = 16


def find_nvcc() -> str | None:
    """Returns the CUDA compiler that the build would use."""
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def choose_ranks(gpus: int) -> list[str]:
    """Returns four ranks on one GPU, or one on each of several."""
    if gpus == 1:
        return ["cuda:0"] * RANKS_ON_ONE_GPU
    return [f"cuda:{i}" for i in range(min(gpus, MOST_RANKS))]


def missing(dry_run: bool) -> list[str]:
    """Returns what has to be there before anything can run, one sentence each."""
    result = [
        f"the Python package {name} is not installed in {sys.executable} (set PYTHON to another)"
        for name in ("torch", "pytest", "numpy")
        if importlib.util.find_spec(name) is None
    ]
    if dry_run:
        return result
    if not find_nvcc():
        result.append("nvcc was not found: put it on PATH, or set CUDACXX")
    if not result:
        import torch

        if torch.version.cuda is None:
            result.append(f"torch {torch.__version__} was built without CUDA")
        elif not torch.cuda.is_available():
            result.append("torch sees no GPU; --dry-run needs none")
    return result


def output_of(*command: str) -> str | None:
    """Returns what a command prints, None if it fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def version(*packages: str) -> str | None:
    for package in packages:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def nvcc_version() -> str | None:
    nvcc = find_nvcc()
    text = output_of(nvcc, "--version") if nvcc else None
    release = re.search(r"release ([\d.]+)", text or "")
    return release[1] if release else None


def gpu_facts() -> list[dict[str, object]]:
    import torch

    facts = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts.append(
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory_bytes": gpu.total_memory,
                "multiprocessors": gpu.multi_processor_count,
            }
        )
    return facts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--facts", type=Path, required=True)
    args = parser.parse_args()
    if lacks := missing(args.dry_run):
        print("\n".join(lacks), file=sys.stderr)
        return 1
    gpus = [] if args.dry_run else gpu_facts()
    ranks = choose_ranks(len(gpus)) if gpus else [f"cpu:{i}" for i in range(VIRTUAL_RANKS)]
    changes = output_of("git", "status", "--porcelain", "--untracked-files=no")
    facts = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "dry_run": args.dry_run,
        "commit": output_of("git", "rev-parse", "HEAD"),
        "changed_files": None if changes is None else len(changes.splitlines()),
        "ranks": ranks,
        "gpus": gpus,
        "driver": output_of(
            "nvidia-smi", "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"
        ),
        "cuda_compiler": nvcc_version(),
        "torch": version("torch"),
        "cupy": version("cupy-cuda13x", "cupy-cuda12x", "cupy"),
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
    }
    args.facts.write_text(json.dumps(facts))
    print(",".join(ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
