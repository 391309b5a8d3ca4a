"""A machine that is killed and started again on another port is found again, from either side."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from auth import Ticket
from tests.e2e.machines import Machine

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(150),
    pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"),
]

BOUND = 5.0
"""Seconds in which the other side reaches it: a whole command, its start included."""


def port_of(machine: Machine) -> int:
    return Ticket.decode(machine.json("invite")["ticket"]).addresses[0][1]


@pytest.mark.parametrize("dialer_restarts", [True, False])
def test_killed_and_started_on_another_port(tmp_path: Path, dialer_restarts: bool) -> None:
    a, b = Machine(tmp_path / "a"), Machine(tmp_path / "b")
    with a.up() as first:
        b.run("join", first.ticket, "--name", "a")
        with b.up() as second:
            second.wait_for("joined +a ")
            name = next(peer["petname"] for peer in a.json("peers")["peers"])
            stays, leaves = (a, b) if dialer_restarts else (b, a)
            daemon = second if dialer_restarts else first
            target = name if dialer_restarts else "a"
            assert stays.run("ping", target, "-c", "1")
            former = port_of(leaves)
            daemon.signal(signal.SIGKILL)
            daemon.wait()
            with leaves.up():
                began = time.monotonic()
                said = stays.run("ping", target, "-c", "1", "--timeout", str(BOUND)).stdout
                assert time.monotonic() - began < BOUND
                assert port_of(leaves) != former
                assert f":{port_of(leaves)}:" in said
                # The links alone find it, too: nobody calls from the side that was started again.
                (peer,) = stays.json("status")["peers"]
                assert peer["state"] == "authorized"
