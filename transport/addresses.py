"""Socket addresses: literals with a port, never names, so that no address needs a resolver."""

from __future__ import annotations

import dataclasses
import ipaddress
import socket

import psutil

from auth import NodeId, SocketAddress
from transport.errors import AddressError

__all__ = [
    "PeerAddress",
    "canonical_address",
    "format_address",
    "parse_address",
    "reachable_addresses",
]


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
    host, separator, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise AddressError(
            f"address {text!r}", why="an IPv6 address needs brackets", fix=f"Write [{host}]:PORT."
        )
    try:
        host = _canonical_host(host or "::")
    except ValueError:
        separator = ""
    if not separator or not (port_text.isascii() and port_text.isdigit()):
        raise AddressError(
            f"address {text!r}",
            why="it is not an IP address with a port",
            fix="Write 192.0.2.1:4433 or [2001:db8::1]:4433.",
        )
    port = int(port_text)
    if port > 65535:
        raise AddressError(f"address {text!r}", why="a port is at most 65535")
    if port == 0 and not allow_port_zero:
        raise AddressError(
            f"address {text!r}",
            why="port 0 means 'any', and nobody can dial that",
            fix="Give the port that others can reach.",
        )
    return host, port


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


def reachable_addresses(bound: SocketAddress, *, dual_stack: bool) -> tuple[SocketAddress, ...]:
    """Return where others may reach a socket bound to `bound`, the likeliest first.

    A wildcard stands for every interface that is up: global addresses first, loopback only where
    there is nothing else. Link-local addresses are left out, for they mean nothing elsewhere.
    """
    host, port = bound
    if not ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        return ((host, port),)
    families = {socket.AF_INET, socket.AF_INET6} if dual_stack else {_family(host)}
    found: list[SocketAddress] = []
    loopback: list[SocketAddress] = []
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if name not in up or entry.family not in families:
                continue
            ip = ipaddress.ip_address(entry.address.partition("%")[0])
            if ip.is_link_local or ip.is_unspecified:
                continue
            (loopback if ip.is_loopback else found).append((str(ip), port))
    # IPv4 first: where both work it is the one more often routed.
    return tuple(sorted(found or loopback, key=lambda address: ":" in address[0]))


def _canonical_host(host: str) -> str:
    literal, percent, zone = host.partition("%")
    ip = ipaddress.ip_address(literal)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return f"{ip}{percent}{zone}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
