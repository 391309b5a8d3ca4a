"""What the two processes say to each other: what is written is read, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import EndpointConfig, NewcomerRules, ProtocolError, Rate
from transport.cbor import decode as decode_cbor
from transport.cbor import encode as encode_cbor
from transport.process.records import MAX_PACKET, MAX_PAYLOAD, Kind, decode, encode
from transport.process.setup import config_of, map_of

records = st.tuples(
    st.sampled_from(Kind),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**62),
    st.integers(0, 2**63),
    st.binary(max_size=100),
    st.integers(0, 3),
)


@given(st.lists(records, max_size=20))
def test_records_come_as_they_were_said(said: list[tuple[Kind, int, int, int, bytes, int]]) -> None:
    packet = b"".join(encode(*record) for record in said)
    came = [
        (r.kind, r.link, r.stream, r.number, bytes(r.payload), r.flags)
        for r in decode(memoryview(packet))
    ]
    assert came == said


@given(st.binary(max_size=200))
def test_whatever_comes_is_read_or_refused(packet: bytes) -> None:
    read = 0
    try:
        for record in decode(memoryview(packet)):
            read += 28 + len(record.payload)
    except ProtocolError:
        return
    assert read == len(packet)


@given(records, st.integers(1, 127))
def test_a_packet_cut_off_is_refused(
    record: tuple[Kind, int, int, int, bytes, int], cut: int
) -> None:
    packet = encode(*record)
    with pytest.raises(ProtocolError, match="cut off"):
        list(decode(memoryview(packet)[: max(1, len(packet) - cut)]))


def test_the_largest_record_is_a_packet() -> None:
    assert len(encode(Kind.DATA, payload=bytes(MAX_PAYLOAD))) == MAX_PACKET
    with pytest.raises(ProtocolError, match="a record of"):
        encode(Kind.DATA, payload=bytes(MAX_PAYLOAD + 1))


@pytest.mark.parametrize(
    "config",
    [
        EndpointConfig(),
        EndpointConfig(
            bind="127.0.0.1:0",
            advertise=("192.0.2.1:4433",),
            liveness=1.5,
            max_streams=7,
            newcomers=NewcomerRules(allow=("192.0.2.0/24",), per_host=Rate(1.0, 3)),
            placement="process",
        ),
    ],
)
def test_a_configuration_travels(config: EndpointConfig) -> None:
    told = decode_cbor(encode_cbor(map_of(config), max_size=MAX_PAYLOAD), max_size=MAX_PAYLOAD)
    assert isinstance(told, dict)
    assert config_of(told) == config
