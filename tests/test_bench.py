"""bench/collectives.py: table, JSON, planted faults, refused flags."""

import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pyparallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import collectives
import options
import timing
from operations import OPERATIONS
from ranks import Ranks

KEYS = [
    "op",
    "algorithm",
    "nranks",
    "bytes",
    "dtype",
    "time_us",
    "algbw_gbps",
    "busbw_gbps",
    "wrong",
]


def run(*flags, tmp_path):
    """Runs the bench on virtual devices; returns its exit code and the rows of its JSON file."""
    out = tmp_path / "out.json"
    code = collectives.main(
        [*map(str, flags), "--device", "cpu", "-n", "2", "-w", "1", "--json", str(out)]
    )
    return code, json.loads(out.read_text())


def test_all_operations_print_a_table_and_write_rows(tmp_path, capsys):
    code, rows = run("all", "-g", 4, "-b", 4, "-e", "4K", "-f", 8, tmp_path=tmp_path)
    assert code == 0
    assert {row["op"] for row in rows} == set(OPERATIONS)
    for row in rows:
        assert list(row)[: len(KEYS)] == KEYS
        assert row["wrong"] == 0 and row["nranks"] == 4 and row["dtype"] == "float32"
        assert row["algbw_gbps"] == pytest.approx(
            row["bytes"] / row["time_us"] / 1e3, rel=1e-2, abs=1e-6
        )
    assert {row["bytes"] for row in rows} == {4, 32, 256, 2048}
    text = capsys.readouterr().out
    assert "# Out of bounds values : 0 OK" in text
    assert text.count("#wrong") == 2 * len(OPERATIONS)


def test_busbw_factors_are_those_of_nccl_tests():
    factors = {name: operation.busbw_factor(4) for name, operation in OPERATIONS.items()}
    assert factors == {
        "broadcast": 1,
        "reduce_add": 1,
        "scatter": 0.75,
        "gather": 0.75,
        "all_reduce": 1.5,
    }


@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
def test_every_algorithm_type_and_root(nranks, tmp_path):
    everything = ("-g", nranks, "--algorithm", "all", "-d", "all", "-r", "all", "-u", 1)
    code, rows = run("all", *everything, "-b", 24, "-e", 24, tmp_path=tmp_path)
    assert code == 0
    seen = {(row["op"], row["algorithm"]) for row in rows}
    assert seen == {
        (op.name, algorithm) for op in OPERATIONS.values() for algorithm in op.algorithms
    }
    assert {row["root"] for row in rows} == {None, *range(nranks)}
    assert {row["dtype"] for row in rows} == set(options.ALIASES)


def test_unchecked_rows_say_so(tmp_path, capsys):
    code, rows = run("broadcast", "-g", 2, "-b", 8, "-e", 8, "-c", 0, tmp_path=tmp_path)
    assert code == 0
    assert [row["wrong"] for row in rows] == [None]


def test_zero_bytes(tmp_path):
    code, rows = run("all", "-g", 3, "-b", 0, "-e", 0, tmp_path=tmp_path)
    assert code == 0
    assert all(row["bytes"] == 0 and row["wrong"] == 0 for row in rows)


class FaultyCore:
    """A core that passes every call on and then spoils memory, or that does nothing at all."""

    def __init__(self, core, fault):
        self._core = core
        self._fault = fault

    def __getattr__(self, name):
        call = getattr(self._core, name)
        if name not in OPERATIONS:
            return call

        def faulty(*args):
            if self._fault == "nothing":
                return
            call(*args)
            end, nbytes = self._last_output(name, args)
            ctypes.memset(end - nbytes if self._fault == "first byte" else end, 0x55, 1)

        return faulty

    @staticmethod
    def _last_output(name, args):
        """Returns where the output of the last rank ends, and its size."""
        if name == "broadcast":
            return args[4][-1] + args[3][0], args[3][0]
        if name == "reduce_add":
            return args[4] + args[3][0], args[3][0]
        if name == "all_reduce":
            return args[1][-1] + 4 * args[2], 4 * args[2]
        if name == "scatter":
            return args[6][-1] + args[5][-1], args[5][-1]
        return args[6] + args[3], args[3]


@pytest.mark.parametrize("fault", ["nothing", "first byte", "byte after the end"])
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_a_planted_fault_is_counted_and_fails(operation, fault, tmp_path, capsys, monkeypatch):
    def faulty_ranks(*args):
        ranks = Ranks(*args)
        ranks.core = FaultyCore(ranks.core, fault)
        return ranks

    monkeypatch.setattr(collectives, "Ranks", faulty_ranks)
    code, rows = run(operation, "-g", 3, "-b", 96, "-e", 96, tmp_path=tmp_path)
    assert code == 1
    for row in rows:
        outputs = {"broadcast": 2 * 24, "scatter": 16, "all_reduce": 3 * 24}.get(operation, 24)
        assert row["wrong"] == (outputs if fault == "nothing" else 1)
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-g", "0"], "-g 0: at least one rank"),
        (["-g", "4", "-r", "4"], "-r 4: must be all, or a rank from 0 to 3"),
        (["-d", "complex64"], "-d complex64: unknown type"),
        (["-b", "2K", "-e", "1K"], "-b 2048 is more than -e 1024"),
        (["-b", "1Q"], "'1Q' is no size"),
        (["-f", "1"], "-f must be at least 2"),
        (["-f", "2", "-i", "8"], "not allowed with argument"),
        (["-n", "0"], "-n 0: must be at least 1"),
        (["-T", "0"], "-T must be more than 0"),
        (["-G", "1"], "virtual devices have no CUDA graphs"),
        (["--algorithm", "ring"], "--algorithm ring: broadcast has none of this name"),
        (["--json", "/no/such/folder/out.json"], "cannot write into /no/such/folder"),
        (["--json", "/"], "--json /: this is a folder; name a file in it"),
    ],
)
def test_bad_flags_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as caught:
        collectives.main(["broadcast", "--device", "cpu", *flags])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_refused_before_the_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "out.json").write_text("")
    (tmp_path / "out.meta.json").mkdir()
    with pytest.raises(SystemExit):
        run("broadcast", tmp_path=tmp_path)
    assert "out.meta.json: this is a folder" in capsys.readouterr().err
    monkeypatch.setattr(options.os, "access", lambda path, mode: path != tmp_path / "out.json")
    with pytest.raises(SystemExit):
        run("broadcast", tmp_path=tmp_path)
    assert "out.json: cannot write into" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [("-b", "1000000G", "-e", "1000000G"), ("-b", "8", "-e", "2000000G", "-f", "1000000000000")],
)
def test_too_little_memory_is_said(flags, capsys):
    assert collectives.main(["broadcast", "--device", "cpu", "-g", "2", *flags]) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and len(error.splitlines()) == 1
    assert "broadcast, " in error and "2 ranks: " in error and "memory" in error


def test_results_tell_where_they_come_from(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYPARALLEL_DEBUG", "INFO")
    flags = ("broadcast", "-g", 2, "-b", 8, "-e", 8)
    code, rows = run(*flags, tmp_path=tmp_path)
    assert code == 0 and len(rows) == 1
    origin = json.loads((tmp_path / "out.meta.json").read_text())
    words = origin["command"].split()
    assert "PYPARALLEL_DEBUG=INFO" in words
    start = words.index("python")
    assert words[start : start + 4] == ["python", "bench/collectives.py", "broadcast", "-g"]
    assert origin["torch"] == torch.__version__ and origin["cores"] >= 1
    assert {"commit", "changed_files", "pyparallel", "python", "platform", "cpu"} <= set(origin)
    text = capsys.readouterr().out
    assert f"# command {origin['command']}" in text and f"# cpu {origin['cpu']}" in text


def test_a_reader_that_leaves_is_no_error():
    program = f"{sys.executable} {collectives.__file__} all --device cpu -b 8 -e 8 | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(Path(pyparallel.__file__).parents[1])}
    result = subprocess.run(program, shell=True, capture_output=True, text=True, env=environment)
    assert result.stdout.startswith("# command") and result.stderr == ""


def test_too_many_ranks_is_the_cores_own_sentence(capsys):
    assert collectives.main(["broadcast", "--device", "cpu", "-g", "17", "-e", "8"]) == 2
    assert "17" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("built", "torch_cuda", "message"),
    [
        (False, "13.0", "pyparallel was built without CUDA"),
        (True, None, "was built without CUDA; install a CUDA build of torch"),
        (True, "13.0", "torch sees no GPU"),
    ],
)
def test_cuda_without_a_gpu_says_what_is_missing(built, torch_cuda, message, capsys, monkeypatch):
    monkeypatch.setattr(options._C, "build_info", lambda: {"cuda": built})
    monkeypatch.setattr(options.torch.version, "cuda", torch_cuda)
    monkeypatch.setattr(options.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        collectives.main(["all", "--device", "cuda"])
    assert message in capsys.readouterr().err


def test_sizes():
    assert [options.parse_size(s) for s in ("4", "64K", "1.5m", "2G")] == [
        4,
        65536,
        3 << 19,
        2 << 30,
    ]
    assert list(options.size_steps(4, 64, 4, None)) == [4, 16, 64]
    assert list(options.size_steps(0, 4, None, None)) == [0, 2, 4]
    assert list(options.size_steps(8, 24, None, 8)) == [8, 16, 24]


def test_timing_is_bounded_by_the_clock_and_by_the_count(monkeypatch):
    monkeypatch.setattr(timing, "BUDGET_S", 0.05)
    calls = []

    def slow():
        calls.append(1)
        time.sleep(0.04)

    ranks = Ranks("cpu", 2, timeout_s=30)
    result = timing.measure(slow, ranks, iterations=100, warmup=5)
    assert len(calls) <= 2 + timing.FEWEST
    assert 40_000 <= result.median_us <= result.p99_us
    calls.clear()
    timing.measure(lambda: calls.append(1), ranks, iterations=7, warmup=2)
    assert len(calls) == 9
