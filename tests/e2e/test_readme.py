"""The README's code is the examples', word for word, and the examples run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from auth import SecretKey, Ticket
from tests import programs
from tests.e2e.machines import Daemon, Machine
from tests.programs import Program

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (examples/\w+\.py) -->\n```python\n(.*?)```", README, re.DOTALL))


def test_the_readme_shows_a_client_and_an_app() -> None:
    assert set(BLOCKS) == {"examples/client.py", "examples/app.py", "examples/fastapi_app.py"}
    assert "```python" not in re.sub(r"<!-- examples/\w+\.py -->\n```python", "", README)


@pytest.mark.parametrize("path", BLOCKS)
def test_the_readme_shows_the_examples_word_for_word(path: str) -> None:
    assert BLOCKS[path] == (ROOT / path).read_text()


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_what_the_readme_links_to_is_there(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.e2e
def test_the_daemon_and_the_client_run_together(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.daemon", str(tmp_path / "home")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    ) as process:
        try:
            daemon = Daemon(process)
            client = run_client(daemon.wait_for("^mesh1.*$")[0], home=tmp_path / "nobody")
            assert client.returncode == 0, client.stderr
            assert client.stderr == ""
            assert "round trip" in client.stdout
            assert "[2., 5.]" in client.stdout
            daemon.signal(signal.SIGINT)
            assert daemon.wait() == 0
            assert len(daemon.lines) == 1, daemon.lines
        finally:
            process.kill()


@pytest.mark.e2e
def test_the_client_without_a_ticket_says_how_it_is_used() -> None:
    command = [sys.executable, "-m", "examples.client"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")
    assert "Traceback" not in done.stderr


@pytest.mark.e2e
def test_the_client_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    nowhere = Ticket(SecretKey.generate().node_id, (("127.0.0.1", 9),)).encode()
    for ticket, why in ((nowhere[:-9], "truncated"), (nowhere, "127.0.0.1:9")):
        done = run_client(ticket, home=tmp_path / "nobody")
        assert done.returncode == 1
        assert why in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.e2e
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["fastapi_app", "trio_app", "asyncio_app"])
def test_the_apps_and_the_client_run_as_printed(kind: str, tmp_path: Path) -> None:
    assert ".venv/bin/python -m examples.fastapi_app $(.venv/bin/mesh id)" in README
    assert kind in README
    machine = Machine(tmp_path / "home")
    machine.run("init")
    me = machine.run("id").stdout.strip()
    where = ("--key", str(tmp_path / "app.key"), "--bind", "127.0.0.1:0", "--http", "0")
    with example(kind, me, *where) as app:
        ticket = app.wait_for("^mesh1.*$")[0]
        client = run_client(ticket, home=machine.home)
        assert client.returncode == 0, client.stderr
        assert "[2., 5.]" in client.stdout
        stranger = run_client(ticket, home=tmp_path / "nobody")
        assert stranger.returncode != 0
        assert "this app is for its members, and you are none" in stranger.stderr
        assert "Traceback" not in stranger.stderr


@contextmanager
def example(name: str, *arguments: str) -> Iterator[Daemon]:
    with Program(["-m", f"examples.{name}", *arguments], stderr=False) as process:
        try:
            yield Daemon(process)
        finally:
            process.kill()


def run_client(ticket: str, *, home: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"MESH_HOME": str(home)}
    return programs.run(["-m", "examples.client", ticket], env=env, timeout=45)
