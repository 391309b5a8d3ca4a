"""HTTP for the apps without a framework: one GET, one answer in JSON, and the end.

Knows no sockets and no loop: bytes go in and come out, and h11 knows the protocol.
"""

from __future__ import annotations

import json

import h11

import mesh
from examples.app import App

__all__ = ["MAX_READ", "REQUEST_SECONDS", "Exchange", "respond"]

REQUEST_SECONDS = 30.0
"""How long a request and its answer may take, a dial of a peer included."""

MAX_READ = 4096
"""Bytes to read at a time. A request in all is bounded by h11, at 16 KiB."""


class Exchange:
    """One request and its answer."""

    def __init__(self) -> None:
        self._connection = h11.Connection(h11.SERVER)

    def receive(self, data: bytes) -> str | None:
        """Take what the client sent; return the path that it asks for, once that is known.

        Raises:
            h11.RemoteProtocolError: it is not HTTP, or the client has hung up.
        """
        self._connection.receive_data(data)
        event = self._connection.next_event()
        if isinstance(event, h11.Request):
            return event.target.decode("ascii")
        if event is h11.NEED_DATA:
            return None
        raise h11.RemoteProtocolError("the client has hung up")

    def answer(self, status: int, value: object) -> bytes:
        """Return the bytes of an answer, after which the connection is to be closed."""
        body = json.dumps(value).encode()
        headers = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        events = (
            h11.Response(status_code=status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        return b"".join(self._connection.send(event) or b"" for event in events)


async def respond(app: App, path: str) -> tuple[int, object]:
    """Return the status and the value of the answer to a request."""
    match path.split("/"):
        case ["", "peers"]:
            return 200, [peer.as_message() for peer in app.node.peers()]
        case ["", "greet", name]:
            try:
                return 200, await app.greet_peer(name)
            except mesh.MeshError as error:
                return 502, {"error": str(error)}
        case ["", "notes"]:
            return 200, list(app.notes)
    return 404, {"error": "there is /peers, /greet/NAME and /notes"}
