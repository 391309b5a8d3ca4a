"""Programs that are stages of one model, each a process: they die, go on for long, and learn."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.programs import Program

pytestmark = pytest.mark.e2e

SIZE = 3


def stages(path: Path, scenario: str, number: int, seconds: float) -> list[tuple[int, str, str]]:
    """Run a scenario; return the exit code and output of each stage."""
    module = ["-m", "tests.mesh.autograd.stage", scenario]
    programs = [
        Program([*module, str(rank), str(SIZE), str(path / "store"), str(number)])
        for rank in range(SIZE)
    ]
    try:
        ends = [program.communicate(timeout=seconds) for program in programs]
    finally:
        for program in programs:
            program.kill()
    return [
        (program.returncode or 0, told, errors)
        for program, (told, errors) in zip(programs, ends, strict=True)
    ]


@pytest.mark.timeout(100)
def test_a_stage_dies_amid_a_backward(tmp_path: Path) -> None:
    die(tmp_path, 1)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "dying", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2]
)
def test_a_stage_dies_as_an_atomic_backward_is_to_count(tmp_path: Path, dying: int) -> None:
    die(tmp_path, dying, "settle")


def die(path: Path, dying: int, scenario: str = "kill") -> None:
    """Have a stage die; who is left says so, and frees everything."""
    for rank, (code, told, errors) in enumerate(stages(path, scenario, dying, 80)):
        assert code == (-signal.SIGKILL if rank == dying else 0), told + errors
        assert told == ("" if rank == dying else f"freed: {rank}\n")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dying", range(SIZE), ids=["root", "middle", "leaf"])
def test_any_stage_dies_amid_a_backward_20_times(tmp_path: Path, dying: int) -> None:
    for turn in range(20):
        (tmp_path / str(turn)).mkdir()
        die(tmp_path / str(turn), dying)


@pytest.mark.timeout(100)
def test_one_optimizer_for_all(tmp_path: Path) -> None:
    ends = stages(tmp_path, "optimize", 0, 80)
    assert [code for code, _, _ in ends] == [0] * SIZE, ends
    assert ends[0][1] == "optimized\n"


@pytest.mark.timeout(100)
def test_many_iterations_leave_nothing(tmp_path: Path) -> None:
    ends = stages(tmp_path, "repeat", 40, 80)
    assert [code for code, _, _ in ends] == [0] * SIZE, ends


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_iterations_leave_nothing(tmp_path: Path) -> None:
    ends = stages(tmp_path, "repeat", 2000, 800)
    assert [code for code, _, _ in ends] == [0] * SIZE, ends
