"""``python -m pyparallel.info``: everything a bug report needs, one ``name: value`` a line."""

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import pyparallel
from pyparallel import _C, env
from pyparallel.devices import resolve_devices

_NO_DEVICES = (
    "none (DataParallel passes through; PYPARALLEL_VIRTUAL_DEVICES=4 makes four virtual devices)"
)


def collect() -> Iterator[tuple[str, str]]:
    """Yields (name, value) pairs; asks the driver, so it may create a CUDA context."""
    yield "pyparallel", f"{pyparallel.__version__} ({os.path.dirname(pyparallel.__file__)})"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'no'}"
    for package in ("numpy", "cupy-cuda12x", "cupy-cuda13x"):
        yield package, _package_version(package)
    yield "GIL", "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    build = _C.build_info()
    if build["cuda"]:
        yield "built with", f"{build['compiler']}, CUDA {build['cuda_version']}"
        targets = build["cuda_targets"]
        yield "built for", " ".join(targets) if isinstance(targets, list) else str(targets)
    else:
        yield "built with", f"{build['compiler']}, no CUDA{_why_no_cuda()}"
    yield "driver", _driver()
    yield from _devices()
    for name in sorted(os.environ):
        if name.startswith(("PYPARALLEL_", "CUDA_")):
            unknown = name.startswith("PYPARALLEL_") and name not in env.KNOWN
            yield name, os.environ[name] + (" (not known: nothing reads it)" if unknown else "")
    yield from _advice(bool(build["cuda"]))


def _package_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _why_no_cuda() -> str:
    """What the build wrote down beside the compiled core."""
    try:
        info = json.loads((Path(_C.__file__).parent / "_build_info.json").read_text())
    except OSError:
        return ""
    return f" ({info['cuda_reason']})" if info["cuda_reason"] else ""


def _driver() -> str:
    cuda = _C.cuda_driver_version()
    if cuda is None:
        return "none"
    try:
        kernel_module = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return f"CUDA {cuda}"
    return f"CUDA {cuda}, {kernel_module}"


def _devices() -> Iterator[tuple[str, str]]:
    count = torch.cuda.device_count()
    yield "GPUs", f"{count} for torch, {_C.cuda_device_count()} for pyparallel"
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        gib = gpu.total_memory / 2**30
        yield f"cuda:{index}", f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gib:.1f} GiB"
    try:
        devices = resolve_devices(None)
    except (RuntimeError, ValueError) as error:
        yield "device_ids=None", f"error: {error}"
    else:
        names = [f"{device.kind}:{device.index}" for device in devices]
        yield "device_ids=None", " ".join(names) or _NO_DEVICES


def _advice(built_with_cuda: bool) -> Iterator[tuple[str, str]]:
    """What the user should change, where the lines above say so."""
    if torch.cuda.device_count() > 0 and not built_with_cuda:
        yield (
            "note",
            "torch sees GPUs, but pyparallel was built without CUDA. Put nvcc on PATH and "
            "rebuild: pip install --force-reinstall --no-deps .",
        )
    elif torch.cuda.device_count() > _C.cuda_device_count():
        yield (
            "note",
            "torch sees GPUs that this build cannot drive: compare the CUDA versions",
        )


def main() -> None:
    """Prints the report."""
    argparse.ArgumentParser(prog="python -m pyparallel.info", description=__doc__).parse_args()
    for name, value in collect():
        print(f"{name}: {value}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends it without a traceback
    main()
