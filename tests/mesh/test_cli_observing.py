"""``mesh up --qlog --key-log``: what the daemon is given, in the background as well."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mesh.cli import up
from mesh.cli.app import app
from mesh.home import Home
from transport import EndpointConfig

RUNNER = CliRunner()


def test_the_daemon_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[EndpointConfig] = []

    def in_foreground(home: Home, config: EndpointConfig, **_: object) -> int:
        given.append(config)
        return 0

    monkeypatch.setattr(up, "in_foreground", in_foreground)
    for options in ((), ("--qlog", "traces", "--key-log", "keys")):
        assert RUNNER.invoke(app, ["--home", str(tmp_path), "up", *options]).exit_code == 0
    assert [(each.qlog, each.key_log) for each in given] == [(None, None), ("traces", "keys")]


def test_one_in_the_background_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Ended:
        pid, returncode = 1, 3

        def __init__(self, command: list[str], **_: Any) -> None:
            commands.append(command)

        def poll(self) -> int:
            return 3

    monkeypatch.setattr(subprocess, "Popen", Ended)
    options = ["--qlog", "traces", "--key-log", "keys"]
    RUNNER.invoke(app, ["--home", str(tmp_path), "up", "--detach", *options])
    RUNNER.invoke(app, ["--home", str(tmp_path), "up", "--detach"])
    told, untold = commands
    assert told[-4:] == options
    assert not {"--qlog", "--key-log"} & set(untold)


def test_a_file_that_others_can_read_is_refused_with_the_fix(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    keys.chmod(0o644)
    done = RUNNER.invoke(
        app,
        ["--home", str(tmp_path / "home"), "up", "--bind", "127.0.0.1:0", "--key-log", str(keys)],
    )
    assert done.exit_code != 0
    assert f"chmod 600 {keys}" in str(done.exception) + done.output
    assert not keys.read_text()
