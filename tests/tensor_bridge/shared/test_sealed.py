"""Tensors that are handed over as memory: each side has its own, and no side is believed."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable

import anyio
import pytest
import torch

from tensor_bridge import TensorClient
from tensor_bridge.huge_pages import HUGE_PAGE
from tensor_bridge.lanes.shared import sealed
from tensor_bridge.lanes.shared.gifts import MAX_GIFTS, Gifts
from tensor_bridge.lanes.shared.host import unavailable
from tensor_bridge.lanes.shared.link import Link
from tensor_bridge.lanes.shared.pool import anonymous_memory
from tensor_bridge.lanes.shared.protocol import SealedMessage
from tensor_bridge.lanes.shared.sealed import Writer, map_sealed, sealed_memory
from tensor_bridge.memory import tensor_bytes
from tensor_bridge.wire_blocks import FIRST_GIFT
from tests.cancelling import process_holdings
from tests.tensor_bridge.nodes import LANES, Node, eventually, node, together
from tests.tensor_bridge.shared.test_broken import link
from tests.tensor_bridge.shared.test_hostile import MOVE, attacked, descriptors_open
from tests.tensor_bridge.tensors import filled, same
from transport import Connection, ProtocolError

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

SIZE = 300_001
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_copy(tensor: torch.Tensor) -> torch.Tensor:
    with contextlib.closing(Writer(tensor.nbytes)) as writer:
        writer.fill(tensor_bytes(tensor))
        storage = writer.seal().storage
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)


# -- the memory


def _in_place(tensor: torch.Tensor) -> None:
    tensor[len(tensor) // 2] += 1


def _unseen_by_torch(tensor: torch.Tensor) -> None:
    tensor.numpy()[-1] += 1


@pytest.mark.parametrize("write", [_in_place, _unseen_by_torch], ids=lambda it: it.__name__)
@pytest.mark.parametrize("size", [SIZE, 2 * HUGE_PAGE + SIZE], ids=["small pages", "huge pages"])
def test_what_one_writes_the_other_does_not_see(
    write: Callable[[torch.Tensor], None], size: int
) -> None:
    content = filled((size,), torch.uint8)
    ours = sealed_copy(content)
    descriptor = sealed_memory(ours, size)
    assert descriptor is not None
    theirs = torch.empty(0, dtype=torch.uint8).set_(map_sealed(descriptor, size).storage)
    assert torch.equal(theirs, content)
    assert sealed_memory(ours, size) == descriptor
    write(theirs)
    assert torch.equal(ours, content)
    assert not torch.equal(theirs, content)
    assert sealed_memory(ours, size) == descriptor
    write(ours)
    assert torch.equal(ours, theirs)
    assert sealed_memory(ours, size) is None  # it is no more what the others would get


def test_only_all_of_it_is_handed_over() -> None:
    tensor = sealed_copy(filled((SIZE,), torch.uint8))
    assert sealed_memory(tensor, SIZE) is not None
    assert sealed_memory(tensor[1:], SIZE - 1) is None
    assert sealed_memory(tensor[: SIZE - 1], SIZE - 1) is None
    assert sealed_memory(tensor.clone(), SIZE) is None


async def test_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    content = filled((SIZE,), torch.uint8)
    before, kept = process_holdings()["descriptors"], len(sealed._kept)
    monkeypatch.setattr(sealed, "MAX_KEPT", kept + 2)
    tensors = [sealed_copy(content) for _ in range(4)]
    assert [sealed_memory(each, SIZE) is None for each in tensors] == [False, False, True, True]
    view = tensors.pop(0)[7:9]
    tensors.clear()
    assert torch.equal(view, content[7:9])
    assert len(sealed._kept) == kept + 1
    del view
    assert process_holdings()["descriptors"] == before
    assert len(sealed._kept) == kept


def memory(nbytes: int = SIZE, seals: int = SEALS) -> int:
    descriptor = anonymous_memory()
    os.pwrite(descriptor, bytes(nbytes), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def with_holes() -> int:
    descriptor = anonymous_memory()
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


FUTURE_WRITE = 0x10

FOREIGN: dict[str, Callable[[], int]] = {
    "unsealed": lambda: memory(seals=0),
    "that can be written to": lambda: memory(seals=SEALS & ~fcntl.F_SEAL_WRITE),
    "that its maker can write to": lambda: memory(seals=SEALS & ~fcntl.F_SEAL_WRITE | FUTURE_WRITE),
    "that can shrink": lambda: memory(seals=SEALS & ~fcntl.F_SEAL_SHRINK),
    "that can grow": lambda: memory(seals=SEALS & ~fcntl.F_SEAL_GROW),
    "too small": lambda: memory(SIZE - 1),
    "too large": lambda: memory(SIZE + 1),
    "with holes": with_holes,
    "a device": lambda: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.attack
@pytest.mark.parametrize("what", FOREIGN)
def test_other_memory_is_refused(what: str) -> None:
    descriptor = FOREIGN[what]()
    try:
        with pytest.raises(ProtocolError):
            map_sealed(descriptor, SIZE)
    finally:
        os.close(descriptor)


@pytest.mark.attack
def test_sealed_memory_can_not_be_changed_by_who_made_it() -> None:
    descriptor = memory()
    ours = torch.empty(0, dtype=torch.uint8).set_(map_sealed(descriptor, SIZE).storage)
    for change in (
        lambda: os.pwrite(descriptor, b"x", 0),
        lambda: os.ftruncate(descriptor, 0),
        lambda: os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_TRUNC),
    ):
        with pytest.raises(PermissionError):
            change()
    assert not ours.any()
    os.close(descriptor)


@pytest.mark.attack
@pytest.mark.skipif(os.geteuid() != 0, reason="memory of another user needs root")
def test_memory_of_another_user_is_refused() -> None:
    descriptor = memory()
    os.fchown(descriptor, 65534, 65534)
    with pytest.raises(ProtocolError, match="another user"):
        map_sealed(descriptor, SIZE)
    os.close(descriptor)


# -- the link


@pytest.mark.attack
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("good", [True, False])
async def test_the_link_ends_if_what_comes_is_not_sealed(early: bool, good: bool) -> None:
    async with attacked() as a:
        descriptor = memory(seals=SEALS if good else 0)
        with a.link.landing(MOVE) as landing:
            ended = anyio.Event()
            with a.link.watched(ended.set):
                if early:
                    a.send(SealedMessage(MOVE).encode(), descriptor)
                    await eventually(lambda: landing._descriptor is not None)
                async with anyio.create_task_group() as tasks:
                    if not early:
                        await anyio.wait_all_tasks_blocked()
                        tasks.start_soon(_soon, a.send, SealedMessage(MOVE).encode(), descriptor)
                    if good:
                        assert (await landing.take_sealed(SIZE)).nbytes == SIZE
                    else:
                        with anyio.move_on_after(2), contextlib.suppress(Exception):
                            await landing.take_sealed(SIZE)
                        tasks.cancel_scope.cancel()
        os.close(descriptor)
        assert (a.link.why_ended is None) == good


async def _soon(send: Callable[[bytes, int], None], packet: bytes, descriptor: int) -> None:
    send(packet, descriptor)


@pytest.mark.attack
async def test_memory_for_nobody_is_let_go_of_and_for_one_twice_is_refused() -> None:
    async with attacked() as a:  # which looks that no descriptor is left
        descriptor = memory()
        a.send(SealedMessage(MOVE + 4).encode(), descriptor)
        with a.link.landing(MOVE) as landing:
            a.send(SealedMessage(MOVE).encode(), descriptor)
            await eventually(lambda: landing._descriptor is not None)
            assert a.link.why_ended is None
            a.send(SealedMessage(MOVE).encode(), descriptor)
            await eventually(lambda: a.link.why_ended is not None)
        os.close(descriptor)


# -- moves


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[Node, Node, TensorClient]]:
    shared = LANES["shared-memory"]
    async with together(node(lanes=shared), node(lanes=shared)) as (a, client):
        yield a, client, await client.client(a)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each tensor that is handed over."""
    seen: list[str] = []
    handing = Link.hand_over

    def hand_over(self: Link, descriptor: int, move: int) -> None:
        seen.append("handed")
        handing(self, descriptor, move)

    monkeypatch.setattr(Link, "hand_over", hand_over)
    return seen


@pytest.mark.parametrize(
    "tensor",
    [
        filled((SIZE,), torch.uint8),
        filled((300, 400), torch.bfloat16).t(),
        filled((300, 400), torch.float32)[::2, ::3],
        filled((70, 80), torch.complex64, 3).conj(),
    ],
    ids=["flat", "turned", "strided", "conjugate"],
)
async def test_a_tensor_is_put_once_and_mapped_by_many(
    tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = counted(monkeypatch)
    async with pair() as (a, client, at_a):
        ref = await at_a.put(tensor, shareable=True)
        assert len(seen) == 1
        stored = a.store.get(ref.object_id).tensor
        assert same(stored, tensor)
        one, other = await at_a.get(ref, copy=False), await at_a.get(ref, copy=False)
        assert len(seen) == 3
        assert same(one, tensor)
        one.fill_(1)
        assert same(other, tensor)
        assert same(stored, tensor)
        assert same(await at_a.get(ref), tensor)  # by copy
        assert len(seen) == 3
        await at_a.delete(ref)
        del stored
        assert same(other, tensor)
        await eventually(lambda: a.is_empty and client.is_empty)


async def test_a_map_is_asked_for_by_the_owner_alone() -> None:
    from tensor_bridge import NoSuchTensor
    from tensor_bridge.wire import FIRST_MOVE, MapCall

    shared = LANES["shared-memory"]
    async with together(*(node(lanes=shared) for _ in range(3))) as (a, b, client):
        at_a = await client.client(a)
        ref = await at_a.put(filled((SIZE,), torch.uint8), shareable=True)
        connection = await b.connection(a)
        await b.lanes.meet(connection)
        with pytest.raises(NoSuchTensor):
            await connection.call("tensor.map", MapCall(ref.object_id, FIRST_MOVE).encode())
        with pytest.raises(ProtocolError, match="move"):
            await connection.call("tensor.map", {"object": ref.object_id, "move": 8})


async def test_a_map_waits_for_memory_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (_, _client, at_a):
        tensor = filled((SIZE,), torch.uint8)
        ref = await at_a.put(tensor, shareable=True)
        monkeypatch.setattr(Link, "take_what_is_there", lambda self: None)
        assert same(await at_a.get(ref, copy=False), tensor)


async def test_what_was_written_to_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)
    async with pair() as (a, _, at_a):
        tensor = filled((SIZE,), torch.uint8)
        ref = await at_a.put(tensor, shareable=True)
        a.store.get(ref.object_id).tensor.numpy()[5] += 1
        got = await at_a.get(ref, copy=False)
        assert int((got != tensor).sum()) == 1
        plain = await at_a.get(await at_a.put(tensor), copy=False)
        assert same(plain, tensor)
        assert len(seen) == 1


async def test_what_was_got_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (a, _, at_a):
        tensor = filled((SIZE,), torch.uint8)
        got = await at_a.get(await at_a.put(tensor, shareable=True), copy=False)
        for way in ("write", "mapped"):
            monkeypatch.setattr(Writer, way, None)  # nothing is copied any more
        ref = await at_a.put(got, shareable=True)
        assert same(a.store.get(ref.object_id).tensor, tensor)


async def test_with_a_token_too_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from auth import TokenRefused
    from tensor_bridge.moves import Landing
    from tensor_bridge.reading import read_into

    seen = counted(monkeypatch)
    shared = LANES["shared-memory"]
    async with together(*(node(lanes=shared) for _ in range(3))) as (a, b, client):
        tensor = filled((SIZE,), torch.uint8)
        at_a = await client.client(a)
        ref = await at_a.put(tensor, shareable=True)
        token = await client.token(a, ref, b)

        async def read() -> torch.Tensor:
            landing = Landing(ref.meta, b.lanes.memory)
            await read_into(
                landing,
                await b.connection(a),
                token=token,
                lanes=b.lanes,
                stall_seconds=2,
                copy=False,
            )
            return landing.tensor

        assert same(await read(), tensor)
        assert len(seen) == 2
        with pytest.raises(TokenRefused):
            await read()
        assert len(seen) == 2


async def test_quotas_hold() -> None:
    from tensor_bridge import QuotaExceeded, StoreLimits

    shared = LANES["shared-memory"]
    limits = StoreLimits(max_bytes_per_owner=SIZE)
    async with together(node(lanes=shared, store=limits), node(lanes=shared)) as (a, client):
        at_a = await client.client(a)
        await at_a.put(filled((SIZE,), torch.uint8), shareable=True)
        assert a.store.used()[0] == SIZE
        with pytest.raises(QuotaExceeded):
            await at_a.put(filled((1,), torch.uint8), shareable=True)
        assert a.store.used()[0] == SIZE
        assert len(link(a, client)._gifts) == 0


async def test_no_stream_is_opened_for_what_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (a, client, at_a):
        await client.lanes.meet(await client.connection(a))

        async def refuse(self: Connection, service: str, *_: object, **__: object) -> None:
            raise AssertionError(f"a stream for {service}")

        monkeypatch.setattr(Connection, "open_stream", refuse)
        tensor = filled((SIZE,), torch.uint8)
        ref = await at_a.put(tensor, name="w", shareable=True)
        stored = a.store.get(ref.object_id)
        assert same(stored.tensor, tensor)
        assert (stored.name, a.store.used(client.endpoint.node_id)) == ("w", (SIZE, 1))


async def test_what_was_handed_over_and_is_late_goes_by_a_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pair() as (a, client, at_a):
        await client.lanes.meet(await client.connection(a))
        taking = Link.take_gift
        monkeypatch.setattr(Link, "take_gift", lambda *_: None)
        tensor = filled((SIZE,), torch.uint8)
        ref = await at_a.put(tensor, shareable=True)
        assert same(a.store.get(ref.object_id).tensor, tensor)
        assert len(link(a, client)._gifts) == 1
        monkeypatch.setattr(Link, "take_gift", taking)
        await at_a.put(tensor, shareable=True)
        assert len(link(a, client)._gifts) == 1


async def test_gifts_are_few_and_are_what_they_have_to_be() -> None:
    gifts, before = Gifts(), descriptors_open()
    descriptor = memory()
    gifts.add(FIRST_GIFT - 1, descriptor)
    assert len(gifts) == 0
    for number in range(2 * MAX_GIFTS):
        gifts.add(FIRST_GIFT + number, descriptor)
    assert len(gifts) == MAX_GIFTS == descriptors_open() - before - 1
    assert gifts.take(FIRST_GIFT, SIZE) is None
    last = FIRST_GIFT + 2 * MAX_GIFTS - 1
    with pytest.raises(ProtocolError, match="bytes of memory for"):
        gifts.take(last, SIZE + 1)
    assert gifts.take(last, SIZE) is None  # nobody asks twice
    taken = gifts.take(last - 1, SIZE)
    assert taken is not None
    assert taken.nbytes == SIZE
    gifts.close()
    os.close(descriptor)
    del taken
    assert descriptors_open() == before


async def test_without_shared_memory_it_is_a_move_as_any_other() -> None:
    async with together(node(), node()) as (a, client):
        at_a, tensor = await client.client(a), filled((SIZE,), torch.uint8)
        ref = await at_a.put(tensor, shareable=True)
        assert same(await at_a.get(ref, copy=False), tensor)


@pytest.mark.parametrize("way", ["put", "get"])
async def test_foreign_memory_ends_the_lane_and_the_move_goes_on(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end hands over memory that it can still write to."""
    async with pair() as (a, client, at_a):
        tensor = filled((SIZE,), torch.uint8)
        ref = await at_a.put(tensor, shareable=True)
        ours = link(client, a)
        foreign = memory(seals=SEALS & ~fcntl.F_SEAL_WRITE)
        handing = Link.hand_over
        monkeypatch.setattr(
            Link, "hand_over", lambda self, descriptor, move: handing(self, foreign, move)
        )
        if way == "put":
            ref = await at_a.put(tensor, shareable=True)
            assert same(a.store.get(ref.object_id).tensor, tensor)
        else:
            assert same(await at_a.get(ref, copy=False), tensor)
        os.close(foreign)
        await eventually(lambda: ours.why_ended is not None)
        assert client.lanes.status(await client.connection(a)).name == "quic"
        await eventually(lambda: a.is_empty)


def test_a_child_has_no_descriptors_of_it() -> None:
    from tests.tensor_bridge.shared.test_forks import in_child, pools

    tensor = sealed_copy(filled((SIZE,), torch.uint8))
    assert pools()
    total = int(tensor.sum())

    def work() -> int:
        if pools() or sealed_memory(tensor, SIZE) is not None:
            return 1
        return 0 if sum(bytes(tensor_bytes(tensor))) == total else 2

    assert in_child(work) == 0
    assert sealed_memory(tensor, SIZE) is not None
