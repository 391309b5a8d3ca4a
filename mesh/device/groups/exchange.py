"""Messages among the executors of a group, over a socket for each other one.

An executor has no network: what it writes to such a socket its node carries to the other node, and
that to the other executor, in order and as it is. Each message is its header, as ranks of
``torch.distributed`` write it (`mesh.distributed.wire`), and its bytes, which are received where
they belong. A frame that is a map is the last: why the sender breaks the group, or that it leaves.

Each socket has a thread that reads and one that writes. Operations of a group run one after the
other on every member, so that messages come in the order in which they are asked for.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from auth import MeshError
from mesh.collective import CollectiveError, Header, Hosts, RankFailed, RankLeft, RankLost, Transfer
from mesh.collective.exchange import COLLECTIVE, Channel, Check
from mesh.collective.host import Board
from mesh.distributed import wire
from transport import CborValue, ProtocolError, cbor

__all__ = ["SocketExchange"]

TOGETHER_SECONDS = 0.25
"""Who is gone within this time of another is told of together with it."""

END_SECONDS = 1.0
"""For a thread whose socket is shut down to notice."""

MAX_REPORT = 4096
"""Bytes of a header, and of a report of why a group is broken."""

_LENGTH = struct.Struct(">I")
_LEAVES: CborValue = {"left": True}
_FIX = "Close the context, and make one without what is lost."


class SocketExchange:
    """A `mesh.collective.exchange.Messages` of one executor. It owns the sockets.

    Args:
        group: name of the group, for messages.
        rank: which member this is.
        labels: how to name each member to people.
        sockets: to each other member.
        broken: called once, on any thread, when the group breaks.

    Attributes:
        failure: what broke the group, or None while it is whole.
    """

    def __init__(
        self,
        group: str,
        rank: int,
        labels: Sequence[str],
        sockets: Mapping[int, socket.socket],
        broken: Callable[[CollectiveError], None],
    ) -> None:
        self.group = group
        self.rank = rank
        self.size = len(labels)
        self.failure: CollectiveError | None = None
        self.board: Board | None = None
        self.hosts: Hosts | None = None
        self._labels = tuple(labels)
        self._broken = broken
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._failed = threading.Event()
        self._pairs = {peer: _Pair(self, peer, sock) for peer, sock in sockets.items()}

    def label(self, rank: int) -> str:
        """Return how to name a member to people."""
        return self._labels[rank]

    def post_send(
        self,
        peer: int,
        channel: Channel,
        header: Header,
        payload: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """See `mesh.collective.exchange.Messages.post_send`."""
        transfer = Transfer(peer)
        self._pairs[peer].send(header, payload, transfer)
        return transfer

    def post_receive(
        self,
        peer: int,
        channel: Channel,
        check: Check,
        into: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """See `mesh.collective.exchange.Messages.post_receive`."""
        transfer = Transfer(peer)
        self._pairs[peer].receive(check, into, transfer)
        return transfer

    def fail(self, error: CollectiveError) -> None:
        """Break the group: fail all transfers, now and later, and tell the other members why."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self._failed.set()
        for pair in self._pairs.values():
            pair.end(error, wire.failure_value(error))
        board = self._shared
        if board is not None:
            board.wake()
        self._broken(error)

    def close(self, timeout: float) -> None:
        """Leave the group: send what was posted, within `timeout` seconds, and say goodbye."""
        board = self._shared
        if board is not None:
            board.close(is_broken=self.failure is not None)
        error = RankLeft(
            f"group '{self.group}'", ranks=(self.rank,), why="this member has left the group"
        )
        with self._lock:
            self.failure = self.failure or error
        self._failed.set()
        for pair in self._pairs.values():
            pair.end(error, _LEAVES)
        deadline = time.monotonic() + timeout
        for pair in self._pairs.values():
            pair.close(deadline)

    @property
    def _shared(self) -> Board | None:
        return self.hosts.board if self.hosts is not None else self.board

    # Called by pairs, on their threads.

    def lost(self, peer: int) -> None:
        """Take note that a member is gone without a word."""
        with self._lock:
            is_first = not self._lost
            self._lost.add(peer)
        if not is_first or self._failed.wait(TOGETHER_SECONDS):
            self._failed.wait()  # the first one's thread says it for all
            return
        ranks = tuple(sorted(self._lost))
        names = ", ".join(map(self.label, ranks))
        verb = "is" if len(ranks) == 1 else "are"
        self.fail(
            RankLost(
                f"group '{self.group}'",
                ranks=ranks,
                why=f"{names} {verb} lost: the process has ended, or the connection broke",
                fix=_FIX,
            )
        )

    def left(self, peer: int) -> CollectiveError:
        """Return what to say to who waits for a member that has left."""
        return RankLeft(
            f"group '{self.group}'",
            ranks=(peer,),
            why=f"{self.label(peer)} is gone: it left the group",
            fix=_FIX,
        )


class _Pair:
    """The way to one other member."""

    def __init__(self, owner: SocketExchange, peer: int, sock: socket.socket) -> None:
        self._owner = owner
        self._peer = peer
        self._sock = sock
        self._changed = threading.Condition()
        self._sends: deque[tuple[bytes, memoryview, Transfer]] = deque()
        self._receives: deque[tuple[Check, memoryview, Transfer]] = deque()
        self._gone: CollectiveError | None = None
        """Why nothing comes from there any more, or goes there."""
        self._open: list[Transfer] = []
        """What is being read and written just now."""
        self._farewell: bytes | None = None
        self._threads = [
            threading.Thread(target=work, name=f"mesh-{name}-{peer}", daemon=True)
            for name, work in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, header: Header, payload: memoryview, transfer: Transfer) -> None:
        """Queue a message."""
        head = wire.encode_message(COLLECTIVE, False, header)
        with self._changed:
            if self._gone is None:
                self._sends.append((head, payload, transfer))
                self._changed.notify_all()
                return
        transfer.finish(self._gone)

    def receive(self, check: Check, into: memoryview, transfer: Transfer) -> None:
        """Queue a place for a message."""
        with self._changed:
            if self._gone is None:
                self._receives.append((check, into, transfer))
                self._changed.notify_all()
                return
        transfer.finish(self._gone)

    def end(self, error: CollectiveError, farewell: CborValue) -> None:
        """Fail what is open; say `farewell` after the message that is being written, and last."""
        with self._changed:
            if self._farewell is None:
                body = cbor.encode(farewell, max_size=MAX_REPORT)
                self._farewell = _LENGTH.pack(len(body)) + body
        self._abandon(error)

    def close(self, deadline: float) -> None:
        """End the threads, and close the socket. What is not written by `deadline` is not."""
        self._threads[1].join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(END_SECONDS)
        self._sock.close()

    def _abandon(self, error: CollectiveError) -> None:
        with self._changed:
            if self._gone is None:
                self._gone = error
            open_ones = [each[2] for each in (*self._sends, *self._receives)] + self._open
            self._sends.clear()
            self._receives.clear()
            self._changed.notify_all()
        for transfer in open_ones:
            transfer.finish(error)

    # Writing.

    def _write(self) -> None:
        try:
            while (send := self._next_send()) is not None:
                head, payload, transfer = send
                self._sock.sendall(head)
                self._sock.sendall(payload)
                self._done(transfer)
                del send, head, payload, transfer  # and the memory that they keep alive
            if self._farewell is not None:
                self._sock.sendall(self._farewell)
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the reader notices, and knows whether there was a farewell before

    def _next_send(self) -> tuple[bytes, memoryview, Transfer] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._sends or self._gone is not None)
            if not self._sends:
                return None
            send = self._sends.popleft()
            self._open.append(send[2])
            return send

    def _done(self, transfer: Transfer) -> None:
        with self._changed:
            self._open.remove(transfer)
        transfer.finish()

    # Reading.

    def _read(self) -> None:
        try:
            while self._take_frame():
                pass
        except (EOFError, OSError):
            if self._gone is None:
                self._owner.lost(self._peer)
        except MeshError as error:
            why = f"{self._owner.label(self._peer)} breaks the protocol: {error.why or error}"
            group = f"group '{self._owner.group}'"
            self._owner.fail(RankFailed(group, ranks=(self._peer,), why=why, fix=_FIX))

    def _take_frame(self) -> bool:
        (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
        if length > MAX_REPORT:
            raise ProtocolError("a message of a group", why=f"a header of {length} bytes")
        value = cbor.decode(bytes(self._receive(length)), max_size=MAX_REPORT)
        if isinstance(value, dict):
            self._take_farewell(value)
            return False
        _, _, header = wire.parse_message(value)
        return self._take_message(header)

    def _take_farewell(self, value: dict[str, CborValue]) -> None:
        owner = self._owner
        if value == _LEAVES:
            self._abandon(owner.left(self._peer))
        else:
            owner.fail(wire.parse_failure(value, f"group '{owner.group}'", owner.size))

    def _take_message(self, header: Header) -> bool:
        """Receive a message once its place is known; return whether there may be another one."""
        with self._changed:
            self._changed.wait_for(lambda: self._receives or self._gone is not None)
            if not self._receives:
                return False
            check, into, transfer = self._receives.popleft()
            self._open.append(transfer)
        try:
            check(header)
        except CollectiveError as error:
            self._owner.fail(error)
            return False
        if header.nbytes != into.nbytes:
            raise ProtocolError("a message of a group", why="it has another length than agreed")
        while into:
            got = self._sock.recv_into(into)
            if not got:
                raise EOFError
            into = into[got:]
        self._done(transfer)
        return True

    def _receive(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._sock.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return data
