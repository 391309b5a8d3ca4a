"""Packets sealed and opened in batches, against aioquic's own packet by packet, and RFC 9001's."""

from __future__ import annotations

import os

import pytest
from aioquic.quic.crypto import CryptoContext
from aioquic.quic.packet import QuicProtocolVersion
from aioquic.quic.packet import decode_packet_number as decode_upstream
from aioquic.tls import CipherSuite
from cryptography.exceptions import InvalidTag
from hypothesis import given
from hypothesis import strategies as st

from transport.protocol.batch.sealing import (
    Sealer,
    decode_packet_number,
    open_packet,
    open_packets,
    seal_packet,
)
from transport.protocol.batch.writer import keys_of

SUITES = list(CipherSuite)[:3]
ID = b"\x01\x02\x03\x04\x05\x06\x07\x08"


def context(suite: CipherSuite, secret: bytes = b"s" * 32, phase: int = 0) -> CryptoContext:
    made = CryptoContext(key_phase=phase)
    made.setup(cipher_suite=suite, secret=secret, version=QuicProtocolVersion.VERSION_1)
    return made


def sealed(
    crypto: CryptoContext, payloads: list[bytes], first: int, *, spin: bool = False
) -> tuple[bytearray, int]:
    """A batch of `payloads`, numbered from `first`, and the size of its packets."""
    sealer = Sealer(keys_of(crypto), ID, spin=spin, room=bytearray(65536))
    size = max(sealer.add(first + n, payload) for n, payload in enumerate(payloads))
    return bytearray(sealer.finish()), size


def opened(
    crypto: CryptoContext, batch: bytearray, segment: int, expected: int
) -> tuple[list[tuple[int, bytes]], list[tuple[int, int]]]:
    plain = bytearray(len(batch))
    found, others = open_packets(
        keys_of(crypto), batch, len(batch), segment, ID, expected, memoryview(plain)
    )
    return [(number, bytes(plain[start:stop])) for number, start, stop in found], others


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_upstream_opens_what_is_sealed_here(suite: CipherSuite, spin: bool) -> None:
    crypto = context(suite)
    payloads = [os.urandom(500) for _ in range(20)] + [b"ab"]
    batch, size = sealed(crypto, payloads, 0xFFF8, spin=spin)
    for n, payload in enumerate(payloads):
        packet = bytes(batch[n * size : (n + 1) * size])
        header, plain, number, updated = crypto.decrypt_packet(packet, 9, 0xFFF8 + n)
        assert (plain, number, updated) == (payload, 0xFFF8 + n, False)
        assert header[0] == 0x41 | spin << 5
        assert header[1:9] == ID


@pytest.mark.parametrize("number_size", [1, 2, 3, 4])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_what_upstream_seals_is_opened_here(suite: CipherSuite, number_size: int) -> None:
    crypto = context(suite)
    batch, numbers = bytearray(), [70_000 + n for n in range(8)]
    payloads = [bytes([n]) * 300 for n in range(8)]
    for number, payload in zip(numbers, payloads, strict=True):
        truncated = number & ((1 << 8 * number_size) - 1)
        header = bytes([0x40 | (number_size - 1)]) + ID + truncated.to_bytes(number_size, "big")
        batch += crypto.encrypt_packet(header, payload, number)
    found, others = opened(crypto, batch, len(batch) // 8, numbers[0])
    assert found == list(zip(numbers, payloads, strict=True))
    assert others == []


@given(
    sizes=st.lists(st.integers(2, 1400), min_size=1, max_size=40),
    first=st.integers(0, (1 << 40)),
    suite=st.sampled_from(SUITES),
)
def test_any_batch_of_packets_of_one_size_comes_back(
    sizes: list[int], first: int, suite: CipherSuite
) -> None:
    crypto = context(suite)
    payloads = [os.urandom(sizes[0]) for _ in sizes[1:]] + [os.urandom(min(sizes[0], sizes[-1]))]
    batch, segment = sealed(crypto, payloads, first)
    found, others = opened(crypto, batch, segment, first)
    assert [payload for _, payload in found] == payloads
    assert [number for number, _ in found] == list(range(first, first + len(payloads)))
    assert others == []


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_one_bit_anywhere_costs_that_packet_and_no_other(suite: CipherSuite) -> None:
    crypto = context(suite)
    payloads = [bytes([n]) * 60 for n in range(4)]
    batch, size = sealed(crypto, payloads, 9)
    for at in range(size, 2 * size):
        for bit in (0, 4, 7):
            spoiled = bytearray(batch)
            spoiled[at] ^= 1 << bit
            found, _ = opened(crypto, spoiled, size, 9)
            assert [number for number, _ in found] == [9, 11, 12]


def test_packets_of_another_kind_are_left_to_others_in_their_place() -> None:
    crypto = context(SUITES[0])
    batch, size = sealed(crypto, [bytes(60)] * 6, 0)
    batch[1 * size] |= 0x80  # a long header
    batch[2 * size + 1] ^= 1  # another connection id
    other_phase, _ = sealed(context(SUITES[0], phase=1), [bytes(60)], 3)
    batch[3 * size : 4 * size] = other_phase
    batch += b"short"
    found, others = opened(crypto, batch, size, 0)
    assert [number for number, _ in found] == [0, 4, 5]
    assert sorted(others) == [
        (size, 2 * size),
        (2 * size, 3 * size),
        (3 * size, 4 * size),
        (6 * size, 6 * size + 5),
    ]


def test_datagrams_too_short_to_be_packets_are_left_to_others() -> None:
    crypto = context(SUITES[0])
    found, others = opened(crypto, bytearray(55), 10, 0)
    assert found == []
    assert others == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50), (50, 55)]


@given(
    st.sampled_from([8, 16, 24, 32]), st.integers(0, (1 << 62) - 1), st.integers(0, (1 << 32) - 1)
)
def test_packet_numbers_are_decoded_as_upstream_does(
    bits: int, expected: int, truncated: int
) -> None:
    truncated &= (1 << bits) - 1
    ours = decode_packet_number(truncated, bits, expected)
    assert ours == decode_upstream(truncated, bits, expected)


def test_the_example_of_the_rfc_is_decoded() -> None:
    """RFC 9000, appendix A.3."""
    assert decode_packet_number(0x9B32, 16, 0xA82F30EA + 1) == 0xA82F9B32


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_packet_by_itself_is_sealed_as_one_of_a_batch(
    suite: CipherSuite, phase: int, spin: bool
) -> None:
    crypto = context(suite, phase=phase)
    for number in (0, 0xFF, 0xFFFF, 0x10002, 0xABCDEF0123):
        for payload in (b"ab", os.urandom(70)):
            packet = seal_packet(keys_of(crypto), ID, number, payload, spin=spin)
            assert packet == sealed(crypto, [payload], number, spin=spin)[0]


@pytest.mark.parametrize("number_size", [1, 2, 3, 4])
@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_packet_of_upstream_by_itself_is_opened(suite: CipherSuite, number_size: int) -> None:
    crypto = context(suite)
    window = 1 << 8 * number_size
    expected = 5 * window
    for number in (expected, expected - window // 2 + 1, expected + window // 2):
        truncated = (number & (window - 1)).to_bytes(number_size, "big")
        header = bytes([0x40 | (number_size - 1)]) + ID + truncated
        packet = crypto.encrypt_packet(header, b"payload" * 9, number)
        assert open_packet(keys_of(crypto), packet, ID, expected) == (number, b"payload" * 9)


def test_a_packet_by_itself_that_is_something_else_is_not_opened() -> None:
    crypto = context(SUITES[0])
    keys = keys_of(crypto)
    packet = seal_packet(keys, ID, 3, bytes(60), spin=False)
    other_phase = seal_packet(keys_of(context(SUITES[0], phase=1)), ID, 3, bytes(60), spin=False)
    long_header = bytes([packet[0] | 0x80]) + packet[1:]
    other_id = packet[:1] + bytes([packet[1] ^ 1]) + packet[2:]
    for data in (long_header, other_id, other_phase, packet[:28], b"short", b""):
        assert open_packet(keys, data, ID, 3) is None


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_one_bit_anywhere_spoils_a_packet_by_itself(suite: CipherSuite) -> None:
    keys = keys_of(context(suite))
    packet = seal_packet(keys, ID, 9, bytes(30), spin=False)
    for at in range(len(packet)):
        for bit in (0, 4, 7):
            spoiled = packet[:at] + bytes([packet[at] ^ 1 << bit]) + packet[at + 1 :]
            try:
                assert open_packet(keys, spoiled, ID, 9) is None
            except InvalidTag:
                pass
