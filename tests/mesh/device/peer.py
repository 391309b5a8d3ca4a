"""A peer that offers devices, as a process of its own; and programs that use them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator

import anyio

from auth import Grant, Quotas, SecretKey, Ticket, allow_any
from auth.authorizer import AccessRequest
from auth.ticket import SocketAddress
from mesh import Node, blocking
from mesh.device import DeviceLimits, DeviceService
from mesh.device.server.executor import ExecutorLimits
from mesh.device.server.machine import MachineLimits
from tests.placements import placed
from tests.programs import Program
from transport import EndpointConfig
from transport.udp import UdpSocket

__all__ = ["CONFIG", "Peer", "client", "peer"]

CONFIG = EndpointConfig(
    bind="127.0.0.1:0", liveness=1.0, linger=0.5, connect_timeout=3.0, **placed()
)


class Peer:
    """A peer in another process."""

    def __init__(self, program: Program, ticket: Ticket) -> None:
        self.program = program
        self.ticket = ticket

    def sizes(self) -> dict[str, int]:
        """Ask for its tables."""
        return self._ask("sizes")

    def moved(self) -> dict[str, int]:
        """Ask for the bytes of UDP payload that it has exchanged with each other node, by id."""
        return self._ask("moved")

    def cut_off(self, other: Peer) -> None:
        """Have none of its datagrams get to another peer any more."""
        self._ask(f"cut off {other.ticket.addresses[0][1]}")

    def _ask(self, what: str) -> dict[str, int]:
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        self.program.stdin.write(f"{what}\n")
        self.program.stdin.flush()
        while not (line := self.program.stdout.readline()).startswith("{"):
            assert line, "the peer has ended"  # else it is what an executor's libraries say
        found: dict[str, int] = json.loads(line)
        return found


@contextlib.contextmanager
def peer(
    *,
    devices: int = 2,
    lease: float = 30.0,
    max_bytes: int = 1 << 30,
    shares_memory: bool = True,
    liveness: float = CONFIG.liveness,
    backend: str = "asyncio",
) -> Iterator[Peer]:
    """Run a peer for the block, on the event loop `backend`."""
    arguments = ["-m", "tests.mesh.device.peer", str(devices), str(lease), str(max_bytes)]
    arguments += [str(int(shares_memory)), str(liveness), backend]
    with Program(arguments, stdin=True, stderr=False) as program:
        assert program.stdout is not None
        try:
            line = program.stdout.readline()
            if not line.startswith("mesh1"):
                raise RuntimeError(line + program.stdout.read())
            yield Peer(program, Ticket.decode(line.strip()))
        finally:
            program.kill()


def client(
    liveness: float = CONFIG.liveness, *, shared_memory: bool = True, backend: str = "asyncio"
) -> blocking.Node:
    """A program's node, not open yet; its thread's event loop is `backend`."""
    config = dataclasses.replace(CONFIG, liveness=liveness)
    node = Node.embedded(
        key=SecretKey.generate(),
        authorizer=allow_any(),
        config=config,
        tensors=False,
        shared_memory=shared_memory,
    )
    return blocking.Node(node, backend=backend)


class _Admit:
    """Lets everybody in for devices, with a quota."""

    def __init__(self, max_bytes: int) -> None:
        self._grant = Grant(
            frozenset({"collective", "device", "tensor"}), quotas=Quotas(max_bytes=max_bytes)
        )

    async def authorize(self, request: AccessRequest) -> Grant:
        return self._grant


async def _serve(
    devices: int, lease: float, max_bytes: int, shares_memory: bool, liveness: float
) -> None:
    config = dataclasses.replace(CONFIG, liveness=liveness)
    node = Node.embedded(
        key=SecretKey.generate(), authorizer=_Admit(max_bytes), config=config, tensors=True
    )
    # In how many parts a sum is taken decides its last bit: one, as in the tests.
    machine = MachineLimits(max_bytes=4 << 30)
    executor = ExecutorLimits(machine=machine, batch_seconds=5.0, threads=1)
    limits = DeviceLimits(executor=executor, lease=lease)
    async with node:
        offer = DeviceService(
            node.endpoint,
            ["cpu"] * devices,
            limits,
            store=node.store,
            shared_memory=shares_memory,
        )
        async with offer as service:
            node.offer(service)
            print(node.ticket().encode(), flush=True)
            read = sys.stdin.readline
            while line := await anyio.to_thread.run_sync(read, abandon_on_cancel=True):
                if line.startswith("cut off"):
                    _cut_off(int(line.split()[-1]))
                found = _moved(node) if line == "moved\n" else node.table_sizes()
                print(json.dumps(found), flush=True)


def _moved(node: Node) -> dict[str, int]:
    return {
        str(each.peer.node_id): each.info.bytes_sent + each.info.bytes_received
        for each in node.endpoint.connections
    }


def _cut_off(port: int) -> None:
    """Lose all datagrams to a port."""
    send, send_batch = UdpSocket.send, UdpSocket.send_batch

    def lose(self: UdpSocket, data: bytes, address: SocketAddress) -> bool:
        return address[1] == port or send(self, data, address)

    def lose_batch(self: UdpSocket, data: bytes, segment: int, address: SocketAddress) -> int:
        return len(data) if address[1] == port else send_batch(self, data, segment, address)

    UdpSocket.send = lose  # type: ignore[assignment,method-assign]
    UdpSocket.send_batch = lose_batch  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    anyio.run(
        _serve,
        int(sys.argv[1]),
        float(sys.argv[2]),
        int(sys.argv[3]),
        sys.argv[4] == "1",
        float(sys.argv[5]),
        backend=sys.argv[6],
    )
