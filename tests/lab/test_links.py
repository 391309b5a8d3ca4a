"""Links between hosts of the lab are what they say."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import pytest

from tests.lab.delay import delayed_link, missing_tun
from tests.lab.network import enter, lab, missing
from tests.lab.wireguard import missing_wireguard, tunnel

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.timeout(120),
]

HERE, THERE = "10.78.0.1", "10.78.0.2"
PACKETS = 400


def _in_namespace(pipe: Pipe, namespace: str, work: Callable[..., Any], *arguments: Any) -> None:
    enter(namespace)
    pipe.send(work(pipe, *arguments))


class Worker:
    """A process on a host, which says one thing at its end, and another before if it likes."""

    def __init__(self, namespace: str, work: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_in_namespace, args=(theirs, namespace, work, *arguments), daemon=True
        )
        self._process.start()

    def says(self) -> Any:
        assert self._pipe.poll(30), "nothing was said"
        return self._pipe.recv()

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def take_connection(pipe: Pipe, address: str) -> bytes:
    with socket.create_server((address, 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            return connection.recv(100)


def connect(pipe: Pipe, where: tuple[str, int], data: bytes) -> float:
    began = time.monotonic()
    with socket.create_connection(where, timeout=20) as connection:
        seconds = time.monotonic() - began
        connection.sendall(data)
    return seconds


def count_packets(pipe: Pipe, address: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((address, 0))
        pipe.send(sock.getsockname())
        count = 0
        while sock.recv(100) != b"last":
            count += 1
        return count


def send_packets(pipe: Pipe, where: tuple[str, int], count: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _ in range(count):
            sock.sendto(b"x" * 64, where)
            time.sleep(0)
        for _ in range(20):  # of so many, one arrives
            sock.sendto(b"last", where)
            time.sleep(0.01)


def meet(one: str, two: str, there: str) -> float:
    """Connect between two namespaces; return the seconds that took."""
    server = Worker(two, take_connection, there)
    client = Worker(one, connect, server.says(), b"hello")
    try:
        seconds = float(client.says())
        assert server.says() == b"hello"
        return seconds
    finally:
        server.end()
        client.end()


def arrived(one: str, two: str) -> int:
    """Send packets between two namespaces; return how many arrived."""
    server = Worker(two, count_packets, THERE)
    client = Worker(one, send_packets, server.says(), PACKETS)
    try:
        return int(server.says())
    finally:
        server.end()
        client.end()


@pytest.mark.skipif(missing_tun() is not None, reason=str(missing_tun()))
def test_a_delayed_link() -> None:
    with lab() as net:
        a, b = net.host("a"), net.host("b")
        with delayed_link(a, b, "tun0", f"{HERE}/24", f"{THERE}/24", round_trip=0.2):
            # A connection takes one round trip: never less.
            assert meet(a.namespace, b.namespace, THERE) >= 0.2
            assert arrived(a.namespace, b.namespace) == PACKETS


@pytest.mark.skipif(missing_tun() is not None, reason=str(missing_tun()))
def test_a_link_that_loses_packets() -> None:
    with lab() as net:
        a, b = net.host("a"), net.host("b")
        with delayed_link(a, b, "tun0", f"{HERE}/24", f"{THERE}/24", round_trip=0.0, loss=0.25):
            count = arrived(a.namespace, b.namespace)
        assert 0.6 * PACKETS < count < 0.9 * PACKETS


@pytest.mark.skipif(missing_wireguard() is not None, reason=str(missing_wireguard()))
def test_a_tunnel() -> None:
    with lab() as net:
        a, b = net.host("a"), net.host("b")
        net.link(a, b, "eth0", "10.79.0.1/24", "10.79.0.2/24")
        with tunnel(a, b, ("10.79.0.1", "10.79.0.2"), (HERE, THERE)) as ends:
            assert len({end.process for end in ends}) == 2
            meet(a.namespace, b.namespace, THERE)
            # The way is through the tunnel, which is the only one to that address.
            for end in ends:
                assert end.interface.startswith("wg0")
