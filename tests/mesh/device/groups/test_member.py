"""Operations of a group in a session's stream, as its executor runs them."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator

import pytest
import torch

from auth import NodeId
from mesh.device import wire as device_wire
from mesh.device.client.capturing import capture
from mesh.device.client.moving import MOVE_BYTES
from mesh.device.client.session import Session
from mesh.device.client.special import ask_elements
from mesh.device.client.tensors import device_of, devices
from mesh.device.errors import DeviceError, OperationFailed, SessionLost, UnsupportedOnDevice
from mesh.device.groups import wire
from mesh.device.groups.issuing import SessionPart
from mesh.device.groups.member import MAX_GROUPS, Groups
from mesh.device.groups.working import Call
from mesh.errors import MeshError
from tensor_bridge import QuotaExceeded
from tests.mesh.device.inprocess import Loopback, SlowMover, open_devices
from transport import ProtocolError

SUM = Call("all_reduce", "sum")


class World:
    """A session whose two devices are a group of their own."""

    def __init__(self, groups: Groups, carrier: Loopback, opened: list[torch.device]) -> None:
        self.groups = groups
        self.carrier = carrier
        self.devices = opened
        self.session: Session = carrier.session
        self.part = SessionPart(self.session, list(map(device_of, opened)), (0, 1))
        assert groups.expect(self.part.number)
        node = NodeId(bytes(32))
        groups.add(wire.Form(self.part.number, bytes(16), 0, (node,), ((0, 1),), 5.0, True), None)

    def ones(self, *shape: int) -> list[torch.Tensor]:
        return [torch.ones(shape, device=device) for device in self.devices]


@pytest.fixture
def world() -> Iterator[World]:
    ours, theirs = socket.socketpair()
    groups = Groups(ours, contextlib.nullcontext, 1 << 20)
    carrier, opened = open_devices(2, groups=groups)
    yield World(groups, carrier, opened)
    carrier.session.close()
    ours.close()
    theirs.close()
    gc.collect()
    devices.clear()


def test_an_operation_works_on_what_was_there_when_it_was_called(world: World) -> None:
    one, other = world.ones(2, 3)
    world.part.start(SUM, [one, other.t().contiguous().t()])
    one.zero_()
    first, second = world.part.take(0, (2, 3), torch.float32, waits=True)
    assert torch.equal(first.cpu(), torch.full((2, 3), 2.0))
    first.add_(1)
    assert torch.equal(second.cpu(), torch.full((2, 3), 2.0))
    assert second.device == world.devices[1]
    assert world.groups.nbytes == 0


def test_an_operation_on_what_is_still_under_way_waits_for_it(world: World) -> None:
    mover = world.carrier.mover = SlowMover(world.carrier)
    world.session.moves = True
    world.groups._max_bytes = 1 << 24
    large = torch.arange(float(MOVE_BYTES // 4))
    world.part.start(SUM, [large.to(world.devices[0]), *world.ones(len(large))[1:]])
    world.part.start(SUM, world.ones(2))  # which could be done, but not before the other one
    one = world.part.take(0, large.shape, torch.float32, waits=True)
    two = world.part.take(1, (2,), torch.float32, waits=True)
    world.session.flush()
    assert len(world.carrier.machine._later) >= 4
    mover.settle()
    assert torch.equal(one[1].cpu(), large + 1)
    assert two[0].cpu()[0] == 2


def test_results_are_not_waited_for_before_what_others_need_was_given(world: World) -> None:
    mover = world.carrier.mover = SlowMover(world.carrier)
    world.session.moves = True
    ones = world.ones(2)
    late = torch.ones(MOVE_BYTES // 4).to(world.devices[0])
    world.part.start(SUM, ones)
    asked = ask_elements(late)[0]
    first, _ = world.part.take(0, (2,), torch.float32, waits=True)
    world.session.flush()
    assert len(world.carrier.machine._later) >= 2  # the reading, and so the taking
    mover.settle()
    assert asked.future.done()
    assert first.cpu()[0] == 2


def test_operations_are_not_captured(world: World) -> None:
    ones = world.ones(2)
    with (
        pytest.raises(UnsupportedOnDevice, match="all_reduce while operations are captured"),
        capture(world.devices[0]),
    ):
        world.part.check("all_reduce")
    with world.session.recording() as recording:
        for _ in range(2):  # the second time its template is there
            world.part.start(SUM, ones)
            world.session.flush()
    world.session.emit(device_wire.capture(1, recording.batches[-1]))  # as no client of ours would
    with pytest.raises(ProtocolError, match="done once"):
        world.session.flush()


def test_what_can_not_be_contributed_is_told_to_who_reads(world: World) -> None:
    one, other = world.ones(2)
    bad = one.index_select(0, torch.tensor([9]).to(one.device))
    world.part.start(SUM, [bad, other[:1]])
    results = world.part.take(0, (1,), torch.float32, waits=True)
    for result in results:
        with pytest.raises(OperationFailed, match="index out of range"):
            result.cpu()
    world.part.start(SUM, [one, other])
    assert world.part.take(1, (2,), torch.float32, waits=True)[0].cpu()[0] == 2


def test_what_is_not_over_is_not_taken_for_it(world: World) -> None:
    group = world.groups._groups[world.part.number]
    assert group is not None
    assert group.thread.claim()  # nothing of the group runs now
    world.part.start(SUM, world.ones(2))
    (early, _) = world.part.take(0, (2,), torch.float32, waits=False)
    with pytest.raises(DeviceError, match="assumed to be resolved"):
        early.cpu()
    world.part.start(SUM, world.ones(2))
    group.thread.release()
    world.part.start(SUM, world.ones(2))
    world.part.take(2, (2,), torch.float32, waits=True)
    (late, _) = world.part.take(1, (2,), torch.float32, waits=False)
    assert late.cpu()[0] == 2


def test_a_quota_holds_for_what_is_started(world: World) -> None:
    large = world.ones(1 << 17)  # half of the quota, each
    world.part.start(SUM, large)
    world.part.start(SUM, large)
    first, _ = world.part.take(0, (1 << 17,), torch.float32, waits=True)
    second, _ = world.part.take(1, (1 << 17,), torch.float32, waits=True)
    assert first.cpu()[0] == 2
    with pytest.raises(QuotaExceeded, match="resolve"):
        second.cpu()
    assert world.groups.nbytes == 0


@pytest.mark.parametrize(
    ("sequence", "shape", "why"),
    [(1, (2,), "was not started"), (0, (3,), "something else than was expected")],
)
def test_results_that_can_not_be_end_the_session(
    sequence: int, shape: tuple[int, ...], why: str, world: World
) -> None:
    world.part.start(SUM, world.ones(2))
    world.part.take(sequence, shape, torch.float32, waits=True)
    with pytest.raises(ProtocolError, match=why):
        world.session.flush()


def test_an_operation_out_of_order_ends_the_session(world: World) -> None:
    world.part.next = 1
    world.part.start(SUM, world.ones(2))
    with pytest.raises(ProtocolError, match="whose next one is 0"):
        world.session.flush()


def test_tensors_that_are_not_alike_are_refused(world: World) -> None:
    one, other = world.ones(2)
    world.part.start(SUM, [one, other[:1]])
    world.part.take(0, (2,), torch.float32, waits=True)
    with pytest.raises(ProtocolError, match="of one size and type"):
        world.session.flush()


def test_a_group_that_was_left_is_none_any_more(world: World) -> None:
    world.part.start(SUM, world.ones(2))
    world.groups._leave(world.part.number)
    assert world.groups.nbytes == 0
    (result, _) = world.part.take(0, (2,), torch.float32, waits=True)
    with pytest.raises(MeshError, match="not in the group any more"):
        result.cpu()
    assert world.session.error is None


def test_groups_are_bounded(world: World) -> None:
    for number in range(1000, 1000 + MAX_GROUPS - 1):
        assert world.groups.expect(number)
    assert not world.groups.expect(2000)
    assert not world.groups.expect(1000)
    world.groups._leave(1000)
    assert world.groups.expect(2000)


def test_a_lost_session_says_so(world: World) -> None:
    world.session.fail(DeviceError("x", why="y"))
    with pytest.raises(SessionLost):
        world.part.start(SUM, [])
