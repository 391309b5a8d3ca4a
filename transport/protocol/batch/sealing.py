"""1-RTT packets protected and opened many at a time, or one (RFC 9001 sections 5.3 and 5.4).

Pure functions of keys and bytes. A batch costs one call of the cipher for all its header masks, one
for each payload, and no copy of a packet. A packet by itself, as small messages have it, is done
without what makes that possible, in a third of the time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

from cryptography.exceptions import InvalidTag

__all__ = [
    "Keys",
    "Opened",
    "Sealer",
    "decode_packet_number",
    "open_packet",
    "open_packets",
    "seal_packet",
    "unmask",
]

TAG_SIZE = 16
SAMPLE_SIZE = 16
MAX_PACKET_NUMBER_SIZE = 4
"""The sample begins as if the packet number took this much (RFC 9001 section 5.4.2)."""

PACKET_NUMBER_SIZE = 2
"""What is sent: enough while less than 2^15 packets are in flight (RFC 9000 section 17.1)."""

MIN_PAYLOAD = MAX_PACKET_NUMBER_SIZE - PACKET_NUMBER_SIZE
"""Payload below which there is too little to sample."""

MAX_SAMPLINGS = 64
"""Pairs of a number of packets and their size that samples are taken from without a new `Struct`.
Of the largest batch one takes 4 KB."""

FIXED_BIT = 0x40
LONG_HEADER = 0x80
SPIN_BIT = 0x20
KEY_PHASE = 0x04
RESERVED_BITS = 0x18
CHECKED_BITS = LONG_HEADER | FIXED_BIT | RESERVED_BITS | KEY_PHASE
SHORT_HEADER_MASK = 0x1F
"""Bits of a short header's first byte that are protected."""

_SHORT_HEADER_MASKED = bytes(byte & SHORT_HEADER_MASK for byte in range(256))
"""For `bytes.translate`: leaves of each byte what `SHORT_HEADER_MASK` covers."""


Bytes: TypeAlias = bytes | bytearray | memoryview


class Aead(Protocol):
    """What `cryptography`'s AESGCM and ChaCha20Poly1305 have in common here."""

    def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        """Return the ciphertext, tag included."""

    def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
        """Return the plaintext, or raise InvalidTag."""

    def encrypt_into(
        self, nonce: bytes, data: bytes, associated_data: bytes, buf: memoryview
    ) -> int:
        """Encrypt into `buf`, tag included."""

    def decrypt_into(
        self, nonce: bytes, data: memoryview, associated_data: bytes, buf: memoryview
    ) -> int:
        """Decrypt into `buf`, or raise InvalidTag."""


class Keys(NamedTuple):
    """One direction's keys of one key phase."""

    aead: Aead
    iv: int
    """The nonce is this, exclusive-or the packet number, in 12 bytes."""
    mask: Callable[[bytes], bytes]
    """Header masks for samples, or for one sample where `masks_one`."""
    masks_one: bool
    """ChaCha20 makes a mask of 5 bytes for one sample; AES one of 16 for each of any number."""
    phase: int

    def masks(self, samples: Iterable[bytes]) -> tuple[bytes, int]:
        """Return the header masks for all samples in a row, and how far apart they begin."""
        if self.masks_one:
            return b"".join(map(self.mask, samples)), 5
        return self.mask(b"".join(samples)), SAMPLE_SIZE


class Sealer:
    """Makes one batch: packets of one size, the last perhaps shorter, one behind the other.

    Args:
        keys: the sending keys now in use.
        destination: the peer's connection id.
        spin: the spin bit (RFC 9000 section 17.4).
        room: where the batch is made.
    """

    def __init__(self, keys: Keys, destination: bytes, *, spin: bool, room: bytearray) -> None:
        self._keys = keys
        first = FIXED_BIT | spin << 5 | keys.phase << 2 | (PACKET_NUMBER_SIZE - 1)
        self._prefix = bytes((first,)) + destination
        self._number_at = len(self._prefix)
        self._header_size = self._number_at + PACKET_NUMBER_SIZE
        self._buffer = memoryview(room)
        self._stride = 0
        self.size = 0

    @staticmethod
    def overhead(destination: bytes) -> int:
        """Bytes that a packet has beside its payload."""
        return 1 + len(destination) + PACKET_NUMBER_SIZE + TAG_SIZE

    def add(self, number: int, payload: bytes) -> int:
        """Append packet `number`; return its size. At least `MIN_PAYLOAD` bytes of payload."""
        before = self.size
        self.add_run(number, [(payload,)])
        return self.size - before

    def add_run(self, number: int, payloads: Sequence[tuple[Bytes, ...]]) -> None:
        """Append packets, numbered from `number` on, whose payloads are of one length.

        Each is given in parts, put together only when its turn has come: a packet's worth of memory
        then serves them all, and stays in the processor's cache.
        """
        keys, buffer, prefix = self._keys, self._buffer, self._prefix
        encrypt, iv, header_size = keys.aead.encrypt_into, keys.iv, self._header_size
        size = header_size + sum(map(len, payloads[0])) + TAG_SIZE
        self._stride = self._stride or size
        first, stop = self.size, self.size + size * len(payloads)
        for start, parts in zip(range(first, stop, size), payloads, strict=True):
            body = start + header_size
            buffer[start:body] = header = prefix + (number & 0xFFFF).to_bytes(2, "big")
            nonce = (iv ^ number).to_bytes(12, "big")
            encrypt(nonce, b"".join(parts), header, buffer[body : start + size])
            number += 1
        self.size = stop

    def finish(self) -> memoryview:
        """Protect all headers and return the batch."""
        buffer, stride = self._buffer[: self.size], self._stride
        number_at = self._number_at
        sample_at = number_at + MAX_PACKET_NUMBER_SIZE
        masks, apart = self._keys.masks(_samples(buffer, sample_at, stride))
        # Column by column: what all packets have at one place is protected in one go.
        for at, column in (
            (0, masks[0::apart].translate(_SHORT_HEADER_MASKED)),
            (number_at, masks[1::apart]),
            (number_at + 1, masks[2::apart]),
        ):
            buffer[at::stride] = _xor(bytes(buffer[at::stride]), column)
        return buffer


def seal_packet(
    keys: Keys, destination: bytes, number: int, payload: bytes, *, spin: bool
) -> bytes:
    """Return one packet, as `Sealer` makes it. At least `MIN_PAYLOAD` bytes of payload."""
    first = FIXED_BIT | spin << 5 | keys.phase << 2 | (PACKET_NUMBER_SIZE - 1)
    truncated = number & 0xFFFF
    header = bytes((first,)) + destination + truncated.to_bytes(2, "big")
    body = keys.aead.encrypt((keys.iv ^ number).to_bytes(12, "big"), payload, header)
    mask = keys.mask(body[MIN_PAYLOAD : MIN_PAYLOAD + SAMPLE_SIZE])
    truncated ^= mask[1] << 8 | mask[2]
    return b"".join(
        (
            bytes((first ^ mask[0] & SHORT_HEADER_MASK,)),
            destination,
            truncated.to_bytes(2, "big"),
            body,
        )
    )


def open_packet(
    keys: Keys, packet: bytes, destination: bytes, expected: int
) -> tuple[int, bytes] | None:
    """Open one packet; return its number and payload, None if it is something else.

    Arguments, and what is something else, as for `open_packets`.

    Raises:
        InvalidTag: it looks right and is not authentic.
    """
    number_at = 1 + len(destination)
    sample_at = number_at + MAX_PACKET_NUMBER_SIZE
    sample = packet[sample_at : sample_at + SAMPLE_SIZE]
    if len(sample) < SAMPLE_SIZE or packet[1:number_at] != destination:
        return None
    mask = keys.mask(sample)
    first = packet[0] ^ mask[0] & SHORT_HEADER_MASK
    if first & CHECKED_BITS != FIXED_BIT | keys.phase << 2:
        return None
    length = (first & 3) + 1
    body = number_at + length
    truncated = _xor(packet[number_at:body], mask[1 : 1 + length])
    number = decode_packet_number(int.from_bytes(truncated, "big"), 8 * length, expected)
    header = bytes((first,)) + destination + truncated
    return number, keys.aead.decrypt((keys.iv ^ number).to_bytes(12, "big"), packet[body:], header)


Opened: TypeAlias = tuple[int, int, int]
"""A packet whose protection is off: its number, and where its payload begins and ends."""


def open_packets(
    keys: Keys,
    data: bytearray,
    size: int,
    segment: int,
    destination: bytes,
    expected: int,
    plain: memoryview,
) -> tuple[list[Opened], list[tuple[int, int]]]:
    """Open the packets of a batch: one in every `segment` bytes of the first `size` of `data`.

    Args:
        keys: the receiving keys now in use.
        destination: the connection id they must be addressed to.
        expected: the packet number expected next (RFC 9000 appendix A.3).
        plain: room for the payloads, `size` bytes.

    Returns:
        The packets that were authentic, in order, and the ranges of `data` that are something else:
        another connection id, a long header, another key phase, reserved bits that are set.
        Packets that look right and are not authentic are in neither.
    """
    number_at = 1 + len(destination)
    sample_stop = number_at + MAX_PACKET_NUMBER_SIZE + SAMPLE_SIZE
    starts = range(0, size, segment)
    others: list[tuple[int, int]] = []
    if segment < sample_stop:
        others = [(start, min(start + segment, size)) for start in starts]
        starts = starts[:0]
    elif size - starts[-1] < sample_stop:
        others.append((starts[-1], size))
        starts = starts[:-1]
    opened: list[Opened] = []
    if not starts:
        return opened, others
    view = memoryview(data)
    unmasked = unmask(keys, view, starts, number_at)
    decrypt, iv = keys.aead.decrypt_into, keys.iv
    # The fixed bit set, the header short, the reserved bits clear, the key phase ours.
    wanted = FIXED_BIT | keys.phase << 2
    # The spin bit and the packet number's size are free, and authenticated with the rest.
    prefixes = {
        wanted | free: bytes((wanted | free,)) + destination
        for free in (0, 1, 2, 3, SPIN_BIT, SPIN_BIT | 1, SPIN_BIT | 2, SPIN_BIT | 3)
    }
    for start, first, high, low in zip(starts, *unmasked.columns, strict=True):
        stop = start + segment
        if stop > size:
            stop = size
        body = start + number_at
        if first & CHECKED_BITS != wanted or data[start + 1 : body] != destination:
            others.append((start, stop))
            continue
        truncated = high << 8 | low
        if first & 3 == 1 and truncated == expected & 0xFFFF:
            number = expected
            body += 2
            header = prefixes[first] + truncated.to_bytes(2, "big")
        else:
            length = (first & 3) + 1
            at = start // segment * unmasked.apart + 1
            sent = _xor(data[body : body + length], unmasked.masks[at : at + length])
            number = decode_packet_number(int.from_bytes(sent, "big"), 8 * length, expected)
            header = prefixes[first] + sent
            body += length
        end = stop - TAG_SIZE
        try:
            decrypt((iv ^ number).to_bytes(12, "big"), view[body:stop], header, plain[body:end])
        except InvalidTag:
            continue
        if number >= expected:
            expected = number + 1
        opened.append((number, body, end))
    return opened, others


class Unmasked(NamedTuple):
    """What header protection hid, of many packets."""

    columns: tuple[bytes, bytes, bytes]
    """Their first bytes, then the first and the second bytes of their packet numbers."""
    masks: bytes
    apart: int
    """How far apart the masks of two packets begin."""


def unmask(keys: Keys, view: memoryview, starts: range, number_at: int) -> Unmasked:
    """Take header protection off the packets of `view` that begin at `starts`.

    Column by column: what all packets have at one place is unmasked in one go.
    """
    sample_at = number_at + MAX_PACKET_NUMBER_SIZE
    masks, apart = keys.masks(
        _samples(view[: starts[-1] + sample_at + SAMPLE_SIZE], sample_at, starts.step)
    )
    first, high, low = (
        bytes(view[at : starts[-1] + sample_at : starts.step])
        for at in (0, number_at, number_at + 1)
    )
    columns = (
        _xor(first, masks[0::apart].translate(_SHORT_HEADER_MASKED)),
        _xor(high, masks[1::apart]),
        _xor(low, masks[2::apart]),
    )
    return Unmasked(columns, masks, apart)


def _samples(view: memoryview, first: int, stride: int) -> Iterable[bytes]:
    """Return what header protection takes of each packet: one from `first`, and every `stride`."""
    count = 1 + (len(view) - first - SAMPLE_SIZE) // stride
    if count == 1:
        return (bytes(view[first : first + SAMPLE_SIZE]),)
    samples: Iterable[bytes] = _sampling(count, stride).unpack_from(view, first)
    return samples


@lru_cache(MAX_SAMPLINGS)
def _sampling(count: int, stride: int) -> struct.Struct:
    """Return what unpacks as many samples at once, in a third of the time that slices take."""
    every = f"{SAMPLE_SIZE}s{stride - SAMPLE_SIZE}x"
    return struct.Struct((count - 1) * every + f"{SAMPLE_SIZE}s")


def _xor(one: Bytes, other: bytes) -> bytes:
    """Return the exclusive-or of two strings of one length."""
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).to_bytes(len(one), "big")


def decode_packet_number(truncated: int, bits: int, expected: int) -> int:
    """Return the packet number that `truncated` stands for (RFC 9000 appendix A.3)."""
    window = 1 << bits
    number = (expected & ~(window - 1)) | truncated
    if number <= expected - window // 2 and number < (1 << 62) - window:
        return number + window
    if number > expected + window // 2 and number >= window:
        return number - window
    return number
