"""Hosts that are not like the developer's: IPv6 alone, no resolver, several interfaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from auth import SocketAddress, Ticket
from tests.lab.network import Host, Lab, NodeProcess, lab, missing
from transport import parse_address

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

NOWHERE: SocketAddress = ("192.0.2.1", 4433)


@pytest.fixture
def net() -> Iterator[Lab]:
    with lab() as built:
        yield built


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    """The event loop of the nodes, which run in processes of their own."""
    return str(request.param)


def hosts_of(node: NodeProcess) -> list[str]:
    return [parse_address(text)[0] for text in node.started["addresses"]]


def path_of(said: dict[str, object]) -> str:
    assert "path" in said, said
    return parse_address(str(said["path"]))[0]


def with_first(ticket: str, *addresses: SocketAddress) -> str:
    """Return a ticket with other addresses before its own."""
    plain = Ticket.decode(ticket)
    return Ticket(plain.node_id, (*addresses, *plain.addresses)).encode()


def two_interfaces(net: Lab) -> tuple[Host, Host]:
    """A host with two links to another."""
    a, b = net.host("a"), net.host("b")
    net.link(a, b, "eth0", "10.1.0.1/24", "10.1.0.2/24")
    net.link(a, b, "eth1", "10.2.0.1/24", "10.2.0.2/24")
    return a, b


def test_hosts_of_ipv6_alone(net: Lab, backend: str) -> None:
    a, b = net.host("a"), net.host("b")
    net.link(a, b, "eth0", "fd00:1::1/64", "fd00:1::2/64")
    for host in (a, b):
        host.ip("address del 127.0.0.1/8 dev lo")
    with a.node(backend) as first:
        assert hosts_of(first) == ["fd00:1::1"]
        ticket = first.started["ticket"]
        with b.node(backend, join=[ticket, with_first(ticket, NOWHERE)]) as second:
            said = second.next()
            assert path_of(said) == "fd00:1::1"
            assert said["state"] == "authorized"
        # An address of a family that the host has not makes way at once.
        with b.node(backend, join=[with_first(ticket, NOWHERE)]) as third:
            said = third.next()
            assert path_of(said) == "fd00:1::1"
            assert said["after"] < 1.0
        nobody = Ticket(Ticket.decode(ticket).node_id, (NOWHERE,)).encode()
        with b.node(backend, join=[nobody]) as fourth:
            said = fourth.next()
            assert "no way there" in said["error"]
            assert said["after"] < 1.0


def test_hosts_without_a_resolver(net: Lab, backend: str) -> None:
    a, b = net.host("a"), net.host("b")
    net.link(a, b, "eth0", "10.1.0.1/24", "10.1.0.2/24")
    with a.node(backend, has_names=False, resolve=True) as first:
        assert first.started["resolves"] is False
        assert hosts_of(first) == ["10.1.0.1"]
        ticket = first.started["ticket"]
        with b.node(backend, has_names=False, resolve=True, join=[ticket]) as second:
            assert second.started["resolves"] is False
            said = second.next()
            assert path_of(said) == "10.1.0.1"
            assert said["after"] < 2.0


@pytest.mark.parametrize("bind", ["eth1:0", "^eth0,lo", "10.2.0.0/16:0", "10.2.0.1:0"])
def test_one_of_two_interfaces(net: Lab, backend: str, bind: str) -> None:
    a, b = two_interfaces(net)
    with a.node(backend, bind=bind) as first:
        assert hosts_of(first) == ["10.2.0.1"]
        assert first.started["bound"] == first.started["addresses"][0]
        with b.node(backend, join=[first.started["ticket"]]) as second:
            assert path_of(second.next()) == "10.2.0.1"


def test_both_of_two_interfaces(net: Lab, backend: str) -> None:
    a, b = two_interfaces(net)
    with a.node(backend, bind="eth*,10.9.0.0/16") as first:
        assert sorted(hosts_of(first)) == ["10.1.0.1", "10.2.0.1"]
        assert first.started["bound"].startswith("0.0.0.0:")
        with b.node(backend, join=[first.started["ticket"]]) as second:
            assert path_of(second.next()) in {"10.1.0.1", "10.2.0.1"}
        # One of the two leads nowhere from there: the other is found all the same.
        b.ip("link set eth0 down")
        with b.node(backend, join=[first.started["ticket"]]) as third:
            said = third.next()
            assert path_of(said) == "10.2.0.1"
            assert said["after"] < 1.0


def test_an_interface_that_is_not_there(net: Lab, backend: str) -> None:
    a, _ = two_interfaces(net)
    with a.node(backend, bind="wlan*:0") as node:
        assert "eth0 10.1.0.1, eth1 10.2.0.1" in node.started["error"]
        assert "^lo,docker*" in node.started["error"]


def test_a_host_that_lets_nothing_out_says_so(net: Lab, backend: str) -> None:
    a, b = two_interfaces(net)
    b.ip("route add prohibit 10.9.0.0/24")
    with a.node(backend) as first:
        plain = Ticket.decode(first.started["ticket"])
        blocked = Ticket(plain.node_id, (("10.9.0.1", 4433),)).encode()
        join = [blocked, first.started["ticket"]]
        with b.node(backend, join=join, connect_timeout=2.0) as second:
            assert "own firewall or routes let nothing out" in second.next()["error"]
            assert path_of(second.next()) in {"10.1.0.1", "10.2.0.1"}
