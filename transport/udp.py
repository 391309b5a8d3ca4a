"""One UDP socket: IPv4 and IPv6 on the same port, non-blocking, with the host's error reports.

It also tells what the host withholds from it: buffers smaller than asked, datagrams that it refuses
to send.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
import sys
from typing import NamedTuple

from auth import SocketAddress
from transport.addresses import format_address, interface_addresses
from transport.binding import parse_bind
from transport.errors import AddressError, AddressInUse

__all__ = ["RECEIVE_ROOM", "Received", "Refusal", "UdpSocket"]

BUFFER_SIZE = 4 << 20
"""Asked of the kernel for each direction; it gives what its own limit allows."""

MAX_REFUSALS = 64
"""Destinations remembered to which this host refused to send; the oldest are forgotten first."""

MAX_DATAGRAM = 65535
"""No UDP payload is larger, nor a batch that the kernel has put together."""

GATHERED = 917504
GATHERED_DATAGRAMS = 88
"""With so many bytes, or datagrams, no more are received for the same batch: what is done with it
takes half a millisecond."""

RECEIVE_ROOM = GATHERED + MAX_DATAGRAM
"""What a buffer to receive into has to have."""

MAX_SEGMENTS = 64
MAX_SEGMENTED = 65000
"""Datagrams, and bytes of them, that one call can send (udp(7): UDP_MAX_SEGMENTS, and an IP packet
with its headers)."""

# Linux: segmentation offload (udp(7)). One call sends, or receives, many datagrams of one size.
_SOL_UDP = 17
_UDP_SEGMENT = 103
_UDP_GRO = 104
_SEGMENT = struct.Struct("=H")
_GRO_ANCILLARY = socket.CMSG_SPACE(4)

# Linux: set the don't-fragment bit, and don't believe what routers say of their limits (ip(7)).
_IP_MTU_DISCOVER = 10
_IPV6_MTU_DISCOVER = 23
_PMTUDISC_PROBE = 3

# What is said to any segmented send where the way out can't do it.
_NO_SEGMENTATION = frozenset({errno.EIO, errno.EOPNOTSUPP})

# Linux: queue ICMP errors with the address they are about (ip(7), ipv6(7)).
_IP_RECVERR = 11
_IPV6_RECVERR = 25
_ERROR_QUEUE_MESSAGE = 2048
_ERROR_QUEUE_ANCILLARY = 512
_ERRNO = struct.Struct("=I")

# Linux: what the kernel counts of a socket, as 32-bit words (linux/sock_diag.h).
_SO_MEMINFO = 55
_DROPS = 8

_ICMP_ERRORS = frozenset({errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH})


_FIREWALL_ERRORS = frozenset({errno.EPERM, errno.EACCES})

# EINVAL is what Linux says of a socket bound to loopback and an address that lies outside.
_NO_ROUTE_ERRORS = frozenset(
    {errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}
)

_NativeAddress = tuple[str, int] | tuple[str, int, int, int]


class Refusal(NamedTuple):
    """Why this host did not send a datagram, and whether trying again is of no use."""

    why: str
    is_final: bool


class Received(NamedTuple):
    """Datagrams from one source, one behind the other in the buffer they were received into."""

    size: int
    segment: int
    """The size of each, but for the last, which may be shorter."""
    source: SocketAddress


class UdpSocket:
    """A bound UDP socket that sends and receives whole datagrams without waiting.

    Addresses are plain pairs of host literal and port in both directions; an IPv4 address on a
    socket of both families is never seen in its mapped form.

    Args:
        bind: where to listen, as `parse_bind` reads it; port 0 takes a free one.
        descriptor: of a socket that was bound so by another process, to be taken over.

    Attributes:
        address: what is bound.
        dual_stack: whether it takes IPv4 beside IPv6.
        refused: the latest destinations to which this host sent nothing, and why.

    Raises:
        AddressError: `bind` is malformed, or no interface of this host has that address.
        AddressInUse: another socket has it.
    """

    def __init__(self, bind: str, *, descriptor: int | None = None) -> None:
        self._binding = parse_bind(bind)
        if descriptor is None:
            self._socket, self.dual_stack = _open(*self._binding.address())
        else:
            self._socket, self.dual_stack = _take_over(descriptor)
        self._is_ipv6 = self._socket.family == socket.AF_INET6
        self._socket.setblocking(False)
        self.warning = _ask_for_buffers(self._socket)
        """What is wrong with the buffers that the kernel gave, and the fix; None if nothing is."""
        self.refused: dict[SocketAddress, Refusal] = {}
        self._segments = sys.platform == "linux"
        self._ask_to_join()
        self._forbid_fragments()
        self._last_source: tuple[object, SocketAddress] = (None, ("", 0))
        self._held: Received | None = None
        self._held_data = b""
        self.has_more = True
        """Whether something may wait: the last that was received was not found to be the last."""
        self._reports_errors = self._ask_for_errors()
        self.oversized = 0
        """The size of a datagram that the way out could not take, since this was last set to 0."""
        self.has_errors = False
        """Whether the host has reported a destination unreachable since `errors` was last asked."""
        self.address: SocketAddress = self._plain(self._socket.getsockname())

    @property
    def raw(self) -> socket.socket:
        """The socket to wait on."""
        return self._socket

    @property
    def kernel_drops(self) -> int:
        """Datagrams that found the queue full, or were filtered; 0 where none can be told."""
        if sys.platform != "linux" or self._socket.fileno() < 0:
            return 0
        info = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * (_DROPS + 1))
        return int.from_bytes(info[4 * _DROPS :], sys.byteorder)

    def reachable(self) -> tuple[SocketAddress, ...]:
        """Return where others may reach the socket as of now, the likeliest first."""
        host, port = self.address
        if not _is_wildcard(host):
            return (self.address,)
        found = [
            (name, host)
            for name, host in interface_addresses()
            if self.dual_stack or (":" in host) == self._is_ipv6
        ]
        return tuple((host, port) for host in self._binding.select(found))

    def receive_into(self, buffer: bytearray) -> Received | None:
        """Receive what waits longest into `buffer`, of `RECEIVE_ROOM` bytes; None: nothing waits.

        What comes after it from the same source is received behind it, as long as each datagram is
        as long as the first; `has_more` tells then whether something is known to wait. An error
        report about something sent before sets `has_errors`, and may be all there is.
        """
        room = memoryview(buffer)
        batch, self._held = self._held, None
        if batch is None:
            batch = self._receive(room)
        else:
            room[: batch.size] = self._held_data
        if batch is None:
            return None
        size, segment, source = batch
        limit = min(GATHERED, GATHERED_DATAGRAMS * segment)
        while size < limit and not size % segment and self.has_more:
            more = self._receive(room[size : size + MAX_DATAGRAM])
            if more is None:
                break
            is_alike = more.segment == segment or more.size == more.segment < segment
            if not more.size or not is_alike or more.source != source:
                self._held, self._held_data = more, bytes(room[size : size + more.size])
                break
            size += more.size
        return Received(size, segment, source)

    def _receive(self, room: memoryview) -> Received | None:
        while True:
            try:
                size, ancillary, _, source = self._socket.recvmsg_into([room], _GRO_ANCILLARY)
            except BlockingIOError:
                self.has_more = False
                return None
            except OSError as error:
                if error.errno == errno.EBADF:
                    raise
                self.has_errors = True  # the queue has the details
                continue
            self.has_more = True
            segment = size
            for level, kind, value in ancillary:
                if level == _SOL_UDP and kind == _UDP_GRO:
                    segment = int.from_bytes(value[:4], sys.byteorder)
            if source != self._last_source[0]:
                self._last_source = (source, self._plain(source))
            return Received(size, min(segment, size), self._last_source[1])

    def send_batch(self, data: bytes | memoryview, segment: int, address: SocketAddress) -> int:
        """Send `data` as datagrams of `segment` bytes, in few calls where the kernel can.

        Returns how many bytes were taken: fewer than all when the socket's buffer is full.
        """
        if len(data) <= segment:
            return len(data) if self.send(data, address) else 0
        step = segment * max(1, min(MAX_SEGMENTS, MAX_SEGMENTED // segment))
        for start in range(0, len(data), step):
            part = data[start : start + step]
            taken = self._send_segmented(part, segment, address)
            if taken < len(part):
                return start + taken
        return len(data)

    def _send_segmented(
        self, data: bytes | memoryview, segment: int, address: SocketAddress
    ) -> int:
        if len(data) <= segment:
            return len(data) if self.send(data, address) else 0
        target = self._native(address) if self._segments else None
        if target is not None:
            control = [(_SOL_UDP, _UDP_SEGMENT, _SEGMENT.pack(segment))]
            try:
                return self._socket.sendmsg([data], control, 0, target)
            except BlockingIOError:
                return 0
            except OSError as error:
                if error.errno in _NO_SEGMENTATION:
                    self._segments = False
        for start in range(0, len(data), segment):
            if not self.send(data[start : start + segment], address):
                return start
        return len(data)

    def send(self, data: bytes | memoryview, address: SocketAddress) -> bool:
        """Send one datagram; return False when the socket's buffer is full.

        A datagram that the host refuses (no route, a firewall) is lost, as it might have been
        anywhere else on its way; `refused` then says why.
        """
        target = self._native(address)
        if target is None:
            family = "IPv6" if self._is_ipv6 else "IPv4"
            self._refuse(address, Refusal(f"this node's socket is for {family} alone", True))
            return True
        for _ in range(2):
            try:
                self._socket.sendto(data, target)
            except BlockingIOError:
                return False
            except OSError as error:
                self._note(address, error)
                if error.errno == errno.EMSGSIZE:
                    self.oversized = len(data)
                if error.errno in _ICMP_ERRORS:
                    self.has_errors = True
                    continue  # the report about an earlier datagram, perhaps to another peer
            else:
                if self.refused:
                    self.refused.pop(address, None)
            break
        return True

    def why_refused(self, address: SocketAddress) -> str | None:
        """Return why this host sends nothing to `address`, None if it does or was not asked to."""
        refusal = self.refused.get(address)
        return None if refusal is None else refusal.why

    def errors(self) -> list[SocketAddress]:
        """Return the destinations that the network has reported unreachable since last asked.

        Hints only: anyone who can guess an address can forge such a report.
        """
        out: list[SocketAddress] = []
        self.has_errors = False
        while self._reports_errors:
            try:
                _, ancillary, _, target = self._socket.recvmsg(
                    _ERROR_QUEUE_MESSAGE, _ERROR_QUEUE_ANCILLARY, socket.MSG_ERRQUEUE
                )
            except OSError:
                break  # empty
            for _, kind, data in ancillary:
                if kind not in (_IP_RECVERR, _IPV6_RECVERR) or len(data) < _ERRNO.size:
                    continue
                (number,) = _ERRNO.unpack_from(data)
                if number in _ICMP_ERRORS and target:
                    out.append(self._plain(target))
        return out

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _note(self, address: SocketAddress, error: OSError) -> None:
        if error.errno in _FIREWALL_ERRORS:
            why = f"this host's own firewall or routes let nothing out to there ({error.strerror})"
            self._refuse(address, Refusal(why, False))  # a firewall may drop one in a hundred
        elif error.errno in _NO_ROUTE_ERRORS:
            self._refuse(address, Refusal(f"this host has no way there ({error.strerror})", True))

    def _refuse(self, address: SocketAddress, refusal: Refusal) -> None:
        self.refused.pop(address, None)
        self.refused[address] = refusal
        if len(self.refused) > MAX_REFUSALS:
            del self.refused[next(iter(self.refused))]

    def _forbid_fragments(self) -> None:
        """Have no datagram fragmented, and each size be our own affair (RFC 9000 section 14)."""
        if sys.platform != "linux":
            return
        if self._is_ipv6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
        if not self._is_ipv6 or self.dual_stack:
            self._socket.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)

    def _ask_to_join(self) -> None:
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # before Linux 5.0
                self._socket.setsockopt(_SOL_UDP, _UDP_GRO, 1)

    def _ask_for_errors(self) -> bool:
        if sys.platform != "linux":
            return False
        if self._is_ipv6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
        if not self._is_ipv6 or self.dual_stack:
            self._socket.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
        return True

    def _plain(self, address: tuple[object, ...]) -> SocketAddress:
        host, port = str(address[0]), address[1]
        assert isinstance(port, int)
        if self._is_ipv6:
            if host.startswith("::ffff:"):
                host = host.removeprefix("::ffff:")
            elif address[3]:
                host = f"{host}%{_zone_name(address[3])}"
        return host, port

    def _native(self, address: SocketAddress) -> _NativeAddress | None:
        """Return the form that this socket takes, None where its family can't reach the address."""
        host, port = address
        is_v6 = ":" in host
        if is_v6 == self._is_ipv6:
            if "%" not in host:
                return host, port
            try:
                return _with_zone(host, port)
            except AddressError:
                return None
        if self._is_ipv6 and self.dual_stack:
            return f"::ffff:{host}", port
        return None


def _ask_for_buffers(sock: socket.socket) -> str | None:
    """Ask for `BUFFER_SIZE` in each direction; return what to do if the kernel gave less."""
    short: list[str] = []
    fixes: list[str] = []
    for option, way, limit in (
        (socket.SO_RCVBUF, "receive", "net.core.rmem_max"),
        (socket.SO_SNDBUF, "send", "net.core.wmem_max"),
    ):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_SIZE)
        given = sock.getsockopt(socket.SOL_SOCKET, option)
        if sys.platform == "linux":
            given //= 2  # it counts its own bookkeeping in, as much again (socket(7))
        if given < BUFFER_SIZE:
            short.append(f"{given} bytes to {way}")
            fixes.append(f"{limit}={BUFFER_SIZE}")
    if not short:
        return None
    return (
        f"UDP socket buffers are small: the kernel gave {' and '.join(short)} of {BUFFER_SIZE} "
        f"asked, so fast transfers lose packets. Fix: sudo sysctl -w {' '.join(fixes)}"
    )


def _is_wildcard(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def _open(host: str, port: int) -> tuple[socket.socket, bool]:
    """Return a bound socket, and whether it takes IPv4 beside IPv6."""
    if ":" not in host:
        return _bind(socket.AF_INET, host, port), False
    if not _is_wildcard(host):
        return _bind(socket.AF_INET6, host, port), False
    if _has_ipv6():
        return _bind(socket.AF_INET6, host, port, dual_stack=True), True
    return _bind(socket.AF_INET, "0.0.0.0", port), False  # noqa: S104 - all was asked for


def _take_over(descriptor: int) -> tuple[socket.socket, bool]:
    """Return a socket that was bound, and whether it takes IPv4 beside IPv6."""
    sock = socket.socket(fileno=descriptor)
    is_wide = sock.family == socket.AF_INET6 and _is_wildcard(sock.getsockname()[0])
    return sock, is_wide and not sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def _has_ipv6() -> bool:
    """Whether IPv6 can be used here at all: many a container has the family, but no address."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def _bind(
    family: socket.AddressFamily, host: str, port: int, *, dual_stack: bool = False
) -> socket.socket:
    native = _with_zone(host, port) if "%" in host else (host, port)
    try:
        sock = socket.socket(family, socket.SOCK_DGRAM)
    except OSError as error:
        raise AddressError(
            f"listening on {format_address((host, port))}", why="this host has no IPv6"
        ) from error
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual_stack else 1)
        sock.bind(native)
    except OSError as error:
        sock.close()
        where = format_address((host, port))
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"listening on {where}",
                why="another socket has that UDP port",
                fix=f"Find it with: ss -lunp 'sport = {port}'. Or take a free port: port 0.",
            ) from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise AddressError(
                f"listening on {where}",
                why="no interface of this host has that address",
                fix="Use an address that 'ip address' shows, or [::]:PORT for all of them.",
            ) from None
        raise AddressError(f"listening on {where}", why=error.strerror or str(error)) from error
    return sock


def _with_zone(host: str, port: int) -> _NativeAddress:
    """Return a link-local address with the index of the interface that its zone names."""
    literal, _, zone = host.partition("%")
    try:
        index = int(zone) if zone.isdigit() else socket.if_nametoindex(zone)
    except OSError:
        raise AddressError(
            f"address {host!r}", why=f"no interface here is named {zone!r}"
        ) from None
    return literal, port, 0, index


def _zone_name(index: object) -> str:
    assert isinstance(index, int)
    try:
        return socket.if_indextoname(index)
    except OSError:
        return str(index)  # the interface has just gone
