"""What a node orders of its own executor, beside the batches that it passes on from a client.

Each is a frame of its own; that it is none of the client's is said by the frame's length (see
`executor`), which no client writes. Memory comes and goes as a descriptor beside a frame::

    AWAIT  arrival, handle, byte offset, bytes      what arrives is for that place
    FILL   arrival, bytes; the descriptor of memory with the bytes, unless they are none
    FAIL   arrival, error                           it does not arrive
    HAND   request, template of a read, handle      answered with a descriptor of sealed memory,
                                                    or as a read where there is no such memory
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

from auth import MeshError
from transport import CborValue, ProtocolError, cbor
from transport.codes import decode_error, encode_error

__all__ = ["Await", "Fail", "Fill", "Hand", "Order", "decode", "encode"]

_MAX_ORDER = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Await:
    """What arrives as `arrival` is for a place in a storage."""

    arrival: int
    handle: int
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """It has arrived, in memory whose descriptor is beside this."""

    arrival: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fail:
    """It does not arrive."""

    arrival: int
    error: MeshError


@dataclasses.dataclass(frozen=True, slots=True)
class Hand:
    """Hand over the elements of a tensor."""

    request: int
    template: int
    handle: int


Order: TypeAlias = Await | Fill | Fail | Hand


def encode(order: Order) -> bytes:
    """Return the order as it travels."""
    fields: CborValue
    match order:
        case Await(arrival, handle, offset, nbytes):
            fields = ["await", arrival, handle, offset, nbytes]
        case Fill(arrival, nbytes):
            fields = ["fill", arrival, nbytes]
        case Fail(arrival, error):
            fields = ["fail", arrival, encode_error(error)]
        case Hand(request, template, handle):
            fields = ["hand", request, template, handle]
    return cbor.encode(fields, max_size=_MAX_ORDER)


def decode(data: bytes | bytearray) -> Order:
    """Return the order in `data`.

    Raises:
        ProtocolError: it is none.
    """
    match cbor.decode(bytes(data), max_size=_MAX_ORDER):
        case ["await", int(arrival), int(handle), int(offset), int(nbytes)]:
            return Await(arrival, handle, offset, nbytes)
        case ["fill", int(arrival), int(nbytes)]:
            return Fill(arrival, nbytes)
        case ["fail", int(arrival), error]:
            return Fail(arrival, decode_error(error, peer=None))
        case ["hand", int(request), int(template), int(handle)]:
            return Hand(request, template, handle)
    raise ProtocolError("an order for an executor", why="there is none such")
