"""The daemon's life: ``up``, ``down``, ``status``."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Annotated, Any

import anyio
import typer

from auth import MeshError
from mesh.cli.output import JsonOption, bytes_text, json_out, lane_text, rtt_text, table
from mesh.cli.signals import run
from mesh.home import Home

__all__ = ["add_to"]

ANY_ADDRESS = "[::]:0"

STOP_SECONDS = 5.0
"""How long ``down`` waits for the daemon to be gone; it leaves within 3."""

_STOP_POLL = 0.05

# Whether the peer may use this machine, and this machine the peer; None is not known.
_USE = {
    (True, True): "both ways",
    (False, True): "only we may use it",
    (True, None): "it may use us",
    (False, None): "neither",
    (None, None): "-",
}


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (up, down, status):
        app.command()(command)


def up(
    context: typer.Context,
    bind: Annotated[
        str,
        typer.Option(
            metavar="WHERE",
            help="Where to listen: ADDR:PORT, or a choice of interfaces and networks such as "
            "'eth0:4433', '10.0.0.0/8:0' or '^lo,docker*'. One that comes down to several "
            "addresses listens on all of the host and tells peers those. Port 0 takes a free one. "
            "Default: every interface.",
            show_default=False,
        ),
    ] = ANY_ADDRESS,
    advertise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR:PORT",
            help="Address to tell others instead of those found here; may be repeated.",
            show_default=False,
        ),
    ] = None,
    shared_memory: Annotated[
        bool,
        typer.Option(
            "--shared-memory/--no-shared-memory",
            help="Move tensors through memory shared with peers on this host, or all over QUIC.",
        ),
    ] = True,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Offer hardware to peers that are granted the scope 'device', such as cpu or "
            "cuda:0; may be repeated.",
            show_default=False,
        ),
    ] = None,
    qlog: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write a trace of each connection there, for debugging (default: $QLOGDIR).",
            show_default=False,
        ),
    ] = None,
    key_log: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Append the TLS secrets of each connection there, for debugging: whoever reads "
            "them can read all traffic (default: $SSLKEYLOGFILE).",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Run in the background.")] = False,
) -> None:
    """Run this machine's peer daemon, until Ctrl+C or `mesh down`."""
    from mesh.cli import up as running
    from transport import EndpointConfig, parse_address, parse_bind

    for address in advertise or ():
        parse_address(address)
    parse_bind(bind).address()  # said before PyTorch is loaded, too
    config = EndpointConfig(
        bind=bind,
        advertise=tuple(advertise or ()),
        linger=running.LINGER,
        qlog=qlog,
        key_log=key_log,
    )
    start = running.in_background if detach else running.in_foreground
    offered = tuple(device or ())
    raise typer.Exit(start(context.obj, config, shared_memory=shared_memory, devices=offered))


def down(context: typer.Context) -> None:
    """Stop this machine's peer daemon.

    Its peers are told, and it is gone when this returns.
    """
    home: Home = context.obj
    if home.running() is None:
        print(f"no daemon runs in {home.path}")
        return
    run(_stop, home)
    print("stopped")


def status(context: typer.Context, json: JsonOption = False) -> None:
    """Show the daemon and how it stands with every peer.

    The state of a peer is the last step that worked, the reason is why the next one did not.
    """
    answer = run(ask, context.obj, "node.status", None)
    if json:
        json_out(answer)
        return
    print(f"node       {answer['node_id']}")
    print(f"listening  {', '.join(answer['addresses'])}")
    print(f"up         {answer['uptime']:.0f} s, process {answer['pid']}, {answer['version']}")
    print(f"devices    {', '.join(answer['devices'])}")
    print(f"tables     {', '.join(f'{name} {n}' for name, n in sorted(answer['tables'].items()))}")
    for warning in answer["warnings"]:
        print(f"warning    {warning}")
    table(
        ("peer", "state", "use", "path", "lane", "round trip", "sent", "received", "reason"),
        [_status_row(peer) for peer in answer["peers"]],
        empty="\nNo peers yet: `mesh invite` prints what another machine needs to join.",
    )


async def ask(home: Home, call: str, value: Any, *, timeout: float = 30.0) -> Any:
    """Make one call to the daemon of `home` and return its answer.

    Raises:
        NotRunning, Unreachable: there is none, or it does not answer.
        MeshError: what the call raised, or reported as its result.
    """
    from mesh.daemon import control
    from mesh.services import error_of

    async with control(home) as connection:
        answer = await connection.call(call, value, timeout=timeout)
    if isinstance(answer, dict) and "error" in answer:
        raise error_of(answer["error"])
    return answer


async def _stop(home: Home) -> None:
    running = home.running()
    if running is None:
        return
    try:
        await ask(home, "node.stop", None)
    except MeshError:
        # It holds its lock, so it lives under that process id, and does not answer.
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while home.running() is not None or _is_alive(running.pid):
        if time.monotonic() > deadline:
            from mesh.errors import DeadlineExceeded

            raise DeadlineExceeded(
                "stopping the daemon",
                after=STOP_SECONDS,
                why=f"process {running.pid} is still there",
                fix=f"Look at what it does, or end it by force: kill -9 {running.pid}",
            )
        await anyio.sleep(_STOP_POLL)


def _is_alive(pid: int) -> bool:
    import psutil

    try:
        # One that has ended and that nobody asks about stays in the table as a zombie.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _status_row(peer: dict[str, Any]) -> tuple[str, ...]:
    name = peer["short"] if peer["petname"] is None else f"{peer['petname']} ({peer['short']})"
    if peer["machine"] is not None:
        name += ", a program"
    return (
        name,
        peer["state"],
        _USE[peer["may_use_this"], peer["this_may_use"]],
        peer["path"] or ", ".join(peer["addresses"]) or "-",
        lane_text(peer),
        rtt_text(peer["rtt"]),
        bytes_text(peer["bytes_sent"]),
        bytes_text(peer["bytes_received"]),
        peer["reason"] or "",
    )
