"""Random programs over several processes: gradients, hooks and nodes as in one, nothing more."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import Program

WORKERS = 4


def compare(path: Path, first: int, count: int, seconds: float) -> int:
    """Have workers compare programs; return how many gradients have crossed between them."""
    arguments = [str(path / "store"), str(first), str(count)]
    module = ["-m", "tests.mesh.autograd.random_workers"]
    programs = [Program([*module, str(rank), str(WORKERS), *arguments]) for rank in range(WORKERS)]
    try:
        told, errors = programs[0].communicate(timeout=seconds)
        assert programs[0].returncode == 0, told + errors
        for program in programs[1:]:
            told_too, errors = program.communicate(timeout=20)
            assert program.returncode == 0, told_too + errors
    finally:
        for program in programs:
            program.kill()
    found = re.match(rf"passed: {count} crossed: (\d+)", told)
    assert found is not None, told
    return int(found[1])


@pytest.mark.timeout(120)
def test_a_hundred_random_programs(tmp_path: Path) -> None:
    assert compare(tmp_path, 0, 100, 100) > 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_random_programs(tmp_path: Path) -> None:
    assert compare(tmp_path, 100, 1000, 1700) > 2000
