"""Collectives on tensors: what lies between torch and the compiled core.

Streams. On GPUs every call is queued, not waited for. The core's streams wait for the current
stream of every rank's device before they start, and all those streams wait for the core's
afterwards. So memory that torch frees once a call has returned is reused only by work that comes
later on these streams, and no tensor needs ``record_stream``: neither inputs and results nor the
temporary copies made here.

Nothing records autograd.
"""

import atexit
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pyparallel import _C
from pyparallel.checks import (
    check_chunks,
    check_count,
    check_gathered,
    check_not_quantized,
    check_output,
    check_outputs,
    check_rank,
    check_rows,
    check_same_size,
    check_tensor,
    check_terms,
    wrap_dim,
)
from pyparallel.core import Core, close_at_exit, end_daemon_at_exit
from pyparallel.devices import Device
from pyparallel.flat import FlatLayout, broadcast_flat, reduce_add_flat
from pyparallel.layout import (
    common_order,
    contiguous_strides,
    dense,
    memory_order,
    ordered_strides,
    with_strides,
)
from pyparallel.reduction import add_with_torch, core_count, core_dtype
from pyparallel.rows import gather_on_host, gather_rows, scatter_rows
from pyparallel.streams import current_streams
from pyparallel.written import check_overlap, mark_written

# Their bytes are not their values; torch copies them.
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)


class Communicator:
    """Collectives between ranks; rank r is ``devices[r]``. Methods may be called from any thread.

    Every method checks the arguments of all ranks before anything starts. ``root`` is a rank.
    ``algorithm`` is "auto" or a name of docs/algorithms.md. A rank that does not arrive within
    PYPARALLEL_TIMEOUT_MS, or anything else that fails while running, raises RuntimeError, on GPUs
    perhaps from a later call. Except where said, no result shares memory with an input.

    Attributes:
        devices: The device of each rank. All GPUs or all virtual; several ranks may share a GPU.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)
        if not self.devices:
            raise ValueError("a communicator needs at least one device")
        if len({d.kind for d in self.devices}) > 1:
            raise ValueError(
                "a communicator needs GPUs or virtual devices, but got both: "
                + ", ".join(map(str, self.devices))
            )
        self._virtual = self.devices[0].kind == "cpu"
        self._core = Core(self.devices)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._core.closed

    @property
    def core(self) -> _C.Communicator:
        """The compiled communicator; another one after a fork. Raises RuntimeError if closed."""
        return self._core.get()

    def close(self) -> None:
        """Frees memory and threads once running work has left. Later calls raise. Idempotent."""
        self._core.close()

    def broadcast(
        self, tensors: Sequence[Tensor], root: int = 0, algorithm: str = "auto"
    ) -> list[list[Tensor]]:
        """Copies the root's tensors to every rank.

        Args:
            tensors: Any number of tensors of any dtype, shape and layout on the root's device.
            root: The rank that has the tensors.
            algorithm: See the class.

        Returns:
            ``[rank][k]``, a copy of ``tensors[k]`` on each rank, with its strides if it is dense.
            The root's row holds the inputs themselves. Strided copies of one dtype and rank lie in
            one new flat buffer, each aligned to 512 bytes, with version counters of their own.
        """
        core = self._core.get()
        check_rank("broadcast", root, len(self.devices))
        for tensor in tensors:
            check_tensor("broadcast", tensor, root, self.devices[root])
        rows = [list(tensors) for _ in self.devices]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for k, tensor in enumerate(tensors):
            if tensor.layout is torch.strided and tensor.dtype not in _QUANTIZED:
                by_dtype.setdefault(tensor.dtype, []).append(k)
                continue
            for rank, device in enumerate(self.devices):
                if rank != root:
                    with torch.no_grad():
                        rows[rank][k] = tensor.to(device.torch_device, non_blocking=True, copy=True)
        for indices in by_dtype.values():
            sources = [dense(tensors[k]) for k in indices]
            layout = FlatLayout(sources)
            flats = [0] * len(self.devices)
            for rank, device in enumerate(self.devices):
                if rank != root:
                    flats[rank], copies = layout.allocate(device.torch_device)
                    for k, copy in zip(indices, copies, strict=True):
                        rows[rank][k] = copy
            broadcast_flat(core, self.devices, sources, layout, flats, root, algorithm)
        return rows

    def broadcast_into(self, tensor: Tensor, out: Sequence[Tensor], root: int = 0) -> None:
        """Copies the root's tensor into a contiguous tensor of each rank, of same size."""
        core = self._core.get()
        check_rank("broadcast", root, len(self.devices))
        check_tensor("broadcast", tensor, root, self.devices[root])
        check_outputs("broadcast", out, self.devices, tensor.dtype)
        check_same_size(out, tensor)
        check_overlap("broadcast", [tensor], out, {root: (0, tensor)})
        source = with_strides(tensor, contiguous_strides(tensor.size()))
        flats = [output.data_ptr() for output in out]
        broadcast_flat(core, self.devices, [source], FlatLayout([source]), flats, root, "auto")
        with torch.no_grad():
            out[root].copy_(source)
        mark_written(out)

    def reduce_add(
        self, inputs: Sequence[Sequence[Tensor | None]], root: int = 0, algorithm: str = "auto"
    ) -> list[Tensor | None]:
        """Sums the ranks' tensors onto the root.

        The order is that of the ranks, starting from the first one present, in float32 for 16-bit
        types and rounded once. The same inputs give the same bits.

        Args:
            inputs: ``[rank][k]``, each on its rank's device, for each k of one shape and dtype.
                None where a rank has nothing to add.
            root: The rank that gets the sums.
            algorithm: See the class.

        Returns:
            For each k a new tensor on the root's device, None where no rank has one. It has the
            strides of the first input present if that is dense. Nothing else refers to it, so
            autograd may keep it as it is. Sparse inputs give sparse sums.

        Raises:
            ValueError: Shapes or dtypes differ.
        """
        core = self._core.get()
        check_rank("reduce_add", root, len(self.devices))
        check_count("reduce_add", "inputs", len(inputs), len(self.devices))
        check_rows("reduce_add", inputs)
        columns = list(zip(*inputs, strict=True))
        sums: list[Tensor | None] = [None] * len(columns)
        by_dtype: dict[torch.dtype, list[int]] = {}
        by_torch: list[tuple[int, list[Tensor]]] = []
        for k, column in enumerate(columns):
            terms = check_terms("reduce_add", column, self.devices)
            if not terms:
                continue
            if core_dtype(terms[0].dtype) and all(t.layout is torch.strided for t in terms):
                by_dtype.setdefault(terms[0].dtype, []).append(k)
            else:
                by_torch.append((k, terms))
        for k, terms in by_torch:
            sums[k] = add_with_torch(terms, self.devices[root].torch_device)
        for indices in by_dtype.values():
            totals = reduce_add_flat(
                core, self.devices, [columns[k] for k in indices], root, algorithm
            )
            for k, total in zip(indices, totals, strict=True):
                sums[k] = total
        return sums

    def all_reduce(
        self,
        tensors: Sequence[Tensor],
        out: Sequence[Tensor] | None = None,
        algorithm: str = "auto",
    ) -> list[Tensor]:
        """Sums one tensor of each rank onto every rank, added as ``reduce_add`` does.

        Args:
            tensors: One tensor a rank, all of one shape and dtype.
            out: One contiguous tensor a rank to write to; may be ``tensors``. Default: new tensors.
            algorithm: See the class.
        """
        core = self._core.get()
        check_count("all_reduce", "tensors", len(tensors), len(self.devices))
        for rank, (tensor, device) in enumerate(zip(tensors, self.devices, strict=True)):
            check_tensor("all_reduce", tensor, rank, device)
        check_terms("all_reduce", tensors, self.devices)
        first = tensors[0]
        if out is not None:
            check_outputs("all_reduce", out, self.devices, first.dtype)
            check_same_size(out, first)
            check_overlap("all_reduce", tensors, out, dict(enumerate(enumerate(tensors))))
        name = core_dtype(first.dtype)
        if name is None or any(t.layout is not torch.strided for t in tensors):
            total = add_with_torch(tensors, self.devices[0].torch_device)
            if out is None:
                return [row[0] for row in self.broadcast([total])]
            self.broadcast_into(total, out)
            return list(out)
        stride = contiguous_strides(first.size()) if out is not None else dense(first).stride()
        sources = [with_strides(t, stride) for t in tensors]
        results = (
            list(out)
            if out is not None
            else [_empty(first.size(), stride, first.dtype, d) for d in self.devices]
        )
        if first.numel():
            core.all_reduce(
                [s.data_ptr() for s in sources],
                [r.data_ptr() for r in results],
                core_count(first),
                name,
                current_streams(self.devices),
                algorithm,
            )
        if out is not None:
            mark_written(out)
        return results

    def scatter(
        self, tensor: Tensor, chunk_sizes: Sequence[int], dim: int = 0, root: int | None = 0
    ) -> list[Tensor]:
        """Cuts the root's tensor along ``dim`` and sends one piece to each rank.

        Args:
            tensor: A tensor of any dtype on the root's device.
            chunk_sizes: Sizes along ``dim``, for the first ranks or for all. They add up to its
                size.
            dim: Any dimension; negative ones count from the last.
            root: The rank that has the tensor. None: it is in host memory. From there GPUs fetch by
                themselves, in the background if it is pinned.

        Returns:
            One piece a chunk size, with the tensor's memory format. The root's piece is a view of
            the input.
        """
        core = self._core.get()
        if root is None and self._virtual:
            root = 0
        check_rank("scatter", root or 0, len(self.devices))
        check_tensor(
            "scatter", tensor, root or 0, Device("cpu", 0) if root is None else self.devices[root]
        )
        check_not_quantized("scatter", tensor, root or 0)
        sizes = list(chunk_sizes)
        if len(sizes) > len(self.devices):
            raise ValueError(f"scatter: got {len(sizes)} chunks for {len(self.devices)} ranks")
        with torch.no_grad():
            pieces = list(tensor.split_with_sizes(sizes, dim))
            if root is None:
                return [
                    piece.to(device.torch_device, non_blocking=True)
                    for piece, device in zip(pieces, self.devices, strict=False)
                ]
        source = dense(tensor)
        order = memory_order(source)
        for rank, piece in enumerate(pieces):
            if rank != root:
                stride = ordered_strides(piece.size(), order)
                pieces[rank] = _empty(piece.size(), stride, tensor.dtype, self.devices[rank])
        dim = wrap_dim(dim, tensor.dim())
        scatter_rows(core, self.devices, source, order, pieces, dim, root)
        return pieces

    def scatter_into(
        self, tensor: Tensor, out: Sequence[Tensor], dim: int = 0, root: int = 0
    ) -> None:
        """Cuts the root's tensor along ``dim`` into a contiguous tensor of each rank."""
        core = self._core.get()
        check_rank("scatter", root, len(self.devices))
        check_tensor("scatter", tensor, root, self.devices[root])
        dim = check_chunks(out, tensor, dim)
        check_outputs("scatter", out, self.devices, tensor.dtype)
        start = sum(output.size(dim) for output in out[:root])
        own = tensor.detach().narrow(dim, start, out[root].size(dim))
        check_overlap("scatter", [tensor], out, {root: (0, own)})
        source = with_strides(tensor, contiguous_strides(tensor.size()))
        scatter_rows(core, self.devices, source, range(tensor.dim()), out, dim, root)
        with torch.no_grad():
            out[root].copy_(source.narrow(dim, start, out[root].size(dim)))
        mark_written(out)

    def gather(self, tensors: Sequence[Tensor], dim: int = 0, root: int | None = 0) -> Tensor:
        """Joins one tensor of each rank along ``dim`` on the root.

        Args:
            tensors: Tensors of the first ranks or of all, of the same sizes except along ``dim``.
                Other dtypes than the first one's are converted to it.
            dim: Any dimension; negative ones count from the last.
            root: The rank that gets the result. None: it is made in host memory, and this call
                waits for it.

        Returns:
            A new tensor, in channels_last format if all inputs are, else contiguous.
        """
        core = self._core.get()
        dim, size = check_gathered(tensors, dim, root, self.devices)
        order = common_order(tensors)
        stride = ordered_strides(size, order)
        if root is None and not self._virtual:
            result = torch.empty_strided(size, stride, dtype=tensors[0].dtype, device="cpu")
            gather_on_host(tensors, result, dim)
            return result
        root = root or 0
        result = _empty(size, stride, tensors[0].dtype, self.devices[root])
        gather_rows(core, self.devices, tensors, result, order, dim, root)
        return result

    def gather_into(
        self, tensors: Sequence[Tensor], out: Tensor, dim: int = 0, root: int | None = 0
    ) -> None:
        """Joins tensors as ``gather`` does, in a contiguous tensor of the root."""
        core = self._core.get()
        dim, size = check_gathered(tensors, dim, root, self.devices)
        on_host = root is None and not self._virtual
        root = root or 0
        check_tensor("gather", out, root, Device("cpu", 0) if on_host else self.devices[root])
        if list(out.size()) != size:
            raise RuntimeError(
                f"Expected out tensor to have shape {size}, but got {list(out.size())}"
            )
        check_output("gather", out, 0, tensors[0].dtype)
        check_overlap("gather", tensors, [out], {})
        if on_host:
            gather_on_host(tensors, out, dim)
        else:
            gather_rows(core, self.devices, tensors, out, range(out.dim()), dim, root)
        mark_written([out])


def _empty(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Device
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device.torch_device)


_cache: dict[tuple[Device, ...], Communicator] = {}
_lock = threading.Lock()


def get_communicator(devices: Sequence[Device]) -> Communicator:
    """Returns the communicator of these devices in this order, the same one until it is closed."""
    key = tuple(devices)
    found = _cache.get(key)
    if found is not None and not found.closed:
        return found
    end_daemon_at_exit()
    with _lock:
        found = _cache.get(key)
        if found is None or found.closed:
            found = _cache[key] = Communicator(key)
        return found


@atexit.register
def _close_all() -> None:
    close_at_exit([communicator._core for communicator in list(_cache.values())])


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that does not exist here may have held the old one


os.register_at_fork(after_in_child=_after_fork)
