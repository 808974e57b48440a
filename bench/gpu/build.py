"""Builds the checkout for the GPUs of this machine, without a network."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import part

SETUPTOOLS = 77
PYBIND11 = 3
FAULT_TEST = part.ROOT / "build/gpu-check/absent_rank_test"


def major(package: str) -> int | None:
    """Returns the first number of a package's version, None if it is not installed."""
    try:
        return int(importlib.metadata.version(package).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_headers() -> Path | None:
    """Returns torch's folder of headers if pybind11's, of a version we can use, are among them."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    include = Path(spec.origin).parent / "include"
    try:
        text = (include / "pybind11/detail/common.h").read_text()
    except OSError:
        return None
    version = re.search(r"PYBIND11_VERSION_MAJOR\s+(\d+)", text)
    return include if version and int(version[1]) >= PYBIND11 else None


def search_path() -> str:
    """Returns PATH with Python's own folder first.

    Its cmake is often newer than the system's, and an old one does not know a new nvcc.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def missing() -> list[str]:
    """Returns the build tools that are not there."""
    tools = ("cmake", "ninja", "g++")
    result = [tool for tool in tools if shutil.which(tool, path=search_path()) is None]
    if (major("setuptools") or 0) < SETUPTOOLS:
        result.append(f"setuptools>={SETUPTOOLS} (there is {major('setuptools') or 'none'})")
    if (major("pybind11") or 0) < PYBIND11 and torch_headers() is None:
        result.append(f"pybind11>={PYBIND11} (torch has no such headers either)")
    if importlib.util.find_spec("pip") is None:
        result.append("pip")
    return result


def stand_in_for_pybind11(include: Path, folder: Path) -> None:
    """Makes torch's copy of pybind11's headers look like an installed pybind11.

    Only those headers become visible: the core must not see any of torch's.
    """
    (folder / "include").mkdir()
    (folder / "include/pybind11").symlink_to(include / "pybind11")
    (folder / "pybind11.py").write_text(f"def get_cmake_dir():\n    return {str(folder)!r}\n")
    (folder / "pybind11ConfigVersion.cmake").write_text("set(PACKAGE_VERSION_COMPATIBLE TRUE)\n")
    (folder / "pybind11Config.cmake").write_text(
        "function(pybind11_add_module name)\n"
        '  cmake_parse_arguments(PARSE_ARGV 1 arg "MODULE;NO_EXTRAS" "" "")\n'
        "  Python_add_library(${name} MODULE WITH_SOABI ${arg_UNPARSED_ARGUMENTS})\n"
        f'  target_include_directories(${{name}} SYSTEM PRIVATE "{folder}/include")\n'
        "endfunction()\n"
    )


def capabilities() -> str:
    """Returns the GPUs' architectures in the manner of TORCH_CUDA_ARCH_LIST."""
    import torch

    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{a}.{b}" for a, b in sorted(found))


def build_fault_test(environment: dict[str, str]) -> None:
    """Builds one C++ test in the folder that pip has just used, from the same objects."""
    folders = sorted(part.ROOT.glob("build/temp.*/CMakeCache.txt"), key=lambda f: f.stat().st_mtime)
    folder = folders[-1].parent
    configure = ["cmake", "-S", str(part.ROOT), "-B", str(folder), "-DPYPARALLEL_TESTS=ON"]
    compile_it = ["cmake", "--build", str(folder), "--target", FAULT_TEST.name]
    for command in (configure, compile_it):
        if subprocess.run(command, env=environment).returncode != 0:
            raise part.PartFailed(f"{FAULT_TEST.name} could not be built; the log says why")
    FAULT_TEST.parent.mkdir(exist_ok=True)
    shutil.copy2(folder / "tests/cpp" / FAULT_TEST.name, FAULT_TEST)


def build(args) -> dict[str, object]:
    if args.dry_run:
        raise part.SkipPart("a dry run takes the build that is there")
    if lacks := missing():
        raise part.PartFailed("missing for the build: " + ", ".join(lacks))
    environment = {**os.environ, "PYPARALLEL_CUDA": "ON", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment["PATH"] = search_path()
    architectures = environment.setdefault("TORCH_CUDA_ARCH_LIST", capabilities())
    headers = "pybind11"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if (major("pybind11") or 0) < PYBIND11:
            headers = "torch's copy of pybind11"
            stand_in_for_pybind11(torch_headers(), folder)
            environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-build-isolation"]
        command += ["--no-deps", "-v", "--target", str(folder / "site"), str(part.ROOT)]
        if subprocess.run(command, env=environment).returncode != 0:
            raise part.PartFailed("pip could not build the checkout; the log says why")
        build_fault_test(environment)
    # Another process, whose import of the compiled core is new.
    code = "from pyparallel import _C; print(_C.__file__); assert _C.build_info()['cuda']"
    if subprocess.run([sys.executable, "-c", code], cwd=part.ROOT).returncode != 0:
        raise part.PartFailed("the compiled core does not load, or has no CUDA")
    return {"note": f"for {architectures}, with {headers}", "architectures": architectures}


if __name__ == "__main__":
    parser = part.parser()
    parser.add_argument("--dry-run", action="store_true")
    part.run(parser.parse_args(), build)
