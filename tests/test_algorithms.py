"""Every algorithm by name: values and bits; PYPARALLEL_ALGO chooses, PYPARALLEL_DEBUG tells.

The reference of a sum is taken in rank order, in float32 for 16-bit types, rounded once.
"""

import functools
import operator
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyparallel import _C
from pyparallel.communicator import Communicator
from pyparallel.devices import resolve_devices

ALGORITHMS = _C.algorithms()
SUMS = [
    (collective, name, rounding)
    for collective in ("reduce_add", "all_reduce")
    for name, (rounding, _) in ALGORITHMS[collective].items()
]


def _carries(collective, algorithm, nbytes):
    limit = ALGORITHMS[collective].get(algorithm, ("", None))[1]
    return limit is None or nbytes <= limit


DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.float16, torch.bfloat16]
# Whole numbers below 100: their sums of 5 are exact in any order and in every dtype but bfloat16.
SMALL = 25


def _inputs(ranks, devices, dtype, put, shape=(1001,), exact=False):
    generator = torch.Generator().manual_seed(ranks)
    values = [
        torch.randint(SMALL, shape, generator=generator).to(dtype)
        if exact or not dtype.is_floating_point
        # Sixteen powers of two, so that every order of additions rounds differently.
        else (
            torch.randn(shape, generator=generator)
            * 2.0 ** torch.randint(-8, 8, shape, generator=generator)
        ).to(dtype)
        for _ in range(ranks)
    ]
    return values, [put(v, d) for v, d in zip(values, devices, strict=True)]


def _rank_order(values):
    dtype = values[0].dtype
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    return functools.reduce(operator.add, [v.to(wide) for v in values]).to(dtype)


def _each_hop(values):
    return functools.reduce(operator.add, values)


def _sum(comm, collective, inputs, root, algorithm):
    if collective == "reduce_add":
        return comm.reduce_add([[t] for t in inputs], root, algorithm)
    return comm.all_reduce(inputs, algorithm=algorithm)


@pytest.mark.report("pytorch#27116")
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS["broadcast"]])
@pytest.mark.parametrize("count", [0, 1, 17, 1001, 300_001])
def test_broadcast(comm, devices, ranks, root, put, poison, algorithm, count):
    values = torch.arange(count, dtype=torch.int32) * 7919
    if ranks > 1 and not _carries("broadcast", algorithm, values.nbytes):
        with pytest.raises(ValueError, match=f"broadcast: {algorithm} carries at most"):
            comm.broadcast([put(values, devices[root])], root, algorithm)
        return
    rows = comm.broadcast([put(values, devices[root])], root, algorithm)
    assert len(rows) == ranks
    for row in rows:
        assert torch.equal(row[0].cpu(), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("collective, algorithm, rounding", SUMS)
def test_sums_are_right(
    comm, devices, ranks, root, put, poison, collective, algorithm, rounding, dtype
):
    values, inputs = _inputs(ranks, devices, dtype, put, exact=True)
    for result in _sum(comm, collective, inputs, root, algorithm):
        assert torch.equal(result.cpu(), _rank_order(values))


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point], ids=str)
@pytest.mark.parametrize("count", [1, 1001, 70_001])
@pytest.mark.parametrize("collective, algorithm, rounding", SUMS)
def test_bits_of_sums(
    comm, devices, ranks, root, put, poison, collective, algorithm, rounding, dtype, count
):
    values, inputs = _inputs(ranks, devices, dtype, put, (count,))
    narrow = dtype.itemsize == 2
    if not _carries(collective, algorithm, count * dtype.itemsize):
        with pytest.raises(ValueError, match=f"{collective}: {algorithm} carries at most"):
            _sum(comm, collective, inputs, root, algorithm)
        return
    results = [r.cpu() for r in _sum(comm, collective, inputs, root, algorithm)]
    if rounding == "rank_order" or (rounding == "wide_rank_order" and not narrow):
        expected = _rank_order(values)
    elif rounding == "wide_rank_order":
        expected = _each_hop(values)
    else:  # deterministic, and close
        exact = functools.reduce(operator.add, [v.double() for v in values])
        scale = functools.reduce(operator.add, [v.double().abs() for v in values])
        bound = ranks * torch.finfo(dtype).eps * scale
        again = _sum(comm, collective, inputs, root, algorithm)
        for result, repeated in zip(results, again, strict=True):
            assert torch.all((result.double() - exact).abs() <= bound)
            assert torch.equal(result, repeated.cpu())
        return
    for result in results:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("collective", ["reduce_add", "all_reduce"])
def test_auto_keeps_the_rank_order(comm, devices, ranks, put, collective, dtype):
    values, inputs = _inputs(ranks, devices, dtype, put, (70_001,))
    for result in _sum(comm, collective, inputs, 0, "auto"):
        assert torch.equal(result.cpu(), _rank_order(values))


@pytest.mark.parametrize("collective", list(ALGORITHMS))
def test_an_unknown_name_lists_the_known_ones(comm, devices, put, collective):
    tensor = [put(torch.ones(3), d) for d in devices]
    calls = {
        "broadcast": lambda: comm.broadcast(tensor[:1], 0, "fast"),
        "reduce_add": lambda: comm.reduce_add([[t] for t in tensor], 0, "fast"),
        "all_reduce": lambda: comm.all_reduce(tensor, algorithm="fast"),
    }
    if len(devices) == 1 and collective == "broadcast":
        return  # nothing moves
    names = ", ".join(["auto", *ALGORITHMS[collective]][:-1])
    with pytest.raises(ValueError) as error:
        calls[collective]()
    last = list(ALGORITHMS[collective])[-1]
    assert str(error.value) == (f"{collective}: unknown algorithm 'fast'; choose {names} or {last}")


def test_every_algorithm_is_documented():
    text = (Path(__file__).parent.parent / "docs" / "algorithms.md").read_text()
    for collective, names in ALGORITHMS.items():
        section = text.split(f"\n## {collective}\n")[1].split("\n## ")[0]
        documented = re.findall(r"^### (\w+) \((?:event|flag)-ordered\)$", section, re.MULTILINE)
        assert sorted(documented) == sorted(names)


def test_algo_overrides_the_default(monkeypatch, make_devices, put):
    devices = make_devices(3)
    monkeypatch.setenv("PYPARALLEL_ALGO", "all_reduce:copy_chain,broadcast:two_hop")
    comm = Communicator(resolve_devices(devices))
    values, inputs = _inputs(3, devices, torch.float16, put, (5003,))
    assert not torch.equal(_rank_order(values), _each_hop(values))
    for result in comm.all_reduce(inputs):
        assert torch.equal(result.cpu(), _each_hop(values))
    for result in comm.all_reduce(inputs, algorithm="two_shot"):
        assert torch.equal(result.cpu(), _rank_order(values))
    comm.close()


@pytest.mark.parametrize(
    "text, message",
    [
        ("chain", "PYPARALLEL_ALGO: 'chain' is not of the form collective:algorithm"),
        ("gather:direct", "PYPARALLEL_ALGO: there is no collective 'gather'"),
        (
            "broadcast:ring",
            "PYPARALLEL_ALGO: broadcast: unknown algorithm 'ring'; choose auto, push",
        ),
    ],
)
def test_algo_refuses(monkeypatch, make_devices, text, message):
    monkeypatch.setenv("PYPARALLEL_ALGO", text)
    with pytest.raises(ValueError) as error:
        Communicator(resolve_devices(make_devices(2)))
    assert str(error.value).startswith(message)


def test_debug_tells_the_selection_once(monkeypatch, capfd, make_devices, put):
    devices = make_devices(2)
    monkeypatch.setenv("PYPARALLEL_DEBUG", "INFO")
    comm = Communicator(resolve_devices(devices))
    comm.all_reduce([put(torch.ones(3), d) for d in devices])
    comm.close()
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 4 and lines[0].startswith("pyparallel: 2 ranks on ")
    for line, collective in zip(lines[1:], ALGORITHMS, strict=True):
        assert line.startswith(f"pyparallel: {collective}: ")


def test_nothing_is_told_by_default():
    code = "import torch, pyparallel; pyparallel.comm.broadcast(torch.ones(3), ['cpu:0', 'cpu:1'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
