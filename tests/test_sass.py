"""The machine code of the kernels: what no run without a GPU, and hardly a run with one, can show.

ThreadSanitizer proves the order of the bodies on the host; the PTX inside the GPU context is
checked here alone.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
import sass

from pyparallel import _C

SOURCES = Path(__file__).parent.parent / "csrc"
CUDA = SOURCES / "backend/cuda"
TYPES = ["Half", "BFloat16", "f", "d", "i", "l"]

pytestmark = [
    pytest.mark.skipif(
        sass.find_cuobjdump() is None,
        reason="cuobjdump was not found (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)",
    ),
]
needs_nvcc = pytest.mark.skipif(sass.find_nvcc() is None, reason="nvcc was not found")


def kernel_name(mangled):
    """``sum_kernel float`` and the like; i, l, f, d are the mangled int, long, float and double."""
    kernel, own_type, plain_type = re.search(
        r"((?:copy|sum|flag|send|find|receive)_kernel)(?!s)(?:I(?:N\w*?\d(Half|BFloat16|CopyOnly)|([ilfd]))E)?",
        mangled,
    ).groups()
    return f"{kernel} {own_type or plain_type or ''}".strip()


def kernels_of(source, sources, folder):
    cubin = sass.compile_kernels(source, sources, folder / f"{source.name}.cubin")
    return {kernel_name(function.name): function for function in sass.disassemble(cubin)}


@pytest.fixture(scope="module")
def event_kernels(tmp_path_factory):
    return kernels_of(CUDA / "event_kernels.cu", SOURCES, tmp_path_factory.mktemp("event"))


@pytest.fixture(scope="module")
def flag_kernels(tmp_path_factory):
    return kernels_of(CUDA / "flag_kernels.cu", SOURCES, tmp_path_factory.mktemp("flag"))


@pytest.fixture(scope="module")
def send_kernels(tmp_path_factory):
    return kernels_of(CUDA / "send_kernels.cu", SOURCES, tmp_path_factory.mktemp("send"))


# ---- What every kernel must hold -----------------------------------------------------------------


def memory_faults(kernel):
    """Accesses that spill, that are generic, or that take data for constant which a peer writes."""
    slow = {"LDL": "local load", "STL": "local store", "LD": "generic load", "ST": "generic store"}
    faults = [slow[i.base] for i in kernel.code if i.base in slow]
    return faults + ["constant load" for i in kernel.code if i.name.endswith(".CONSTANT")]


def order_faults(kernel):
    """What is wrong with the flags of a flag-ordered kernel."""
    faults = []
    posts = [k for k, i in enumerate(kernel.code) if i.name == "STG.E.64.STRONG.SYS"]
    claims = kernel.count(r"ATOMG\..*CAS.*SYS")
    if len(posts) != 2:
        faults.append(f"{len(posts)} posts instead of 2: data and credit")
    for post in posts:
        if not any(i.name == "MEMBAR.ALL.SYS" for i in kernel.code[post - 4 : post]):
            faults.append("a post without its barrier of memory")
    # Who claimed a failure record publishes it with a release: one more barrier at each claim.
    if kernel.count(r"MEMBAR\.ALL\.SYS$") != len(posts) + claims:
        faults.append("barriers of memory that belong to no release")
    if kernel.count(r"MEMBAR\.SC"):
        faults.append("a sequentially consistent fence")
    polls = [loop for loop in kernel.innermost_loops() if loop.count(r"LDG\.E\.64\.STRONG\.SYS")]
    if len(polls) != 2:
        faults.append(f"{len(polls)} poll loops instead of 2: data and credit")
    if any(loop.count("CCTL|MEMBAR") for loop in polls):
        faults.append("a poll that empties the L1 cache")
    if kernel.count(r"CCTL\.IVALL$") != len(polls):
        faults.append("waits without an acquire")
    return faults


@needs_nvcc
def test_kernels_access_global_memory_only(event_kernels, flag_kernels, send_kernels) -> None:
    assert set(event_kernels) == {"copy_kernel", *(f"sum_kernel {t}" for t in TYPES)}
    assert set(flag_kernels) == {f"flag_kernel {t}" for t in ["CopyOnly", *TYPES]}
    assert set(send_kernels) == {"send_kernel", "find_kernel", "receive_kernel"}
    kernels = event_kernels | flag_kernels | send_kernels
    faults = {name: memory_faults(kernel) for name, kernel in kernels.items()}
    assert {name: found for name, found in faults.items() if found} == {}


@needs_nvcc
def test_flags_are_released_and_acquired(flag_kernels) -> None:
    faults = {name: order_faults(kernel) for name, kernel in flag_kernels.items()}
    assert {name: found for name, found in faults.items() if found} == {}


# ---- These tests can fail ------------------------------------------------------------------------

PROBE = """
#include "device/flag_ordered.h"
#include "device/gpu_context.h"
using namespace pyparallel;
__global__ void __launch_bounds__(512, 1) flag_kernel(const __grid_constant__ FlagArgs args) {
  run_flag_ordered<CopyOnly>(GpuContext{}, args, blockIdx.x, 0);
}
"""


@needs_nvcc
@pytest.mark.parametrize(
    ("correct", "planted", "faults"),
    [
        ("", "", []),
        (
            "st.release.sys.global.u64",
            "st.relaxed.sys.global.u64",
            [
                "a post without its barrier of memory",
                "a post without its barrier of memory",
                "barriers of memory that belong to no release",
            ],
        ),
        ("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64", ["waits without an acquire"]),
        (
            "ld.relaxed.sys.global.u64",
            "ld.acquire.sys.global.u64",
            ["a poll that empties the L1 cache"],
        ),
        ("__builtin_assume(__isGlobal(to));", "", ["generic store"]),
        ("__builtin_assume(__isGlobal(from));", "", ["generic load"]),
    ],
)
def test_planted_faults_are_found(tmp_path, correct, planted, faults) -> None:
    shutil.copytree(SOURCES, tmp_path / "csrc")
    context = tmp_path / "csrc/device/gpu_context.h"
    text = context.read_text()
    assert correct in text
    context.write_text(text.replace(correct, planted) if correct else text)
    probe = tmp_path / "probe.cu"
    probe.write_text(PROBE)
    kernel = kernels_of(probe, tmp_path / "csrc", tmp_path)["flag_kernel"]
    found = order_faults(kernel) + sorted(set(memory_faults(kernel)))
    assert set(faults) <= set(found) if faults else found == []


# ---- The hot loops -------------------------------------------------------------------------------


def pack_loops(loops):
    """(packs loaded, packs stored) of the loops that touch memory by packs alone."""
    return {
        (loop.count(r"LDG\.E\.128$"), loop.count(r"STG\.E\.128$"))
        for loop in loops
        if loop.count("LDG|STG") == loop.count(r"(LDG|STG)\.E\.128$")
    }


@needs_nvcc
def test_copies_have_eight_packs_in_flight(event_kernels, flag_kernels) -> None:
    # One destination and two: at the end of a chain, and in its middle.
    assert {(8, 8), (8, 16)} <= pack_loops(flag_kernels["flag_kernel CopyOnly"].innermost_loops())
    # The loop around the (unrolled) loop over destinations.
    loops = pack_loops(event_kernels["copy_kernel"].loops())
    assert any(loads == 8 and stores >= 8 and stores % 8 == 0 for loads, stores in loops)


@needs_nvcc
@pytest.mark.parametrize("kernel", ["send_kernel", "find_kernel"])
def test_hashes_have_eight_packs_in_flight(send_kernels, kernel) -> None:
    # Each pack with its key and the next one; two sums of two products each.
    products = r"IMAD\.WIDE\.U32|UIMAD\.WIDE\.U32"
    loops = [
        loop
        for loop in send_kernels[kernel].innermost_loops()
        if loop.count(r"LDG\.E\.128$") == 24 and loop.count(products) >= 8 * 4
    ]
    assert loops
    assert all(len(loop.code) <= 8 * 32 for loop in loops)


@needs_nvcc
@pytest.mark.parametrize("element", TYPES)
def test_sums_have_packs_in_flight(event_kernels, flag_kernels, element) -> None:
    # Two sources, one destination and two.
    loops = pack_loops(flag_kernels[f"flag_kernel {element}"].innermost_loops())
    assert {(8, 4), (8, 8)} <= loops
    # The loop over sources loads four packs of each.
    loops = pack_loops(event_kernels[f"sum_kernel {element}"].innermost_loops())
    assert any(loads >= 4 and loads % 4 == 0 and stores == 0 for loads, stores in loops)


@needs_nvcc
@pytest.mark.parametrize("element", TYPES)
def test_sums_only_add(event_kernels, flag_kernels, element) -> None:
    add = {"d": "DADD", "i": "IADD3|IMAD", "l": "IADD3|IMAD"}.get(element, "FADD")
    for kernel in (event_kernels[f"sum_kernel {element}"], flag_kernels[f"flag_kernel {element}"]):
        assert kernel.count(add) > 0
        # A fused multiply-add rounds once where the host rounds twice; a flush loses subnormals.
        assert kernel.count(r"FFMA|DFMA|FADD.*\.FTZ") == 0


# ---- The module ----------------------------------------------------------------------------------


@pytest.mark.skipif(not _C.build_info()["cuda"], reason="_C was built without CUDA")
def test_module_holds_its_targets() -> None:
    targets = sass.listed_targets(Path(_C.__file__))
    assert targets == set(_C.build_info()["cuda_targets"])
    if "TORCH_CUDA_ARCH_LIST" not in os.environ and _C.build_info()["cuda_version"] == "13.0":
        assert {"sm_75", "sm_80", "sm_90", "sm_100", "sm_120"} <= targets
