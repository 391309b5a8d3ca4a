"""Blocking sockets: TCP as the kernel has it, and Python's own TLS 1.3 over it."""

from __future__ import annotations

import contextlib
import math
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from auth import SecretKey, certificate_for
from tests.benchmarks.harness import SMALL, Pipe, Site, filled, obey

PIECE = 1 << 18
DONE = b"done"
_TCP_CONGESTION = 13


class Tcp:
    """One contender, with or without TLS, with the system's congestion control or another."""

    spins = False

    def __init__(
        self, *, is_tls: bool = False, congestion: str | None = None, most: float = math.inf
    ) -> None:
        self.most = most
        self._is_tls = is_tls
        self._congestion = congestion

    def missing(self) -> str | None:
        if self._congestion is None:
            return None
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
        if known.exists() and self._congestion in known.read_text().split():
            return None
        return f"this kernel has no TCP {self._congestion}"

    def serve(self, pipe: Pipe, site: Site) -> None:
        with socket.create_server((site.address, 0)) as listener:
            pipe.send(listener.getsockname())
            accepted, _ = listener.accept()
            with self.wrapped(accepted, server=True) as connection:
                self._answer(connection)

    def dial(self, pipe: Pipe, site: Site, where: Any) -> None:
        raw = socket.create_connection(where)
        if self._congestion is not None:
            raw.setsockopt(socket.IPPROTO_TCP, _TCP_CONGESTION, self._congestion.encode())
        with self.wrapped(raw, server=False) as connection:
            obey(
                pipe,
                lambda count: [_exchange(connection, SMALL, len(SMALL)) for _ in range(count)],
                lambda nbytes: _exchange(connection, filled(nbytes), len(DONE)),
            )

    @contextlib.contextmanager
    def wrapped(self, raw: socket.socket, *, server: bool) -> Iterator[socket.socket]:
        """Have the connection for the block, with TLS where that is asked for."""
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._is_tls:
            with raw:
                yield raw
            return
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        if server:
            _prove(context)
        else:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        with context.wrap_socket(raw, server_side=server) as connection:
            yield connection

    def _answer(self, connection: socket.socket) -> None:
        while header := connection.recv(8):
            while len(header) < 8:
                header += connection.recv(8 - len(header))
            size = int.from_bytes(header, "big")
            room = memoryview(filled(size))
            done = 0
            while done < size:
                done += connection.recv_into(room[done:], min(PIECE, size - done))
            connection.sendall(room if size == len(SMALL) else DONE)


def _exchange(connection: socket.socket, data: bytes | bytearray, answer: int) -> float:
    began = time.perf_counter()
    header = len(data).to_bytes(8, "big")
    if len(data) == len(SMALL):
        connection.sendall(header + data)
    else:
        connection.sendall(header)
        connection.sendall(data)
    got = 0
    while got < answer:
        got += len(connection.recv(answer - got))
    return time.perf_counter() - began


def _prove(context: ssl.SSLContext) -> None:
    with tempfile.TemporaryDirectory() as home:
        key, path = SecretKey.generate(), Path(home) / "both.pem"
        path.write_bytes(
            key.private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
            + certificate_for(key).public_bytes(serialization.Encoding.PEM)
        )
        context.load_cert_chain(path)
