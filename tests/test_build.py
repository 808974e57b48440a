"""The build: what it configures, what it says, and what the compiled core may contain."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cmake import find_cmake

import pyparallel
from pyparallel import _C, _version

ROOT = Path(__file__).parent.parent
CORE = Path(_C.__file__)

needs_compiled_core = pytest.mark.skipif(CORE.suffix != ".so", reason="_C is not a compiled module")


def python(code: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a new process that finds packages in cwd first."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


# ---- setup.py ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def setup_script():
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("pyparallel_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arch_list", "architectures"),
    [
        ("9.0", "90-real"),
        ("7.5 8.0 9.0+PTX", "75-real;80-real;90"),
        ("7.5;8.0;9.0+PTX", "75-real;80-real;90"),
        (" 8.0, 8.6 ;", "80-real;86-real"),
        ("9.0a 10.0f+PTX 12.0", "90a-real;100f;120-real"),
        ("8.0 8.0", "80-real"),
    ],
)
def test_cuda_architectures(setup_script, arch_list, architectures) -> None:
    assert setup_script.cuda_architectures(arch_list) == architectures


@pytest.mark.parametrize("arch_list", ["80", "sm_80", "8.0+ptx", "8", ";", "All"])
def test_cuda_architectures_refuses(setup_script, arch_list) -> None:
    with pytest.raises(ValueError, match="TORCH_CUDA_ARCH_LIST: cannot read '.*'; write numbers"):
        setup_script.cuda_architectures(arch_list)


@pytest.mark.parametrize(
    ("cuda", "line"),
    [
        ('true, "cuda_reason": ""', "CUDA:     13.0 for sm_80 sm_90"),
        (
            'false, "cuda_reason": "CUDACXX=/x/nvcc cannot compile CUDA"',
            "CUDA:     no (CUDACXX=/x/nvcc cannot compile CUDA)",
        ),
    ],
)
def test_summary_says_whether_cuda_was_built(setup_script, tmp_path, capsys, cuda, line) -> None:
    info = tmp_path / "_build_info.json"
    info.write_text(
        f'{{"version": "1.2.3", "python": "cp", "compiler": "GNU 12", "cuda": {cuda},'
        ' "cuda_version": "13.0", "cuda_targets": "sm_80 sm_90"}'
    )
    setup_script.print_summary(info, [tmp_path])
    lines = [text.strip() for text in capsys.readouterr().out.splitlines()]
    assert lines[0] == "pyparallel 1.2.3 was built:"
    assert line in lines


# ---- CMake ---------------------------------------------------------------------------------------


def configure(build_dir: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Configures the core alone, on a PATH that has no nvcc."""
    cmake = find_cmake()
    if cmake is None:
        pytest.skip("no cmake on PATH is new enough")
    folders = [
        folder
        for folder in os.environ["PATH"].split(os.pathsep)
        if not os.path.exists(os.path.join(folder, "nvcc"))
    ]
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    for name in ("CUDACXX", "CUDA_PATH", "CUDA_HOME"):
        environment.pop(name, None)
    return subprocess.run(
        [cmake, "-S", ROOT, "-B", build_dir, "-DPYPARALLEL_PYTHON=OFF", *options],
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )


def test_auto_without_nvcc_says_so(tmp_path) -> None:
    run = configure(tmp_path)
    assert run.returncode == 0, run.stderr
    assert (
        "pyparallel: no CUDA compiler found; building the CPU backend only. "
        "Put nvcc on PATH or set CUDACXX to build the CUDA backend.\n"
    ) in run.stderr


def test_on_without_nvcc_fails(tmp_path) -> None:
    run = configure(tmp_path, "-DPYPARALLEL_CUDA=ON")
    assert run.returncode != 0
    assert (
        "PYPARALLEL_CUDA=ON, but no CUDA compiler was found. "
        "Put nvcc on PATH or set CUDACXX=/usr/local/cuda/bin/nvcc.\n"
    ) in run.stderr


def test_a_broken_compiler_is_named(tmp_path) -> None:
    broken = str(tmp_path / "nvcc")
    auto = configure(tmp_path / "auto", CUDACXX=broken)
    assert auto.returncode == 0, auto.stderr
    assert f"pyparallel: CUDACXX={broken} cannot compile CUDA; building the CPU" in auto.stderr
    on = configure(tmp_path / "on", "-DPYPARALLEL_CUDA=ON", CUDACXX=broken)
    assert on.returncode != 0
    assert f"PYPARALLEL_CUDA=ON, but CUDACXX={broken} cannot compile CUDA." in on.stderr


def test_cuda_option_is_checked(tmp_path) -> None:
    run = configure(tmp_path, "-DPYPARALLEL_CUDA=yes")
    assert run.returncode != 0
    assert "PYPARALLEL_CUDA is AUTO, ON or OFF, but got 'yes'." in run.stderr


def test_every_source_is_listed_once() -> None:
    listed = re.findall(r"csrc/[\w/]+\.(?:cpp|cu)\b", (ROOT / "CMakeLists.txt").read_text())
    present = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".cpp", ".cu")
    ]
    assert sorted(listed) == sorted(present)


# ---- The compiled core ---------------------------------------------------------------------------


@needs_compiled_core
def test_build_info() -> None:
    info = _C.build_info()
    assert info["version"] == pyparallel.__version__ == _version.__version__
    assert info["compiler"]
    assert bool(info["cuda_version"]) == bool(info["cuda_targets"]) == info["cuda"]


@pytest.mark.report(
    "pytorch#11756",
    "pytorch#49095",
    "pytorch#32036",
    "lightwood#332",
    "temporal-shift#198",
    "nccl#1283",
    "faster-rcnn#83",
    "rccl#1421",
    "pytorch#109709",
)
@needs_compiled_core
def test_core_is_independent_of_torch_and_exports_nothing() -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")

    def symbols(option: str) -> list[str]:
        run = subprocess.run(["nm", "-D", option, CORE], capture_output=True, text=True, check=True)
        return [line.split()[-1] for line in run.stdout.splitlines()]

    undefined = symbols("--undefined-only")
    assert any(name.startswith("Py") for name in undefined)
    assert [name for name in undefined if re.search("c10|torch|at3|caffe", name)] == []
    # A CUDA runtime that is visible could be mixed up with the one that torch loads.
    assert symbols("--defined-only") == ["PyInit__C"]


@needs_compiled_core
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may load the driver itself")
def test_import_makes_no_cuda_call(tmp_path) -> None:
    """A stand-in for the driver leaves a mark when somebody loads it."""
    if not _C.build_info()["cuda"] or shutil.which("cc") is None:
        pytest.skip("needs a build with CUDA and a C compiler")
    source = tmp_path / "driver.c"
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n"
        "__attribute__((constructor)) static void load(void) {\n"
        '  fclose(fopen(getenv("MARK"), "w"));\n}\n'
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = (
        "import os, pyparallel\n"
        "print(os.path.exists(os.environ['MARK']))\n"
        "pyparallel._C.cuda_device_count()\n"
        "print(os.path.exists(os.environ['MARK']))\n"
    )
    mark = str(tmp_path / "mark")
    run = python(code, CORE.parent.parent, LD_LIBRARY_PATH=str(tmp_path), MARK=mark)
    assert run.stdout.split() == ["False", "True"], run.stderr


def package_with_core(folder: Path, core: str | None) -> Path:
    """A copy of the package's import check with another core."""
    package = folder / "pyparallel"
    package.mkdir()
    for name in ("__init__.py", "_version.py"):
        shutil.copy(Path(pyparallel.__file__).parent / name, package)
    if core is not None:
        (package / "_C.py").write_text(core)
    return folder


CORE_OF = "ABI = {abi}\ndef build_info():\n    return {{'version': '{version}'}}\n"


@pytest.mark.parametrize(
    ("abi", "version"),
    [(_version.ABI - 1, _version.__version__), (_version.ABI, "0.0.1")],
)
def test_a_stale_core_is_refused(tmp_path, abi, version) -> None:
    folder = package_with_core(tmp_path, CORE_OF.format(abi=abi, version=version))
    run = python("import pyparallel", folder)
    assert run.stderr.splitlines()[-1] == (
        "ImportError: pyparallel/_C was built from another version of the sources. "
        "Rebuild: pip install -e ."
    )


def test_a_missing_core_says_what_to_run(tmp_path) -> None:
    folder = package_with_core(tmp_path, None)
    (folder / "pyparallel" / "_C.cpython-27.so").touch()
    run = python("import pyparallel", folder)
    assert re.fullmatch(
        r"ImportError: pyparallel/_C was not built for this Python \(.*; "
        r"found: _C\.cpython-27\.so\)\. Build it: pip install \. Or leave this folder, if it is a "
        r"checkout, which hides the installed package\.",
        run.stderr.splitlines()[-1],
    )


def test_a_core_that_does_not_load_shows_its_own_error(tmp_path) -> None:
    folder = package_with_core(tmp_path, "raise ImportError('undefined symbol: x')\n")
    run = python("import pyparallel", folder)
    assert run.stderr.splitlines()[-1] == "ImportError: undefined symbol: x"


# ---- Source distribution -------------------------------------------------------------------------


def test_sdist_holds_sources_and_no_binaries(tmp_path) -> None:
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip("needs setuptools 77 or newer")
    tree = tmp_path / "tree"
    ignore = shutil.ignore_patterns(".git", "build", "dist", ".venv*", "*.so", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=ignore)
    for name in ("_C.cpython-27-x.so", "_build_info.json"):
        (tree / "pyparallel" / name).write_text("stale")
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--formats=tar", "-d", tmp_path],
        cwd=tree,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    (archive,) = tmp_path.glob("*.tar")
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(archive, unpacked)
    (top,) = unpacked.iterdir()
    assert top.name == f"pyparallel_torch-{pyparallel.__version__}"
    names = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cuh", ".cpp", ".cu")
    }
    expected = {"CMakeLists.txt", "setup.py", "LICENSE", "README.md", "tests/cpp/CMakeLists.txt"}
    expected |= {"pyparallel/py.typed", "pyparallel/_C.pyi", "pyparallel/_version.py"}
    assert names >= sources | expected
    assert [name for name in names if name.endswith((".so", "_build_info.json"))] == []
