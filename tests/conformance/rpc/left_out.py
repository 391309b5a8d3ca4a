"""Which of torch's tests for remote calls are not run, and why: the list in ``left_out.txt``.

The file has a line for each reason, and the tests below it: ``Suite.test_name``.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["read"]

_FILE = Path(__file__).with_name("left_out.txt")


def read() -> dict[str, str]:
    """Return why each test that is left out is."""
    found: dict[str, str] = {}
    reason = ""
    for line in _FILE.read_text().splitlines():
        if line.startswith("    "):
            found[line.strip()] = reason
        elif line:
            reason = line
    return found
