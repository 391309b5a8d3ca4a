"""A link with delay and random loss between two hosts: a TUN device at each, a process between.

The kernel need not know how to delay anything. Packets are handled one by one, so what is lost is
always a single packet, also of those that a host sent as one batch. On one core it carries some
150 MB/s.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.lab.network import REPOSITORY, Host, enter

__all__ = ["delayed_link", "missing_tun"]

DEVICE = "/dev/net/tun"
PACKETS_AT_ONCE = 64
MAX_PACKET = 65536
QUEUE_PACKETS = 20_000
"""What may be on its way in one direction; beyond that the last to come is dropped."""

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001


def missing_tun() -> str | None:
    """Return why there can be no such link here, None if there can."""
    return None if Path(DEVICE).exists() else f"there is no {DEVICE}"


@contextmanager
def delayed_link(
    one: Host,
    two: Host,
    interface: str,
    address: str,
    other: str,
    *,
    round_trip: float,
    loss: float = 0.0,
    mtu: int = 1500,
    seed: int = 1,
) -> Iterator[int]:
    """Join two hosts for the block by an interface of one name on both; yield the process between.

    Args:
        one: a host, which gets `address` (with its prefix length).
        two: the other, which gets `other`.
        interface: the name on both.
        address: as ``10.78.0.1/24``.
        other: as ``10.78.0.2/24``.
        round_trip: seconds there and back.
        loss: the share of packets that is lost, in each direction.
        mtu: of the interfaces, in bytes.
        seed: which packets those are.
    """
    settings = {
        "namespaces": [one.namespace, two.namespace],
        "interface": interface,
        "delay": round_trip / 2,
        "loss": loss,
        "seed": seed,
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tests.lab.delay", json.dumps(settings)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise OSError("the process between the two hosts did not start")
            for host, own in ((one, address), (two, other)):
                host.ip(f"address add {own} dev {interface}")
                host.ip(f"link set {interface} mtu {mtu} txqueuelen 5000 up")
            yield process.pid
        finally:
            process.kill()


class _Direction:
    """From one device to the other."""

    def __init__(self, source: int, target: int, delay: float, loss: float, seed: str) -> None:
        self.source = source
        self.delay = delay
        self._target = target
        self._loss = loss
        self._random = random.Random(seed).random
        self._flying: deque[tuple[float, bytes]] = deque()

    @property
    def due(self) -> float | None:
        """When the next packet arrives, of those that are on their way."""
        return self._flying[0][0] if self._flying else None

    def take(self, arrival: float) -> None:
        """Take what waits at the source; it is to arrive at the given time."""
        read, source, flying, loss, draw = (
            os.read,
            self.source,
            self._flying,
            self._loss,
            self._random,
        )
        try:
            for _ in range(PACKETS_AT_ONCE):
                packet = read(source, MAX_PACKET)
                if (loss and draw() < loss) or len(flying) >= QUEUE_PACKETS:
                    continue
                flying.append((arrival, packet))
        except BlockingIOError:
            pass

    def deliver(self, now: float) -> None:
        """Put down what has arrived by now, or some of it."""
        flying, target, write = self._flying, self._target, os.write
        for _ in range(PACKETS_AT_ONCE):
            if not flying or flying[0][0] > now:
                return
            try:
                write(target, flying.popleft()[1])
            except OSError:
                pass  # the interface is not up yet, or its queue is full: lost, as elsewhere


def _tun(namespace: str, name: str) -> int:
    # A device belongs to the namespace it was made in, wherever its descriptor is used.
    enter(namespace)
    device = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN_NO_PI))
    return device


def _forward(settings: dict[str, Any]) -> None:
    devices = [_tun(namespace, settings["interface"]) for namespace in settings["namespaces"]]
    ways = [
        _Direction(source, target, settings["delay"], settings["loss"], f"{settings['seed']} {k}")
        for k, (source, target) in enumerate((devices, devices[::-1]))
    ]
    poll = select.poll()
    by_source = {}
    for way in ways:
        poll.register(way.source, select.POLLIN)
        by_source[way.source] = way
    print("ready", flush=True)
    clock = time.monotonic
    while True:
        dues = [way.due for way in ways if way.due is not None]
        # Below a millisecond poll(2) can't wait: look again at once.
        wait = (min(dues) - clock()) * 1000 if dues else 1000.0
        events = poll.poll(wait if wait >= 1 else 0)
        now = clock()
        for source, _ in events:
            by_source[source].take(now + by_source[source].delay)
        now = clock()
        for way in ways:
            way.deliver(now)


if __name__ == "__main__":
    _forward(json.loads(sys.argv[1]))
