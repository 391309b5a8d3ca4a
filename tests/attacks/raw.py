"""A QUIC client without manners: stock aioquic on a bare socket, for playing a hostile peer."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import cbor2
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StreamDataReceived,
    StreamReset,
)

from auth import SecretKey, certificate_for

BOOT = bytes(16)


def hello(**changes: object) -> bytes:
    """The request frame of a well-formed hello."""
    value = {
        "versions": [1, 1],
        "features": [],
        "max_frame": 65536,
        "boot": BOOT,
        "credential": b"",
        **changes,
    }
    return framed(cbor2.dumps({"s": "mesh.hello", "v": value}, canonical=True))


def request(service: str, value: object = None) -> bytes:
    return framed(cbor2.dumps({"s": service, "v": value}, canonical=True))


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


class RawClient:
    def __init__(self, port: int, key: SecretKey | None, alpn: str) -> None:
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE
        )
        if key is not None:
            configuration.certificate = certificate_for(key)
            configuration.private_key = key.private
        self.quic = QuicConnection(configuration=configuration)
        self.target = ("127.0.0.1", port)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.events: list[QuicEvent] = []
        self.sent = 0
        self.received = 0

    # -- what came

    @property
    def handshaken(self) -> bool:
        return any(isinstance(event, HandshakeCompleted) for event in self.events)

    @property
    def ended(self) -> ConnectionTerminated | None:
        # The close event is certain long before aioquic reports it, three timeouts later.
        return self.quic._close_event

    def data(self, stream_id: int = 0) -> bytes:
        return b"".join(
            event.data
            for event in self.events
            if isinstance(event, StreamDataReceived) and event.stream_id == stream_id
        )

    def reply(self, stream_id: int = 0) -> object:
        data = self.data(stream_id)
        return cbor2.loads(data[4:]) if len(data) > 4 else None

    def was_reset(self, stream_id: int) -> bool:
        return any(
            isinstance(event, StreamReset) and event.stream_id == stream_id for event in self.events
        )

    # -- doing

    def start(self) -> None:
        self.quic.connect(self.target, now=time.monotonic())
        self.flush()

    def send(self, data: bytes, stream_id: int = 0, *, fin: bool = False) -> None:
        self.quic.send_stream_data(stream_id, data, end_stream=fin)
        self.flush()

    def close(self) -> None:
        self.quic.close()
        self.flush()

    def flush(self) -> None:
        for data, _ in self.quic.datagrams_to_send(time.monotonic()):
            self.sent += len(data)
            self.socket.sendto(data, self.target)

    def take(self) -> None:
        """Take what has arrived, without waiting."""
        while True:
            try:
                data = self.socket.recv(65536)
            except OSError:
                break
            self.received += len(data)
            self.quic.receive_datagram(data, self.target, time.monotonic())
        now = time.monotonic()
        due = self.quic.get_timer()
        if due is not None and due <= now:
            self.quic.handle_timer(now)
        while (event := self.quic.next_event()) is not None:
            self.events.append(event)
        self.flush()

    async def until(self, condition: Callable[[], object], timeout: float = 5.0) -> None:
        """Run the connection until `condition` holds."""
        with anyio.fail_after(timeout):
            while True:
                self.take()
                if condition():
                    return
                await anyio.sleep(0.003)

    async def run(self, seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await self.until(lambda: False, timeout=seconds + 1)


@asynccontextmanager
async def raw_client(
    port: int, key: SecretKey | None = None, *, alpn: str = "mesh/1", handshake: bool = True
) -> AsyncIterator[RawClient]:
    client = RawClient(port, key, alpn)
    try:
        client.start()
        if handshake:
            await client.until(lambda: client.handshaken or client.ended)
        yield client
    finally:
        client.socket.close()
