"""The same work on aioquic as its users run it: its own asyncio client and server."""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import Any

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.asyncio import serve as aioquic_serve
from aioquic.quic.configuration import QuicConfiguration

from auth import SecretKey, certificate_for
from tests.benchmarks.harness import SMALL, Pipe, Site, filled, obey_async

CHUNK = 1 << 18
WINDOW = 64 << 20
IDLE_SECONDS = 600.0
"""It sends nothing by itself to keep a connection alive while the others have their turns."""


class StockAioquic:
    """One contender.

    Args:
        datagram: the size of its datagrams; None: everything as it is shipped, 1200 bytes.
        one_stream: small messages go to and fro on one stream, and not on one each.
        most: as `Contender.most`: it moves some 20 MB/s.
    """

    spins = False

    def __init__(
        self, datagram: int | None = None, *, one_stream: bool = False, most: float = 16 << 20
    ) -> None:
        self._datagram = datagram
        self._one_stream = one_stream
        self.most = most

    def missing(self) -> str | None:
        return None

    def serve(self, pipe: Pipe, site: Site) -> None:
        asyncio.run(self._serve(pipe, site))

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        asyncio.run(self._dial(pipe, where))

    async def _serve(self, pipe: Pipe, site: Site) -> None:
        server = await aioquic_serve(
            site.address,
            0,
            configuration=self._configuration(is_client=False),
            stream_handler=_handle,
        )
        pipe.send(server._transport.get_extra_info("sockname"))
        await asyncio.Event().wait()

    async def _dial(self, pipe: Pipe, where: tuple[str, int]) -> None:
        configuration = self._configuration(is_client=True)
        async with connect(*where[:2], configuration=configuration) as protocol:
            stream = await protocol.create_stream()

            async def small(count: int) -> list[float]:
                if self._one_stream:
                    return [await _round_trip(*stream) for _ in range(count)]
                return [await _exchange(protocol, SMALL) for _ in range(count)]

            async def bulk(nbytes: int) -> float:
                return await _exchange(protocol, filled(nbytes))

            await obey_async(pipe, {"small": small, "bulk": bulk})

    def _configuration(self, *, is_client: bool) -> QuicConfiguration:
        configuration = QuicConfiguration(
            is_client=is_client, alpn_protocols=["bench"], idle_timeout=IDLE_SECONDS
        )
        if self._datagram is not None:
            configuration.max_datagram_size = self._datagram
            configuration.max_data = configuration.max_stream_data = WINDOW
        if is_client:
            configuration.verify_mode = ssl.CERT_NONE
        else:
            key = SecretKey.generate()
            configuration.certificate, configuration.private_key = certificate_for(key), key.private
        return configuration


def _handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    async def answer() -> None:
        total = 0
        while part := await reader.read(CHUNK):
            total += len(part)
            if total <= len(SMALL) or len(part) == len(SMALL):
                writer.write(part)
        writer.write(b"done")
        writer.write_eof()

    task = asyncio.get_running_loop().create_task(answer())
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Task[None]] = set()


async def _exchange(protocol: QuicConnectionProtocol, data: bytes | bytearray) -> float:
    began = time.perf_counter()
    reader, writer = await protocol.create_stream()
    writer.write(data)
    writer.write_eof()
    await reader.read()
    return time.perf_counter() - began


async def _round_trip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> float:
    began = time.perf_counter()
    writer.write(SMALL)
    await reader.readexactly(len(SMALL))
    return time.perf_counter() - began
