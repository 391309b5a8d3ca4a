"""Moves that go wrong half-way: nothing is left behind, and what can go on goes on."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import anyio.lowlevel
import psutil
import pytest
import torch

from auth import AccessDenied, Denial, FetchRequest, Grant, MintRequest, Quotas, TokenLimits
from tensor_bridge import (
    CHUNK_BYTES,
    MoveLimits,
    Progress,
    QuotaExceeded,
    StoreLimits,
    TensorChanged,
    TensorRef,
    UnsupportedTensor,
    describe,
)
from tensor_bridge.serve_fetch import REDIAL_SECONDS
from tensor_bridge.wire import PutAccepted, PutOpen, Sent, Stored
from tests.tensor_bridge.nodes import Node, eventually, node, together
from tests.tensor_bridge.tensors import filled, same
from transport import (
    AppCode,
    ConnectionClosed,
    DeadlineExceeded,
    PeerLost,
    ProtocolError,
    TransportError,
    Unreachable,
)

pytestmark = pytest.mark.anyio

MIB = 1 << 20
SIZE = MIB + 5

ENDLESS = torch.zeros(()).expand(1 << 28)
"""1 GiB to move, though not to hold: whatever disturbs its move comes in time."""

SHORT = MoveLimits(stall=5.0, resume=0.5, linger=0.5)
IMPATIENT = MoveLimits(stall=0.5, resume=0.5)
QUICK = TokenLimits(claim_seconds=2.5, progress_seconds=2.5)

AT_ONCE = 0.45
"""Seconds in which nothing has expired yet."""


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node, Node]]:
    async with together(
        node(tokens=QUICK, moves=SHORT), node(tokens=QUICK, moves=SHORT), node()
    ) as (a, b, client):
        yield a, b, client


class At:
    """A progress callback that does something once, when a move has come to a certain byte."""

    def __init__(self, byte: int, action: Callable[[], object]) -> None:
        self.byte, self.action, self.done = byte, action, False

    def __call__(self, progress: Progress) -> None:
        if progress.moved >= self.byte and not self.done:
            self.done = True
            self.action()


@contextlib.asynccontextmanager
async def once(condition: Callable[[], bool], action: Callable[[], object]) -> AsyncIterator[None]:
    """Do something as soon as a condition holds during the block; fail if it never does."""
    done = False

    async def watch() -> None:
        nonlocal done
        while not condition():
            await anyio.lowlevel.checkpoint()  # megabytes land within a millisecond
        done = True
        action()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()
    assert done, "the block was over before it could be disturbed"


def cut(one: Node, other: Node) -> Callable[[], None]:
    """Return what breaks the connection between two nodes."""

    def abort() -> None:
        connection = one.endpoint.connection(other.endpoint.node_id)
        assert connection is not None
        connection.abort(AppCode.LEFT)

    return abort


# -- links that break


@pytest.mark.parametrize("byte", [1, CHUNK_BYTES + 1, SIZE])
async def test_put_and_get_go_on_over_a_new_connection(
    nodes: tuple[Node, Node, Node], byte: int
) -> None:
    a, _, client = nodes
    at_a = await client.client(a, reconnect=True)
    tensor = filled((SIZE,), torch.uint8)
    putting = At(byte, cut(client, a))
    ref = await at_a.put(tensor, progress=putting)
    getting = At(byte, cut(a, client))
    assert same(await at_a.get(ref, progress=getting), tensor)
    assert putting.done
    assert getting.done
    assert len(a.store) == 1
    await eventually(lambda: a.is_empty)


async def test_without_a_way_back_a_broken_link_ends_the_move(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, client = nodes
    at_a = await client.client(a)
    with pytest.raises(ConnectionClosed):
        await at_a.put(filled((SIZE,), torch.uint8), progress=At(MIB, cut(client, a)))
    assert len(a.service.arrivals) == 1  # to be taken up again, for a while
    await eventually(lambda: a.is_empty)


async def test_a_copy_goes_on_after_the_nodes_lost_each_other_three_times(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    tensor = filled((24 * SIZE,), torch.uint8)
    ref = client.has(a, tensor)

    def again(byte: int, one: Node, other: Node) -> Callable[[], bool]:
        """What holds when so much has landed and `one` has a link to `other`, to cut."""
        return lambda: (
            landed(b) >= byte and one.endpoint.connection(other.endpoint.node_id) is not None
        )

    async with (
        once(again(SIZE, b, a), cut(b, a)),
        once(again(8 * SIZE, a, b), cut(a, b)),
        once(again(16 * SIZE, b, a), cut(b, a)),
    ):
        copy = await at_a.copy_to(ref, at_b)
    assert same(b.store.get(copy.object_id).tensor, tensor)
    await eventually(lambda: a.is_empty and b.is_empty)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux can be told what not to hear")
async def test_a_copy_goes_on_though_the_source_believes_in_the_old_link() -> None:
    async with together(node(), node(), node()) as (a, b, client):
        at_a, at_b = await client.client(a), await client.client(b)
        tensor = filled((4 * SIZE,), torch.uint8)
        ref = client.has(a, tensor)

        def cut_unheard() -> None:
            a.hear_nothing_of(b)
            cut(b, a)()
            tasks.start_soon(hear_again)

        async def hear_again() -> None:
            await anyio.sleep(0.1)  # by then it has been said
            a.hear_all()

        async with (
            anyio.create_task_group() as tasks,
            once(lambda: landed(b) >= SIZE, cut_unheard),
        ):
            copy = await at_a.copy_to(ref, at_b)
        assert same(b.store.get(copy.object_id).tensor, tensor)
        await eventually(lambda: a.is_empty and b.is_empty)


@pytest.mark.parametrize("cut_from", ["source", "target"])
async def test_a_copy_goes_on_after_the_client_lost_a_node(
    nodes: tuple[Node, Node, Node], cut_from: str
) -> None:
    a, b, client = nodes
    at_a = await client.client(a, reconnect=True)
    at_b = await client.client(b, reconnect=True)
    tensor = filled((4 * SIZE,), torch.uint8)
    ref = client.has(a, tensor)
    async with once(lambda: landed(b) >= MIB, cut(client, a if cut_from == "source" else b)):
        copy = await at_a.copy_to(ref, at_b)
    assert same(b.store.get(copy.object_id).tensor, tensor)
    assert len(b.store) == 1
    await eventually(lambda: a.is_empty and b.is_empty)


@pytest.mark.parametrize("byte", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 7, 2 * CHUNK_BYTES + 1])
async def test_a_put_cut_at_any_byte_is_taken_up_in_place(
    nodes: tuple[Node, Node, Node], byte: int
) -> None:
    a, _, client = nodes
    tensor = filled((2 * CHUNK_BYTES + 1,), torch.uint8)
    data = bytes(tensor.tolist())
    order = PutOpen("ab" * 16, describe(tensor)).encode()

    async def attempt(send: int, *, finish: bool) -> Stored | None:
        connection = await client.connection(a)
        stream = await connection.open_stream("tensor.put", order)
        offset = PutAccepted.decode(await stream.reply(), len(data)).offset
        await stream.send(data[offset:send])
        if not finish:
            await eventually(lambda: landed(a) >= send // CHUNK_BYTES * CHUNK_BYTES)
            connection.abort(AppCode.LEFT)
            return None
        assert byte // CHUNK_BYTES * CHUNK_BYTES <= offset <= byte
        await stream.send_message(Sent(0).encode())
        stored = Stored.decode(await stream.receive_message())
        await stream.aclose()
        return stored

    await attempt(byte, finish=False)
    await eventually(lambda: a.endpoint.connections == ())
    assert len(a.service.arrivals) == 1
    stored = await attempt(len(data), finish=True)
    assert stored is not None
    assert same(a.store.get(stored.object_id).tensor, tensor)
    await eventually(lambda: a.is_empty)
    # The answer got lost? Asking again finds the object and makes no second one.
    byte = len(data)
    assert await attempt(len(data), finish=True) == stored
    assert len(a.store) == 1


async def test_a_later_try_takes_over_from_one_that_hangs(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    tensor = filled((CHUNK_BYTES * 2,), torch.uint8)
    order = PutOpen("cd" * 16, describe(tensor)).encode()
    connection = await client.connection(a)
    hanging = await connection.open_stream("tensor.put", order)
    await hanging.reply()
    stream = await connection.open_stream("tensor.put", order)
    async with stream:
        await stream.reply()
        await stream.send(bytes(tensor.tolist()))
        await stream.send_message(Sent(0).encode())
        stored = Stored.decode(await stream.receive_message())
    with pytest.raises((anyio.EndOfStream, TransportError)):
        await hanging.receive_message()
    await hanging.aclose()
    assert same(a.store.get(stored.object_id).tensor, tensor)
    assert a.store.used() == (tensor.numel(), 1)


async def test_an_upload_id_is_of_one_tensor(nodes: tuple[Node, Node, Node]) -> None:
    a, _, client = nodes
    connection = await client.connection(a)
    first = await connection.open_stream(
        "tensor.put", PutOpen("ef" * 16, describe(torch.ones(3))).encode()
    )
    await first.reply()
    second = await connection.open_stream(
        "tensor.put", PutOpen("ef" * 16, describe(torch.ones(4))).encode()
    )
    with pytest.raises(ProtocolError, match="another tensor"):
        await second.reply()
    second.reset()
    first.reset()
    await eventually(lambda: a.is_empty)


# -- nodes that vanish


async def test_source_vanishes(
    nodes: tuple[Node, Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience = 1.0
    monkeypatch.setattr("tensor_bridge.moves.PATIENCE", patience)
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    ref = client.has(a, ENDLESS)
    began = time.monotonic()
    async with once(lambda: landed(b) > 0, a.fall_silent):
        with pytest.raises((PeerLost, Unreachable)):
            await at_a.copy_to(ref, at_b)
    assert time.monotonic() - began < 1.0 + patience + 2 * REDIAL_SECONDS + 1.0
    await eventually(lambda: b.is_empty and len(b.store) == 0)


async def test_target_vanishes(nodes: tuple[Node, Node, Node]) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    ref = client.has(a, ENDLESS)
    async with once(lambda: landed(b) > 0, b.fall_silent):
        with pytest.raises(PeerLost):
            await at_a.copy_to(ref, at_b)
    await eventually(lambda: a.is_empty)
    assert len(a.store) == 1  # the client is still there, and so is its tensor


async def test_client_vanishes(nodes: tuple[Node, Node, Node]) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    ref = client.has(a, ENDLESS)
    async with once(lambda: landed(b) > 0, client.fall_silent):
        with pytest.raises(TransportError):
            await at_a.copy_to(ref, at_b)
    await eventually(lambda: a.is_empty and b.is_empty, 10)
    # Nobody is left whose tensors they are.
    await eventually(lambda: len(a.store) == len(b.store) == 0, 10)


async def test_a_client_that_comes_back_in_time_finds_its_tensors() -> None:
    async with together(node(), node()) as (a, client):
        at_a = await client.client(a, reconnect=True)
        ref = await at_a.put(torch.arange(10))
        cut(client, a)()
        await eventually(lambda: a.endpoint.connections == ())
        assert torch.equal(await at_a.get(ref), torch.arange(10))
        a.service._clock = lambda: time.monotonic() + a.service.limits.linger
        a.service.sweep()
        assert len(a.store) == 1
        cut(client, a)()
        await eventually(lambda: a.endpoint.connections == ())
        a.service._clock = lambda: time.monotonic() + 2 * a.service.limits.linger
        a.service.sweep()
        assert len(a.store) == 0


async def test_tensors_of_a_client_that_has_left_stay_while_they_are_fetched() -> None:
    async with together(node(moves=MoveLimits(linger=0.0)), node(), node()) as (a, b, client):
        ref = client.has(a, torch.arange(10))
        token = await client.token(a, ref, b)
        stream = await b.read(a, token=token)
        await stream.reply()
        cut(client, a)()
        await eventually(lambda: a.endpoint.connection(client.endpoint.node_id) is None)
        a.service.sweep()
        assert len(a.store) == 1
        stream.reset()
        await eventually(lambda: a.tokens.counts().live == 0)
        a.service.sweep()
        assert len(a.store) == 0


# -- cancellation


@pytest.mark.parametrize("move", ["put", "get", "copy_to"])
@pytest.mark.parametrize("byte", [1, MIB])
async def test_a_cancelled_move_leaves_nothing(
    nodes: tuple[Node, Node, Node], move: str, byte: int
) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    ref = client.has(a, ENDLESS)
    with anyio.CancelScope() as scope:
        stop = At(byte, scope.cancel)
        if move == "put":
            await at_a.put(ENDLESS, progress=stop)
        elif move == "get":
            await at_a.get(ref, progress=stop)
        else:
            async with once(lambda: landed(b) >= byte, scope.cancel):
                await at_a.copy_to(ref, at_b)
    assert scope.cancelled_caught
    await eventually(lambda: a.is_empty and b.is_empty, AT_ONCE)
    assert (len(a.store), len(b.store)) == (1, 0)
    assert torch.equal(await at_a.get(await at_a.put(torch.ones(3))), torch.ones(3))


async def test_a_failing_callback_ends_the_move_and_leaves_nothing(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, _, client = nodes
    at_a = await client.client(a)

    def fail(_: Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await at_a.put(ENDLESS, progress=fail)
    await eventually(lambda: a.is_empty, AT_ONCE)


# -- time


async def test_the_deadline_of_a_move(nodes: tuple[Node, Node, Node]) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    ref = client.has(a, ENDLESS)
    moves: list[Callable[[], Awaitable[object]]] = [
        lambda: at_a.put(ENDLESS, timeout=0.05),
        lambda: at_a.get(ref, timeout=0.05),
        lambda: at_a.copy_to(ref, at_b, timeout=0.05),
    ]
    for move in moves:
        with pytest.raises(DeadlineExceeded, match=r"after 0\.\d s") as error:
            await move()
        assert error.value.exit_code == 5
    await eventually(lambda: a.is_empty and b.is_empty)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Node, Node]]:
    async with together(node(moves=IMPATIENT), node()) as (a, client):
        yield a, client


async def test_a_reader_that_sleeps_stops_the_sender_and_then_loses(
    pair: tuple[Node, Node],
) -> None:
    a, client = pair
    at_a = await client.client(a)
    stored = a.store.put(torch.arange(8 * MIB), owner=client.endpoint.node_id)
    memory = psutil.Process().memory_info
    before = memory().rss
    stream = await client.read(a, object_id=stored.object_id)
    await stream.reply()
    behind = a.endpoint.connection(client.endpoint.node_id)
    assert behind is not None
    await eventually(lambda: behind.info.streams == 0)  # the source gave up, on its deadline
    assert behind.info.bytes_sent < 4 * MIB
    assert memory().rss - before < 16 * MIB
    with pytest.raises(DeadlineExceeded):
        await stream.receive_exactly(64 * MIB)
    stream.reset()
    # The connection is none the worse for it.
    assert torch.equal(await at_a.get(await at_a.put(torch.ones(3))), torch.ones(3))


async def test_a_dripping_sender_loses_its_reservation(pair: tuple[Node, Node]) -> None:
    a, client = pair
    connection = await client.connection(a)
    order = PutOpen("ab" * 16, describe(torch.empty(4 * MIB, dtype=torch.uint8)))
    stream = await connection.open_stream("tensor.put", order.encode())
    await stream.reply()
    assert a.store.used() == (4 * MIB, 1)

    async def drip() -> None:
        while True:
            await stream.send(b"\x00")
            await anyio.sleep(0.02)

    with anyio.fail_after(5), pytest.raises(DeadlineExceeded):
        await drip()
    stream.reset()
    await eventually(lambda: a.is_empty and a.store.used() == (0, 0))


# -- refusals


async def test_quotas_refuse_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = StoreLimits(max_bytes=MIB, max_bytes_per_owner=MIB // 2, max_objects_per_owner=3)
    async with node(store=limits) as a, node(tokens=QUICK) as b, node() as client:
        at_a, at_b = await client.client(a), await client.client(b)
        half = filled((MIB // 2,), torch.uint8)
        ref = await at_a.put(half)
        at_b_ref = await at_b.put(half)

        def never(*_: object) -> None:
            raise AssertionError("memory was allocated for what does not fit")

        with monkeypatch.context() as patch:
            patch.setattr("tensor_bridge.arrivals.Landing", never)
            for _ in range(2):
                with pytest.raises(QuotaExceeded, match="0 bytes are left"):
                    await at_a.put(torch.ones(1))
                with pytest.raises(QuotaExceeded, match="0 bytes are left"):
                    await at_b.copy_to(at_b_ref, at_a)
        assert a.store.used() == (MIB // 2, 1)
        await at_a.delete(ref)
        again = await at_b.copy_to(at_b_ref, at_a)
        await at_a.delete(again)
        for _ in range(3):
            await at_a.put(torch.empty(0))
        with pytest.raises(QuotaExceeded, match="holds 3"):
            await at_a.put(torch.empty(0))
        await eventually(lambda: a.is_empty and b.is_empty)


class Rules:
    """An authorizer that admits everyone to everything but what a test forbids."""

    def __init__(self, *, quotas: Quotas | None = None) -> None:
        self.grant = Grant(frozenset({"*"}), quotas=quotas or Quotas())
        self.forbidden: type[object] = type(None)
        self.asked: list[object] = []

    async def authorize(self, request: object) -> Grant | Denial:
        self.asked.append(request)
        if isinstance(request, self.forbidden):
            return Denial("house-rules", "not from that one")
        return self.grant


async def test_the_quota_of_a_grant_counts() -> None:
    async with node(authorizer=Rules(quotas=Quotas(max_bytes=100))) as a, node() as client:
        at_a = await client.client(a)
        await at_a.put(torch.empty(100, dtype=torch.uint8))
        with pytest.raises(QuotaExceeded):
            await at_a.put(torch.empty(1, dtype=torch.uint8))


async def test_a_target_fetches_only_what_its_authorizer_admits() -> None:
    rules = Rules()
    async with node() as a, node(authorizer=rules) as b, node() as client:
        at_a, at_b = await client.client(a), await client.client(b)
        ref = await at_a.put(torch.arange(5))
        rules.forbidden = FetchRequest
        with pytest.raises(AccessDenied, match="not from that one"):
            await at_a.copy_to(ref, at_b)
        assert b.endpoint.connection(a.endpoint.node_id) is None  # nobody was dialled
        assert b.store.used() == (0, 0)
        (request,) = [asked for asked in rules.asked if isinstance(asked, FetchRequest)]
        assert request.peer.node_id == client.endpoint.node_id
        assert (request.source, request.nbytes) == (a.endpoint.node_id, 40)
        rules.forbidden = type(None)
        await at_a.copy_to(ref, at_b)


async def test_a_source_mints_only_what_its_authorizer_admits() -> None:
    rules = Rules()
    async with node(authorizer=rules) as a, node() as b, node() as client:
        at_a, at_b = await client.client(a), await client.client(b)
        ref = await at_a.put(torch.arange(5))
        rules.forbidden = MintRequest
        with pytest.raises(AccessDenied, match="not from that one"):
            await at_a.copy_to(ref, at_b)
        assert a.tokens.counts().live == 0
        (request,) = [asked for asked in rules.asked if isinstance(asked, MintRequest)]
        assert request.audience == b.endpoint.node_id
        assert (request.action, request.object_id, request.nbytes) == ("read", ref.object_id, 40)
        rules.forbidden = type(None)
        await at_a.copy_to(ref, at_b)


async def test_a_target_that_cannot_reach_the_source_says_so(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    ref = await at_a.put(torch.arange(5))

    async def nowhere(*_: object, **__: object) -> None:
        raise Unreachable("connecting", why="no address of it is known")

    b.endpoint.connect = nowhere  # type: ignore[method-assign, assignment]
    with pytest.raises(Unreachable, match="no address"):
        await at_a.copy_to(ref, at_b)
    await eventually(lambda: b.is_empty, AT_ONCE)


async def test_a_tensor_written_to_during_a_move_is_noticed(
    nodes: tuple[Node, Node, Node],
) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    tensor = filled((24 * SIZE,), torch.uint8)  # far more than is in flight at once

    def write() -> None:
        tensor.add_(1)

    with pytest.raises(TensorChanged):
        await at_a.put(tensor, progress=At(MIB, write))
    ref = client.has(a, tensor)
    with pytest.raises(TensorChanged):
        await at_a.get(ref, progress=At(MIB, write))
    async with once(lambda: landed(b) > 0, write):
        with pytest.raises(TensorChanged):
            await at_a.copy_to(ref, at_b)
    await eventually(lambda: a.is_empty and b.is_empty, AT_ONCE)


async def test_misuse_is_refused_at_once(nodes: tuple[Node, Node, Node]) -> None:
    a, b, client = nodes
    at_a, at_b = await client.client(a), await client.client(b)
    ref = await at_a.put(torch.arange(5))
    with pytest.raises(UnsupportedTensor, match="already"):
        await at_a.copy_to(ref, at_a)
    for attempt in (at_b.get(ref), at_b.delete(ref), at_b.copy_to(ref, at_a)):
        with pytest.raises(Exception, match="another node"):
            await attempt
    with pytest.raises(UnsupportedTensor):
        await at_a.put(torch.empty(3, device="meta"))
    wrong = TensorRef(ref.node, ref.object_id, ref.version, describe(torch.ones(5)))
    for call in (at_a.get(wrong), at_a.copy_to(wrong, at_b)):
        with pytest.raises(TensorChanged):
            await call


def landed(at: Node) -> int:
    """Bytes that have landed at a node for tensors still on their way."""
    return sum(arrival.moved for arrival in at.service.arrivals._coming.values())
