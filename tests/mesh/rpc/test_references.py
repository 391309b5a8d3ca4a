"""Remote references: made, used, shared, dropped; and what the owner knows of them meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from auth import AccessDenied, Denial, FetchRequest, Grant, PeerIdentity, SecretKey, allow_any
from mesh import rpc
from mesh.errors import UnknownPeer
from mesh.rpc import NotExposed, RefLimits, RefLost, RpcTimeout, agent
from mesh.rpc.names.targets import Target
from mesh.rpc.refs.owned import new_id
from mesh.rpc.wire import CALL_SERVICE, Answer, Beside, Request
from tensor_bridge import QuotaExceeded
from tests.mesh import nodes
from tests.mesh.rpc import exposures
from tests.mesh.rpc.exposures import Counter
from tests.mesh.rpc.nodes import SHORT, agents, freed
from transport import LimitExceeded

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    yield
    exposures.kept.clear()


async def test_a_result_can_stay_where_it_was_made() -> None:
    async with agents(2) as (a, b):
        ref = await a.remote(b.node_id, torch.add, (torch.ones(3), 1))
        assert ref.owner_id == b.node_id
        assert not ref.is_owner()
        assert ref.confirmed_by_owner()
        assert torch.equal(await ref.fetch(), torch.full((3,), 2.0))
        with pytest.raises(rpc.RpcError, match="to_here"):
            ref.local_value()
        (row,) = b.references()
        assert row.holders == (a.node_id,)
        assert row.kind == "torch.Tensor"
        del ref
        await freed(a, b)


async def test_a_large_value_is_fetched() -> None:
    async with agents(2) as (a, b):
        ref = await a.remote(b.node_id, exposures.make, (1 << 20,))
        assert torch.equal(await ref.fetch(), torch.arange(1 << 20, dtype=torch.float32))


async def test_methods_are_called_at_the_owner() -> None:
    async with agents(2) as (a, b):
        ref = await a.remote(b.node_id, Counter, (5,))
        assert await a.invoke(ref, "add", (2,)) == 7
        assert await a.invoke(ref, "later") == 7
        for name in ("_hidden", "__init__", "secret", "count", "nothing"):
            with pytest.raises(NotExposed):
                await a.invoke(ref, name)
        plain = await a.remote(b.node_id, torch.ones, (2,))
        with pytest.raises(NotExposed):
            await a.invoke(plain, "add_", (1,))


async def test_an_argument_that_refers_to_the_callees_own_is_the_value_itself() -> None:
    async with agents(2) as (a, b):
        ref = await a.remote(b.node_id, exposures.make, (3,))
        assert torch.equal(await a.call(b.node_id, exposures.unwrap, (ref,)), torch.arange(3.0))


async def test_a_reference_of_ones_own_is_lent_to_others() -> None:
    async with agents(2) as (a, b):
        mine = a.own(Counter(3))
        assert mine.is_owner()
        await a.call(b.node_id, exposures.keep, (mine,))
        (theirs,) = exposures.kept
        assert theirs.owner_id == a.node_id
        assert await b.invoke(theirs, "add", (1,)) == 4
        assert mine.local_value().count == 4
        del mine
        gc.collect()
        assert await b.invoke(theirs, "add", (1,)) == 5  # it lives as long as anybody has it
        del theirs
        exposures.kept.clear()
        await freed(a, b)


async def test_a_reference_is_passed_on_to_a_third_node() -> None:
    async with agents(3) as (a, b, c):
        ref = await a.remote(b.node_id, exposures.make, (4,))
        await a.call(c.node_id, exposures.keep, (ref,))
        del ref
        gc.collect()
        (theirs,) = exposures.kept
        await nodes.eventually(
            lambda: [row.holders for row in b.references()] == [(c.node_id,)], 5.0
        )
        assert torch.equal(await theirs.fetch(), torch.arange(4.0))
        del theirs
        exposures.kept.clear()
        await freed(a, b, c)


async def test_a_reference_comes_back_as_a_result_and_goes_home() -> None:
    async with agents(3) as (a, b, c):
        ref = await a.remote(b.node_id, exposures.make, (4,))
        again = await a.call(c.node_id, exposures.echo, (ref,))
        assert again.owner_id == b.node_id
        assert torch.equal(await again.fetch(), torch.arange(4.0))
        home = await a.call(b.node_id, exposures.echo, (again,))
        assert home.owner_id == b.node_id
        own = a.own(7)
        back = await a.call(b.node_id, exposures.echo, ({"own": own},))
        assert back["own"].is_owner()
        assert back["own"].local_value() == 7
        del ref, again, home, own, back
        await freed(a, b, c)


async def test_a_handler_fetches_from_a_third_node() -> None:
    async with agents(3) as (a, b, c):
        ref = await a.remote(b.node_id, exposures.make, (4,))
        assert torch.equal(await a.call(c.node_id, exposures.fetch, (ref,)), torch.arange(4.0))


async def test_what_the_function_raised_shows_where_the_reference_is_used() -> None:
    async with agents(3) as (a, b, c):
        ref = await a.remote(b.node_id, exposures.fail, ("value",))
        with pytest.raises(ValueError, match="expected"):
            await ref.fetch()
        with pytest.raises(ValueError, match="expected"):
            await a.call(c.node_id, exposures.fetch, (ref,))
        with pytest.raises(ValueError, match="expected"):
            await a.call(b.node_id, exposures.unwrap, (ref,))


async def test_a_reference_whose_making_took_too_long_fails_everywhere() -> None:
    async with agents(3) as (a, b, c):
        exposures.let_go.clear()
        try:
            ref = await a.remote(b.node_id, exposures.hold, timeout=0.2)
            assert await anyio.to_thread.run_sync(exposures.running.acquire, True, 1)
            for use in (
                lambda: ref.fetch(),
                lambda: a.call(c.node_id, exposures.fetch, (ref,)),
                lambda: a.call(b.node_id, exposures.unwrap, (ref,)),
            ):
                with pytest.raises(RpcTimeout, match="timeout"):
                    await use()
        finally:
            exposures.let_go.set()
        with pytest.raises(RpcTimeout):  # also after the function has ended
            await ref.fetch()


async def test_a_fetch_that_takes_too_long_harms_nobody() -> None:
    async with agents(2) as (a, b):
        exposures.let_go.clear()
        try:
            ref = await a.remote(b.node_id, exposures.hold)
            with pytest.raises(RpcTimeout):
                await ref.fetch(timeout=0.2)
            assert exposures.running.acquire(timeout=1)
        finally:
            exposures.let_go.set()
        assert await ref.fetch() == "held"


async def test_only_holders_may_use_a_reference() -> None:
    async with agents(3) as (a, b, c):
        ref = await a.remote(b.node_id, Counter, (5,))
        state: Any = ref.state
        stolen = c.take_fork(b.node_id, state.fork, (), PeerIdentity(a.node_id))
        with pytest.raises(RefLost, match="no such reference"):
            await stolen.fetch()
        with pytest.raises(RefLost):
            await c.invoke(stolen, "add", (1,))
        with pytest.raises(RefLost):  # nor can it give away what it does not have
            await c.call(a.node_id, exposures.keep, (stolen,))
        del stolen  # and letting go of it does not free the holder's
        gc.collect()
        await anyio.sleep(0.3)
        assert await a.invoke(ref, "add", (1,)) == 6


async def test_references_of_a_holder_that_vanished_are_freed_after_its_lease() -> None:
    async with agents(2, SHORT) as (a, b):
        refs = [await a.remote(b.node_id, exposures.make, (4,)) for _ in range(10)]
        assert len(b.owned) == 10
        await a._node.endpoint.connections[0].close(reason="gone")
        a.owned.close()
        await nodes.eventually(lambda: len(b.owned) == 0)
        with pytest.raises(RefLost):
            await refs[0].fetch()


async def test_a_holder_that_is_back_within_its_lease_keeps_its_references() -> None:
    async with agents(2, RefLimits(lease=30.0)) as (a, b):
        ref = await a.remote(b.node_id, exposures.make, (4,))
        await a._node.endpoint.connections[0].close(reason="gone")
        assert torch.equal(await ref.fetch(), torch.arange(4.0))
        assert b.owned._absent == {}


async def test_a_reference_that_never_arrived_lapses() -> None:
    async with agents(2, SHORT) as (a, b):
        mine = a.own(1)
        state: Any = mine.state
        a.owned.adopt(state, b.node_id, anyio.current_time())
        a._wake_lapse.set()
        assert len(a.owned) == 1
        await freed(a)


async def test_a_cycle_with_a_reference_is_collected() -> None:
    async with agents(2) as (a, b):
        cycle: dict[str, Any] = {"ref": await a.remote(b.node_id, exposures.make, (4,))}
        cycle["again"] = cycle
        del cycle
        await freed(a, b)


async def test_calls_back_and_forth_need_no_pool_of_threads() -> None:
    async with agents(2) as (a, b):
        exposures.players[:] = [a, b]
        results = []

        async def play() -> None:
            results.append(await a.call(b.node_id, exposures.ping_pong, (60,), timeout=60))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(play)
        assert results == [60] * 4
        exposures.players.clear()


async def test_nobody_is_dialled_at_the_word_of_a_peer_that_may_not_order_it() -> None:
    class NoFetch:
        """Admits everybody and fetches from nobody."""

        async def authorize(self, request: Any) -> Grant | Denial:
            if isinstance(request, FetchRequest):
                return Denial("no-fetch", "not from there")
            return await allow_any().authorize(request)  # type: ignore[no-any-return]

    async with nodes.node() as a, nodes.node() as b, nodes.node(NoFetch()) as c:  # type: ignore[arg-type]
        await a.connect(b.ticket())
        await a.connect(c.ticket())
        one, two, three = await a.rpc(), await b.rpc(), await c.rpc()
        ref = await one.remote(two.node_id, exposures.make, (4,))
        await one.call(three.node_id, exposures.keep, (ref,))
        (theirs,) = exposures.kept
        with pytest.raises((AccessDenied, UnknownPeer)):
            await theirs.fetch()
        assert b.endpoint.connection(c.node_id) is None


async def test_values_that_are_referred_to_take_room_of_who_ordered_them() -> None:
    async with agents(2) as (a, b):
        room = b.service._room
        room._max_bytes_per_peer = 2_000_000
        refs = [await a.remote(b.node_id, torch.zeros, (200_000,)) for _ in range(3)]
        await nodes.eventually(
            lambda: sum(row.kind == "torch.Tensor" for row in b.references()) == 2
        )
        with pytest.raises(QuotaExceeded, match="let go of references"):
            await refs[2].fetch()
        refs.clear()
        await freed(a, b)
        await nodes.eventually(lambda: not room.used)
        again = await a.remote(b.node_id, torch.zeros, (200_000,))
        assert (await again.fetch()).numel() == 200_000


async def test_arguments_take_room_until_the_function_has_ended() -> None:
    exposures.let_go.clear()
    async with agents(2) as (a, b):
        room = b.service._room
        try:
            ref = await a.remote(b.node_id, exposures.hold, (torch.zeros(1000),))
            assert room.used == 4000
        finally:
            exposures.let_go.set()
        assert await ref.fetch() == "held"
        assert room.used == len("held")
        del ref
        await freed(a, b)
        await nodes.eventually(lambda: not room.used)


async def test_a_value_whose_size_can_not_be_told_fails_alone() -> None:
    async with agents(2) as (a, b):
        lazy = await a.remote(b.node_id, exposures.lazy)
        assert await a.call(b.node_id, exposures.kind_of, (lazy,)) == "LazyLinear"
        odd = await a.remote(b.node_id, exposures.odd)
        with pytest.raises(ValueError, match="of no size"):
            await odd.fetch()
        assert len(b.references()) == 2
        assert await a.call(b.node_id, exposures.echo, (1,)) == 1


async def test_a_peer_makes_a_node_look_for_so_many_strangers_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent, "MAX_STRANGERS", 8)
    async with agents(2) as (a, b):
        connection = await a.connected(b.node_id)

        async def give(count: int) -> Any:
            refs = [
                ["R", "fork", SecretKey.generate().node_id.raw, new_id(), new_id(), []]
                for _ in range(count)
            ]
            items: list[Any] = [["t", count], *refs, ["d", 0]]
            target = Target("function", f"{exposures.__name__}.kinds")
            request = Request(target, items, Beside(), 5.0)
            return Answer.decode(await connection.call(CALL_SERVICE, request.encode()))

        assert (await give(8)).items == [["l", 8], *["RRef"] * 8]
        with pytest.raises(LimitExceeded, match="can't be reached"):
            await give(1)
        assert len(b.holdings._telling) <= 8
