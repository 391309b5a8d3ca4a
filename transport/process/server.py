"""The endpoint process: the engine of an endpoint whose program is elsewhere.

It does what the program says in records, and tells of each connection what the program has to know.
Of streams it tells what is new as of the moment when a packet leaves, so that a program which is
slow to listen finds no heap of old news: bytes that nobody has taken wait in the stream, whose
window stops the peer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable

import anyio

from auth import NodeId, SecretKey, SocketAddress
from transport.addresses import format_address
from transport.cbor import CborValue
from transport.cbor import encode as encode_cbor
from transport.codes import AppCode
from transport.engine import Link
from transport.errors import ProtocolError
from transport.loop_engine import LoopEngine
from transport.process.channel import Channel
from transport.process.figures import FACTS_SECONDS, REPORT_SECONDS, new_facts, report_of
from transport.process.pulse import LOOKS, Pulse, processor_time
from transport.process.records import (
    ADMIT,
    MAX_PAYLOAD,
    PLACE,
    Flag,
    Kind,
    Record,
    encode,
    value_of,
)
from transport.process.said import log_from, say_to
from transport.process.setup import config_of
from transport.process.told import LinkState, Told
from transport.protocol import ConnectionCore, StreamCore
from transport.protocol.events import (
    ConnectionEnded,
    Event,
    HandshakeCompleted,
    PingAcknowledged,
    StreamChanged,
    StreamOpened,
    StreamsAvailable,
)
from transport.protocol.turns import Turns
from transport.udp import Refusal, UdpSocket

__all__ = ["Server"]

FAREWELL_SECONDS = 0.2
"""How long peers may ask once more for the farewell of a program that is gone."""

MAX_LOG = 8192
"""Longest text of one record of the log, in characters."""

MOST_UNHEARD = 16 << 20
"""Bytes kept for a program that asks and asks and does not listen, until it is parted with. What is
said without being asked for waits long before that (`Channel.is_full`)."""

UNCLAIMED = 4
"""Streams that a peer may have opened and the program not dropped, in multiples of its limit."""

_log = logging.getLogger("quicmesh.transport")


class Server:
    """Serves one program.

    Args:
        program: its process id.
        control: the socket to it.
        udp: the bound socket of the endpoint; the server's from the first record on.
        memory: shared with the program; empty where there is none.
    """

    def __init__(
        self, program: int, control: socket.socket, udp: socket.socket, memory: memoryview
    ) -> None:
        self._program = program
        self._udp = udp
        self._memory = memory
        self._channel = Channel(
            control,
            take=self._take,
            taken=self._taken,
            before=self._tell,
            ended=self._program_is_gone,
            most_kept=MOST_UNHEARD,
        )
        self._engine: LoopEngine
        self._links: dict[int, LinkState] = {}
        self._by_core: dict[ConnectionCore, LinkState] = {}
        self._news: dict[LinkState, None] = {}
        self._touched: dict[ConnectionCore, None] = {}
        self._indebted: dict[ConnectionCore, None] = {}
        self._next_inbound = 2
        self._pulse = Pulse(math.inf, time.monotonic())
        self._liveness = math.inf
        self._unheard: list[ConnectionCore] = []
        """Connections that strangers have begun while the program does not go on."""
        self._is_program_lost = False
        self._report = b""
        self._farewell = "the program has ended without a word"
        self._was_left = False
        """Whether the program has ended with connections open."""
        self._level = logging.WARNING
        self._set_up = anyio.Event()
        self._over = anyio.Event()

    def take(self, record: Record) -> None:
        """Take the first record, which came otherwise than by the channel."""
        self._take(record)

    async def run(self, parent: int | None) -> None:
        """Serve until the program is gone.

        Args:
            parent: a descriptor that can be read once the program is gone, if there is one.
        """
        say_to(self.say_log)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._channel.run)
            if parent is not None:
                tasks.start_soon(self._watch, parent)
            await self._set_up.wait()
            if not self._over.is_set():
                tasks.start_soon(self._engine.run)
                tasks.start_soon(self._look_at_figures)
                tasks.start_soon(self._look_after)
                self._say(Kind.READY)
                await self._over.wait()
                if self._was_left:
                    await self._engine.drain(FAREWELL_SECONDS)
            tasks.cancel_scope.cancel()

    async def close(self) -> None:
        """Let go of the sockets, where the process goes on. `run` must have ended."""
        self._channel.close()
        await self._engine.close()

    # -- the program's words

    def _take(self, record: Record) -> None:
        handler = _OF_ENDPOINT.get(record.kind)
        if handler is not None:
            handler(self, record)
            return
        state = self._links.get(record.link)
        if state is None:
            return  # it is over, and the program does not know yet
        core = state.core
        self._touched[core] = None
        if core.ended is not None:
            return
        try:
            self._take_of_link(state, record)
        except Exception:
            _log.exception("a connection failed inside and is given up")
            core.abandon("internal error")

    def _taken(self, more: bool) -> None:
        touched, self._touched = self._touched, {}
        self._pulse.heard(time.monotonic())
        for core in touched:
            self._engine.pump(core)

    def _take_setup(self, record: Record) -> None:
        setup = _map(record)
        self._level = setup["level"]
        log_from(self._level)
        config = config_of(setup["config"])
        sock = UdpSocket(config.bind, descriptor=self._udp.detach())
        self._engine = LoopEngine(
            sock,
            SecretKey.from_bytes(setup["key"]),
            config,
            Turns(),
            alpns=setup["alpns"],
            on_inbound=self._on_inbound,
            on_event=self._on_event,
            on_pumped=self._on_pumped,
        )
        self._socket = sock
        self._liveness = config.liveness
        self._pulse = Pulse(config.liveness, time.monotonic())
        self._set_up.set()

    def _take_offer(self, record: Record) -> None:
        self._engine.offer(_map(record)["alpns"])

    def _stop_listening(self, record: Record) -> None:
        self._engine.stop_listening()

    def _dial(self, record: Record) -> None:
        order = _map(record)
        address = order["host"], order["port"]
        core = self._engine.outbound(NodeId(order["peer"]), order["alpn"])
        self._add(LinkState(record.link, core, address))
        try:
            refusal = self._engine.begin(core, address)
        except Exception:
            _log.exception("dialling %s failed", format_address(address))
            refusal = Refusal("an error of this node, which its log describes", is_final=True)
            core.abandon("internal error")
            self._engine.pump(core)
        self._say(
            Kind.DIALLED,
            record.link,
            value={
                "why": None if refusal is None else refusal.why,
                "final": refusal is not None and refusal.is_final,
            },
        )

    def _sync(self, record: Record) -> None:
        self._taken(False)
        self._say(Kind.SYNCED, number=record.number)

    def _take_of_link(self, state: LinkState, record: Record) -> None:
        core = state.core
        match record.kind:
            case Kind.ADMITTED:
                self._engine.admitted(core)
            case Kind.ADMIT:
                max_streams, window = ADMIT.unpack(record.payload)
                state.max_streams = max_streams
                core.admit(max_streams=max_streams, connection_window=window)
            case Kind.OPEN:
                stream = core.open_stream()
                if stream.stream_id != record.stream:
                    raise ProtocolError("opening a stream", why="the program counts otherwise")
                state.told[stream.stream_id] = Told()
            case Kind.PING:
                core.ping(record.number)
            case Kind.CLOSE:
                self._send_first(core)
                core.close(record.number, str(record.payload, "utf-8", "ignore"))
            case Kind.FLUSH:
                state.flush = record.number
            case _:
                self._take_of_stream(state, record)

    def _take_of_stream(self, state: LinkState, record: Record) -> None:
        core = state.core
        stream, told = core.streams.get(record.stream), state.told.get(record.stream)
        if stream is None or told is None:
            return
        match record.kind:
            case Kind.WRITE:
                told.written += len(record.payload)
                if not core.quic.is_reset(stream.stream_id):
                    core.write(stream, record.payload, fin=bool(record.flags & Flag.FIN))
            case Kind.LEND:
                view = self._place(record)
                told.written += len(view)
                if not core.quic.is_reset(stream.stream_id):
                    part = core.lend(stream, view, _is_intact, AppCode.INTERNAL)
                    told.lent = part
                self._tell_acked(state, stream, told)
            case Kind.TAKE_BACK:
                core.take_back(stream)
            case Kind.WANT:
                told.want = record.number
                self._tell_acked(state, stream, told)
            case Kind.POST:
                view_at, size = PLACE.unpack(record.payload)
                self._place(record)
                told.posts.append((record.number, record.number + size, view_at))
                told.expects_posts = bool(record.flags & Flag.MORE)
                self._post_next(state, stream, told)
            case Kind.WITHDRAW:
                told.posts.clear()
                told.expects_posts = False
                core.withdraw(stream)
            case Kind.CONSUMED:
                stream.incoming.held -= record.number
                core.consumed(stream, record.number)
            case Kind.RESET:
                self._send_first(core)
                core.reset(stream, record.number)
            case Kind.RELEASE:
                core.quic.discard(stream.incoming.held)
                stream.incoming.held = 0
                self._send_first(core)
                core.release(stream, record.number)
                del state.told[record.stream]
                state.unclaimed -= not core.quic.is_local_stream(record.stream)
                state.dirty.pop(record.stream, None)
            case _:
                raise ProtocolError("a program", why=f"it says {record.kind.name}")

    def _send_first(self, core: ConnectionCore) -> None:
        """Have what was written before leave before: else an end overtakes it, or takes it back."""
        if core.has_stream_data:
            self._engine.pump(core)

    def _place(self, record: Record) -> memoryview:
        at, size = PLACE.unpack(record.payload)
        if at + size > len(self._memory):
            raise ProtocolError("a program", why="memory that there is none of")
        return self._memory[at : at + size]

    # -- the engine's events

    def _on_inbound(self, link: Link, address: SocketAddress) -> None:
        if self._is_program_lost:  # it would have to hear of each, whenever it goes on
            self._unheard.append(_core(link))
            return
        number, self._next_inbound = self._next_inbound, self._next_inbound + 2
        self._add(LinkState(number, _core(link), address))
        self._say(Kind.INCOMING, number, value=[address[0], address[1]])

    def _add(self, state: LinkState) -> None:
        self._links[state.number] = self._by_core[state.core] = state

    def _on_event(self, link: Link, event: Event) -> None:
        core = _core(link)
        state = self._by_core.get(core)
        if state is None:
            return
        match event:
            case StreamChanged(stream_id=stream_id):
                state.dirty[stream_id] = None
                self._news[state] = None
                self._channel.flush_later()
            case HandshakeCompleted(peer=peer, alpn=alpn):
                self._say(Kind.HANDSHAKE, state.number, value=[peer.raw, alpn])
            case StreamOpened(stream_id=stream_id):
                state.told[stream_id] = Told()
                self._say(Kind.OPENED, state.number, stream_id)
                state.unclaimed += 1
                if state.unclaimed > UNCLAIMED * state.max_streams:
                    core.close(AppCode.LIMIT, "too many streams that nobody has accepted")
            case StreamsAvailable():
                self._say(Kind.STREAMS, state.number, number=core.quic.stream_limit)
            case PingAcknowledged(uid=uid):
                self._say(Kind.PONG, state.number, number=uid)
            case ConnectionEnded():
                self._tell_end(state, event)
            case _:
                pass

    def _on_pumped(self, link: Link) -> None:
        core = _core(link)
        state = self._by_core.get(core)
        if state is None:
            return
        if state.flush is not None and core.is_flushed():
            self._say(Kind.FLUSHED, state.number, number=state.flush)
            state.flush = None
        if core.is_terminated:
            self._tell_facts(state, time.monotonic())
            self._say(Kind.TERMINATED, state.number)
            del self._links[state.number], self._by_core[core]
            self._news.pop(state, None)

    # -- what is told

    def _tell(self) -> None:
        """Tell what is new of streams, as far as the program is not behind with listening."""
        now = time.monotonic()
        while self._news and not self._channel.is_full:
            self._tell_news(now)
            indebted, self._indebted = self._indebted, {}
            for core in indebted:
                self._engine.pump(core)  # the peer may send more: there is memory for it

    def _tell_news(self, now: float) -> None:
        while self._news and not self._channel.is_full:
            state = next(iter(self._news))
            del self._news[state]
            while state.dirty and not self._channel.is_full:
                stream_id = next(iter(state.dirty))
                del state.dirty[stream_id]
                self._tell_stream(state, stream_id)
            if state.dirty:
                self._news[state] = None
            if now - state.facts_at > FACTS_SECONDS:
                self._tell_facts(state, now)

    def _tell_stream(self, state: LinkState, stream_id: int, *, whole: bool = False) -> None:
        stream, told = state.core.streams.get(stream_id), state.told.get(stream_id)
        if stream is None or told is None:
            return
        self._tell_received(state, stream, told, whole=whole)
        if stream.remote_reset is not None and told.reset is None:
            told.reset = stream.remote_reset
            self._say(Kind.RESET, state.number, stream_id, told.reset)
        if stream.remote_stop is not None and told.stop is None:
            told.stop = stream.remote_stop
            self._say(Kind.STOP, state.number, stream_id, told.stop)
        self._tell_acked(state, stream, told)

    def _tell_received(
        self, state: LinkState, stream: StreamCore, told: Told, *, whole: bool
    ) -> None:
        part = stream.incoming
        self._post_next(state, stream, told)
        while part.buffered and not told.expects_posts and not told.posts:
            if self._channel.is_full and not whole:
                self._stays(state, stream)
                return
            data = part.take(MAX_PAYLOAD)
            part.held += len(data)
            at, told.position = told.position, told.position + len(data)
            told.fin = part.is_whole and not part.buffered
            flags = Flag.FIN if told.fin else Flag.NONE
            self._say(Kind.DATA, state.number, stream.stream_id, at, data, flags)
        if part.is_whole and not part.buffered and not told.fin and not part.is_torn:
            told.fin = True
            at = told.position
            self._say(Kind.DATA, state.number, stream.stream_id, at, b"", Flag.FIN)

    def _post_next(self, state: LinkState, stream: StreamCore, told: Told) -> None:
        """Tell of what has landed; where that was all, have the next bytes land further on."""
        part, core = stream.incoming, state.core
        while True:
            position = part.delivered - part.buffered
            if position > told.position and not part.is_torn:
                told.position = position
                self._say(Kind.LANDED, state.number, stream.stream_id, position)
                told.landing.looked()
            if part.posted:
                part.wake_at(told.landing.after(position, part.target_stop))
                return
            if part.target is not None:
                core.withdraw(stream)
            if not told.posts:
                return
            start, stop, at = told.posts.popleft()
            skip = told.position - start
            if skip < stop - start:
                core.post(stream, self._memory[at + skip : at + stop - start])
                if core.owes_credit(stream):
                    self._indebted[core] = None

    def _tell_acked(self, state: LinkState, stream: StreamCore, told: Told) -> None:
        core, lent = state.core, told.lent
        left = core.unacknowledged(stream) if lent is None else lent.unacknowledged
        acked = told.written - left
        is_over = lent is not None and lent.is_finished
        if acked > told.acked or (is_over and not told.finished):
            told.acked, told.finished = max(acked, told.acked), is_over
            flags = Flag.FIN if is_over else Flag.NONE
            self._say(Kind.ACKED, state.number, stream.stream_id, told.acked, flags=flags)
            told.sending.looked()
        below = -1
        if told.want is not None and left > told.want:
            below = told.want
        else:
            told.want = None
        if lent is not None and left and not is_over:
            step = told.sending.after(told.acked, told.written)
            below = max(below, told.written - step)
        if below >= 0:
            core.unacknowledged(stream, wake_below=below)

    def _stays(self, state: LinkState, stream: StreamCore) -> None:
        state.dirty[stream.stream_id] = None
        self._news[state] = None

    def _tell_end(self, state: LinkState, end: ConnectionEnded) -> None:
        # What came before the end is told before it, however far the program is behind.
        for stream_id in list(state.dirty):
            self._tell_stream(state, stream_id, whole=True)
        for stream_id in list(state.told):
            self._tell_stream(state, stream_id, whole=True)
        state.dirty.clear()
        self._tell_facts(state, time.monotonic())
        refused = state.core.peer_error
        self._say(
            Kind.ENDED,
            state.number,
            number=end.code,
            value=[
                end.by.value,
                end.reason,
                end.is_application,
                None if refused is None else [refused.why, refused.fix],
            ],
        )

    def _tell_facts(self, state: LinkState, now: float) -> None:
        facts = new_facts(state, now)
        if facts is not None:
            self._channel.add(encode(Kind.FACTS, state.number, payload=facts))

    async def _look_at_figures(self) -> None:
        while True:
            await anyio.sleep(REPORT_SECONDS)
            if self._channel.is_full:
                continue  # a program that is stopped finds those of a later time
            now = time.monotonic()
            for state in self._links.values():
                self._tell_facts(state, now)
            report = report_of(self._engine.drops, self._socket.refused)
            if report != self._report:
                self._report = report
                self._channel.add(encode(Kind.REPORT, payload=report))
            self._channel.flush()

    def _say(
        self,
        kind: Kind,
        link: int = 0,
        stream: int = 0,
        number: int = 0,
        payload: bytes = b"",
        flags: int = 0,
        *,
        value: CborValue = None,
    ) -> None:
        if value is not None:
            payload = encode_cbor(value, max_size=MAX_PAYLOAD)
        self._channel.add(encode(kind, link, stream, number, payload, flags))
        self._channel.flush_later()

    # -- life

    def say_log(self, name: str, level: int, text: str) -> None:
        """Pass on a record of this process's log, unless the program is far behind."""
        if level >= self._level and not self._channel.is_full:
            self._say(Kind.LOG, value=[name, level, text[:MAX_LOG]])

    async def _watch(self, parent: int) -> None:
        await anyio.wait_readable(parent)
        self._channel.end()

    async def _look_after(self) -> None:
        """See that the program goes on; its peers are told if it does not.

        Else they would take it for alive: it is this process that answers for it.
        """
        why = f"its program did nothing for {self._liveness:g} s: it is stopped, or hangs"
        while True:
            await anyio.sleep(self._liveness / LOOKS)
            worked = processor_time(self._program)
            self._is_program_lost = self._pulse.is_lost(time.monotonic(), worked)
            unheard, self._unheard = self._unheard, []
            self._give_up([*unheard, *(self._by_core if self._is_program_lost else ())], why)

    def leave(self, why: str) -> None:
        """End, and tell the program and all peers why."""
        self._say(Kind.LEAVING, value=why)
        self._channel.flush()
        self._farewell = "the process that moves its packets has ended"
        self._channel.end()

    def _program_is_gone(self) -> None:
        """Tell all peers, who would find out by its silence otherwise."""
        self._over.set()
        self._set_up.set()
        self._was_left = self._give_up([*self._unheard, *self._by_core], self._farewell)

    def _give_up(self, cores: list[ConnectionCore], why: str) -> bool:
        """Close connections; return whether any was still open."""
        was_open = False
        for core in cores:
            with contextlib.suppress(Exception):
                if core.ended is None:
                    was_open = True
                    core.close(AppCode.GONE, why)
                self._engine.pump(core)
        return was_open


_OF_ENDPOINT: dict[Kind, Callable[[Server, Record], None]] = {
    Kind.SETUP: Server._take_setup,
    Kind.OFFER: Server._take_offer,
    Kind.STOP_LISTENING: Server._stop_listening,
    Kind.DIAL: Server._dial,
    Kind.SYNC: Server._sync,
}


def _core(link: Link) -> ConnectionCore:
    assert isinstance(link, ConnectionCore)
    return link


def _is_intact() -> bool:
    return True


def _map(record: Record) -> dict:  # type: ignore[type-arg]
    value = value_of(record)
    if not isinstance(value, dict):
        raise ProtocolError("a program", why="a record that is not as it should be")
    return value
