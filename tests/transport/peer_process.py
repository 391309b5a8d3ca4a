"""A peer in a process of its own: reads its key, prints its port, serves until it is killed."""

from __future__ import annotations

import sys

import anyio

from auth import SecretKey, allow_any
from tests.placements import placed
from transport import Endpoint, EndpointConfig, Incoming
from transport.cbor import CborValue


async def echo(request: Incoming) -> CborValue:
    return request.value


async def hang(request: Incoming) -> CborValue:
    await anyio.sleep_forever()
    return None


async def sleep(request: Incoming) -> None:
    await request.stream.send(b"")
    await anyio.sleep_forever()


async def sink(request: Incoming) -> None:
    async for _ in request.stream:
        pass


async def main() -> None:
    key = SecretKey.from_bytes(bytes.fromhex(sys.stdin.readline()))
    config = EndpointConfig(bind=f"127.0.0.1:{sys.argv[1]}", **placed())
    async with Endpoint(key, allow_any(), config) as node:
        node.register_call("echo", echo, scope="x")
        node.register_call("hang", hang, scope="x")
        node.register_service("sink", sink, scope="x")
        node.register_service("sleep", sleep, scope="x")
        print(node.port, flush=True)
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main)
