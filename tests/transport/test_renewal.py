"""A program's connections outlive its first delegation."""

from __future__ import annotations

import time

import pytest

from auth import (
    AccessDenied,
    AccessRequest,
    ConnectRequest,
    Delegation,
    Denial,
    Grant,
    IdentityError,
    MeshError,
    SecretKey,
    allow_any,
)
from tests.transport.nodes import at, config, endpoint
from transport import Connection, Endpoint, ProtocolError
from transport.renewal import RENEWAL_CALL

pytestmark = pytest.mark.anyio


class AsDelegated:
    """Grants what a delegation says for as long as it holds."""

    def __init__(self) -> None:
        self.denies = False

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        if self.denies:
            return Denial("gone", "you were removed")
        if isinstance(request, ConnectRequest) and (delegation := request.peer.delegation):
            return Grant(frozenset(delegation.scopes), delegation.expires_at)
        return Grant(frozenset({"*"}))


def delegated(machine: SecretKey, program: SecretKey, lifetime: float) -> Delegation:
    return Delegation.issue(machine, program.node_id, ("node",), lifetime, time.time())


def known(node: Endpoint, program: Endpoint) -> Connection:
    connection = node.connection(program.node_id)
    assert connection is not None
    return connection


async def test_a_renewed_delegation_takes_the_place_of_the_first_everywhere() -> None:
    machine, program = SecretKey.generate(), SecretKey.generate()
    first, second = (delegated(machine, program, lifetime) for lifetime in (60.0, 600.0))
    async with (
        endpoint(AsDelegated()) as dialled,
        endpoint(AsDelegated()) as dials,
        endpoint(AsDelegated()) as later,
        Endpoint(program, allow_any(), config(), delegation=first) as own,
    ):
        connection = await own.connect(at(dialled))
        await dials.connect(at(own))
        before = known(dialled, own), known(dials, own)
        assert [each.grant and each.grant.expires_at for each in before] == [first.expires_at] * 2
        await own.present(second)
        assert connection.is_open
        assert (known(dialled, own), known(dials, own)) == before
        assert [each.grant and each.grant.expires_at for each in before] == [second.expires_at] * 2
        assert [each.peer.delegation for each in before] == [second] * 2
        await own.connect(at(later))
        assert known(later, own).peer.delegation == second


@pytest.mark.parametrize("wrong", ["machine", "program", "signature", "late", "bytes", "text"])
async def test_another_delegation_changes_nothing(wrong: str) -> None:
    machine, program, other = (SecretKey.generate() for _ in range(3))
    first = delegated(machine, program, 60.0)
    good = delegated(machine, program, 600.0).encode()
    late = Delegation.issue(machine, program.node_id, ("node",), 5.0, time.time() - 600)
    shown = {
        "machine": delegated(other, program, 600.0).encode(),
        "program": delegated(machine, other, 600.0).encode(),
        "signature": good[:-1] + bytes((good[-1] ^ 1,)),
        "late": late.encode(),
        "bytes": good[:-1],
        "text": "renew",
    }[wrong]
    async with (
        endpoint(AsDelegated()) as node,
        Endpoint(program, allow_any(), config(), delegation=first) as own,
    ):
        connection = await own.connect(at(node))
        with pytest.raises(MeshError) as caught:
            await connection.call(RENEWAL_CALL, shown)
        kind = {"machine": AccessDenied, "text": ProtocolError}.get(wrong, IdentityError)
        assert type(caught.value) is kind
        held = known(node, own)
        assert held.peer.delegation == first
        assert held.grant == Grant(frozenset({"node"}), first.expires_at)
        await connection.call(RENEWAL_CALL, good)
        assert held.grant == Grant(frozenset({"node"}), Delegation.decode(good).expires_at), (
            "and the right one is taken"
        )


async def test_who_came_without_a_delegation_can_show_none() -> None:
    machine, program = SecretKey.generate(), SecretKey.generate()
    async with endpoint() as node, Endpoint(program, allow_any(), config()) as own:
        connection = await own.connect(at(node))
        with pytest.raises(AccessDenied, match="without one of that machine"):
            await connection.call(RENEWAL_CALL, delegated(machine, program, 60.0).encode())
        assert known(node, own).peer.delegation is None


async def test_a_peer_that_refuses_keeps_what_it_has_granted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine, program = SecretKey.generate(), SecretKey.generate()
    first, second = (delegated(machine, program, lifetime) for lifetime in (60.0, 600.0))
    policy = AsDelegated()
    async with (
        endpoint(policy) as node,
        Endpoint(program, allow_any(), config(), delegation=first) as own,
    ):
        await own.connect(at(node))
        policy.denies = True
        await own.present(second)
        assert "does not take the renewed delegation" in caplog.text
        held = known(node, own)
        assert held.is_open
        assert held.peer.delegation == first
        assert held.grant == Grant(frozenset({"node"}), first.expires_at)


async def test_nobody_acts_under_what_is_not_theirs() -> None:
    machine, program, other = (SecretKey.generate() for _ in range(3))
    first = delegated(machine, program, 60.0)
    async with (
        endpoint(AsDelegated()) as node,
        Endpoint(program, allow_any(), config(), delegation=first) as own,
    ):
        with pytest.raises(IdentityError):
            await own.present(delegated(machine, other, 60.0))
        await own.connect(at(node))
        assert known(node, own).peer.delegation == first
