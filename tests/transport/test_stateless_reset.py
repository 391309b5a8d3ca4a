"""Peers of a node that has lost its state learn of it at once, and can't be made to believe it."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter

import pytest

from auth import SecretKey
from tests.transport.nodes import Events, endpoint, eventually, peer_process
from tests.transport.pair import Address, End, Host, Settings, World, connect, key
from transport import PeerLeft, PeerLost
from transport.protocol import Reply
from transport.protocol.events import ConnectionEnded, EndedBy
from transport.protocol.stateless_reset import LEAST, MOST, SENT, TOKEN_SIZE, StatelessResets

ROUND_TRIP = 0.02
"""Of the world's links, in seconds."""


def end_of(end: End) -> ConnectionEnded | None:
    return end.core.ended


def restarted(host: Host, secret: SecretKey | None = None) -> Host:
    """A host in the place of `host` that knows nothing of what that knew."""
    world = host.world
    return Host(world, secret or host.key, host.address, host.settings)


def token_in_use(end: End) -> bytes:
    return end.core.quic._peer_cid.stateless_reset_token


def reset_with(token: bytes) -> bytes:
    return b"\x40" + os.urandom(MOST - TOKEN_SIZE - 1) + token


def test_a_peer_that_sends_learns_within_a_round_trip() -> None:
    world = World()
    dialer, listener = connect(world)
    restarted(listener.host)
    began = world.now
    dialer.open(b"is anybody there?")
    assert world.run(lambda: end_of(dialer), seconds=10)
    assert world.now - began <= ROUND_TRIP + 1e-6
    end = end_of(dialer)
    assert end is not None
    assert end.by is EndedBy.FORGOTTEN
    assert "has started anew" in end.reason


def test_a_quiet_peer_learns_with_the_first_probe() -> None:
    world = World()
    dialer, listener = connect(world)
    world.run(seconds=0.5)
    restarted(listener.host)
    began = world.now
    assert world.run(lambda: end_of(dialer), seconds=10)
    assert end_of(dialer).by is EndedBy.FORGOTTEN  # type: ignore[union-attr]
    assert world.now - began < dialer.host.settings.liveness / 3 + 2 * ROUND_TRIP


def test_a_bulk_transfer_ends_at_once() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.open(bytes(1 << 20))
    world.run(seconds=ROUND_TRIP)
    restarted(listener.host)
    began = world.now
    assert world.run(lambda: end_of(dialer), seconds=10)
    assert end_of(dialer).by is EndedBy.FORGOTTEN  # type: ignore[union-attr]
    assert world.now - began <= 2 * ROUND_TRIP


def test_nothing_is_sent_any_more_and_all_is_forgotten() -> None:
    world = World()
    dialer, listener = connect(world)
    restarted(listener.host)
    dialer.open(b"x")
    assert world.run(lambda: end_of(dialer))
    sent = Counter(world.sent)
    assert world.run(lambda: not dialer.host.demux.connections, seconds=2)
    world.run(seconds=10)
    assert world.sent == sent


def test_another_node_at_the_same_address_is_not_believed() -> None:
    """What another key says is no word of the peer's: silence is."""
    world = World()
    dialer, listener = connect(world)
    restarted(listener.host, key(77))
    dialer.open(b"x")
    began = world.now
    assert world.run(lambda: end_of(dialer), seconds=10)
    assert end_of(dialer).by is EndedBy.SILENCE  # type: ignore[union-attr]
    assert world.now - began > 2.5


def test_only_the_token_and_only_from_the_peer() -> None:
    world = World()
    dialer, listener = connect(world)
    token, host, there = token_in_use(dialer), dialer.host, listener.host.address
    assert len(token) == TOKEN_SIZE
    assert token == listener.host.resets.token(listener.core.quic.host_cid)
    wrong = bytes([token[0] ^ 1]) + token[1:]
    for data, source in (
        (reset_with(wrong), there),
        (reset_with(os.urandom(TOKEN_SIZE)), there),
        (reset_with(token), ("10.9.9.9", 4433)),
        (reset_with(token), (there[0], there[1] + 1)),
        (reset_with(token)[-LEAST + 1 :], there),
        (reset_with(token) + b"\0", there),
    ):
        host.receive(data, source)
        assert end_of(dialer) is None, (len(data), source)
    host.receive(reset_with(token), there)
    assert end_of(dialer).by is EndedBy.FORGOTTEN  # type: ignore[union-attr]


def test_tokens_of_spare_and_of_retired_ids_count_for_nothing() -> None:
    world = World()
    dialer, listener = connect(world)
    quic = dialer.core.quic
    retired, spare = token_in_use(dialer), quic._peer_cid_available[0].stateless_reset_token
    host, there = dialer.host, listener.host.address
    host.receive(reset_with(spare), there)
    assert end_of(dialer) is None
    quic.change_connection_id()
    assert token_in_use(dialer) == spare
    host.receive(reset_with(retired), there)
    assert end_of(dialer) is None
    host.receive(reset_with(spare), there)
    assert end_of(dialer) is not None


def test_no_id_that_is_in_use_is_ever_reset() -> None:
    """An attacker who has seen ids on the wire gets no token for them while they are in use."""
    world = World()
    dialer, listener = connect(world)
    demux = listener.host.demux
    ids = list(demux._by_id)
    assert len(ids) > 4
    for each in ids:
        assert not isinstance(demux.route(b"\x40" + each + bytes(60), ("6.6.6.6", 1), 200.0), Reply)
    gone = bytes(8)
    assert isinstance(demux.route(b"\x40" + gone + bytes(60), ("6.6.6.6", 1), 200.0), Reply)
    # What an attacker can have sent is the token of an id that the peer does not use.
    assert dialer.core.ended is None


def test_an_endpoint_of_the_same_key_elsewhere_knows_other_tokens() -> None:
    one, other = StatelessResets(key(1), 4433), StatelessResets(key(1), 4434)
    assert one.token(b"12345678") == StatelessResets(key(1), 4433).token(b"12345678")
    assert one.token(b"12345678") != other.token(b"12345678")
    assert one.token(b"12345678") != StatelessResets(key(2), 4433).token(b"12345678")
    assert one.token(b"12345678") != one.token(b"12345679")
    assert key(1).to_bytes().hex() not in repr(one)


@pytest.mark.parametrize("size", [*range(1, 60), 1200, 9000])
def test_an_answer_is_smaller_than_what_it_answers_and_looks_like_a_packet(size: int) -> None:
    resets = StatelessResets(key(1), 4433)
    answer = resets.answer(b"12345678", size, 0.0)
    if size <= LEAST:
        assert answer is None
        return
    assert answer is not None
    assert LEAST <= len(answer) < size
    assert len(answer) <= MOST
    assert answer[0] & 0xC0 == 0x40
    assert answer[-TOKEN_SIZE:] == resets.token(b"12345678")
    assert resets.answer(b"12345678", size, 0.0) != answer, "what is not the token is noise"


def test_two_nodes_that_know_nothing_come_to_an_end() -> None:
    world = World()
    one, other = world.host(1), world.host(2)
    sizes: list[int] = []

    def tap(data: bytes, source: Address, target: Address) -> bytes:
        sizes.append(len(data))
        return data

    world.tap = tap
    world.send(b"\x40" + bytes(1199), one.address, other.address)
    world.run(seconds=10)
    assert sizes == [1200, *range(MOST, LEAST - 1, -1)]


def test_answers_are_limited_and_come_again() -> None:
    world = World()
    host = world.host(1)

    def answers(now: float) -> int:
        routed = [
            host.demux.route(b"\x40" + os.urandom(40), ("6.6.6.6", 1), now) for _ in range(1000)
        ]
        return sum(isinstance(each, Reply) for each in routed)

    assert answers(50.0) == SENT.burst
    assert answers(50.0) == 0
    assert answers(50.5) == SENT.per_second // 2
    assert host.demux.drops["unknown connection id"] == 3000


def test_a_dialer_says_no_token_in_its_handshake_and_a_listener_does() -> None:
    """RFC 9000 section 18.2: a client must not send one."""
    world = World()
    dialer, listener = connect(world, Settings(), Settings())
    assert token_in_use(listener) == b""
    assert len(token_in_use(dialer)) == TOKEN_SIZE


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
async def test_a_real_process_that_starts_anew_on_its_port_is_noticed_at_once() -> None:
    """The bound is a minute: neither silence nor a probe tells in time."""
    secret = SecretKey.generate()
    async with endpoint(liveness=60.0) as node:
        events = Events(node)
        async with peer_process(secret) as first:
            connection = await node.connect(first.address)
            await connection.ping()
        async with peer_process(secret, first.port) as second:
            assert connection.is_open, "nothing was sent meanwhile, so nothing is known"
            began = time.monotonic()
            with pytest.raises(PeerLost, match="has started anew"):
                await connection.call("echo", 1, timeout=20)
            assert time.monotonic() - began < 1.0
            await eventually(lambda: events.of(PeerLeft))
            again = await node.connect(second.address)
            assert again is not connection
            assert await again.call("echo", 2) == 2
