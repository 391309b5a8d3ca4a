"""The rate-based controller on a path of 10 ms, in virtual time."""

from __future__ import annotations

import random

import pytest

from tests.transport.test_interop import FAULTS, End, Faults, Network, network
from transport.protocol.aioquic_adapter import AdaptedConnection
from transport.protocol.congestion import RateController

SIZE = 3_000_000


def connected(faults: Faults) -> tuple[Network, End, End]:
    world = network("ours", "ours", faults, None)
    assert world.run(lambda: world.client.is_connected and bool(world.server))
    server = world.server
    assert server is not None
    assert world.run(lambda: server.is_connected)
    world.run(lambda: False, 0.3)
    return world, world.client, server


def seconds(world: Network, sender: End, receiver: End, size: int) -> float:
    """How long `size` bytes take."""
    receiver.expected = size
    began = world.now
    stream = sender.write(random.Random(1).randbytes(size))
    world._pump(sender)
    assert world.run(lambda: stream in receiver.ended)
    return world.now - began


def controller_of(end: End) -> RateController:
    assert isinstance(end.quic, AdaptedConnection)
    controller = end.quic._loss._cc
    assert isinstance(controller, RateController)
    return controller


@pytest.mark.parametrize("calls", [5, 40])
def test_small_calls_before_it_do_not_slow_a_transfer_down(calls: int) -> None:
    world, client, server = connected(FAULTS["clean"])
    fresh = seconds(world, client, server, SIZE)
    world, client, server = connected(FAULTS["clean"])
    for _ in range(calls):
        seconds(world, client, server, 60)
    assert seconds(world, client, server, SIZE) < 1.5 * fresh
    for _ in range(calls):
        seconds(world, client, server, 60)
    assert seconds(world, client, server, SIZE) < 1.5 * fresh


def test_random_loss_costs_little_and_a_window_much() -> None:
    world, client, server = connected(FAULTS["clean"])
    clean = seconds(world, client, server, SIZE)
    world, client, server = connected(FAULTS["loss"])
    assert seconds(world, client, server, SIZE) < 4 * clean


def test_nothing_stays_in_flight() -> None:
    world, client, server = connected(FAULTS["all"])
    seconds(world, client, server, SIZE)
    world.run(lambda: False, 2.0)
    assert controller_of(client).bytes_in_flight == 0


def test_a_small_message_does_not_wait_for_the_bulk_beside_it() -> None:
    world, client, server = connected(FAULTS["clean"])
    server.expected = 20_000_000
    bulk = client.write(bytes(20_000_000))
    world._pump(client)
    world.run(lambda: False, 0.02)
    began = world.now
    quic = client.quic
    small = quic.get_next_available_stream_id()
    quic.send_stream_data(small, b"small", end_stream=True)
    world._pump(client)
    assert world.run(lambda: small in server.ended)
    assert world.now - began < 0.02
    assert bulk not in server.ended


def test_who_only_acknowledged_sends_at_full_rate_when_its_turn_comes() -> None:
    """Its own few packets say nothing about the path, and take no part of what pacing allows."""
    world, client, server = connected(FAULTS["clean"])
    there = seconds(world, client, server, SIZE)
    for _ in range(3):
        seconds(world, client, server, SIZE)
    assert seconds(world, server, client, 60) < 0.05
    assert seconds(world, server, client, SIZE) < 1.5 * there


@pytest.mark.parametrize("faults", ["clean", "loss"])
def test_an_answer_after_a_transfer_waits_for_no_pacing(faults: str) -> None:
    world, client, server = connected(FAULTS[faults])
    for _ in range(5):
        seconds(world, client, server, SIZE)
        assert seconds(world, server, client, 18) < 0.2
