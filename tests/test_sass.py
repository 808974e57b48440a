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
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]

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
        r"((?:copy|sum|flag|ll|send|find|receive)_kernel)(?!s)"
        r"(?:I(?:N\w*?\d(Half|BFloat16|CopyOnly)|([ilfd]))E)?",
        mangled,
    ).groups()
    return f"{kernel} {own_type or plain_type or ''}".strip()


def kernels_of(source, sources, folder, architecture):
    cubin = sass.compile_kernels(source, sources, folder / f"{source.name}.cubin", architecture)
    return {kernel_name(function.name): function for function in sass.disassemble(cubin)}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request, tmp_path_factory):
    """All kernels by name, for one architecture after the other."""
    folder = tmp_path_factory.mktemp(request.param)
    found = {}
    for name in ("event", "flag", "ll", "send"):
        found |= kernels_of(CUDA / f"{name}_kernels.cu", SOURCES, folder, request.param)
    return found


# ---- What every kernel must hold -----------------------------------------------------------------


def memory_faults(kernel):
    """Accesses that spill, that are generic, or that take data for constant which a peer writes."""
    slow = {"LDL": "local load", "STL": "local store", "LD": "generic load", "ST": "generic store"}
    faults = [slow[i.base] for i in kernel.code if i.base in slow]
    return faults + ["constant load" for i in kernel.code if i.name.endswith(".CONSTANT")]


def order_faults(kernel):
    """What is wrong with the flags of a flag-ordered kernel.

    Kernels of the LL protocol post and poll credits alone; their data are lines with flags inside.
    """
    faults = []
    is_ll = kernel_name(kernel.name).startswith("ll_kernel")
    flags = 1 if is_ll else 2
    posts = [k for k, i in enumerate(kernel.code) if i.name == "STG.E.64.STRONG.SYS"]
    claims = kernel.count(r"ATOMG\..*CAS.*SYS")
    if len(posts) != flags:
        faults.append(f"{len(posts)} posts instead of {flags}")
    for post in posts:
        if not any(i.name == "MEMBAR.ALL.SYS" for i in kernel.code[post - 4 : post]):
            faults.append("a post without its barrier of memory")
    # Who claimed a failure record publishes it with a release: one more barrier at each claim.
    if kernel.count(r"MEMBAR\.ALL\.SYS$") != len(posts) + claims:
        faults.append("barriers of memory that belong to no release")
    if kernel.count(r"MEMBAR\.SC"):
        faults.append("a sequentially consistent fence")
    polls = [loop for loop in kernel.innermost_loops() if loop.count(r"LDG\.E\.64\.STRONG\.SYS")]
    if len(polls) != flags:
        faults.append(f"{len(polls)} poll loops instead of {flags}")
    lines = [loop for loop in kernel.innermost_loops() if loop.count(r"LDG\.E\.128\.STRONG\.SYS")]
    # The first term of a sum and the others. Four lines are polled at the same time.
    if [loop.count(r"LDG\.E\.128\.STRONG\.SYS") for loop in lines] != [4, 4] * is_ll:
        faults.append("lines that are not polled four at a time")
    if kernel.count(r"STG\.E\.128\.STRONG\.SYS") != 4 * is_ll:
        faults.append("lines that are not stored whole")
    if any(loop.count("CCTL|MEMBAR") for loop in polls + lines):
        faults.append("a poll that empties the L1 cache")
    if kernel.count(r"CCTL\.IVALL$") != len(polls):
        faults.append("waits without an acquire")
    return faults


@needs_nvcc
def test_kernels_access_global_memory_only(kernels) -> None:
    names = {f"{kind}_kernel {t}" for kind in ("sum", "flag", "ll") for t in TYPES}
    changed = {"send_kernel", "find_kernel", "receive_kernel"}
    assert set(kernels) == {"copy_kernel", "flag_kernel CopyOnly", *changed, *names}
    faults = {name: memory_faults(kernel) for name, kernel in kernels.items()}
    assert {name: found for name, found in faults.items() if found} == {}


@needs_nvcc
def test_flags_are_released_and_acquired(kernels) -> None:
    ordered = {name: kernel for name, kernel in kernels.items() if name.startswith(("flag", "ll"))}
    faults = {name: order_faults(kernel) for name, kernel in ordered.items()}
    assert {name: found for name, found in faults.items() if found} == {}


# ---- These tests can fail ------------------------------------------------------------------------

PROBE = """
#include "device/flag_ordered.h"
#include "device/gpu_context.h"
#include "device/ll.h"
using namespace pyparallel;
__global__ void __launch_bounds__(512, 1) flag_kernel(const __grid_constant__ FlagArgs args) {
  run_flag_ordered<CopyOnly>(GpuContext{}, args, blockIdx.x, 0);
}
__global__ void __launch_bounds__(512, 1) ll_kernel(const __grid_constant__ FlagArgs args) {
  run_ll<float>(GpuContext{}, args, blockIdx.x, 0);
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
                "barriers of memory that belong to no release",
            ],
        ),
        ("ld.acquire.sys.global.u64", "ld.relaxed.sys.global.u64", ["waits without an acquire"]),
        (
            "ld.relaxed.sys.global.u64",
            "ld.acquire.sys.global.u64",
            ["a poll that empties the L1 cache"],
        ),
        (
            "ld.relaxed.sys.global.v2.u64",
            "ld.global.v2.u64",
            ["lines that are not polled four at a time"],
        ),
        ("st.relaxed.sys.global.v2.u64", "st.global.v2.u64", ["lines that are not stored whole"]),
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
    kernels = kernels_of(probe, tmp_path / "csrc", tmp_path, "sm_90")
    assert set(kernels) == {"flag_kernel", "ll_kernel"}
    found = [f for kernel in kernels.values() for f in order_faults(kernel) + memory_faults(kernel)]
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
def test_copies_have_eight_packs_in_flight(kernels) -> None:
    # One destination and two: at the end of a chain, and in its middle.
    flag_kernel = kernels["flag_kernel CopyOnly"]
    assert {(8, 8), (8, 16)} <= pack_loops(flag_kernel.innermost_loops())
    # Any number of them: the loop over destinations stores eight packs for each address it loads.
    fan_outs = [
        (loop.count(r"STG\.E\.128$"), loop.count(r"LDG\.E\.64$"))
        for loop in flag_kernel.innermost_loops()
        if loop.count("LDG|STG") == loop.count(r"STG\.E\.128$|LDG\.E\.64$")
    ]
    assert any(stores >= 8 and stores == 8 * addresses for stores, addresses in fan_outs)
    # The loop around the (unrolled) loop over destinations.
    loops = pack_loops(kernels["copy_kernel"].loops())
    assert any(loads == 8 and stores >= 8 and stores % 8 == 0 for loads, stores in loops)


@needs_nvcc
@pytest.mark.parametrize("kernel", ["send_kernel", "find_kernel"])
def test_hashes_have_eight_packs_in_flight(kernels, kernel) -> None:
    # Each pack with its key and the next one; two sums of two products each.
    products = r"IMAD\.WIDE\.U32|UIMAD\.WIDE\.U32"
    loops = [
        loop
        for loop in kernels[kernel].innermost_loops()
        if loop.count(r"LDG\.E\.128$") == 24 and loop.count(products) >= 8 * 4
    ]
    assert loops
    assert all(len(loop.code) <= 8 * 32 for loop in loops)


@needs_nvcc
@pytest.mark.parametrize("element", TYPES)
def test_sums_have_packs_in_flight(kernels, element) -> None:
    # Two sources, one destination and two.
    loops = pack_loops(kernels[f"flag_kernel {element}"].innermost_loops())
    assert {(8, 4), (8, 8)} <= loops
    # The loop over sources loads four packs of each.
    loops = pack_loops(kernels[f"sum_kernel {element}"].innermost_loops())
    assert any(loads >= 4 and loads % 4 == 0 and stores == 0 for loads, stores in loops)


@needs_nvcc
@pytest.mark.parametrize("element", TYPES)
def test_sums_only_add(kernels, element) -> None:
    add = {"d": "DADD", "i": "IADD3|IMAD", "l": "IADD3|IMAD"}.get(element, "FADD")
    for kind in ("sum", "flag", "ll"):
        kernel = kernels[f"{kind}_kernel {element}"]
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
