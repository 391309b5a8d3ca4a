"""The engine in a process of its own, as the program sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable

import anyio

from auth import NodeId, SecretKey, SocketAddress
from transport.cbor import CborValue
from transport.cbor import encode as encode_cbor
from transport.config import EndpointConfig
from transport.deadlines import Deadlines
from transport.engine import EventHandler, InboundHandler, Link, LinkHandler
from transport.errors import EndpointLost, ProtocolError
from transport.process.channel import Channel
from transport.process.memory import SharedMemory
from transport.process.mirror import MirrorLink
from transport.process.mirror_stream import Piece
from transport.process.pulse import LOOKS, Pulse, processor_time
from transport.process.records import (
    MAX_PAYLOAD,
    VERSION,
    Kind,
    Record,
    encode,
    malformed,
    value_of,
)
from transport.process.setup import map_of
from transport.process.sharing import SharedProcess, join
from transport.process.spawn import WITHOUT, Child, spawn
from transport.protocol.turns import Turns
from transport.readiness import Later
from transport.udp import Refusal, UdpSocket

__all__ = ["ProcessEngine"]

START_SECONDS = 30.0
"""How long the process may do nothing before it is up. It takes half a second of a processor, which
is much longer where many want one."""

STOP_SECONDS = 2.0
"""How long it may take to end once it has nothing more to do."""

CAUSE_SECONDS = 1.0
"""How long to wait for the cause, once it says nothing any more."""

ANSWER_SECONDS = 8.0
"""How long the process may answer nothing though it works."""

TRIM_SECONDS = 4.0
"""How often shared memory that nobody has goes back to the system."""

_LAZY = frozenset({Kind.OPEN, Kind.RELEASE})
"""What may wait for the next packet."""

_log = logging.getLogger("quicmesh.transport")


class ProcessEngine:
    """Moves the packets of one endpoint in a process that is started and stopped with it.

    Args: as of `transport.loop_engine.LoopEngine`. No more than these callbacks runs here, and
        nothing of the program's there.
    """

    def __init__(
        self,
        sock: UdpSocket,
        key: SecretKey,
        config: EndpointConfig,
        turns: Turns,
        *,
        alpns: list[str],
        on_inbound: InboundHandler,
        on_event: EventHandler,
        on_pumped: LinkHandler,
    ) -> None:
        self.deadlines = Deadlines()
        self.drops: dict[str, int] = {}
        self._socket = sock
        self._key = key
        self._config = config
        self._turns = turns
        self._alpns = alpns
        self._on_inbound = on_inbound
        self._on_event = on_event
        self._on_pumped = on_pumped
        self._memory: SharedMemory | None = None
        self._child: Child | SharedProcess | None = None
        self._channel: Channel | None = None
        self._process = os.getpid()
        self._lost: EndpointLost | None = None
        self._links: dict[int, MirrorLink] = {}
        self._touched: dict[MirrorLink, None] = {}
        self._terminated = anyio.Event()
        self._next_outbound = 1
        self._orders: dict[int, tuple[NodeId, str]] = {}
        self._dials: dict[int, tuple[anyio.Event, list[Refusal | None]]] = {}
        self._syncs: deque[tuple[int, list[Piece]]] = deque()
        self._next_sync = 1
        self._pulse = Pulse(config.liveness, time.monotonic())
        self._answers = Pulse(START_SECONDS, time.monotonic())
        self._is_up = False
        self._settled = anyio.Event()
        self._why: str | None = None
        self._unfed: dict[MirrorLink, None] = {}
        self._later = Later(self._go_on)
        self._refused: dict[SocketAddress, Refusal] = {}

    # -- life

    async def open(self) -> None:
        """Take part in the process that is shared, if there is one, or start one.

        That takes a while to come up, and hears then of what was said meanwhile; what peers send
        waits in the socket.

        Raises:
            EndpointLost: it can't be started here.
        """
        with contextlib.suppress(OSError, AttributeError):  # without, bytes take the other way
            self._memory = SharedMemory()
        memory = self._memory
        shared = None if memory is None else memory.descriptor
        setup: dict[str, CborValue] = {
            "version": VERSION,
            "key": self._key.to_bytes(),
            "config": map_of(self._config),
            "alpns": list(self._alpns),
            "level": _log.getEffectiveLevel(),
        }
        begin = encode(Kind.SETUP, payload=encode_cbor(setup, max_size=MAX_PAYLOAD))
        path = self._config.share
        joined = None if path is None else await join(path, begin, self._socket.raw, shared)
        self._child, control = joined or spawn(self._socket.raw, shared)
        _engines.add(self)
        channel = self._channel = Channel(
            control, take=self._take, taken=self._taken, before=_nothing, ended=_nothing
        )
        if joined is None:
            channel.add(begin)
            channel.flush()

    async def run(self) -> None:
        """Serve until cancelled, also when the process is gone: waits still have to end."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.deadlines.run)
            tasks.start_soon(self._later.run)
            tasks.start_soon(self._look_after)
            if self._memory is not None:
                tasks.start_soon(self._trim, self._memory)
            await self._serve()

    async def _serve(self) -> None:
        assert self._channel is not None
        assert self._child is not None
        why: str | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, self._child)
                await self._channel.run()
                tasks.cancel_scope.cancel()
        except* ProtocolError as errors:
            why = f"it does not say what it should: {errors.exceptions[0]}"
            self._child.kill()
        with anyio.move_on_after(CAUSE_SECONDS):
            await self._child.ended()
        self._lose(why or self._why or self._child.cause())

    async def _watch(self, child: Child | SharedProcess) -> None:
        await child.ended()
        assert self._channel is not None
        self._channel.end()

    def _lose(self, why: str) -> None:
        """The process is gone: tell everybody who waits for something of it."""
        error = self._lost = EndpointLost(
            "the endpoint process" if self._is_up else "starting the endpoint process",
            why=why,
            fix="Open the node anew. If nobody has killed it, its log, or that of the system, "
            "says more."
            if self._is_up
            else f"What it wrote to the standard error output says more. {WITHOUT}",
        )
        _log.error("%s", error)
        self._socket.close()  # so that peers, too, learn at once that nobody is there
        assert self._channel is not None
        self._channel.close()  # a process that is shared lets go of this program then
        for link in list(self._links.values()):
            link.fail(error)
            self._report(link)
            self._on_pumped(link)
        self._links.clear()
        self._settled.set()
        self._wake_drain()
        for event, _ in self._dials.values():
            event.set()

    async def up(self) -> None:
        """Wait until the process serves, or is gone."""
        if not self._settled.is_set():
            await self._settled.wait()

    async def drain(self, seconds: float) -> None:
        """Wait until every connection's closing period is over, at most `seconds`."""
        with anyio.move_on_after(seconds):
            while self._links:
                await self._terminated.wait()

    async def close(self) -> None:
        """Let the process end, and let go of everything. `run` must have ended."""
        _engines.discard(self)
        self._settled.set()
        if self._channel is not None:
            self._channel.flush()
            self._channel.close()
        child, self._child = self._child, None
        if child is not None:
            if not self._is_up:
                child.kill()  # it has met nobody
            try:
                with anyio.move_on_after(STOP_SECONDS, shield=True):
                    await child.ended()
            finally:
                child.kill()
                child.reap()
        if self._memory is not None:
            self._memory.close()
        self._socket.close()

    def forked(self) -> None:
        """In a process that was forked from the program: hold nothing of it open."""
        if self._channel is not None:
            self._channel.close()
        if self._child is not None:
            self._child.forget()
            self._child = None
        if self._memory is not None:
            self._memory.close()
        self._socket.close()

    # -- the endpoint's side

    def stop_listening(self) -> None:
        """Meet no more strangers."""
        self._say(encode(Kind.STOP_LISTENING))

    def offer(self, alpns: list[str]) -> None:
        """Speak these protocols with strangers from now on."""
        payload = encode_cbor({"alpns": list(alpns)}, max_size=MAX_PAYLOAD)
        self._say(encode(Kind.OFFER, payload=payload))

    def outbound(self, peer: NodeId, alpn: str) -> Link:
        """Make a connection that insists on `peer`.

        Raises:
            EndpointLost: the process is gone, or this one was forked from the program.
        """
        self._check()
        number, self._next_outbound = self._next_outbound, self._next_outbound + 2
        self._orders[number] = peer, alpn
        return self._link(number, outbound=True)

    async def dial(self, link: Link, address: SocketAddress) -> Refusal | None:
        """Begin the handshake; return why this host sends nothing there, if it does not."""
        number = _own(link).number
        peer, alpn = self._orders.pop(number)
        order: dict[str, CborValue] = {
            "peer": peer.raw,
            "alpn": alpn,
            "host": address[0],
            "port": address[1],
        }
        self._refused.pop(address, None)
        self._check()
        event, answer = self._dials[number] = anyio.Event(), []
        self._say(encode(Kind.DIAL, number, payload=encode_cbor(order, max_size=MAX_PAYLOAD)))
        try:
            await event.wait()
        finally:
            del self._dials[number]
        self._check()
        refusal: Refusal | None = answer[0]
        if refusal is not None:
            self._refused[address] = refusal
        return refusal

    def admitted(self, link: Link) -> None:
        """The peer is authorized, and no stranger any more."""
        self._say(encode(Kind.ADMITTED, _own(link).number))

    def pump(self, link: Link) -> None:
        """Report what happened on the connection, have what was written leave."""
        mirror = _own(link)
        self._report(mirror)
        if self._channel is not None:
            self._channel.flush()

    def why_refused(self, address: SocketAddress) -> str | None:
        """Return why this host sends nothing to `address`, None if it does or was not asked to."""
        refusal = self._refused.get(address)
        return None if refusal is None else refusal.why

    # -- the process's words

    def _take(self, record: Record) -> None:
        handler = _OF_ENDPOINT.get(record.kind)
        if handler is not None:
            handler(self, record)
            return
        link = self._links.get(record.link)
        if link is not None:
            link.take(record)
            self._touched[link] = None

    def _taken(self, more: bool) -> None:
        touched, self._touched = self._touched, {}
        now = time.monotonic()
        self._pulse.heard(now)
        for link in touched:
            self._report(link)
            self._on_pumped(link)
            began, now = now, time.monotonic()
            self._turns.spend(link, now - began)
        self._turns.looked(now, more=more)

    def _report(self, link: MirrorLink) -> None:
        while link.events:
            self._on_event(link, link.events.popleft())

    def _take_ready(self, record: Record) -> None:
        self._is_up = True
        self._settled.set()
        self._answers = Pulse(ANSWER_SECONDS, time.monotonic())

    def _take_dialled(self, record: Record) -> None:
        waiting = self._dials.get(record.link)
        if waiting is not None:
            match value_of(record):
                case {"why": None}:
                    waiting[1].append(None)
                case {"why": str(why), "final": bool(is_final)}:
                    waiting[1].append(Refusal(why, is_final))
                case _:
                    raise malformed()
            waiting[0].set()

    def _take_incoming(self, record: Record) -> None:
        match value_of(record):
            case [str(host), int(port)]:
                self._on_inbound(self._link(record.link, outbound=False), (host, port))
            case _:
                raise malformed()

    def _take_terminated(self, record: Record) -> None:
        link = self._links.pop(record.link, None)
        if link is not None:
            self._touched[link] = None
            self._wake_drain()

    def _take_synced(self, record: Record) -> None:
        self._answers.heard(time.monotonic())
        while self._syncs and self._syncs[0][0] <= record.number:
            _, pieces = self._syncs.popleft()
            assert self._memory is not None
            for piece in pieces:
                self._memory.give(*piece)

    def _take_report(self, record: Record) -> None:
        match value_of(record):
            case {"drops": dict(drops), "refused": list(refused)}:
                self.drops = {name: count for name, count in drops.items() if type(count) is int}
                for entry in refused:
                    match entry:
                        case [str(host), int(port), str(why)]:
                            self._refused.setdefault((host, port), Refusal(why, is_final=False))
            case _:
                raise malformed()

    def _take_leaving(self, record: Record) -> None:
        match value_of(record):
            case str(why):
                self._why = why
                assert self._channel is not None
                self._channel.end()
            case _:
                raise malformed()

    def _take_log(self, record: Record) -> None:
        match value_of(record):
            case [str(name), int(level), str(text)]:
                logging.getLogger(name).log(level, "%s", text)
            case _:
                raise malformed()

    # -- inside

    def _link(self, number: int, *, outbound: bool) -> MirrorLink:
        config = self._config
        link = self._links[number] = MirrorLink(
            number,
            outbound=outbound,
            send_buffer=config.send_buffer,
            stream_window=config.stream_window,
            connection_window=config.connection_window,
            memory=self._memory,
            say=self._say,
            give_later=self._give_later,
            go_on_later=self._go_on_later,
        )
        return link

    def _say(self, record: bytes) -> None:
        channel = self._channel
        assert channel is not None
        if self._lost is None:
            channel.add(record)
            if record[0] not in _LAZY:
                channel.flush_later()

    def _give_later(self, pieces: list[Piece]) -> None:
        """Have pieces free once the process has done what was said until now."""
        if pieces:
            number, self._next_sync = self._next_sync, self._next_sync + 1
            self._syncs.append((number, pieces))
            self._say(encode(Kind.SYNC, number=number))

    def _go_on_later(self, link: MirrorLink) -> None:
        self._unfed[link] = None
        self._later.set()

    def _go_on(self) -> None:
        unfed, self._unfed = self._unfed, {}
        for link in unfed:
            link.go_on()
            self.pump(link)

    async def _look_after(self) -> None:
        """Show the process that this program goes on, and see that it does itself."""
        now = time.monotonic()
        self._pulse.heard(now)
        self._answers.heard(now)
        child = self._child
        assert child is not None
        while self._lost is None:
            number, self._next_sync = self._next_sync, self._next_sync + 1
            self._say(encode(Kind.SYNC, number=number))
            await anyio.sleep(min(self._config.liveness, ANSWER_SECONDS) / LOOKS)
            now, worked = time.monotonic(), processor_time(child.pid)
            if self._pulse.is_lost(now, worked) and self._is_up:
                self._give_up(
                    child, f"it did nothing for {self._config.liveness:g} s, as if it were stopped"
                )
            elif self._answers.is_lost(now, None if self._is_up else worked):
                seconds = ANSWER_SECONDS if self._is_up else START_SECONDS
                self._give_up(child, f"it has not answered for {seconds:g} s")

    def _give_up(self, child: Child | SharedProcess, why: str) -> None:
        self._why = why
        child.kill()
        assert self._channel is not None
        self._channel.end()

    async def _trim(self, memory: SharedMemory) -> None:
        while self._lost is None:
            await anyio.sleep(TRIM_SECONDS)
            memory.trim()

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise EndpointLost(
                "use of an endpoint",
                why=f"it belongs to process {self._process}, from which this one was forked",
                fix="Open one in each process, or start processes with 'spawn'.",
            )
        if self._lost is not None:
            raise EndpointLost("connecting", why=self._lost.why, fix=self._lost.fix)

    def _wake_drain(self) -> None:
        event, self._terminated = self._terminated, anyio.Event()
        event.set()


_OF_ENDPOINT: dict[Kind, Callable[[ProcessEngine, Record], None]] = {
    Kind.READY: ProcessEngine._take_ready,
    Kind.DIALLED: ProcessEngine._take_dialled,
    Kind.INCOMING: ProcessEngine._take_incoming,
    Kind.TERMINATED: ProcessEngine._take_terminated,
    Kind.SYNCED: ProcessEngine._take_synced,
    Kind.REPORT: ProcessEngine._take_report,
    Kind.LOG: ProcessEngine._take_log,
    Kind.LEAVING: ProcessEngine._take_leaving,
}

_engines: weakref.WeakSet[ProcessEngine] = weakref.WeakSet()


def _forked() -> None:
    for engine in list(_engines):
        engine.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _own(link: Link) -> MirrorLink:
    assert isinstance(link, MirrorLink), "a connection of another engine"
    return link


def _nothing() -> None:
    pass
