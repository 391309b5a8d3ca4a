"""Offers a node's devices on its endpoint: who may have a session, how many, and for how long."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import anyio
import torch

from auth import MeshError, NodeId, Quotas
from mesh.device import wire
from mesh.device.errors import DeviceError, SessionLost
from mesh.device.groups.service import GroupService
from mesh.device.handover import ARRIVED_CALL, Arrived
from mesh.device.link import BROKEN
from mesh.device.server.executor import ExecutorLimits
from mesh.device.server.machine import MachineLimits
from mesh.device.server.nursery import CAN_HAND_OVER, Executor, Nursery
from mesh.device.server.session import ServerSession
from tensor_bridge import TensorStore
from tensor_bridge.fields import Fields
from transport import (
    CborValue,
    Endpoint,
    EndpointEvent,
    Incoming,
    LimitExceeded,
    PeerLeft,
    PeerRevoked,
    ProtocolError,
)

__all__ = ["SCOPE", "DeviceLimits", "DeviceService", "check_names"]

SCOPE = "device"
"""What a peer needs to compute here. Not among the scopes that keys have by default: moving tensors
costs memory within a quota, while computing takes the machine for as long as somebody likes."""

SESSION_BYTES = 16
"""Length of the random number that a client gives its session."""

SWEEP_SECONDS = 0.5

CLOSE_SECONDS = 2.0
"""How long leaving waits for sessions to end: they have nothing to wait for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What a node allows its clients.

    Attributes:
        executor: each session.
        max_sessions: sessions in all. Each program has one, over all of the devices.
        max_sessions_per_machine: the same for the programs of one machine.
        lease: seconds for which a session is kept when its client is gone, and for which a client
            tries to come back.
    """

    executor: ExecutorLimits = dataclasses.field(default_factory=ExecutorLimits)
    max_sessions: int = 64
    max_sessions_per_machine: int = 8
    lease: float = 30.0


class DeviceService:
    """Serves ``device.session`` and ``device.list`` while it is entered.

    Args:
        endpoint: where peers come in.
        devices: names as torch writes them: ``"cpu"``, ``"cuda:0"``. One may be offered twice.
        limits: what clients may use.
        store: of the tensor service on the same endpoint, through which tensors go to and come from
            devices of other peers; without, they don't.
        shared_memory: have groups of devices use it where executors run on one host.

    Raises:
        DeviceError: from entering it, if a device is not here, or executors can't be forked.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        devices: Sequence[str],
        limits: DeviceLimits | None = None,
        *,
        store: TensorStore | None = None,
        shared_memory: bool = True,
    ) -> None:
        self.limits = limits or DeviceLimits()
        self._endpoint = endpoint
        self._store = store
        self._names = tuple(devices)
        self._nursery = Nursery(endpoint.start_soon)
        self._sessions: dict[tuple[NodeId, bytes], ServerSession] = {}
        self._starting: dict[tuple[NodeId, bytes], NodeId] = {}
        """Sessions that begin, and the machines of their programs."""
        self._facts: list[CborValue] = []
        self._is_closed = False
        self._shared_memory = shared_memory
        self._groups: GroupService | None = None

    async def __aenter__(self) -> Self:
        self._facts = [_facts(name) for name in check_names(self._names)]
        self._nursery.prepare()
        self._sweeping = anyio.CancelScope()
        self._endpoint.start_soon(self._keep_sweeping)
        self._endpoint.register_service(wire.SERVICE, self._serve, scope=SCOPE)
        self._endpoint.register_call(wire.DEVICES_CALL, self._list, scope=SCOPE)
        self._endpoint.register_call(ARRIVED_CALL, self._arrive, scope=SCOPE)
        self._groups = GroupService(
            self._endpoint, self._executor_of, scope=SCOPE, shared_memory=self._shared_memory
        )
        self._endpoint.subscribe(self._observe)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sweeping.cancel()
        self._is_closed = True
        for session in tuple(self._sessions.values()):
            session.close()
        with anyio.move_on_after(CLOSE_SECONDS, shield=True):
            for session in tuple(self._sessions.values()):
                await session.ended.wait()
        await self._nursery.close()

    def sizes(self) -> dict[str, int]:
        """Return how full the tables are."""
        return {
            "device_sessions": len(self._sessions),
            "executors": self._nursery.count,
            "device_groups": 0 if self._groups is None else self._groups.count,
        }

    def _executor_of(self, owner: NodeId, number: bytes) -> Executor | None:
        session = self._sessions.get((owner, number))
        return None if session is None else session.executor

    async def _list(self, request: Incoming) -> CborValue:
        return list(self._facts)

    async def _arrive(self, request: Incoming) -> CborValue:
        arrived = Arrived.decode(request.value)
        session = self._sessions.get((request.peer.node_id, arrived.session))
        if session is None:
            raise _unknown()
        session.arrive(arrived)
        return None

    async def _serve(self, request: Incoming) -> None:
        """Carry a session on a stream: a new one, or one whose stream broke.

        Raises:
            SessionLost: the client goes on with a session that is not here any more.
            LimitExceeded: there are too many sessions.
        """
        fields = Fields(request.value, "opening of a session with a device")
        number = fields.data("session", shortest=SESSION_BYTES, longest=SESSION_BYTES)
        received = fields.integer("received")
        is_new = fields.flag("new")
        fields.finish()
        peer = request.peer
        key = (peer.node_id, number)
        session = self._sessions.get(key)
        if session is None:
            if not is_new or self._is_closed:
                raise _unknown()
            session = await self._start(request, key)
        permits = request.grant.permits
        moves = (
            CAN_HAND_OVER
            and self._store is not None
            and permits("tensor:put")
            and permits("tensor:read")
        )
        await request.stream.send_reply(
            {
                "received": session.link.received,
                "devices": list(self._facts),
                "moves": moves,
                "lease": round(1000 * self.limits.lease),
            }
        )
        try:
            async with request.stream:
                await session.carry(request.stream, received)
        except BROKEN:
            raise  # it may come back
        except MeshError:
            session.close()  # it has given the session up
            raise

    async def _start(self, request: Incoming, key: tuple[NodeId, bytes]) -> ServerSession:
        if key in self._starting:
            raise ProtocolError("a session with a device", why="it is opened twice at once")
        machine = request.peer.machine_id  # which may have as many programs as it likes
        machines = [each.owner.machine_id for each in self._sessions.values()]
        machines += self._starting.values()
        held, total = machines.count(machine), len(machines)
        quota = self.limits.max_sessions_per_machine
        if held >= quota or total >= self.limits.max_sessions:
            raise LimitExceeded(
                "a session with a device",
                why=f"{held} of {quota} sessions of programs of this machine are open, and {total} "
                f"of {self.limits.max_sessions} in all",
                fix="Close one, or wait until the lease of one is over.",
            )
        limits = _within(self.limits.executor, request.grant.quotas)
        self._starting[key] = machine
        try:
            executor = await self._nursery.start(list(self._names), limits)
        finally:
            self._starting.pop(key, None)
        if self._is_closed:
            executor.kill()
            raise _unknown()
        session = self._sessions[key] = ServerSession(
            key[1], request.peer, executor, limits, self._store, request.grant.quotas
        )
        # Until a stream carries it: its client may be gone before it hears of it.
        session.detached_at = anyio.current_time()
        self._endpoint.start_soon(session.run, lambda: self._sessions.pop(key, None))
        return session

    async def _keep_sweeping(self) -> None:
        with self._sweeping:
            while True:
                await anyio.sleep(SWEEP_SECONDS)
                now = anyio.current_time()
                for session in tuple(self._sessions.values()):
                    left = session.detached_at
                    if left is not None and now - left >= self.limits.lease:
                        session.abandon()

    def _observe(self, event: EndpointEvent) -> None:
        match event:
            case PeerRevoked(node_id):
                for session in tuple(self._sessions.values()):
                    if node_id in session.owners:
                        session.close()
            case PeerLeft(connection) if connection.was_left:
                for session in tuple(self._sessions.values()):
                    if connection.peer.node_id == session.owner.node_id:
                        session.abandon()


def _unknown() -> SessionLost:
    return SessionLost(
        "a session with a device",
        why="this node does not have it: its lease is over, or the node began anew",
        fix="Open the device again; its tensors are lost.",
    )


def check_names(names: Sequence[str]) -> tuple[torch.device, ...]:
    """Return the devices of these names.

    Raises:
        DeviceError: one is no device of this machine that can be offered.
    """
    found = []
    gpus = torch.cuda.device_count()
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError:
            device = torch.device("meta")
        count = {"cpu": 1, "cuda": gpus}.get(device.type, 0)
        if (device.index or 0) >= count:
            raise DeviceError(
                f"offering of the device {name!r}",
                why="this machine has no such device that peers could use",
                fix=f"It has {', '.join(('cpu', *(f'cuda:{index}' for index in range(gpus))))}.",
            )
        found.append(device)
    return tuple(found)


def _facts(device: torch.device) -> dict[str, CborValue]:
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": facts.name, "memory": facts.total_memory}
    return {"type": "cpu", "name": "cpu", "memory": _machine_memory()}


def _machine_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _within(limits: ExecutorLimits, quotas: Quotas) -> ExecutorLimits:
    """Return `limits` lowered to what a peer's grant allows."""
    machine = limits.machine
    most = MachineLimits(
        max_bytes=_least(machine.max_bytes, quotas.max_bytes),
        max_handles=_least(machine.max_handles, quotas.max_objects),
        max_templates=machine.max_templates,
    )
    return dataclasses.replace(limits, machine=most)


def _least(limit: int, quota: int | None) -> int:
    return limit if quota is None else min(limit, quota)
