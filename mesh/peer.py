"""Another node as a program sees it, and a tensor that lies there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from auth import MeshError, NodeId
from transport import CborValue, Connection, ConnectionClosed, PeerLost
from transport.deadlines import seconds_of

if TYPE_CHECKING:
    import torch

    import tensor_bridge
    from mesh.node import Node
    from mesh.rpc import RemoteIterator, RRef
    from tensor_bridge import ProgressCallback, TensorClient

__all__ = ["Peer", "TensorRef"]

T = TypeVar("T")

MOVE_TIMEOUT = 600.0
"""Default limit in seconds for a whole move. A link that stalls ends it far sooner."""


class Peer:
    """One other node. Made by `Node.connect`; good for as long as the node is open.

    Everything that uses a node shares its one connection to a peer. When that broke, the next
    operation dials again, at the addresses that are known by then.
    """

    def __init__(self, node: Node, node_id: NodeId) -> None:
        self._node = node
        self.node_id = node_id

    def __repr__(self) -> str:
        return f"<mesh.Peer {self.label}>"

    @property
    def label(self) -> str:
        """The name for messages: the petname with the short id, or the short id alone."""
        return self._node.label(self.node_id)

    async def connection(self, *, timeout: float | None = None) -> Connection:
        """Return the open connection to the peer, for an application's own streams and calls.

        Raises:
            Unreachable, AccessDenied, UnknownPeer: as `Node.connect`.
        """
        return await self._node.dial(self.node_id, timeout=timeout)

    async def ping(self, *, timeout: float = 3.0) -> float:
        """Return the round trip to the peer and back in seconds.

        Raises:
            DeadlineExceeded: no answer within `timeout`, over a connection that still stands.
            Unreachable, PeerLost, ConnectionClosed, AccessDenied: there is no connection.
        """
        return await self._ask(timeout, lambda connection, left: connection.ping(left))

    async def info(self, *, timeout: float = 10.0) -> dict[str, CborValue]:
        """Return what the peer says of itself: version, boot, host, uptime, devices, counts."""
        reply = await self._ask(
            timeout, lambda connection, left: connection.call("node.info", None, timeout=left)
        )
        return reply if isinstance(reply, dict) else {}

    async def put(
        self,
        tensor: torch.Tensor,
        name: str | None = None,
        *,
        shareable: bool = False,
        timeout: float = MOVE_TIMEOUT,
        progress: ProgressCallback | None = None,
    ) -> TensorRef:
        """Copy a tensor into the peer's memory.

        Args:
            tensor: any dtype, shape and strides; a view moves only its own elements.
            name: a label for people, shown in listings; at most 128 characters.
            shareable: have it lie, if the peer is on this host, in memory that ``get(copy=False)``
                maps instead of copying it. This put takes a few times longer for it.
            timeout: seconds for the whole move, broken links and retries included.
            progress: called as bytes are acknowledged.

        Raises:
            QuotaExceeded: the peer has no room for it.
            UnsupportedTensor: its elements are not plain bytes in memory.
            DeadlineExceeded, AccessDenied: it did not arrive.
        """
        with self._telling():
            client = await self.tensors()
            ref = await client.put(
                tensor, name=name, shareable=shareable, timeout=timeout, progress=progress
            )
        return TensorRef(self, ref)

    async def create(
        self,
        fill: str,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        name: str | None = None,
        timeout: float = MOVE_TIMEOUT,
    ) -> TensorRef:
        """Have the peer make a tensor in its own memory; no payload travels.

        Args:
            fill: ``"zeros"``, ``"ones"``, ``"rand"``, ``"randn"`` or ``"arange"``.
            shape: sizes in elements.
            dtype: by default float32.
            seed: where the random fills start.
            name: as in `put`.
            timeout: seconds for all of it.

        Raises:
            QuotaExceeded: the peer has no room for it.
            UnsupportedTensor: torch has no such fill, or not for `dtype`, or a size is none.
            AccessDenied: the peer does not allow it.
        """
        options = {} if dtype is None else {"dtype": dtype}
        with self._telling():
            client = await self.tensors()
            ref = await client.create(fill, shape, seed=seed, name=name, timeout=timeout, **options)
        return TensorRef(self, ref)

    async def tensors(self) -> TensorClient:
        """Return what moves tensors to and from the peer, for more than `put` and `TensorRef` do.

        Raises:
            Unreachable, AccessDenied, UnknownPeer: as `Node.connect`.
        """
        from tensor_bridge import TensorClient  # imports torch

        connection = await self.connection()
        return TensorClient(connection, reconnect=self.connection, lanes=self._node.lanes)

    async def call(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function that the peer exposes, or one of torch's operators; see `mesh.rpc`.

        Args:
            function: itself, or its name: ``"module.function"``.
            args, kwargs: what to call it with.
            timeout: seconds for all of it; 0 for no limit.

        Raises:
            Exception: what the function raised, and what `mesh.rpc.Agent.call` raises.
        """
        agent = await self._node.rpc()
        with self._telling():
            return await agent.call(self.node_id, function, args, kwargs, timeout=timeout)

    async def remote(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> RRef[Any]:
        """Call a function, let the result stay at the peer, and return a reference to it.

        Args:
            function, args, kwargs, timeout: as `call`.

        Raises:
            MeshError: as `mesh.rpc.Agent.remote`.
        """
        agent = await self._node.rpc()
        with self._telling():
            return await agent.remote(self.node_id, function, args, kwargs, timeout=timeout)

    def stream(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> RemoteIterator:
        """Call a generator function that the peer exposes, and return its items as they come.

        Use it as ``async for line in peer.stream("app.tail", "log")``.

        Args:
            function: itself, or its name; async or not.
            args, kwargs: what to call it with.
            timeout: seconds for each item; 0 for no limit.
        """
        agent = self._node.begin_rpc()
        return agent.stream(self.node_id, function, args, kwargs, timeout=timeout)

    async def close(self) -> None:
        """Close the connection, once what was sent is acknowledged. A later use dials again."""
        connection = self._node.endpoint.connection(self.node_id)
        if connection is not None:
            await connection.close(reason="left")

    async def _ask(
        self, timeout: float, question: Callable[[Connection, float], Awaitable[T]]
    ) -> T:
        """Put a question that may be put twice: if the link breaks under it, over a new one."""
        deadline = anyio.current_time() + seconds_of(timeout)
        with self._telling():
            connection = await self.connection(timeout=timeout)
            try:
                return await question(connection, max(0.0, deadline - anyio.current_time()))
            except (PeerLost, ConnectionClosed):
                # It broke without a word, as when the peer was started anew meanwhile.
                left = deadline - anyio.current_time()
                if left <= 0:
                    raise
                connection = await self.connection(timeout=left)
                return await question(connection, max(0.0, deadline - anyio.current_time()))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Have errors of the block name peers as people do, and count from its beginning."""
        began = anyio.current_time()
        try:
            yield
        except MeshError as error:
            if error.after is not None:
                error.after = anyio.current_time() - began
            self._node.directory.name_in(error)
            raise


class TensorRef:
    """A tensor in a peer's memory, which keeps it until `delete` or until this node leaves."""

    def __init__(self, peer: Peer, ref: tensor_bridge.TensorRef) -> None:
        self.peer = peer
        self.ref = ref

    def __repr__(self) -> str:
        return f"<mesh.TensorRef {self.ref} at {self.peer.label}>"

    async def get(
        self,
        *,
        copy: bool = True,
        timeout: float = MOVE_TIMEOUT,
        progress: ProgressCallback | None = None,
    ) -> torch.Tensor:
        """Fetch a copy of the tensor.

        Args:
            copy: without, a tensor that was put as ``shareable`` is mapped on the peer's own host,
                in about a millisecond at any size. Each side still has its own: what one writes,
                the other does not see. The storage can't be resized.
            timeout: seconds for the whole move, broken links and retries included.
            progress: called as bytes arrive.

        Raises:
            NoSuchTensor: it was deleted.
            TensorChanged: it was written to meanwhile.
            DeadlineExceeded, AccessDenied: it did not arrive.
        """
        with self.peer._telling():
            client = await self.peer.tensors()
            return await client.get(self.ref, copy=copy, timeout=timeout, progress=progress)

    async def copy_to(
        self,
        target: Peer,
        *,
        timeout: float = MOVE_TIMEOUT,
        progress: ProgressCallback | None = None,
    ) -> TensorRef:
        """Let `target` fetch the tensor straight from where it lies; no byte of it passes here.

        The owner mints a capability for the target alone and for this one read, and the target
        fetches only if its own authorizer admits both this order and that source.

        Raises:
            AccessDenied, TokenRefused: one of the two did not agree; ``peer`` says which.
            NoSuchTensor, TensorChanged, QuotaExceeded, DeadlineExceeded: as `get`.
        """
        with self.peer._telling():
            source, destination = await self.peer.tensors(), await target.tensors()
            ref = await source.copy_to(self.ref, destination, timeout=timeout, progress=progress)
        return TensorRef(target, ref)

    async def delete(self, *, timeout: float = 30.0) -> None:
        """Have the peer let go of the tensor.

        Raises:
            NoSuchTensor: it was gone already.
        """
        with self.peer._telling():
            client = await self.peer.tensors()
            await client.delete(self.ref, timeout=timeout)
