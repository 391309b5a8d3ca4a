"""What ranks write to each other, as CBOR values (RFC 8949), checked as they are read.

A pair of ranks has two streams in each group, both opened by the lower rank::

    request   {"group": bytes(16), "rank": int, "stream": "control" | "data"}
    data      [channel, eager, sequence, part, nbytes, name, dtype, numel, detail], then the payload
    control   [["want", channel, count] | ["offer", channel, index, header] | ["ack", cost]
               | ["fail", {"code": .., "ranks": [..], "why": .., "fix": ..}], ...]
"""

from __future__ import annotations

import struct
from typing import Any

from mesh.collective import CollectiveError, Header, Signature
from mesh.collective.errors import error_class
from mesh.collective.exchange import Channel
from transport import CborValue, ProtocolError, cbor
from transport.codes import plain_text

__all__ = [
    "HEADER_BYTES",
    "NONCE_BYTES",
    "encode_message",
    "failure_value",
    "header_value",
    "parse_control",
    "parse_failure",
    "parse_message",
    "parse_request",
    "request_value",
]

NONCE_BYTES = 16
"""Length of the number that tells a group from all others, its own former lives included."""

HEADER_BYTES = 1024
"""Longest header of a message."""

MAX_TEXT = 512
"""Longest text in a report of a failure."""

MAX_RANKS = 4096
"""Most ranks in one."""

_LENGTH = struct.Struct(">I")
_STREAMS = ("control", "data")


def request_value(nonce: bytes, rank: int, stream: str) -> CborValue:
    """Return the value with which `rank` opens one of its two streams."""
    return {"group": nonce, "rank": rank, "stream": stream}


def parse_request(value: CborValue) -> tuple[bytes, int, str]:
    """Return group nonce, rank and kind of a stream."""
    match value:
        case {"group": bytes(nonce), "rank": int(rank), "stream": str(stream), **rest} if not rest:
            if len(nonce) == NONCE_BYTES and stream in _STREAMS and 0 <= rank < 1 << 31:
                return nonce, rank, stream
    raise ProtocolError("opening of a collective stream", why="the request is malformed")


def header_value(header: Header) -> list[CborValue]:
    """Return what describes a message."""
    one = header.signature
    return [
        header.sequence,
        header.part,
        header.nbytes,
        one.name,
        one.dtype,
        one.numel,
        one.detail,
    ]


def encode_message(channel: Channel, eager: bool, header: Header) -> bytes:
    """Return what goes before a payload on the data stream, with its length before it."""
    body = cbor.encode([channel, eager, *header_value(header)], max_size=HEADER_BYTES)
    return _LENGTH.pack(len(body)) + body


def parse_message(value: CborValue) -> tuple[Channel, bool, Header]:
    """Return channel, whether it was sent unasked, and header."""
    match value:
        case [int(channel), bool(eager), *header] if -1 <= channel < 1 << 63:
            return channel, eager, _header(header)
    raise ProtocolError("receiving a message", why="its header is malformed")


def parse_control(value: CborValue) -> list[tuple[str, list[Any]]]:
    """Return the entries of a control message, each a verb and its arguments."""
    entries: list[tuple[str, list[Any]]] = []
    for entry in value if isinstance(value, list) else [None]:
        match entry:
            case ["want", int(channel), int(count)] if -1 <= channel < 1 << 63 and count >= 0:
                entries.append(("want", [channel, count]))
            case ["offer", int(channel), int(index), [*header]] if (
                -1 <= channel < 1 << 63 and index >= 0
            ):
                entries.append(("offer", [channel, index, _header(header)]))
            case ["ack", int(cost)] if cost >= 0:
                entries.append(("ack", [cost]))
            case ["fail", dict(report)]:
                entries.append(("fail", [report]))
            case _:
                raise ProtocolError("receiving a control message", why="it is malformed")
    return entries


def failure_value(error: CollectiveError) -> dict[str, CborValue]:
    """Return `error` as it is told to the other ranks."""
    value: dict[str, CborValue] = {"code": error.code, "ranks": list(error.ranks[:MAX_RANKS])}
    for name, text in (("why", error.why), ("fix", error.fix)):
        if text is not None:
            value[name] = text[:MAX_TEXT]
    return value


def parse_failure(value: dict[str, CborValue], what: str, size: int) -> CollectiveError:
    """Return the error that another rank told, about `what`."""
    ranks = value.get("ranks")
    texts = {
        name: plain_text(text)
        for name in ("why", "fix")
        if isinstance(text := value.get(name), str) and text
    }
    return error_class(str(value.get("code")))(
        what,
        ranks=tuple(
            rank
            for rank in (ranks if isinstance(ranks, list) else ())
            if type(rank) is int and 0 <= rank < size
        )[:MAX_RANKS],
        why=texts.get("why", "another rank failed"),
        fix=texts.get("fix"),
    )


def _header(value: list[Any]) -> Header:
    match value:
        case [
            int(sequence), int(part), int(nbytes),
            str(name), str(dtype), (int() | None) as numel, str(detail),
        ] if nbytes >= 0:  # fmt: skip
            return Header(Signature(name, dtype, numel, detail), sequence, part, nbytes)
    raise ProtocolError("receiving a message", why="its header is malformed")
