"""How datagrams find their connection, and how strangers are met."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from aioquic.buffer import Buffer
from aioquic.quic.packet import (
    QuicPacketType,
    QuicProtocolVersion,
    encode_quic_version_negotiation,
    pull_quic_header,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.profiles import one_in
from tests.transport.pair import Address, End, Host, Settings, World, connect
from transport.protocol import ConnectionCore, Dropped, Reply
from transport.protocol.events import ConnectionEnded, EndedBy
from transport.protocol.newcomers import prefix_of

VERSION_1 = int(QuicProtocolVersion.VERSION_1)
FUTURE = 0x1A2A3A4A
STRANGER: Address = ("192.0.2.7", 1234)


def first_datagram(world: World, host: Host, target: Host) -> bytes:
    """What a new dialer sends first, kept from the network."""
    caught: list[bytes] = []
    tap = world.tap
    world.tap = lambda data, *_: caught.append(data)
    host.dial(target)
    world.tap = tap
    return caught[0]


def fresh(**options: object) -> tuple[World, Host, Host]:
    world = World()
    return world, world.host(1), world.host(2, Settings(**options))


def long_header(version: int, destination: bytes, source: bytes, rest: bytes = b"") -> bytes:
    head = bytes([0xC0]) + version.to_bytes(4, "big")
    return head + bytes([len(destination)]) + destination + bytes([len(source)]) + source + rest


def is_empty(host: Host) -> bool:
    demux = host.demux
    return not (demux._by_id or demux._ids or demux._half_open or demux._half_open_by_host)


# -- version negotiation


@pytest.mark.parametrize(
    ("destination", "source", "first"),
    [(b"d" * 8, b"s" * 8, 0xC0), (b"", b"", 0x80), (b"d" * 200, b"s" * 255, 0xFF)],
    ids=["usual", "no ids, other bits", "longer ids than ours"],
)
def test_an_unknown_version_is_answered_with_those_we_speak(
    destination: bytes, source: bytes, first: int
) -> None:
    _, _, there = fresh()
    data = bytes([first]) + long_header(FUTURE, destination, source)[1:]
    data += b"\xff" * (1200 - len(data))

    reply = there.demux.route(data, STRANGER, 0.0)
    assert isinstance(reply, Reply)
    assert len(reply.data) < len(data)
    # RFC 8999 section 6: ids swapped, version 0, and whole words of versions.
    assert reply.data[0] & 0x80
    assert reply.data[1:5] == bytes(4)
    head = bytes([len(source)]) + source + bytes([len(destination)]) + destination
    assert reply.data[5 : 5 + len(head)] == head
    versions = reply.data[5 + len(head) :]
    assert VERSION_1 in [
        int.from_bytes(versions[i : i + 4], "big") for i in range(0, len(versions), 4)
    ]
    assert is_empty(there)


def test_a_small_datagram_of_an_unknown_version_is_not_answered() -> None:
    _, _, there = fresh()
    data = long_header(FUTURE, b"d" * 8, b"s" * 8)
    data += bytes(1199 - len(data))
    assert there.demux.route(data, STRANGER, 0.0) == Dropped("too small to start a connection")


def test_version_negotiation_is_never_answered() -> None:
    """Two that answer each other would go on for ever."""
    _, _, there = fresh()
    small = encode_quic_version_negotiation(b"s" * 8, b"d" * 8, [FUTURE])
    for data in (small, encode_quic_version_negotiation(b"s" * 8, b"d" * 8, [FUTURE] * 400)):
        assert isinstance(there.demux.route(data, STRANGER, 0.0), Dropped)
    assert is_empty(there)


def test_version_two_of_quic_is_spoken_too() -> None:
    world, here, there = fresh()

    def second(configuration: object) -> None:
        configuration.supported_versions = [int(QuicProtocolVersion.VERSION_2)]

    dialer = here.dial(there, configure=second)
    assert world.run(lambda: dialer.handshake)


# -- Retry


def retry_of(host: Host, data: bytes, source: Address, now: float) -> bytes:
    reply = host.demux.route(data, source, now)
    assert isinstance(reply, Reply)
    header = pull_quic_header(Buffer(data=reply.data))
    assert header.packet_type == QuicPacketType.RETRY
    assert len(reply.data) < len(data)
    return reply.data


def test_above_the_threshold_newcomers_prove_their_address_first() -> None:
    world, here, there = fresh(retry_threshold=2)
    assert isinstance(
        there.demux.route(first_datagram(world, here, there), STRANGER, 0), ConnectionCore
    )
    assert isinstance(
        there.demux.route(first_datagram(world, here, there), STRANGER, 0), ConnectionCore
    )
    assert there.demux.half_open == 2
    retry_of(there, first_datagram(world, here, there), STRANGER, 0)
    assert there.demux.half_open == 2
    assert len(there.ends) == 2  # the Retry made no state


def test_a_dialer_that_gets_a_retry_connects_nevertheless() -> None:
    world, here, there = fresh(retry_threshold=1)
    occupant = first_datagram(world, here, there)
    assert isinstance(there.demux.route(occupant, STRANGER, world.now), ConnectionCore)

    dialer = here.dial(there)
    assert world.run(lambda: dialer.handshake and there.end.handshake)
    assert dialer.core.quic._retry_count == 1
    dialer.open(b"hello")
    assert world.run(lambda: there.end.inbox.get(0) == b"hello")


def second_flight(world: World, here: Host, there: Host) -> bytes:
    """Get a Retry and return the datagram that answers it."""
    caught: list[bytes] = []

    def tap(data: bytes, source: Address, _: Address) -> bytes | None:
        if source == here.address and data[0] & 0x80:
            caught.append(data)
            return data if len(caught) == 1 else None
        return data

    world.tap = tap
    dialer = here.dial(there)
    assert world.run(lambda: len(caught) == 2, seconds=0.5)
    world.tap = lambda data, *_: data
    here.demux.remove(dialer.core)  # says nothing more
    assert pull_quic_header(Buffer(data=caught[1]), host_cid_length=8).token
    return caught[1]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("age", "source", "spoil", "reason"),
    [
        (0.0, None, None, None),
        (29.0, None, None, None),
        (31.0, None, None, "bad Retry token"),
        (0.0, ("10.0.0.9", 4433), None, "bad Retry token"),
        (0.0, ("10.0.0.1", 4434), None, "bad Retry token"),
        (0.0, None, 40, "bad Retry token"),
        (0.0, None, 7, "bad Retry token"),
    ],
    ids=["control", "just in time", "expired", "address", "port", "altered", "other id"],
)
def test_a_token_is_bound_to_address_id_and_time(
    age: float, source: Address | None, spoil: int | None, reason: str | None
) -> None:
    world, here, there = fresh(retry_threshold=1)
    there.demux.route(first_datagram(world, here, there), STRANGER, world.now)
    data = bytearray(second_flight(world, here, there))
    if spoil is not None:
        data[spoil] ^= 1
    result = there.demux.route(bytes(data), source or here.address, world.now + age)
    if reason is None:
        assert isinstance(result, ConnectionCore)
    else:
        assert result == Dropped(reason)
        assert there.demux.half_open == 1


@pytest.mark.attack
def test_a_token_of_another_endpoint_is_worth_nothing() -> None:
    world, here, there = fresh(retry_threshold=1)
    there.demux.route(first_datagram(world, here, there), STRANGER, world.now)
    data = second_flight(world, here, there)
    other = world.host(3)
    assert other.demux.route(data, here.address, world.now) == Dropped("bad Retry token")


# -- bounds


def sources(count: int, pattern: str) -> list[Address]:
    return [(pattern.format(i), 1000 + i) for i in range(count)]


def knock(world: World, here: Host, there: Host, source: Address) -> object:
    return there.demux.route(first_datagram(world, here, there), source, world.now)


def test_half_open_connections_are_bounded_in_all() -> None:
    world, here, there = fresh(max_half_open=3, retry_threshold=3)
    for source in sources(3, "10.9.0.{}"):
        assert isinstance(knock(world, here, there, source), ConnectionCore)
    assert knock(world, here, there, ("10.9.1.1", 1)) == Dropped("too many handshakes")
    # A place that becomes free is given away again.
    there.demux.remove(next(iter(there.ends)))
    assert there.demux.half_open == 2
    assert isinstance(knock(world, here, there, ("10.9.1.1", 1)), ConnectionCore)


@pytest.mark.parametrize(
    ("pattern", "neighbour"),
    [("10.9.0.1", "10.9.0.2"), ("2001:db8:0:1::{}", "2001:db8:0:2::1"), ("fe80::{}%eth0", "::1")],
)
def test_half_open_connections_are_bounded_for_each_host(pattern: str, neighbour: str) -> None:
    """An IPv6 host has a whole /64 to send from. Beyond its share it has to prove its address."""
    world, here, there = fresh(max_half_open_per_host=2)
    for source in sources(2, pattern):
        assert isinstance(knock(world, here, there, source), ConnectionCore)
    for source in sources(2, pattern):
        retry_of(there, first_datagram(world, here, there), source, world.now)
    assert isinstance(knock(world, here, there, (neighbour, 1)), ConnectionCore)


@pytest.mark.attack
def test_forged_sources_do_not_shut_the_real_host_out_and_its_proven_share_is_bounded() -> None:
    world, here, there = fresh(max_half_open_per_host=2)
    for _ in range(2):  # somebody else claims to be `here`, and never answers
        assert isinstance(knock(world, here, there, here.address), ConnectionCore)

    dialer = here.dial(there)
    assert world.run(lambda: dialer.handshake)
    assert dialer.core.quic._retry_count == 1

    for _ in range(2):
        data = second_flight(world, here, there)
        assert isinstance(there.demux.route(data, here.address, world.now), ConnectionCore)
    data = second_flight(world, here, there)
    assert there.demux.route(data, here.address, world.now) == Dropped(
        "too many handshakes from one host"
    )


def test_connections_are_bounded_in_all_those_established_included() -> None:
    world, here, there = fresh(max_connections=2)
    dialer = here.dial(there)
    assert world.run(lambda: dialer.handshake and there.end.handshake)
    assert isinstance(knock(world, here, there, STRANGER), ConnectionCore)
    assert knock(world, here, there, STRANGER) == Dropped("too many connections")
    assert there.demux.drops["too many connections"] == 1


def test_a_handshake_alone_makes_nobody_less_of_a_newcomer() -> None:
    """Anybody can make a key: only who is admitted gives the place back."""
    world, here, there = fresh(max_half_open=1, retry_threshold=1, admit=False)
    dialer = here.dial(there)
    assert world.run(lambda: dialer.handshake and there.end.handshake)
    assert knock(world, here, there, STRANGER) == Dropped("too many handshakes")
    there.demux.admitted(there.end.core)
    assert isinstance(knock(world, here, there, STRANGER), Reply | ConnectionCore)


def test_a_host_is_an_address_or_a_v6_site() -> None:
    assert prefix_of(("10.0.0.1", 1)) == prefix_of(("10.0.0.1", 2)) != prefix_of(("10.0.0.2", 1))
    assert prefix_of(("2001:db8::1", 1)) == prefix_of(("2001:db8::ffff:1", 1))
    assert prefix_of(("2001:db8::1", 1)) != prefix_of(("2001:db8:0:1::1", 1))


def test_a_listener_that_stops_meets_nobody_and_keeps_whom_it_has() -> None:
    world, here, there = fresh()
    dialer = here.dial(there)
    assert world.run(lambda: dialer.handshake and there.end.handshake)
    there.demux.stop_listening()
    assert knock(world, here, there, STRANGER) == Dropped("not listening")
    dialer.open(b"still here")
    assert world.run(lambda: there.end.inbox.get(0) == b"still here")


# -- anti-amplification


@pytest.mark.attack
@pytest.mark.parametrize("answers", [True, False], ids=["control", "attack"])
def test_an_unproven_address_gets_at_most_three_times_what_it_sent(answers: bool) -> None:
    world, here, there = fresh()
    received = 0

    def tap(data: bytes, source: Address, _: Address) -> bytes | None:
        nonlocal received
        if source == here.address:
            if received and not answers:
                return None
            received += len(data)
        else:
            assert there.end.handshake or world.sent[there.address, here.address] <= 3 * received
        return data

    world.tap = tap
    here.dial(there)
    world.run(seconds=8)
    victim = there.end
    if answers:
        assert victim.handshake
        return
    assert world.sent[there.address, here.address] > 1.5 * received  # it did try, and again
    # Closing, and repeating that to whoever pokes, stays within the same bound.
    victim.core.close(1, "time is up")
    victim.pump()
    poke = long_header(VERSION_1, victim.core.quic.original_destination_connection_id, b"")
    for _ in range(40):
        received += len(poke)
        there.receive(poke, here.address)
    assert world.sent[there.address, here.address] <= 3 * received


# -- garbage


def poke_with(there: Host, data: bytes) -> object:
    result = there.demux.route(data, STRANGER, there.world.now)
    if isinstance(result, ConnectionCore):
        there.receive(data, STRANGER)
    return result


@pytest.mark.fuzz
@given(st.binary(max_size=1500))
def test_garbage_makes_no_state_and_no_noise(data: bytes) -> None:
    _, _, there = fresh()
    assert not isinstance(poke_with(there, data), ConnectionCore)
    assert is_empty(there)


@pytest.mark.fuzz
@one_in(2)
@given(
    version=st.sampled_from([VERSION_1, int(QuicProtocolVersion.VERSION_2), FUTURE, 0]),
    destination=st.binary(max_size=21),
    source=st.binary(max_size=21),
    rest=st.binary(max_size=64),
    size=st.sampled_from([0, 1199, 1200, 1500]),
)
def test_garbage_behind_a_valid_header_leaves_no_state(
    version: int, destination: bytes, source: bytes, rest: bytes, size: int
) -> None:
    """It may look like an Initial, but nothing in it can be decrypted."""
    _, _, there = fresh()
    data = long_header(version, destination, source, rest)
    data += bytes(max(0, size - len(data)))
    poke_with(there, data)
    assert is_empty(there)
    for end in there.ends.values():
        (ended,) = end.events
        assert isinstance(ended, ConnectionEnded)
        assert ended.by is EndedBy.SILENCE


def initial_with_short_id(length: int) -> bytes:
    rest = b"\0" + (0x4000 | 1200).to_bytes(2, "big") + bytes(1200)
    return long_header(VERSION_1, b"i" * length, b"s" * 8, rest)


@pytest.mark.parametrize("length", [0, 7, 8])
def test_an_id_too_short_to_be_anybodys_own_is_refused(length: int) -> None:
    _, _, there = fresh()
    result = there.demux.route(initial_with_short_id(length), STRANGER, 0.0)
    if length < 8:
        assert result == Dropped("connection id too short")
    else:
        assert isinstance(result, ConnectionCore)


def test_a_corrupted_first_datagram_does_not_spoil_the_next_attempt() -> None:
    world, here, there = fresh()
    count = 0

    def spoil_first(data: bytes, source: Address, _: Address) -> bytes:
        nonlocal count
        count += source == here.address
        is_first = count == 1 and source == here.address
        return data[:100] + bytes([data[100] ^ 1]) + data[101:] if is_first else data

    world.tap = spoil_first
    dialer = here.dial(there)
    assert world.run(lambda: dialer.handshake)
    assert len(there.ends) == 2
    assert len(there.demux.connections) == 1


@pytest.mark.fuzz
@one_in(5)
@given(st.data())
def test_no_mutilated_datagram_of_a_live_connection_breaks_it(data: st.DataObject) -> None:
    world = World()
    dialer, listener = connect(world)
    wire: list[bytes] = []
    world.tap = lambda sent, *_: wire.append(sent) or sent
    dialer.open(b"something to mutilate" * 100)
    world.run(seconds=0.1)
    # How many datagrams there are, and how long, is not the same each time: keys are random.
    place = st.integers(0, (1 << 16) - 1)
    for _ in range(5):
        sample = bytearray(wire[data.draw(place) % len(wire)])
        for _ in range(data.draw(st.integers(1, 3))):
            sample[data.draw(place) % len(sample)] = data.draw(st.integers(0, 255))
        cut = data.draw(place) % (len(sample) + 1)
        for end in (dialer, listener):
            end.host.receive(bytes(sample[:cut]), end.core.quic.get_peer_address())
    dialer.open(b"fine")
    assert world.run(lambda: listener.inbox.get(4) == b"fine")
    assert dialer.core.ended is None
    assert listener.core.ended is None


# -- connection ids


def test_every_id_that_was_issued_is_routed_and_a_retired_one_no_more() -> None:
    world = World()
    dialer, listener = connect(world)
    demux = listener.host.demux
    quic = listener.core.quic
    ids = {connection_id.cid for connection_id in quic._host_cids}
    assert len(ids) == 8
    # The id that the dialer made up for its first datagram stays good as well.
    assert set(demux._by_id) == ids | {quic.original_destination_connection_id}
    for connection_id in ids:
        assert demux.route(b"\x40" + connection_id + bytes(30), STRANGER, 0.0) is listener.core

    old = dialer.core.quic._peer_cid.cid
    dialer.core.quic.change_connection_id()
    dialer.open(b"under another name")
    assert world.run(lambda: listener.inbox.get(0) == b"under another name")
    world.run(seconds=0.5)
    reset = demux.route(b"\x40" + old + bytes(30), STRANGER, 0.0)
    assert isinstance(reset, Reply), "as if there were no such connection"
    dialer.host.receive(reset.data, listener.host.address)
    assert dialer.core.ended is None, "and whoever has retired it does not believe that"
    assert len(quic._host_cids) == 8
    assert len(demux._by_id) == 9


def test_ids_of_nobody_lead_nowhere() -> None:
    world = World()
    _, listener = connect(world)
    demux = listener.host.demux
    before = dict(demux._by_id)
    for data in (b"", b"\x40", b"\x40" + bytes(8), b"\x40" + b"n" * 20, b"\xc0"):
        assert isinstance(demux.route(data, STRANGER, 0.0), Dropped)
    assert isinstance(demux.route(b"\x40" + b"n" * 40, STRANGER, 0.0), Reply), "a reset"
    assert demux._by_id == before
    handshake_packet = bytes([0xE0]) + long_header(VERSION_1, b"n" * 8, b"s" * 8)[1:] + b"\x00"
    handshake_packet += bytes(1200)
    assert demux.route(handshake_packet, STRANGER, 0.0) == Dropped("unknown connection id")


def test_a_forgotten_connection_leaves_no_id() -> None:
    world = World()
    dialer, listener = connect(world)
    dialer.core.close(0, "")
    dialer.pump()
    assert world.run(lambda: not listener.host.demux.connections)
    assert is_empty(listener.host)
    assert world.run(lambda: is_empty(dialer.host))


def test_retiring_what_is_not_there_is_harmless() -> None:
    world = World()
    _, listener = connect(world)
    listener.host.demux.retire(listener.core, b"never was")
    listener.host.demux.remove(listener.core)
    listener.host.demux.remove(listener.core)
    assert is_empty(listener.host)


# -- paths


def follow(world: World, dialer: End, listener: End) -> Callable[[], bool]:
    return lambda: listener.core.quic.get_peer_address() == dialer.host.address


def test_a_dialer_whose_address_changes_is_followed_and_nothing_is_lost() -> None:
    world = World()
    dialer, listener = connect(world)
    data = bytes(300_000)
    listener.echoes = True
    stream = dialer.open(data)
    world.run(lambda: len(listener.inbox.get(0, b"")) > 50_000)
    dialer.host.move(("10.77.0.1", 999))
    assert world.run(lambda: stream.fin_received, seconds=60)
    assert bytes(dialer.inbox[0]) == data
    assert follow(world, dialer, listener)()
    assert dialer.core.ended is None


@pytest.mark.attack
def test_a_copy_from_elsewhere_does_not_carry_the_connection_away() -> None:
    """Replayed datagrams are duplicates: nothing is sent to where they came from."""
    world = World()
    dialer, listener = connect(world)
    wire: list[bytes] = []

    def tap(data: bytes, source: Address, _: Address) -> bytes:
        if source == dialer.host.address:
            wire.append(data)
        return data

    world.tap = tap
    listener.echoes = True
    stream = dialer.open(bytes(20_000))
    world.run(lambda: stream.fin_received)
    world.run(seconds=0.5)
    for data in wire:
        listener.host.receive(data, STRANGER)
    world.run(seconds=1)
    assert follow(world, dialer, listener)()
    assert world.sent[listener.host.address, STRANGER] == 0
