"""Stores kept by a node, for the members of each job alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import anyio
import pytest

from auth import AccessDenied, SecretKey, allow_any
from mesh.store import StoreClient, StoreLimits, StoreService
from mesh.store import service as service_module
from tests.mesh.nodes import LOOPBACK, eventually
from transport import (
    CborValue,
    DeadlineExceeded,
    Endpoint,
    LimitExceeded,
    PeerAddress,
    ProtocolError,
    ServiceUnknown,
)

pytestmark = pytest.mark.anyio


class Keeper:
    def __init__(self, stack: AsyncExitStack, endpoint: Endpoint, limits: StoreLimits) -> None:
        self.stack = stack
        self.endpoint = endpoint
        self.service = StoreService(endpoint, limits)
        self.where = PeerAddress(endpoint.node_id, endpoint.addresses)

    def waiting(self) -> int:
        return sum(job.waiting for job in self.service._jobs.values())

    async def client(self, job: str = "j") -> StoreClient:
        endpoint = Endpoint(SecretKey.generate(), allow_any(), LOOPBACK)
        return StoreClient(await self.stack.enter_async_context(endpoint), self.where, job)


@asynccontextmanager
async def keeper(
    scopes: tuple[str, ...] = ("*",), limits: StoreLimits | None = None
) -> AsyncIterator[Keeper]:
    async with AsyncExitStack() as stack:
        endpoint = Endpoint(SecretKey.generate(), allow_any(scopes), LOOPBACK)
        opened = await stack.enter_async_context(endpoint)
        yield Keeper(stack, opened, limits or StoreLimits())


@contextmanager
def within(seconds: float) -> Iterator[None]:
    with anyio.fail_after(seconds):
        yield


async def test_every_operation_from_afar_and_at_home() -> None:
    async with keeper() as kept:
        home = StoreClient(kept.endpoint, None, "home", kept.service)
        for store in (await kept.client(), home):
            await store.do("set", keys=["a", "b"], values=[b"1", b"\x80"])
            assert await store.do("get", keys=["b", "a"]) == [b"\x80", b"1"]
            assert await store.do("wait", keys=["a"]) is None
            assert await store.do("check", keys=["a", "b"]) is True
            assert await store.do("check", keys=["a", "c"]) is False
            assert await store.do("add", key="n", amount=2) == 2
            assert await store.do("add", key="n", amount=-5) == -3
            assert await store.do("compare_set", key="a", expected=b"1", desired=b"2") == b"2"
            await store.do("append", key="a", value=b"3")
            assert await store.do("get", keys=["a"]) == [b"23"]
            assert await store.do("keys") == ["a", "b", "n"]
            assert await store.do("count") == 3
            assert await store.do("delete", key="n") is True
            await store.do("push", key="q", value=b"v")
            assert await store.do("length", key="q") == 1
            assert await store.do("pop", key="q") == b"v"


async def test_jobs_know_nothing_of_each_other() -> None:
    async with keeper() as kept:
        first, second = await kept.client("one"), await kept.client("two")
        await first.do("set", keys=["k"], values=[b"1"])
        assert await second.do("check", keys=["k"]) is False


@pytest.mark.parametrize(("operation", "key"), [("get", "keys"), ("wait", "keys"), ("pop", "key")])
async def test_who_waits_is_woken_by_what_is_set(operation: str, key: str) -> None:
    async with keeper() as kept:
        reader, writer = await kept.client(), await kept.client()
        fields: dict[str, Any] = {key: ["k"] if key == "keys" else "k"}
        found: list[object] = []

        async def wait() -> None:
            found.append(await reader.do(operation, timeout=30, **fields))

        with within(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await eventually(lambda: kept.waiting() > 0)
                assert not found
                await writer.do("set", keys=["other"], values=[b""])  # wakes, and is not it
                if operation == "pop":
                    await writer.do("push", key="k", value=b"v")
                else:
                    await writer.do("set", keys=["k"], values=[b"v"])
        assert found == [{"get": [b"v"], "wait": None, "pop": b"v"}[operation]]
        assert kept.waiting() == 0


async def test_who_waits_in_vain_is_told_so() -> None:
    async with keeper() as kept:
        store = await kept.client()
        for operation, fields in (("get", {"keys": ["a", "b"]}), ("pop", {"key": "q"})):
            with pytest.raises(DeadlineExceeded, match="nobody has set it"):
                await store.do(operation, timeout=0.05, **fields)  # type: ignore[arg-type]


async def test_a_long_wait_is_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.store.service.MAX_WAIT", 0.02)
    monkeypatch.setattr("mesh.store.client.MAX_WAIT", 0.02)
    async with keeper() as kept:
        store, other = await kept.client(), await kept.client()

        async def late() -> None:
            await anyio.sleep(0.1)
            await other.do("set", keys=["k"], values=[b"v"])

        with within(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(late)
                assert await store.do("get", timeout=5, keys=["k"]) == [b"v"]


async def test_a_caller_who_gives_up_waits_no_longer() -> None:
    async with keeper() as kept:
        store = await kept.client()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: store.do("get", timeout=30, keys=["k"]))
            await eventually(lambda: kept.waiting() > 0)
            tasks.cancel_scope.cancel()
        await eventually(lambda: kept.waiting() == 0)


@pytest.mark.attack
@pytest.mark.parametrize("scope", ["tensor", "collective:other", "collective:j2", "node"])
async def test_a_stranger_to_the_job_is_refused(scope: str) -> None:
    async with keeper((scope,)) as kept:
        with pytest.raises(AccessDenied):
            await (await kept.client("j")).do("count")
        assert kept.service.jobs == ()
    for enough in ("collective:j", "collective", "collective:*"):  # positive controls
        async with keeper((enough,)) as kept:
            assert await (await kept.client("j")).do("count") == 0


@pytest.mark.attack
@pytest.mark.parametrize("job", ["", "*", "a:*", "a b"])
async def test_names_that_would_cover_more_than_a_job_are_none(job: str) -> None:
    async with keeper(("collective",)) as kept:
        with pytest.raises(ServiceUnknown):
            await (await kept.client(job)).do("count")
        assert kept.service.jobs == ()


@pytest.mark.attack
@pytest.mark.parametrize(
    "value",
    [
        None,
        {"op": "eval"},
        {"op": "get", "keys": "k", "timeout": 1},
        {"op": "get", "keys": ["k" * 1025], "timeout": 1},
        {"op": "get", "keys": ["k"] * 1025, "timeout": 1},
        {"op": "get", "keys": ["k"], "timeout": float("nan")},
        {"op": "get", "keys": ["k"]},
        {"op": "set", "keys": ["a"], "values": []},
        {"op": "set", "keys": ["a"], "values": ["text"]},
        {"op": "add", "key": "k", "amount": 1.5},
        {"op": "enrol", "rank": 2, "size": 2, "addresses": [], "timeout": 0},
        {"op": "enrol", "rank": 0, "size": 1 << 40, "addresses": [], "timeout": 0},
        {"op": "enrol", "rank": 0, "size": 1, "addresses": ["a:1"] * 17, "timeout": 0},
    ],
)
async def test_malformed_operations_are_refused(value: CborValue) -> None:
    async with keeper() as kept:
        store = await kept.client()
        with pytest.raises(ProtocolError):
            await store._ask(value, 5)
        assert await store.do("count") == 0  # positive control


async def test_too_much_is_refused_and_the_rest_goes_on() -> None:
    async with keeper(limits=StoreLimits(max_bytes=1000)) as kept:
        store = await kept.client()
        with pytest.raises(LimitExceeded, match="Delete what is not needed"):
            await store.do("set", keys=["a"], values=[bytes(2000)])
        await store.do("set", keys=["a"], values=[bytes(500)])
        other = await kept.client("other")  # whose room is its own
        await other.do("set", keys=["a"], values=[bytes(500)])


async def test_jobs_and_waiters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_JOBS", 1)
    monkeypatch.setattr(service_module, "MAX_WAITING", 0)
    async with keeper() as kept:
        store = await kept.client("one")
        with pytest.raises(LimitExceeded, match="wait already"):
            await store.do("get", keys=["k"], timeout=1)
        with pytest.raises(LimitExceeded, match="keeps 1 jobs"):
            await (await kept.client("two")).do("count")


async def test_all_jobs_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_TOTAL", 1000)
    async with keeper() as kept:
        first, second = await kept.client("one"), await kept.client("two")
        await first.do("set", keys=["k"], values=[bytes(2000)])
        with pytest.raises(LimitExceeded, match="together keep too much"):
            await second.do("set", keys=["k"], values=[b""])
        await first.do("delete", key="k")
        await second.do("set", keys=["k"], values=[b""])


async def test_a_job_ends_with_its_last_member() -> None:
    async with keeper() as kept:
        first, second = await kept.client(), await kept.client()
        kept.service.hold("held")
        await first.do("set", keys=["k"], values=[b"v"])
        assert await second.do("check", keys=["k"])
        await first._endpoint.connections[0].close()
        assert await second.do("check", keys=["k"])
        await second._endpoint.connections[0].close()
        await eventually(lambda: kept.service.jobs == ("held",))


async def test_ranks_learn_each_others_proven_keys() -> None:
    async with keeper() as kept:
        clients = [await kept.client() for _ in range(3)]
        found: dict[int, list[Any]] = {}

        async def enrol(rank: int) -> None:
            found[rank] = await clients[rank].enrol(rank, 3, [f"127.0.0.1:{rank + 1}"], 10)

        async with anyio.create_task_group() as tasks:
            for rank in range(3):
                tasks.start_soon(enrol, rank)
        ids = [client._endpoint.node_id for client in clients]
        for members in found.values():
            assert [member.node_id for member in members] == ids
            assert members[2].addresses == ("127.0.0.1:3",)
        # Again is no harm; another key in a rank's place is.
        assert (await clients[1].enrol(1, 3, ["127.0.0.1:2"], 5))[0].node_id == ids[0]
        with pytest.raises(AccessDenied, match=f"rank 1 is {ids[1].short} already"):
            await (await kept.client()).enrol(1, 3, [], 5)
        with pytest.raises(AccessDenied, match="has 3 ranks, and not 4"):
            await (await kept.client()).enrol(3, 4, [], 5)


async def test_ranks_that_do_not_come_are_named() -> None:
    async with keeper() as kept:
        with pytest.raises(DeadlineExceeded, match="rank 0, 2 has not come"):
            await (await kept.client()).enrol(1, 3, [], 0.05)


async def test_a_rank_that_is_gone_before_all_were_there_may_come_again() -> None:
    async with keeper() as kept:
        first, again, other = [await kept.client() for _ in range(3)]
        with pytest.raises(DeadlineExceeded):
            await first.enrol(0, 2, [], 0.01)
        await other.do("count")
        await first._endpoint.connections[0].close()
        await eventually(lambda: not kept.service._jobs["j"].members)
        with pytest.raises(DeadlineExceeded, match="rank 1 has"):
            await again.enrol(0, 2, [], 0.01)
