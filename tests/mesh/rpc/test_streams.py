"""Generators that peers read from: items, back-pressure both ways, and every way to end."""

from __future__ import annotations

import contextlib
import gc
import inspect
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import pytest
import torch

import mesh.blocking
from auth import AccessDenied, SecretKey, allow_any
from mesh import rpc
from mesh.errors import TransportError
from mesh.rpc import Agent, NotExposed, RpcError, RpcTimeout, Unsendable
from mesh.rpc.answering.serve_stream import AHEAD
from mesh.rpc.names.targets import Target
from mesh.rpc.wire import STREAM_SERVICE, Beside, Request, Wanted
from tests.mesh import nodes
from tests.mesh.rpc.nodes import SHORT, agents, freed

pytestmark = pytest.mark.anyio

rpc.expose(__name__)


class Seen:
    """What generators have come to."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = 0
        self.go_on = threading.Event()


seen = Seen()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    seen.__init__()  # type: ignore[misc]
    yield
    seen.go_on.set()


def count(until: int) -> Iterator[int]:
    try:
        for number in range(until):
            seen.made += 1
            yield number
    finally:
        seen.closed += 1


async def count_async(until: int) -> AsyncIterator[int]:
    try:
        for number in range(until):
            await anyio.lowlevel.checkpoint()
            seen.made += 1
            yield number
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.lowlevel.checkpoint()  # clean-up may await
        seen.closed += 1


def shapes(*tensors: torch.Tensor, times: int = 1) -> Iterator[torch.Tensor]:
    for number in range(times):
        for tensor in tensors:
            seen.made += 1
            yield tensor + number


def references(until: int) -> Iterator[Any]:
    for number in range(until):
        yield {"ref": _owner.own(number)}


def fails(after: int) -> Iterator[int]:
    yield from range(after)
    raise ValueError("as was expected")


async def fails_async(after: int) -> AsyncIterator[int]:
    for number in range(after):
        yield number
    raise ValueError("as was expected")


def exits() -> Iterator[int]:
    yield 1
    raise SystemExit(3)


async def exits_async() -> AsyncIterator[int]:
    yield 1
    raise SystemExit(3)


def unsendable() -> Iterator[Any]:
    yield 1
    yield [seen]


def stuck() -> Iterator[int]:
    try:
        yield 1
        seen.go_on.wait(10)
        yield 2
    finally:
        seen.closed += 1


async def stuck_async() -> AsyncIterator[int]:
    try:
        yield 1
        await anyio.sleep_forever()
    finally:
        seen.closed += 1


def plain() -> list[int]:
    return [1]


class Range:
    def __init__(self, until: int) -> None:
        self.until = until

    def items(self) -> Iterator[int]:
        yield from range(self.until)


_owner: Agent


async def read(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


both = pytest.mark.parametrize("function", [count, count_async])


@both
async def test_items_come_in_order_and_the_generator_ends(function: Any) -> None:
    async with agents(2) as (a, b):
        assert await read(a.stream(b.node_id, function, (50,))) == list(range(50))
        assert await read(a.stream(b.node_id, function, (0,))) == []
        assert await read(a.stream(b.node_id, f"{__name__}.{function.__name__}", (), {"until": 3}))
        assert seen.closed == 3
        await nodes.eventually(lambda: not b.service.streams.open)


async def test_a_peer_is_read_from_with_one_word() -> None:
    async with nodes.node() as one, nodes.node() as two:
        await two.rpc()
        peer = await one.connect(two.ticket())
        items = [item async for item in peer.stream(count, 3, timeout=5)]
        assert items == [0, 1, 2]


async def test_a_node_reads_its_own_generator() -> None:
    async with agents(2) as (a, _):
        tensor = torch.ones(2)
        (item,) = await read(a.stream(a.node_id, shapes, (tensor,)))
        assert torch.equal(item, tensor)
        for function in (count, count_async):
            async with a.stream(a.node_id, function, (50,)) as items:
                assert await anext(items) == 0
        assert seen.closed == 2


@both
async def test_a_generator_is_only_so_far_ahead_of_its_reader(function: Any) -> None:
    async with agents(2) as (a, b):
        async with a.stream(b.node_id, function, (1000,)) as items:
            assert await anext(items) == 0
            await nodes.eventually(lambda: seen.made == AHEAD + 1)
            await anyio.sleep(0.05)
            assert seen.made == AHEAD + 1
            assert await anext(items) == 1
            await nodes.eventually(lambda: seen.made == AHEAD + 2)
        await nodes.eventually(lambda: seen.closed == 1)
        assert seen.made <= AHEAD + 3


async def test_large_tensors_go_apart_both_ways_when_they_are_asked_for() -> None:
    large = torch.randn(100_000)
    async with agents(2) as (a, b):
        async with a.stream(b.node_id, shapes, (large, large[:3]), {"times": 3}) as items:
            assert torch.equal(await anext(items), large)
            await nodes.eventually(lambda: seen.made == 3)  # the small one, and one that waits
            assert not b.service._parts._offered
            assert torch.equal(await anext(items), large[:3])
            assert torch.equal(await anext(items), large + 1)
            assert len(await read(items)) == 3
        await nodes.eventually(lambda: not b.service._room.used)


async def test_references_among_items_are_held_by_their_reader() -> None:
    global _owner
    async with agents(2, SHORT) as (a, b):
        _owner = b
        async with a.stream(b.node_id, references, (3,)) as items:
            first = (await anext(items))["ref"]
            await anyio.sleep(2 * SHORT.confirm)  # what is not asked for yet is not given yet
            rest = [item["ref"] async for item in items]
        assert [await each.fetch() for each in (first, *rest)] == [0, 1, 2]
        del first, rest
        await freed(a, b)


@pytest.mark.parametrize("function", [fails, fails_async])
@pytest.mark.parametrize("after", [0, 3])
async def test_what_a_generator_raises_comes_after_its_items(function: Any, after: int) -> None:
    async with agents(2) as (a, b):
        got: list[int] = []
        items = a.stream(b.node_id, function, (after,))
        with pytest.raises(ValueError, match="as was expected") as caught:
            await _collect(items, got)
        assert got == list(range(after))
        (note,) = caught.value.__notes__
        assert b.node_id.short in note
        assert 'raise ValueError("as was expected")' in note
        with pytest.raises(RpcError, match="not got"):
            await anext(items)


async def test_an_item_that_does_not_travel_ends_the_stream_with_its_place() -> None:
    async with agents(2) as (a, b):
        items = a.stream(b.node_id, unsendable)
        assert await anext(items) == 1
        with pytest.raises(Unsendable, match=r"item 2 of .*the result\[0\]"):
            await anext(items)
        await nodes.eventually(lambda: not b.service.streams.open)


async def test_a_generator_that_exits_takes_nobody_with_it() -> None:
    async with agents(2) as (a, b):
        for function in (exits, exits_async):
            with pytest.raises(RuntimeError, match="SystemExit"):
                await read(a.stream(b.node_id, function))
        assert await read(a.stream(b.node_id, count, (1,))) == [0]


async def test_what_can_not_be_read_from() -> None:
    async with agents(2) as (a, b):
        with pytest.raises(RpcError, match="no generator function"):
            await read(a.stream(b.node_id, plain))
        with pytest.raises(NotExposed):
            await read(a.stream(b.node_id, "os.walk", (".",)))
        with pytest.raises(NotExposed):  # and a large argument is not waited for
            await read(a.stream(b.node_id, "os.walk", (torch.ones(100_000),)))
        with pytest.raises(TypeError, match="argument"):
            await read(a.stream(b.node_id, count, (1, 2)))
        with pytest.raises(Unsendable, match=r"args\[0\]"):
            await read(a.stream(b.node_id, count, (seen,)))
        with pytest.raises(RpcError, match="stream"):
            await a.call(b.node_id, count, (1,))
        assert seen.made == 0


async def test_methods_of_what_a_reference_refers_to() -> None:
    async with agents(2) as (a, b):
        ref = await a.remote(b.node_id, Range, (4,))
        assert await read(a.stream_method(ref, "items")) == [0, 1, 2, 3]
        with pytest.raises(NotExposed):
            await read(a.stream_method(ref, "_items"))
        assert await read(b.stream_method(b.own(Range(2)), "items")) == [0, 1]
        del ref
        await freed(a, b)


@pytest.mark.parametrize("function", [stuck, stuck_async])
@pytest.mark.parametrize("way", ["cancelled", "late", "left", "forgotten"])
async def test_a_reader_that_leaves_has_the_generator_closed(function: Any, way: str) -> None:
    async with agents(2) as (a, b):
        items = a.stream(b.node_id, function, timeout=0.2 if way == "late" else 0)
        assert await anext(items) == 1
        match way:
            case "cancelled":
                with anyio.move_on_after(0.05):
                    await anext(items)
                with pytest.raises(RpcError):
                    await anext(items)
            case "late":
                with pytest.raises(RpcTimeout, match="stuck"):
                    await anext(items)
            case "left":
                await items.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(items)
            case "forgotten":
                del items
                gc.collect()
        await anyio.sleep(0.05)
        seen.go_on.set()
        await nodes.eventually(lambda: seen.closed == 1)
        await nodes.eventually(lambda: not b.service.streams.open)
        await nodes.eventually(lambda: b.workers._free == 16)


@both
async def test_the_loss_of_either_side_ends_it(function: Any) -> None:
    async with agents(2) as (a, b):
        items = a.stream(b.node_id, function, (1000,), timeout=0)
        assert await anext(items) == 0
        for connection in b._node.endpoint.connections:
            connection.abort(reason="gone")
        with pytest.raises(TransportError, match=r"^stream of"):
            await read(items)
        await nodes.eventually(lambda: seen.closed == 1)


async def test_items_wait_neither_for_a_slow_item_of_another_nor_for_calls() -> None:
    async with agents(2) as (a, b):
        slow = [a.stream(b.node_id, stuck_async) for _ in range(20)]
        for each in slow:
            assert await anext(each) == 1
        with anyio.fail_after(5):
            assert await read(a.stream(b.node_id, count, (100,))) == list(range(100))
            assert await a.call(b.node_id, plain) == [1]
        for each in slow:
            await each.aclose()
        await nodes.eventually(lambda: seen.closed == 21)


async def test_two_tasks_can_not_read_at_once() -> None:
    async with agents(2) as (a, b):
        items = a.stream(b.node_id, stuck_async)
        assert await anext(items) == 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_swallow, items)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(anyio.BusyResourceError):
                await anext(items)
            tasks.cancel_scope.cancel()
        await nodes.eventually(lambda: seen.closed == 1)


async def _collect(items: AsyncIterator[Any], into: list[Any]) -> None:
    async for item in items:
        into.append(item)  # noqa: PERF401 - what comes before an error counts


async def _until_it_ends(stream: Any) -> None:
    while True:
        await stream.receive_message()


async def _swallow(items: Any) -> None:
    await anext(items)


async def test_a_peer_without_the_scope_reads_nothing() -> None:
    async with agents(2, last=allow_any(("tensor", "node"))) as (a, b):
        with pytest.raises(AccessDenied):
            await read(a.stream(b.node_id, count, (1,)))
        assert await read(b.stream(a.node_id, count, (1,))) == [0]
        assert seen.made == 1


@pytest.mark.attack
async def test_a_reader_that_breaks_the_protocol_is_left_and_others_are_not() -> None:
    async with agents(2) as (a, b):
        connection = await a.connected(b.node_id)
        target = Target("function", f"{__name__}.count")
        good = Request(target, [["t", 1], 1000, ["d", 0]], Beside(), 5.0)
        for wrong in (
            {"wanted": -1},
            {"wanted": 1 << 63},
            {"wanted": 0},
            {},
            [1],
            {"wanted": "x" * 99},
        ):
            stream = await connection.open_stream(STREAM_SERVICE, good.encode())
            await stream.send_message(Wanted(2).encode())
            await stream.receive_message()
            with contextlib.suppress(TransportError):
                await stream.send_message(wrong)
            with pytest.raises(TransportError):
                await _until_it_ends(stream)
            stream.reset()
        for target, items in (
            (Target("operator", "torch.add"), [["t", 0], ["d", 0]]),
            (Target("fetch", key=bytes(16)), [["t", 0], ["d", 0]]),
            (Target("function", f"{__name__}.count"), [["l", 0], ["d", 0]]),
        ):
            stream = await connection.open_stream(
                STREAM_SERVICE, Request(target, list(items), Beside(), 5.0).encode()
            )
            with pytest.raises(TransportError):
                await stream.receive_message()
            stream.reset()
        await nodes.eventually(lambda: not b.service.streams.open)
        assert await read(a.stream(b.node_id, count, (2,))) == [0, 1]


def test_threads_read_with_for() -> None:
    with (
        _blocking() as one,
        _blocking() as two,
    ):
        two.run(two.node.rpc)
        peer = one.connect(two.ticket())
        assert list(peer.stream(count, 40)) == list(range(40))
        with peer.stream(count_async, 40) as items:
            assert next(items) == 0
        with pytest.raises(ValueError, match="expected"):
            list(peer.stream(fails, 1))
        with pytest.raises(StopIteration):
            next(items)
    assert inspect.isgeneratorfunction(count)


def _blocking() -> Any:
    return mesh.blocking.Node.embedded(
        key=SecretKey.generate(), authorizer=allow_any(), config=nodes.LOOPBACK, tensors=False
    )
