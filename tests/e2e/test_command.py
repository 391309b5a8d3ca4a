"""Two machines and the command ``mesh``, as a user has them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from auth import SecretKey, Ticket
from tests.e2e.machines import Machine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

LEAVE_SECONDS = 3.0


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Machine, Machine]:
    return Machine(tmp_path / "a"), Machine(tmp_path / "b")


def test_two_terminals(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    with a.up(bind=None, fresh=True) as first:
        # What is printed is usable from another machine, or says that it is not.
        listening = first.wait_for(r"^listening +(.*)$")[1]
        loopback = all(each.startswith(("127.", "[::1]")) for each in listening.split(", "))
        assert loopback == any("loopback only" in line for line in first.lines)
        shown = {each.rpartition(":")[0].strip("[]") for each in listening.split(", ")}
        assert {host for host, _ in Ticket.decode(first.ticket).addresses} == shown
        assert ":0" not in listening.replace("::", "")

        joined = b.run("join", first.ticket, "--name", "first", fresh=True).stdout
        assert joined.startswith("joined first")
        assert "mesh up" in joined
        assert "mesh ping first" in joined
        # Not twice.
        refused = Machine(b.home.parent / "c").run("join", first.ticket, code=4)
        assert "used" in refused.stderr
        assert "another: mesh invite" in refused.stderr
        # Once, and with the time.
        first.wait_for(r"^\d\d:\d\d:\d\d refused +\S+ at .*was used")
        assert len([line for line in first.lines if "refused" in line]) == 1

        with b.up(bind=None) as second:
            first.wait_for(r"joined +\w{4}-\w{4} at ")
            second.wait_for(r"joined +first \(\w{4}-\w{4}\) at ")
            assert b.run("ping", "first", "-c", "2", fresh=True).stdout.count("ms") == 2
            short = b.json("id")["short"]
            # Each has a name for the other, the first one from what the second calls its host.
            (name,) = (peer["petname"] for peer in a.json("peers")["peers"])
            assert a.run("ping", name, "-c", "1").stdout.startswith(f"{name} ({short}) at ")
            assert "both ways" in b.run("status", fresh=True).stdout
            assert "it may use us" in a.run("status").stdout
            (rtt,) = a.json("ping", short, "-c", "1")["rtts"]
            assert 0 < rtt < 3
            for machine, other in ((a, b), (b, a)):
                status = machine.json("status")
                (peer,) = status["peers"]
                assert peer["node_id"] == other.json("id")["node_id"]
                assert peer["state"] == "authorized"
                assert peer["rtt"] > 0
                assert peer["path"].rpartition(":")[2] != "0"
                assert peer["bytes_received"] > 0
            assert "first" in b.run("status").stdout
            assert b.json("peers")["peers"][0]["state"] == "authorized"

            done = b.python(first.python_lines)
            assert done.returncode == 0, done.stderr
            assert "authorized" in done.stdout

            assert b.run("down", fresh=True).stdout == "stopped\n"
            assert second.wait() == 0
            first.wait_for(r"left +\S+ \(\w{4}-\w{4}\) at .*: left$")  # it got its host's name
        b.run("status", code=3)
        first.signal(signal.SIGTERM)
        assert first.wait(LEAVE_SECONDS) == 0


def test_interrupt_leaves_cleanly(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    with a.up() as first:
        b.run("join", first.ticket)
        with b.up() as second:
            first.wait_for("joined .* at")
            second.wait_for("joined .* at")
            children = psutil.Process(second.process.pid).children(recursive=True)
            second.signal(signal.SIGINT)
            assert second.wait(LEAVE_SECONDS) == 130
            assert not any(child.is_running() for child in children)
            first.wait_for(r"left .*: left$", 3)
            assert not any("Traceback" in line for line in second.lines)


def test_no_import_swallows_an_interrupt() -> None:
    code = (
        "import sys, time\n"
        "import mesh.cli\n"
        "class Swallows:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'mesh.cli.app':\n"
        "            print('importing', flush=True)\n"
        "            try:\n"
        "                time.sleep(30)\n"
        "            except BaseException:\n"
        "                print('swallowed', flush=True)\n"
        "sys.meta_path.insert(0, Swallows())\n"
        "mesh.cli.main()\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=LEAVE_SECONDS) == (b"", b"")
        assert process.returncode == 130


@pytest.mark.parametrize("seconds", [0.3, 0.7, 1.2, 1.8, 2.6])
def test_interrupt_of_a_start(machines: tuple[Machine, Machine], seconds: float) -> None:
    # Within the imports, between them and the loop, or once it runs: wherever that is here.
    a, _ = machines
    process = a.start()
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LEAVE_SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in out
    assert "Error" not in out
    assert not (a.home / "daemon.json").exists()
    assert "no daemon runs" in a.run("down").stdout


def test_interrupt_beside_a_frozen_peer(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    with a.up() as first:
        b.run("join", first.ticket)
        with b.up() as second:
            second.wait_for("joined .* at")
            first.wait_for("joined .* at")
            first.signal(signal.SIGSTOP)
            second.signal(signal.SIGINT)
            assert second.wait(LEAVE_SECONDS) == 130


def test_second_interrupt_forces() -> None:
    # The loop is stuck, as in a computation that never yields: only force can end it.
    code = (
        "import anyio, signal, time\n"
        "from mesh.cli.signals import wait_for_signal\n"
        "def told(number):\n"
        "    print('first', flush=True)\n"
        "async def main():\n"
        "    async with anyio.create_task_group() as tasks:\n"
        "        await tasks.start(wait_for_signal, told, (signal.SIGINT,))\n"
        "        await anyio.sleep(0.2)\n"
        "        print('ready', flush=True)\n"
        "        await anyio.sleep(0.5)\n"
        "        time.sleep(60)\n"
        "anyio.run(main)\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"first\n"
        time.sleep(0.8)  # by now it is in its long sleep
        process.send_signal(signal.SIGINT)
        assert process.wait(3) == 130
        assert process.stderr.read() == b"mesh: forced\n"


def test_interrupted_command(machines: tuple[Machine, Machine]) -> None:
    a, _ = machines
    a.run("init")
    gone = Ticket(SecretKey.generate().node_id, (("192.0.2.253", 9),)).encode()
    command = [sys.executable, "-m", "mesh", "--home", str(a.home), "ping", gone, "--timeout", "50"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(2.0)  # no output tells that it dials
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=5)
        assert (process.returncode, out, err) == (130, b"", b"")


def test_key_that_others_can_read(machines: tuple[Machine, Machine]) -> None:
    a, _ = machines
    a.run("init")
    (a.home / "machine.key").chmod(0o644)
    error = a.run("up", code=2).stderr
    assert "0644" in error
    assert f"chmod 600 {a.home / 'machine.key'}" in error
    (a.home / "machine.key").chmod(0o600)
    (a.home / "machine.key").write_text("nonsense")
    assert "machine.key" in a.run("id", code=2).stderr


def test_one_daemon_a_home_and_one_socket_an_address(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    with a.up() as first:
        address = first.wait_for(r"^listening +(\S+)$")[1]
        assert f"identity in use at {address}" in a.run("up", code=4).stderr
        busy = b.run("up", "--bind", address, code=1).stderr
        assert address in busy
        assert "port 0" in busy
        # Killed without a word: nothing is left that hinders the next.
        first.signal(signal.SIGKILL)
        first.wait()
        assert (a.home / "daemon.json").exists()
    with a.up(bind=address):
        assert a.json("status")["addresses"] == [address]


def test_ping_tells_refused_dead_and_silent_apart(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    with a.up() as first:
        b.run("join", first.ticket, "--name", "a")
        with b.up() as second:
            second.wait_for("joined +a ")
            assert b.run("ping", "a", "-c", "1")

            first.signal(signal.SIGSTOP)
            silent = b.run("ping", "a", "-c", "1", "--timeout", "0.4", code=5).stderr
            assert "has not answered" in silent
            first.signal(signal.SIGCONT)

            a.run("deny", b.json("id")["short"])
            second.wait_for("left +a .*no longer authorized")
            second.wait_for("refused +by a .*not among this node's authorized keys")
            first.wait_for("refused +.*not among this node's authorized keys")
            refused = b.run("ping", "a", "-c", "1", code=4).stderr
            assert "not among this node's authorized keys" in refused
            (peer,) = b.json("status")["peers"]
            assert peer["state"] == "refused"
            assert "not among" in peer["reason"]

            first.signal(signal.SIGKILL)
            first.wait()
            dead = b.run("ping", "a", "-c", "1", "--timeout", "1", code=3).stderr
            assert "127.0.0.1:" in dead
            (peer,) = b.json("status")["peers"]
            assert peer["state"] == "discovered"
            assert "127.0.0.1:" in peer["reason"]
        # The same three without a daemon here.
        with a.up():
            b.run("ping", a_ticket(a), "-c", "1", code=4)
            a.run("allow", b.json("id")["node_id"], "b")
            b.run("ping", a_ticket(a), "-c", "1")
        b.run("ping", "a", "-c", "1", "--timeout", "1", code=3)


def a_ticket(machine: Machine) -> str:
    """A ticket of a running machine without an invite."""
    ticket = Ticket.decode(machine.json("invite")["ticket"])
    return Ticket(ticket.node_id, ticket.addresses).encode()


def test_invite_with_a_name(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    with a.up() as first, b.up():
        answer = a.json("invite", "--for", "gpu-b", "--scopes", "node", "--expires", "5m")
        assert answer["scopes"] == ["node"]
        assert b.run("join", answer["ticket"], "--name", "a").stdout.startswith("joined a")
        first.wait_for("joined +gpu-b ")
        assert a.run("ping", "gpu-b", "-c", "1")
        assert b.run("ping", "a", "-c", "1")


def test_in_the_background(machines: tuple[Machine, Machine]) -> None:
    a, b = machines
    told = a.run("up", "--detach", "--bind", "127.0.0.1:0").stdout
    try:
        ticket = next(line.split()[-1] for line in told.splitlines() if "mesh join " in line)
        status = a.json("status")
        assert f"Process {status['pid']} runs in the background" in told
        b.run("join", ticket, "--name", "a")
        b.run("ping", "a", "-c", "1")
        again = a.run("up", "--detach", "--bind", "127.0.0.1:0", code=4)
        assert "identity in use" in again.stderr
    finally:
        a.run("down")
    try:
        assert psutil.Process(status["pid"]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        pass
    a.run("status", code=3)
    assert "joined" in (a.home / "daemon.log").read_text()
