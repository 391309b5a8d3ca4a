"""A peer in a program of your own: what `mesh up` runs, and one call beside it."""

import contextlib
import sys

import anyio

import mesh
from transport import Incoming


async def main() -> None:
    home = sys.argv[1] if len(sys.argv) > 1 else None
    async with mesh.Node.peer(home) as node:

        async def greet(request: Incoming) -> str:
            return f"hello {request.peer.node_id.short}, from {node.node_id.short}"

        node.endpoint.register_call("greet", greet, scope="node")
        print(node.invite("first-client").encode(), flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        anyio.run(main)  # or backend="trio"
