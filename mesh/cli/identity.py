"""Who this machine is and whom it lets in: ``init``, ``id``, ``allow``, ``deny``, ``invite``."""

from __future__ import annotations

import datetime
import re
import sys
import time
from collections.abc import Mapping
from typing import Annotated

import typer

from auth import (
    DEFAULT_SCOPES,
    IdentityError,
    NodeId,
    match_node,
)
from auth.grant import check_scopes
from auth.keys_file import remove_key, salvage
from mesh.cli.output import JsonOption, json_out
from mesh.cli.signals import held, interruptible
from mesh.errors import NotRunning
from mesh.home import Home
from mesh.peerbook import KnownPeer, check_free

__all__ = ["add_to", "duration"]

INVITE_LIFETIME = "1d"

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (init, show, allow, deny, invite):
        app.command("id" if command is show else command.__name__)(command)


def init(
    context: typer.Context,
    passphrase: Annotated[
        bool, typer.Option("--passphrase", help="Ask for a passphrase to protect the new key with.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Make this machine's key, unless it has one, and print its node id."""
    home: Home = context.obj
    fresh = not home.exists()
    if passphrase and not fresh:
        raise typer.BadParameter(f"there is a key already: {home.key_path}")
    protection = None
    if passphrase:
        with interruptible():
            protection = typer.prompt(
                "Passphrase", hide_input=True, confirmation_prompt=True, err=True
            )
    with held():
        node_id = home.create(passphrase=protection).node_id
    if json:
        json_out({"node_id": str(node_id), "home": str(home.path), "created": fresh})
        return
    print(node_id)
    if fresh:
        print(f"\nNew key in {home.key_path}. Whoever has it is this machine: keep it.")
        print("Next: mesh up")


def show(context: typer.Context, json: JsonOption = False) -> None:
    """Print this machine's node id."""
    home: Home = context.obj
    node_id = home.key().node_id
    if json:
        json_out({"node_id": str(node_id), "short": node_id.short, "home": str(home.path)})
    else:
        print(node_id)


def allow(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="ID", help="The whole node id (`mesh id`).")],
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A petname.")] = None,
    scopes: Annotated[str, typer.Option(help="What it may do, separated by commas.")] = ",".join(
        DEFAULT_SCOPES
    ),
    expires: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="As in 12h or 30d; for ever if not given."),
    ] = None,
) -> None:
    """Let a node in, by its key. A running daemon follows at once."""
    home: Home = context.obj
    # All is checked before a fresh home gets its key.
    chosen = _scopes(scopes)
    until = None if expires is None else time.time() + duration(expires)
    names: Mapping[NodeId, str | None] = {}
    if home.exists():
        entries = home.authorized_keys(home.key().node_id).entries()
        names = _names(home, {entry.node_id: entry.petname for entry in entries})
    node_id = _known_or_whole(node, names)
    name = name or names.get(node_id)
    if name is not None:
        check_free(name, node_id, names)
    with held():
        keys = home.authorized_keys(home.create().node_id)
        if name is not None:
            home.peers.remember(node_id, petname=name)
        entry = keys.add(node_id, name, scopes=chosen, expires=until)
    print(f"{KnownPeer(node_id, name).label} may use this machine for {', '.join(entry.scopes)}")


def deny(
    context: typer.Context,
    node: Annotated[str, typer.Argument(metavar="NAME|ID", help="Petname or node id.")],
) -> None:
    """Let a node in no longer, and forget it. A running daemon closes its connections."""
    home: Home = context.obj
    machine = home.key().node_id
    # Only what can be read: no other line of the file may stand in the way of a revocation.
    found = salvage(home.authorized_keys_path)
    names = _names(home, found.names)
    node_id = match_node(node, names)
    label = KnownPeer(node_id, names[node_id]).label
    with held():
        removed = remove_key(home.authorized_keys_path, node_id)
        home.peers.forget(node_id)
    print(f"{label} may no longer use this machine" if removed else f"{label} is forgotten")
    print(f"It may still let this machine in. To end that, too, on it: mesh deny {machine.short}")
    for complaint in salvage(home.authorized_keys_path).complaints:
        print(
            f"mesh: {home.authorized_keys_path} still has to be corrected: {complaint}",
            file=sys.stderr,
        )


def invite(
    context: typer.Context,
    petname: Annotated[
        str | None, typer.Option("--for", metavar="NAME", help="What to call the newcomer.")
    ] = None,
    scopes: Annotated[
        str, typer.Option(help="What the newcomer may do, separated by commas.")
    ] = ",".join(DEFAULT_SCOPES),
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="How long it can be used, as in 12h.")
    ] = INVITE_LIFETIME,
    json: JsonOption = False,
) -> None:
    """Print a ticket that lets one machine or program in, once."""
    home: Home = context.obj
    home.key()  # without one there is nothing to run either
    lifetime = duration(expires)
    running = home.running()
    if running is None:
        raise NotRunning(
            "making an invite",
            why="no daemon runs here, so that there is no address to put into the ticket",
            fix="Start one: mesh up",
        )
    chosen = _scopes(scopes)
    ticket = home.invite(running.addresses, petname=petname, scopes=chosen, lifetime=lifetime)
    if json:
        until = datetime.datetime.fromtimestamp(time.time() + lifetime, datetime.UTC)
        expires = until.isoformat(timespec="seconds")
        json_out({"ticket": ticket.encode(), "scopes": list(chosen), "expires": expires})
    else:
        print(ticket.encode())


def duration(text: str) -> float:
    """Read ``90s``, ``15m``, ``12h`` or ``30d`` as seconds.

    Raises:
        typer.BadParameter: it is none of them, or nothing at all.
    """
    match = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is no duration; one looks like 90s, 15m, 12h or 30d")
    return int(match[1]) * _UNITS[match[2]]


def _scopes(text: str) -> tuple[str, ...]:
    try:
        scopes = check_scopes(word.strip() for word in text.split(",") if word.strip())
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not scopes:
        raise typer.BadParameter(
            "--scopes names no scope; to let a node in no longer there is `mesh deny`"
        )
    return scopes


def _names(home: Home, in_file: Mapping[NodeId, str | None]) -> Mapping[NodeId, str | None]:
    names = dict(in_file)
    for node_id, petname in home.peers.petnames().items():
        names[node_id] = petname or names.get(node_id)
    return names


def _known_or_whole(text: str, names: Mapping[NodeId, str | None]) -> NodeId:
    try:
        return match_node(text, names)
    except IdentityError as error:
        typed = text.strip().lower()
        if any(str(n).startswith(typed) or n.short.startswith(typed) for n in names):
            raise  # it could be any of several
        if len(typed) > len("k7f3-9q2m"):
            return NodeId.parse(text)  # which says what is wrong with it
        raise IdentityError(
            f"node {text!r}",
            why=error.why,
            fix="Give its whole id: `mesh id` on that machine prints it. After `mesh deny` nothing "
            "shorter is known of a node.",
        ) from None
