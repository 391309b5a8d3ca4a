"""A device whose executor is in this process: what the network adds is tested elsewhere."""

from __future__ import annotations

import os
import random

import torch

from mesh.device.client.session import Request, Session
from mesh.device.client.tensors import Device, devices
from mesh.device.groups.member import Groups
from mesh.device.server.machine import Machine, MachineLimits
from tensor_bridge import TensorMeta, tensor_bytes

__all__ = ["Loopback", "SlowMover", "open_devices"]


class SlowMover:
    """Moves into a device that arrive late, and not in order."""

    node = None

    def __init__(self, carrier: Loopback) -> None:
        self._carrier = carrier
        self._underway: list[tuple[int, int]] = []
        self._random = random.Random(1)
        self.waited = 0

    def upload(self, source: torch.Tensor, meta: TensorMeta, handle: int, offset: int) -> None:
        session, machine = self._carrier.session, self._carrier.machine
        session.flush()
        arrival = session.next_id()
        machine.expect(arrival, handle, offset, meta.nbytes)
        descriptor = os.memfd_create("upload")
        os.write(descriptor, tensor_bytes(source))
        self._underway.append((arrival, descriptor))
        self.waited = max(self.waited, len(machine._later))
        if len(self._underway) > 3:
            self._arrive()

    def download(
        self, reading: int, handle: int, meta: TensorMeta, target: torch.Tensor
    ) -> Request:
        session = self._carrier.session
        sink = tensor_bytes(target)
        return session.ask(reading, session.layouts[reading], (handle,), "read", sink)

    def settle(self) -> None:
        self.waited = max(self.waited, len(self._carrier.machine._later))
        while self._underway:
            self._arrive()

    def _arrive(self) -> None:
        arrival, descriptor = self._underway.pop(self._random.randrange(len(self._underway)))
        self._carrier.machine.arrive(arrival, descriptor)


class Loopback:
    """A carrier that hands batches to a machine at once."""

    def __init__(self, session: Session, machine: Machine) -> None:
        self.session = session
        self.machine = machine
        self.batches = 0
        self.nbytes = 0
        self.mover: SlowMover | None = None

    def send(self, batch: bytes, *, wait: bool) -> bool:
        self.batches += 1
        self.nbytes += len(batch)
        self.machine.execute(
            memoryview(bytearray(batch)),
            lambda data: self.session.answered(memoryview(bytes(data))),
        )
        return True

    def spawn(self, task: object) -> None:
        raise AssertionError("there is no loop")

    def is_in_loop(self) -> bool:
        return False

    def check_waiting(self) -> None:
        if self.mover is not None:  # somebody is about to wait for what depends on moves
            self.mover.settle()

    def close(self) -> None:
        pass


def open_devices(
    count: int = 1, limits: MachineLimits | None = None, groups: Groups | None = None
) -> tuple[Loopback, list[torch.device]]:
    """Open devices of one session."""
    from mesh.device.client.backend import register

    register()
    session = Session(lambda: "a peer")
    machine = Machine([torch.device("cpu")] * count, limits, groups)
    carrier = Loopback(session, machine)
    session.carry_by(carrier)
    made = []
    for remote in range(count):
        device = Device(session, len(devices), remote, {})
        devices.append(device)
        made.append(device.torch_device)
    return carrier, made
