"""The daemon: a machine's node with a run file, links to the peers it knows, and a way to stop."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import anyio

from auth import ADMIN, MeshError, NodeId, SocketAddress, Ticket
from mesh.daemon.control import control_at
from mesh.daemon.join import join
from mesh.daemon.links import keep_links
from mesh.errors import HomeError, IdentityInUse
from mesh.home import Home
from mesh.node import Node
from mesh.runfile import RunFile
from mesh.services import error_value
from mesh.store import StoreService
from mesh.tasks import helpers
from mesh.version import version
from transport import (
    CborValue,
    Endpoint,
    EndpointConfig,
    EndpointEvent,
    Incoming,
    format_address,
)
from transport.errors import ProtocolError
from transport.process.sharing import listening, share

__all__ = ["Daemon"]

LOCK_SECONDS = 0.5
"""How long to ask for the lock: a command that looks whether we run holds it for an instant."""

FORMER_SECONDS = 1.0
"""How long the daemon of a left-over run file has to answer; a live one does at once."""

_LOCK_POLL = 0.02

_log = logging.getLogger("quicmesh.node")


class Daemon:
    """A machine's node and what makes it a daemon. One runs in a home at a time.

    Args:
        home: the state directory; made, with a key, if it is missing.
        config: addresses, limits, times.
        shared_memory: as in `mesh.Node.peer`.
        devices: hardware to offer to peers with the scope ``device``, as torch names it.
    """

    def __init__(
        self,
        home: Home,
        config: EndpointConfig | None = None,
        *,
        shared_memory: bool = True,
        devices: Sequence[str] = (),
    ) -> None:
        self.home = home
        self.devices = tuple(devices)
        self.node = Node.peer(home, config=config, shared_memory=shared_memory)
        self._stop = anyio.Event()

    @contextlib.asynccontextmanager
    async def running(
        self,
        *,
        observe: Callable[[EndpointEvent], None],
        refused: Callable[[NodeId, MeshError], None],
    ) -> AsyncIterator[Node]:
        """Run during the block, which begins once peers and the command can reach the node.

        Args:
            observe: called in the event loop when a peer joins, leaves or is refused.
            refused: called in the event loop when a known machine refuses this one.

        Raises:
            IdentityInUse: a daemon runs in this home already.
            DeviceError: a device to offer is not here.
            AddressInUse, AddressError: the address to listen on can't be had.
            HomeError: the run file can't be written, or the peers book can't be read.
        """
        async with contextlib.AsyncExitStack() as stack:
            self.home.peers.entries()  # a broken book is said now, not at its first use
            await self._take_identity()
            stack.callback(self.home.daemon_lock.release)
            node = await stack.enter_async_context(self.node)
            node.endpoint.register_call("node.stop", self._take_stop, scope=ADMIN)
            node.endpoint.register_call("node.join", self._take_join, scope=ADMIN)
            StoreService(node.endpoint)  # where the ranks of jobs meet that name this machine
            node.endpoint.subscribe(observe)
            if self.devices:
                from mesh.device import DeviceService

                service = DeviceService(
                    node.endpoint,
                    self.devices,
                    store=node.store,
                    shared_memory=node.shared_memory,
                )
                node.offer(await stack.enter_async_context(service))
            listener = stack.enter_context(_shared_endpoint(self.home.endpoint_path))
            stack.enter_context(_run_file(self.home.run_path, node))
            tasks = await stack.enter_async_context(helpers())
            if listener is not None:
                tasks.start_soon(share, listener)
            tasks.start_soon(keep_links, node, self.home.peers, refused)
            yield node

    def stop(self) -> None:
        """Ask the daemon to stop; `stopped` returns."""
        self._stop.set()

    async def stopped(self) -> None:
        """Wait until somebody asks the daemon to stop."""
        await self._stop.wait()

    async def _take_identity(self) -> None:
        lock = self.home.daemon_lock
        deadline = anyio.current_time() + LOCK_SECONDS
        while not lock.acquire():
            if anyio.current_time() >= deadline:
                raise self._in_use(RunFile.load(self.home.run_path))
            await anyio.sleep(_LOCK_POLL)
        try:
            await self._check_former()
        except BaseException:
            lock.release()
            raise

    async def _check_former(self) -> None:
        # The lock lies in this home; in a copy of one the run file tells of the daemon it was
        # copied from, which is this very node if it still answers.
        former = RunFile.load(self.home.run_path)
        if former is None:
            return
        try:
            async with control_at(self.home, former, timeout=FORMER_SECONDS):
                pass
        except MeshError:
            return
        raise self._in_use(former)

    def _in_use(self, running: RunFile | None) -> IdentityInUse:
        where = "another address" if running is None else format_address(running.control[0])
        process = "" if running is None else f" by process {running.pid}"
        return IdentityInUse(
            "start of the daemon",
            peer=self.node.node_id.short,
            why=f"identity in use at {where}{process}",
            fix="Stop that one (mesh down), or start this one in a home with a key of its own "
            "(mesh --home DIR up).",
        )

    async def _take_stop(self, request: Incoming) -> CborValue:
        self.stop()
        return {"pid": os.getpid()}

    async def _take_join(self, request: Incoming) -> CborValue:
        match request.value:
            case {"ticket": str(text), "petname": (str() | None) as petname}:
                pass
            case _:
                raise ProtocolError("node.join", why="its parameters are malformed")
        try:
            joined = await join(self.node, Ticket.decode(text), petname)
        except MeshError as error:
            return {"error": error_value(error)}
        return joined.as_message()


@contextlib.contextmanager
def _shared_endpoint(path: Path) -> Iterator[socket.socket | None]:
    """Listen for programs that would share an endpoint process; None where there are none."""
    if sys.platform != "linux":
        yield None
        return
    with contextlib.ExitStack() as stack:
        listener = None
        try:
            listener = stack.enter_context(listening(path))
        except OSError as error:
            _log.warning("programs can't share an endpoint process at %s: %s", path, error)
        yield listener


@contextlib.contextmanager
def _run_file(path: Path, node: Node) -> Iterator[None]:
    endpoint = node.endpoint
    try:
        RunFile(
            node_id=node.node_id,
            pid=os.getpid(),
            boot=endpoint.boot.hex(),
            started=node.started,
            version=version(),
            control=_local_addresses(endpoint),
            addresses=endpoint.addresses,
        ).save(path)
    except OSError as error:
        raise HomeError(f"run file {path}", why=error.strerror or str(error)) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _local_addresses(endpoint: Endpoint) -> tuple[SocketAddress, ...]:
    """Return where this machine itself reaches its endpoint."""
    host, port = endpoint.bound
    literal = ipaddress.ip_address(host.partition("%")[0])
    if not literal.is_unspecified:
        return (endpoint.bound,)
    hosts = ("127.0.0.1", "::1") if literal.version == 6 else ("127.0.0.1",)
    return tuple((each, port) for each in hosts)
