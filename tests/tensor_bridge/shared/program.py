"""A node with tensors in a process of its own: serves them, or moves them to and from another.

Run as ``python -m tests.tensor_bridge.shared.program SETTINGS``, a JSON object; it says one JSON
object a line, the first of them when its node is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import anyio
import torch

from auth import NodeId
from tensor_bridge import LaneConfig, TensorClient
from tests.lab.network import enter
from tests.programs import Program
from tests.tensor_bridge.nodes import node
from transport import PeerAddress

__all__ = ["hear", "start"]

CLONE_NEWNS = 0x20000


def start(backend: str, **settings: Any) -> Program:
    """Start one. Settings:

    ``bind``: where to listen, ``namespace``: the network namespace to be in, ``mounts``: whether to
    have a mount namespace of its own, ``user``: whom to run as; ``peer``: a node id, a host and a
    port, to move tensors of ``nbytes`` to and fro without end.
    """
    arguments = json.dumps({"backend": backend, **settings})
    return Program(["-m", __spec__.name, arguments], stdin=True)


def hear(program: Program) -> dict[str, Any]:
    """Return the next thing that it says."""
    assert program.stdout is not None
    line = program.stdout.readline()
    assert line, program.stderr and program.stderr.read()
    said = json.loads(line)
    assert isinstance(said, dict)
    return said


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(settings: dict[str, Any]) -> None:
    lanes = LaneConfig(shared_from=1)
    # Before there is a peer, who would take a blocked event loop for dead.
    tensor = torch.arange(settings.get("nbytes", 100_000)).to(torch.uint8)
    # Another user may not start this interpreter, and so has no endpoint process.
    place = {"placement": "loop"} if "user" in settings else {}
    async with node(lanes=lanes, bind=settings.get("bind", "127.0.0.1:0"), **place) as own:
        say(node=str(own.endpoint.node_id), port=own.endpoint.port)
        if "peer" not in settings:
            await anyio.sleep_forever()
        peer, host, port = settings["peer"]
        where = PeerAddress(NodeId.parse(peer), ((host, port),))
        connection = await own.endpoint.connect(where)
        client = TensorClient(connection, lanes=own.lanes)
        while True:
            ref = await client.put(tensor)
            assert torch.equal(await client.get(ref), tensor)
            await client.delete(ref)
            status = own.lanes.status(connection)
            say(lane=status.name, reason=status.reason)


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if "namespace" in order:
        enter(order["namespace"])
    if order.get("mounts"):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "a mount namespace")
    if "user" in order:
        os.setresuid(*[order["user"]] * 3)
    anyio.run(main, order, backend=order["backend"])
