"""The reference: a module that is called with each chunk in turn, and the outputs joined.

Written as plainly as possible, and knows only the kinds of containers that the tests draw.
"""

import contextlib

import torch


class OnChunks:
    """Calls ``module`` on its own, once for each device that gets rows.

    Parameters are the module's, so their gradients add up. As with replicas, what a call writes to
    buffers in place stays if it is the first one; whatever else it sets is forgotten.
    """

    def __init__(self, module, n, output_device=None, dim=0, split="chunk"):
        self.module = module
        self.n, self.dim, self.split = n, dim, split

    def __call__(self, *args, **kwargs):
        calls = (
            chunks((args, kwargs), self.n, self.dim, self.split) if args or kwargs else [((), {})]
        )
        if self.n == 1:
            chunk, keywords = calls[0]
            return self.module(*chunk, **keywords)
        # Before the first call, which writes to the module's own.
        buffers = [{b: b.clone() for b in self.module.buffers()} for _ in calls[1:]]
        outputs = []
        for (chunk, keywords), copies in zip(calls, [{}, *buffers], strict=True):
            with _as_replica(self.module, copies):
                outputs.append(self.module(*chunk, **keywords))
        return join(outputs, self.dim)


@contextlib.contextmanager
def _as_replica(module, copies):
    """Puts ``copies`` in the place of buffers; undoes what else is set meanwhile."""
    parts = list(module.modules())
    before = [dict(part.__dict__) for part in parts]
    for part in parts:
        part._buffers = {name: copies.get(b, b) for name, b in part._buffers.items()}
    try:
        yield
    finally:
        for part, attributes in zip(parts, before, strict=True):
            part.__dict__.clear()
            part.__dict__.update(attributes)


def sizes(size, n, split):
    if size == 0:
        return [0] * n
    if split == "balanced":
        return [len(range(rank, size, n)) for rank in range(n) if rank < size]
    return [len(piece) for piece in torch.empty(size).chunk(n)]


def used(obj, n, dim, split):
    """How many devices get a chunk."""
    if isinstance(obj, torch.Tensor):
        return len(sizes(obj.size(dim), n, split)) if obj.dim() else n
    if isinstance(obj, (tuple, list, dict)):
        entries = obj.values() if isinstance(obj, dict) else obj
        return min((used(entry, n, dim, split) for entry in entries), default=n)
    return n


def chunks(obj, n, dim, split):
    """Returns what each device that gets a chunk is called with."""
    count = used(obj, n, dim, split)

    def place(obj):
        if isinstance(obj, torch.Tensor):
            if obj.dim() == 0:
                return [obj.clone() for _ in range(count)]
            pieces = obj.split(sizes(obj.size(dim), n, split), dim)
            if torch.is_grad_enabled() or n == 1:
                return pieces
            return [piece.detach() for piece in pieces]
        if isinstance(obj, (tuple, list, dict)) and obj:
            entries = obj.values() if isinstance(obj, dict) else obj
            return [like(obj, row) for row in zip(*map(place, entries), strict=True)]
        return [obj] * count

    return place(obj)


def join(outputs, dim):
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if first.dim() == 0:
            return torch.stack(outputs)
        return torch.cat(outputs, dim)
    if isinstance(first, dict):
        return like(first, [join([output[key] for output in outputs], dim) for key in first])
    if isinstance(first, (tuple, list)):
        return like(first, [join(column, dim) for column in zip(*outputs, strict=True)])
    return first if first is None else outputs


def like(obj, entries):
    """A container of the kind of ``obj`` with other entries."""
    if isinstance(obj, dict):
        return type(obj)(zip(obj, entries, strict=True))
    return type(obj)(*entries) if hasattr(obj, "_fields") else type(obj)(entries)
