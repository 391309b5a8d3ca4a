"""The socket beneath, and the addresses it speaks of."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from tests.transport.nodes import endpoint, eventually, pair
from transport import AddressError, AddressInUse, Incoming, format_address, parse_address
from transport.addresses import canonical_address
from transport.endpoint import _warn_once
from transport.protocol.batch import Transmit
from transport.udp import _SOL_UDP, _UDP_GRO, RECEIVE_ROOM, UdpSocket

# -- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1:4433", ("192.0.2.1", 4433)),
        ("[2001:db8::1]:1", ("2001:db8::1", 1)),
        ("[2001:DB8:0::0:1]:1", ("2001:db8::1", 1)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("[::ffff:192.0.2.1]:5", ("192.0.2.1", 5)),
        (":4433", ("::", 4433)),
    ],
)
def test_addresses_are_read_in_one_form(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert parse_address(format_address(address)) == address
    assert canonical_address(address) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "1.2.3.4",
        "1.2.3.4:",
        "host:1",
        "::1:1",
        "1.2.3.4:-1",
        "1.2.3.4:1.5",
        "1.2.3.4:65536",
        "1.2.3.4:0",
        "1.2.3.4:\u0661",
        "[1.2.3.4:1",
        "01.2.3.4:1",
        "256.1.1.1:1",
        " 1.2.3.4:1",
        # What follows a "%" would be looked up by the system, or shown on a terminal.
        "1.2.3.4%evil.example.com:1",
        "[::ffff:1.2.3.4%eth0]:1",
        "[fe80::1%]:1",
        "[fe80::1%a b]:1",
        "[fe80::1%a]:5]:1",
        "[fe80::1%\x1b[31m]:1",
    ],
)
def test_everything_else_is_refused_with_the_text_in_question(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_any_number_of_digits_is_a_port_or_none() -> None:
    assert parse_address("1.2.3.4:" + "0" * 5000 + "80") == ("1.2.3.4", 80)
    for digits in ("65536", "9" * 5000):  # which int() would not take
        with pytest.raises(AddressError, match="at most 65535") as caught:
            parse_address("1.2.3.4:" + digits)
        assert len(str(caught.value)) < 250


def reachable(bind: str) -> list[str]:
    sock = UdpSocket(bind)
    try:
        found = sock.reachable()
        assert all(port == sock.address[1] for _, port in found)
        return [host for host, _ in found]
    finally:
        sock.close()


def test_a_wildcard_is_reached_at_the_addresses_of_interfaces() -> None:
    hosts = reachable("[::]:0")
    assert hosts
    assert not {"::", "0.0.0.0"} & set(hosts)
    assert not any(host.startswith("fe80") for host in hosts)
    assert hosts == sorted(hosts, key=lambda host: ":" in host), "IPv4 first"
    assert not any(":" in host for host in reachable("0.0.0.0:0"))
    assert reachable("127.0.0.1:0") == ["127.0.0.1"]


# -- sockets


def received(sock: UdpSocket) -> list[tuple[bytes, tuple[str, int]]]:
    """All datagrams that wait, one by one."""
    buffer = bytearray(RECEIVE_ROOM)
    out = []
    while (batch := sock.receive_into(buffer)) is not None:
        for start in range(0, batch.size or 1, batch.segment or 1):
            stop = min(start + batch.segment, batch.size)
            out.append((bytes(buffer[start:stop]), batch.source))
    return out


def open_pair(one: str, two: str) -> tuple[UdpSocket, UdpSocket]:
    return UdpSocket(one), UdpSocket(two)


@pytest.mark.parametrize(
    ("bind", "peer", "host"),
    [
        ("127.0.0.1:0", "127.0.0.1:0", "127.0.0.1"),
        ("[::1]:0", "[::1]:0", "::1"),
        ("[::]:0", "127.0.0.1:0", "127.0.0.1"),
        ("[::]:0", "[::1]:0", "::1"),
    ],
)
def test_datagrams_pass_and_sources_are_plain(bind: str, peer: str, host: str) -> None:
    one, two = open_pair(bind, peer)
    try:
        assert one.send(b"hello", (host, two.address[1]))
        assert received(two) == [(b"hello", (host, one.address[1]))]
        assert two.send(b"answer", (host, one.address[1]))
        assert received(one) == [(b"answer", (host, two.address[1]))]
        assert received(one) == []
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("joins", [True, False], ids=["joined by the kernel", "one by one"])
@pytest.mark.parametrize("segments", [True, False], ids=["one call", "a call each"])
def test_a_batch_arrives_as_the_datagrams_it_is_made_of(segments: bool, joins: bool) -> None:
    one, two = open_pair("127.0.0.1:0", "127.0.0.1:0")
    data = bytes(range(256)) * 9
    try:
        one._segments = segments and one._segments
        if not joins and sys.platform == "linux":
            two.raw.setsockopt(_SOL_UDP, _UDP_GRO, 0)
        assert one.send_batch(memoryview(data), 1000, two.address) == len(data)
        assert one.send_batch(data[:500], 1000, two.address) == 500
        sizes = [len(datagram) for datagram, _ in received(two)]
        assert sizes == [1000, 1000, 304, 500]
        assert one.send_batch(data, 1000, two.address) == len(data)
        assert b"".join(datagram for datagram, _ in received(two)) == data
    finally:
        one.close()
        two.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.EMSGSIZE, errno.ECONNREFUSED])
def test_a_batch_goes_one_by_one_where_one_call_is_refused(number: int) -> None:
    one, two = open_pair("127.0.0.1:0", "127.0.0.1:0")
    try:
        scripted(one).script = [number]
        assert one.send_batch(bytes(2500), 1000, two.address) == 2500
        assert [len(datagram) for datagram, _ in received(two)] == [1000, 1000, 500]
        # A device that can't is asked once; anything else may have passed by the next time.
        assert one._segments is (number != errno.EIO and sys.platform == "linux")
    finally:
        one.close()
        two.close()


def test_a_batch_that_finds_the_socket_full_tells_how_much_has_left() -> None:
    one, two = open_pair("127.0.0.1:0", "127.0.0.1:0")
    try:
        scripted(one).script = [errno.EAGAIN]
        assert one.send_batch(bytes(2500), 1000, two.address) == 0
        one._segments = False
        scripted(one).script = [0, errno.EAGAIN]
        assert one.send_batch(bytes(2500), 1000, two.address) == 1000
    finally:
        one.close()
        two.close()


def test_an_address_of_the_other_family_is_lost_like_any_unreachable_one() -> None:
    one = UdpSocket("127.0.0.1:0")
    try:
        assert one.send(b"x", ("::1", 9))
        assert one.send(b"x", ("fe80::1%nosuchif", 9))
        assert one.send(bytes(70_000), ("127.0.0.1", 9)), "too long for any datagram"
    finally:
        one.close()


def test_a_taken_port_is_reported_by_number_whatever_the_message() -> None:
    one = UdpSocket("127.0.0.1:0")
    try:
        with pytest.raises(AddressInUse, match=f"{one.address[1]}.*another socket"):
            UdpSocket(f"127.0.0.1:{one.address[1]}")
        with pytest.raises(AddressInUse):
            UdpSocket(f"[::]:{one.address[1]}")  # both families want the port
    finally:
        one.close()


def test_an_interface_that_is_not_there_is_named() -> None:
    with pytest.raises(AddressError, match="nosuchif"):
        UdpSocket("[fe80::1%nosuchif]:0")


def test_without_ipv6_a_wildcard_means_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.udp._has_ipv6", lambda: False)
    sock = UdpSocket("[::]:0")
    try:
        assert sock.address[0] == "0.0.0.0"
        assert not sock.dual_stack
    finally:
        sock.close()


@pytest.mark.skipif(sys.platform != "linux", reason="error queues of Linux")
@pytest.mark.parametrize(
    ("bind", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("[::]:0", "::1")]
)
def test_a_closed_port_is_reported_with_its_address_and_harms_nobody_else(
    bind: str, host: str
) -> None:
    sock, live = UdpSocket(bind), UdpSocket("[::]:0")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((host, 0))
        dead = (host, probe.getsockname()[1])
    try:
        assert sock.send(b"x", dead)
        # The report waits on the socket and would fail the next send, to whomever that goes.
        assert sock.send(b"y", (host, live.address[1]))
        assert [data for data, _ in received(live)] == [b"y"]
        assert sock.has_errors
        assert sock.errors() == [dead]
        assert not sock.has_errors
        assert sock.errors() == []
        assert received(sock) == []
    finally:
        sock.close()
        live.close()


class _Scripted:
    """A socket whose calls raise what a test says."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.script: list[int] = []

    def sendto(self, data: bytes, address: object) -> int:
        self._raise_next()
        return self._real.sendto(data, address)  # type: ignore[arg-type]

    def sendmsg(self, *args: object) -> int:
        self._raise_next()
        return self._real.sendmsg(*args)  # type: ignore[arg-type]

    def recvmsg_into(self, *args: object) -> tuple[int, list[object], int, object]:
        self._raise_next()
        return self._real.recvmsg_into(*args)  # type: ignore[arg-type, return-value]

    def _raise_next(self) -> None:
        """Raise the next error of the script; 0 stands for a call that succeeds."""
        if self.script and (number := self.script.pop(0)):
            raise OSError(number, "scripted")

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


def scripted(sock: UdpSocket) -> _Scripted:
    fake = _Scripted(sock.raw)
    sock._socket = fake  # type: ignore[assignment]
    return fake


@pytest.mark.parametrize(
    ("errors", "sent"),
    [
        ([errno.EAGAIN], False),
        ([errno.ECONNREFUSED], True),
        ([errno.EHOSTUNREACH, errno.EHOSTUNREACH], True),
        ([errno.EPERM], True),
        ([errno.ENOBUFS], True),
        ([errno.EMSGSIZE], True),
    ],
)
def test_sending_survives_what_a_host_can_say(errors: list[int], sent: bool) -> None:
    sock = UdpSocket("127.0.0.1:0")
    try:
        scripted(sock).script = errors
        assert sock.send(b"x", sock.address) is sent
        assert sock.send(b"x", sock.address)
    finally:
        sock.close()


def test_receiving_survives_reports_about_datagrams_sent() -> None:
    sock = UdpSocket("127.0.0.1:0")
    try:
        sock.send(b"x", sock.address)
        scripted(sock).script = [errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH]
        assert received(sock) == [(b"x", sock.address)]
        assert sock.has_errors
    finally:
        sock.close()


def test_what_this_host_refuses_to_send_is_remembered_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transport.udp.MAX_REFUSALS", 2)
    sock = UdpSocket("127.0.0.1:0")
    try:
        sock.send(b"x", ("::1", 9))
        assert sock.refused[("::1", 9)] == ("this node's socket is for IPv4 alone", True)
        scripted(sock).script = [errno.EPERM]
        sock.send(b"x", sock.address)
        why, is_final = sock.refused[sock.address]
        assert "firewall" in why
        assert not is_final, "it may drop one in a hundred"
        sock.send(b"x", sock.address)
        assert sock.address not in sock.refused, "it is let out after all"
        scripted(sock).script = [errno.ENETUNREACH, errno.ENETUNREACH]
        sock.send(b"x", ("127.0.0.2", 9))
        assert sock.refused[("127.0.0.2", 9)].is_final
        scripted(sock).script = [errno.ECONNREFUSED]  # about another datagram, or by the peer
        sock.send(b"x", sock.address)
        for port in range(10, 20):
            sock.send(b"x", ("::1", port))
        assert list(sock.refused) == [("::1", 18), ("::1", 19)]
    finally:
        sock.close()


def test_small_buffers_are_said_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transport.udp.BUFFER_SIZE", 1 << 12)
    sock = UdpSocket("127.0.0.1:0")
    sock.close()
    assert sock.warning is None
    monkeypatch.setattr("transport.udp.BUFFER_SIZE", 1 << 30)
    sock = UdpSocket("127.0.0.1:0")
    sock.close()
    assert sock.warning is not None
    assert f"of {1 << 30} asked" in sock.warning
    if sys.platform == "linux":
        for direction, limit in (("receive", "rmem_max"), ("send", "wmem_max")):
            given = Path(f"/proc/sys/net/core/{limit}").read_text().strip()
            assert f"{given} bytes to {direction}" in sock.warning
            assert f"net.core.{limit}={1 << 30}" in sock.warning


@pytest.mark.anyio
async def test_small_buffers_are_logged_once_and_stay_to_be_seen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with endpoint() as node:
        before = node.warnings
    monkeypatch.setattr("transport.udp.BUFFER_SIZE", (1 << 30) - 1)
    _warn_once.cache_clear()
    async with endpoint() as one, endpoint() as two:
        assert len(one.warnings) == 1
        assert one.warnings == two.warnings != before
        assert [record.getMessage() for record in caplog.records] == [*before, *one.warnings]
        assert "sudo sysctl -w net.core.rmem_max" in one.warnings[0]
    caplog.clear()
    _warn_once.cache_clear()
    async with endpoint(listen=False) as command:
        assert command.warnings
        assert not caplog.records, "one that asks a question and goes moves nothing"


# -- a socket that takes nothing for a while


@pytest.mark.anyio
async def test_datagrams_wait_in_order_while_the_socket_is_full() -> None:
    async with pair() as (dialer, _, connection):
        sock = dialer._socket
        send: Callable[..., int] = sock.send_batch
        refused: list[bytes] = []
        full = True

        def limited(data: bytes, segment: int, address: tuple[str, int]) -> int:
            if full:
                refused.append(data)
                return 0
            return send(data, segment, address)

        sock.send_batch = limited  # type: ignore[method-assign]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.call, "echo", bytes(20_000))
            await eventually(lambda: dialer._engine.driver._backlog)
            await anyio.sleep(0.05)
            assert refused
            full = False
        assert not dialer._engine.driver._backlog
        assert await connection.call("echo", 1) == 1


@pytest.mark.anyio
async def test_the_backlog_is_bounded() -> None:
    async def sink(request: Incoming) -> None:
        async for _ in request.stream:
            pass

    async with pair(linger=0.1) as (dialer, listener, connection):
        listener.register_service("sink", sink, scope="x")
        driver = dialer._engine.driver
        driver.socket.send_batch = lambda *_: 0  # type: ignore[method-assign]
        for number in range(3000):
            driver._send(Transmit(bytes([number % 256]), 1, ("127.0.0.1", 9)))
        assert len(driver._backlog) <= 1024
        del driver.socket.send_batch
        driver._backlog.clear()
        assert await connection.call("echo", 1) == 1
