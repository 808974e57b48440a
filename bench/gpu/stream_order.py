"""Streams made by torch, and by CuPy, order the work of the CUDA runtime that we link statically.

Nothing else is worth running before this holds. Each check has a control: the same work on streams
that are not ordered must give wrong values, else the check could not fail.
"""

import part

ELEMENTS = 16 << 20  # 64 MiB of float32: long enough for work that is not ordered to overlap
SLEEP_CYCLES = 200_000_000  # about 0.1 s
VALUE, POISON = 3.0, -1.0


class Check:
    """Broadcasts from rank 0 around long work on a stream."""

    def __init__(self, ranks: str) -> None:
        import torch
        from devices import Streams, communicator, synchronize

        self.torch, self.synchronize = torch, synchronize
        self.communicator = communicator(ranks)
        self.side, self.other = Streams(ranks), Streams(ranks)
        self.tensor = torch.empty(ELEMENTS, device=ranks.split(",")[0])

    def fill(self, value: float) -> None:
        self.tensor.fill_(value)
        self.synchronize()

    def right(self, copies) -> bool:
        self.synchronize()
        return all((row[0] == VALUE).all().item() for row in copies[1:])

    def warm_up(self, algorithm: str) -> None:
        """First uses allocate and load code, which may wait for the whole device."""
        for streams in (self.side, self.other):
            with streams.current():
                self.torch.cuda._sleep(1)
                self.communicator.broadcast([self.tensor], algorithm=algorithm)
                self.tensor.fill_(POISON)
            self.synchronize()

    def ours_waits(self, algorithm: str, ordered: bool) -> bool:
        """Whether a broadcast sees what torch wrote before it on its stream, after a long wait."""
        self.fill(POISON)
        with self.side.current():
            self.torch.cuda._sleep(SLEEP_CYCLES)
            self.tensor.fill_(VALUE)
        with (self.side if ordered else self.other).current():
            copies = self.communicator.broadcast([self.tensor], algorithm=algorithm)
        return self.right(copies)

    def torch_waits(self, algorithm: str, ordered: bool) -> bool:
        """Whether what torch does after a broadcast comes after it: overwriting, and reading."""
        self.fill(VALUE)
        with self.side.current():
            self.torch.cuda._sleep(SLEEP_CYCLES)
            copies = self.communicator.broadcast([self.tensor], algorithm=algorithm)
        with (self.side if ordered else self.other).current():
            self.tensor.fill_(POISON)
            read = [[row[0].clone()] for row in copies]
        return self.right(copies) and self.right(read)

    def cupy_waits(self, ranks: str) -> str:
        """A CuPy array that is written late on a stream of CuPy, and read on it afterwards."""
        try:
            import cupy
        except ImportError:
            return "not installed"
        from pyparallel import comm

        device = int(ranks.split(",")[0].removeprefix("cuda:"))
        with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
            # memset: no kernel of CuPy's, which it would have to compile first.
            array = cupy.empty(ELEMENTS, dtype=cupy.uint8)
            array.data.memset_async(0, array.nbytes, stream)
            stream.synchronize()
            with self.torch.cuda.stream(self.torch.cuda.ExternalStream(stream.ptr, device)):
                self.torch.cuda._sleep(SLEEP_CYCLES)
            array.data.memset_async(7, array.nbytes, stream)
            copies = comm.broadcast(array, ranks.split(","))
            values = [cupy.asnumpy(copy) for copy in copies]
        part.check(all((v == 7).all() for v in values), "a CuPy stream did not order our work")
        return "ok"


def body(args) -> dict[str, object]:
    part.require_gpu(args.ranks)
    from pyparallel import _C

    check = Check(args.ranks)
    algorithms = ["auto", *_C.algorithms()["broadcast"]]
    for algorithm in algorithms:
        check.warm_up(algorithm)
        part.check(
            check.ours_waits(algorithm, ordered=True),
            f"broadcast {algorithm} did not wait for the stream it was given",
        )
        part.check(
            check.torch_waits(algorithm, ordered=True),
            f"the stream given to broadcast {algorithm} did not wait for it",
        )
    blind = check.ours_waits("auto", ordered=False) or check.torch_waits("auto", ordered=False)
    part.check(not blind, "the control was right without any order: this check sees nothing")
    cupy = check.cupy_waits(args.ranks)
    note = f"torch's streams order our work, both ways, {len(algorithms)} algorithms; CuPy: {cupy}"
    return {"note": note, "algorithms": algorithms, "cupy": cupy}


if __name__ == "__main__":
    part.run(part.parser().parse_args(), body)
