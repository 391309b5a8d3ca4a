"""One flood in a process of its own: ``python -m tests.attacks.floods.attackers NAME PORT KEY``.

It works while it is told to: a line on its standard input starts it, the next one stops it, and so
on; after each stop it says how many times it has attacked since the start. It is niced down, and
kept to the rate of a link, so that what is measured is what the flood does to its victim and not
who gets a processor.
"""

from __future__ import annotations

import itertools
import os
import random
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

import cbor2

from auth import SecretKey
from tests.attacks.raw import RawClient, framed, hello, request

Target = tuple[str, int]
Flood = Callable[[int, SecretKey], Iterator[int]]
"""Yields, again and again, how often it has just attacked."""

HANDSHAKE_SECONDS = 1.0
"""How long an attacker goes on with one connection that gets nowhere."""

AT_ONCE = 8
"""Connections that it works on side by side."""

MOST_PER_SECOND = 10_000
"""Full datagrams that a link of 100 Mbit/s brings. On loopback an attacker could send ten times as
many, and takes a processor from its victim by that alone."""

BURST = 32
"""Datagrams between two looks at whether to stop."""


def datagrams(make: Callable[[], bytes]) -> Flood:
    """Flood with what `make` makes, from several ports."""

    def flood(port: int, key: SecretKey) -> Iterator[int]:
        sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(8)]
        for sock in itertools.cycle(sockets):
            for _ in range(BURST):
                sock.sendto(make(), ("127.0.0.1", port))
            yield BURST

    return flood


NOISE = os.urandom(1 << 16)


def noise(size: int) -> bytes:
    start = random.randrange(len(NOISE) - size)
    return NOISE[start : start + size]


def random_junk() -> bytes:
    return noise(random.choice((1, 40, 300, 1200, 1400)))


def short_header() -> bytes:
    return b"\x43" + os.urandom(8) + noise(1190)


def like_a_reset() -> bytes:
    """What might be a stateless reset, so that no filter can know better."""
    return b"\x43" + os.urandom(8) + noise(30)


def long_header() -> bytes:
    """A packet of a handshake under way, to a connection that never was."""
    return b"\xe3\x00\x00\x00\x01\x08" + os.urandom(8) + b"\x08" + noise(1190)


def initial() -> bytes:
    """All that can be seen of an Initial is right; what is inside can't be decrypted."""
    length = struct.pack(">H", 0x4000 | 1174)
    return (
        b"\xc3\x00\x00\x00\x01\x08" + os.urandom(8) + b"\x08" + os.urandom(8) + b"\x00" + length
    ) + noise(1174)


def other_version() -> bytes:
    return b"\xc3\x0a\x1a\x2a\x3a\x08" + os.urandom(8) + b"\x08" + noise(1190)


def retired_id(port: int, key: SecretKey) -> Iterator[int]:
    """Datagrams to a connection id that the node has issued, after its connection is over."""
    client = RawClient(port, key_of_a_stranger(), "mesh/1")
    client.start()
    until(client, lambda: client.handshaken)
    destination = client.quic._peer_cid.cid
    client.close()
    flood = datagrams(lambda: b"\x43" + destination + noise(1190))
    return flood(port, key)


def half_open(port: int, key: SecretKey) -> Iterator[int]:
    """First flights, each correct and of its own connection, and never a second."""
    flights = [first_flight(port) for _ in range(64)]
    for flight in itertools.cycle(flights):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _ in range(4):
                sock.sendto(flight, ("127.0.0.1", port))
        yield 4


def first_flight(port: int) -> bytes:
    client = RawClient(port, key_of_a_stranger(), "mesh/1")
    client.quic.connect(client.target, now=time.monotonic())
    ((data, _), *_) = client.quic.datagrams_to_send(time.monotonic())
    client.socket.close()
    return data


def connections(port: int, key: SecretKey) -> Iterator[int]:
    """Complete handshakes of strangers, who then say nothing."""
    yield from side_by_side(port, lambda client: client.handshaken)


def hellos(port: int, key: SecretKey) -> Iterator[int]:
    """Strangers who prove a key, say hello, and are refused."""

    def step(client: RawClient) -> bool:
        if client.handshaken and not client.data() and client.quic._streams.get(0) is None:
            client.send(hello(credential=bytes(4000)), fin=True)
        return bool(client.reply())

    yield from side_by_side(port, step)


def side_by_side(port: int, is_done: Callable[[RawClient], object]) -> Iterator[int]:
    """Run connections of strangers until `is_done`, some at a time, one after the other."""
    running: list[tuple[RawClient, float]] = []
    while True:
        while len(running) < AT_ONCE:
            client = RawClient(port, key_of_a_stranger(), "mesh/1")
            client.start()
            running.append((client, time.monotonic() + HANDSHAKE_SECONDS))
        done = 0
        for client, deadline in list(running):
            client.take()
            if is_done(client) or client.ended or time.monotonic() > deadline:
                client.close()
                client.socket.close()
                running.remove((client, deadline))
                done += 1
        yield done
        if not done:
            select.select([client.socket for client, _ in running], [], [], 0.01)


def streams(port: int, key: SecretKey) -> Iterator[int]:
    """A peer that is admitted opens streams and resets them at once, as fast as it can."""
    yield from opened(port, key, request("wait"), reset=True)


def calls(port: int, key: SecretKey) -> Iterator[int]:
    """A peer that is admitted calls, as fast as it can, and never waits for an answer."""
    yield from opened(port, key, request("work", 1), reset=False)


def tokens(port: int, key: SecretKey) -> Iterator[int]:
    """A peer that is admitted guesses capability tokens, and comes back when it is thrown out."""
    while True:
        guess = cbor2.dumps(
            {"s": "tensor.read", "v": {"token": os.urandom(32), "offset": 0}}, canonical=True
        )
        yield from itertools.islice(opened(port, key, framed(guess), reset=False), 200)


def opened(port: int, key: SecretKey, first: bytes, *, reset: bool) -> Iterator[int]:
    """Open streams as fast as the peer lets us, with `first` on each, as long as it lives."""
    client = RawClient(port, key, "mesh/1")
    try:
        client.start()
        yield from waiting(client, lambda: client.handshaken)
        client.send(hello(), fin=True)
        yield from waiting(client, lambda: client.reply())
        number = 1
        while not client.ended:
            done = 0
            while client.quic._remote_max_streams_bidi > number and done < BURST:
                client.quic.send_stream_data(4 * number, first, end_stream=not reset)
                if reset:
                    client.quic.reset_stream(4 * number, 1)
                    client.quic.stop_stream(4 * number, 1)
                number += 1
                done += 1
            client.flush()
            client.take()
            client.events.clear()
            yield done
            if not done:
                select.select([client.socket], [], [], 0.005)
    finally:
        client.close()
        client.socket.close()


def waiting(client: RawClient, condition: Callable[[], object]) -> Iterator[int]:
    deadline = time.monotonic() + 5 * HANDSHAKE_SECONDS
    while not condition() and not client.ended and time.monotonic() < deadline:
        client.take()
        select.select([client.socket], [], [], 0.005)
        yield 0


def until(client: RawClient, condition: Callable[[], object]) -> None:
    for _ in waiting(client, condition):
        pass
    assert condition()


STRANGERS = [SecretKey.generate() for _ in range(16)]


def key_of_a_stranger() -> SecretKey:
    return random.choice(STRANGERS)


FLOODS: dict[str, Flood] = {
    "junk: random": datagrams(random_junk),
    "junk: short headers": datagrams(short_header),
    "junk: like resets": datagrams(like_a_reset),
    "junk: long headers": datagrams(long_header),
    "junk: Initials": datagrams(initial),
    "junk: other versions": datagrams(other_version),
    "junk: to a retired id": retired_id,
    "half-open handshakes": half_open,
    "connections": connections,
    "hellos": hellos,
    "streams": streams,
    "calls": calls,
    "tokens": tokens,
}


def main() -> None:
    name, port, key = (
        sys.argv[1],
        int(sys.argv[2]),
        SecretKey.from_bytes(bytes.fromhex(sys.argv[3])),
    )
    os.nice(19)
    flood = FLOODS[name](port, key)
    print("ready", flush=True)
    while sys.stdin.readline():
        attacked, began = 0, time.monotonic()
        while not select.select([sys.stdin], [], [], 0)[0]:
            attacked += next(flood)
            early = attacked / MOST_PER_SECOND - (time.monotonic() - began)
            if early > 0:
                time.sleep(early)
        sys.stdin.readline()
        print(attacked, flush=True)


if __name__ == "__main__":
    main()
