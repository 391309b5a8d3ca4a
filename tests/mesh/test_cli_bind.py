"""``mesh up --bind`` and what ``mesh status`` warns of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mesh.cli.app import app
from mesh.home import Home

RUNNER = CliRunner()


@pytest.mark.parametrize("bind", ["^", "^lo,", "10.0.0.1/8:0", "nosuchif*:0", "1.2.3:0"])
def test_what_can_not_be_bound_shows_the_grammar(tmp_path: Path, bind: str) -> None:
    Home(tmp_path).create()
    done = RUNNER.invoke(app, ["--home", str(tmp_path), "up", "--bind", bind])
    assert done.exit_code != 0
    said = str(done.exception) + done.output
    assert repr(bind) in said
    assert "^lo,docker*" in said


def test_help_tells_of_the_choice() -> None:
    said = RUNNER.invoke(app, ["up", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert "^lo,docker*" in said


def test_status_prints_what_the_host_withholds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: dict[str, Any] = {
        "node_id": "x",
        "addresses": ["127.0.0.1:1"],
        "uptime": 1.0,
        "pid": 1,
        "version": "0",
        "devices": ["cpu"],
        "tables": {},
        "peers": [],
        "warnings": ["UDP socket buffers are small. Fix: sudo sysctl -w net.core.rmem_max=4194304"],
    }

    async def ask(*arguments: object, **more: object) -> dict[str, Any]:
        return answer

    monkeypatch.setattr("mesh.cli.running.ask", ask)
    Home(tmp_path).create()
    done = RUNNER.invoke(app, ["--home", str(tmp_path), "status"])
    assert done.exit_code == 0, done.output
    assert f"warning    {answer['warnings'][0]}" in done.output
    answer["warnings"] = []
    assert "warning" not in RUNNER.invoke(app, ["--home", str(tmp_path), "status"]).output
