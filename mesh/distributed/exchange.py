"""The exchange of a group over QUIC: threads post, the node's event loop moves.

Every pair of ranks is connected. Calls from threads are queued and taken over by the loop in one
go; what comes back are `Transfer` objects, on which threads wait without the loop or the GIL.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import anyio
import anyio.abc
from anyio.from_thread import BlockingPortal

from auth import AccessDenied, Grant, MeshError, ServiceRequest, decide
from mesh.collective import (
    CollectiveError,
    CollectiveTimeout,
    GroupAborted,
    Header,
    Hosts,
    RankLost,
    Transfer,
)
from mesh.collective.exchange import Channel, Check
from mesh.collective.host import Board
from mesh.distributed import wire
from mesh.distributed.anysource import AnySource, PostedAny
from mesh.distributed.link import Link, PostedReceive, PostedSend
from mesh.tasks import helpers
from transport import (
    Connection,
    ConnectionClosed,
    ConnectTimeout,
    Endpoint,
    Incoming,
    PeerAddress,
    ProtocolError,
    Unreachable,
)

__all__ = ["QuicExchange"]

COMPACT_ENTRIES = 1024
"""Deadlines kept before those of finished messages are sorted out."""

DIALS_AT_ONCE = 4
"""How many ranks are dialled at a time: all at once, on a host with many ranks, they would keep
each other from answering in time."""

DIAL_TRIES = 3
"""How often a rank is dialled that can't be reached, before the group fails to form."""

LAST_WORD_SECONDS = 0.2
"""Before the end of the time to connect in which a dial ends and says what it has met."""

DELIVERY_SECONDS = 3.0
"""How long a rank that leaves waits for others to take what was sent to them, without a byte
moving: as long as some do, it goes on. A process may send and exit at once."""

PROBE_SECONDS = 1.0
"""How long the other ranks have to answer once one is lost, so that all that are gone are named."""

REPLY_SECONDS = 1.0
"""Beyond the loop's own bound: how much longer a thread waits for the loop's answer."""


class QuicExchange:
    """An `mesh.collective.Exchange` whose ranks are nodes.

    Args:
        portal: into the event loop of the endpoint.
        endpoint: this rank's node.
        service: name of the service, and the scope that members must have.
        group: the group's name, for messages.
        nonce: tells the group from all others.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(
        self,
        portal: BlockingPortal,
        endpoint: Endpoint,
        *,
        service: str,
        group: str,
        nonce: bytes,
        rank: int,
        size: int,
    ) -> None:
        self.group = group
        self.nonce = nonce
        self.rank = rank
        self.size = size
        self.failure: CollectiveError | None = None
        self.board: Board | None = None
        self.hosts: Hosts | None = None
        self._portal = portal
        self._endpoint = endpoint
        self._service = service
        self._members: Sequence[PeerAddress] = ()
        self._links = {peer: Link(self, peer) for peer in range(size) if peer != rank}
        self._any = AnySource(self._links)
        self._lost: dict[int, CollectiveError] = {}
        self._lost_known = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._woken = False
        self._over = False
        self._left = False
        self._lock = threading.Lock()
        self._serial = threading.RLock()
        self._known = anyio.Event()
        self._due: list[tuple[float, int, Transfer]] = []
        self._order = itertools.count()
        self._compact_at = COMPACT_ENTRIES
        self._timer: anyio.CancelScope | None = None
        self._loop_thread = 0

    def label(self, rank: int) -> str:
        """Return how to name `rank` to people."""
        if rank < len(self._members):
            return f"rank {rank} ({self._members[rank].node_id.short})"
        return f"rank {rank}"

    # Called from threads.

    def post_send(
        self,
        peer: int,
        channel: Channel,
        header: Header,
        payload: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """See `mesh.collective.Exchange.post_send`."""
        transfer = Transfer(peer)
        send = PostedSend(channel, header, payload, transfer)
        self._post(partial(self._links[peer].post_send, send), transfer, deadline)
        return transfer

    def post_receive(
        self,
        peer: int,
        channel: Channel,
        check: Check,
        into: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """See `mesh.collective.Exchange.post_receive`."""
        transfer = Transfer(peer)
        receive = PostedReceive(channel, check, into, transfer)
        self._post(partial(self._links[peer].post_receive, receive), transfer, deadline)
        return transfer

    def post_receive_any(
        self,
        channel: Channel,
        check: Callable[[int], Check],
        into: memoryview,
        deadline: float | None = None,
    ) -> Transfer:
        """See `mesh.collective.Exchange.post_receive_any`."""
        transfer = Transfer(-1)
        receive = PostedAny(channel, check, into, transfer)
        self._post(partial(self._any.post, receive), transfer, deadline)
        return transfer

    def fail(self, error: CollectiveError) -> None:
        """Break the group: fail all transfers, now and later, and tell the other ranks why."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        board = self._shared
        if board is not None:
            board.wake()
        self._call(self._spread_failure)

    def close(self, timeout: float) -> None:
        """Leave the group: write what was posted, and say goodbye within `timeout` seconds.

        What was posted is given up after `DELIVERY_SECONDS` in which nothing of it moved.
        """
        with self._lock:
            self._left = True
        self._leave_board()
        if self._over:
            return
        patience = DELIVERY_SECONDS + timeout + REPLY_SECONDS
        with contextlib.suppress(RuntimeError):  # the loop has ended: it leaves by itself
            leaving = self._portal.start_task_soon(self._leave, timeout)
            written = -1
            while written != (written := self._written()):
                with contextlib.suppress(TimeoutError):
                    leaving.result(patience)
                    break

    # Called in the loop.

    async def lost(self, peer: int, error: CollectiveError) -> CollectiveError:
        """Ask the other ranks whether they are there, and return an error that names all lost ones.

        If another rank has told meanwhile what broke the group, that is returned.
        """
        first = not self._lost
        self._lost[peer] = error
        if first and self._tasks is not None:
            self._tasks.start_soon(self._probe_all)
        with anyio.move_on_after(PROBE_SECONDS + REPLY_SECONDS):
            await self._lost_known.wait()
        if self.failure is not None:
            return self.failure
        ranks = tuple(sorted(self._lost))
        why = "; ".join(str(self._lost[rank].why) for rank in ranks)
        return RankLost(error.what, ranks=ranks, why=why, fix=error.fix)

    def unmatched(self, peer: int, channel: Channel) -> None:
        """See `mesh.distributed.link.LinkOwner.unmatched`."""
        self._any.match(peer, channel)

    def departed(self) -> None:
        """See `mesh.distributed.link.LinkOwner.departed`."""
        self._any.departed()

    async def connect(self, members: Sequence[PeerAddress], timeout: float) -> None:
        """Connect with every other rank.

        Ranks dial those above them, and are dialled by those below.

        Args:
            members: who each rank is and where.
            timeout: seconds for all of it.

        Raises:
            CollectiveTimeout: names the ranks that were not connected in time.
            MeshError: a rank can't be reached, refuses this node, or is refused.
        """
        self._members = members
        self._known.set()
        failures: dict[int, MeshError] = {}
        dials = anyio.Semaphore(DIALS_AT_ONCE)
        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as tasks:
                for peer in range(self.rank + 1, self.size):
                    tasks.start_soon(self._dial, peer, timeout, failures, tasks.cancel_scope, dials)
                for link in self._links.values():
                    tasks.start_soon(link.attached.wait)
        for peer, error in failures.items():
            if isinstance(error, ConnectTimeout):
                continue
            if isinstance(error, AccessDenied):
                raise error
            raise RankLost(
                f"forming of group '{self.group}' on rank {self.rank}",
                ranks=(peer,),
                peer=self.label(peer),
                why=str(error),
            ) from error
        missing = tuple(peer for peer, link in self._links.items() if not link.attached.is_set())
        if missing:
            names = ", ".join(map(self.label, missing))
            met = "".join(f"; {failures[peer]}" for peer in missing if peer in failures)
            raise CollectiveTimeout(
                f"forming of group '{self.group}' on rank {self.rank}",
                ranks=missing,
                after=timeout,
                why=f"timed out, and {names} did not connect{met}",
                fix="Lower ranks dial higher ones: can they reach them, and are they admitted?",
            )

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Carry messages until every link has ended."""
        self._loop_thread = threading.get_ident()
        try:
            async with helpers() as tasks:
                self._tasks = tasks
                tasks.start_soon(self._expire)
                async with anyio.create_task_group() as links:
                    for link in self._links.values():
                        links.start_soon(link.run)
                    task_status.started()
        finally:
            with self._lock:
                self._over = True
                self._loop_thread = 0
            self._any.fail(self._ended())
            self._take_calls()
            if self.failure is None and not (self._shared and self._shared.is_deserted):
                # A node was closed, this one or the others': whoever waits for this rank is told.
                self._leave_board(next((link.gone for link in self._links.values()), None))

    def dissolve(self) -> None:
        """Give up a group that could not be formed."""
        self._leave_board()
        self._over = self._left = True
        self._known.set()
        for link in self._links.values():
            link.discard()

    async def accept(self, request: Incoming, rank: int, stream: str) -> None:
        """Take a stream that another rank opened, until the link ends.

        Raises:
            AccessDenied: the peer is not who has that rank.
            ProtocolError: such a stream is there already.
        """
        await self._known.wait()
        known = self._members[: self.rank]
        if not 0 <= rank < len(known) or known[rank].node_id != request.peer.node_id:
            raise AccessDenied(
                f"joining group '{self.group}'",
                peer=request.peer,
                why=f"this node is not the group's rank {rank}",
            )
        link = self._links[rank]
        link.attach(stream, request.stream)
        await request.stream.send_reply(None)
        await link.ended.wait()

    # Inside.

    async def _dial(
        self,
        peer: int,
        timeout: float,
        failures: dict[int, MeshError],
        scope: anyio.CancelScope,
        dials: anyio.Semaphore,
    ) -> None:
        began = anyio.current_time()
        try:
            async with dials:
                deadline = began + timeout - min(timeout / 10, LAST_WORD_SECONDS)
                connection = await self._reach(self._members[peer], deadline)
            await self._check_admitted(connection)
            for kind in ("control", "data"):
                value = wire.request_value(self.nonce, self.rank, kind)
                stream = await connection.open_stream(self._service, value, timeout=timeout)
                await stream.reply()
                self._links[peer].attach(kind, stream)
        except ConnectTimeout as error:
            failures[peer] = error  # others may be missing as well
        except MeshError as error:
            failures[peer] = error
            scope.cancel()

    async def _reach(self, member: PeerAddress, deadline: float) -> Connection:
        """Connect with a rank, in some tries.

        It ran when it told its address, and may be busy with many others' connections.
        """
        for turn in range(DIAL_TRIES):
            try:
                left = max(0.0, deadline - anyio.current_time())
                return await self._endpoint.connect(member, timeout=left)
            except Unreachable:
                if turn == DIAL_TRIES - 1 or anyio.current_time() >= deadline:
                    raise
        raise AssertionError  # the last turn returns or raises

    async def _check_admitted(self, connection: Connection) -> None:
        """Raise unless this node's authorizer admits a member that the store named."""
        request = ServiceRequest(
            connection.peer, self._service, self._service, connection.grant or Grant(frozenset())
        )
        await decide(
            self._endpoint.authorizer, request, timeout=self._endpoint.config.authorizer_timeout
        )

    async def _probe_all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for peer in self._links.keys() - self._lost.keys():
                tasks.start_soon(self._probe, peer)
        self._lost_known.set()

    async def _probe(self, peer: int) -> None:
        try:
            await self._links[peer].probe(PROBE_SECONDS)
        except ConnectionClosed:
            pass  # it has left, which is another matter
        except MeshError as error:
            self._lost.setdefault(
                peer,
                RankLost(
                    f"group '{self.group}'",
                    ranks=(peer,),
                    why=f"{self.label(peer)} is lost: {error.why or error}",
                ),
            )

    def _post(self, post: Callable[[], None], transfer: Transfer, deadline: float | None) -> None:
        has_left = self._left  # now: what was posted before is sent, though the loop comes later

        def run() -> None:
            if self.failure is not None:
                transfer.finish(self.failure)
            elif has_left:
                transfer.finish(self._ended())
            else:
                try:
                    post()
                except ProtocolError as error:
                    transfer.finish(CollectiveError(error.what, why=error.why, fix=error.fix))
                if deadline is not None and not (transfer.done or self._over):
                    self._watch(transfer, deadline)

        self._call(run)

    def _call(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop, or here if the loop has ended."""
        if threading.get_ident() == self._loop_thread:
            call()
            return
        self._calls.append(call)
        if self._over:
            self._take_calls()
        elif not self._woken:
            self._woken = True
            try:
                self._portal.start_task_soon(self._take_calls)
            except RuntimeError:  # the portal is closed
                self._over = True
                self._take_calls()

    def _take_calls(self) -> None:
        # Only after the end may this be more than one thread's: links then hand out what has come.
        with self._serial:
            self._woken = False
            while self._calls:
                self._calls.popleft()()

    @property
    def _shared(self) -> Board | None:
        return self.hosts.board if self.hosts is not None else self.board

    def _leave_board(self, why: CollectiveError | None = None) -> None:
        board = self._shared
        if board is not None:
            board.close(is_broken=self.failure is not None, why=why)

    def _ended(self) -> CollectiveError:
        return GroupAborted(
            f"group '{self.group}' on rank {self.rank}",
            why="this rank has left it, or its node was closed",
            fix="Form a new one with init_process_group or new_group.",
        )

    def _spread_failure(self) -> None:
        assert self.failure is not None
        if self._over:  # and so every link, on its own
            return
        self._any.fail(self.failure)
        for link in self._links.values():
            link.drop(self.failure)

    def _written(self) -> int:
        return sum(link.written for link in self._links.values())

    async def _leave(self, timeout: float) -> None:
        self._take_calls()  # what was posted before is sent before, whichever task comes first
        written = -1
        while written != (written := self._written()):
            with anyio.move_on_after(DELIVERY_SECONDS):
                async with anyio.create_task_group() as tasks:
                    for link in self._links.values():
                        tasks.start_soon(link.delivered)
                break
        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as tasks:
                for link in self._links.values():
                    if link.attached.is_set():
                        tasks.start_soon(link.leave)
        for link in self._links.values():
            link.close()

    # Deadlines of tagged messages.

    def _watch(self, transfer: Transfer, deadline: float) -> None:
        if len(self._due) >= self._compact_at:
            self._due = [entry for entry in self._due if not entry[2].done]
            heapq.heapify(self._due)
            self._compact_at = max(COMPACT_ENTRIES, 2 * len(self._due))
        heapq.heappush(self._due, (deadline, next(self._order), transfer))
        if self._timer is not None and self._due[0][2] is transfer:
            self._timer.cancel()

    async def _expire(self) -> None:
        while True:
            with anyio.CancelScope() as self._timer:
                if self._due:
                    await anyio.sleep(max(0.0, self._due[0][0] - time.monotonic()))
                else:
                    await anyio.sleep_forever()
            while self._due and (self._due[0][2].done or self._due[0][0] <= time.monotonic()):
                transfer = heapq.heappop(self._due)[2]
                if not transfer.done:
                    self.fail(self._late(transfer))

    def _late(self, transfer: Transfer) -> CollectiveTimeout:
        ranks = (transfer.peer,) if transfer.peer >= 0 else tuple(self._links)
        names = " or ".join(map(self.label, ranks))
        return CollectiveTimeout(
            f"message of group '{self.group}' on rank {self.rank}",
            ranks=ranks,
            why=f"timed out, and {names} is still awaited",
            fix="Check that it is alive and posts the other side, or raise the timeout of the "
            "group.",
        )
