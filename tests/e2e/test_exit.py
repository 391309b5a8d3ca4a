"""Programs that end without closing their node: quickly, quietly, and peers are told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.machines import Daemon, Machine
from tests.programs import Program

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

EXIT_SECONDS = 5.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("exit") / "a")


@pytest.fixture(scope="module")
def daemon(machine: Machine) -> Iterator[Daemon]:
    with machine.up() as daemon:
        yield daemon


OPEN = """
import sys, threading, time, mesh
node = mesh.blocking.Node.client({ticket!r}).open()
peer = node.connect({ticket!r})
peer.ping()
print(time.time(), flush=True)
"""

ENDINGS = {
    "falls off the end": "",
    "sys.exit": "sys.exit(0)",
    "two nodes": "other = mesh.blocking.Node.client({ticket!r}).open()",
    "another thread waits": "threading.Thread(target=peer.info, daemon=True).start()",
    "garbage": "peer.cycle = node; node.cycle = peer; del peer, node",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_exit_without_close(machine: Machine, daemon: Daemon, ending: str) -> None:
    done = machine.python((OPEN + ending).format(ticket=daemon.ticket))
    ended = time.time()
    assert (done.returncode, done.stderr) == (0, "")
    assert ended - float(done.stdout) < EXIT_SECONDS
    daemon.wait_for(r"left +program .*: left$", 5)


def test_own_error_is_the_only_one_shown(machine: Machine, daemon: Daemon) -> None:
    done = machine.python(OPEN.format(ticket=daemon.ticket) + "raise ValueError('mine')")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == "ValueError: mine"
    assert done.stderr.count("Traceback") == 1


def test_peer_that_died_first(machine: Machine, tmp_path: Path) -> None:
    other = Machine(tmp_path / "b")
    with other.up() as daemon:
        code = (OPEN + "sys.stdin.readline()").format(ticket=daemon.ticket)
        env = os.environ | {"MESH_HOME": str(machine.home / "none")}
        with Program(["-c", code], env=env, stdin=True) as process:
            assert process.stdout is not None
            assert float(process.stdout.readline()) > 0
            daemon.process.kill()
            daemon.wait()
            _, err = process.communicate("\n", timeout=EXIT_SECONDS)
            assert (process.returncode, err) == (0, "")
