"""A program's key that tries more than its machine has delegated to it, or for longer."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from auth import AccessDenied, AuthorizedKeys, Delegation, MeshError, SecretKey, allow_any
from auth.delegation import CLOCK_SKEW
from tests.attacks.raw import hello, raw_client
from tests.transport.nodes import at, config, endpoint
from transport import Connection, Endpoint, Incoming
from transport.cbor import CborValue

pytestmark = [pytest.mark.anyio, pytest.mark.attack]

MACHINE, PROGRAM = SecretKey.generate(), SecretKey.generate()


async def done(request: Incoming) -> CborValue:
    return "done"


@asynccontextmanager
async def node(path: Path, *scopes: str) -> AsyncIterator[tuple[Endpoint, AuthorizedKeys]]:
    """A node at which the machine may do `scopes`."""
    keys = AuthorizedKeys(path / "keys")
    keys.add(MACHINE.node_id, scopes=scopes)
    async with endpoint(keys) as up:
        for name in ("tensor:get", "tensor:put", "admin"):
            up.register_call(name, done, scope=name)
        yield up, keys


def word(
    scopes: Iterable[str] = ("tensor:get",), *, lifetime: float = 600.0, ago: float = 0.0
) -> Delegation:
    return Delegation.issue(MACHINE, PROGRAM.node_id, scopes, lifetime, time.time() - ago)


@asynccontextmanager
async def program(
    there: Endpoint, delegation: Delegation, key: SecretKey = PROGRAM
) -> AsyncIterator[Connection]:
    async with Endpoint(key, allow_any(), config(), delegation=delegation) as here:
        yield await here.connect(at(there))


async def test_it_may_do_what_was_delegated_and_no_more(tmp_path: Path) -> None:
    async with node(tmp_path, "tensor") as (there, _), program(there, word()) as connection:
        assert await connection.call("tensor:get") == "done"  # the positive control
        for beyond in ("tensor:put", "admin"):
            with pytest.raises(AccessDenied):
                await connection.call(beyond)


async def test_it_may_not_do_more_than_its_machine_whatever_was_delegated(tmp_path: Path) -> None:
    everything = word(["*"])
    async with (
        node(tmp_path, "tensor:get") as (there, _),
        program(there, everything) as connection,
    ):
        assert await connection.call("tensor:get") == "done"
        for beyond in ("tensor:put", "admin"):
            with pytest.raises(AccessDenied):
                await connection.call(beyond)


async def test_it_is_cut_off_when_its_time_is_over(tmp_path: Path) -> None:
    # Two machines' clocks may differ by so much that a delegation seems to last that much longer.
    nearly_over = word(lifetime=600.0, ago=600.0 + CLOCK_SKEW - 0.7)
    async with node(tmp_path, "tensor") as (there, _), program(there, nearly_over) as connection:
        assert await connection.call("tensor:get") == "done"
        with anyio.fail_after(5):
            error = await connection.wait_closed()
        assert isinstance(error, AccessDenied)
        assert error.why == "the grant has expired"


def altered(**changes: object) -> Delegation:
    return dataclasses.replace(word(), **changes)  # type: ignore[arg-type]


async def test_what_its_machine_has_not_signed_for_it_now_lets_nobody_in(tmp_path: Path) -> None:
    other = SecretKey.generate()
    false = {
        "over": word(lifetime=600.0, ago=700.0),
        "not yet": word(ago=-120.0),
        "more scopes": altered(scopes=("*",)),
        "more time": altered(expires_at=word().expires_at + 60),
        "another program": altered(program=other.node_id),
        "another machine": altered(machine=other.node_id),
        "for ever": altered(expires_at=1e10),
        "of itself": Delegation.issue(PROGRAM, PROGRAM.node_id, ("*",), 600.0, time.time()),
        "of a program": Delegation.issue(other, PROGRAM.node_id, ("*",), 600.0, time.time()),
    }
    async with node(tmp_path, "tensor") as (there, _):
        for what, delegation in false.items():
            async with raw_client(there.port, PROGRAM) as client:
                client.send(hello(delegation=delegation.encode()), fin=True)
                await client.until(lambda it=client: it.reply() or it.ended)  # type: ignore[misc]
                answer = client.reply()
                assert isinstance(answer, dict), what
                assert "err" in answer, what
                client.close()
        async with raw_client(there.port, PROGRAM) as client:  # the positive control
            client.send(hello(delegation=word().encode()), fin=True)
            await client.until(lambda: client.reply())
            assert "ok" in client.reply()  # type: ignore[operator]


async def test_somebody_elses_word_is_of_no_use(tmp_path: Path) -> None:
    async with node(tmp_path, "tensor") as (there, _):
        thief = SecretKey.generate()
        with pytest.raises(MeshError, match=f"presented by {thief.node_id.short}, another key"):
            async with program(there, word(), key=thief):
                pass


async def test_a_program_goes_when_its_machine_does(tmp_path: Path) -> None:
    async with node(tmp_path, "tensor") as (there, keys), program(there, word()) as connection:
        keys.subscribe(lambda node_id: there.revoke(node_id, "its machine was removed"))
        assert await connection.call("tensor:get") == "done"
        keys.remove(MACHINE.node_id)
        with anyio.fail_after(3):
            assert isinstance(await connection.wait_closed(), AccessDenied)


async def test_fewer_rights_of_the_machine_are_fewer_of_its_programs_at_once(
    tmp_path: Path,
) -> None:
    everything = word(["*"])
    async with node(tmp_path, "tensor") as (there, keys), program(there, everything) as connection:
        assert await connection.call("tensor:put") == "done"
        keys.add(MACHINE.node_id, scopes=["tensor:get"])
        await there.reconsider(MACHINE.node_id)
        with pytest.raises(AccessDenied):
            await connection.call("tensor:put")
        assert await connection.call("tensor:get") == "done"
