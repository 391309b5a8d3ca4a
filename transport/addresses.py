"""Socket addresses: literals with a port, never names, so that no address needs a resolver."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
import socket

import psutil

from auth import NodeId, SocketAddress
from transport.errors import AddressError

__all__ = [
    "PeerAddress",
    "canonical_address",
    "format_address",
    "interface_addresses",
    "parse_address",
    "port_number",
]

MAX_PORT = 65535

_MAX_SHOWN = 128
"""Characters of a malformed address that its error shows."""

# An interface as RFC 6874 section 2 lets it be written. Whatever else follows a "%" would be given
# to the resolver by the system, and its text to people's terminals by us.
_ZONE = re.compile(r"[A-Za-z0-9._~-]{1,32}")


@dataclasses.dataclass(frozen=True, slots=True)
class PeerAddress:
    """Whom to dial and where: the node id is what must be proven, the addresses are only hints."""

    node_id: NodeId
    addresses: tuple[SocketAddress, ...] = ()

    def __str__(self) -> str:
        return self.node_id.short


def parse_address(text: str, *, allow_port_zero: bool = False) -> SocketAddress:
    """Parse ``192.0.2.1:4433``, ``[2001:db8::1]:4433`` or ``:4433`` (every interface).

    Raises:
        AddressError: not of that form, or port 0 where somebody is to dial it.
    """
    shown = f"{text[:_MAX_SHOWN]!r}"
    host, separator, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise AddressError(
            f"address {shown}",
            why="an IPv6 address needs brackets",
            fix=f"Write [{host[:_MAX_SHOWN]}]:PORT.",
        )
    try:
        host = _canonical_host(host or "::")
    except ValueError:
        separator = ""
    if not separator or not (port_text.isascii() and port_text.isdigit()):
        raise AddressError(
            f"address {shown}",
            why="it is not an IP address with a port",
            fix="Write 192.0.2.1:4433 or [2001:db8::1]:4433.",
        )
    port = port_number(port_text)
    if port is None:
        raise AddressError(f"address {shown}", why=f"a port is at most {MAX_PORT}")
    if port == 0 and not allow_port_zero:
        raise AddressError(
            f"address {shown}",
            why="port 0 means 'any', and nobody can dial that",
            fix="Give the port that others can reach.",
        )
    return host, port


def port_number(digits: str) -> int | None:
    """Return the port that decimal `digits` are, however many; None if it is above 65535."""
    # More digits than five could take any time, and more than 4300 are none to int().
    significant = digits.lstrip("0")
    port = int(significant[:6] or "0")
    return port if port <= MAX_PORT else None


def canonical_address(address: SocketAddress) -> SocketAddress:
    """Return `address` as a socket reports it as the source of a datagram.

    Raises:
        AddressError: the host is not an IP literal, or the port is none that can be dialled.
    """
    host, port = address
    try:
        return parse_address(format_address((_canonical_host(host), port)))
    except ValueError:
        raise AddressError(
            f"address {host!r}", why="it is not an IP literal", fix="Look the name up first."
        ) from None


def format_address(address: SocketAddress) -> str:
    """Return the text that `parse_address` reads."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_addresses() -> tuple[tuple[str, str], ...]:
    """Return each interface that is up with each of its hosts, as pairs of literals.

    Link-local addresses are left out, for they mean nothing elsewhere.
    """
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found: list[tuple[str, str]] = []
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if name not in up or entry.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            ip = ipaddress.ip_address(entry.address.partition("%")[0])
            if not (ip.is_link_local or ip.is_unspecified):
                found.append((name, str(ip)))
    return tuple(found)


def _canonical_host(host: str) -> str:
    literal, percent, zone = host.partition("%")
    ip = ipaddress.ip_address(literal)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if percent and (ip.version == 4 or _ZONE.fullmatch(zone) is None):
        raise ValueError(f"{zone!r} is no zone of {ip}")
    return f"{ip}{percent}{zone}"
