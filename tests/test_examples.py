"""The examples run as a user runs them, in a process of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run_example(name, *flags):
    pytest.importorskip("sklearn")
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *flags], capture_output=True, text=True, timeout=240
    )


def test_drop_in_trains_to_its_accuracy():
    result = run_example("01_drop_in.py")
    assert result.returncode == 0, result.stdout + result.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+)", result.stdout).group(1))
    assert accuracy >= 0.95
    assert "\r" not in result.stdout, "the progress line belongs on a terminal only"
    losses = [float(x) for x in re.findall(r"^epoch +\d+  loss ([\d.]+)", result.stdout, re.M)]
    assert len(losses) == 10
    assert losses[-1] < 0.1 * losses[0]


def test_drop_in_check_finds_both_ways_equal():
    result = run_example("01_drop_in.py", "--check", "--epochs", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "both ways agree" in result.stdout
    # Sums over four shares round differently: without any difference nothing was compared.
    assert float(re.search(r"weights .* at most (\S+) ", result.stdout).group(1)) > 0


def test_drop_in_draws_its_losses(tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "losses.png"
    result = run_example("01_drop_in.py", "--epochs", "1", "--plot", str(file))
    assert "test accuracy" in result.stdout, result.stdout + result.stderr
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("file", ["/no/such/folder/losses.png", "losses.xyz"])
def test_drop_in_refuses_a_bad_plot_before_the_training(file):
    pytest.importorskip("matplotlib")
    result = run_example("01_drop_in.py", "--plot", file)
    assert result.returncode == 2 and "epoch" not in result.stdout
    assert f"error: --plot {file}: " in result.stderr


def test_drop_in_reports_a_low_accuracy_in_its_exit_code():
    result = run_example("01_drop_in.py", "--epochs", "0")
    assert result.returncode == 1, result.stdout + result.stderr
