"""Which way of running ranks "auto" takes, from the times of calls."""

import pytest

from pyparallel.timing import Timing

MEASURED = 17  # calls until it decides


def simulate(seconds, calls, timing=None):
    """Runs calls with given times for each way; returns the ways."""
    timing = timing or Timing(may_draw=False)
    ways = []
    for call in range(calls):
        way = timing.next_way()
        ways.append(way)
        timing.add(way, seconds[way](call) if callable(seconds[way]) else seconds[way])
    return ways, timing


def test_ways_alternate_and_each_is_warmed_up():
    ways, decided = simulate({"threads": 1.0, "sequential": 1.0}, MEASURED)
    assert ways == ((["sequential"] * 3 + ["threads"] * 3) * 3)[:MEASURED]
    assert decided.decided
    slow_start = {
        "threads": lambda call: 100.0 if call % 3 == 0 else 1.0,
        "sequential": lambda call: 2.0,
    }
    assert simulate(slow_start, MEASURED + 1)[0][-1] == "threads"


@pytest.mark.report(
    "pytorch#5421",
    "OpenNMT-py#89",
    "fairseq#34",
    "dgl#838",
    "pytorch#54",
    "CenterNet#1046",
    "yogo#90",
    "tutorials#648",
)
@pytest.mark.parametrize(
    ("threads", "choice"), [(0.5, "threads"), (0.89, "threads"), (0.91, "sequential"), (2, None)]
)
def test_threads_must_be_faster_by_a_tenth(threads, choice):
    ways, _ = simulate({"threads": threads, "sequential": 1.0}, 30)
    assert set(ways[MEASURED:]) == {choice or "sequential"}


def test_outliers_do_not_decide():
    noisy = {
        "threads": lambda call: 50.0 if call in (4, 10) else 1.0,
        "sequential": lambda call: 0.01 if call in (1, 8) else 2.0,
    }
    assert simulate(noisy, MEASURED + 1)[0][-1] == "threads"


def test_it_measures_again_and_keeps_what_it_has_on_a_tie():
    ways, chosen = simulate({"threads": 0.5, "sequential": 1.0}, MEASURED + 2000)
    assert set(ways[MEASURED:]) == {"threads"} and not chosen.decided
    ways, _ = simulate({"threads": 1.05, "sequential": 1.0}, 30, chosen)
    assert set(ways[:MEASURED]) == {"sequential", "threads"}
    assert set(ways[MEASURED:]) == {"threads"}
