"""Where to listen: addresses, and choices of interfaces and networks."""

from __future__ import annotations

import re

import pytest

from tests.transport.nodes import REPOSITORY, at, endpoint
from transport import AddressError, parse_bind
from transport.udp import BUFFER_SIZE, UdpSocket

HOST = (
    ("lo", "127.0.0.1"),
    ("lo", "::1"),
    ("eth0", "10.0.0.5"),
    ("eth0", "2001:db8::5"),
    ("docker0", "172.17.0.1"),
    ("docker12", "172.18.0.1"),
    ("wg-home", "10.9.0.2"),
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("eth0:4433", ["10.0.0.5", "2001:db8::5"]),
        ("eth0", ["10.0.0.5", "2001:db8::5"]),
        ("eth*,wg-home:0", ["10.0.0.5", "10.9.0.2", "2001:db8::5"]),
        ("10.0.0.0/8:4433", ["10.0.0.5", "10.9.0.2"]),
        ("[2001:db8::]/32:0", None),
        ("[2001:db8::/32]:0", ["2001:db8::5"]),
        ("[2001:db8::/32]", ["2001:db8::5"]),
        ("10.9.0.2,[2001:db8::5]:1", ["10.9.0.2", "2001:db8::5"]),
        ("lo:0", ["127.0.0.1", "::1"]),
        ("127.0.0.0/8,eth0:0", ["127.0.0.1", "10.0.0.5", "2001:db8::5"]),
        ("^lo,docker*", ["10.0.0.5", "10.9.0.2", "2001:db8::5"]),
        ("^lo,docker*:0", ["10.0.0.5", "10.9.0.2", "2001:db8::5"]),
        ("^docker*,10.0.0.0/8:0", ["2001:db8::5"]),
        ("^eth0,docker*,wg*:0", ["127.0.0.1", "::1"]),
        ("eth:0", []),
        ("^*:0", []),
        (":4433", ["10.0.0.5", "172.17.0.1", "172.18.0.1", "10.9.0.2", "2001:db8::5"]),
    ],
)
def test_what_is_chosen(text: str, hosts: list[str] | None) -> None:
    if hosts is None:
        with pytest.raises(AddressError):
            parse_bind(text)
    else:
        assert list(parse_bind(text).select(HOST)) == hosts


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.1:4433", ("192.0.2.1", 4433)),
        ("[2001:db8::1]:1", ("2001:db8::1", 1)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (":4433", ("::", 4433)),
        ("wg-home:7", ("10.9.0.2", 7)),
        ("[2001:db8::/32]:7", ("2001:db8::5", 7)),
        ("10.0.0.0/8:7", ("0.0.0.0", 7)),
        ("eth0:7", ("::", 7)),
        ("^lo,docker*", ("::", 0)),
    ],
)
def test_one_address_is_bound_and_several_bind_the_wildcard(
    text: str, address: tuple[str, int]
) -> None:
    assert parse_bind(text).address(HOST) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "^",
        "^:0",
        "^^lo",
        "lo,^eth0",
        "lo,,eth0:0",
        ",lo:0",
        " lo:0",
        "lo:x",
        "lo:-1",
        "lo:65536",
        "lo:\u0661",
        "lo:",
        "1.2.3:1",
        "256.1.1.1:1",
        "1.2.3.4",
        "[::1]",
        "10.0.0.5/8:0",
        "10.0.0.0/33:0",
        "fd00::/8:0",
        "[10.0.0.0/8]:0",
        "[fd00::/8:0",
        "eth0/1:0",
        "eth0?:0",
    ],
)
def test_the_error_shows_the_grammar(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_bind(text)
    assert repr(text) in str(caught.value)
    assert "ADDRESS:PORT" in str(caught.value)
    assert "^lo,docker*" in str(caught.value)
    assert caught.value.exit_code == 2


def test_what_chooses_nothing_names_what_there_is() -> None:
    with pytest.raises(AddressError, match=r"'eth7:0'.*lo 127\.0\.0\.1, lo ::1, eth0 10\.0\.0\.5"):
        parse_bind("eth7:0").address(HOST)
    with pytest.raises(AddressError, match="none at all"):
        parse_bind("eth7:0").address(())


# -- sockets


def test_a_network_of_one_address_binds_that() -> None:
    sock = UdpSocket("127.0.0.0/8:0")
    try:
        assert sock.address[0] == "127.0.0.1"
        assert sock.reachable() == (sock.address,)
    finally:
        sock.close()


def test_an_interface_of_several_addresses_is_told_alone() -> None:
    sock = UdpSocket("127.0.0.1,[::1]:0")
    try:
        assert sock.address[0] == "::"
        port = sock.address[1]
        assert sock.reachable() == (("127.0.0.1", port), ("::1", port))
    finally:
        sock.close()


@pytest.mark.anyio
@pytest.mark.parametrize("bind", ["lo:0", "127.0.0.0/8,[::1]", "127.0.0.0/8"])
async def test_peers_meet_at_what_was_chosen(bind: str) -> None:
    async with endpoint(bind=bind) as listener, endpoint(bind=bind) as dialer:
        assert {host for host, _ in listener.addresses} <= {"127.0.0.1", "::1"}
        assert listener.bound[1] == listener.port
        connection = await dialer.connect(at(listener))
        assert await connection.call("echo", 1) == 1


# -- what the documentation shows


def test_every_choice_in_the_documentation_is_one() -> None:
    text = (REPOSITORY / "docs" / "addresses.md").read_text()
    shown = re.findall(r"--bind ('[^']+'|[^'` \n]+)", text)
    assert len(shown) >= 7
    for bind in shown:
        parse_bind(bind.strip("'"))
    assert f"={BUFFER_SIZE} net.core.wmem_max" in text
