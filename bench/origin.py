"""Where numbers come from: the command, the sources, the machine and the versions behind them."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import pyparallel
from pyparallel import _C

ROOT = Path(__file__).resolve().parents[1]
_VARIABLES = ("PYPARALLEL_", "CUDA_", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def facts(script: str, arguments: Sequence[str] | None) -> dict[str, object]:
    """Returns what a result file needs so that somebody can repeat it.

    Args:
        script: Path from the checkout, ``bench/collectives.py``.
        arguments: Of the command line; None: those of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    variables = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_VARIABLES)}
    settings = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return {
        "command": " ".join([*settings, "python", script, shlex.join(arguments)]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": None if changes is None else len(changes.splitlines()),
        "pyparallel": pyparallel.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "built_with": f"{_C.build_info()['compiler']}, CUDA {_C.build_info()['cuda_version']}",
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ("git", *arguments), capture_output=True, text=True, timeout=10, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), None)
