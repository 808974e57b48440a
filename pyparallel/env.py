"""Every environment variable that the package reads, in one place.

- ``PYPARALLEL_VIRTUAL_DEVICES``: number of virtual devices that ``device_ids=None`` and ints mean.
- ``PYPARALLEL_TIMEOUT_MS``: longest wait of one rank for another, in milliseconds (default 30000).
- ``PYPARALLEL_P2P``: ``auto``, ``off`` or ``force``; direct access between GPUs.
- ``PYPARALLEL_CHECK_DEVICES``: 1 finds replicas on virtual devices that use the memory of another
  device; slow.
- ``PYPARALLEL_DEBUG``: ``INFO`` makes each wrapper say, after its first steps, where their time
  went; ``WARN``, the default, does not.

An empty value counts as unset. A value that makes no sense raises ValueError where it is first
needed. Variables are read when they are needed, so a program may set them before its first
communicator.
"""

import os

DEFAULT_TIMEOUT_MS = 30_000
P2P_MODES = ("auto", "off", "force")
DEBUG_LEVELS = ("WARN", "INFO")


def virtual_device_count() -> int | None:
    """Returns PYPARALLEL_VIRTUAL_DEVICES, or None where it is unset or 0."""
    return _integer("PYPARALLEL_VIRTUAL_DEVICES", minimum=0) or None


def timeout_ms() -> int:
    """Returns PYPARALLEL_TIMEOUT_MS in milliseconds."""
    value = _integer("PYPARALLEL_TIMEOUT_MS", minimum=1)
    return DEFAULT_TIMEOUT_MS if value is None else value


def p2p() -> str:
    """Returns PYPARALLEL_P2P. The core reads it too; reading it here refuses a typing error."""
    return _one_of("PYPARALLEL_P2P", P2P_MODES, "auto")


def check_devices() -> bool:
    """Returns whether PYPARALLEL_CHECK_DEVICES is 1."""
    return _one_of("PYPARALLEL_CHECK_DEVICES", ("0", "1"), "0") == "1"


def debug() -> str:
    """Returns PYPARALLEL_DEBUG."""
    return _one_of("PYPARALLEL_DEBUG", DEBUG_LEVELS, "WARN")


def _one_of(name: str, values: tuple[str, ...], default: str) -> str:
    value = os.environ.get(name) or default
    if value not in values:
        raise ValueError(f"{name} must be one of {', '.join(values)}, but is {value!r}")
    return value


def _integer(name: str, minimum: int) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = int(text)
    except ValueError:
        value = minimum - 1
    if value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, but is {text!r}")
    return value
