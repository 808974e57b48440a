"""How many examples a test draws."""

import os

from hypothesis import settings

_PROFILE = os.environ.get("PARITY_PROFILE", "parity")
_FACTOR = float(os.environ.get("PARITY_FACTOR", "1"))


def examples(count):
    """Decorates a test that draws ``count`` examples, ``PARITY_FACTOR`` times as many if given."""
    return settings(settings.get_profile(_PROFILE), max_examples=int(count * _FACTOR))
