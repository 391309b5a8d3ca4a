"""Which references live and who holds them: the API, the call between nodes, and the command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from anyio.from_thread import start_blocking_portal
from typer.testing import CliRunner

from auth import AccessDenied, allow_any
from mesh import Home, Node
from mesh.cli.app import app
from mesh.cli.refs import _row
from mesh.daemon import Daemon
from mesh.rpc.refs import listing
from mesh.rpc.refs.listing import LIST_CALL, Listing
from tests.mesh import nodes
from tests.mesh.nodes import LOOPBACK
from tests.mesh.rpc import exposures
from tests.mesh.rpc.nodes import agents, freed

pytestmark = pytest.mark.anyio


async def test_rows_say_owner_holders_bytes_and_age() -> None:
    """B05."""
    async with agents(3) as (a, b, c):
        first = await a.remote(b.node_id, torch.zeros, (1000,))
        await a.call(c.node_id, exposures.keep, (first,))
        (row,) = b.references()
        assert set(row.holders) == {a.node_id, c.node_id}
        assert (row.kind, row.nbytes) == ("torch.Tensor", 4000)
        assert 0 <= row.age < 10
        failed = await a.remote(b.node_id, exposures.fail, ("value",))
        await nodes.eventually(
            lambda: [row.kind for row in b.references()] == ["torch.Tensor", "failed: ValueError"]
        )
        assert b.references()[1].nbytes == 0
        del first, failed
        exposures.kept.clear()
        await freed(a, b, c)
        assert b.references() == ()


async def test_a_peer_is_told_of_what_it_holds_alone() -> None:
    async with agents(3, last=allow_any(("rpc", "node"))) as (a, b, c):
        mine = await a.remote(c.node_id, exposures.echo, (1,))
        theirs = await b.remote(c.node_id, exposures.echo, (2,))
        for agent, count in ((a, 1), (b, 1)):
            connection = await agent.connected(c.node_id)
            told, held = Listing.decode(await connection.call(LIST_CALL))
            assert [row.holders for row in told.rows] == [(agent.node_id,)]
            assert held == [1]
            assert count == len(told.rows)
        # Who may do anything there sees all of it.
        everything, _ = Listing.decode(await (await c.connected(a.node_id)).call(LIST_CALL))
        assert everything.rows == ()
        other = await c.remote(a.node_id, exposures.echo, (3,))
        everything, _ = Listing.decode(await (await b.connected(a.node_id)).call(LIST_CALL))
        assert [row.holders for row in everything.rows] == [(c.node_id,)]
        del mine, theirs, other
        await freed(a, b, c)


async def test_a_peer_without_the_scope_is_told_nothing() -> None:
    async with agents(2, last=allow_any(("rpc",))) as (a, b):
        with pytest.raises(AccessDenied):
            await (await a.connected(b.node_id)).call(LIST_CALL)


async def test_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_ROWS", 2)
    async with agents(2) as (a, b):
        refs = [await a.remote(b.node_id, exposures.echo, (n,)) for n in range(5)]
        told, _ = Listing.decode(await (await a.connected(b.node_id)).call(LIST_CALL))
        assert (len(told.rows), told.left_out) == (2, 3)
        monkeypatch.setattr(listing, "MAX_SHOWN", 1)
        around: Any = await listing.references_around(a._node, a, b.node_id)
        assert around == {"references": [], "left_out": 0, "silent": []}  # b asks, and is not asked
        around = await listing.references_around(a._node, a, a.node_id)
        assert (len(around["references"]), around["left_out"]) == (1, 4)
        del refs
        await freed(a, b)


async def test_a_peer_that_does_not_answer_is_named() -> None:
    async with agents(2, last=allow_any(("rpc",))) as (a, b), nodes.node() as silent:
        await a._node.connect(silent.ticket())  # makes no remote calls: nothing to say of it
        around: Any = await listing.references_around(a._node, a, a.node_id)
        assert [each["label"] for each in around["silent"]] == [b.node_id.short]


@contextlib.asynccontextmanager
async def programs(home: Home) -> AsyncIterator[tuple[list[Node], Callable[[], Any]]]:
    """A machine's daemon, and three programs connected with it; the third then holds references."""
    daemon = Daemon(home, LOOPBACK)
    async with (
        daemon.running(observe=lambda event: None, refused=lambda node_id, error: None) as machine,
        Node.worker(home, config=LOOPBACK) as one,
        Node.worker(home, config=LOOPBACK) as two,
        Node.worker(home, config=LOOPBACK) as holder,
    ):
        kept = []

        async def hold() -> None:
            for each in (one, two, holder):
                await each.rpc()
                await each.dial(machine.node_id)
            agent = await holder.rpc()
            for there in (one, one, two):
                await holder.connect(there.ticket())
                kept.append(await agent.remote(there.node_id, torch.ones, (256,)))

        yield [one, two, holder], hold
        kept.clear()


def test_the_command_lists_references_of_programs_of_this_machine(tmp_path: Path) -> None:
    """B05, as worded: three references on two peers are three rows, with holders."""
    home = Home(tmp_path / "home")
    home.create()

    def refs(*options: str) -> str:
        result = CliRunner().invoke(app, ["--home", str(home.path), "refs", *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(programs(home)) as ((one, two, holder), hold),
    ):
        assert "No references" in refs()
        portal.call(hold)
        rows = json.loads(refs("--json"))["references"]
        assert sorted(row["owner"]["node_id"] for row in rows) == sorted(
            str(each.node_id) for each in (one, one, two)
        )
        for row in rows:
            assert [each["node_id"] for each in row["holders"]] == [str(holder.node_id)]
            assert row["bytes"] == 1024
            assert row["kind"] == "torch.Tensor"
            assert 0 <= row["age"] < 60
        told = refs()
        assert told.count("1.0 KiB") == 3
        assert told.count(holder.node_id.short) == 3
    assert _row({**rows[0], "holders_in_all": 12, "age": 5000})[-1].endswith("and 11 more")
    none = CliRunner().invoke(app, ["--home", str(home.path), "refs"])
    assert none.exit_code == 3
    assert "mesh up" in none.output
