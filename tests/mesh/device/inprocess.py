"""A device whose executor is in this process: what the network adds is tested elsewhere."""

from __future__ import annotations

import torch

from mesh.device.client.session import Session
from mesh.device.client.tensors import Device, devices
from mesh.device.groups.member import Groups
from mesh.device.server.machine import Machine, MachineLimits

__all__ = ["Loopback", "open_devices"]


class Loopback:
    """A carrier that hands batches to a machine at once."""

    def __init__(self, session: Session, machine: Machine) -> None:
        self.session = session
        self.machine = machine
        self.batches = 0
        self.nbytes = 0
        self.mover = None

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
        pass

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
