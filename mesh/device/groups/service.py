"""The node's part in groups of devices: lets sessions join, and connects them with the others.

A session joins only for its own client. The nodes of two members connect only if both clients' own
orders say so, by the same secret, and only if each node's authorizer admits the other one: the
order of a stranger makes nobody dial, or take bytes from, whom it does not know.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import socket
from collections.abc import Callable

import anyio
import anyio.abc

from auth import (
    AccessDenied,
    AccessRequest,
    ConnectRequest,
    FetchRequest,
    MeshError,
    NodeId,
    PeerIdentity,
    decide,
)
from mesh.device.errors import SessionLost
from mesh.device.groups import wire
from mesh.device.groups.line import Line
from mesh.device.groups.pipe import carry
from mesh.device.server.nursery import Executor
from mesh.tasks import helpers
from transport import (
    MESH_ALPN,
    DeadlineExceeded,
    Endpoint,
    Incoming,
    LimitExceeded,
    PeerAddress,
    PeerLost,
    ProtocolError,
    Stream,
    Unreachable,
)

__all__ = ["PAIR_SCOPE", "GroupService"]

PAIR_SCOPE = "collective:devices"
"""What another node needs to be paired with for a group: a part of the scope ``collective``."""

MAX_JOINED, MAX_JOINED_PER_PEER = 256, 64
"""Memberships at a node, over all sessions, and over those of one machine's programs; executors
bound those of one session."""

MAX_NEWS = 8
"""News of an executor that wait for a client to take them."""

FORMING_SECONDS = 40.0
"""For a group to be formed from when its client asks: dialling is most of it."""

_log = logging.getLogger("quicmesh.device")


@dataclasses.dataclass(slots=True)
class _Joined:
    """One session's membership in one group."""

    join: wire.Join
    executor: Executor
    machine: NodeId
    streams: dict[int, Stream] = dataclasses.field(default_factory=dict)
    carried: dict[int, anyio.Event] = dataclasses.field(default_factory=dict)
    changed: anyio.Event = dataclasses.field(default_factory=anyio.Event)
    news: list[wire.Formed | wire.Broken] = dataclasses.field(default_factory=list)

    def hear(self, news: wire.Formed | wire.Broken) -> None:
        """Take what the executor says: that the group is formed, and that it is broken."""
        if len(self.news) < MAX_NEWS:
            self.news.append(news)
            self.wake()

    def end(self) -> None:
        """Let go of the streams to the other nodes, also of those that nothing was carried on."""
        for stream in self.streams.values():
            stream.reset()
        for over in self.carried.values():
            over.set()

    def wake(self) -> None:
        """Have who waits for streams, or news, look."""
        event, self.changed = self.changed, anyio.Event()
        event.set()


class _NotReached(Exception):
    """The node of another member can't be reached from here."""

    def __init__(self, member: int, error: MeshError) -> None:
        super().__init__(str(error))
        self.member = member
        self.error = error


class GroupService:
    """Serves ``device.group`` and ``device.pair``; see `wire`.

    Args:
        endpoint: where clients and other nodes come in.
        executor_of: returns the executor of a session, by its owner and number.
        scope: what a client needs to compute here.
        shared_memory: whether executors may share memory with those of other nodes.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        executor_of: Callable[[NodeId, bytes], Executor | None],
        *,
        scope: str,
        shared_memory: bool,
    ) -> None:
        self._endpoint = endpoint
        self._executor_of = executor_of
        self._shared_memory = shared_memory
        self._joined: dict[tuple[bytes, NodeId], _Joined] = {}
        self._lines: dict[Executor, Line] = {}
        endpoint.register_service(wire.GROUP_SERVICE, self._serve, scope=scope)
        endpoint.register_service(wire.PAIR_SERVICE, self._pair, scope=PAIR_SCOPE)

    @property
    def count(self) -> int:
        """How many memberships there are."""
        return len(self._joined)

    async def _serve(self, request: Incoming) -> None:
        """Have a session be in a group for as long as the stream is open.

        Raises:
            SessionLost: the client has no such session here.
            LimitExceeded: there are too many groups.
            AccessDenied: this node does not admit a member's node.
            MeshError: another node can't be reached, or the executor can't form the group.
        """
        join = wire.Join.decode(request.value)
        owner, stream = request.peer.node_id, request.stream
        executor = self._executor_of(owner, join.session)
        if executor is None or executor.ended.is_set():
            raise SessionLost("joining of a group", why="the session is not here any more")
        if join.members[join.index].node != self._endpoint.node_id:
            raise ProtocolError("joining of a group", why="this node is not that member's")
        key = (join.group, owner)
        if key in self._joined:
            raise ProtocolError("joining of a group", why="the session is in it already")
        machine = request.peer.machine_id  # which may have as many programs as it likes
        held = sum(each.machine == machine for each in self._joined.values())
        if held >= MAX_JOINED_PER_PEER or len(self._joined) >= MAX_JOINED:
            raise LimitExceeded(
                "joining of a group",
                why=f"{held} of {MAX_JOINED_PER_PEER} memberships of this peer are taken at this "
                f"node, and {len(self._joined)} of {MAX_JOINED} in all",
                fix="Close contexts that are not used any more.",
            )
        joined = self._joined[key] = _Joined(join, executor, machine)
        try:
            await self._authorize(request, join)
            await stream.send_reply(wire.Prepared(self._endpoint.addresses).encode())
            async with stream, helpers() as tasks:
                try:
                    await self._form(joined, stream, tasks)
                except _NotReached as failed:
                    news = wire.Broken(join.number, failed.error, (failed.member,))
                    await stream.send_message(news.encode())
                    return
                except MeshError as error:
                    await stream.send_message(wire.Broken(join.number, error).encode())
                    return
                await self._watch(joined, stream, tasks)
        finally:
            del self._joined[key]
            joined.end()
            line = self._lines.get(executor)
            if line is not None:
                line.leave(join.number)

    async def _authorize(self, request: Incoming, join: wire.Join) -> None:
        """Ask whether this client may order bytes to come from the other members' nodes."""
        timeout = self._endpoint.config.authorizer_timeout
        for index, member in enumerate(join.members):
            if index == join.index:
                continue
            connection = self._endpoint.connection(member.node)
            peer = PeerIdentity(member.node) if connection is None else connection.peer
            questions: list[AccessRequest] = [
                FetchRequest(
                    request.peer, request.grant, member.node if connection is None else peer, 0
                )
            ]
            if connection is None or connection.grant is None:
                questions.append(ConnectRequest(peer, MESH_ALPN, outbound=True))
            for question in questions:
                await decide(self._endpoint.authorizer, question, timeout=timeout)

    async def _form(self, joined: _Joined, stream: Stream, tasks: anyio.abc.TaskGroup) -> None:
        """Connect with the other members, and have the executor form the group."""
        join = joined.join
        others = [each for each in range(len(join.members)) if each != join.index]
        stream.timeout = FORMING_SECONDS
        order = wire.Connect.decode(await stream.receive_message(wire.MAX_FRAME), len(join.members))
        with anyio.move_on_after(FORMING_SECONDS):
            for each in others:
                if each > join.index:
                    await self._dial(joined, each, order)
            while len(joined.streams) < len(others):
                await joined.changed.wait()
            sockets = [self._begin_carrying(joined, each, tasks) for each in others]
            self._line(joined.executor).form(self._order(join), sockets, joined.hear)
            while not joined.news:
                await joined.changed.wait()
            return
        missing = [each for each in others if each not in joined.streams]
        names = ", ".join(join.members[each].node.short for each in missing)
        raise DeadlineExceeded(
            "forming of a group",
            after=FORMING_SECONDS,
            why=f"these nodes are not connected: {names}" if names else "the executor is silent",
        )

    def _order(self, join: wire.Join) -> wire.Form:
        return wire.Form(
            number=join.number,
            group=join.group,
            index=join.index,
            nodes=tuple(member.node for member in join.members),
            ranks=tuple(member.ranks for member in join.members),
            timeout=join.timeout,
            shared=self._shared_memory,
        )

    async def _dial(self, joined: _Joined, index: int, order: wire.Connect) -> None:
        join = joined.join
        member = join.members[index]
        target = PeerAddress(member.node, order.addresses[index])
        pairing = wire.Pairing(join.group, join.index, member.token)
        try:
            connection = await self._endpoint.connect(target)
            stream = await connection.open_stream(wire.PAIR_SERVICE, pairing.encode())
            try:
                await stream.reply()
            except BaseException:
                stream.reset()
                raise
        except (DeadlineExceeded, Unreachable, PeerLost) as error:
            raise _NotReached(index, error) from error
        joined.streams[index] = stream

    async def _pair(self, request: Incoming) -> None:
        """Carry what the executors of two members exchange; the other node has dialled.

        Raises:
            AccessDenied: no session here expects that member of that group from that node.
        """
        pairing = wire.Pairing.decode(request.value)
        joined = next(
            (
                each
                for (group, _), each in self._joined.items()
                if group == pairing.group and self._is_expected(each, pairing, request.peer.node_id)
            ),
            None,
        )
        if joined is None:
            raise AccessDenied(
                "pairing for a group of devices",
                why="no session here expects that of this node",
            )
        await request.stream.send_reply(None)
        over = joined.carried[pairing.index] = anyio.Event()
        joined.streams[pairing.index] = request.stream
        joined.wake()
        await over.wait()

    def _is_expected(self, joined: _Joined, pairing: wire.Pairing, node: NodeId) -> bool:
        join = joined.join
        if not pairing.index < min(join.index, len(join.members)):
            return False
        member = join.members[pairing.index]
        is_same = hmac.compare_digest(member.token, pairing.token)
        return is_same and member.node == node and pairing.index not in joined.carried

    def _begin_carrying(
        self, joined: _Joined, index: int, tasks: anyio.abc.TaskGroup
    ) -> socket.socket:
        """Have the bytes of one other member be carried; return the executor's end."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        tasks.start_soon(self._carry, joined, index, ours)
        return theirs

    async def _carry(self, joined: _Joined, index: int, sock: socket.socket) -> None:
        try:
            await carry(sock, joined.streams[index])
        finally:
            over = joined.carried.get(index)
            if over is not None:
                over.set()

    async def _watch(self, joined: _Joined, stream: Stream, tasks: anyio.abc.TaskGroup) -> None:
        """Pass on what the executor says, until the client leaves or the session is over."""
        left = anyio.Event()

        async def listen() -> None:
            try:
                await stream.receive(1)
            except (anyio.EndOfStream, MeshError):
                pass
            left.set()
            joined.wake()

        async def see_its_end() -> None:
            await joined.executor.ended.wait()
            left.set()
            joined.wake()

        stream.timeout = float("inf")
        tasks.start_soon(listen)
        tasks.start_soon(see_its_end)
        while not left.is_set():
            while joined.news:
                await stream.send_message(joined.news.pop(0).encode())
            if not left.is_set():  # it may have come while the news were sent
                await joined.changed.wait()

    def _line(self, executor: Executor) -> Line:
        line = self._lines.get(executor)
        if line is None:
            line = self._lines[executor] = Line(executor)
            self._endpoint.start_soon(self._run, line)
        return line

    async def _run(self, line: Line) -> None:
        try:
            await line.run()
        except Exception:  # of one session's, and no reason to end the others
            _log.exception("what an executor says about groups of devices can't be heard")
        finally:
            self._lines.pop(line.executor, None)
