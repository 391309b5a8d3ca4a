"""What a program and its endpoint process say to each other: packets of records of one shape.

Each record has a kind, a connection, a stream, a number, and bytes. What they mean is said at the
kinds. Both processes are of one installation and one user, and neither is a stranger to the other;
lengths are checked all the same, so that a mistake ends in an error and not in other memory.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

from transport.cbor import CborValue
from transport.cbor import decode as decode_cbor
from transport.errors import ProtocolError

__all__ = [
    "ADMIT",
    "FACTS",
    "MAX_PACKET",
    "MAX_PAYLOAD",
    "PLACE",
    "VERSION",
    "Flag",
    "Kind",
    "Record",
    "decode",
    "encode",
    "malformed",
    "value_of",
]

VERSION = 1
"""Of what is said here. A process that is shared may be older or newer than a program."""

MAX_PACKET = 1 << 16
"""Bytes of one packet: several fit into the socket's buffer, as the kernel gives it by default."""

_HEAD = struct.Struct("=BBxxIQQI")
"""Kind, flags, connection, stream, number, length of what follows."""

MAX_PAYLOAD = MAX_PACKET - _HEAD.size

PLACE = struct.Struct("=QQ")
"""Where bytes lie in shared memory, and how many."""

ADMIT = struct.Struct("=IQ")
"""Streams that the peer may have open at a time; receive window of the connection."""

FACTS = struct.Struct("=dQQI")
"""Round trip in seconds or a negative number, bytes sent, bytes received, size of a datagram."""


class Kind(enum.IntEnum):
    """What a record says. The number is named in brackets."""

    # From the program.
    SETUP = 1
    """The first: the key, the configuration, the level of its log, `VERSION` (CBOR)."""
    OFFER = 2
    """Protocols to speak with strangers (CBOR)."""
    STOP_LISTENING = 3
    DIAL = 4
    """Make a connection, and begin its handshake (CBOR)."""
    ADMITTED = 5
    ADMIT = 6
    """Lift the limits of a stranger (`ADMIT`)."""
    OPEN = 7
    """Open a stream of ours."""
    WRITE = 8
    """Write the bytes to the stream, and its end with `Flag.FIN`."""
    LEND = 9
    """Write what lies at a `PLACE`, which stays as it is until it is acknowledged."""
    TAKE_BACK = 10
    """Let go of what was lent."""
    WANT = 11
    """Tell when no more than [so many] bytes are unacknowledged."""
    POST = 12
    """What comes from [an offset of the stream] on is wanted at a `PLACE`, with `Flag.MORE` to be
    followed by further ones. One of no length ends that."""
    WITHDRAW = 13
    """Let go of what was posted."""
    CONSUMED = 14
    """The application took [so many] bytes of what came in DATA."""
    RESET = 15
    """Give the stream up with [a code]. From the process: the peer has."""
    RELEASE = 16
    """The application drops the stream, with [a code]."""
    PING = 17
    CLOSE = 18
    """Close the connection with [a code] and a reason."""
    FLUSH = 19
    """Say FLUSHED [with this number] once everything written was acknowledged."""
    SYNC = 20
    """Say SYNCED [with this number]: what was said before has then been done."""

    # From the process.
    READY = 32
    DIALLED = 33
    """Datagrams to the address (CBOR) go out, or don't, and why."""
    INCOMING = 34
    """A stranger at an address (CBOR) begins a connection."""
    HANDSHAKE = 35
    """The peer has proved its key, and speaks a protocol (CBOR)."""
    OPENED = 36
    """The peer has opened a stream."""
    STREAMS = 37
    """The peer lets us open [so many] streams, counted from the first."""
    DATA = 38
    """Bytes of the stream, from [an offset] on, and its end with `Flag.FIN`."""
    LANDED = 39
    """Everything before [an offset] has come to where it was wanted."""
    STOP = 40
    """The peer reads no more of the stream, with [a code]."""
    ACKED = 41
    """The peer has acknowledged [so many] bytes; with `Flag.FIN`, and will no more."""
    PONG = 42
    ENDED = 43
    """The connection is over (CBOR)."""
    TERMINATED = 44
    """Its closing period is over too."""
    FLUSHED = 45
    SYNCED = 46
    FACTS = 47
    """Figures of the connection (`FACTS`), and where its datagrams go (the rest, as text)."""
    REPORT = 48
    """Figures of the socket (CBOR)."""
    LOG = 49
    """A record of the process's log (CBOR)."""
    JOINED = 50
    """The program is one of those that the process [of this id] serves."""
    REFUSED = 51
    """It is not, and why (CBOR)."""
    LEAVING = 52
    """The process ends, and why (CBOR)."""


class Flag(enum.IntFlag):
    """What is said beside."""

    NONE = 0
    FIN = 1
    MORE = 2


class Record(NamedTuple):
    """One record. The payload is good until the next packet is taken."""

    kind: Kind
    flags: int
    link: int
    stream: int
    number: int
    payload: memoryview


def encode(
    kind: Kind,
    link: int = 0,
    stream: int = 0,
    number: int = 0,
    payload: bytes | memoryview = b"",
    flags: int = 0,
) -> bytes:
    """Return one record.

    Raises:
        ProtocolError: the payload is larger than any packet.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError("the endpoint process", why=f"a record of {len(payload)} bytes")
    return _HEAD.pack(kind, flags, link, stream, number, len(payload)) + payload


def decode(packet: memoryview) -> Iterator[Record]:
    """Return the records of a packet.

    Raises:
        ProtocolError: it is none of ours.
    """
    at, size = 0, len(packet)
    while at < size:
        start = at + _HEAD.size
        if start > size:
            raise _malformed("cut off in a head")
        kind, flags, link, stream, number, length = _HEAD.unpack_from(packet, at)
        at = start + length
        if at > size:
            raise _malformed("cut off in a payload")
        try:
            yield Record(Kind(kind), flags, link, stream, number, packet[start:at])
        except ValueError:
            raise _malformed(f"a record of kind {kind}") from None


def value_of(record: Record) -> CborValue:
    """Return the value that a record carries.

    Raises:
        ProtocolError: it carries none.
    """
    return decode_cbor(bytes(record.payload), max_size=MAX_PAYLOAD)


def malformed() -> ProtocolError:
    """Return what is raised of a value that is not as it should be."""
    return ProtocolError("the endpoint process", why="a record that is not as it should be")


def _malformed(why: str) -> ProtocolError:
    return ProtocolError("the endpoint process", stage="receive", why=f"a packet {why}")
