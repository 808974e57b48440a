"""The compiled core, which knows no torch.

Pointers and stream handles are plain ints, sizes and offsets are bytes. An ``array("Q")`` of them
is read several times as fast as a list.
"""

from collections.abc import Sequence
from typing import Any

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
def advise_huge_pages(address: int, nbytes: int) -> None:
    """Asks for pages of 2 MiB for host memory of at least 4 MiB that nobody has touched yet."""

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
        asynchronous: bool = False,
    ) -> int:
        """Sums onto the root. Returns a ticket for ``wait``; 0: nothing to wait for.

        asynchronous, host: the sum is queued and runs on a thread of the process ("pp-comm"), in
        the order of calls, while the caller goes on. All memory must live, and sources and
        destination must stay as they are, until ``wait(ticket)``, ``synchronize`` or ``close``
        returns. Sums below 64 KiB run at once where nothing is queued; their ticket is 0.

        CUDA: an asynchronous call is an ordinary one, its ticket is always 0. ``streams`` wait for
        the sum on the device. For compute streams not to wait, pass other streams, which wait for
        them.
        """

    def wait(self, ticket: int) -> None:
        """Returns when the sum is done; raises RuntimeError, every time, if it failed.

        Also if no queued sum was finished for 2 * timeout_ms; then it is still queued. A failure
        that no wait has raised is raised once by the next call, ``synchronize`` or ``close``.
        """

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

class SegmentTable:
    """Sends tensors of the root into persistent flat buffers of the other ranks.

    Only what differs is sent, in chunks of at most 32 KiB. offsets and sizes describe the segments,
    the same in every flat buffer; flats[r] is the address of rank r's buffer (the root's is
    ignored).

    Host: each chunk of each rank is compared with the root's, byte by byte, so a copy that its rank
    has changed gets its values back. CUDA: the root hashes each chunk and sends those whose hash is
    another one than at the last send; a changed copy is not noticed, see ``refresh``.

    Keeps the communicator alive. The flat buffers must live until the last send is done.
    """

    def __init__(
        self,
        communicator: Communicator,
        root: int,
        offsets: Sequence[int],
        sizes: Sequence[int],
        flats: Sequence[int],
    ) -> None: ...
    def send(self, sources: Sequence[int], streams: Sequence[int], always: bool = False) -> None:
        """Makes every rank's copy equal to the sources, which may lie elsewhere at each call.

        always: sends every chunk, compares none. Host: done on return. CUDA: ordered by streams.
        """

    def would_change(self, sources: Sequence[int], streams: Sequence[int]) -> bool:
        """Whether ``send`` would write to any copy. CUDA: waits until the device has answered."""

    def refresh(self, rank: int) -> None:
        """This rank's copy may be wrong: the next ``send`` sends all of it. Host: not needed."""

    def transferred(self) -> tuple[int, int]:
        """Bytes sent and bytes skipped by all sends so far, over all ranks.

        CUDA: waits for the last send, because the device counts.
        """

class IdentitySnapshot:
    """What modules, lists, dicts and other objects contained when they were last looked at.

    Of a module its type, its attributes, and the entries of its ``_parameters``, ``_buffers`` and
    ``_modules``; of a list or dict its items; of another object its type and attributes. All is
    compared by identity, in order. Keeps everything alive that it compares with.
    """

    def __init__(self, objects: list[Any]) -> None: ...
    def check(self, start: int = 0) -> int:
        """Returns the first position >= start of an object that differs, or -1."""

    def update(self, index: int) -> None:
        """Looks at one object again."""

class AttributeSnapshot:
    """The values of some attributes of objects, given as descriptors of a C type.

    Methods that need no arguments are called. Values are compared by ``==``.
    """

    def __init__(self, objects: list[Any], descriptors: list[Any]) -> None: ...
    def check(self) -> int:
        """Returns the position of the first object with another value, or -1."""

def reference_count(objects: list[Any]) -> int:
    """Returns the sum of the reference counts of the items, the list's own references included."""

class TensorLayouts:
    """Where tensors lie in memory, read through the exchange API of DLPack.

    Raises RuntimeError for tensors that do not lie in memory.
    """

    def __init__(self, tensors: list[Any], api: Any) -> None: ...
    def check(self) -> int:
        """Returns the position of the first tensor that changed, or -1.

        It lies elsewhere, or has another dtype, shape or stride.
        """

    def addresses_of(self, others: list[Any]) -> list[int] | None:
        """Returns the addresses of other tensors, as many or a multiple.

        None if one has another dtype, shape or strides than its counterpart. A dimension of size 1
        may have any stride.
        """

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
