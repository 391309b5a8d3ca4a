"""Where to listen, by address or by choosing interfaces: what ``bind`` and ``--bind`` take.

One UDP socket stays one UDP socket. Interfaces and networks that come down to one address bind that
one; where they come down to several, the socket listens on all of the host and only those several
are told to others.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import ipaddress
import re
from collections.abc import Iterable
from typing import NoReturn, TypeAlias

from auth import SocketAddress
from transport.addresses import interface_addresses, parse_address, port_number
from transport.errors import AddressError

__all__ = ["Binding", "parse_bind"]

GRAMMAR = (
    "Write ADDRESS:PORT (192.0.2.1:4433, [2001:db8::1]:4433, or :4433 for every interface), or "
    "ITEM[,ITEM...][:PORT] to choose by interface, where an ITEM is an interface, perhaps with * "
    "in its name (eth0, wg*), or a network (10.0.0.0/8, [fd00::/8]); a ^ in front of them all "
    "means every interface and address but those (^lo,docker*:0)."
)

# With a letter or a star in it: what has neither is a mistyped address.
_NAME = re.compile(r"(?=.*[A-Za-z*])[A-Za-z0-9_.*-][A-Za-z0-9_.* -]{0,63}")

_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """Where a socket is to listen.

    Attributes:
        text: as it was written.
        port: 0 takes a free one.
        host: the address written, "::" for every one of both families; None with a choice.
        names: interfaces chosen, in which ``*`` stands for any characters.
        networks: addresses chosen.
        excludes: whether the choice is everything but those.
    """

    text: str
    port: int
    host: str | None = None
    names: tuple[str, ...] = ()
    networks: tuple[_Network, ...] = ()
    excludes: bool = False

    def select(self, found: Iterable[tuple[str, str]] | None = None) -> tuple[str, ...]:
        """Return the hosts of this machine that are chosen, IPv4 first.

        Loopback ones count only where they were asked for, or where there is nothing else.

        Args:
            found: pairs of an interface and one of its hosts; by default those of this machine.
        """
        chosen = [
            host
            for name, host in (interface_addresses() if found is None else found)
            if self._has(name, host) is not self.excludes
        ]
        outside = [host for host in chosen if not ipaddress.ip_address(host).is_loopback]
        names_them = self.host is None and not self.excludes
        # IPv4 first: where both work it is the one more often routed.
        return tuple(sorted(chosen if names_them else outside or chosen, key=lambda h: ":" in h))

    def address(self, found: Iterable[tuple[str, str]] | None = None) -> SocketAddress:
        """Return what to bind: the one address chosen, or the wildcard that covers them all.

        Raises:
            AddressError: nothing here is chosen.
        """
        if self.host is not None:
            return self.host, self.port
        found = tuple(interface_addresses() if found is None else found)
        hosts = self.select(found)
        if not hosts:
            here = ", ".join(f"{name} {host}" for name, host in found)
            raise AddressError(
                f"listening on {self.text!r}",
                why=f"no address of this host is chosen by it; it has: {here or 'none at all'}",
                fix=GRAMMAR,
            )
        if len(hosts) == 1:
            return hosts[0], self.port
        return "::" if any(":" in host for host in hosts) else "0.0.0.0", self.port  # noqa: S104

    def _has(self, name: str, host: str) -> bool:
        if self.host is not None:
            return True
        ip = ipaddress.ip_address(host)
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names) or any(
            ip in network for network in self.networks
        )


def parse_bind(text: str) -> Binding:
    """Parse where to listen; `GRAMMAR` says how it is written. A choice without a port means 0.

    Raises:
        AddressError: it is not of that form.
    """
    if text.endswith("]") or ":" not in text:
        where, port_text = text, "0"
    else:
        where, _, port_text = text.rpartition(":")
    if not where or _is_address(where):
        if where == text:
            _refuse(text, "it has no port")
        host, port = parse_address(text, allow_port_zero=True)
        return Binding(text, port, host)
    port_given = port_number(port_text) if port_text.isascii() and port_text.isdigit() else None
    if port_given is None:
        _refuse(text, f"{port_text!r} is not a port")
    excludes = where.startswith("^")
    names: list[str] = []
    networks: list[_Network] = []
    for item in where.removeprefix("^").split(","):
        if "/" in item or item.startswith("[") or _is_address(item):
            networks.append(_network(text, item))
        elif _NAME.fullmatch(item):
            names.append(item)
        else:
            _refuse(text, f"{item!r} is neither an interface nor a network")
    return Binding(text, port_given, None, tuple(names), tuple(networks), excludes)


def _network(text: str, item: str) -> _Network:
    is_bracketed = item.startswith("[") and item.endswith("]")
    try:
        network = ipaddress.ip_network(item[1:-1] if is_bracketed else item)
    except ValueError as error:
        _refuse(text, str(error))
    if is_bracketed != (network.version == 6):
        _refuse(text, f"{item!r}: brackets are for IPv6, and for nothing else")
    return network


def _is_address(where: str) -> bool:
    is_bracketed = where.startswith("[") and where.endswith("]")
    try:
        ip = ipaddress.ip_address(where[1:-1] if is_bracketed else where)
    except ValueError:
        return False
    return is_bracketed or ip.version == 4


def _refuse(text: str, why: str) -> NoReturn:
    raise AddressError(f"address to listen on {text!r}", why=why, fix=GRAMMAR) from None
