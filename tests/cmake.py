"""Finds a CMake that is new enough for the project; a system's own one may be older."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _version(text: str) -> tuple[int, ...]:
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def _needed() -> tuple[int, ...]:
    text = (ROOT / "CMakeLists.txt").read_text()
    return _version(re.search(r"cmake_minimum_required\(VERSION ([\d.]+)", text)[1])


def find_cmake() -> str | None:
    """The first cmake on PATH that CMakeLists.txt accepts, or None: a reason to skip a test."""
    for folder in os.environ["PATH"].split(os.pathsep):
        cmake = shutil.which("cmake", path=folder)
        if cmake is not None:
            printed = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
            if _version(printed) >= _needed():
                return cmake
    return None
