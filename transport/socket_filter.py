"""Drops in the kernel what can't be for us, so that junk takes no place in the receive queue.

Datagrams of a flood come faster than Python takes them from the socket, and fill its queue: those
of honest peers are then lost before anybody has looked at them. A classic BPF program on the socket
(Linux, socket(7) SO_ATTACH_FILTER; no privilege is needed) lets through what is sent to one of our
connection ids, which it knows by their tag (`transport.protocol.connection_ids`), what may begin a
connection, and what has the size of a stateless reset. Everything else never was. Under a flood of
these, or of what is sent to ids that are no longer in use, a share of that is let through, and all
of what is sent to the connections there are. The demultiplexer judges as it would without a filter:
this is about the queue, and no part of what is safe.

Where datagrams are aggregated on their way in, the program sees the first of them, and the
demultiplexer each.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence

import anyio

from transport.protocol.connection_ids import ID_LENGTH, RANDOM_LENGTH, ROUNDS, ConnectionIds
from transport.protocol.demux import (
    MIN_INITIAL_DATAGRAM,
    MIN_ORIGINAL_ID_LENGTH,
    Demultiplexer,
)
from transport.protocol.newcomers import INTERVAL, StrangerBudget
from transport.protocol.stateless_reset import FIXED_BIT, LEAST, MOST

__all__ = ["FloodGuard", "assemble", "attach"]

MAX_LISTED = 1024
"""Connections that a program names: two instructions each, of the 4096 that one may have."""

_SO_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("=HBBI")

# Instructions of classic BPF: linux/filter.h and linux/bpf_common.h.
_LD_BYTE_AT, _LD_HALF_AT, _LD_WORD_AT = 0x30, 0x28, 0x20
_LD_BYTE_AT_X = 0x50
_LD_LENGTH = 0x80
_LD_IMMEDIATE, _LD_MEMORY, _LDX_MEMORY, _ST = 0x00, 0x60, 0x61, 0x02
_ADD_X, _XOR, _XOR_X, _OR, _OR_X, _AND, _LSH, _RSH = 0x0C, 0xA4, 0xAC, 0x44, 0x4C, 0x54, 0x64, 0x74
_JUMP, _JEQ, _JEQ_X, _JGT, _JGE, _JSET = 0x05, 0x15, 0x1D, 0x25, 0x35, 0x45
_RETURN, _TAX = 0x06, 0x07

_RANDOM = 0xFFFFF000 + 56
"""Where a load finds a random word: SKF_AD_OFF + SKF_AD_RANDOM."""

_WHOLE = 0xFFFFFFFF
"""Bytes to keep of a datagram let through."""

# Offsets: the program sees the UDP header first.
_UDP_HEADER = 8
_FIRST_BYTE = _UDP_HEADER
_SHORT_ID = _UDP_HEADER + 1
_VERSION = _UDP_HEADER + 1
_LONG_ID_LENGTH = _UDP_HEADER + 5
_LONG_ID = _UDP_HEADER + 6

_LONG_HEADER = 0x80
_MAX_ID_LENGTH = 20
"""RFC 9000 section 17.2, asked here of every version: ids of junk are mostly longer."""

_FORM_AND_TYPE = 0xF0
_INITIAL_OF_VERSION = {1: 0xC0, 0x6B3343CF: 0xD0}
"""First byte of an Initial, four bits of it, by version (RFC 9000 17.2.2, RFC 9369 3.2)."""

_WORDS, _TAG = (4, 5), 6
"""Where the scratch memory has the id's two words and its tag; the hash's state is in 0 to 3."""

_log = logging.getLogger("quicmesh.transport")


class FloodGuard:
    """Keeps strangers to their part of one socket's queue.

    Args:
        sock: the socket, which gets its filter at once.
        ids: draws the connection ids of its endpoint.
        demux: the table of its connections.
        budget: the time there is for strangers, which `demux` asks.
    """

    def __init__(
        self,
        sock: socket.socket,
        ids: ConnectionIds,
        demux: Demultiplexer,
        budget: StrangerBudget,
    ) -> None:
        self.budget = budget
        self._socket = sock
        self._ids = ids
        self._demux = demux
        self._exceeded = anyio.Event()
        self._attach()

    def spend(self, seconds: float, now: float) -> None:
        """Take note of time spent on strangers' datagrams, until `now` of `time.monotonic`."""
        self.budget.spend(seconds, now, on_strangers=True)
        if self.budget.is_exceeded and not self._exceeded.is_set():
            self._exceeded.set()

    async def run(self) -> None:
        """Adapt the filter to floods, until cancelled."""
        while True:
            await self._exceeded.wait()
            while self.budget.adapt(time.monotonic()):
                self._attach()
                await anyio.sleep(INTERVAL)
            self._attach()
            self._exceeded = anyio.Event()

    def _attach(self) -> None:
        share = self.budget.share
        program = assemble(
            self._ids,
            newcomers=share if self._demux.is_listening else 0.0,
            listed=None if share == 1.0 else self._demux.ids_in_use(),
            others=share,
        )
        attach(self._socket, program)


def attach(sock: socket.socket, program: bytes) -> bool:
    """Put a program on a UDP socket, in place of an earlier one; return whether it is there now.

    What waits in the socket's queue already stays there.
    """
    if sys.platform != "linux":
        _say_once("this system has none")
        return False
    count = len(program) // _INSTRUCTION.size
    buffer = ctypes.create_string_buffer(program, len(program))
    try:
        sock.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("@HP", count, ctypes.addressof(buffer)),
        )
    except OSError as error:
        _say_once(str(error))
        return False
    return True


@functools.cache
def _say_once(why: str) -> None:
    _log.debug("no filter for datagrams in the kernel, floods can fill the queue: %s", why)


def assemble(
    ids: ConnectionIds,
    *,
    newcomers: float,
    listed: Sequence[bytes] | None = None,
    others: float = 1.0,
) -> bytes:
    """Return a program, as an array of ``struct sock_filter``.

    Args:
        ids: draws the connection ids that are let through.
        newcomers: the share let through of what may begin a connection, from 0 to 1.
        listed: the connection ids in use; None for all that `ids` may have drawn.
        others: the share let through of what is sent to other ids that `ids` may have drawn, and
            of what may be a stateless reset, whose id is noise.
    """
    code = _Assembler()
    code.add(_LD_BYTE_AT, _FIRST_BYTE)
    code.when(_JSET, _LONG_HEADER, "long header")
    _load_id(code, _SHORT_ID)
    code.jump("hash")
    code.label("long header")
    code.add(_LD_BYTE_AT, _LONG_ID_LENGTH)
    code.unless(_JEQ, ID_LENGTH, "newcomer")
    _load_id(code, _LONG_ID)

    code.label("hash")
    _hash(code, ids.key)
    code.add(_AND, 0xFFFF)
    code.add(_LDX_MEMORY, _TAG)
    code.when(_JEQ_X, 0, "ours")
    code.add(_LD_BYTE_AT, _FIRST_BYTE)
    code.when(_JSET, _LONG_HEADER, "newcomer")
    code.unless(_JSET, FIXED_BIT, "drop")
    code.add(_LD_LENGTH)
    code.unless(_JGE, _UDP_HEADER + LEAST, "drop")
    code.when(_JGT, _UDP_HEADER + MOST, "drop")
    _sample(code, others)

    code.label("newcomer")
    _judge_newcomer(code, newcomers)

    code.label("ours")
    if listed is not None and len(listed) <= MAX_LISTED:
        code.add(_LD_MEMORY, _WORDS[0])
        for connection_id in listed:
            # Together with the tag, the first word is as good as the whole.
            (word,) = struct.unpack_from(">I", connection_id)
            code.when(_JEQ, word, "accept")
        _sample(code, others)
    code.label("accept")
    code.add(_RETURN, _WHOLE)
    code.label("drop")
    code.add(_RETURN, 0)
    return code.program()


def _load_id(code: _Assembler, offset: int) -> None:
    """Keep the words of an id and its tag; a datagram that has no room for them is dropped."""
    code.add(_LD_WORD_AT, offset)
    code.add(_ST, _WORDS[0])
    code.add(_LD_HALF_AT, offset + 4)
    code.add(_OR, RANDOM_LENGTH << 24)
    code.add(_ST, _WORDS[1])
    code.add(_LD_HALF_AT, offset + RANDOM_LENGTH)
    code.add(_ST, _TAG)


def _judge_newcomer(code: _Assembler, share: float) -> None:
    """Let through what may begin a connection (RFC 9000 sections 5.2.2, 7.2 and 14.1)."""
    code.add(_LD_LENGTH)
    code.unless(_JGE, _UDP_HEADER + MIN_INITIAL_DATAGRAM, "drop")
    code.add(_LD_BYTE_AT, _LONG_ID_LENGTH)
    code.unless(_JGE, MIN_ORIGINAL_ID_LENGTH, "drop")
    code.when(_JGT, _MAX_ID_LENGTH, "drop")
    code.add(_TAX)
    code.add(_LD_BYTE_AT_X, _LONG_ID)
    code.when(_JGT, _MAX_ID_LENGTH, "drop")
    for version, first in _INITIAL_OF_VERSION.items():
        code.add(_LD_WORD_AT, _VERSION)
        code.when(_JEQ, 0, "drop")
        code.unless(_JEQ, version, f"not version {version}")
        code.add(_LD_BYTE_AT, _FIRST_BYTE)
        code.add(_AND, _FORM_AND_TYPE)
        code.unless(_JEQ, first, "drop")
        code.label(f"not version {version}")
    _sample(code, share)


def _sample(code: _Assembler, share: float) -> None:
    """Let through `share` of what comes here."""
    if share < 1:
        code.add(_LD_WORD_AT, _RANDOM)
        code.when(_JGE, int(share * 2**32), "drop")
    code.jump("accept")


def _hash(code: _Assembler, key: tuple[int, int]) -> None:
    """`transport.protocol.connection_ids.hash_words` of the two words; the result is in A."""
    for place, value in enumerate((key[0], key[1], key[0] ^ 0x6C796765, key[1] ^ 0x74656462)):
        code.add(_LD_IMMEDIATE, value)
        code.add(_ST, place)
    for word in _WORDS:
        _combine(code, _XOR_X, 3, word)
        for _ in range(ROUNDS[0]):
            _mix(code)
        _combine(code, _XOR_X, 0, word)
    code.add(_LD_MEMORY, 2)
    code.add(_XOR, 0xFF)
    code.add(_ST, 2)
    for _ in range(ROUNDS[1]):
        _mix(code)
    code.add(_LD_MEMORY, 1)
    code.add(_LDX_MEMORY, 3)
    code.add(_XOR_X)


def _mix(code: _Assembler) -> None:
    for into, other, bits in ((0, 1, 5), (2, 3, 8), (0, 3, 7), (2, 1, 13)):
        _combine(code, _ADD_X, into, other)
        _rotate(code, other, bits)
        _combine(code, _XOR_X, other, into)
        if other == 1:
            _rotate(code, into, 16)


def _combine(code: _Assembler, operation: int, into: int, other: int) -> None:
    code.add(_LD_MEMORY, into)
    code.add(_LDX_MEMORY, other)
    code.add(operation)
    code.add(_ST, into)


def _rotate(code: _Assembler, place: int, bits: int) -> None:
    code.add(_LD_MEMORY, place)
    code.add(_LSH, bits)
    code.add(_TAX)
    code.add(_LD_MEMORY, place)
    code.add(_RSH, 32 - bits)
    code.add(_OR_X)
    code.add(_ST, place)


class _Assembler:
    """Instructions with labels. A conditional jump has one byte for its way: it jumps to a jump."""

    def __init__(self) -> None:
        self._code: list[tuple[int, int, int, int | str]] = []
        self._labels: dict[str, int] = {}

    def add(self, operation: int, value: int = 0) -> None:
        self._code.append((operation, 0, 0, value))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def jump(self, target: str) -> None:
        self._code.append((_JUMP, 0, 0, target))

    def when(self, operation: int, value: int, target: str) -> None:
        """Go to `target` if the test holds, else on."""
        self._code.append((operation, 0, 1, value))
        self.jump(target)

    def unless(self, operation: int, value: int, target: str) -> None:
        """Go on if the test holds, else to `target`."""
        self._code.append((operation, 1, 0, value))
        self.jump(target)

    def program(self) -> bytes:
        return b"".join(self._encoded())

    def _encoded(self) -> Iterator[bytes]:
        for at, (operation, then, otherwise, value) in enumerate(self._code):
            if isinstance(value, str):
                value = self._labels[value] - at - 1
            yield _INSTRUCTION.pack(operation, then, otherwise, value)
