"""Collectives over devices of two peers, each a process of its own; and what is refused."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack

import anyio
import pytest
import torch

import mesh
from mesh import blocking
from mesh.collective import CollectiveError, RankLost, UnsupportedCollective
from mesh.device.client.moving import MOVE_BYTES
from mesh.device.client.tensors import device_of, devices
from mesh.device.errors import DeviceError
from mesh.device.groups import wire
from mesh.device.groups.forming import Bond
from mesh.device.groups.issuing import SessionPart
from mesh.device.groups.service import MAX_JOINED_PER_PEER
from mesh.errors import AccessDenied, MeshError
from tests.mesh.device.outage import Line
from tests.mesh.device.peer import Peer, client, peer
from tests.mesh.device.test_moving import moved_bytes

LIVENESS = 3.0
"""Of all nodes: a group, unlike a session, does not outlive a connection."""


@pytest.fixture(scope="module")
def peers() -> Iterator[tuple[Peer, Peer]]:
    with peer(liveness=LIVENESS) as one, peer(liveness=LIVENESS) as other:
        yield one, other


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with client(LIVENESS) as opened:
        yield opened
        gc.collect()
    devices.clear()


@pytest.fixture(scope="module")
def four(peers: tuple[Peer, Peer], node: blocking.Node) -> list[torch.device]:
    """Devices of two peers, in turn."""
    one, other = ([mesh.device(each.ticket, k, node=node) for k in (0, 1)] for each in peers)
    return [one[0], other[0], one[1], other[1]]


@pytest.fixture(scope="module")
def context(four: list[torch.device]) -> Iterator[mesh.DistributedContext]:
    with mesh.DistributedContext(four, op="mean") as opened:
        yield opened


def on(four: list[torch.device], *shape: int) -> list[torch.Tensor]:
    return [torch.full(shape, float(rank), device=device) for rank, device in enumerate(four)]


def test_every_collective(context: mesh.DistributedContext, four: list[torch.device]) -> None:
    tensors = on(four, 4, 3)
    pending = context.all_reduce(tensors)
    for tensor in tensors:
        tensor.zero_()  # it works on what was there when it was called
    results = pending.resolve()
    assert [result.device for result in results] == four
    assert all(torch.equal(result.cpu(), torch.full((4, 3), 1.5)) for result in results)
    for op, wanted in (("sum", 6.0), ("min", 0.0), (mesh.ReduceOperation.MAX, 3.0)):
        results = context.all_reduce(on(four, 4, 3), op).wait()
        assert all(torch.equal(result.cpu(), torch.full((4, 3), wanted)) for result in results)
    for result in context.all_gather(on(four, 1, 3)).resolve():
        assert torch.equal(result.cpu(), torch.arange(4.0).view(4, 1).expand(4, 3))
    for result in context.broadcast(on(four, 2)[2]).resolve():
        assert torch.equal(result.cpu(), torch.full((2,), 2.0))
    for result in context.reduce_scatter(on(four, 4, 3), "sum").resolve():
        assert torch.equal(result.cpu(), torch.full((1, 3), 6.0))


@pytest.mark.parametrize("where", ["peers", "here"])
def test_views_count_as_what_they_show(where: str, four: list[torch.device]) -> None:
    devices = four if where == "peers" else [torch.device("cpu")] * 2
    number = torch.tensor([1 + 2j])
    count = len(devices)
    with mesh.DistributedContext(devices, op="sum") as context:
        for view, wanted in (
            (torch.Tensor.conj, 1 - 2j),
            (torch.imag, 2),  # one element, and a stride of two
            (lambda tensor: tensor.conj().imag, -2),
        ):
            tensors = [view(number.to(device)) for device in devices]
            assert context.all_reduce(tensors).resolve()[-1].tolist() == [count * wanted]
            assert context.all_gather(tensors).resolve()[0].tolist() == [wanted] * count
            assert context.broadcast(tensors[1]).resolve()[0].tolist() == [wanted]


def test_many_are_under_way_at_once(
    context: mesh.DistributedContext, four: list[torch.device]
) -> None:
    pending = [
        context.all_reduce([each + step for each in on(four, 1000)], "sum") for step in range(50)
    ]
    last = pending[-1].wait()
    assert last[0][5].item() == 6 + 4 * 49
    for step, each in enumerate(pending[:-1]):
        assert each.assume_resolved()[step % 4][0].item() == 6 + 4 * step


def test_no_element_passes_through_the_client(
    context: mesh.DistributedContext, four: list[torch.device], node: blocking.Node
) -> None:
    tensors = on(four, 1 << 20)
    context.all_reduce(tensors, "sum").wait()
    before = moved_bytes(node)
    results = context.all_reduce(tensors, "sum").wait()
    assert moved_bytes(node) - before < 16 << 10
    assert all(result[7].item() == 6 for result in results)


def test_tensors_that_do_not_fit_are_refused_with_names(
    context: mesh.DistributedContext, four: list[torch.device], peers: tuple[Peer, Peer]
) -> None:
    a, b, c, d = on(four, 2, 2)
    all_four = ", ".join(f"'{device}'" for device in four)
    cases = [
        ([a, b, c], f"all_reduce over {all_four}.*there is none on '{four[3]}'"),
        ([a, b, c, c], f"there is none on '{four[3]}'"),
        ([a, c, b, d], f"are on '{four[0]}', '{four[2]}', '{four[1]}'.*another order"),
        ([a, b, c, torch.ones(2, 2)], "a tensor is on 'cpu', which is not in the group"),
        ([a, b, c, d[0]], r"is \(2,\) of torch.float32, and that on .* \(2, 2\)"),
        ([a, b, c, d.int()], "torch.int32"),
        ([a, b, c, d, d], "5 tensors for 4 devices"),
    ]
    for tensors, why in cases:
        with pytest.raises(DeviceError, match=why):
            context.all_reduce(tensors)
    with pytest.raises(DeviceError, match="2 rows don't divide among 4 devices"):
        context.reduce_scatter([a, b, c, d])
    with pytest.raises(DeviceError, match="no dimensions"):
        context.all_gather([each.sum() for each in (a, b, c, d)])
    with pytest.raises(DeviceError, match="'cpu', which is not in the group"):
        context.broadcast(torch.ones(1))
    with pytest.raises(ValueError, match="'product' is not a valid"):
        context.all_reduce([a, b, c, d], "product")
    with pytest.raises(UnsupportedCollective, match="average of truth values"):
        context.all_reduce([each.bool() for each in (a, b, c, d)])
    assert context.all_reduce([a, b, c, d]).resolve()[0].cpu()[0, 0] == 1.5


def test_devices_that_are_no_group_are_refused(four: list[torch.device], node: object) -> None:
    with pytest.raises(DeviceError, match=f"'{four[0]}' comes twice"):
        mesh.DistributedContext([four[0], four[0]])
    with pytest.raises(DeviceError, match="some are of peers, and some of this process"):
        mesh.DistributedContext([four[0], "cpu"])
    with pytest.raises(DeviceError, match="'mesh:99'"):
        mesh.DistributedContext(["mesh:99"])
    with pytest.raises(DeviceError, match="1 to"):
        mesh.DistributedContext([])


def test_a_context_is_used_inside_its_block(four: list[torch.device]) -> None:
    context = mesh.DistributedContext(four[:2])
    tensors = on(four[:2], 2)
    with pytest.raises(DeviceError, match="not entered yet"):
        context.all_reduce(tensors)
    with context:
        early = context.all_reduce(tensors)
        late = context.all_reduce(tensors)
        (one, _) = early.resolve()
        with pytest.raises(DeviceError, match="entered already"):
            context.open()
    assert one.cpu()[0] == 0.5, "results outlive the group"
    for use in (lambda: context.all_reduce(tensors), late.resolve, context.open):
        with pytest.raises(DeviceError, match=f"'{four[0]}', '{four[1]}'.*the context is closed"):
            use()
    assert context.failure is None


def test_results_outlive_a_group_that_is_left_before_they_are_there(
    four: list[torch.device],
) -> None:
    large = torch.arange(float(MOVE_BYTES // 4))
    for _ in range(3):
        with mesh.DistributedContext(four[:2], op="sum") as context:
            tensors = [large.to(device) for device in four[:2]]  # under way when the block ends
            results = [context.all_reduce(tensors).resolve() for _ in range(4)]
        assert all(torch.equal(each.cpu(), 2 * large) for pair in results for each in pair)


def test_devices_come_one_by_one_in_the_order_of_operations(four: list[torch.device]) -> None:
    one, other = four[0], four[1]
    with mesh.DistributedContext([one, other]) as context:
        first, second = context.start("all_reduce"), context.start("all_reduce", "sum")
        first.add(0, torch.ones(2, device=one))
        second.add(0, torch.ones(2, device=one))
        with pytest.raises(DeviceError, match=f"'{other}' is at operation 0.*this is operation 1"):
            second.add(1, torch.ones(2, device=other))
        with pytest.raises(DeviceError, match=r"at operation 2.*this is operation 0"):
            first.add(0, torch.ones(2, device=one))
        with pytest.raises(DeviceError, match=f"it is the turn of {other}"):
            first.add(1, torch.ones(2, device=one))
        with pytest.raises(DeviceError, match="not all devices have contributed"):
            first.collective().resolve()
        first.add(1, torch.ones(2, device=other))
        second.add(1, torch.ones(2, device=other))
        assert second.collective().wait()[1].cpu()[0] == 2
        assert first.collective().assume_resolved()[0].cpu()[0] == 1


def test_what_fails_on_one_device_is_told_for_all(four: list[torch.device]) -> None:
    one, other = four[0], four[1]
    with mesh.DistributedContext([one, other]) as context:
        bad = torch.ones(2, device=one).index_select(0, torch.tensor([5]).to(one))
        pending = context.all_reduce([bad, torch.ones(1, device=other)])
        with pytest.raises(MeshError, match="index out of range"):
            pending.wait(5)
        with pytest.raises(CollectiveError, match=f"{one} of .*index out of range") as raised:
            context.all_reduce([torch.ones(1, device=each) for each in (one, other)])
        assert raised.value.ranks == (0,)
        assert isinstance(context.failure, CollectiveError)
    with mesh.DistributedContext([one, other]) as context:
        assert context.all_reduce(on([one, other], 1)).wait()[0].item() == 0.5


def test_a_program_of_several_nodes_has_no_group_of_their_devices(
    peers: tuple[Peer, Peer], four: list[torch.device]
) -> None:
    with client() as another:
        stranger = mesh.device(peers[1].ticket, 0, node=another)
        with (
            pytest.raises(DeviceError, match="opened by different nodes"),
            mesh.DistributedContext([four[0], stranger]),
        ):
            pass
        with mesh.DistributedContext([stranger]) as alone:
            assert alone.all_reduce([torch.ones(1, device=stranger)]).wait()[0].item() == 1
        mesh.device.close(stranger)  # type: ignore[attr-defined]


def test_devices_of_this_process() -> None:
    with mesh.DistributedContext(["cpu", "cpu:0"], op="sum") as context:
        one, other = context.all_reduce([torch.ones(2), torch.ones(2)]).wait()
        assert one.tolist() == other.tolist() == [2, 2]
        assert one.data_ptr() != other.data_ptr()
        assert context.all_gather([torch.ones(1), torch.zeros(1)]).resolve()[1].tolist() == [1, 0]
        assert context.failure is None


def test_nobody_is_paired_but_by_the_client_s_word(
    peers: tuple[Peer, Peer], context: mesh.DistributedContext, node: blocking.Node
) -> None:
    """The groups of the other tests are the positive control."""

    async def pair() -> None:
        connection = await (await node.node.connect(peers[0].ticket)).connection()
        pairing = wire.Pairing(bytes(16), 0, bytes(32))
        stream = await connection.open_stream(wire.PAIR_SERVICE, pairing.encode())
        await stream.reply()

    with pytest.raises(AccessDenied, match="no session here expects"):
        node.run(pair)
    assert peers[0].sizes()["device_groups"] >= 1


def test_nobody_joins_with_a_session_that_is_not_theirs(
    peers: tuple[Peer, Peer], node: blocking.Node
) -> None:
    async def join() -> None:
        there = await node.node.connect(peers[0].ticket)
        member = wire.Member(there.node_id, (0,))
        joining = wire.Join(bytes(16), bytes(16), 1, 0, (member,), 5.0)
        connection = await there.connection()
        await (await connection.open_stream(wire.GROUP_SERVICE, joining.encode())).reply()

    with pytest.raises(MeshError, match="the session is not here any more"):
        node.run(join)


@pytest.mark.parametrize("has_begun", [False, True])
def test_forming_ends_when_the_group_is_left(
    has_begun: bool, four: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    async def form(bond: Bond) -> None:
        began.set()
        await anyio.sleep_forever()

    monkeypatch.setattr(Bond, "_form", form)
    device = device_of(four[0])
    bond = Bond([SessionPart(device.session, [device], [0])], 5.0)
    if has_begun:
        bond.begin()
        assert began.wait(5)
        bond.leave()
    else:
        bond.leave()
        bond.begin()
    assert "it was left" in str(bond.formed.exception(5))
    assert bond.broken.done()


def test_a_client_leaves_room_for_others(
    peers: tuple[Peer, Peer], four: list[torch.device], node: blocking.Node
) -> None:
    carrier = device_of(four[0]).session.carrier
    assert carrier is not None
    assert carrier.mover is not None
    session = carrier.mover.number

    async def join_many() -> None:
        there = await node.node.connect(peers[0].ticket)
        member = wire.Member(there.node_id, (0,))
        connection = await there.connection()
        async with AsyncExitStack() as stack:
            for number in range(MAX_JOINED_PER_PEER + 1):
                group = number.to_bytes(16, "big")
                joining = wire.Join(session, group, 1 << 40 | number, 0, (member,), 5.0)
                stream = await connection.open_stream(wire.GROUP_SERVICE, joining.encode())
                await stack.enter_async_context(stream)
                await stream.reply()

    with pytest.raises(MeshError, match="64 of 64 memberships of this peer are taken"):
        node.run(join_many)


def test_a_peer_that_dies_is_named_within_the_liveness_bound(
    peers: tuple[Peer, Peer], four: list[torch.device], node: blocking.Node
) -> None:
    with peer(devices=1, liveness=LIVENESS) as victim:
        lost = mesh.device(victim.ticket, 0, node=node)
        with mesh.DistributedContext([four[0], lost, four[1]], op="sum") as context:
            three = [four[0], lost, four[1]]
            assert context.all_reduce(on(three, 4)).wait()[2][0].item() == 3
            victim.program.kill()
            began = time.monotonic()
            with pytest.raises(RankLost, match=f"{lost} of") as raised:
                _reduce_without_end(context, three)
            assert time.monotonic() - began < 3
            assert raised.value.ranks == (1,)
            with pytest.raises(MeshError):
                torch.ones(1, device=lost).item()
            assert time.monotonic() - began < 4
        with mesh.DistributedContext([four[0], four[1]]) as context:
            assert context.all_reduce(on(four[:2], 1)).wait()[1].item() == 0.5


def test_where_sessions_outlive_a_group_it_says_to_make_another(
    peers: tuple[Peer, Peer],
) -> None:
    with Line(peers[0].ticket) as line, client(1.0) as node:
        one = mesh.device(line.ticket, node=node)
        other = mesh.device(peers[1].ticket, node=node)
        kept = torch.full((2,), 3.0, device=one)
        with mesh.DistributedContext([one, other], op="sum") as context:
            tensors = [kept, torch.ones(2, device=other)]
            assert context.all_reduce(tensors).wait()[1].tolist() == [4, 4]
            line.is_cut = True
            reason = context.reason(LookupError("the group is whole"))
            while isinstance(reason, LookupError):
                reason = context.reason(reason)
            line.is_cut = False
            assert isinstance(reason, RankLost)
            assert reason.ranks == (0,)
            assert kept.tolist() == [3, 3]  # the session goes on
            deadline = time.monotonic() + 10
            while "make a new one of the same devices" not in str(reason.fix):
                assert time.monotonic() < deadline, reason
                time.sleep(0.02)
            with pytest.raises(RankLost, match="of the same devices"):
                context.all_reduce(tensors)
            assert context.find_lost() == ()
        with mesh.DistributedContext([one, other], op="sum") as again:
            assert again.all_reduce(tensors).wait()[0].tolist() == [4, 4]
        gc.collect()


def _reduce_without_end(context: mesh.DistributedContext, three: list[torch.device]) -> None:
    while True:  # the first may have been over just in time
        context.all_reduce(on(three, 4)).wait()


def test_the_peers_are_left_with_nothing(
    context: mesh.DistributedContext, peers: tuple[Peer, Peer]
) -> None:
    context.close()
    for each in peers:
        deadline = time.monotonic() + 3
        while each.sizes()["device_groups"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_an_event_loop_does_not_wait_for_itself(
    four: list[torch.device], node: blocking.Node
) -> None:
    async def enter() -> None:
        mesh.DistributedContext(four).open()

    with pytest.raises(DeviceError, match="event loop"):
        node.run(enter)
