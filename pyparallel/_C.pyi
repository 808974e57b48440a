"""The compiled core, which knows no torch.

Pointers and stream handles are plain ints, sizes and offsets are bytes.
"""

from collections.abc import Sequence

ABI: int

def build_info() -> dict[str, object]:
    """What was built.

    version, cuda (bool), cuda_version (str or None), cuda_targets (list of "sm_90"), compiler,
    built_with_nvcc.
    """

def algorithms() -> dict[str, dict[str, tuple[str, int | None]]]:
    """The algorithms of broadcast, reduce_add and all_reduce by name.

    Of each: which sums keep the rank order ("rank_order": all; "wide_rank_order": not those of
    16-bit types; "other": none), and the largest payload in bytes (None: any).
    """

def cuda_device_count() -> int:
    """Devices that this build can drive; 0 without a driver or without CUDA. Never raises."""

def cuda_driver_version() -> str | None: ...
def move_at_limit(
    streaming: bool, sources: Sequence[int], destinations: Sequence[int], nbytes: int
) -> None:
    """For benchmarks only: the memory traffic of a collective in host memory, as fast as we can.

    Reads every source once and writes their exclusive or once to every destination, on all cores,
    by memcpy or by streaming stores. Pointers are multiples of 64, ``nbytes`` of 256.
    """

class Communicator:
    """See csrc/communicator.h. All methods release the GIL.

    Errors: ValueError for arguments, RuntimeError else.
    """

    def __init__(
        self,
        backend: str,
        devices: Sequence[int],
        *,
        timeout_ms: int = ...,
        nchannels: int = ...,
        slots: int = ...,
        slot_bytes: int = ...,
        stage_slot_bytes: int = ...,
        algorithms: str = "",
    ) -> None: ...
    @property
    def nranks(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def closed(self) -> bool: ...
    def describe_selection(self) -> str:
        """One line about the ranks, then one a collective: what "auto" gives from which size."""

    def broadcast(
        self,
        root: int,
        sources: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        destinations: Sequence[int],
        streams: Sequence[int],
        algorithm: str = "auto",
    ) -> None: ...
    def reduce_add(
        self,
        root: int,
        sources: Sequence[Sequence[int]],
        offsets: Sequence[int],
        sizes: Sequence[int],
        destination: int,
        dtype: str,
        streams: Sequence[int],
        algorithm: str = "auto",
    ) -> None: ...
    def all_reduce(
        self,
        sources: Sequence[int],
        destinations: Sequence[int],
        count: int,
        dtype: str,
        streams: Sequence[int],
        algorithm: str = "auto",
    ) -> None: ...
    def scatter(
        self,
        root: int,
        source: int,
        rows: int,
        pitch: int,
        offsets: Sequence[int],
        sizes: Sequence[int],
        destinations: Sequence[int],
        streams: Sequence[int],
    ) -> None: ...
    def gather(
        self,
        root: int,
        sources: Sequence[int],
        rows: int,
        pitch: int,
        offsets: Sequence[int],
        sizes: Sequence[int],
        destination: int,
        streams: Sequence[int],
    ) -> None: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...

def faulty_communicator(
    nranks: int,
    rank: int,
    fault: str,
    *,
    launches: int = 1,
    late_ms: int = 0,
    timeout_ms: int = ...,
) -> Communicator:
    """For tests only: virtual devices of which one fails in the first flag-ordered launches.

    fault: "absent", "late" (it comes ``late_ms`` after the others have given up) or "wrong" (it
    believes that there are half as many bytes).
    """
