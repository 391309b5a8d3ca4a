"""Other machines: ``peers``, ``ping``, ``join``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from auth import MeshError, Ticket
from mesh.cli.output import JsonOption, json_out, lane_text, rtt_text, table, time_text
from mesh.cli.running import ask
from mesh.cli.signals import run
from mesh.home import Home

__all__ = ["add_to"]

MARGIN = 5.0
"""Seconds that the daemon has beyond the time it was told, to say that it ran out."""


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (peers, ping, join):
        app.command()(command)


def peers(context: typer.Context, json: JsonOption = False) -> None:
    """List the machines that are known or let in.

    Needs no daemon; where one runs, it also says how it stands with them.
    """
    rows = _known(context.obj)
    if json:
        json_out({"peers": rows})
        return
    table(
        ("name", "id", "may use this machine for", "addresses", "last seen", "state"),
        [
            (
                row["petname"] or "-",
                row["short"],
                "nothing" if row["scopes"] is None else ", ".join(row["scopes"]),
                "\n".join(row["addresses"]) or "-",
                time_text(row["seen"]),
                row["state"] or "-",
            )
            for row in rows
        ],
        empty="No peers yet: `mesh invite` prints what another machine needs to join.",
    )


def ping(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="PEER", help="Petname, node id or ticket.")],
    count: Annotated[
        int, typer.Option("-c", "--count", min=1, max=100, help="How many round trips.")
    ] = 3,
    timeout: Annotated[
        float, typer.Option(min=0.001, max=60.0, help="Seconds for the dial and for each answer.")
    ] = 3.0,
    json: JsonOption = False,
) -> None:
    """Measure the round trip to a peer, or say why there is none."""
    home: Home = context.obj
    if home.running() is None:
        answer = run(_ping_alone, home, target, count, timeout)
    else:
        value = {"target": target, "count": count, "timeout": timeout}
        limit = timeout * (count + 2) + MARGIN
        answer = run(lambda: ask(home, "node.ping_peer", value, timeout=limit))
    if json:
        json_out(answer)
        return
    for rtt in answer["rtts"]:
        print(f"{answer['label']} at {answer['path']}: {rtt_text(rtt)}")
    if answer.get("lane") is not None:
        print(f"large tensors go by {lane_text(answer)}")


def join(
    context: typer.Context,
    ticket: Annotated[
        str, typer.Argument(metavar="TICKET", help="What `mesh up` or `mesh invite` printed there.")
    ],
    name: Annotated[
        str | None,
        typer.Option("--name", help="What to call that machine; default: its host name."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Enrol with another machine: each lets the other in.

    Joining twice does no harm. Undo it with `mesh deny`, on both.
    """
    home: Home = context.obj
    runs = home.running() is not None
    answer = run(enrol, home, Ticket.decode(ticket), name)
    if json:
        json_out(answer)
        return
    called = answer["petname"] or answer["short"]
    print(f"joined {called} ({answer['short']}): each of the two may now use the other")
    print(f"Next: {'' if runs else 'mesh up, and '}mesh ping {called}")


def _known(home: Home) -> list[dict[str, Any]]:
    keys = {entry.node_id: entry for entry in home.authorized_keys(home.key().node_id).entries()}
    book = {entry.node_id: entry for entry in home.peers.entries()}
    states = _states(home)
    rows = []
    for node_id in {**book, **keys}:
        key, known = keys.get(node_id), book.get(node_id)
        petname = (known and known.petname) or (key and key.petname)
        rows.append(
            {
                "node_id": str(node_id),
                "short": node_id.short,
                "petname": petname or None,
                "scopes": None if key is None else list(key.scopes),
                "expires": None if key is None else key.expires_at,
                "addresses": [] if known is None else [_text(a) for a in known.addresses],
                "seen": None if known is None else known.seen,
                "state": states.get(str(node_id)),
            }
        )
    return rows


def _states(home: Home) -> dict[str, str]:
    if home.running() is None:
        return {}
    try:
        answer = run(ask, home, "node.status", None)
    except MeshError:
        return {}
    return {peer["node_id"]: peer["state"] for peer in answer["peers"]}


def _text(address: tuple[str, int]) -> str:
    from transport import format_address

    return format_address(address)


async def _ping_alone(home: Home, target: str, count: int, timeout: float) -> Any:
    from mesh.node import Node
    from mesh.services import ping as ping_from

    async with Node.client(home=home) as node:
        return await ping_from(node, target, count, timeout)


async def enrol(home: Home, ticket: Ticket, name: str | None = None) -> dict[str, Any]:
    """Join the machine of `ticket`, by this machine's daemon if one runs; return who that is."""
    from mesh.daemon import join_without_daemon

    if home.running() is not None:
        answer: dict[str, Any] = await ask(
            home, "node.join", {"ticket": ticket.encode(), "petname": name}
        )
        return answer
    return (await join_without_daemon(home, ticket, name)).as_message()
