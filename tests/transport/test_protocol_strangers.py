"""What a flood of strangers' datagrams meets at the table of connections."""

from __future__ import annotations

import os

from tests.transport.pair import Settings, World, connect
from tests.transport.test_protocol_demux import STRANGER, first_datagram, fresh
from transport.protocol import ConnectionCore, Dropped
from transport.protocol.connection_ids import ConnectionIds
from transport.protocol.demux import MAX_HALF_OPEN_DATAGRAMS, NO_TIME, Demultiplexer
from transport.protocol.newcomers import STRANGERS_BURST, StrangerBudget


def short_to(connection_id: bytes) -> bytes:
    return b"\x40" + connection_id + bytes(30)


def test_a_handshake_that_takes_too_many_datagrams_is_looked_at_no_more() -> None:
    world, here, there = fresh(admit=False)
    here.dial(there)
    assert world.run(lambda: there.ends and there.end.handshake)
    core = there.end.core
    data = short_to(core.quic.host_cid)
    assert there.demux.find(bytearray(data), len(data)) is None, "it is counted"
    while (found := there.demux.route(data, STRANGER, world.now)) is core:
        pass
    assert found == Dropped("too long a handshake")
    assert core.quic.host_cid not in there.demux.ids_in_use(), "the kernel drops the rest"
    assert sum(there.demux.drops.values()) == 1


def test_the_peer_that_is_admitted_sends_as_much_as_it_likes() -> None:
    dialer, listener = connect(World())
    demux, data = listener.host.demux, short_to(listener.core.quic.host_cid)
    for _ in range(2 * MAX_HALF_OPEN_DATAGRAMS):
        assert demux.route(data, STRANGER, 1.0) is listener.core
    assert demux.find(bytearray(data), len(data)) is listener.core
    assert listener.core.quic.host_cid in demux.ids_in_use()
    assert dialer.core.quic.host_cid in dialer.host.demux.ids_in_use()


def test_the_ids_in_use_are_those_by_which_peers_call() -> None:
    world = World()
    dialer, listener = connect(world)
    before = listener.core.quic.host_cid
    dialer.core.quic.change_connection_id()
    dialer.core.ping(7)
    dialer.pump()
    world.run(seconds=1)
    after = listener.core.quic.host_cid
    assert after != before
    assert listener.host.demux.ids_in_use() == [after]
    listener.core.close(0, "over")
    assert listener.host.demux.ids_in_use() == []


def test_without_time_for_strangers_the_known_get_through() -> None:
    world = World()
    _, listener = connect(world)
    third = world.host(3)
    initial = first_datagram(world, third, listener.host)
    budget = StrangerBudget()
    demux = listener.host.demux
    demux._strangers = budget
    now = world.now
    budget.spend(STRANGERS_BURST, now, on_strangers=True)
    budget.has_time(now)
    assert demux.route(initial, STRANGER, now) == Dropped(NO_TIME)
    assert demux.route(short_to(os.urandom(8)), STRANGER, now) == Dropped(NO_TIME)
    assert demux.route(short_to(listener.core.quic.host_cid), STRANGER, now) is listener.core
    assert budget.is_exceeded
    # A second later there is time again, and the Initial begins what it should.
    assert isinstance(demux.route(initial, STRANGER, now + 1), ConnectionCore)


def test_who_does_not_listen_says_so() -> None:
    demux = Demultiplexer(
        make_listener=None,
        max_connections=1,
        max_half_open=1,
        max_half_open_per_host=1,
        retry_threshold=1,
        new_connection_id=ConnectionIds().draw,
    )
    assert not demux.is_listening
    there = World().host(1, Settings())
    assert there.demux.is_listening
    there.demux.stop_listening()
    assert not there.demux.is_listening


def test_an_id_that_a_retry_gives_out_is_one_of_ours() -> None:
    world, here, there = fresh(retry_threshold=1, max_half_open=2, admit=False)
    here.dial(there)
    world.run(lambda: there.ends)
    third = world.host(3)
    end = third.dial(there)
    assert world.run(lambda: len(there.ends) == 2)
    retried = end.core.quic._retry_source_connection_id
    assert retried is not None
    assert there.ids.is_ours(retried)
