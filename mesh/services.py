"""The calls that every node answers: what it is, how it stands with its peers.

==================  =======  ===================================================================
call                scope    answers
==================  =======  ===================================================================
``node.info``       node     version, boot, host, uptime, devices, counts
``node.announce``   node     takes the caller's addresses, answers this node's: both can dial then
``node.find``       node     the addresses of a peer that is connected here; see mesh.finding
``node.status``     admin    the above, every peer with state, path, round trip, bytes; tables
``node.ping_peer``  admin    pings a peer from here: path and round trip, or the error
``node.refs``       admin    the remote references here and at connected peers; see mesh.rpc
==================  =======  ===================================================================
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from auth import ADMIN, IdentityError, MeshError, NodeId, SocketAddress
from mesh.version import version
from transport import CborValue, Connection, Incoming, format_address, parse_address
from transport.codes import decode_error, encode_error, plain_text
from transport.errors import AddressError, ProtocolError

if TYPE_CHECKING:
    from mesh.node import Node

__all__ = [
    "MAX_FOUND",
    "announce",
    "error_of",
    "error_value",
    "parse_announcement",
    "parse_ping",
    "ping",
    "register_services",
]

SCOPE = "node"
"""What a peer needs to ask a node about itself; authorized keys have it by default."""

MAX_PEERS = 1000
"""Peers in one status answer, open sessions first: some 400 bytes each within a frame of 1 MiB."""

MAX_ADDRESSES = 16
"""Addresses that a peer may announce, as many as a ticket carries."""

MAX_FOUND = 4
"""Addresses told of another node."""

_COUNTS = ("connections", "tensors")

MAX_PINGS = 100
MAX_PING_TIMEOUT = 60.0


def register_services(node: Node) -> None:
    """Register the calls on the endpoint of `node`."""
    calls = {
        "node.info": (_info, SCOPE),
        "node.announce": (_take_announcement, SCOPE),
        "node.find": (_find, SCOPE),
        "node.status": (_status, ADMIN),
        "node.ping_peer": (_ping_peer, ADMIN),
        "node.refs": (_refs, ADMIN),
    }
    for name, (answer, scope) in calls.items():
        node.endpoint.register_call(name, functools.partial(answer, node), scope=scope)


async def announce(node: Node, connection: Connection, *, stays: bool = True) -> str:
    """Tell a machine where this one can be dialled, learn the same of it, and save that.

    Args:
        node: this machine's node.
        connection: with the other machine.
        stays: whether this node can still be dialled after this program.

    Returns:
        What the other calls its host.

    Raises:
        AccessDenied: the peer does not grant the scope ``node``.
        MeshError: the connection broke meanwhile.
    """
    reply = await connection.call("node.announce", _announcement(node, stays=stays))
    await _learn(node, connection, reply)
    host = reply.get("host") if isinstance(reply, dict) else None
    return host if isinstance(host, str) else ""


async def ping(node: Node, target: str, count: int, timeout: float) -> dict[str, CborValue]:
    """Ping a peer and return who it is, the path, the round trips in seconds, and the lane.

    Args:
        node: from where.
        target: as in `Node.connect`.
        count: how often.
        timeout: seconds for the dial, and for each answer.

    Raises:
        MeshError: as `Node.connect` and `Peer.ping`.
    """
    peer = await node.connect(target, timeout=timeout)
    rtts: list[CborValue] = [await peer.ping(timeout=timeout) for _ in range(count)]
    connection = await peer.connection()
    lane = None
    with anyio.move_on_after(timeout):
        lane = await node.lane(connection)
    return {
        "node_id": str(peer.node_id),
        "label": peer.label,
        "path": connection.info.remote,
        "rtts": rtts,
        "lane": None if lane is None else lane.name,
        "lane_reason": None if lane is None else lane.reason,
    }


def parse_announcement(value: CborValue) -> tuple[list[SocketAddress], str]:
    """Return where a node says that it can be dialled, and what it calls its host, if anything.

    Raises:
        ProtocolError: it gives no addresses, or something else for one.
    """
    fields = value if isinstance(value, dict) else {}
    told, host = fields.get("addresses"), fields.get("host")
    if not isinstance(told, list):
        raise ProtocolError("node.announce", why="it has no addresses")
    try:
        addresses = [parse_address(text) for text in told[:MAX_ADDRESSES] if isinstance(text, str)]
    except AddressError as error:
        raise ProtocolError("node.announce", why=error.why) from error
    return addresses, host if isinstance(host, str) else ""


def parse_ping(value: CborValue) -> tuple[str, int, float]:
    """Return whom to ping, how often, and the seconds that each answer may take.

    Raises:
        ProtocolError: something is missing or out of bounds.
    """
    match value:
        case {"target": str(target), "count": int(count), "timeout": float(timeout)} if (
            0 < count <= MAX_PINGS and 0 < timeout <= MAX_PING_TIMEOUT
        ):
            return target, count, timeout
    raise ProtocolError("node.ping_peer", why="its parameters are malformed")


def error_value(error: MeshError) -> dict[str, CborValue]:
    """Return an error as it travels inside an answer, with the peer that it was about."""
    return encode_error(error) | {"peer": error.peer, "after": error.after}


def error_of(value: CborValue) -> MeshError:
    """Return the error that `error_value` was given."""
    fields = value if isinstance(value, dict) else {}
    peer, after = fields.get("peer"), fields.get("after")
    return decode_error(
        value,
        peer=plain_text(peer) if isinstance(peer, str) else None,
        after=float(after) if isinstance(after, int | float) else None,
    )


async def _info(node: Node, request: Incoming) -> CborValue:
    return _describe(node)


async def _status(node: Node, request: Incoming) -> CborValue:
    # Who asks is there only to ask.
    peers = [status for status in node.peers() if status.node_id != request.peer.node_id]
    peers.sort(key=lambda status: status.path is None)
    return _describe(node) | {
        "pid": os.getpid(),
        "addresses": [format_address(address) for address in node.addresses],
        "warnings": list(node.endpoint.warnings),
        "tables": dict(node.table_sizes()),
        "peers": [status.as_message() for status in peers[:MAX_PEERS]],
        "peers_left_out": max(0, len(peers) - MAX_PEERS),
    }


async def _find(node: Node, request: Incoming) -> CborValue:
    try:
        sought = NodeId.parse(request.value if isinstance(request.value, str) else "")
    except IdentityError as error:
        raise ProtocolError("node.find", why="it names no node") from error
    connection = node.endpoint.connection(sought)
    if connection is None:  # whoever asks knows it as well
        return {"addresses": []}
    told = node.directory.addresses(sought)
    addresses = tuple(dict.fromkeys((connection.remote_address, *told)))[:MAX_FOUND]
    return {"addresses": [format_address(address) for address in addresses]}


async def _ping_peer(node: Node, request: Incoming) -> CborValue:
    target, count, timeout = parse_ping(request.value)
    try:
        return await ping(node, target, count, timeout)
    except MeshError as error:
        return {"error": error_value(error)}


async def _refs(node: Node, request: Incoming) -> CborValue:
    from mesh.rpc.refs.listing import references_around  # imports torch

    return await references_around(node, node.agent, request.peer.node_id)


async def _take_announcement(node: Node, request: Incoming) -> CborValue:
    # A program's addresses end with it; only machines are worth remembering.
    if request.peer.delegation is None:
        await _learn(node, request.connection, request.value, names=True)
    return _announcement(node)


def _describe(node: Node) -> dict[str, CborValue]:
    return {
        "version": version(),
        "node_id": str(node.node_id),
        "boot": node.endpoint.boot.hex(),
        "host": socket.gethostname(),
        "uptime": time.time() - node.started,
        "devices": list(_devices()),
        "counts": {name: count for name, count in node.table_sizes().items() if name in _COUNTS},
    }


def _announcement(node: Node, *, stays: bool = True) -> dict[str, CborValue]:
    known = node.addresses if stays else ()
    addresses: list[CborValue] = [format_address(address) for address in known]
    return {"addresses": addresses, "host": socket.gethostname()}


async def _learn(
    node: Node, connection: Connection, announcement: CborValue, *, names: bool = False
) -> None:
    addresses, host = parse_announcement(announcement)
    if addresses:
        # One socket dials and listens, so that the address a peer came from is one to dial, too.
        addresses.insert(0, parse_address(connection.info.remote))
    await anyio.to_thread.run_sync(
        node.directory.told,
        connection.peer.node_id,
        tuple(dict.fromkeys(addresses)),
        host if names else "",
    )


def _devices() -> list[str]:
    torch = sys.modules.get("torch")  # Nothing here is worth loading it for.
    if torch is None or not torch.cuda.is_available():
        return ["cpu"]
    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
