"""The same node for threads: scripts, trainers, notebooks.

The names are those of `mesh.Node`, `mesh.Peer` and `mesh.TensorRef`, without ``await``::

    with mesh.blocking.Node.client(ticket) as node:
        ref = node.connect(ticket).put(tensor)

Each node has an event loop of its own in a thread of its own, so that it works as well where a loop
runs already, as in Jupyter, and may be used by many threads at once. Ctrl+C cancels the operation
that is waited for. A program that ends without `Node.close` leaves cleanly and soon all the same.

A process of its own moves a node's packets, so that they do not hold up a program that computes;
on Linux, and if ``EndpointConfig(placement="loop")`` does not leave them to the thread. Programs of
a machine whose daemon runs share one process for that, which the daemon starts, and which ends with
it; ``placement="process"`` asks for one of the node's own there too.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from anyio.from_thread import BlockingPortal

from auth import (
    DEFAULT_SCOPES,
    Authorizer,
    Invite,
    NodeId,
    SecretKey,
    SharedSecret,
    SocketAddress,
    Ticket,
)
from mesh import node as async_node
from mesh import peer as async_peer
from mesh.home import INVITE_LIFETIME, Home
from mesh.loop_thread import LoopThread
from mesh.peer import MOVE_TIMEOUT
from mesh.status import PeerStatus
from transport import CborValue, Endpoint, EndpointConfig
from transport.deadlines import seconds_of

if TYPE_CHECKING:
    import torch

    from mesh.rpc import RemoteIterator, RRef
    from tensor_bridge import ProgressCallback

__all__ = ["Node", "Peer", "TensorRef"]


def _placement(system: str, executable: str | None, *, is_frozen: bool) -> str:
    """Return where packets are moved, unless it is said.

    What is started is the interpreter, anew. A program that has one inside, frozen or embedded, has
    none to start: itself would begin once more.
    """
    is_interpreter = Path(executable or "").name.startswith(("python", "pypy"))
    return "process" if system == "linux" and is_interpreter and not is_frozen else "loop"


PLACEMENT = _placement(
    sys.platform, sys.executable, is_frozen=hasattr(sys, "frozen") or "__compiled__" in globals()
)
"""Where the packets of nodes in threads are moved, unless they are told. A loop that moves them at
full rate takes the interpreter's lock from a training step, which a process does not. To start one
takes some 0.4 s of a processor and 30 MB, for each node: its opening does not wait for that, but
its first connection does, for as long as that takes where processors are short. Where the machine's
daemon runs, its programs share one."""

_Result = TypeVar("_Result")


class Node:
    """A node in a thread of its own. Made by a preset, opened by ``with`` or `open`."""

    def __init__(self, node: async_node.Node, *, backend: str = "asyncio") -> None:
        self._node = node
        self._loop = LoopThread(backend)

    @classmethod
    def peer(
        cls,
        home: Home | str | os.PathLike[str] | None = None,
        *,
        config: EndpointConfig | None = None,
        shared_memory: bool = True,
    ) -> Self:
        """A machine's node; see `mesh.Node.peer`."""
        home = _home(home)
        config = _placed(config, home)
        return cls(async_node.Node.peer(home, config=config, shared_memory=shared_memory))

    @classmethod
    def client(
        cls,
        *tickets: Ticket | str,
        home: Home | str | os.PathLike[str] | None = None,
        key: SecretKey | None = None,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        credential: bytes = b"",
        secret: SharedSecret | None = None,
        config: EndpointConfig | None = None,
        shared_memory: bool = True,
    ) -> Self:
        """A program's node; see `mesh.Node.client`."""
        home = _home(home)
        return cls(
            async_node.Node.client(
                *tickets,
                home=home,
                key=key,
                scopes=scopes,
                credential=credential,
                secret=secret,
                config=_placed(config, home),
                shared_memory=shared_memory,
            )
        )

    @classmethod
    def worker(
        cls,
        home: Home | str | os.PathLike[str] | None = None,
        *,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        config: EndpointConfig | None = None,
        shared_memory: bool = True,
    ) -> Self:
        """A program that peers dial as well; see `mesh.Node.worker`."""
        home = _home(home)
        config = _placed(config, home)
        return cls(
            async_node.Node.worker(home, scopes=scopes, config=config, shared_memory=shared_memory)
        )

    @classmethod
    def embedded(
        cls,
        *,
        key: SecretKey,
        authorizer: Authorizer,
        config: EndpointConfig | None = None,
        tensors: bool = True,
        shared_memory: bool = True,
    ) -> Self:
        """An application's node; see `mesh.Node.embedded`."""
        return cls(
            async_node.Node.embedded(
                key=key,
                authorizer=authorizer,
                config=_placed(config),
                tensors=tensors,
                shared_memory=shared_memory,
            )
        )

    def open(self) -> Self:
        """Open the node; `close` must follow, and does at the latest when the interpreter ends.

        Raises:
            MeshError: as on entering a `mesh.Node`.
        """
        self._loop.open(self._node)
        return self

    def close(self, timeout: float | None = None) -> None:
        """Close every connection with the reason "left", then end the thread. May be repeated.

        Args:
            timeout: seconds after which what is left is cut off; by default as long as the
                endpoint's ``linger`` allows.
        """
        self._loop.close(None if timeout is None else seconds_of(timeout))

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def node(self) -> async_node.Node:
        """The node itself, for async functions that `run` is given."""
        return self._node

    @property
    def endpoint(self) -> Endpoint:
        """The node's endpoint, to be used in the node's own loop only; see `portal`.

        Raises:
            NodeError: the node is not open.
        """
        return self._node.endpoint

    @property
    def portal(self) -> BlockingPortal:
        """The way into the node's loop for other threads, where `run` is too narrow.

        Raises:
            NodeError: the node is not open, or belongs to the process this one was forked from.
        """
        return self._loop.portal

    @property
    def shared_memory(self) -> bool:
        """Whether tensors and collectives may take memory that peers of this host share."""
        return self._node.shared_memory

    @property
    def node_id(self) -> NodeId:
        """Who this node is."""
        return self._node.node_id

    @property
    def addresses(self) -> tuple[SocketAddress, ...]:
        """Where others may reach this node."""
        return self._node.addresses

    def ticket(self, invite: Invite | None = None) -> Ticket:
        """Return how to reach this node; see `mesh.Node.ticket`."""
        return self._node.ticket(invite)

    def invite(
        self,
        petname: str | None = None,
        *,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        lifetime: float = INVITE_LIFETIME,
    ) -> Ticket:
        """Return a ticket that lets one newcomer in, once; see `mesh.Node.invite`."""
        return self._node.invite(petname, scopes=scopes, lifetime=lifetime)

    def label(self, node_id: NodeId) -> str:
        """Return the name of a peer for messages."""
        return self._node.label(node_id)

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return every peer that is known or connected; see `mesh.Node.peers`."""

        async def peers() -> tuple[PeerStatus, ...]:
            return self._node.peers()

        return self.run(peers)

    def connect(self, target: Ticket | NodeId | str, *, timeout: float | None = None) -> Peer:
        """Connect to a peer; see `mesh.Node.connect`."""
        return Peer(self, self.run(partial(self._node.connect, target, timeout=timeout)))

    def run(self, function: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run an async function in the node's loop and return its result.

        That is also how to register handlers: they run in this loop, and must not block it.

        Raises:
            NodeError: the node is not open, or belongs to the process this one was forked from, or
                the caller runs in the node's own loop.
        """
        return self._loop.run(function)


class Peer:
    """One other node; see `mesh.Peer`."""

    def __init__(self, node: Node, peer: async_peer.Peer) -> None:
        self._node = node
        self._peer = peer

    def __repr__(self) -> str:
        return f"<mesh.blocking.Peer {self.label}>"

    @property
    def node_id(self) -> NodeId:
        """Who the peer is."""
        return self._peer.node_id

    @property
    def label(self) -> str:
        """The name for messages."""
        return self._peer.label

    def ping(self, *, timeout: float = 3.0) -> float:
        """Return the round trip in seconds; see `mesh.Peer.ping`."""
        return self._node.run(partial(self._peer.ping, timeout=timeout))

    def info(self, *, timeout: float = 10.0) -> dict[str, CborValue]:
        """Return what the peer says of itself; see `mesh.Peer.info`."""
        return self._node.run(partial(self._peer.info, timeout=timeout))

    def put(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        *,
        shareable: bool = False,
        timeout: float = MOVE_TIMEOUT,
        progress: ProgressCallback | None = None,
    ) -> TensorRef:
        """Copy a tensor into the peer's memory; see `mesh.Peer.put`."""
        put = partial(
            self._peer.put, tensor, name, shareable=shareable, timeout=timeout, progress=progress
        )
        return TensorRef(self._node, self, self._node.run(put))

    def create(
        self,
        fill: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        name: str | None = None,
        timeout: float = MOVE_TIMEOUT,
    ) -> TensorRef:
        """Have the peer make a tensor in its own memory; see `mesh.Peer.create`."""
        create = partial(
            self._peer.create, fill, shape, dtype=dtype, seed=seed, name=name, timeout=timeout
        )
        return TensorRef(self._node, self, self._node.run(create))

    def call(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function that the peer exposes; see `mesh.Peer.call`."""
        return self._node.run(partial(self._peer.call, function, *args, timeout=timeout, **kwargs))

    def remote(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> RRef[Any]:
        """Call a function and let the result stay there; see `mesh.Peer.remote`."""
        return self._node.run(
            partial(self._peer.remote, function, *args, timeout=timeout, **kwargs)
        )

    def stream(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Items:
        """Call a generator function, and iterate over its items; see `mesh.Peer.stream`."""

        async def begin() -> RemoteIterator:
            return self._peer.stream(function, *args, timeout=timeout, **kwargs)

        return Items(self._node, self._node.run(begin))

    def close(self) -> None:
        """Close the connection; see `mesh.Peer.close`."""
        self._node.run(self._peer.close)


class Items:
    """The items of a peer's generator, for ``for``; see `mesh.rpc.RemoteIterator`.

    The generator is closed at the end of ``with``, or by `close`.
    """

    def __init__(self, node: Node, items: RemoteIterator) -> None:
        self._node = node
        self._items = items

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            return self._node.run(self._items.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """Have the generator closed; there are no more items."""
        self._node.run(self._items.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class TensorRef:
    """A tensor in a peer's memory; see `mesh.TensorRef`."""

    def __init__(self, node: Node, peer: Peer, ref: async_peer.TensorRef) -> None:
        self._node = node
        self._ref = ref
        self.peer = peer

    def __repr__(self) -> str:
        return f"<mesh.blocking.TensorRef at {self.peer.label}>"

    def get(
        self,
        *,
        copy: bool = True,
        timeout: float = MOVE_TIMEOUT,
        progress: ProgressCallback | None = None,
    ) -> torch.Tensor:
        """Fetch a copy of the tensor; see `mesh.TensorRef.get`."""
        get = partial(self._ref.get, copy=copy, timeout=timeout, progress=progress)
        return self._node.run(get)

    def copy_to(
        self,
        target: Peer,
        *,
        timeout: float = MOVE_TIMEOUT,
        progress: ProgressCallback | None = None,
    ) -> TensorRef:
        """Let `target` fetch the tensor from where it lies; see `mesh.TensorRef.copy_to`."""
        copy = partial(self._ref.copy_to, target._peer, timeout=timeout, progress=progress)
        return TensorRef(self._node, target, self._node.run(copy))

    def delete(self, *, timeout: float = 30.0) -> None:
        """Free the tensor; see `mesh.TensorRef.delete`."""
        self._node.run(partial(self._ref.delete, timeout=timeout))


def _placed(config: EndpointConfig | None, home: Home | None = None) -> EndpointConfig:
    """Return a configuration that says where packets are moved."""
    config = config or EndpointConfig()
    if config.placement is not None:
        return config
    shared = None
    if home is not None and PLACEMENT == "process" and home.endpoint_path.exists():
        shared = str(home.endpoint_path)
    return dataclasses.replace(config, placement=PLACEMENT, share=config.share or shared)


def _home(home: Home | str | os.PathLike[str] | None) -> Home:
    return home if isinstance(home, Home) else Home(home)
