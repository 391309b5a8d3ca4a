"""How many examples property tests run: few each time, very many of what strangers can reach.

Tests marked ``fuzz`` are run with the profile ``thorough`` by ``make fuzz``. They say nothing of
numbers themselves, but may ask for fewer in the everyday profile with `one_in`.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

__all__ = ["THOROUGH", "one_in", "register"]

EXAMPLES = 100
THOROUGH = 10_000

# On a busy machine an example may take any time; what takes too long is found by the suite's own
# timeouts. Drawing is slow the first time, while modules load.
_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def register() -> None:
    """Make the profiles known, and load the everyday one: the same examples each time."""
    settings.register_profile("everyday", max_examples=EXAMPLES, derandomize=True, **_COMMON)
    settings.register_profile("thorough", max_examples=THOROUGH, **_COMMON)
    settings.load_profile("everyday")


def one_in(share: int) -> settings:
    """Return what a test is decorated with whose examples are dear: every day one in `share`."""
    default = settings()
    if default.max_examples >= THOROUGH:
        return settings(default)
    return settings(default, max_examples=max(1, default.max_examples // share))
