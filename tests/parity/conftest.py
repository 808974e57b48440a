"""Tests that compare ours with torch's own code, and with the module on its own.

Each test runs the same drawn examples every time, in CI and elsewhere. ``PARITY_PROFILE=explore``
draws others, and ``PARITY_FACTOR=10`` ten times as many.
"""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "parity",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("explore", settings.get_profile("parity"), derandomize=False)
