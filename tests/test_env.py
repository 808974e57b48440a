"""Environment variables: values, defaults, and errors that name the variable and its value."""

import re
from pathlib import Path

import pytest

from pyparallel import _C, env


@pytest.mark.parametrize("text, count", [("4", 4), ("1", 1), ("0", None), ("", None)])
def test_virtual_device_count(monkeypatch, text, count):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", text)
    assert env.virtual_device_count() == count


def test_virtual_device_count_unset(monkeypatch):
    monkeypatch.delenv("PYPARALLEL_VIRTUAL_DEVICES", raising=False)
    assert env.virtual_device_count() is None


@pytest.mark.parametrize("text", ["-1", "four", "1.5", "17", "9" * 30])
def test_virtual_device_count_refuses(monkeypatch, text):
    monkeypatch.setenv("PYPARALLEL_VIRTUAL_DEVICES", text)
    text = f"PYPARALLEL_VIRTUAL_DEVICES must be an integer from 0 to 16, but is '{text}'"
    with pytest.raises(ValueError, match=text):
        env.virtual_device_count()


def test_timeout(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_TIMEOUT_MS", "250")
    assert env.timeout_ms() == 250
    monkeypatch.delenv("PYPARALLEL_TIMEOUT_MS")
    assert env.timeout_ms() == env.DEFAULT_TIMEOUT_MS == 30_000


@pytest.mark.parametrize("text", ["0", "-5", "1s", "1000000001", "9" * 20])
def test_timeout_refuses(monkeypatch, text):
    monkeypatch.setenv("PYPARALLEL_TIMEOUT_MS", text)
    with pytest.raises(ValueError, match=f"PYPARALLEL_TIMEOUT_MS must be.*'{text}'"):
        env.timeout_ms()


@pytest.mark.parametrize(
    "text, mode", [("", "auto"), ("auto", "auto"), ("off", "off"), ("force", "force")]
)
def test_p2p(monkeypatch, text, mode):
    monkeypatch.setenv("PYPARALLEL_P2P", text)
    assert env.p2p() == mode


def test_p2p_refuses(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_P2P", "on")
    with pytest.raises(
        ValueError, match="PYPARALLEL_P2P must be one of auto, off, force, but is 'on'"
    ):
        env.p2p()


@pytest.mark.parametrize(
    "text, level",
    [("INFO", "INFO"), ("info", "INFO"), ("warn", "WARN"), ("", "WARN"), (None, "WARN")],
)
def test_debug(monkeypatch, text, level):
    monkeypatch.delenv("PYPARALLEL_DEBUG", raising=False)
    if text is not None:
        monkeypatch.setenv("PYPARALLEL_DEBUG", text)
    assert env.debug() == level


def test_debug_refuses(monkeypatch):
    monkeypatch.setenv("PYPARALLEL_DEBUG", "loud")
    with pytest.raises(ValueError, match="PYPARALLEL_DEBUG must be WARN or INFO, but is 'loud'"):
        env.debug()


def test_limits_are_those_of_the_core():
    for n, timeout_ms in ((1, 1), (env.MAX_RANKS, env.MAX_TIMEOUT_MS)):
        _C.Communicator("host", [0] * n, timeout_ms=timeout_ms).close()
    for n, timeout_ms in ((env.MAX_RANKS + 1, 1), (1, env.MAX_TIMEOUT_MS + 1)):
        with pytest.raises(ValueError, match=f"1 to ({env.MAX_RANKS}|{env.MAX_TIMEOUT_MS})"):
            _C.Communicator("host", [0] * n, timeout_ms=timeout_ms)


def test_known_variables_are_those_that_are_read_and_documented():
    root = Path(__file__).resolve().parents[1]
    sources = [*root.glob("pyparallel/*.py"), root / "setup.py", root / "tests/conftest.py"]
    read = {
        name
        for source in sources
        for name in re.findall(r"""["'](PYPARALLEL_[A-Z0-9_]+)["']""", source.read_text())
    }
    assert read == env.KNOWN
    table = (root / "README.md").read_text()
    assert all(f"`{name}" in table for name in env.KNOWN)
