"""One pair of ranks of one group: two streams, and the rules that keep both ends bounded.

A *data* stream carries messages one after the other; a *control* stream carries what must not wait
behind them. The reader of the data stream never waits for the program: a message comes only when
it has a place to go.

* A large message is sent once the other side *wants* it, that is, has posted the receive, whose
  memory it then fills straight from the stream. Receives are usually posted ahead, so this costs no
  time. A sender that no want has reached a little later *offers* the message, so that a mismatch
  shows soon.
* A small one goes *eagerly*, within a budget of bytes that the receiver has not consumed yet; it is
  kept until a receive is posted. Beyond the budget small messages are treated as large ones. It is
  copied to be sent, so that its sender need not wait for the acknowledgement.

All of it runs in the event loop of the node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Protocol

import anyio

from auth import MeshError
from mesh.collective import (
    CollectiveError,
    CollectiveMismatch,
    Header,
    RankFailed,
    RankLeft,
    RankLost,
    Transfer,
)
from mesh.collective.exchange import Channel, Check
from mesh.distributed import wire
from transport import CborValue, ConnectionClosed, ProtocolError, Stream, StreamReset

__all__ = ["Link", "LinkOwner", "PostedReceive", "PostedSend"]

EAGER_BYTES = 256 * 1024
"""Largest message sent unasked: for less, asking costs more than the bytes."""

EAGER_BUDGET = 512 * 1024
"""Bytes sent unasked and not consumed yet, per pair and group. Thirty groups' worth of it fits into
the receive window of one connection."""

OFFER_SECONDS = 0.002
"""How long a message waits for being wanted before it is offered: mostly both sides begin at about
the same time, and an offer would be in vain."""

MESSAGE_COST = 256
"""What a message counts for beside its bytes, so that empty ones are bounded too."""

MAX_CHANNELS = 1 << 16
"""Most tags that a pair may use in a group's life."""

CONTROL_BATCH = 64
"""Control entries in one message."""

REPORT_GRACE = 0.5
"""Seconds that a rank whose stream was reset has to say why: its report may come a little later."""


@dataclasses.dataclass(frozen=True, slots=True)
class PostedSend:
    """A message to send."""

    channel: Channel
    header: Header
    payload: memoryview
    transfer: Transfer

    @property
    def cost(self) -> int:
        """What it counts for against the budget."""
        return self.payload.nbytes + MESSAGE_COST


@dataclasses.dataclass(frozen=True, slots=True)
class PostedReceive:
    """A place for a message."""

    channel: Channel
    check: Check
    into: memoryview
    transfer: Transfer


@dataclasses.dataclass(slots=True)
class _Outgoing:
    queue: deque[PostedSend] = dataclasses.field(default_factory=deque)
    sent: int = 0
    wanted: int = 0
    offered: int = 0


@dataclasses.dataclass(slots=True)
class _Incoming:
    # At most one of the two holds anything: early messages, or receives without one.
    early: deque[tuple[Header, bytes]] = dataclasses.field(default_factory=deque)
    posted: deque[PostedReceive] = dataclasses.field(default_factory=deque)
    matched: int = 0
    offer: tuple[int, Header] | None = None


class LinkOwner(Protocol):
    """What a link needs of the exchange."""

    group: str
    size: int

    def label(self, rank: int) -> str:
        """Return how to name a rank to people."""

    def fail(self, error: CollectiveError) -> None:
        """Break the group."""

    async def lost(self, peer: int, error: CollectiveError) -> CollectiveError:
        """Return what to say once it is known who else is lost."""

    def unmatched(self, peer: int, channel: Channel) -> None:
        """Post a receive for a message of `peer`, if one from any rank is wanted."""

    def departed(self) -> None:
        """Take note that a link will bring nothing any more."""


class Link:
    """This side of one pair of ranks.

    Args:
        owner: the exchange.
        peer: rank of the other side.

    Attributes:
        attached: set once both streams are there.
        ended: set once the link carries nothing any more.
        written: grows with the bytes of messages that the other side has taken.
    """

    def __init__(self, owner: LinkOwner, peer: int) -> None:
        self.peer = peer
        self.attached = anyio.Event()
        self.ended = anyio.Event()
        self.written = 0
        self._owner = owner
        self._streams: dict[str, Stream] = {}
        self._outgoing: defaultdict[Channel, _Outgoing] = defaultdict(_Outgoing)
        self._incoming: defaultdict[Channel, _Incoming] = defaultdict(_Incoming)
        self._ready: deque[tuple[PostedSend, bool]] = deque()
        self._writing: PostedSend | None = None
        self._reading: PostedReceive | None = None
        self._control: deque[CborValue] = deque()
        self._data_event = anyio.Event()
        self._control_event = anyio.Event()
        self._idle_event = anyio.Event()
        self._unwanted: dict[Channel, _Outgoing] = {}
        self._offer_at = math.inf
        self._budget = EAGER_BUDGET
        self._early_cost = 0
        self._consumed = 0
        self._leaving = False
        self._gone: CollectiveError | None = None
        self._data_scope = anyio.CancelScope()
        self._scope = anyio.CancelScope()

    @property
    def gone(self) -> CollectiveError | None:
        """Why it carries nothing any more."""
        return self._gone

    # What the exchange calls.

    def attach(self, kind: str, stream: Stream) -> None:
        """Take one of the two streams.

        Raises:
            ProtocolError: it is there already.
        """
        if kind in self._streams:
            raise ProtocolError("opening of a collective stream", why=f"a second {kind} stream")
        # Ranks may compute for hours between two operations; those have deadlines of their own.
        stream.timeout = math.inf
        self._streams[kind] = stream
        if len(self._streams) == 2:
            self.attached.set()

    async def run(self) -> None:
        """Carry messages until both sides have left, or the connection breaks."""
        control, data = self._streams["control"], self._streams["data"]
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(
                        partial(self._guard, self._read_control, control, writes=False)
                    )
                    tasks.start_soon(
                        partial(self._guard, self._write_control, control, writes=True)
                    )
                    with self._data_scope:
                        async with anyio.create_task_group() as data_tasks:
                            data_tasks.start_soon(
                                partial(self._guard, self._read_data, data, writes=False)
                            )
                            data_tasks.start_soon(
                                partial(self._guard, self._write_data, data, writes=True)
                            )
        finally:
            with anyio.CancelScope(shield=True):
                await self._close_streams()
            self._left("this node closed its connection")
            self.ended.set()

    def post_send(self, send: PostedSend) -> None:
        """Queue a message."""
        if self._gone is not None:
            send.transfer.finish(self._gone)
            return
        outgoing = self._out(send.channel)
        outgoing.queue.append(send)
        self._advance(send.channel, outgoing)

    def post_receive(self, receive: PostedReceive) -> None:
        """Match a receive with the next message of its channel."""
        incoming = self._in(receive.channel)
        if incoming.early:
            self._take_early(receive, incoming)
            return
        if self._gone is not None:
            receive.transfer.finish(self._gone)
            return
        incoming.posted.append(receive)
        index = incoming.matched + len(incoming.posted) - 1
        if receive.into.nbytes > EAGER_BYTES:
            self._tell(["want", receive.channel, index + 1])
        self._answer(receive.channel, incoming)

    async def probe(self, timeout: float) -> None:
        """Return if the other side answers within `timeout` seconds; raise a `MeshError` if not."""
        await self._streams["control"].connection.ping(timeout)

    def has_unmatched(self, channel: Channel) -> bool:
        """Return whether a message is there, or offered, for which no receive is posted."""
        incoming = self._incoming.get(channel)
        if incoming is None:
            return False
        offered = incoming.offer is not None and self._is_unmatched(incoming, incoming.offer[0])
        return bool(incoming.early) or offered

    def drop(self, error: CollectiveError) -> None:
        """Fail everything posted, stop writing to its memory, and tell the other side."""
        self._tell(["fail", wire.failure_value(error)])
        self._data_scope.cancel()
        self._abandon(error)

    async def leave(self) -> None:
        """Write everything that is queued, say so, and return once the other side knows."""
        await self.delivered()
        self._leaving = True
        self._data_event.set()
        self._control_event.set()
        await self.ended.wait()

    async def delivered(self) -> None:
        """Return once the other side has everything that is queued, or can't get it."""
        while self._gone is None and (self._ready or self._writing or self._has_queued()):
            await self._idle_event.wait()
        if self._gone is None and self.attached.is_set():
            # The reader will find out; or the link has ended here meanwhile.
            with contextlib.suppress(MeshError, anyio.ClosedResourceError):
                await self._streams["data"].drained(self._moved)

    def close(self) -> None:
        """End the link now."""
        self._scope.cancel()

    def discard(self) -> None:
        """End a link that never ran."""
        for stream in self._streams.values():
            stream.reset()
        self.ended.set()

    async def _close_streams(self) -> None:
        """End both streams; the data stream by a reset if it may stop within a message."""
        whole = self._gone is None or isinstance(self._gone, RankLeft)
        for kind, stream in self._streams.items():
            if kind == "control" or (whole and self._writing is None):
                await stream.aclose()
            else:
                stream.reset()

    # Sending.

    def _advance(self, channel: Channel, outgoing: _Outgoing) -> None:
        while outgoing.queue:
            head = outgoing.queue[0]
            eager = head.payload.nbytes <= EAGER_BYTES and head.cost <= self._budget
            if eager:
                self._budget -= head.cost
            elif outgoing.wanted <= outgoing.sent:
                if outgoing.offered <= outgoing.sent:
                    self._offer_later(channel, outgoing)
                return
            outgoing.sent += 1
            self._ready.append((outgoing.queue.popleft(), eager))
            self._data_event.set()

    def _offer_later(self, channel: Channel, outgoing: _Outgoing) -> None:
        self._unwanted[channel] = outgoing
        if self._offer_at == math.inf:
            self._offer_at = anyio.current_time() + OFFER_SECONDS
            self._control_event.set()

    def _offer(self) -> None:
        """Offer what is not wanted still."""
        unwanted, self._unwanted, self._offer_at = self._unwanted, {}, math.inf
        for channel, outgoing in unwanted.items():
            if outgoing.queue and max(outgoing.wanted, outgoing.offered) <= outgoing.sent:
                outgoing.offered = outgoing.sent + 1
                header = wire.header_value(outgoing.queue[0].header)
                self._tell(["offer", channel, outgoing.sent, header])

    async def _write_data(self, stream: Stream) -> None:
        while True:
            while self._ready:
                send, eager = self._ready.popleft()
                self._writing = send
                header = wire.encode_message(send.channel, eager, send.header)
                if eager:
                    await stream.send(header + send.payload)
                else:
                    await stream.send(header)
                    await stream.send_lent(send.payload, moved=self._moved)
                self._writing = None
                send.transfer.finish()
                del send  # and with it the memory that it kept alive
            self._signal_idle()
            if self._leaving:
                await stream.send_eof()
                return
            await self._data_event.wait()
            self._data_event = anyio.Event()

    def _moved(self, nbytes: int) -> None:
        self.written += nbytes

    def _has_queued(self) -> bool:
        return any(outgoing.queue for outgoing in self._outgoing.values())

    # Receiving.

    async def _read_data(self, stream: Stream) -> None:
        while True:
            try:
                value = await stream.receive_message(wire.HEADER_BYTES)
            except anyio.EndOfStream:
                self._left()
                return
            channel, eager, header = wire.parse_message(value)
            incoming = self._in(channel)
            if not incoming.posted:
                self._owner.unmatched(self.peer, channel)
            if incoming.posted:
                await self._receive_posted(stream, incoming, header)
                if eager:
                    self._consume(header)
            elif eager and header.nbytes <= EAGER_BYTES:
                await self._receive_early(stream, channel, incoming, header)
            else:
                raise ProtocolError("receiving a message", why="nobody asked for it")
            if incoming.offer is not None and incoming.offer[0] < incoming.matched:
                incoming.offer = None

    async def _receive_posted(self, stream: Stream, incoming: _Incoming, header: Header) -> None:
        receive = self._reading = incoming.posted.popleft()
        incoming.matched += 1
        if self._fits(receive, header):
            await stream.receive_into(receive.into)
            self._reading = None
            receive.transfer.finish()

    async def _receive_early(
        self, stream: Stream, channel: Channel, incoming: _Incoming, header: Header
    ) -> None:
        self._early_cost += header.nbytes + MESSAGE_COST
        if self._early_cost > EAGER_BUDGET:
            raise ProtocolError("receiving a message", why="more was sent unasked than agreed")
        data = await stream.receive_exactly(header.nbytes)
        incoming.early.append((header, data))
        if incoming.posted:  # while the bytes came
            self._take_early(incoming.posted.popleft(), incoming)
        else:
            self._owner.unmatched(self.peer, channel)

    def _take_early(self, receive: PostedReceive, incoming: _Incoming) -> None:
        header, data = incoming.early.popleft()
        incoming.matched += 1
        self._early_cost -= header.nbytes + MESSAGE_COST
        if self._fits(receive, header):
            receive.into[:] = data
            receive.transfer.finish()
        self._consume(header)

    def _fits(self, receive: PostedReceive, header: Header) -> bool:
        """Return whether a message is the one that was expected; break the group if not."""
        try:
            receive.check(header)
            if header.nbytes != receive.into.nbytes:
                raise CollectiveMismatch(
                    f"receipt from {self._owner.label(self.peer)}",
                    ranks=(self.peer,),
                    why=f"{header.nbytes} bytes came where {receive.into.nbytes} were expected",
                )
        except CollectiveError as error:
            self._owner.fail(error)
            receive.transfer.finish(error)
            return False
        return True

    def _is_unmatched(self, incoming: _Incoming, index: int) -> bool:
        return index >= incoming.matched + len(incoming.posted)

    def _answer(self, channel: Channel, incoming: _Incoming) -> None:
        """Want the message that is offered, if its receive is posted and it fits."""
        if incoming.offer is None:
            return
        index, header = incoming.offer
        position = index - incoming.matched
        if 0 <= position < len(incoming.posted):
            incoming.offer = None
            if self._fits(incoming.posted[position], header):
                self._tell(["want", channel, index + 1])

    def _consume(self, header: Header) -> None:
        if self._gone is not None:
            return
        self._consumed += header.nbytes + MESSAGE_COST
        if self._consumed >= EAGER_BUDGET // 4:
            self._tell(["ack", self._consumed])
            self._consumed = 0

    # Control.

    def _tell(self, entry: CborValue) -> None:
        self._control.append(entry)
        self._control_event.set()

    async def _write_control(self, stream: Stream) -> None:
        while True:
            while self._control:
                count = min(CONTROL_BATCH, len(self._control))
                await stream.send_message([self._control.popleft() for _ in range(count)])
            if self._leaving:
                await stream.send_eof()
                if self._gone is not None:  # the group is broken: nothing to wait for
                    self._scope.cancel()
                return
            with anyio.CancelScope(deadline=self._offer_at):
                await self._control_event.wait()
            self._control_event = anyio.Event()
            if self._offer_at <= anyio.current_time():
                self._offer()

    async def _read_control(self, stream: Stream) -> None:
        while True:
            try:
                value = await stream.receive_message()
            except anyio.EndOfStream:
                if self._gone is not None:
                    self._scope.cancel()
                return
            for verb, arguments in wire.parse_control(value):
                match verb, arguments:
                    case "want", [channel, count]:
                        outgoing = self._out(channel)
                        outgoing.wanted = max(outgoing.wanted, count)
                        self._advance(channel, outgoing)
                    case "offer", [channel, index, header]:
                        incoming = self._in(channel)
                        incoming.offer = (index, header)
                        if self._is_unmatched(incoming, index):
                            self._owner.unmatched(self.peer, channel)
                        self._answer(channel, incoming)
                    case "ack", [cost]:
                        self._budget = min(self._budget + cost, EAGER_BUDGET)
                    case "fail", [report]:
                        group = f"group '{self._owner.group}'"
                        self._owner.fail(wire.parse_failure(report, group, self._owner.size))

    # The end.

    async def _guard(
        self, task: Callable[[Stream], Awaitable[None]], stream: Stream, *, writes: bool
    ) -> None:
        try:
            await task(stream)
        except StreamReset as error:
            # Only a reader knows whether the other side left: its end comes after its messages.
            if not writes:
                await anyio.sleep(REPORT_GRACE)
                await self._broke(error)
        except MeshError as error:
            await self._broke(error)

    async def _broke(self, error: MeshError) -> None:
        if self._gone is not None:
            self._scope.cancel()
            return
        if isinstance(error, ConnectionClosed):
            self._left(error.why or "it closed the connection")
            return
        kind = RankFailed if isinstance(error, ProtocolError) else RankLost
        label = self._owner.label(self.peer)
        lost: CollectiveError = kind(
            f"group '{self._owner.group}'",
            ranks=(self.peer,),
            why=f"{label} is lost: {error.why or error}",
            fix="Leave the group and form a new one without it.",
        )
        if kind is RankLost:
            lost = await self._owner.lost(self.peer, lost)
        self._abandon(lost)
        self._owner.fail(lost)
        self._scope.cancel()

    def _left(self, why: str = "it left the group") -> None:
        label = self._owner.label(self.peer)
        self._abandon(
            RankLeft(
                f"group '{self._owner.group}'",
                ranks=(self.peer,),
                why=f"{label} is gone: {why}",
                fix="Leave the group and form a new one without it.",
            )
        )
        self._scope.cancel()

    def _abandon(self, error: CollectiveError) -> None:
        if self._gone is None:
            self._gone = error
        # Early messages stay: they have come, and may still be received.
        for outgoing in self._outgoing.values():
            while outgoing.queue:
                outgoing.queue.popleft().transfer.finish(error)
        while self._ready:
            self._ready.popleft()[0].transfer.finish(error)
        for incoming in self._incoming.values():
            while incoming.posted:
                incoming.posted.popleft().transfer.finish(error)
        for open_one in (self._writing, self._reading):
            if open_one is not None:
                open_one.transfer.finish(error)
        self._writing = self._reading = None
        self._signal_idle()
        self._owner.departed()

    def _signal_idle(self) -> None:
        event, self._idle_event = self._idle_event, anyio.Event()
        event.set()

    def _out(self, channel: Channel) -> _Outgoing:
        self._bound(self._outgoing, channel)
        return self._outgoing[channel]

    def _in(self, channel: Channel) -> _Incoming:
        self._bound(self._incoming, channel)
        return self._incoming[channel]

    def _bound(self, table: Mapping[Channel, object], channel: Channel) -> None:
        if channel not in table and len(table) >= MAX_CHANNELS:
            raise ProtocolError(
                f"messages with tag {channel}",
                why=f"a pair of ranks may use {MAX_CHANNELS} different tags in a group's life",
                fix="Use tags again.",
            )
