"""The honest processes that floods are measured beside, and the table of what was measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.floods.measure import HEADING, Arena, Outcome, arena

OUTCOMES = pytest.StashKey[list[Outcome]]()


@pytest.fixture(scope="session")
def floor() -> Iterator[Arena]:
    with arena() as it:
        yield it


@pytest.fixture
def outcomes(request: pytest.FixtureRequest) -> list[Outcome]:
    """What has been measured; it is printed at the end of the run."""
    return request.config.stash.setdefault(OUTCOMES, [])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    measured = config.stash.get(OUTCOMES, [])
    if measured:
        terminalreporter.section(HEADING)
        for outcome in measured:
            terminalreporter.write_line(str(outcome))
