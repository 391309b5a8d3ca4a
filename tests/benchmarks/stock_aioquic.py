"""The same work on aioquic as its users run it: its own asyncio client and server."""

from __future__ import annotations

import asyncio
import ssl
import time
from multiprocessing.connection import Connection as Pipe

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.asyncio import serve as aioquic_serve
from aioquic.quic.configuration import QuicConfiguration

from auth import SecretKey, certificate_for
from tests.benchmarks.harness import child

SMALL = b"x" * 64
CHUNK = 1 << 18


def _configuration(*, is_client: bool) -> QuicConfiguration:
    configuration = QuicConfiguration(is_client=is_client, alpn_protocols=["bench"])
    if is_client:
        configuration.verify_mode = ssl.CERT_NONE
    else:
        key = SecretKey.generate()
        configuration.certificate, configuration.private_key = certificate_for(key), key.private
    return configuration


def _handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def echo() -> None:
        data = bytearray()
        total = 0
        while part := await reader.read(CHUNK):
            total += len(part)
            if total <= len(SMALL):
                data += part
        writer.write(bytes(data) if total <= len(SMALL) else b"done")
        writer.write_eof()

    task = asyncio.get_running_loop().create_task(echo())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()


async def _serve(pipe: Pipe) -> None:
    server = await aioquic_serve(
        "127.0.0.1", 0, configuration=_configuration(is_client=False), stream_handler=_handle
    )
    pipe.send(server._transport.get_extra_info("sockname"))
    await asyncio.Event().wait()


def serve(pipe: Pipe) -> None:
    asyncio.run(_serve(pipe))


async def _exchange(protocol: QuicConnectionProtocol, data: bytes) -> float:
    began = time.perf_counter()
    reader, writer = await protocol.create_stream()
    writer.write(data)
    writer.write_eof()
    await reader.read()
    return time.perf_counter() - began


async def _run(where: tuple[str, int], count: int, data: bytes) -> list[float]:
    configuration = _configuration(is_client=True)
    async with connect(*where[:2], configuration=configuration) as protocol:
        return [await _exchange(protocol, data) for _ in range(count)]


def latencies(count: int) -> list[float]:
    with child(serve) as (where, _):
        return asyncio.run(_run(where, count, SMALL))


def throughput(nbytes: int) -> float:
    with child(serve) as (where, _):
        return nbytes / asyncio.run(_run(where, 1, bytes(nbytes)))[0]
