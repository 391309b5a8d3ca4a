"""A node of the mesh, for async programs: an identity, an endpoint, the peers it knows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import anyio

from auth import (
    DEFAULT_SCOPES,
    AccessDenied,
    AuthorizedKeys,
    Authorizer,
    Credential,
    Delegation,
    Invite,
    MeshError,
    NodeId,
    SecretKey,
    SharedSecret,
    SocketAddress,
    Ticket,
    deny_all,
)
from auth.authorizer import parts
from mesh.bench import register_calls as register_bench
from mesh.directory import Directory
from mesh.errors import NodeError
from mesh.finding import ask_around
from mesh.home import INVITE_LIFETIME, Home
from mesh.joining import join
from mesh.peer import Peer
from mesh.recently_lost import FIRST_PAUSE, LONGEST_PAUSE, RecentlyLost
from mesh.services import register_services
from mesh.status import PeerStatus
from mesh.upkeep import keep_delegated, watch_keys
from transport import (
    Backoff,
    Connection,
    Endpoint,
    EndpointConfig,
    EndpointEvent,
    PeerAddress,
    PeerJoined,
    PeerLeft,
    Unreachable,
    parse_address,
)
from transport.deadlines import seconds_of

if TYPE_CHECKING:
    from mesh.rpc import Agent
    from mesh.tensors import Tensors
    from tensor_bridge import Lanes, LaneStatus, TensorStore

__all__ = ["Node"]

PROGRAM_LIFETIME = 7 * 86400.0
"""Seconds for which a program acts under its machine's key: the longest that peers accept."""


class Offer(Protocol):
    """A service that holds something for peers."""

    def sizes(self) -> dict[str, int]:
        """Return how full its tables are."""


class Node:
    """One node: a key, a policy, an endpoint. Open it with ``async with``, on asyncio or trio.

    Made by a preset, each a whole policy: `peer`, `client`, `worker`, `embedded`. Nothing is
    global, so several nodes may live in one process. Leaving the block closes every connection with
    the reason "left", bounded in time, also when the block was cancelled. The task that enters the
    block should leave it, too; what happens otherwise is described at `transport.Endpoint`.
    """

    def __init__(
        self,
        *,
        key: SecretKey,
        authorizer: Authorizer,
        config: EndpointConfig | None = None,
        delegation: Delegation | None = None,
        home: Home | None = None,
        tensors: bool = False,
        join: Iterable[Ticket | str] = (),
        credential: bytes = b"",
        secret: SharedSecret | None = None,
        shared_memory: bool = True,
    ) -> None:
        files = [part for part in parts(authorizer) if isinstance(part, AuthorizedKeys)]
        keys = files[0] if files else None
        self.home = home
        self.authorizer = authorizer
        self.directory = Directory(None if home is None else home.peers, keys)
        self.started = time.time()
        self._keys = keys
        self._watched = tuple(files)
        self._credential = Credential(credential)
        self._secret = secret
        self._key = key
        self._delegation = delegation
        self._is_passing = False
        """Whether the key was drawn for this run, so that it is of no use to let it in by name."""
        self._config = config or EndpointConfig()
        self._tensors = _load_tensors() if tensors else None
        self._lanes: Lanes | None = None
        self._rpc: Agent | None = None
        self._offers: list[Offer] = []
        self._shared_memory = shared_memory
        self._join = tuple(join)
        self._recently_lost = RecentlyLost()
        self._endpoint: Endpoint | None = None
        self._stack: AsyncExitStack | None = None

    @classmethod
    def peer(
        cls,
        home: Home | str | os.PathLike[str] | None = None,
        *,
        config: EndpointConfig | None = None,
        shared_memory: bool = True,
    ) -> Self:
        """A machine's node, as ``mesh up`` runs it.

        It has the machine's key, admits the keys in the machine's file and whoever brings a
        one-time invite, and offers the tensor service.

        Args:
            home: the state directory, by default `Home`'s own; made, with a key, if it is missing.
            config: addresses to listen on and to advertise, limits, times.
            shared_memory: move tensors, and run collectives, through it where a peer runs on the
                same host; off, all of it goes over QUIC.

        Raises:
            HomeError, KeyFileError: the state directory or its key can't be used.
        """
        where = _home(home)
        key = where.create()
        return cls(
            key=key,
            authorizer=where.authorized_keys(key.node_id),
            config=config,
            home=where,
            tensors=True,
            shared_memory=shared_memory,
        )

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
        """A program's node: its own fresh key, admits nobody, dials `tickets` on entry.

        Where this machine has a key, the program acts under it: peers that authorize the machine
        authorize the program, within `scopes`. Without one, or with `key`, it is a stranger until
        a ticket with a one-time invite lets it in.

        Args:
            tickets: peers to connect to on entry; petnames and node ids will do too. Of several one
                that is there is enough, and the others are warned of.
            home: the state directory with the machine's key and its peers book.
            key: a key of the program's own, for one that is authorized by itself.
            scopes: what the program may do at most, of what peers let the machine do.
            credential: at most 4096 bytes, sent to each peer dialled, for its authorizer alone; a
                ticket with an invite sends that instead.
            secret: proved to peers that admit by a shared secret, and sent to nobody.
            config, shared_memory: as in `peer`.

        Raises:
            HomeError, KeyFileError: the state directory or its key can't be used.
            IdentityError: `scopes` are too long in all, or `credential` is too long.
        """
        where = _home(home)
        delegation = None
        if key is None and where.exists():
            key, delegation = where.program(tuple(scopes), PROGRAM_LIFETIME)
        node = cls(
            key=key or SecretKey.generate(),
            authorizer=deny_all(),
            config=config,
            delegation=delegation,
            home=where if where.exists() else None,
            join=tickets,
            credential=credential,
            secret=secret,
            shared_memory=shared_memory,
        )
        node._is_passing = key is None
        return node

    @classmethod
    def worker(
        cls,
        home: Home | str | os.PathLike[str] | None = None,
        *,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        config: EndpointConfig | None = None,
        shared_memory: bool = True,
    ) -> Self:
        """A program that peers dial as well, such as a rank of a training job.

        It has a fresh key under this machine's, and admits whom the machine admits: the machine's
        own programs, and those of the machines in its file of authorized keys.

        Args:
            home: the state directory with the machine's key.
            scopes: what the program may do at most, of what peers let the machine do.
            config, shared_memory: as in `peer`.

        Raises:
            HomeError, KeyFileError: the state directory or its key can't be used.
            IdentityError: `scopes` are too long in all.
        """
        where = _home(home)
        machine = where.create()
        key, delegation = where.program(tuple(scopes), PROGRAM_LIFETIME)
        return cls(
            key=key,
            authorizer=where.authorized_keys(machine.node_id),
            config=config,
            delegation=delegation,
            home=where,
            shared_memory=shared_memory,
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
        """An application's node: its own key and policy, no file on disk, the application's loop.

        Args:
            key: who the node is; `auth.load_or_create_key` keeps one in a file.
            authorizer: who may do what. There is no default; `allow_any` is an explicit choice.
            config, shared_memory: as in `peer`.
            tensors: offer the tensor service, to peers that are granted the scope ``tensor``.
        """
        return cls(
            key=key,
            authorizer=authorizer,
            config=config,
            tensors=tensors,
            shared_memory=shared_memory,
        )

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise NodeError("opening of a node", why="it was opened before", fix="Make a new one.")
        stack = self._stack = AsyncExitStack()
        endpoint = Endpoint(
            self._key,
            self.authorizer,
            self._config,
            delegation=self._delegation,
            secret=self._secret,
        )
        try:
            self._endpoint = await stack.enter_async_context(endpoint)
            endpoint.subscribe(self._observe)
            register_services(self)
            if self._tensors is not None:
                service = self._tensors.service(endpoint, self.authorizer, self.lanes)
                await stack.enter_async_context(service)
                register_bench(endpoint)
            for keys in self._watched:
                endpoint.start_soon(watch_keys, keys, endpoint)
            if self._delegation is not None and self.home is not None:
                endpoint.start_soon(keep_delegated, endpoint, self.home, self._delegation)
            await join(self, self._join)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._stack is not None
        try:
            await self._stack.__aexit__(kind, error, traceback)
        finally:
            self._endpoint = None

    @property
    def endpoint(self) -> Endpoint:
        """The QUIC endpoint, for an application's own services, calls and ALPN protocols.

        Raises:
            NodeError: the node is not open.
        """
        if self._endpoint is None:
            raise NodeError(
                "use of a node", why="it is not open", fix="Open it first: async with node: ..."
            )
        return self._endpoint

    @property
    def node_id(self) -> NodeId:
        """Who this node is."""
        return self._key.node_id

    @property
    def addresses(self) -> tuple[SocketAddress, ...]:
        """Where others may reach this node, with the real port, the likeliest first."""
        return self.endpoint.addresses

    def ticket(self, invite: Invite | None = None) -> Ticket:
        """Return how to reach this node, and with `invite` the right to enter once.

        The ticket's ``encode()`` is the text to hand over.
        """
        secret = None if invite is None else invite.encode()
        return Ticket(self.node_id, self.addresses, secret)

    def invite(
        self,
        petname: str | None = None,
        *,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        lifetime: float = INVITE_LIFETIME,
    ) -> Ticket:
        """Return a ticket that lets one newcomer in, once: what ``mesh invite`` prints.

        Args:
            petname: what to call the newcomer.
            scopes: what it may do.
            lifetime: seconds for which the invite can be used.

        Raises:
            NodeError: this node takes no invites: it is a program's, or has another authorizer.
            IdentityError: the petname can't be one, or the lifetime is longer than 30 days.
        """
        if self._keys is None or self._delegation is not None:
            raise NodeError(
                "inviting",
                why="invites are to machines, and this node is not one that takes them",
                fix="Open a Node.peer, or use auth.AuthorizedKeys with an InviteBook.",
            )
        return self.ticket(Invite.issue(self._key, scopes, lifetime, time.time(), petname))

    def label(self, node_id: NodeId) -> str:
        """Return the name of a peer for messages: the petname with the short id, or that alone."""
        return self.directory.label(node_id)

    async def connect(self, target: Ticket | NodeId | str, *, timeout: float | None = None) -> Peer:
        """Connect to a peer, or find the connection that is open already.

        Args:
            target: a ticket, a node id (whole, short or a unique beginning), or a petname.
            timeout: seconds for the whole dial; by default the endpoint's ``connect_timeout``.

        Raises:
            UnknownPeer: no peer of that name, or no address of it, is known.
            Unreachable, ConnectTimeout: no address led there; the message names each.
            AccessDenied: the peer refused this node, with the reason it gave.
            TicketError, IdentityError: `target` can't be used as written.
        """
        where, invite = self.directory.resolve(target)
        await self._dial(where, invite, timeout)
        return Peer(self, where.node_id)

    async def dial(
        self, node_id: NodeId, *, timeout: float | None = None, once: bool = False
    ) -> Connection:
        """Return the open connection to a peer, made if need be; what `Peer` stands on.

        A peer that was lost a moment ago may be starting anew: until it has been gone for
        `mesh.recently_lost.RETURN_SECONDS` it is dialled again, at the addresses known by then.

        Args:
            node_id: whom to dial.
            timeout: seconds for all tries; by default the endpoint's ``connect_timeout``.
            once: try a single time, for a caller with pauses of its own.

        Raises:
            UnknownPeer, Unreachable, AccessDenied: as `connect`.
        """
        connection = self.endpoint.connection(node_id)
        return connection or await self._dial(*self.directory.resolve(node_id), timeout, once=once)

    def peers(self) -> tuple[PeerStatus, ...]:
        """Return every peer that is known or connected, and how far it got with each."""
        names = self.directory.names()
        sessions = {connection.peer.node_id: connection for connection in self.endpoint.connections}
        found = []
        for node_id in sorted({*names, *sessions} - {self.node_id}):
            state, reason = self.directory.last_dial(node_id)
            status = PeerStatus(
                node_id=node_id,
                petname=names.get(node_id),
                state=state,
                reason=reason,
                addresses=self.directory.addresses(node_id),
            )
            session = sessions.get(node_id)
            if session is not None:
                lane = None if self._lanes is None else self._lanes.status(session)
                status = status.with_session(session, lane)
            found.append(status)
        return tuple(found)

    @property
    def shared_memory(self) -> bool:
        """Whether tensors and collectives may take memory that peers of this host share."""
        return self._shared_memory

    @property
    def lanes(self) -> Lanes:
        """The ways beside QUIC that tensors can take to and from peers, for a `TensorClient`.

        Those of a node that offers no tensors are there from their first use on.
        """
        if self._lanes is None:
            from tensor_bridge import LaneConfig, Lanes  # imports torch

            self._lanes = Lanes(self.endpoint, LaneConfig(shared_memory=self._shared_memory))
        return self._lanes

    async def rpc(self, *, workers: int | None = None, timeout: float | None = None) -> Agent:
        """Return what makes and answers remote calls, `mesh.rpc.Agent`; at its first use, begin.

        Peers can call what the program exposes, and torch's operators, from then on, as far as this
        node's authorizer grants them the scope ``rpc:call``.

        Args:
            workers: functions that block which run at a time; of the first use.
            timeout: seconds that a call may take unless it is told otherwise; of the latest.
        """
        agent = self.begin_rpc(workers=workers)
        await agent.ready.wait()
        if timeout is not None:
            agent.timeout = timeout
        return agent

    @property
    def agent(self) -> Agent | None:
        """What `rpc` returns, None before its first use."""
        return self._rpc

    def begin_rpc(self, *, workers: int | None = None) -> Agent:
        """Return the same as `rpc`, which may not have begun yet: see `mesh.rpc.Agent.ready`."""
        if self._rpc is None:
            from mesh.rpc import Agent  # imports torch
            from mesh.rpc.agent import DEFAULT_WORKERS

            agent = Agent(self, workers=workers or DEFAULT_WORKERS)
            self.endpoint.start_soon(agent.run)
            self._rpc = agent
        return self._rpc

    async def lane(self, connection: Connection) -> LaneStatus | None:
        """Find out which lane tensors take to and from a peer; None where that is not known.

        A program that has not loaded PyTorch has no lanes, and does not load it for this.
        """
        if self._lanes is None:
            return None
        await self._lanes.meet(connection)
        return self._lanes.status(connection)

    @property
    def store(self) -> TensorStore | None:
        """The tensors this node holds, its own and its peers'; None if it offers no such service.

        For the node's own loop.
        """
        return None if self._tensors is None else self._tensors.store

    def table_sizes(self) -> dict[str, int]:
        """Return how full the node's tables are, to see that nothing leaks."""
        sizes = {"connections": len(self.endpoint.connections)}
        if self._tensors is not None:
            sizes |= self._tensors.sizes()
        for offer in self._offers:
            sizes |= offer.sizes()
        return sizes

    def offer(self, service: Offer) -> None:
        """Count what `service`, offered on this node's endpoint, holds among the node's tables."""
        self._offers.append(service)

    async def _dial(
        self, where: PeerAddress, invite: bytes, timeout: float | None, *, once: bool = False
    ) -> Connection:
        node_id = where.node_id
        where = self._with_own_daemon(where)
        limit = self._config.connect_timeout if timeout is None else seconds_of(timeout)
        deadline = anyio.current_time() + limit
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        has_asked = False
        while (connection := self.endpoint.connection(node_id)) is None:
            if not where.addresses and not self.endpoint.known_addresses(node_id):
                if has_asked or not await ask_around(self, node_id, deadline):
                    raise self.directory.no_address(node_id)
                where, has_asked = self._with_known(where), True
            try:
                connection = await self.endpoint.connect(
                    where,
                    credential=invite or self._credential.secret,
                    timeout=max(0.0, deadline - anyio.current_time()),
                )
                break
            except MeshError as error:
                if isinstance(error, Unreachable) and not has_asked:
                    has_asked = True
                    if await ask_around(self, node_id, deadline):
                        where = self._with_known(where)
                        continue
                pause = backoff.pause()
                left = min(
                    deadline - anyio.current_time(), self._recently_lost.seconds_left(node_id)
                )
                if isinstance(error, AccessDenied) and self._is_passing:
                    error.fix = _invite_fix(error.fix)
                if once or pause >= left or not isinstance(error, Unreachable):
                    self.directory.failed(node_id, error)
                    if error.after is not None:  # of all tries, and not of the last alone
                        error.after = anyio.current_time() - deadline + limit
                    self.directory.name_in(error)
                    raise
            await anyio.sleep(pause)
            where = self._with_known(where)
        return connection

    def _with_known(self, where: PeerAddress) -> PeerAddress:
        """Return where to dial, with what is known by now."""
        known = self.directory.addresses(where.node_id)
        return PeerAddress(where.node_id, tuple(dict.fromkeys((*known, *where.addresses))))

    def _with_own_daemon(self, where: PeerAddress) -> PeerAddress:
        """Return where to dial; for a program of this machine that dials its daemon, right here."""
        own = self._delegation is not None and self._delegation.machine == where.node_id
        running = self.home.running() if own and self.home is not None else None
        if running is None or running.node_id != where.node_id:
            return where
        known = dict.fromkeys((*running.control, *where.addresses))
        return PeerAddress(where.node_id, tuple(known))

    def _observe(self, event: EndpointEvent) -> None:
        match event:
            case PeerJoined(connection) if _may_be_dialled(connection):
                remote = parse_address(connection.info.remote)
                self.directory.reached(connection.peer.node_id, (remote,))
                self._recently_lost.joined(connection.peer.node_id)
            case PeerLeft(connection, error) if _may_be_dialled(connection):
                self.directory.failed(connection.peer.node_id, error)
                self._recently_lost.left(connection, error)
            case _:
                pass


def _may_be_dialled(connection: Connection) -> bool:
    # Programs come and go under ever new keys: nobody will look for one that came in.
    return connection.outbound or connection.peer.delegation is None


def _invite_fix(fix: str | None) -> str | None:
    """Return what a program with a key of this run alone can do, where it is told to have it in."""
    if fix is None or "mesh allow" not in fix:
        return fix
    return (
        "This program's key is new at each start: it needs an invite each time (`mesh invite` on "
        "that machine prints one), or a machine's key to act under (`mesh init`, `mesh join`)."
    )


def _load_tensors() -> Tensors:
    # Imports torch: not for a program that only dials, and not in the middle of a running loop.
    from mesh.tensors import Tensors

    return Tensors()


def _home(home: Home | str | os.PathLike[str] | None) -> Home:
    return home if isinstance(home, Home) else Home(home)
