"""Every environment variable that the package reads, in one place.

- ``PYPARALLEL_VIRTUAL_DEVICES``: number of virtual devices that ``device_ids=None`` and ints mean,
  at most 16.
- ``PYPARALLEL_TIMEOUT_MS``: longest wait of one rank for another, in milliseconds (default 30000).
- ``PYPARALLEL_P2P``: ``auto``, ``off`` or ``force``; direct access between GPUs.
- ``PYPARALLEL_ALGO``: algorithms to take instead of the defaults, as in
  ``broadcast:chain,reduce_add:owner``. The names are in docs/algorithms.md.
- ``PYPARALLEL_DEBUG``: with ``INFO`` a new communicator says on stderr which algorithms it takes.

An empty value counts as unset. A value that makes no sense raises ValueError where it is first
needed. Variables are read when they are needed, so a program may set them before its first
communicator.
"""

import os

# What the core can do; a test compares.
MAX_RANKS = 16
MAX_TIMEOUT_MS = 1_000_000_000
DEFAULT_TIMEOUT_MS = 30_000
# With those that are read elsewhere: when the package is built, and by its tests.
KNOWN = frozenset(
    (
        "PYPARALLEL_ALGO",
        "PYPARALLEL_CUDA",
        "PYPARALLEL_DEBUG",
        "PYPARALLEL_P2P",
        "PYPARALLEL_TEST_DEVICES",
        "PYPARALLEL_TIMEOUT_MS",
        "PYPARALLEL_VIRTUAL_DEVICES",
    )
)
P2P_MODES = ("auto", "off", "force")
DEBUG_LEVELS = ("INFO",)


def virtual_device_count() -> int | None:
    """Returns PYPARALLEL_VIRTUAL_DEVICES, or None where it is unset or 0."""
    return _integer("PYPARALLEL_VIRTUAL_DEVICES", 0, MAX_RANKS) or None


def timeout_ms() -> int:
    """Returns PYPARALLEL_TIMEOUT_MS in milliseconds."""
    value = _integer("PYPARALLEL_TIMEOUT_MS", 1, MAX_TIMEOUT_MS)
    return DEFAULT_TIMEOUT_MS if value is None else value


def p2p() -> str:
    """Returns PYPARALLEL_P2P. The core reads it too; reading it here refuses a typing error."""
    value = os.environ.get("PYPARALLEL_P2P") or "auto"
    if value not in P2P_MODES:
        raise ValueError(f"PYPARALLEL_P2P must be one of {', '.join(P2P_MODES)}, but is {value!r}")
    return value


def algorithms() -> str:
    """Returns PYPARALLEL_ALGO. The core checks it, because it knows the names."""
    return os.environ.get("PYPARALLEL_ALGO") or ""


def debug() -> str | None:
    """Returns PYPARALLEL_DEBUG in capitals, or None where it is unset."""
    value = os.environ.get("PYPARALLEL_DEBUG")
    if not value:
        return None
    if value.upper() not in DEBUG_LEVELS:
        raise ValueError(f"PYPARALLEL_DEBUG must be {' or '.join(DEBUG_LEVELS)}, but is {value!r}")
    return value.upper()


def _integer(name: str, minimum: int, maximum: int) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} must be an integer from {minimum} to {maximum}, but is {text!r}")
    return value
