"""Every environment variable that the package reads, in one place.

- ``PYPARALLEL_VIRTUAL_DEVICES``: number of virtual devices that ``device_ids=None`` and ints mean,
  at most 16.
- ``PYPARALLEL_TIMEOUT_MS``: longest wait of one rank for another, in milliseconds (default 30000).
- ``PYPARALLEL_P2P``: ``auto``, ``off`` or ``force``; direct access between GPUs.
- ``PYPARALLEL_ALGO``: algorithms to take instead of the defaults, as in
  ``broadcast:chain,reduce_add:owner``. The names are in docs/algorithms.md.
- ``PYPARALLEL_CHECK_DEVICES``: 1 finds replicas on virtual devices that use the memory of another
  device; slow.
- ``PYPARALLEL_DEBUG``: with ``INFO`` a new communicator says on stderr which algorithms it takes,
  and each wrapper, after its first steps, where their time went; with ``WARN``, the default, not.

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
        "PYPARALLEL_CHECK_DEVICES",
        "PYPARALLEL_CUDA",
        "PYPARALLEL_DEBUG",
        "PYPARALLEL_P2P",
        "PYPARALLEL_TEST_DEVICES",
        "PYPARALLEL_TIMEOUT_MS",
        "PYPARALLEL_VIRTUAL_DEVICES",
    )
)
P2P_MODES = ("auto", "off", "force")
DEBUG_LEVELS = ("WARN", "INFO")


def virtual_device_count() -> int | None:
    """Returns PYPARALLEL_VIRTUAL_DEVICES, or None where it is unset or 0."""
    return _integer("PYPARALLEL_VIRTUAL_DEVICES", 0, MAX_RANKS) or None


def timeout_ms() -> int:
    """Returns PYPARALLEL_TIMEOUT_MS in milliseconds."""
    value = _integer("PYPARALLEL_TIMEOUT_MS", 1, MAX_TIMEOUT_MS)
    return DEFAULT_TIMEOUT_MS if value is None else value


def p2p() -> str:
    """Returns PYPARALLEL_P2P. The core reads it too; reading it here refuses a typing error."""
    return _one_of("PYPARALLEL_P2P", P2P_MODES, "auto")


def check_devices() -> bool:
    """Returns whether PYPARALLEL_CHECK_DEVICES is 1."""
    return _one_of("PYPARALLEL_CHECK_DEVICES", ("0", "1"), "0") == "1"


def algorithms() -> str:
    """Returns PYPARALLEL_ALGO. The core checks it, because it knows the names."""
    return os.environ.get("PYPARALLEL_ALGO") or ""


def debug() -> str:
    """Returns PYPARALLEL_DEBUG in capitals."""
    value = os.environ.get("PYPARALLEL_DEBUG") or "WARN"
    if value.upper() not in DEBUG_LEVELS:
        raise ValueError(f"PYPARALLEL_DEBUG must be {' or '.join(DEBUG_LEVELS)}, but is {value!r}")
    return value.upper()


def _one_of(name: str, values: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name) or default
    if value not in values:
        raise ValueError(f"{name} must be one of {', '.join(values)}, but is {value!r}")
    return value


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
