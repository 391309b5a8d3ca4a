"""The honest processes that floods are measured beside, and the table of what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.floods.measure import HEADING, OUTCOME, Arena, arena


@pytest.fixture(scope="session")
def floor() -> Iterator[Arena]:
    with arena() as it:
        yield it


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    measured = [
        value
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, value in report.user_properties
        if name == OUTCOME
    ]
    if measured:
        terminalreporter.section(HEADING)
        for line in measured:
            terminalreporter.write_line(str(line))
