"""The two honest processes: one that is flooded, and one that moves tensors to it.

Each is told what to do by lines of JSON on its standard input, and answers each with another.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import torch

from auth import (
    AccessRequest,
    ConnectRequest,
    Denial,
    Grant,
    NodeId,
    SecretKey,
    TokenBook,
    allow_any,
)
from tensor_bridge import TensorClient, TensorService, TensorStore
from transport import Endpoint, EndpointConfig, Incoming, PeerAddress, socket_filter
from transport.cbor import CborValue
from transport.protocol.newcomers import StrangerBudget

TENSOR_BYTES = 4 << 20
"""Moved again and again for the length of a round."""

ALL = Grant(frozenset({"*"}))

Commands = Callable[[dict[str, object]], Awaitable[object]]


class Known:
    """A policy that costs nothing: it is not what is measured."""

    def __init__(self, known: set[NodeId]) -> None:
        self._known = known

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        if not isinstance(request, ConnectRequest):
            return request.grant
        if request.peer.node_id in self._known:
            return ALL
        return Denial("stranger", "nobody knows you")


async def victim(known: list[str]) -> None:
    """Serve tensors and calls to the nodes in `known`, and nothing to others."""
    authorizer = Known({NodeId.parse(text) for text in known})
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(
            Endpoint(SecretKey.generate(), authorizer, EndpointConfig(bind="127.0.0.1:0"))
        )
        service = TensorService(endpoint, TensorStore(), TokenBook(), authorizer)
        await stack.enter_async_context(service)

        async def work(request: Incoming) -> CborValue:
            return request.value

        async def wait(request: Incoming) -> None:
            async for _ in request.stream:
                pass

        endpoint.register_call("work", work, scope="work")
        endpoint.register_service("wait", wait, scope="work")
        print(json.dumps({"port": endpoint.port, "id": str(endpoint.node_id)}), flush=True)

        async def answer(_: dict[str, object]) -> object:
            return {
                "rss": resident(),
                "drops": endpoint.drops,
            }

        await obey(answer)


async def friend(key: str, target: str, port: int) -> None:
    """Move tensors to the victim, for as long as each line says."""
    secret = SecretKey.from_bytes(bytes.fromhex(key))
    tensor = torch.arange(TENSOR_BYTES // 4, dtype=torch.int32)
    async with Endpoint(secret, allow_any(), EndpointConfig(bind="127.0.0.1:0")) as endpoint:
        address = PeerAddress(NodeId.parse(target), (("127.0.0.1", port),))
        connection = await endpoint.connect(address)
        client = TensorClient(connection)
        print(json.dumps({"id": str(endpoint.node_id)}), flush=True)

        async def move(order: dict[str, object]) -> object:
            began, moved = time.perf_counter(), 0
            seconds = order["seconds"]
            assert isinstance(seconds, float)
            while (took := time.perf_counter() - began) < seconds:
                reference = await client.put(tensor, timeout=20)
                await client.delete(reference)
                moved += TENSOR_BYTES
            return {"rate": moved / took, "open": connection.is_open, "rss": resident()}

        await obey(move)


async def obey(answer: Commands) -> None:
    """Answer each line of the standard input, until it ends."""
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        print(json.dumps(await answer(json.loads(line))), flush=True)


def resident() -> int:
    """Bytes of memory that this process holds now; what it holds no more is given back first."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def disarm() -> None:
    """Take the defences against floods out of this process: the control of the tests."""
    socket_filter.attach = lambda *_: False
    StrangerBudget.has_time = lambda *_: True  # type: ignore[method-assign]


if __name__ == "__main__":
    logging.disable()  # what a flood writes to the log is not what is measured
    torch.set_num_threads(1)
    role, *arguments = sys.argv[1:]
    if role == "disarmed victim":
        disarm()
    if role != "friend":
        anyio.run(victim, arguments)
    else:
        anyio.run(friend, arguments[0], arguments[1], int(arguments[2]))
