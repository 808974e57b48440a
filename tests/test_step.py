"""bench/step.py: the table, and a trace in which sums start before backward ends."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import step
from sums import spans_of


@pytest.fixture
def run(tmp_path, capfd):
    """Runs the bench with tiny sizes; returns its JSON, its trace and what it printed."""
    if not step.sees_all_threads():
        pytest.skip("the profiler of this torch cannot see all threads")

    def run(*arguments):
        table, trace = tmp_path / "step.json", tmp_path / "trace.json"
        arguments = [*arguments, "--dry-run", "--json", str(table), "--trace", str(trace)]
        assert step.main(arguments) == 0
        events = json.loads(trace.read_text())["traceEvents"]
        return json.loads(table.read_text()), events, capfd.readouterr().out

    return run


@pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU clock of a thread")
@pytest.mark.parametrize("mode", step.MODES)
def test_sums_start_before_backward_ends(mode, run):
    table, events, printed = run(mode)
    (row,) = table["rows"]
    assert row["mode"] == mode and f"\n{mode} " in printed
    for part in step.PARTS:
        low, median, high = row[f"{part}_s"]
        assert 0 <= low <= median <= high
    assert row["forward_s"][0] + row["backward_s"][0] <= row["step_s"][2]

    def starts(name):
        found = sorted(event["ts"] for event in events if event["name"] == name)
        assert found, name
        return found

    (backward,) = starts("backward")
    launches, gates = starts("BucketBackward"), starts("GateBackward")
    replicas, sums = starts("AddmmBackward0"), starts("sum of gradients")
    assert len(replicas) == step.NRANKS * step.TINY.layers
    # The first bucket is launched before the last layers' turn comes, and then the thread sums it
    # as soon as it gets a CPU. Nobody waits for a sum before all layers are done.
    assert launches[0] < replicas[-1] < gates[0]
    end = max(event["ts"] + event["dur"] for event in events if event["name"] == "backward")
    assert backward < sums[0] < end


def test_all_modes_are_in_one_trace(run):
    table, events, _ = run()
    assert [row["mode"] for row in table["rows"]] == list(step.MODES)
    assert {event["pid"] for event in events} == set(step.MODES)


def test_spans():
    looks = [(0.0, 0.0), (1.0, 0.0), (2.0, 0.9), (3.0, 1.3), (4.0, 1.300001), (5.0, 2.4)]
    assert spans_of(looks) == [(1.0, 3.0), (4.0, 5.0)]


def test_a_trace_without_what_workers_do_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(step, "sees_all_threads", lambda: False)
    with pytest.raises(SystemExit) as caught:
        step.main(["--trace", "trace.json"])
    assert caught.value.code == 2
    assert f"torch {torch.__version__} cannot see all threads" in capsys.readouterr().err


def test_bad_arguments_are_refused(capsys):
    for argv, message in (
        (["both"], "no such mode: both; there are threads, sequential"),
        (["--trace", "/no/such/folder/x.json"], "cannot write into /no/such/folder"),
    ):
        with pytest.raises(SystemExit) as caught:
            step.main(argv)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
