"""The exchange over QUIC: ranks as threads, each with an endpoint on an event loop of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from auth import AccessDenied, NodeId, SecretKey, allow_any, deny_all
from mesh.collective import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    RankLeft,
    RankLost,
    UnsupportedCollective,
)
from mesh.distributed import MeshWork, Options, ProcessGroupMesh, link, use, wire
from mesh.distributed.options import options_in_use
from tests.mesh.collective.exchange_memory import outcomes, run_ranks
from tests.mesh.distributed.nodes import LOOPBACK, LoopbackNode, loopback_node, process_group
from transport import EndpointConfig, cbor, format_address


class Cluster:
    """As many nodes as asked for, and groups among them."""

    def __init__(self, backend: str, stack: ExitStack) -> None:
        self.backend = backend
        self.stack = stack
        self.nodes: list[LoopbackNode] = []
        self.groups: list[ProcessGroupMesh] = []

    def form(
        self, size: int, *, timeout: float = 10.0, config: EndpointConfig = LOOPBACK
    ) -> list[ProcessGroupMesh]:
        while len(self.nodes) < size:
            node = loopback_node(backend=self.backend, config=config, shared_memory=False)
            self.nodes.append(self.stack.enter_context(node))
        store = dist.HashStore()
        groups = run_ranks(
            size, lambda r: process_group(self.nodes[r], store, r, size, timeout=timeout)
        )
        self.groups += groups
        return groups


@pytest.fixture(params=["asyncio", "trio"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    before = threading.active_count()
    with ExitStack() as stack:
        made = Cluster(request.param, stack)
        yield made
        run_ranks(len(made.groups), lambda index: made.groups[index].shutdown())
        for node in made.nodes:
            assert _settled(node)
    assert threading.active_count() <= before


def _settled(node: LoopbackNode) -> bool:
    """Wait until the streams of a node's groups are gone."""
    end = time.monotonic() + 5
    while any(connection.info.streams for connection in node.endpoint.connections):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives_give_the_right_values(cluster, size) -> None:
    groups = cluster.form(size)
    # Above and below what goes unasked, and more than one piece.
    lengths = [0, 1, 5000, 300_001]

    def body(rank: int) -> None:
        group = groups[rank]
        for length in lengths:
            base = torch.arange(length, dtype=torch.float32)
            tensor = base + rank
            group.allreduce([tensor]).wait()
            assert torch.equal(tensor, sum(base + r for r in range(size)))
            tensor = base * rank
            group.broadcast(tensor, size - 1).wait()
            assert torch.equal(tensor, base * (size - 1))
            outs = [torch.empty(length) for _ in range(size)]
            group.allgather([outs], [base + rank]).wait()
            assert all(torch.equal(out, base + r) for r, out in enumerate(outs))
            group.barrier().wait()

    run_ranks(size, body)


def test_tags_in_any_order_and_number(cluster) -> None:
    groups = cluster.form(2)
    # Small ones beyond the budget of what goes unasked, and large ones, none of them awaited first.
    lengths = [1, 8000, 20_000] * 40

    def body(rank: int) -> None:
        group = groups[rank]
        sends: list[MeshWork] = []
        for tag, length in enumerate(lengths):
            sends.append(group.send([torch.full((length,), tag + rank / 2)], 1 - rank, tag))
        group.barrier().wait()  # passes what is not received yet
        for tag, length in reversed(list(enumerate(lengths))):
            out = torch.empty(length)
            group.recv([out], 1 - rank, tag).wait()
            assert (out == tag + (1 - rank) / 2).all()
        for send in sends:
            send.wait()

    run_ranks(2, body, timeout=40)


@pytest.mark.parametrize("posted_first", [True, False])
def test_receives_from_any_rank(cluster, posted_first) -> None:
    """Messages that go unasked and ones that wait to be asked for, before and after the receive."""
    groups = cluster.form(3)
    lengths = [1, 20_000, 2, 30_000]

    def body(rank: int) -> list[tuple[int, int, float]]:
        group = groups[rank]
        if rank:
            if posted_first:
                group.barrier().wait()
            sends = [
                group.send([torch.full((length,), float(rank))], 0, tag)
                for tag, length in enumerate(lengths)
            ]
            if not posted_first:
                group.barrier().wait()
            for send in sends:
                send.wait()
            return []
        if not posted_first:
            group.barrier().wait()
        posted = []
        for tag, length in enumerate(lengths * 2):
            tag %= len(lengths)
            out = torch.empty(length)
            posted.append((tag, out, group.recv_anysource([out], tag)))
        if posted_first:
            group.barrier().wait()
        found = []
        for tag, out, work in posted:
            work.wait()
            assert out.eq(out[0]).all()
            found.append((tag, work.source_rank(), out[0].item()))
        return found

    found = run_ranks(3, body)[0]
    assert sorted(found) == [(tag, rank, float(rank)) for tag in range(4) for rank in (1, 2)]


def test_a_named_rank_comes_before_any_rank(cluster) -> None:
    groups = cluster.form(2)
    outs = [torch.empty(1), torch.empty(1)]
    works = [groups[0].recv_anysource([outs[0]], 0), groups[0].recv([outs[1]], 1, 0)]
    for value in (1.0, 2.0):
        groups[1].send([torch.tensor([value])], 0, 0).wait()
    assert all(work.wait() for work in works)
    assert [out.item() for out in outs] == [2, 1]


def test_a_receive_from_any_rank_ends_with_the_last_that_could_send(cluster) -> None:
    groups = cluster.form(3)
    work = groups[0].recv_anysource([torch.empty(1)], 0)
    groups[1].shutdown()
    assert not work.is_completed()
    groups[2].shutdown()
    with pytest.raises(RankLeft):
        work.wait(timedelta(seconds=5))
    with pytest.raises(RankLeft):
        groups[0].recv_anysource([torch.empty(1)], 0).wait(timedelta(seconds=5))


def test_a_receive_from_any_rank_times_out_naming_those_that_could_have_sent(cluster) -> None:
    groups = cluster.form(3)
    groups[0].set_timeout(timedelta(seconds=0.3))
    with pytest.raises(CollectiveTimeout, match=r"rank 1 .* or rank 2 .*still awaited") as caught:
        groups[0].recv_anysource([torch.empty(1)], 0).wait()
    assert caught.value.ranks == (1, 2)
    with pytest.raises(CollectiveError):
        groups[0].recv_anysource([torch.empty(1)], 0).wait()


def test_groups_of_groups_reuse_the_connections(cluster) -> None:
    groups = cluster.form(3)
    before = [node.endpoint.connections for node in cluster.nodes]

    def body(rank: int) -> list[float]:
        parent, found = groups[rank], []
        store = dist.PrefixStore("merge", parent.get_group_store())
        for made in (
            parent.split_group([2, 0], timedelta(seconds=7), group_desc="two"),
            parent.merge_remote_group(store, 3, group_name="all"),
        ):
            if made is None:
                found.append(-1.0)
                continue
            tensor = torch.tensor([float(rank)])
            made.allreduce([tensor]).wait()
            found.append(tensor.item())
            assert (made.group_desc == "two") is (made.size() == 2)
            made.shutdown()
        return found

    assert run_ranks(3, body) == [[2, 3], [-1, 3], [2, 3]]
    assert [node.endpoint.connections for node in cluster.nodes] == before


def test_what_is_not_received_is_bounded(cluster) -> None:
    groups = cluster.form(2)
    count = 400
    works = [groups[0].send([torch.full((1000,), float(i))], 1, 0) for i in range(count)]
    groups[0].send([torch.ones(1)], 1, 1)
    groups[1].recv([torch.empty(1)], 0, 1).wait()  # what was sent before it has come
    done = sum(work.is_completed() for work in works)
    assert 0 < done * 4000 <= link.EAGER_BUDGET
    outs = [torch.empty(1000) for _ in range(count)]
    for index, out in enumerate(outs):
        groups[1].recv([out], 0, 0).wait()
        assert out[0].item() == index
    for work in works:
        work.wait()


def test_several_groups_share_one_connection(cluster) -> None:
    first, second = cluster.form(2), cluster.form(2)

    def body(rank: int) -> None:
        works = []
        tensors = [torch.full((n,), 1.0) for n in (1, 50_000) * 5]
        for index, tensor in enumerate(tensors):
            works.append((first, second)[index % 2][rank].allreduce([tensor]))
        for work in works:
            work.wait()
        assert all((tensor == 2).all() for tensor in tensors)

    run_ranks(2, body)
    assert len(cluster.nodes[0].endpoint.connections) == 1


def test_differing_calls_raise_on_every_rank_at_once(cluster) -> None:
    groups = cluster.form(3, timeout=60)

    def body(rank: int) -> None:
        # Large, so that the bytes are never sent: the offer alone tells.
        tensor = torch.ones(100_000 + (rank == 1))
        groups[rank].allreduce([tensor]).wait()

    began = time.monotonic()
    errors = outcomes(3, body)
    assert time.monotonic() - began < 5
    for error in errors:
        assert isinstance(error, CollectiveMismatch)
        assert "100001 elements" in str(error)
        assert "100000 elements" in str(error)


def test_timeout_names_who_sleeps_with_its_node(cluster) -> None:
    groups = cluster.form(3)
    sleeper = cluster.nodes[2].endpoint.node_id.short
    over = threading.Event()

    def body(rank: int) -> None:
        if rank == 2:
            over.wait(10)
            return
        try:
            groups[rank].allreduce([torch.ones(100_000)], None, timedelta(seconds=1)).wait()
        finally:
            over.set()

    for error in outcomes(3, body)[:2]:
        assert isinstance(error, CollectiveTimeout)
        assert error.ranks == (2,)
        assert f"rank 2 ({sleeper}) is still awaited" in str(error)
    assert isinstance(outcomes(3, lambda r: groups[r].barrier().wait())[2], CollectiveTimeout)


def test_receive_that_nobody_sends_times_out(cluster) -> None:
    groups = cluster.form(2, timeout=0.5 if cluster.backend == "trio" else 0.6)
    with pytest.raises(CollectiveTimeout, match="recv from rank 1") as caught:
        groups[0].recv([torch.ones(1)], 1, 4).wait()
    assert caught.value.ranks == (1,)


def test_a_node_that_vanishes_is_named_by_all(cluster) -> None:
    liveness = 1.5
    groups = cluster.form(3, timeout=60, config=replace(LOOPBACK, liveness=liveness))

    def body(rank: int) -> None:
        if rank == 2:
            time.sleep(0.2)
            # As if its host were unplugged.
            cluster.nodes[2].endpoint._socket.send = lambda *_: True
            return
        groups[rank].allreduce([torch.ones(10)]).wait()

    began = time.monotonic()
    errors = outcomes(3, body)
    assert time.monotonic() - began < liveness + 1.5
    for rank in (0, 1):
        assert isinstance(errors[rank], RankLost)
        assert errors[rank].ranks == (2,)
        assert cluster.nodes[2].endpoint.node_id.short in str(errors[rank])


def test_messages_of_a_rank_that_left_can_still_be_received(cluster) -> None:
    groups = cluster.form(2)
    work = groups[1].send([torch.tensor([7.0])], 0, 3)
    work.wait()
    leaving = threading.Thread(target=groups[1].shutdown)
    leaving.start()
    out = torch.empty(1)
    time.sleep(0.2)
    groups[0].recv([out], 1, 3).wait()
    assert out.item() == 7.0
    began = time.monotonic()
    with pytest.raises(RankLeft, match=r"rank 1 .* left the group") as caught:
        groups[0].recv([out], 1, 3).wait()
    assert caught.value.ranks == (1,)
    with pytest.raises(RankLeft):
        groups[0].send([out], 1, 3).wait()
    with pytest.raises(RankLeft):
        groups[0].barrier().wait()
    assert time.monotonic() - began < 3
    leaving.join()


def test_leaving_is_quick_whoever_goes_first(cluster) -> None:
    groups = cluster.form(3)
    began = time.monotonic()
    for rank in (1, 0, 2):
        groups[rank].shutdown()
    assert time.monotonic() - began < 2


def test_a_link_that_ends_while_it_waits_for_the_other_side_has_left(cluster, monkeypatch) -> None:
    groups = cluster.form(2)
    # Nothing is acknowledged any more.
    monkeypatch.setattr(cluster.nodes[1].endpoint._socket, "send", lambda *_: True)
    groups[0].send([torch.ones(10)], 1, 3).wait()
    one = groups[0]._engine.exchange._links[1]
    errors: list[BaseException | None] = []
    leaving = threading.Thread(
        target=lambda: errors.extend(outcomes(1, lambda _: groups[0].shutdown()))
    )
    leaving.start()
    while len(one._streams["data"]._waits) < 2:  # one of which is its reader
        time.sleep(0.01)
    began = time.monotonic()
    for index, link_of in enumerate((one, groups[1]._engine.exchange._links[0])):
        cluster.nodes[index].portal.call(link_of.close)
    leaving.join()
    monkeypatch.undo()
    assert errors == [None]
    assert time.monotonic() - began < 1


def test_closing_the_node_ends_the_group(cluster) -> None:
    with loopback_node() as leaving, loopback_node() as staying:
        store = dist.HashStore()
        nodes = [staying, leaving]
        groups = run_ranks(2, lambda r: process_group(nodes[r], store, r, 2))
        work = groups[0].barrier()
        leaving.portal.call(_close_all, leaving)
        with pytest.raises(CollectiveError, match="rank 1"):
            work.wait()
        with contextlib.suppress(CollectiveError):
            groups[1].barrier().wait()  # rank 0 has been at it
        with pytest.raises(CollectiveError):
            groups[1].barrier().wait()
        for group in groups:
            group.shutdown()


async def _close_all(node: LoopbackNode) -> None:
    for connection in node.endpoint.connections:
        await connection.close()


# Who may be a member.


def test_a_rank_that_the_other_does_not_admit_is_told_so() -> None:
    with loopback_node() as open_one, loopback_node(authorizer=deny_all()) as closed:
        store = dist.HashStore()
        nodes = [open_one, closed]
        errors = outcomes(2, lambda r: process_group(nodes[r], store, r, 2, timeout=1))
        assert isinstance(errors[0], AccessDenied)
        assert isinstance(errors[1], CollectiveTimeout)
        assert errors[1].ranks == (0,)


def test_a_member_must_hold_the_scope_of_the_job_on_both_sides() -> None:
    narrow = allow_any(["collective:other"])
    fitting = allow_any(["collective:test"])
    for authorizers, fine in [
        ((narrow, fitting), False),
        ((fitting, narrow), False),
        ((fitting, fitting), True),
    ]:
        with ExitStack() as stack:
            nodes = [stack.enter_context(loopback_node(authorizer=a)) for a in authorizers]
            store = dist.HashStore()
            timeout = 10 if fine else 1  # the other rank waits in vain

            def form(rank, nodes=nodes, store=store, timeout=timeout) -> ProcessGroupMesh:
                return process_group(nodes[rank], store, rank, 2, timeout=timeout)

            found = outcomes(2, form)
            if fine:
                run_ranks(2, lambda r, g=found: g[r].barrier().wait())
                run_ranks(2, lambda r, g=found: g[r].shutdown())
            else:
                assert isinstance(found[0], AccessDenied), found


@pytest.mark.attack
@pytest.mark.parametrize("forged_rank", [0, 1])
def test_a_forged_entry_in_the_store_is_refused(forged_rank: int) -> None:
    """Somebody who can write to the store puts a node of their own in a member's place."""
    with ExitStack() as stack:
        keys = [SecretKey.generate() for _ in range(2)]
        only_members = _Only({key.node_id for key in keys})
        nodes = [
            stack.enter_context(loopback_node(key=key, authorizer=only_members)) for key in keys
        ]
        intruder = stack.enter_context(loopback_node())

        def form(store: dist.Store, who: list[LoopbackNode], timeout: float) -> list[object]:
            return outcomes(2, lambda r: process_group(who[r], store, r, 2, timeout=timeout))

        groups = form(dist.HashStore(), nodes, 10)  # the positive control
        run_ranks(2, lambda r: groups[r].barrier().wait())
        run_ranks(2, lambda r: groups[r].shutdown())

        store = _Forging(f"1/rank/{forged_rank}", _record(intruder))
        other = 1 - forged_rank
        members = list(nodes)
        members[forged_rank] = intruder
        found = form(store, members, 1)
        assert isinstance(found[other], CollectiveError | AccessDenied)


class _Only:
    """Admits some nodes, with every scope."""

    def __init__(self, members: set[NodeId]) -> None:
        self._members = members
        self._yes, self._no = allow_any(), deny_all()

    async def authorize(self, request: object) -> object:
        known = request.peer.node_id in self._members
        return await (self._yes if known else self._no).authorize(request)


def _record(node: LoopbackNode) -> bytes:
    addresses = [format_address(a) for a in node.endpoint.addresses]
    record = {"node": str(node.endpoint.node_id), "addresses": addresses}
    return cbor.encode(record, max_size=4096)


class _Forging(dist.Store):
    """A store in which one entry reads otherwise than it was written."""

    def __init__(self, key: str, value: bytes) -> None:
        super().__init__()
        self._inner, self._key, self._value = dist.HashStore(), key, value

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def set(self, key: str, value: bytes) -> None:
        self._inner.set(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._inner.wait(keys, timeout)

    def get(self, key: str) -> bytes:
        return self._value if key == self._key else self._inner.get(key)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (b"\x00", "does not name a node"),
        (b"garbage", "rank 0 can't be used"),
        (cbor.encode({"node": "x", "addresses": []}, max_size=99), "rank 0 can't be used"),
    ],
)
def test_entries_that_are_none_are_refused(entry: bytes, words: str) -> None:
    with loopback_node() as node:
        store = _Forging("1/rank/0", entry)
        with pytest.raises(CollectiveError, match=words):
            process_group(node, store, 0, 1)


@pytest.mark.attack
def test_a_stranger_to_the_group_cannot_take_a_rank() -> None:
    """A node that holds the job's scope, and even the nonce, is still not the member."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(loopback_node()) for _ in range(3)]
        store = dist.HashStore()
        groups = run_ranks(2, lambda r: process_group(nodes[r], store, r, 2))
        nonce = groups[1]._engine.exchange.nonce

        async def intrude(nonce: bytes) -> None:
            endpoint, target = nodes[2].endpoint, nodes[1].endpoint
            endpoint.add_addresses(target.node_id, target.addresses)
            connection = await endpoint.connect(target.node_id)
            value = wire.request_value(nonce, 0, "data")
            async with await connection.open_stream("collective:test", value) as stream:
                await stream.reply()

        with pytest.raises(AccessDenied, match="not the group's rank 0"):
            nodes[2].portal.call(intrude, nonce)
        with pytest.raises(Exception, match="no such group"):
            nodes[2].portal.call(intrude, b"\0" * 16)
        run_ranks(2, lambda r: groups[r].barrier().wait())
        run_ranks(2, lambda r: groups[r].shutdown())


def test_missing_ranks_are_named() -> None:
    with loopback_node() as node, pytest.raises(CollectiveTimeout, match="rank 1 has not come"):
        process_group(node, dist.HashStore(), 0, 2, timeout=0.3)


def test_all_missing_ranks_are_named_and_who_came() -> None:
    with loopback_node() as one, loopback_node() as two:
        nodes, store = {0: one, 3: two}, dist.HashStore()

        def form(at: int) -> None:
            process_group(nodes[3 * at], store, 3 * at, 5, timeout=0.5)

        for me, came, error in zip((0, 3), (3, 0), outcomes(2, form), strict=True):
            assert isinstance(error, CollectiveTimeout)
            assert error.ranks == (1, 2, 4)
            assert "ranks 1, 2, 4 have not come" in str(error)
            assert f"Beside rank {me} rank {came} came" in str(error)


@pytest.mark.parametrize("answers", [False, True], ids=["silent", "closed"])
def test_a_rank_that_can_not_be_reached_is_named_with_each_address(answers: bool) -> None:
    node_id = SecretKey.generate().node_id
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mute, loopback_node() as node:
        mute.bind(("127.0.0.1", 0))
        where = ["127.0.0.1:9"] if answers else [f"127.0.0.1:{mute.getsockname()[1]}"]
        record = {"node": str(node_id), "addresses": [*where, "192.0.2.1:4433"]}
        store = dist.HashStore()
        store.set("1/rank/1", cbor.encode(record, max_size=4096))
        began = time.monotonic()
        with pytest.raises(RankLost if answers else CollectiveTimeout) as caught:
            process_group(node, store, 0, 2, timeout=1.0)
        assert time.monotonic() - began < 2
        assert caught.value.ranks == (1,)
        told = str(caught.value)
        assert f"rank 1 ({node_id.short})" in told
        assert f"{where[0]}: " in told
        assert ("nothing listens" if answers else "no answer") in told
        assert "192.0.2.1:4433: " in told


def test_options_say_which_node() -> None:
    with loopback_node() as node:
        assert options_in_use() is None
        with use(node, job="j"):
            options = options_in_use()
            assert options is not None
            assert (options.node, options.scope) == (node, "collective:j")
        assert options_in_use() is None
        with pytest.raises(UnsupportedCollective, match="job name"):
            Options(node, "no:colons")
    with pytest.raises(UnsupportedCollective, match="pg_options is a int"):
        dist.init_process_group("mesh", store=dist.HashStore(), rank=0, world_size=1, pg_options=5)
