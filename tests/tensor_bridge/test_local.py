"""Two nodes of one process: one copy, and nothing is read that was not lent, or is no more."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator

import anyio
import pytest
import torch

from auth import SecretKey, allow_any
from mesh import blocking
from tensor_bridge import TensorChanged, describe
from tensor_bridge.lanes import local
from tensor_bridge.lanes.local import LocalLane, is_here
from tensor_bridge.memory import Payload
from tensor_bridge.wire import Lent, Moved
from tests.tensor_bridge.nodes import LANES, Node, node, together
from transport import Connection, EndpointConfig, Incoming, ProtocolError, Stream, StreamReset

HERE = LANES["in-process"]
APART = LANES["shared-memory"]
TENSOR = torch.arange(3 << 20).to(torch.uint8)


class Place:
    """Room for a move's bytes."""

    def __init__(self, nbytes: int) -> None:
        self.room = memoryview(bytearray(nbytes))
        self.nbytes = nbytes
        self.come = 0

    def advance(self, nbytes: int) -> None:
        self.come += nbytes

    def adopt(self, storage: torch.UntypedStorage) -> None:
        raise AssertionError


@contextlib.asynccontextmanager
async def streams() -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of a stream between two nodes of this process."""
    ends: list[Stream] = []
    met, over = anyio.Event(), anyio.Event()

    async def serve(incoming: Incoming) -> None:
        ends.append(incoming.stream)
        met.set()
        await over.wait()

    async with together(node(lanes=HERE), node(lanes=HERE)) as (one, other):
        other.endpoint.register_service("x", serve, scope="x")
        async with await (await one.connection(other)).open_stream("x") as stream:
            await met.wait()
            yield stream, ends[0]
            over.set()


def payload(tensor: torch.Tensor = TENSOR) -> Payload:
    return Payload(tensor, describe(tensor))


async def between(one: Node, other: Node) -> Connection:
    return await one.connection(other)


@pytest.mark.anyio
async def test_who_takes_it_and_who_does_not() -> None:
    async with together(node(lanes=HERE), node(lanes=HERE), node(lanes=APART)) as (a, b, c):
        assert a.lanes.status(await between(a, b)).name == "in-process"
        assert b.lanes.status(await between(b, a)).name == "in-process"
        for one, other in ((a, c), (c, a)):
            connection = await between(one, other)
            assert not one.lanes._is_here(connection)
            assert one.lanes.answer(connection, ("in-process",)).best is None


@pytest.mark.anyio
@pytest.mark.attack
async def test_a_peer_is_here_by_its_key_and_its_boot_id_alone() -> None:
    async with together(node(lanes=HERE), node(lanes=HERE), node(lanes=HERE)) as (a, b, c):
        connection = await between(a, b)
        assert is_here(connection)  # the control
        connection.remote_boot = c.endpoint.boot
        assert not is_here(connection)
        connection.remote_boot = bytes(16)
        assert not is_here(connection)


@pytest.mark.anyio
async def test_in_a_forked_child_the_parents_are_elsewhere() -> None:
    async with together(node(lanes=HERE), node(lanes=HERE)) as (a, b):
        connection = await between(a, b)
        if (child := os.fork()) == 0:
            os._exit(is_here(connection) or bool(local._loans))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
        assert is_here(connection)


@pytest.mark.anyio
@pytest.mark.parametrize("tensor", [TENSOR, TENSOR.view(3, -1).t()[5:, 1:]])
async def test_all_of_it_comes_and_nothing_is_left(tensor: torch.Tensor) -> None:
    sent: list[int] = []
    place = Place(tensor.numel())
    async with streams() as (here, there):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(LocalLane(here, stall_seconds=5).send, payload(tensor), sent.append)
            tasks.start_soon(LocalLane(there, stall_seconds=5).receive, place)
        assert bytes(place.room) == bytes(tensor.contiguous().view(-1).tolist())
        assert sum(sent) == place.come == tensor.numel()
        assert not local._loans


@pytest.mark.anyio
@pytest.mark.attack
async def test_keys_that_are_none_read_nothing() -> None:
    place = Place(TENSOR.numel())
    async with streams() as (here, there):
        local._loans[b"k" * 16] = lent = local._Loan(payload())
        try:
            await here.send_message(Lent(b"j" * 16).encode())
            await here.send_message("and more")
            with pytest.raises(ProtocolError, match="not there"):
                await LocalLane(there, stall_seconds=5).receive(place)
            await here.send_message(Lent(b"k" * 16).encode())
            with pytest.raises(ProtocolError, match="not as long"):
                await LocalLane(there, stall_seconds=5).receive(Place(5))
            assert place.come == 0
            await here.send_message(Lent(b"k" * 16).encode())
            await LocalLane(there, stall_seconds=5).receive(place)  # the control
            assert place.come == TENSOR.numel()
        finally:
            del local._loans[b"k" * 16]
            lent.end()


@pytest.mark.anyio
@pytest.mark.attack
@pytest.mark.parametrize("read", [(0,), (5, 5), (5, 4), (TENSOR.numel() + 1,)])
async def test_a_receiver_that_has_read_what_can_not_be(read: tuple[int, ...]) -> None:
    async with streams() as (here, there):
        for each in read:
            await there.send_message(Moved(each).encode())
        with pytest.raises(ProtocolError, match="has read what is not there"):
            await LocalLane(here, stall_seconds=5).send(payload(), lambda _: None)
        assert not local._loans


@pytest.mark.anyio
async def test_once_the_sender_has_given_up_nothing_more_is_read() -> None:
    async with streams() as (here, there):
        with anyio.move_on_after(0.05):
            await LocalLane(here, stall_seconds=5).send(payload(), lambda _: None)
        here.reset(StreamReset("a move"))
        place = Place(TENSOR.numel())
        with pytest.raises(StreamReset):
            await LocalLane(there, stall_seconds=5).receive(place)
        assert (place.come, len(local._loans)) == (0, 0)


def test_what_is_over_or_resized_is_not_read() -> None:
    room = memoryview(bytearray(TENSOR.numel()))
    loan = local._Loan(payload())
    assert loan.read_into(room) == local.PIECE
    loan.end()
    loan.end()
    assert loan.read_into(room) == 0
    tensor = TENSOR.clone()
    loan = local._Loan(payload(tensor))
    assert loan.read_into(room) == local.PIECE
    tensor.untyped_storage().resize_(5)
    with pytest.raises(TensorChanged):
        loan.read_into(room)


def test_two_threads_with_a_loop_each() -> None:
    def one() -> blocking.Node:
        config = EndpointConfig(bind="127.0.0.1:0")
        return blocking.Node.embedded(
            key=SecretKey.generate(), authorizer=allow_any(), config=config
        )

    with one() as here, one() as there:
        peer = here.connect(there.ticket())
        ref = peer.put(TENSOR)
        assert torch.equal(ref.get(), TENSOR)
        assert [each.lane for each in here.peers()] == ["in-process"]
        ref.delete()
