"""A group's life on the client's side: formed at all nodes, watched, and left.

For each member there is a stream to its node, which stands for the membership. All of them are held
by one task in the event loop of the program's node; threads wait for what it finds out.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any

import anyio
from anyio.from_thread import BlockingPortal

from auth import MeshError
from mesh.collective import CollectiveError, RankFailed, RankLost
from mesh.device.errors import DeviceError, SessionLost
from mesh.device.groups import wire
from mesh.device.groups.issuing import SessionPart
from mesh.tasks import helpers
from transport import CborValue, Stream, parse_address
from transport.deadlines import seconds_of

if TYPE_CHECKING:
    from mesh.device.client.moving import Mover
    from mesh.node import Node

__all__ = ["FORMING_SECONDS", "Bond"]

FORMING_SECONDS = 45.0
"""For a group to be formed; nodes give up a little sooner, and say why."""

PAUSE = 0.005
"""Seconds between two looks at whether a group can be left."""

_log = logging.getLogger("quicmesh.device")

TOKEN_BYTES = 32


class Bond:
    """What holds a group of sessions together.

    Args:
        parts: the members.
        timeout: seconds for an operation.

    Attributes:
        formed: done once the group is formed, with an error if it can't be.
        broken: done with the reason once it is broken.
        listeners: called then.
    """

    def __init__(self, parts: Sequence[SessionPart], timeout: float) -> None:
        self.formed: Future[None] = Future()
        self.broken: Future[MeshError] = Future()
        self.listeners: set[Callable[[], object]] = set()
        self._parts = tuple(parts)
        self._timeout = seconds_of(timeout)
        self._movers = [_mover(part) for part in parts]
        self._node: Node = self._movers[0].node
        self._streams: dict[int, Stream] = {}
        self._portal: BlockingPortal | None = None
        self._leaving: anyio.Event | None = None
        self._is_left = False
        self._before: tuple[Future[Any], ...] = ()
        """What is waited for before the group is left."""
        if any(mover.node is not self._node for mover in self._movers):
            raise DeviceError(
                "forming of a group of devices",
                why="they were opened by different nodes of this program, which are strangers to "
                "the peers",
                fix="Open all of them with one node.",
            )

    def begin(self) -> None:
        """Form the group, in the node's loop."""

        async def launch() -> None:
            self._node.endpoint.start_soon(self._run)

        carrier = self._parts[0].session.carrier
        assert carrier is not None
        carrier.spawn(launch)

    def check_waiting(self) -> None:
        """Raise `DeviceError` if this thread must not wait: it is the loop's own."""
        carrier = self._parts[0].session.carrier
        assert carrier is not None
        carrier.check_waiting()

    def check_in_loop(self) -> None:
        """Raise `DeviceError` unless this is the thread of the loop that holds the group."""
        carrier = self._parts[0].session.carrier
        assert carrier is not None
        if not carrier.is_in_loop():
            raise DeviceError(
                "waiting for a group of devices in async code",
                why="they were opened by a node of another event loop",
                fix="Use the blocking calls in a thread, or open the devices by device_async.",
            )

    def leave(self, before: Sequence[Future[Any]] = ()) -> None:
        """Leave the group, at all nodes, also while it is being formed. May be repeated.

        Args:
            before: what has to be done before that, if the group does not break meanwhile.
        """
        self._before = tuple(before)
        self._is_left = True  # for the loop, if it has not begun yet
        portal, leaving = self._portal, self._leaving
        carrier = self._parts[0].session.carrier
        if leaving is not None and carrier is not None and carrier.is_in_loop():
            leaving.set()
        elif portal is not None and leaving is not None:
            try:
                portal.start_task_soon(leaving.set)
            except RuntimeError:
                pass  # it is over already

    def find_lost(self) -> list[int]:
        """Return the members whose peers, or whose sessions there, are lost."""
        portal = self._portal
        if portal is not None:
            try:
                portal.call(self._doubt_all)
            except (RuntimeError, CancelledError):
                pass  # it is over: what is known will have to do
        return [member for member, part in enumerate(self._parts) if part.session.error is not None]

    def label(self, member: int) -> str:
        """Return how to name a member: its devices, and their peer."""
        part = self._parts[member]
        names = ", ".join(str(device.torch_device) for device in part.devices)
        return f"{names} of {part.session.label()}"

    # In the loop.

    async def _run(self) -> None:
        failure: MeshError = SessionLost("a group of devices", why="its node was closed")
        try:
            async with BlockingPortal() as portal:
                self._leaving = anyio.Event()
                self._portal = portal
                if self._is_left:
                    self._leaving.set()
                try:
                    await self._live(self._leaving)
                    failure = DeviceError("a group of devices", why="it was left")
                except MeshError as error:
                    failure = error
                except Exception as error:  # of one group's, and no reason to end the node
                    _log.exception("a group of devices failed")
                    why = f"{type(error).__name__} in this program's node"
                    failure = DeviceError("a group of devices", why=why)
        finally:
            if not self.formed.done():
                self.formed.set_exception(failure)
            self._break(failure)

    async def _live(self, leaving: anyio.Event) -> None:
        try:
            with anyio.fail_after(FORMING_SECONDS) as scope:
                async with helpers() as tasks:
                    tasks.start_soon(_cancel_after, leaving, scope)
                    await self._form()
            if leaving.is_set():
                return
            self.formed.set_result(None)
            async with helpers() as tasks:
                for member in self._streams:
                    tasks.start_soon(self._watch, member)
                await leaving.wait()
                with anyio.move_on_after(self._timeout):
                    while not self._can_leave():  # noqa: ASYNC110 - other threads may end it
                        await anyio.sleep(PAUSE)
        except TimeoutError:
            raise DeviceError(
                "forming of a group of devices",
                after=FORMING_SECONDS,
                why="the peers did not answer in time",
            ) from None
        finally:
            with anyio.CancelScope(shield=True):
                for stream in self._streams.values():
                    await stream.aclose()

    def _can_leave(self) -> bool:
        return self.broken.done() or all(each.done() for each in self._before)

    async def _form(self) -> None:
        group = secrets.token_bytes(16)
        count = len(self._parts)
        tokens = {
            (low, high): secrets.token_bytes(TOKEN_BYTES)
            for high in range(count)
            for low in range(high)
        }
        prepared: dict[int, wire.Prepared] = {}

        async def join(member: int) -> None:
            members = tuple(
                wire.Member(
                    self._movers[each].peer.node_id,
                    part.ranks,
                    tokens.get((min(each, member), max(each, member)), b""),
                )
                for each, part in enumerate(self._parts)
            )
            mover = self._movers[member]
            joining = wire.Join(
                session=mover.number,
                group=group,
                number=self._parts[member].number,
                index=member,
                members=members,
                timeout=self._timeout,
            )
            connection = await mover.peer.connection()
            stream = await connection.open_stream(wire.GROUP_SERVICE, joining.encode())
            self._streams[member] = stream
            stream.timeout = math.inf  # the whole has a deadline
            answer = wire.Prepared.decode(await stream.reply())
            # Where it says it is, and where it was found, which may mean nothing far from here.
            found = parse_address(connection.info.remote)
            prepared[member] = wire.Prepared((*answer.addresses[: wire.MAX_ADDRESSES - 1], found))

        async def connect(member: int) -> None:
            stream = self._streams[member]
            places = tuple(prepared[each].addresses for each in range(count))
            await stream.send_message(wire.Connect(places).encode())
            news = wire.decode_news(await self._receive(member), self.label(member))
            if isinstance(news, wire.Broken):
                if not news.members:
                    raise news.error
                why = f"{self.label(member)} can't reach it: {news.error.why or news.error}"
                raise self._error(RankLost, self._known(news), why)

        await _all(join, count)
        await _all(connect, count)

    async def _watch(self, member: int) -> None:
        """Wait until a member's node says that the group is broken, or can't say anything more."""
        label = self.label(member)
        try:
            news = wire.decode_news(await self._receive(member), label)
        except MeshError as error:
            lost = self._error(RankLost, (member,), error.why or str(error))
            self._break(lost)
            await self._doubt(member)
            self._say_what_stands(lost, (member,))
            return
        if isinstance(news, wire.Broken):
            kind = type(news.error) if isinstance(news.error, CollectiveError) else RankFailed
            members = self._known(news)
            broken = self._error(kind, members, news.error.why or str(news.error))
            self._break(broken)
            if isinstance(news.error, RankLost):
                async with anyio.create_task_group() as tasks:
                    for each in members:
                        tasks.start_soon(self._doubt, each)
                self._say_what_stands(broken, members)

    def _known(self, news: wire.Broken) -> tuple[int, ...]:
        return tuple(each for each in news.members if each < len(self._parts))

    async def _receive(self, member: int) -> CborValue:
        try:
            return await self._streams[member].receive_message()
        except anyio.EndOfStream:
            why = "its node has ended the session's part in it"
            raise SessionLost("a group of devices", peer=self.label(member), why=why) from None

    async def _doubt(self, member: int) -> None:
        """Give up the session of a member whose peer can't be reached within the liveness bound."""
        part, mover = self._parts[member], self._movers[member]
        limit = self._node.endpoint.config.liveness
        try:
            with anyio.fail_after(limit):
                connection = await self._node.dial(mover.peer.node_id, once=True)
                await connection.ping(limit)
        except (MeshError, TimeoutError) as error:
            why = f"it can't be reached: {error}" if str(error) else "it can't be reached"
            part.session.fail(SessionLost("use of a device", peer=part.session.label(), why=why))

    async def _doubt_all(self) -> None:
        async with anyio.create_task_group() as tasks:
            for member in range(len(self._parts)):
                tasks.start_soon(self._doubt, member)

    def _break(self, error: MeshError) -> None:
        if not self.broken.done():
            self.broken.set_result(error)
            for listener in tuple(self.listeners):
                listener()

    def _say_what_stands(self, error: CollectiveError, members: Sequence[int]) -> None:
        """Have an error say what to do, now that it is known whose sessions are lost.

        A session outlives the connection that a group does not.
        """
        lost = [each for each in members if self._parts[each].session.error is not None]
        if lost:
            names = ", ".join(map(self.label, lost))
            error.fix = f"Close the context, and make one without {names}."
        else:
            error.fix = (
                "The devices can be reached, with all that they hold: close the context, and make "
                "a new one of the same devices."
            )

    def _error(
        self, kind: type[CollectiveError], members: Sequence[int], why: str
    ) -> CollectiveError:
        ranks = tuple(sorted(rank for each in members for rank in self._parts[each].ranks))
        names = ", ".join(map(self.label, members))
        return kind(
            "a group of devices",
            ranks=ranks,
            peer=names or None,
            why=why,
            fix="Close the context, and make a new one: of the same devices if they can be used, "
            "else without those that are lost (context.find_lost).",
        )


async def _cancel_after(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _mover(part: SessionPart) -> Mover:
    carrier = part.session.carrier
    if part.session.error is not None:
        raise part.session.lost()
    if carrier is None or carrier.mover is None:
        raise DeviceError("forming of a group of devices", why="their session has no peer")
    return carrier.mover


async def _all(work: Callable[[int], Awaitable[None]], count: int) -> None:
    """Do the work for all members at once; raise the first error as it is."""
    failed: list[MeshError] = []

    async def attempt(member: int) -> None:
        try:
            await work(member)
        except MeshError as error:
            failed.append(error)
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for member in range(count):
            tasks.start_soon(attempt, member)
    if failed:
        raise failed[0]
