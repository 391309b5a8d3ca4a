"""An app's side of the mesh, the same under any loop: its policy, a call, a protocol of its own."""

import argparse
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import mesh
from auth import AccessRequest, Denial, load_or_create_key
from transport import CborValue, Connection, Incoming


class Members:
    """The app's own policy: members get in, everybody else is told why not."""

    def __init__(self, node_ids: list[str]) -> None:
        self.node_ids = {mesh.NodeId.parse(text) for text in node_ids}
        scopes = frozenset({"node", "app", "tensor:put", "tensor:read", "tensor:delete"})
        self.grant = mesh.Grant(scopes)

    async def authorize(self, request: AccessRequest) -> mesh.Grant | Denial:
        """Answer for a connection, and again for each request on it."""
        # A program goes by its machine, and gets no more than its machine has said. On an ALPN of
        # the app's own it goes by its own key.
        if request.peer.machine_id in self.node_ids:
            return self.grant
        return Denial("not-a-member", "this app is for its members, and you are none")


class App:
    """One node, shared by all who use the app: one connection with each peer, whoever asked."""

    def __init__(self, node: mesh.Node) -> None:
        self.node = node
        self.notes: deque[str] = deque(maxlen=100)
        node.endpoint.register_call("greet", self.greet, scope="app")
        node.endpoint.register_alpn("notes/1", self.take_notes)

    async def greet(self, request: Incoming) -> CborValue:
        """Answer the call ``greet``."""
        return f"hello {request.peer}"

    async def take_notes(self, connection: Connection) -> None:
        """Serve one connection of the protocol ``notes/1``: a note on each stream."""
        while True:
            async with await connection.accept_raw_stream() as stream:
                self.notes.append(str(await stream.receive_message(max_size=1000)))
                await stream.send_message("noted")

    async def greet_peer(self, name: str) -> CborValue:
        """Call ``greet`` of a peer, named by a ticket, its node id or the beginning of that."""
        peer = await self.node.connect(name)
        return await (await peer.connection()).call("greet")


@asynccontextmanager
async def open_app(options: argparse.Namespace) -> AsyncIterator[App]:
    async with mesh.Node.embedded(
        key=load_or_create_key(options.key),
        authorizer=Members(options.members),
        config=mesh.EndpointConfig(bind=options.bind),
    ) as node:
        app = App(node)
        print(node.ticket().encode(), flush=True)
        yield app
