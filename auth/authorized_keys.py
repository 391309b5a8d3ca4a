"""The file of keys that may enter, as an authorizer that follows every edit of it.

The file is read again whenever it has changed. A change that can't be read is logged with its line
and reason, and the last good set stays, without the keys that no line begins with any more: a
typing error neither locks everybody out nor lets anybody in, nor keeps anybody in who was removed.
A file that is gone admits nobody.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio.to_thread

from auth.authorizer import (
    AccessRequest,
    ConnectRequest,
    FetchRequest,
    covered,
    prompt_after_connect,
)
from auth.delegation import PeerIdentity
from auth.errors import IdentityError
from auth.grant import DEFAULT_SCOPES, EVERYTHING, Denial, Grant, check_scopes
from auth.identity import NodeId
from auth.invite import Invite, InviteBook
from auth.keys_file import (
    AuthorizedKey,
    first_words,
    parse_authorized_keys,
    parse_lines,
    read_keys_file,
    remove_key,
    rewrite,
    unusable,
    with_line,
)

__all__ = ["AuthorizedKeys"]

# Within this time of a change a second one may leave the same time stamp: the file is read again.
_TIMESTAMP_DOUBT_NS = 1_000_000_000

_BAD_INVITE = Denial(
    "invite",
    "the invite is not valid here, has expired, or was used",
    "An invite lets one key in, once. Ask that machine's owner for another: mesh invite",
)
_BAD_DELEGATION = Denial(
    "delegation",
    "the delegation by its machine is not valid now",
    "Start the program anew; if that does not help, compare the clocks of both machines.",
)
_BAD_SOURCE = Denial("source", "the source of the fetch is not among the authorized keys")

_log = logging.getLogger("quicmesh.auth")


class AuthorizedKeys:
    """An authorizer that admits the keys in a file, and enrols whoever brings a one-time invite.

    A machine's program is admitted as its machine, within the scopes of its delegation and for as
    long as both hold. At the later stages the key must still be in the file, and what it may do is
    what the file says then. A fetch is allowed only from a source that could itself enter.

    Safe to use from several threads and, for edits, from several processes.

    Args:
        path: the file. It need not exist; while it does not, nobody in it is admitted.
        machine: this machine's key. It and the programs it delegated to are granted everything that
            their delegation allows, and invites must be signed by it.
        invites: where spent invites are kept; None enrols nobody.
        clock: Unix time in seconds.

    Raises:
        IdentityError: the file can't be trusted or read; names it, the line and the reason.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        machine: NodeId | None = None,
        invites: InviteBook | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(path)
        self._machine = machine
        self._invites = invites
        self._clock = clock
        self._lock = threading.Lock()
        self._subscriptions: list[tuple[_Callback, _Callback | None]] = []
        self._seen: _Stamp | None = None
        self._complaint: str | None = None
        try:
            self._keys = self._load()
        except (ValueError, OSError) as error:
            raise unusable("reading", self._path, error) from error

    @prompt_after_connect
    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        """Answer as :class:`~auth.authorizer.Authorizer` says."""
        self.poll()
        peer, now = request.peer, self._clock()
        if isinstance(request, ConnectRequest) and peer.delegation is not None:
            try:
                peer.delegation.verify(peer.node_id, now)
            except IdentityError as error:
                _log.info("delegation of %s refused: %s", peer, error)
                return _BAD_DELEGATION
        answer = self._standing(peer, now)
        if isinstance(answer, Denial):
            if isinstance(request, ConnectRequest) and not request.outbound:
                return await self._enrol(request, answer, now)
            return answer
        if isinstance(request, FetchRequest):
            source = request.source
            known = PeerIdentity(source) if isinstance(source, NodeId) else source
            if isinstance(self._standing(known, now), Denial):
                return _BAD_SOURCE
        return covered(answer, request)

    def entries(self) -> tuple[AuthorizedKey, ...]:
        """Return the keys as last read, in the order of the file, expired ones too."""
        return tuple(self._keys.values())

    def add(
        self,
        node_id: NodeId,
        petname: str | None = None,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        expires: float | None = None,
    ) -> AuthorizedKey:
        """Write a key into the file, in the place of its old line if it has one; on disk on return.

        Args:
            node_id: whose key.
            petname: what to call it.
            scopes: what it may do.
            expires: Unix time in seconds; None for never.

        Raises:
            IdentityError: the petname can't be one or is taken, or the file can't be edited.
            ValueError: a scope is malformed, or there is none.
        """
        key = AuthorizedKey(node_id, petname, check_scopes(scopes), expires)

        def choose(present: dict[NodeId, AuthorizedKey]) -> AuthorizedKey:
            if petname is not None and petname in _petnames(present, but=node_id):
                raise IdentityError(
                    f"authorizing {node_id.short} as {petname!r}",
                    why="another key has this petname",
                    fix="Choose another one.",
                )
            return key

        self._edit(node_id, choose)
        self.poll()
        return key

    def remove(self, node_id: NodeId) -> bool:
        """Take a key out of the file; False if it was not there. Subscribers are called.

        Lines that can't be read are left as they are, and stand in the way of nothing.

        Raises:
            IdentityError: the file can't be trusted, read or written.
        """
        removed = remove_key(self._path, node_id)
        self.poll()
        return removed

    def subscribe(
        self,
        removed: Callable[[NodeId], object],
        *,
        changed: Callable[[NodeId], object] | None = None,
    ) -> Callable[[], None]:
        """Call back about each key that leaves the file, and each whose line says something else.

        The callbacks run in the thread that noticed, from :meth:`poll`, :meth:`authorize`,
        :meth:`add` or :meth:`remove`; the connections concerned are those whose ``machine_id`` it
        is.

        Args:
            removed: called with a key that is no longer in the file, however it left.
            changed: called with a key whose scopes or expiry are not what they were.

        Returns:
            What ends the subscription.
        """
        subscription = (removed, changed)
        self._subscriptions.append(subscription)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._subscriptions.remove(subscription)

        return unsubscribe

    def poll(self) -> None:
        """Read the file if it has changed; what can't be read is logged, and lets nobody in."""
        with self._lock:
            before = self._keys
            try:
                self._keys = self._load()
                self._complaint = None
            except (ValueError, OSError) as error:
                if isinstance(error, _BrokenLines):
                    self._keys = {k: key for k, key in before.items() if str(k) in error.words}
                complaint = str(error)
                if complaint != self._complaint:
                    _log.error(
                        "%s is left as it was last read, with %d keys: %s",
                        self._path,
                        len(self._keys),
                        complaint,
                    )
                self._complaint = complaint
            now = self._keys
        for node_id, key in before.items() if now is not before else ():
            if node_id not in now:
                _log.info("%s is no longer authorized", node_id.short)
                self._tell(node_id, [removed for removed, _ in self._subscriptions])
            elif _rights(now[node_id]) != _rights(key):
                _log.info("%s is authorized for something else", node_id.short)
                self._tell(node_id, [changed for _, changed in self._subscriptions])

    def _tell(self, node_id: NodeId, callbacks: list[_Callback] | list[_Callback | None]) -> None:
        for callback in callbacks:
            try:
                if callback is not None:
                    callback(node_id)
            except Exception:
                _log.exception("a subscriber failed on a change of %s", node_id.short)

    def _standing(self, peer: PeerIdentity, now: float) -> Grant | Denial:
        machine = peer.machine_id
        if machine == self._machine:
            grant = Grant(frozenset({EVERYTHING}))
        elif (key := self._keys.get(machine)) is not None:
            grant = Grant(frozenset(key.scopes), key.expires_at)
        else:
            why = "its key is not among this node's authorized keys"
            return Denial("not-authorized", why, _fix(machine))
        grant = peer.narrow(grant)
        if not grant.expired(now):
            return grant
        return Denial("expired", "the authorization of its key has expired", _fix(machine))

    async def _enrol(self, request: ConnectRequest, denial: Denial, now: float) -> Grant | Denial:
        peer = request.peer
        if self._machine is None or self._invites is None or not request.credential:
            return denial
        try:
            invite = Invite.decode(request.credential.secret)
        except IdentityError:
            # Not an invite: a credential that another authorizer may know.
            return denial
        try:
            invite.verify(self._machine, now)
        except IdentityError as error:
            _log.info("invite presented by %s refused: %s", peer, error)
            return _BAD_INVITE
        # Off the event loop: this waits for the disk.
        spent = await anyio.to_thread.run_sync(self._spend, self._invites, invite, peer, now)
        if not spent:
            _log.info("invite presented by %s refused: it was used or revoked", peer)
            return _BAD_INVITE
        self.poll()
        return self._standing(peer, now)

    def _spend(self, invites: InviteBook, invite: Invite, peer: PeerIdentity, now: float) -> bool:
        node_id = peer.machine_id

        def choose(present: dict[NodeId, AuthorizedKey]) -> AuthorizedKey:
            # Before the file is written: a crash in between costs an invite, the other order could
            # admit two. After it was read: a file that can't be edited costs none.
            if not invites.spend(invite, node_id, now):
                raise _NotSpent
            old = present.get(node_id)
            petname = invite.petname or (None if old is None else old.petname)
            if petname is not None:
                petname = _free_petname(petname, _petnames(present, but=node_id))
            return AuthorizedKey(node_id, petname, invite.scopes)

        try:
            self._edit(node_id, choose)
        except _NotSpent:
            return False
        _log.info("%s enrolled by invite", node_id.short)
        return True

    def _edit(
        self,
        node_id: NodeId,
        choose: Callable[[dict[NodeId, AuthorizedKey]], AuthorizedKey],
    ) -> None:
        """Write the chosen key in the place of the line of ``node_id``, or behind the last."""

        def edited(text: str) -> str:
            present = {key.node_id: key for key in parse_authorized_keys(text)}
            return with_line(text, node_id, choose(present))

        rewrite(self._path, edited)

    def _load(self) -> dict[NodeId, AuthorizedKey]:
        try:
            stamp = _stamp(self._path.stat())
            if stamp == self._seen:
                return self._keys
            # Taken before reading, so that a change meanwhile is seen next time. A file that can't
            # be used is not read again either, until it changes.
            settled = abs(time.time_ns() - stamp[0]) > _TIMESTAMP_DOUBT_NS
            self._seen = stamp if settled else None
            text = read_keys_file(self._path)
        except FileNotFoundError:
            self._seen = None
            return {}
        keys, complaints = parse_lines(text)
        if not complaints:
            return keys
        if settled or text.endswith("\n"):
            raise _BrokenLines(complaints[0], first_words(text))
        raise ValueError(complaints[0])  # the rest may be about to be written


def _fix(machine: NodeId) -> str:
    """Return what a machine that is refused can do, in words that its owner can pass on."""
    return f"Ask that machine's owner to run: mesh allow {machine}, or for a `mesh invite`."


_Callback = Callable[[NodeId], object]


class _NotSpent(Exception):
    """The invite was used or revoked before."""


class _BrokenLines(ValueError):
    """Lines can't be read; ``words`` are what each line begins with, in lower case."""

    def __init__(self, complaint: str, words: frozenset[str]) -> None:
        super().__init__(complaint)
        self.words = words


_Stamp = tuple[int, int, int, int]


def _stamp(status: os.stat_result) -> _Stamp:
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def _rights(key: AuthorizedKey) -> tuple[tuple[str, ...], float | None]:
    return key.scopes, key.expires_at


def _petnames(keys: dict[NodeId, AuthorizedKey], *, but: NodeId) -> set[str]:
    return {key.petname for key in keys.values() if key.petname is not None and key.node_id != but}


def _free_petname(wanted: str, taken: set[str]) -> str:
    name, number = wanted, 2
    while name in taken:
        suffix = f"-{number}"
        name, number = wanted[: 63 - len(suffix)] + suffix, number + 1
    return name
