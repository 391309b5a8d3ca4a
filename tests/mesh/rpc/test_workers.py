"""The blocking face: programs that are workers of one job, each a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh import Home
from tests.programs import Program

pytestmark = pytest.mark.e2e


@pytest.mark.timeout(120)
def test_workers_of_several_jobs(tmp_path: Path) -> None:
    Home(tmp_path / "home").create()
    where = (str(tmp_path / "store"), str(tmp_path / "home"))
    programs = [Program(["-m", "tests.mesh.rpc.workers", str(rank), *where]) for rank in range(3)]
    try:
        ends = [program.communicate(timeout=90) for program in programs]
    finally:
        for program in programs:
            program.kill()
    for program, code, (told, errors) in zip(programs, (0, 9, 0), ends, strict=True):
        assert program.returncode == code, told + errors
        assert "Traceback" not in errors
    done = ("everything", "use_modules", "chain", "left", "busy", "killed")
    assert ends[0][0].split() == [word for name in done for word in ("done:", name)]
