"""An executor's groups: formed as its node orders, and their operations in the order of the stream.

Operations of a group run one after the other on a thread of their own, while the session's others
go on. An operation *starts* where it is called: what it works on is copied, so that whatever comes
after may write to it. It is *taken* where its results are wanted, which waits for it.
"""

from __future__ import annotations

import array
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from anyio.from_thread import start_blocking_portal

from auth import MeshError
from mesh.collective import (
    CollectiveError,
    Operation,
    RankFailed,
    refuse_unless_reducible,
)
from mesh.device.errors import DeviceError
from mesh.device.groups import wire
from mesh.device.groups.exchange import SocketExchange
from mesh.device.groups.working import (
    REDUCTIONS,
    Call,
    Ranks,
    contribution,
    signature,
    work,
)
from mesh.distributed.neighbours import share_memory
from mesh.threads import OpThread
from tensor_bridge import QuotaExceeded
from transport import LimitExceeded, ProtocolError, cbor

__all__ = ["Groups"]

Contribute = Callable[[], Iterable[torch.Tensor]]

MAX_GROUPS = 16
"""Groups of a session at a time."""

MAX_STARTED = 4096
"""Operations of a group that were started and not taken."""

FORMING_SECONDS = 30.0
"""For members to find out whether they share memory. It takes milliseconds once all are connected,
which may be a while after this one is."""

CLOSE_SECONDS = 2.0
"""For what was posted to be written when a group is left."""

_log = logging.getLogger("quicmesh.device")


class _Started:
    """An operation from its start until its results are taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.done = threading.Event()
        self.results: Sequence[torch.Tensor] = ()
        self.error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        """It is over."""
        self.error = error
        self.done.set()


class _Group:
    """One group.

    Args:
        order: what the node has said of it.
        exchange: with the other members; None if there are none.
    """

    def __init__(self, order: wire.Form, exchange: SocketExchange | None) -> None:
        self.ranks = Ranks(order.ranks, order.index)
        self.exchange = exchange
        self.timeout = order.timeout
        self.next = 0
        """Number of the operation that starts next."""
        self.started: dict[int, _Started] = {}
        self.thread = OpThread(f"mesh-group-{order.number}")

    def close(self) -> None:
        """Leave it."""
        if self.exchange is not None:
            self.exchange.close(CLOSE_SECONDS)
        self.thread.close(CLOSE_SECONDS)
        for each in list(self.started.values()):
            each.end(each.error or _closed())


class Groups:
    """The groups of one session.

    Args:
        link: to the node: orders come, news go.
        idle: entered while an operation waits for other members, which takes their time and not the
            session's.
        max_bytes: of what was started and not taken.

    Attributes:
        nbytes: of what was started and not taken.
    """

    def __init__(
        self,
        link: socket.socket,
        idle: Callable[[], AbstractContextManager[None]],
        max_bytes: int,
    ) -> None:
        self.nbytes = 0
        self._link = link
        self._idle = idle
        self._max_bytes = max_bytes
        self._groups: dict[int, _Group | None] = {}
        """None for those that are being formed."""
        self._lock = threading.Lock()
        self._saying = threading.Lock()

    # On a thread of its own.

    def serve(self) -> None:
        """Follow the node's orders until it closes its end."""
        try:
            while True:
                head, descriptors = _receive_head(self._link)
                sockets = [socket.socket(fileno=each) for each in descriptors]
                body = _receive(self._link, head)
                match wire.decode_order(cbor.decode(bytes(body), max_size=wire.MAX_FRAME)):
                    case wire.Form() as order:
                        # Of two that are formed at once, none is to wait for the other.
                        work = partial(self._form, order, sockets)
                        threading.Thread(target=work, name="mesh-forming", daemon=True).start()
                    case wire.Leave(number):
                        self._leave(number)
        except (EOFError, OSError):
            return  # the session is over
        except MeshError:
            _log.exception("an order about a group of devices is none")

    def _form(self, order: wire.Form, sockets: list[socket.socket]) -> None:
        others = [each for each in range(len(order.nodes)) if each != order.index]
        exchange = None
        name = order.group.hex()[:8]
        labels = [f"peer {node.short}" for node in order.nodes]
        if len(sockets) != len(others) or not self.expect(order.number):
            for each in sockets:
                each.close()
            error = LimitExceeded(
                f"group '{name}'",
                why=f"this session has {len(self._groups)} groups of at most {MAX_GROUPS}",
                fix="Close contexts that are not used any more.",
            )
            self._say(wire.Broken(order.number, error))
            return
        try:
            if others:
                pairs = dict(zip(others, sockets, strict=True))
                exchange = SocketExchange(
                    name, order.index, labels, pairs, partial(self._broken, order.number)
                )
                self._share_memory(order, exchange)
        except (MeshError, OSError) as caught:
            if exchange is not None:
                exchange.close(CLOSE_SECONDS)
            self._leave(order.number)
            if not isinstance(caught, CollectiveError):  # which was told when it broke the group
                failed = caught if isinstance(caught, MeshError) else _failed(caught)
                self._say(wire.Broken(order.number, failed))
            return
        self.add(order, exchange)
        is_shared = exchange is not None and (exchange.board or exchange.hosts) is not None
        self._say(wire.Formed(order.number, is_shared))

    def add(self, order: wire.Form, exchange: SocketExchange | None) -> None:
        """Be in a group that is formed."""
        group = _Group(order, exchange)
        with self._lock:
            is_wanted = order.number in self._groups
            if is_wanted:
                self._groups[order.number] = group
        if not is_wanted:  # it was left meanwhile
            group.close()

    def expect(self, number: int) -> bool:
        """Take note that a group is being formed; return whether there may be one more."""
        with self._lock:
            if number in self._groups or len(self._groups) >= MAX_GROUPS:
                return False
            self._groups[number] = None
            return True

    def _share_memory(self, order: wire.Form, exchange: SocketExchange) -> None:
        with start_blocking_portal() as portal:
            hosts = share_memory(
                portal,
                exchange,
                order.nodes,
                order.group,
                is_off=not order.shared,
                deadline=time.monotonic() + FORMING_SECONDS,
            )
        if hosts is not None and len(hosts.leaders) > 1:
            exchange.hosts = hosts
        elif hosts is not None:
            exchange.board = hosts.board

    def _leave(self, number: int) -> None:
        with self._lock:
            group = self._groups.pop(number, None)
        if group is not None:
            group.close()
            self._count(-sum(each.nbytes for each in list(group.started.values())))

    def _broken(self, number: int, error: CollectiveError) -> None:
        self._say(wire.Broken(number, error, error.ranks))

    def _say(self, news: wire.Formed | wire.Broken) -> None:
        try:
            with self._saying:
                self._link.sendall(wire.frame(news.encode()))
        except OSError:
            pass  # the session is over

    # On the session's thread.

    def start(self, number: int, sequence: int, call: Call, contribute: Contribute) -> None:
        """Start an operation.

        Args:
            number: of the group.
            sequence: of the operation, which every member counts.
            call: what it is.
            contribute: returns what this member's ranks contribute.

        Raises:
            ProtocolError: there is no such group or operation, or it is not the next one.
        """
        group = self._find(number)
        if sequence != group.next:
            raise _bad(f"operation {sequence} of a group whose next one is {group.next}")
        if len(group.started) >= MAX_STARTED:
            raise LimitExceeded(
                "an operation of a group of devices",
                why=f"{MAX_STARTED} were started, and their results were not taken",
                fix="Call resolve() on what operations return.",
            )
        group.next += 1
        started = group.started[sequence] = _Started(0)
        try:
            parts = self._parts(group, call, started, contribute)
        except Exception as error:  # whatever it is, the others wait for this member
            started.end(error)
            if group.exchange is not None:
                group.exchange.fail(_unable(group.exchange, call, error))
            return
        deadline = time.monotonic() + group.timeout
        try:
            group.thread.submit(lambda: self._run(group, sequence, call, started, parts, deadline))
        except RuntimeError:
            started.end(_closed())

    def take(
        self, number: int, sequence: int, nbytes: int, *, waits: bool
    ) -> Sequence[torch.Tensor]:
        """Return what an operation has made.

        Args:
            number: of the group.
            sequence: of the operation.
            nbytes: that the results are expected to have.
            waits: for its end; or else it has to be over.

        Raises:
            ProtocolError: it was not started, or its results were taken.
            CollectiveError, DeviceError: it failed, as did the group.
        """
        group = self._find(number)
        started = group.started.pop(sequence, None)
        if started is None:
            raise _bad(f"operation {sequence} of a group was not started, or was taken before")
        self._count(-started.nbytes)
        if not started.done.is_set():
            if not waits:
                raise DeviceError(
                    "an operation of a group of devices",
                    why="it was assumed to be resolved, and is not over",
                    fix="Use resolve(), or order this after what it depends on.",
                )
            with self._idle():
                # Its own deadline comes first; it may be queued behind others with theirs.
                started.done.wait()
        if started.error is not None:
            raise started.error
        if sum(each.numel() * each.dtype.itemsize for each in started.results) != nbytes:
            raise _bad("an operation of a group has made something else than was expected")
        return started.results

    def _parts(
        self, group: _Group, call: Call, started: _Started, contribute: Contribute
    ) -> list[torch.Tensor]:
        tensors = list(contribute())
        first = tensors[0]
        if len(tensors) != len(group.ranks.own) or any(
            each.numel() != first.numel() or each.dtype is not first.dtype for each in tensors
        ):
            raise _bad(f"{len(group.ranks.own)} tensors of one size and type were expected")
        each = first.numel() * first.dtype.itemsize
        started.nbytes = len(tensors) * (each + each * group.ranks.count * _grows(call))
        self._count(started.nbytes)
        if self.nbytes > self._max_bytes:
            raise QuotaExceeded(
                "an operation of a group of devices",
                why=f"it takes {started.nbytes} bytes, and what was started and not taken takes "
                f"{self.nbytes} of {self._max_bytes}",
                fix="Call resolve() on what operations return, or ask for a larger quota.",
            )
        if call.op:
            refuse_unless_reducible(first.dtype, REDUCTIONS[call.op])
        if call.kind == "reduce_scatter" and first.numel() % group.ranks.count:
            raise _bad(f"{first.numel()} elements don't divide among {group.ranks.count} ranks")
        return list(map(contribution, tensors))

    def _run(
        self,
        group: _Group,
        sequence: int,
        call: Call,
        started: _Started,
        parts: list[torch.Tensor],
        deadline: float,
    ) -> None:
        try:
            with torch.inference_mode():
                if group.exchange is None:
                    started.results = work(call, group.ranks, None, parts)
                else:
                    called = signature(call, parts[0])
                    with Operation(group.exchange, called, sequence, deadline) as operation:
                        started.results = work(call, group.ranks, operation, parts)
        except Exception as error:  # it belongs to whoever takes the results
            started.end(error)
        else:
            started.end()

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes

    def _find(self, number: int) -> _Group:
        with self._lock:
            group = self._groups.get(number)
        if group is None:
            raise DeviceError(
                "an operation of a group of devices",
                why="this session is not in the group any more",
                fix="Resolve what operations return before the context is closed.",
            )
        return group


def _grows(call: Call) -> int:
    return int(call.kind == "all_gather")


def _unable(exchange: SocketExchange, call: Call, error: Exception) -> RankFailed:
    label = exchange.label(exchange.rank)
    return RankFailed(
        f"{call.kind} of group '{exchange.group}'",
        ranks=(exchange.rank,),
        why=f"{label} has nothing to contribute: {error}",
    )


def _closed() -> DeviceError:
    return DeviceError(
        "an operation of a group of devices",
        why="the group was left",
        fix="Resolve what it returns before the context is closed.",
    )


def _failed(error: OSError) -> DeviceError:
    why = error.strerror or str(error) or os.strerror(error.errno or 0)
    return DeviceError("forming of a group of devices", why=why)


def _bad(why: str) -> ProtocolError:
    return ProtocolError("an operation of a group of devices", why=why)


_DESCRIPTOR = array.array("i").itemsize


def _receive_head(link: socket.socket) -> tuple[int, list[int]]:
    """Return the length of the next frame, and the descriptors that came beside it."""
    data, descriptors, _, _ = socket.recv_fds(link, wire.LENGTH.size, wire.MAX_MEMBERS)
    if not data:
        raise EOFError
    if len(data) < wire.LENGTH.size:
        data += bytes(_receive(link, wire.LENGTH.size - len(data)))
    (length,) = wire.LENGTH.unpack(data)
    if length > wire.MAX_FRAME:
        raise ProtocolError("an order about a group of devices", why="it is too long")
    return length, list(descriptors)


def _receive(link: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = link.recv_into(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data
