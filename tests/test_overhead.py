"""bench/overhead.py: every row works, wrong values are noticed, models have their real sizes."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bench"))

import models
import overhead
import replication
import torch_on_cpu
import training
from bars import Sample
from rows import compared
from torch_ranks import TorchRanks

COLUMNS = {"model", "nranks", "mode", "bare_ms", "ours_ms", "torch_ms"}

REPLICATION = [
    "replicate, unchanged",
    "undo, unchanged",
    "replicate, unchanged, caches cold",
    "undo, unchanged, caches cold",
    "replicate, all changed",
]


def test_a_dry_run_prints_and_writes_every_row_without_bars(tmp_path, capsys):
    out = tmp_path / "overhead.json"
    assert overhead.main(["--dry-run", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    rows = result["lines"]
    assert [(row["nranks"], row["mode"]) for row in rows] == [
        *[(4, "forward without grad"), (4, "step")] * 2,
        *[(8, mode) for mode in REPLICATION] * 2,
        (4, "bytes sent a step"),
    ]
    printed = capsys.readouterr().out
    for row in rows:
        assert row.keys() >= COLUMNS
        assert row["bar"] is None and row["wrong"] == 0
        assert row["name"] in printed
    for row in rows[:4]:
        assert min(row["bare_ms"], row["ours_ms"], row["torch_ms"]) > 0


def test_a_ratio_is_taken_round_by_round():
    samples = {
        "bare": [Sample(1.0, 0), Sample(2.0, 0), Sample(4.0, 0)],
        "ours": [Sample(2.0, 0), Sample(2.0, 0), Sample(2.0, 0)],
    }
    row = compared("net", 4, "step", samples, bar=1.1, wrong=0)
    assert row.quartiles == (0.75, 1.0, 1.5)
    assert (row.bare_ms, row.ours_ms, row.torch_ms) == (2000, 2000, None)
    assert row.verdict == "ok" and row.as_json().keys() >= COLUMNS


@pytest.mark.parametrize("mode", ["forward", "step"])
def test_a_side_that_computes_something_else_is_wrong(mode, monkeypatch):
    class Off(nn.Module):
        def __init__(self, module, nranks):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x) * 1.01

    net = nn.Linear(4, 4)
    x = torch.randn(8, 4)
    bars, rounds = (1.0, 1.0), (2, 2)
    monkeypatch.setattr(training, "WARM_UP", 1)
    monkeypatch.setitem(training.SIDES, "ours", training.SIDES["bare"])
    assert [row.wrong for row in training.training_rows("net", net, x, bars, rounds)] == [0, 0]
    monkeypatch.setitem(training.SIDES, "ours", Off)
    row = training.training_rows("net", net, x, bars, rounds)[mode == "step"]
    assert row.wrong > 0


def test_a_copy_that_is_not_renewed_is_wrong(monkeypatch):
    monkeypatch.setattr(replication.TimedTable, "send", lambda *args: None)
    torch.manual_seed(0)
    rows = replication.replication_rows("net", nn.Linear(16, 16), (2, 2, 2))
    assert all(row.wrong > 0 for row in rows)


def test_torchs_copies_do_not_count(monkeypatch):
    copies = torch_on_cpu._copies
    monkeypatch.setattr(torch_on_cpu, "_copies", lambda *args: time.sleep(0.2) or copies(*args))
    assert 0 < TorchRanks(nn.Linear(2, 2), 4).replicate_seconds() < 0.2


def test_sizes_are_those_of_the_real_models():
    with torch.device("meta"):
        gpt2, resnet = models.gpt2(), models.resnet()
    assert sum(p.numel() for p in gpt2.parameters()) == 124_439_808
    assert sum(p.numel() for p in resnet.parameters()) == 25_557_032
    assert len(list(resnet.buffers())) == 3 * 53
