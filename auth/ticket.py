"""The text that one person gives another to reach a node: ``mesh1`` and base32 characters.

A ticket holds the node id, addresses to try, and perhaps a one-time invite. It is made to survive
mail and chat: any case, broken over lines, selected by a double click. Two checksums tell what went
wrong with one that arrives damaged::

    "mesh1" base32( length of the body: 2 bytes | CRC-16 of the length: 2 bytes
                    | body: CBOR [node id, [[IP address, port]...], invite or null]
                    | CRC-32 of the body: 4 bytes )

The checksums are against accidents only. What must be believed is proved elsewhere: the node id by
TLS, the invite by its signature.
"""

from __future__ import annotations

import binascii
import ipaddress
import zlib
from dataclasses import dataclass, field

from auth.encoding import CborItem, base32_decode, base32_encode, cbor_decode, cbor_encode
from auth.errors import IdentityError, TicketError
from auth.identity import NodeId

__all__ = ["SocketAddress", "Ticket", "check_address"]

SocketAddress = tuple[str, int]
"""A literal IPv4 or IPv6 address, never a name to look up, and a port."""

MAX_ADDRESSES = 16
"""A host with more candidates than this gains nothing by naming them all."""

MAX_TEXT = 2048
"""Longest ticket in characters, white space apart."""

_PREFIX = "mesh1"
_FAMILY = "mesh"
_HEADER_BYTES = 4
_CHECKSUM_BYTES = 4
_MAX_BODY = (MAX_TEXT - len(_PREFIX)) * 5 // 8 - _HEADER_BYTES - _CHECKSUM_BYTES

_COPY_AGAIN = "Copy the whole ticket again."


@dataclass(frozen=True, slots=True)
class Ticket:
    """How to reach a node, and perhaps the right to enter it once.

    Args:
        node_id: the node; a connection to anybody else will be refused.
        addresses: up to 16 addresses to try.
        invite: an encoded :class:`~auth.invite.Invite`; whoever holds it can use it, so that it is
            left out of ``repr``.

    Raises:
        TicketError: an address is no literal, means no single host, or has port 0; there are too
            many of them; or it is all too long.
    """

    node_id: NodeId
    addresses: tuple[SocketAddress, ...] = ()
    invite: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            addresses = tuple(check_address(address) for address in self.addresses)
        except ValueError as error:
            raise TicketError("making a ticket", why=str(error)) from None
        if len(addresses) > MAX_ADDRESSES:
            raise TicketError(
                "making a ticket",
                why=f"{len(addresses)} addresses are more than the limit of {MAX_ADDRESSES}",
            )
        object.__setattr__(self, "addresses", addresses)
        if len(self._body()) > _MAX_BODY:
            raise TicketError("making a ticket", why=f"it would exceed {MAX_TEXT} characters")

    def encode(self) -> str:
        """Return the text, ``mesh1...``, of at most 2048 characters."""
        body = self._body()
        checksum = zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "big")
        return _PREFIX + base32_encode(_header(len(body)) + body + checksum)

    @classmethod
    def decode(cls, text: str) -> Ticket:
        """Read a ticket, in any case and with any white space in it.

        Raises:
            TicketError: ``why`` tells apart what is truncated, altered, of a newer version, and no
                ticket at all.
        """
        if len(text) > 4 * MAX_TEXT:
            raise _refused("it is not a ticket: it is far too long")
        compact = "".join(text.split()).lower()
        _check_prefix(compact)
        try:
            data = base32_decode(compact.removeprefix(_PREFIX))
        except ValueError as error:
            raise _refused(f"it was altered: behind mesh1, {error}", fix=_COPY_AGAIN) from None
        ticket = cls._from_body(_checked_body(data, compact))
        if ticket.encode() != compact:
            raise _refused("it was altered: it is not in the one form of its content")
        return ticket

    def _body(self) -> bytes:
        addresses: list[CborItem] = [
            [ipaddress.ip_address(host).packed, port] for host, port in self.addresses
        ]
        return cbor_encode([self.node_id.raw, addresses, self.invite])

    @classmethod
    def _from_body(cls, body: bytes) -> Ticket:
        # The checksum was right: a bad body was made so by its author.
        try:
            match cbor_decode(body, max_bytes=_MAX_BODY):
                case [bytes(node_id), [*addresses], (bytes() | None) as invite]:
                    return cls(NodeId(node_id), tuple(map(_address, addresses)), invite)
                case _:
                    raise ValueError("its fields are not those of a ticket")
        except ValueError as error:
            raise _refused(f"it is not a ticket: {error}") from None
        except IdentityError as error:
            raise _refused(f"it is not a ticket: {error.why}") from None


def check_address(address: SocketAddress) -> SocketAddress:
    """Return ``address`` with its host in the usual spelling, if another machine can dial it.

    Raises:
        ValueError: no address literal, one that means no single host, or a port outside 1-65535.
    """
    host, port = address
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(f"{host!r} is not an IPv4 or IPv6 address") from None
    if literal.is_unspecified or literal.is_multicast:
        raise ValueError(f"{host} is not the address of one host")
    if isinstance(literal, ipaddress.IPv6Address) and literal.scope_id is not None:
        raise ValueError(f"{host} has a zone, which means nothing on another machine")
    if not 0 < port <= 0xFFFF:
        raise ValueError(f"port {port} of {host} is not within 1 and 65535")
    return str(literal), port


def _check_prefix(text: str) -> None:
    if text.startswith(_PREFIX):
        return
    if text and _PREFIX.startswith(text):
        raise _refused("it is truncated: there is nothing but its beginning", fix=_COPY_AGAIN)
    version = text.removeprefix(_FAMILY)[:1]
    if text.startswith(_FAMILY) and version in tuple("23456789"):
        raise _refused(
            f"it is of version {version}, and this program reads version 1", fix="Update quicmesh."
        )
    raise _refused(
        "it is not a ticket: a ticket starts with 'mesh1'",
        fix="Copy what `mesh up` or `mesh invite` has printed on the other machine.",
    )


def _checked_body(data: bytes, text: str) -> bytes:
    if len(data) < _HEADER_BYTES:
        raise _refused(f"it is truncated after {len(text)} characters", fix=_COPY_AGAIN)
    length = int.from_bytes(data[:2], "big")
    if data[:_HEADER_BYTES] != _header(length):
        raise _refused("it was altered: the checksum of its length is wrong", fix=_COPY_AGAIN)
    size = _HEADER_BYTES + length + _CHECKSUM_BYTES
    if len(data) < size:
        whole = len(_PREFIX) + -(-size * 8 // 5)
        raise _refused(
            f"it is truncated: {len(text)} of {whole} characters are here", fix=_COPY_AGAIN
        )
    body = data[_HEADER_BYTES : size - _CHECKSUM_BYTES]
    if zlib.crc32(body) != int.from_bytes(data[size - _CHECKSUM_BYTES : size], "big"):
        raise _refused("it was altered: its checksum is wrong", fix=_COPY_AGAIN)
    if len(data) > size:
        raise _refused("it was altered: something follows its end", fix=_COPY_AGAIN)
    return body


def _header(length: int) -> bytes:
    size = length.to_bytes(2, "big")
    return size + binascii.crc_hqx(size, 0xFFFF).to_bytes(2, "big")


def _address(item: CborItem) -> SocketAddress:
    match item:
        case [bytes(packed), int(port)] if len(packed) in (4, 16):
            return str(ipaddress.ip_address(packed)), port
        case _:
            raise ValueError("one of its addresses is malformed")


def _refused(why: str, *, fix: str | None = None) -> TicketError:
    return TicketError("reading a ticket", why=why, fix=fix)
