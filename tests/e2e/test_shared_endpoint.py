"""Programs of a machine whose daemon runs share its endpoint process, in real processes."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.machines import Machine
from tests.programs import Program
from tests.transport.process.test_life import is_gone

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has endpoint processes"),
]

PROGRAM = """
import sys, mesh, transport.process.sharing
transport.process.sharing.JOIN_SECONDS = 60.0  # however much else runs
node = mesh.blocking.Node.worker({settings}).open()
peer = node.connect({ticket!r})
peer.ping()
child = node.endpoint._engine._child
print(type(child).__name__, child.pid, node.node_id, flush=True)
for line in sys.stdin:
    try:
        peer.ping()
        print("fine", flush=True)
    except mesh.MeshError as error:
        print(repr(error), str(error), flush=True)
"""


class User:
    """A program of a machine's that calls a peer whenever it is told to."""

    def __init__(self, machine: Machine, ticket: str, settings: str = "") -> None:
        code = PROGRAM.format(ticket=ticket, settings=settings)
        env = os.environ | {"MESH_HOME": str(machine.home)}
        self.program = Program(["-c", code], env=env, stdin=True, torch=False)
        assert self.program.stdout is not None
        kind, process, self.node = self.program.stdout.readline().split()
        self.is_sharing = kind == "SharedProcess"
        self.process = int(process)

    def call(self) -> str:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write("go\n")
        self.program.stdin.flush()
        return self.program.stdout.readline()


def test_programs_use_the_daemons_process_while_there_is_one(tmp_path: Path) -> None:
    here, there = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    with there.up() as peer, ExitStack() as stack:
        here.run("init")
        here.run("join", peer.ticket)

        def user(settings: str = "") -> User:
            user = User(here, peer.ticket, settings)
            stack.enter_context(user.program)
            return user

        with here.up() as daemon:
            one, other = user(), user()
            alone = user("config=transport.EndpointConfig(placement='process')")
            assert one.is_sharing
            assert other.is_sharing
            assert not alone.is_sharing
            assert one.process == other.process
            assert one.node != other.node
            maps = Path(f"/proc/{one.process}/maps").read_text()
            assert "torch" not in maps
            assert [each.call() for each in (one, other, alone)] == ["fine\n"] * 3
            one.program.kill()
            peer.wait_for(rf"left +program {one.node[:4]}", 5)
            assert other.call() == "fine\n"
            out, err = other.program.communicate(timeout=20)  # it ends without closing its node
            assert (other.program.returncode, out, err) == (0, "", "")
            last = user()
            assert last.process == one.process
            daemon.process.kill()
            daemon.wait()
            told = last.call()
            assert "EndpointLost" in told
            assert "daemon" in told
            assert is_gone(one.process)
            assert alone.call() == "fine\n"
        assert not user().is_sharing
