"""What the storages of a session lie in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mesh.device import wire
from mesh.device.errors import DeviceError
from mesh.device.server.machine import MachineLimits
from mesh.device.server.storages import Slot, over, zeros
from mesh.device.wire import Geometry, Number, Output, Template, TensorOf
from tensor_bridge import tensor_bytes
from tensor_bridge.lanes import Writer
from tests.mesh.device.test_machine import Client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory has no seals here")

COUNT = 1 << 20
NBYTES = 4 * COUNT
LARGE = Geometry(torch.float32, (COUNT,), (1,))
CPU = torch.device("cpu")


@contextlib.contextmanager
def sealed(content: torch.Tensor) -> Iterator[int]:
    """Yield the descriptor of sealed memory with the bytes of a tensor."""
    data = tensor_bytes(content)
    with contextlib.closing(Writer(len(data))) as writer:
        writer.fill(data)
        descriptor = writer.give()
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def resident() -> int:
    """Bytes of memory that this process has touched."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_large_memory_is_zero_and_touched_by_nobody() -> None:
    before = resident()
    made = zeros(Geometry(torch.float32, (64 << 20,), (1,)), 256 << 20, CPU)
    assert resident() - before < 64 << 20
    assert not made[:: 1 << 18].any()
    made[-1] = 1
    assert made[-1] == 1


def test_what_arrives_for_all_of_a_storage_is_not_copied() -> None:
    slot = Slot(zeros(LARGE, NBYTES, CPU), LARGE, 0)
    former = slot.base
    content = torch.arange(COUNT, dtype=torch.float32)
    with sealed(content) as descriptor:
        before = resident()
        slot.fill(descriptor, 0, NBYTES)
        assert resident() - before < NBYTES // 2
        assert torch.equal(slot.base, content)
        assert not former.any()
        slot.base[0] = 5  # even if nobody has made it fast
        assert os.pread(descriptor, 4, 0) == bytes(4)
    reader = slot.base
    slot.make_writable()
    slot.base.add_(1)
    assert (slot.base[0], slot.base[-1]) == (6, COUNT)
    assert (reader[0], reader[-1]) == (5, COUNT - 1)


def test_what_arrives_for_a_part_or_in_memory_of_another_kind_is_copied() -> None:
    slot = Slot(zeros(LARGE, NBYTES, CPU), LARGE, 0)
    half = torch.ones(COUNT // 2)
    with sealed(half) as descriptor:
        slot.fill(descriptor, NBYTES // 2, NBYTES // 2)
    assert (slot.base.sum(), slot.base[0]) == (COUNT // 2, 0)
    descriptor = os.memfd_create("not sealed")
    os.write(descriptor, tensor_bytes(torch.full((COUNT,), 2.0)))
    slot.fill(descriptor, 0, NBYTES)
    os.pwrite(descriptor, bytes(NBYTES), 0)
    assert slot.base.sum() == 2 * COUNT
    os.ftruncate(descriptor, 8)
    with pytest.raises(DeviceError, match="cut short"):
        slot.fill(descriptor, 0, NBYTES)
    os.close(descriptor)


def test_an_operation_writes_to_memory_of_its_own() -> None:
    client = Client(MachineLimits(max_bytes=64 << 20))
    allocate = Template(wire.ALLOCATE, 0, outputs=(Output(LARGE, NBYTES),), results=1)
    add = Template("aten::add_.Tensor", 0, (TensorOf(LARGE), Number("d")), outputs=(), results=0)
    first = Template(wire.READ, 0, (TensorOf(Geometry(torch.float32, (4,), (1,))),))
    client.run(allocate, 1)
    content = torch.arange(COUNT, dtype=torch.float32)
    with sealed(content) as descriptor:
        client.machine.expect(1, 1, 0, NBYTES)
        client.machine.arrive(1, os.dup(descriptor))
        slot = client.machine._slots[1]
        assert isinstance(slot, Slot)
        assert slot.is_sealed
        client.run(add, 1, 1.0)
        assert not slot.is_sealed
        answer = client.ask(first, 1)
        assert answer.data is not None
        assert torch.frombuffer(bytearray(answer.data), dtype=torch.float32).tolist() == [
            1,
            2,
            3,
            4,
        ]
        assert os.pread(descriptor, 4, 0) == bytes(4)
    assert client.machine.used == NBYTES


def test_a_write_of_the_client_goes_to_memory_of_its_own() -> None:
    client = Client(MachineLimits(max_bytes=64 << 20))
    client.run(Template(wire.ALLOCATE, 0, outputs=(Output(LARGE, NBYTES),), results=1), 1)
    with sealed(torch.zeros(COUNT)) as descriptor:
        client.machine.expect(1, 1, 0, NBYTES)
        client.machine.arrive(1, os.dup(descriptor))
        client.send(wire.write(1, 4, b"\0\0\x80\x3f"))
        slot = client.machine._slots[1]
        assert isinstance(slot, Slot)
        assert not slot.is_sealed
        assert over(slot.base, LARGE)[:3].tolist() == [0, 1, 0]
