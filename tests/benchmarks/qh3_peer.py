"""qh3: QUIC in Rust, reached from Python, on a plain poll loop with segmentation offload."""

from __future__ import annotations

import math
import select
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

from aioquic.buffer import Buffer
from aioquic.quic.packet import pull_quic_header
from cryptography.hazmat.primitives import serialization
from qh3.quic.configuration import QuicConfiguration
from qh3.quic.connection import QuicConnection

from auth import SecretKey, certificate_for
from tests.benchmarks.harness import SMALL, Pipe, Site, filled

WINDOW = 64 << 20
SEND_AHEAD = 2 << 20
IDLE_SECONDS = 600.0
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
_ED25519 = 0x0807


def _configuration(*, is_client: bool, datagram: int) -> QuicConfiguration:
    configuration = QuicConfiguration(
        is_client=is_client,
        alpn_protocols=["bench"],
        max_datagram_size=datagram,
        max_data=WINDOW,
        max_stream_data=WINDOW,
        verify_mode=0,
        idle_timeout=IDLE_SECONDS,
    )
    configuration.signature_algorithms = [_ED25519]
    configuration.server_name = "localhost"
    if not is_client:
        with tempfile.TemporaryDirectory() as home:
            key = SecretKey.generate()
            certificate, private = Path(home) / "c.pem", Path(home) / "k.pem"
            certificate.write_bytes(certificate_for(key).public_bytes(serialization.Encoding.PEM))
            private.write_bytes(
                key.private.private_bytes(
                    serialization.Encoding.PEM,
                    serialization.PrivateFormat.PKCS8,
                    serialization.NoEncryption(),
                )
            )
            configuration.load_cert_chain(str(certificate), str(private))
    return configuration


class _Loop:
    """One connection on one socket."""

    def __init__(self, address: str, datagram: int) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, 0))
        self.socket.setblocking(False)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self.socket.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        self.quic: QuicConnection | None = None
        self.got: dict[int, int] = {}
        self.data: dict[int, bytes] = {}
        self.ended: list[int] = []
        self.is_connected = False
        self.is_over = False
        self._datagram = datagram
        self._buffer = bytearray(65536)
        self._poll = select.poll()
        self._poll.register(self.socket, select.POLLIN)

    def watch(self, pipe: Pipe) -> None:
        """Let `step` return when an order has come, too."""
        self._poll.register(pipe, select.POLLIN)

    def step(self, seconds: float = 1.0) -> None:
        quic = self.quic
        timer = None if quic is None else quic.get_timer()
        if timer is not None:
            seconds = max(0.0, min(seconds, timer - time.monotonic()))
        if self._poll.poll(seconds * 1000):
            self._receive()
        quic = self.quic
        if quic is None:
            return
        now = time.monotonic()
        if timer is not None and now >= timer:
            quic.handle_timer(now)
        while (event := quic.next_event()) is not None:
            self._take(event)
        self.flush()

    def _receive(self) -> None:
        for _ in range(16):
            try:
                size, ancillary, _, source = self.socket.recvmsg_into([self._buffer], 64)
            except BlockingIOError:
                return
            segment = size
            if ancillary:
                segment = min(size, int.from_bytes(ancillary[0][2][:4], "little"))
            data = bytes(self._buffer[:size])
            if self.quic is None:
                header = pull_quic_header(Buffer(data=data[:segment]), host_cid_length=8)
                self.quic = QuicConnection(
                    configuration=_configuration(is_client=False, datagram=self._datagram),
                    original_destination_connection_id=header.destination_cid,
                )
            self.quic.receive_gro_buffer(data, segment, source, time.monotonic())

    def _take(self, event: Any) -> None:
        name = type(event).__name__
        if name == "HandshakeCompleted":
            self.is_connected = True
        elif name == "StreamDataReceived":
            stream = event.stream_id
            self.got[stream] = self.got.get(stream, 0) + len(event.data)
            if self.got[stream] <= len(SMALL):
                self.data[stream] = self.data.get(stream, b"") + event.data
            if event.end_stream:
                self.ended.append(stream)
        elif name == "ConnectionTerminated":
            self.is_over = True

    def flush(self) -> None:
        assert self.quic is not None
        datagrams = self.quic.datagrams_to_send(now=time.monotonic())
        first, count = 0, len(datagrams)
        while first < count:
            data, target = datagrams[first]
            size, last = len(data), first + 1
            most = min(first + min(64, 65000 // size), count)
            while last < most and len(datagrams[last][0]) == size:
                last += 1
            if last < most and len(datagrams[last][0]) < size:
                last += 1
            batch = [each for each, _ in datagrams[first:last]]
            control = (
                [(_SOL_UDP, _UDP_SEGMENT, struct.pack("=H", size))] if last - first > 1 else []
            )
            try:
                self.socket.sendmsg(batch, control, 0, target)
            except BlockingIOError:
                select.select([], [self.socket], [], 0.02)
                continue
            first = last


class Qh3:
    """One contender, with the size of its datagrams."""

    most = math.inf
    spins = False

    def __init__(self, datagram: int = 1452) -> None:
        self._datagram = datagram

    def missing(self) -> str | None:
        return None

    def serve(self, pipe: Pipe, site: Site) -> None:
        loop = _Loop(site.address, self._datagram)
        pipe.send(loop.socket.getsockname())
        while not loop.is_over:
            loop.step()
            while loop.ended:
                stream = loop.ended.pop()
                answer = loop.data.pop(stream) if loop.got[stream] == len(SMALL) else b"done"
                assert loop.quic is not None
                loop.quic.send_stream_data(stream, answer, end_stream=True)
                loop.flush()

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        loop = _Loop(site.address, self._datagram)
        quic = loop.quic = QuicConnection(
            configuration=_configuration(is_client=True, datagram=self._datagram)
        )
        quic.connect(where, now=time.monotonic())
        loop.flush()
        while not loop.is_connected:
            loop.step()
        pipe.send("ready")
        loop.watch(pipe)
        while True:
            loop.step()
            if pipe.poll():
                order, number = pipe.recv()
                if order == "small":
                    pipe.send([_exchange(loop, quic, SMALL) for _ in range(number)])
                else:
                    pipe.send(_exchange(loop, quic, filled(number)))


def _exchange(loop: _Loop, quic: QuicConnection, data: bytes | bytearray) -> float:
    began = time.perf_counter()
    stream, view, position = quic.get_next_available_stream_id(), memoryview(data), 0
    while stream not in loop.ended:
        while position < len(data) and quic.get_send_buffer_size() < SEND_AHEAD:
            stop = min(position + (1 << 20), len(data))
            quic.send_stream_data(stream, bytes(view[position:stop]), end_stream=stop == len(data))
            position = stop
        loop.flush()
        loop.step()
    return time.perf_counter() - began
