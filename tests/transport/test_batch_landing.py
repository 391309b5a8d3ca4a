"""Packets opened straight into their memory: only what is as expected, and nothing beside it."""

from __future__ import annotations

import os

import pytest
from aioquic.quic.crypto import CryptoContext
from aioquic.tls import CipherSuite

from tests.transport.test_batch_sealing import ID, SUITES, context
from transport.protocol.batch.frames import (
    FULL_FRAME,
    FULL_FRAME_TYPE,
    VARINT_4,
    VARINT_8,
    WITH_FIN,
    WITH_LENGTH,
)
from transport.protocol.batch.landing import Expected, data_room, land_packets
from transport.protocol.batch.sealing import Sealer
from transport.protocol.batch.writer import keys_of

FRONT = b"what is before"[: FULL_FRAME.size]
STREAM, OFFSET = 8, 5_000_000
ROOM = 300
LENGTH = FULL_FRAME.size + ROOM


def frame(at: int, data: bytes, *, kind: int = FULL_FRAME_TYPE, stream: int = STREAM) -> bytes:
    return FULL_FRAME.pack(kind, stream | VARINT_4, (OFFSET + at * ROOM) | VARINT_8) + data


class Transfer:
    """A batch of packets of a transfer, and the memory it goes to."""

    def __init__(self, crypto: CryptoContext, count: int, first: int = 0xFFF8) -> None:
        self.crypto, self.first = crypto, first
        self.data = [os.urandom(ROOM) for _ in range(count)]
        self.payloads = [frame(at, data) for at, data in enumerate(self.data)]
        self.memory = bytearray(FRONT + bytes(count * ROOM) + b"behind")
        self.stop = len(FRONT) + count * ROOM

    def land(
        self,
        *,
        spoil: int | None = None,
        destination: bytes = ID,
        number: int = 0,
        keys: CryptoContext | None = None,
    ) -> range:
        sealer = Sealer(keys_of(self.crypto), ID, spin=True, room=bytearray(1 << 16))
        for at, payload in enumerate(self.payloads):
            sealer.add(self.first + at, payload)
        batch = bytearray(sealer.finish())
        segment = len(batch) // len(self.payloads)
        assert data_room(segment, ID) == ROOM
        if spoil is not None:
            batch[spoil * segment + 40] ^= 1
        sent = bytes(batch)
        expected = Expected(
            self.first + number, STREAM, OFFSET, memoryview(self.memory)[: self.stop]
        )
        landed = land_packets(
            keys_of(keys or self.crypto), memoryview(batch), segment, destination, expected
        )
        assert bytes(batch) == sent
        assert self.memory.startswith(FRONT)
        assert self.memory.endswith(b"behind")
        for at in landed:
            start = len(FRONT) + at * ROOM
            assert self.memory[start : start + ROOM] == self.data[at]
        return landed


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_all_that_is_as_expected_lands(suite: CipherSuite) -> None:
    assert Transfer(context(suite), 20).land() == range(20)  # past a wrap of 16 bits


def test_the_last_may_be_another() -> None:
    for other in (
        frame(7, os.urandom(ROOM), kind=FULL_FRAME_TYPE | WITH_FIN),
        frame(7, os.urandom(ROOM), stream=STREAM + 4),
        b"\x01" * LENGTH,
    ):
        transfer = Transfer(context(SUITES[0]), 8)
        transfer.payloads[-1] = other
        assert transfer.land() == range(7)


@pytest.mark.parametrize("at", range(8))
def test_what_lies_before_one_that_is_not_authentic_stays_out(at: int) -> None:
    assert Transfer(context(SUITES[0]), 8).land(spoil=at) == (
        range(7) if at == 7 else range(at + 1, 8)
    )


@pytest.mark.parametrize(
    "other",
    [
        frame(3, bytes(ROOM), stream=STREAM + 4),
        frame(4, bytes(ROOM)),
        frame(3, bytes(ROOM), kind=FULL_FRAME_TYPE | WITH_LENGTH),
        b"\x01" * LENGTH,
    ],
    ids=["another stream", "another offset", "a length", "pings"],
)
def test_what_lies_before_another_frame_stays_out(other: bytes) -> None:
    transfer = Transfer(context(SUITES[0]), 8)
    transfer.payloads[3] = other
    assert transfer.land() == range(4, 8)


def test_nothing_lands_of_another_transfer() -> None:
    transfer = Transfer(context(SUITES[0]), 8)
    transfer.payloads = [frame(at + 1, bytes(ROOM)) for at in range(8)]
    assert len(transfer.land()) == 0


def test_nothing_lands_under_another_connection_id_number_or_key_phase() -> None:
    crypto = context(SUITES[0])
    assert len(Transfer(crypto, 8).land(destination=bytes(8))) == 0
    assert len(Transfer(crypto, 8).land(number=1)) == 0
    assert len(Transfer(crypto, 8).land(keys=context(SUITES[0], phase=1))) == 0


def test_no_more_lands_than_there_is_memory_for() -> None:
    transfer = Transfer(context(SUITES[0]), 8)
    transfer.stop -= 1
    transfer.memory[transfer.stop :] = b"behind"
    assert transfer.land() == range(7)


def test_few_packets_are_not_worth_it() -> None:
    assert len(Transfer(context(SUITES[0]), 3).land()) == 0
