"""Reads machine code of GPUs: functions, instructions and loops of a cuobjdump listing."""

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Instruction:
    """Its address, its name with suffixes (``LDG.E.128``) and where it may jump to."""

    address: int
    name: str
    target: int | None

    @property
    def base(self) -> str:
        """The name without suffixes (``LDG``)."""
        return self.name.split(".")[0]


@dataclass(frozen=True)
class Function:
    """A kernel and its instructions in the order of their addresses."""

    name: str
    code: list[Instruction]

    def count(self, pattern: str) -> int:
        """How many instructions have a name that starts with the regular expression."""
        return sum(1 for instruction in self.code if re.match(pattern, instruction.name))

    def loops(self) -> list["Function"]:
        """The code between each backward jump and its target."""
        return [
            Function(
                f"{self.name} {jump.target:#x}",
                [i for i in self.code if jump.target <= i.address <= jump.address],
            )
            for jump in self.code
            if jump.target is not None and jump.target < jump.address
        ]

    def innermost_loops(self) -> list["Function"]:
        """Loops that hold no other loop."""
        return [loop for loop in self.loops() if len(loop.loops()) == 1]


def parse(listing: str) -> list[Function]:
    """The functions of a ``cuobjdump -sass`` listing."""
    functions = []
    for line in listing.splitlines():
        if head := re.search(r"Function : (\S+)", line):
            functions.append(Function(head.group(1), []))
        elif found := re.search(
            r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line
        ):
            address, name, operands = found.groups()
            target = re.search(r"0x[0-9a-f]+\s*$", operands) if name.startswith("BRA") else None
            functions[-1].code.append(
                Instruction(int(address, 16), name, int(target.group(), 16) if target else None)
            )
    return functions


def find_cuobjdump() -> str | None:
    """The cuobjdump on PATH or that of the package nvidia-cuda-cuobjdump."""
    if on_path := shutil.which("cuobjdump"):
        return on_path
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if Path(file).name == "cuobjdump"), None)


def find_nvcc() -> str | None:
    """The CUDA compiler that the build would take."""
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def compile_kernels(source: Path, include: Path, cubin: Path, architecture: str) -> Path:
    """Compiles a file for an architecture (``sm_90``) with the flags of the build."""
    command = [find_nvcc(), "-std=c++20", "-fmad=false", f"-arch={architecture}", "-cubin"]
    subprocess.run([*command, f"-I{include}", "-o", cubin, source], check=True, timeout=240)
    return cubin


def disassemble(binary: Path) -> list[Function]:
    """The kernels that a cubin holds."""
    listing = subprocess.run(
        [find_cuobjdump(), "-sass", binary], check=True, capture_output=True, text=True
    )
    return parse(listing.stdout)


def listed_targets(module: Path) -> set[str]:
    """The architectures that a module holds machine code for, such as ``sm_90``."""
    listing = subprocess.run(
        [find_cuobjdump(), "--list-elf", module], check=True, capture_output=True, text=True
    )
    return set(re.findall(r"sm_\d+", listing.stdout))
