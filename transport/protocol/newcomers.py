"""Who may begin a handshake at all: addresses by prefix, and how many newcomers there may be.

Asked before anything is kept of a newcomer and before any cryptography. An address on the outside
of a datagram is a claim, so that the rates are kept twice: a flood under forged addresses uses up
what is there for those who have not proved theirs, who are then asked to (RFC 9000 section 8.1.2),
and leaves alone what is there for those who have.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections import OrderedDict
from enum import Enum

from transport.errors import AddressError, TransportError

__all__ = [
    "Bucket",
    "IPV6_SITE_PREFIX",
    "NewcomerFilter",
    "NewcomerRules",
    "Rate",
    "StrangerBudget",
    "Verdict",
    "prefix_of",
]

IPV6_SITE_PREFIX = 64
"""One host has a whole /64 to send from: newcomers are counted by it."""

MAX_PREFIXES = 4096
"""Prefixes whose newcomers are counted; the one that sent none for longest is forgotten first."""

STRANGERS_TIME = (0.2, 0.8)
"""The part of its time that an endpoint has for strangers: the least, when those it knows keep it
busy, and the most, when it does nothing for them."""

STRANGERS_BURST = 0.1
"""Seconds that strangers may take at once: a dozen handshakes; a part of it when the node is busy.
"""

INTERVAL = 0.05
"""Seconds after which the share taken from the socket is set anew."""

BUSY_INTERVAL = 0.02
"""Seconds over which it is measured how busy an endpoint is: those it knows are not to wait longer
than that for a flood that came before them."""

LEAST_SHARE = 2.0**-12
"""The smallest share of strangers' datagrams looked at; some always are."""

STEEPEST = 1 / 16
GROWTH = 1.25
"""How far one interval may lower the share, and how far it raises it."""

Address = tuple[str, int]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Verdict(Enum):
    """What is to be done with a newcomer."""

    WELCOME = "welcome"
    PROVE = "prove your address"
    REFUSED = "address not allowed"
    TOO_MANY = "too many newcomers"


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """A token bucket: `burst` newcomers at once, and then `per_second` of them.

    Raises:
        TransportError: one of the two lets nobody in, ever.
    """

    per_second: float
    burst: int

    def __post_init__(self) -> None:
        if not (0 < self.per_second < float("inf") and self.burst >= 1):
            raise TransportError("a rate of newcomers", why="it must let somebody in")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewcomerRules:
    """Which newcomers a listener meets. A known connection is never asked about.

    Args:
        allow: prefixes such as ``192.0.2.0/24``; when there are any, others are met with silence.
        deny: prefixes met with silence even if they are allowed.
        per_host: newcomers of one IPv4 address, or of one IPv6 /64.
        in_all: newcomers of all addresses together.

    Raises:
        AddressError: a prefix is malformed, or has bits beyond its length.
    """

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    per_host: Rate | None = None
    in_all: Rate | None = None

    def __post_init__(self) -> None:
        for text in (*self.allow, *self.deny):
            _network(text)


class NewcomerFilter:
    """Applies `NewcomerRules`, for one socket."""

    def __init__(self, rules: NewcomerRules) -> None:
        self._rules = rules
        self._allow = tuple(map(_network, rules.allow))
        self._deny = tuple(map(_network, rules.deny))
        self._hosts: OrderedDict[tuple[str, bool], Bucket] = OrderedDict()
        self._in_all = {proved: Bucket(rules.in_all) for proved in (False, True)}

    def is_refused(self, address: Address) -> bool:
        """Whether datagrams from `address` are met with silence, whatever is in them."""
        if not self._allow and not self._deny:
            return False
        ip = _ip(address)
        return _is_in(ip, self._deny) or bool(self._allow and not _is_in(ip, self._allow))

    def judge(self, address: Address, now: float, *, proved: bool) -> Verdict:
        """Count a newcomer at time `now` in seconds, who has proved its address or not."""
        if self.is_refused(address):
            return Verdict.REFUSED
        buckets = [self._in_all[proved], self._host(prefix_of(address), proved)]
        if all(bucket.has_one(now) for bucket in buckets):
            for bucket in buckets:
                bucket.take()
            return Verdict.WELCOME
        return Verdict.TOO_MANY if proved else Verdict.PROVE

    def _host(self, prefix: str, proved: bool) -> Bucket:
        key = (prefix, proved)
        bucket = self._hosts.get(key)
        if bucket is None:
            if self._rules.per_host is None:
                return Bucket(None)
            bucket = self._hosts[key] = Bucket(self._rules.per_host)
            if len(self._hosts) > MAX_PREFIXES:
                self._hosts.popitem(last=False)
        self._hosts.move_to_end(key)
        return bucket


class StrangerBudget:
    """Bounds the time spent on datagrams that belong to no connection.

    By the time that they take, whatever they are: handshakes, demands for proof, junk that looks
    like either. Those for which there is no time are turned away; who is honest sends again. The
    more are turned away, the smaller is the share that is worth taking from the socket at all.
    """

    def __init__(self) -> None:
        self.share = 1.0
        """Which part of them should be taken from the socket."""
        self._part = STRANGERS_TIME[1]
        self._left = self._most = STRANGERS_BURST
        self._left_at: float | None = None
        self._began: float | None = None
        self._known = 0.0
        self._met = 0
        self._turned_away = 0
        self._waiting_since: float | None = None

    @property
    def is_exceeded(self) -> bool:
        """Whether some were turned away since `adapt`."""
        return self._turned_away > 0

    def looked(self, now: float, *, more: bool) -> None:
        """Datagrams were taken from the socket, and `more` were left there.

        While its queue does not come to an end strangers have the least that there is for them:
        whoever is known and sends something now has to wait for all that came before.
        """
        if not more:
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = now

    def has_time(self, now: float) -> bool:
        """Count a stranger's datagram; return whether there is time for it."""
        self._gain(now)
        if self._left <= 0:
            self._turned_away += 1
            return False
        self._met += 1
        return True

    def spend(self, seconds: float, now: float, *, on_strangers: bool) -> None:
        """Take note of time spent on datagrams, until `now`."""
        if self._began is None or now - self._began > BUSY_INTERVAL:
            self._measure(now)
        if on_strangers:
            self._left -= seconds
        else:
            self._known += seconds

    def adapt(self, now: float) -> bool:
        """Set the share anew; return whether to do so again after `INTERVAL`."""
        self._gain(now)
        if self._turned_away:
            met = self._met / (self._met + self._turned_away)
            self.share = max(LEAST_SHARE, self.share * max(met, STEEPEST))
        elif self._left > self._most / 2:
            self.share = min(1.0, self.share * GROWTH)
        self._met = self._turned_away = 0
        return self.share < 1.0

    def _gain(self, now: float) -> None:
        if self._left_at is not None and now > self._left_at:
            since = self._waiting_since
            has_queue = since is not None and now - since > BUSY_INTERVAL
            part = STRANGERS_TIME[0] if has_queue else self._part
            self._most = STRANGERS_BURST * part / STRANGERS_TIME[1]
            self._left = min(self._most, self._left + (now - self._left_at) * part)
        self._left_at = now if self._left_at is None else max(now, self._left_at)

    def _measure(self, now: float) -> None:
        least, most = STRANGERS_TIME
        if self._began is not None:
            known = self._known / (now - self._began)
            self._part = max(least, most - 3 * known)
        self._began, self._known = now, 0.0


class Bucket:
    """The tokens of one `Rate`; without a rate there are always some."""

    __slots__ = ("_at", "_rate", "_tokens")

    def __init__(self, rate: Rate | None) -> None:
        self._rate = rate
        self._tokens = 0.0 if rate is None else float(rate.burst)
        self._at: float | None = None

    def has_one(self, now: float) -> bool:
        """Whether there is one at `now`."""
        if self._rate is None:
            return True
        if self._at is not None and now > self._at:
            gained = (now - self._at) * self._rate.per_second
            self._tokens = min(float(self._rate.burst), self._tokens + gained)
        self._at = now if self._at is None else max(now, self._at)
        return self._tokens >= 1.0

    def take(self) -> None:
        """Take one."""
        self._tokens -= 1.0


def prefix_of(address: Address) -> str:
    """Return what stands for the host at `address`: its IPv4 address, or its IPv6 /64."""
    ip = _ip(address)
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((ip, IPV6_SITE_PREFIX), strict=False))
    return str(ip)


def _ip(address: Address) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


def _is_in(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, networks: tuple[Network, ...]
) -> bool:
    return any(ip in network for network in networks)


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise AddressError(
            f"address prefix {text!r}", why=str(error), fix="Write 192.0.2.0/24 or 2001:db8::/32."
        ) from None
