"""Drives CMake; CMakeLists.txt is the only description of what is compiled. Imports no torch.

Environment: PYPARALLEL_CUDA (AUTO, ON, OFF), TORCH_CUDA_ARCH_LIST, CUDACXX, CMAKE_ARGS, MAX_JOBS.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent


def cuda_architectures(arch_list: str) -> str:
    """Translates TORCH_CUDA_ARCH_LIST: "7.5 8.0;9.0+PTX" is "75-real;80-real;90" for CMake."""
    architectures = []
    for item in re.split(r"[;,\s]+", arch_list.strip("; ,\t\n")):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", item)
        if match is None:
            raise ValueError(
                f"TORCH_CUDA_ARCH_LIST: cannot read '{item}'; write numbers such as '8.0;9.0+PTX'"
            )
        architectures.append(f"{match[1]}{match[2]}" + ("" if match[3] else "-real"))
    return ";".join(dict.fromkeys(architectures))


def cmake(*arguments: str | Path) -> None:
    """Runs cmake; an environment that was not activated still offers its own cmake and ninja."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    command = [shutil.which("cmake", path=path) or "cmake", *map(str, arguments)]
    print("+", shlex.join(command), flush=True)
    try:
        subprocess.run(command, check=True, env={**os.environ, "PATH": path})
    except FileNotFoundError:
        raise CompileError("cmake was not found: pip install cmake ninja") from None
    except subprocess.CalledProcessError:
        raise CompileError("cmake failed; its message is above") from None


def print_summary(info_file: Path, folders: list[Path]) -> None:
    """Says what was built: a build without CUDA must not go unnoticed."""
    info = json.loads(info_file.read_text())
    cuda = f"no ({info['cuda_reason']})"
    if info["cuda"]:
        cuda = f"{info['cuda_version']} for {info['cuda_targets']}"
    print(f"pyparallel {info['version']} was built:")
    print(f"  CUDA:     {cuda}")
    print(f"  compiler: {info['compiler']}")
    print(f"  Python:   {info['python']}")
    print(f"  into:     {', '.join(map(str, folders))}", flush=True)


class Build(build):
    """Starts from an empty build/lib: files of an earlier build would get into the wheel."""

    def run(self) -> None:
        """Builds."""
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Configures, compiles and installs the compiled core."""

    def build_extension(self, ext: Extension) -> None:
        """Puts _C and _build_info.json beside the Python files of the package."""
        import pybind11  # a build requirement; the commands that do not build work without it

        build_dir = Path(self.build_temp).absolute()
        options = {
            "CMAKE_BUILD_TYPE": "Release",
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "PYPARALLEL_CUDA": os.environ.get("PYPARALLEL_CUDA") or "AUTO",
        }
        if arch_list := os.environ.get("TORCH_CUDA_ARCH_LIST"):
            options["CMAKE_CUDA_ARCHITECTURES"] = cuda_architectures(arch_list)
        # --fresh: the cache of an earlier isolated build names a ninja that is gone, and remembers
        # that there was no CUDA compiler.
        configure = ["--fresh", "-S", ROOT, "-B", build_dir, "-GNinja"]
        configure += [f"-D{name}={value}" for name, value in options.items()]
        cmake(*configure, *shlex.split(os.environ.get("CMAKE_ARGS", "")))
        jobs = [f"-j{os.environ['MAX_JOBS']}"] if os.environ.get("MAX_JOBS") else []
        cmake("--build", build_dir, "--target", "_C", *jobs)
        # Also into the source folder: in a checkout it hides the installed package.
        package = Path(self.get_ext_fullpath(ext.name)).absolute().parent
        folders = list(dict.fromkeys([package, ROOT / "pyparallel"]))
        for folder in folders:
            cmake("--install", build_dir, "--prefix", folder, "--component", "python", "--strip")
        print_summary(package / "_build_info.json", folders)


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("pyparallel._C", sources=[])],
        cmdclass={"build": Build, "build_ext": CMakeBuild},
    )
