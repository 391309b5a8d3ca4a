"""A node on a host of the lab: reads its settings as one line, says what happens line by line.

Settings: ``namespace`` (the host), ``backend`` (the event loop), ``bind``, ``join`` (tickets),
``connect_timeout``, ``resolve`` (whether to look the host's own name up first, as others do).
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

import anyio

from auth import MeshError, SecretKey, allow_any
from mesh import Node
from tests.lab.network import enter
from transport import EndpointConfig, format_address


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def resolves() -> bool:
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return False
    return True


async def main(settings: dict[str, Any]) -> None:
    config = EndpointConfig(
        bind=settings.get("bind", "[::]:0"), connect_timeout=settings.get("connect_timeout", 5.0)
    )
    node = Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=config, tensors=False
    )
    try:
        async with node:
            say(
                ticket=node.ticket().encode(),
                addresses=[format_address(address) for address in node.addresses],
                bound=format_address(node.endpoint.bound),
                resolves=settings.get("resolve", False) and resolves(),
            )
            for ticket in settings.get("join", ()):
                began = time.monotonic()
                try:
                    peer = await node.connect(ticket)
                    rtt = await peer.ping()
                except MeshError as error:
                    say(error=str(error), after=time.monotonic() - began)
                    continue
                after = time.monotonic() - began
                (status,) = (s for s in node.peers() if s.node_id == peer.node_id)
                say(rtt=rtt, path=status.path, state=status.state, after=after)
            await anyio.sleep_forever()
    except MeshError as error:
        say(error=str(error))


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    enter(given["namespace"])
    anyio.run(main, given, backend=given["backend"])
