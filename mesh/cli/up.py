"""``mesh up``: the daemon in this process or in the background, and what it prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address

import anyio

from auth import ADMIN, MeshError, NodeId, SocketAddress, Ticket
from mesh.cli.signals import INTERRUPTED, held, interruptible, wait_for_signal
from mesh.daemon import Daemon
from mesh.errors import DeadlineExceeded, HomeError, Superseded
from mesh.home import Home
from mesh.node import Node
from mesh.runfile import RunFile
from mesh.tasks import helpers
from transport import (
    Connection,
    EndpointConfig,
    EndpointEvent,
    PeerJoined,
    PeerLeft,
    PeerRefused,
    format_address,
)

__all__ = ["LINGER", "in_background", "in_foreground"]

LINGER = 1.0
"""Seconds to deliver what was accepted when the daemon leaves: it is gone within 3, all told."""

START_SECONDS = 60.0
"""How long a daemon in the background may take to start. Most of it is PyTorch, which takes half a
minute on a busy machine that reads it from the disk for the first time."""

_START_POLL = 0.05

# Windows has no SIGHUP.
_SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP"))


def in_foreground(
    home: Home, config: EndpointConfig, *, shared_memory: bool, devices: Sequence[str]
) -> int:
    """Run the daemon until a signal or ``mesh down``; return the exit code."""
    with held():
        home.create()
    # Made outside the loop: it imports torch.
    daemon = Daemon(home, config, shared_memory=shared_memory, devices=devices)
    return anyio.run(_serve, daemon)


def in_background(
    home: Home, config: EndpointConfig, *, shared_memory: bool, devices: Sequence[str]
) -> int:
    """Start the daemon as a process of its own and return once it can be reached."""
    home.create()
    command = [sys.executable, "-m", "mesh", "--home", str(home.path), "up", "--bind", config.bind]
    for address in config.advertise:
        command += ["--advertise", address]
    if not shared_memory:
        command.append("--no-shared-memory")
    for device in devices:
        command += ["--device", device]
    for option, path in (("--qlog", config.qlog), ("--key-log", config.key_log)):
        if path is not None:
            command += [option, path]
    home.log_path.touch(mode=0o600)
    offset = home.log_path.stat().st_size
    with home.log_path.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command with checked addresses
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | home.key_environment(),
        )
        try:
            with interruptible():
                running = _wait_for_start(home, process)
        except BaseException as error:
            process.terminate()
            if isinstance(error, DeadlineExceeded):
                _show_log(home, offset)
            raise
    if running is None:
        _show_log(home, offset)
        return process.returncode or 1
    _print_banner(home, running)
    print(f"\nProcess {running.pid} runs in the background and writes to {home.log_path}.")
    print("Stop it: mesh down")
    return 0


def _wait_for_start(home: Home, process: subprocess.Popen[bytes]) -> RunFile | None:
    """Return the run file of the daemon once it has written it, or None if it has ended."""
    deadline = time.monotonic() + START_SECONDS
    while (running := home.running()) is None or running.pid != process.pid:
        if process.poll() is not None:
            return None
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                "start of the daemon",
                after=START_SECONDS,
                why="it can't be reached yet",
                fix=f"See what it says: mesh up, without --detach. Its log is {home.log_path}",
            )
        time.sleep(_START_POLL)
    return running


def _show_log(home: Home, offset: int) -> None:
    """Pass on what the daemon has said since its log was `offset` bytes long."""
    sys.stderr.write(home.log_path.read_bytes()[offset:].decode(errors="replace"))


async def _serve(daemon: Daemon) -> int:
    code: int | None = None

    def interrupted(number: int) -> None:
        nonlocal code
        code = INTERRUPTED if number == signal.SIGINT else 0
        daemon.stop()

    node = daemon.node
    async with helpers() as tasks:
        await tasks.start(wait_for_signal, interrupted, _SIGNALS)
        async with daemon.running(
            observe=partial(_print_event, node), refused=partial(_print_refusal, node)
        ):
            running = RunFile.load(daemon.home.run_path)
            if running is None:
                raise HomeError(f"run file {daemon.home.run_path}", why="it is gone")
            if code is None:  # nobody was faster
                _print_banner(daemon.home, running)
                print("\nCtrl+C to leave.\n", flush=True)
                await daemon.stopped()
                _say("leaving")
    return code or 0


def _print_banner(home: Home, running: RunFile) -> None:
    addresses = running.addresses
    ticket = home.invite(addresses).encode()
    plain = Ticket(running.node_id, addresses).encode()
    print(f"node       {running.node_id}")
    print(f"listening  {', '.join(format_address(address) for address in addresses)}")
    if all(_is_loopback(address) for address in addresses):
        print("warning    loopback only: other machines can't reach this node.")
        print("           Give an address that they can: mesh up --bind ADDR:0, or --advertise")
    print("\nOn the other machine (works once, within a day; `mesh invite` prints another):")
    print(f"\n  mesh join {ticket}\n")
    print("Then, in Python on a machine that has joined:\n")
    # Not indented, so that it runs as it is pasted.
    print("import mesh")
    print(f'with mesh.blocking.Node.client("{plain}") as node: print(node.peers())', flush=True)


def _print_event(node: Node, event: EndpointEvent) -> None:
    match event:
        case PeerJoined(connection) if not _is_command(node, connection):
            _say(f"joined   {_who(node, connection)}")
        case PeerLeft(error=Superseded()):
            pass  # both sides dialled at once; the other connection stays
        case PeerLeft(connection, error) if not _is_command(node, connection):
            _say(f"left     {_who(node, connection)}: {error.why}")
        case PeerRefused(address, NodeId() as node_id, error):
            where = format_address(address)
            _say(f"refused  {node.label(node_id)} at {where}: {error.why}")
        case _:
            pass  # the command's own calls, and strangers who proved no key


def _print_refusal(node: Node, node_id: NodeId, error: MeshError) -> None:
    todo = "" if error.fix is None else f". {error.fix}"
    _say(f"refused  by {node.label(node_id)}: {error.why}{todo}")


def _is_command(node: Node, connection: Connection) -> bool:
    grant = connection.grant
    own = connection.peer.machine_id == node.node_id
    return own and grant is not None and grant.permits(ADMIN)


def _who(node: Node, connection: Connection) -> str:
    peer = connection.peer
    name = node.label(peer.machine_id)
    if peer.delegation is not None:
        name = f"program {peer.node_id.short} of {name}"
    return f"{name} at {connection.info.remote}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _is_loopback(address: SocketAddress) -> bool:
    return ip_address(address[0].partition("%")[0]).is_loopback
