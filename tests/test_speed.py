"""bench/speed.py: every line works, verdicts and exit codes, and a limit that moves everything."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import coalesced
import limits
import ranks
import speed
from bars import Line, Sample, in_turns, quartiles, ratios

from pyparallel import _C

KEYS = ["name", "unit", "quartiles", "bar", "higher_is_better", "wrong", "note", "verdict"]


def line(quartiles, bar, higher, wrong=0):
    return Line("a line", "x", quartiles, bar, higher, wrong)


def test_a_dry_run_prints_and_writes_every_line_without_bars(tmp_path, capsys):
    out = tmp_path / "speed.json"
    assert speed.main(["--dry-run", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert list(result) == ["origin", "load", "dry_run", "lines"] and result["dry_run"]
    assert result["origin"]["command"].endswith(f"bench/speed.py --dry-run --json {out}")
    lines = result["lines"]
    assert len(lines) == len(limits.CASES) + 2 + 2 + 6
    assert len({entry["name"] for entry in lines}) == len(lines)
    printed = capsys.readouterr().out
    for entry in lines:
        assert list(entry) == KEYS
        low, median, high = entry["quartiles"]
        assert 0 <= low <= median <= high
        assert entry["bar"] is None and entry["verdict"] == "" and entry["wrong"] == 0
        assert entry["name"] in printed


@pytest.mark.parametrize(
    ("quartiles", "bar", "higher", "verdict"),
    [
        ((0.8, 0.9, 1.0), 0.9, True, "ok"),
        ((0.8, 0.89, 0.9), 0.9, True, "unsure"),
        ((0.8, 0.85, 0.89), 0.9, True, "missed"),
        ((20, 25, 30), 25, False, "ok"),
        ((25, 26, 30), 25, False, "unsure"),
        ((25.1, 26, 30), 25, False, "missed"),
        ((0, 0, 0), None, True, ""),
    ],
)
def test_verdicts(quartiles, bar, higher, verdict):
    assert line(quartiles, bar, higher).verdict == verdict


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([line((1, 1, 1), 0.9, True), line((0, 0, 1), 0.9, True)], 0),
        ([line((0, 0, 0), 0.9, True)], 3),
        ([line((0, 0, 0), 0.9, True), line((1, 1, 1), 0.9, True, wrong=1)], 1),
    ],
    ids=["unsure", "missed", "wrong"],
)
def test_exit_codes(lines, code, monkeypatch):
    monkeypatch.setattr(speed, "SECTIONS", {"limit": lambda sizes: lines})
    assert speed.main(["limit"]) == code


def test_bad_arguments_are_refused(capsys):
    for argv, message in (
        (["bandwidth"], "no such section: bandwidth; there are limit, coalesced, latency, gloo"),
        (["--json", "/no/such/folder/x.json"], "cannot write into /no/such/folder"),
    ):
        with pytest.raises(SystemExit) as caught:
            speed.main(argv)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_rounds_start_with_another_run_each_time():
    order = []

    def run(name, seconds):
        order.append(name)
        return Sample(seconds, seconds)

    samples = in_turns({"a": lambda: run("a", 3.0), "b": lambda: run("b", 2.0)}, rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert ratios(samples["a"], samples["b"]) == [1.5, 1.5, 1.5]
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == (2, 3, 4)


class IdleCore:
    """A core that does nothing."""

    def __getattr__(self, name):
        return lambda *args: None


@pytest.mark.parametrize("fault", ["limit", "core"])
def test_what_moves_nothing_is_wrong(fault, monkeypatch):
    if fault == "limit":
        monkeypatch.setattr(limits._C, "move_at_limit", lambda *args: None)
    else:
        core = property(lambda _: IdleCore(), lambda *_: None)
        monkeypatch.setattr(ranks.Ranks, "core", core, raising=False)
    assert all(entry.wrong > 0 for entry in limits.limit_lines(4096, rounds=2))
    if fault == "core":
        assert coalesced._persistent([torch.rand(coalesced.NUMEL)] * 2, rounds=2).wrong > 0
        assert all(entry.wrong > 0 for entry in speed.gloo_lines([speed.Size(4, 20, 2, 1)]))


def lines_of_memory(count, nbytes):
    rows = torch.randint(0, 256, (count, nbytes + 64), dtype=torch.uint8)
    return [row[-row.data_ptr() % 64 :][:nbytes] for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("nsources", "ndestinations"), [(1, 1), (1, 3), (4, 1), (4, 4), (16, 16)])
@pytest.mark.parametrize("nbytes", [0, 256, 4096 + 256, (256 << 10) + 512])
def test_the_limit_reads_and_writes_everything(streaming, nsources, ndestinations, nbytes):
    sources = lines_of_memory(nsources, nbytes)
    destinations = lines_of_memory(ndestinations, nbytes)
    expected = torch.zeros(nbytes, dtype=torch.uint8)
    for source in sources:
        expected ^= source
    _C.move_at_limit(
        streaming, [s.data_ptr() for s in sources], [d.data_ptr() for d in destinations], nbytes
    )
    assert all(torch.equal(destination, expected) for destination in destinations)


@pytest.mark.parametrize(
    ("sources", "destinations", "nbytes", "message"),
    [
        ([], [64], 256, "got 0 sources and 1 destinations, but takes 1 to 16 of each"),
        ([64], [64] * 17, 256, "got 1 sources and 17 destinations"),
        ([64], [64], 64, "bytes 64 is not a multiple of 256"),
        ([32], [64], 256, "source 32 is not a multiple of 64"),
        ([64], [96], 256, "destination 96 is not a multiple of 64"),
    ],
)
def test_the_limit_refuses_what_it_cannot_move(sources, destinations, nbytes, message):
    with pytest.raises(ValueError, match=message):
        _C.move_at_limit(True, sources, destinations, nbytes)
