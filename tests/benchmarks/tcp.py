"""Blocking sockets: TCP as the kernel has it, and Python's own TLS 1.3 over it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from auth import SecretKey, certificate_for
from tests.benchmarks.harness import child

SMALL = b"x" * 64
PIECE = 1 << 18


def serve(pipe: Pipe, is_tls: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        while True:
            accepted, _ = listener.accept()
            with _wrapped(accepted, is_tls, server=True) as connection:
                _serve_one(connection)


def _serve_one(connection: socket.socket) -> None:
    while header := connection.recv(8, *_WAIT(connection)):
        size = int.from_bytes(header, "big")
        room = memoryview(bytearray(size))
        done = 0
        while done < size:
            done += connection.recv_into(room[done:], min(PIECE, size - done))
        connection.sendall(room if size == len(SMALL) else b"done")


def _WAIT(connection: socket.socket) -> tuple[int, ...]:
    """TLS sockets take no flags, and give whole records anyway."""
    return () if isinstance(connection, ssl.SSLSocket) else (socket.MSG_WAITALL,)


@contextlib.contextmanager
def _wrapped(raw: socket.socket, is_tls: bool, *, server: bool) -> Iterator[socket.socket]:
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not is_tls:
        with raw:
            yield raw
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    if server:
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
    else:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(raw, server_side=server) as connection:
        yield connection


class Tcp:
    """One contender, with or without TLS."""

    def __init__(self, *, is_tls: bool) -> None:
        self._is_tls = is_tls

    def latencies(self, count: int) -> list[float]:
        with self._connected() as connection:
            return [self._exchange(connection, SMALL, len(SMALL)) for _ in range(count)]

    def throughput(self, nbytes: int) -> float:
        data = bytes(nbytes)
        with self._connected() as connection:
            self._exchange(connection, data, 4)
            return nbytes / self._exchange(connection, data, 4)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        with (
            child(serve, self._is_tls) as (where, _),
            _wrapped(socket.create_connection(where), self._is_tls, server=False) as connection,
        ):
            yield connection

    def _exchange(self, connection: socket.socket, data: bytes, answer: int) -> float:
        began = time.perf_counter()
        connection.sendall(len(data).to_bytes(8, "big"))
        connection.sendall(data)
        got = 0
        while got < answer:
            got += len(connection.recv(answer - got))
        return time.perf_counter() - began
