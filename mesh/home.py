"""The state directory of a machine: its key, whom it trusts, whom it knows, what runs.

========================  =========================================================
``machine.key``           Ed25519 private key, PEM, mode 0600
``authorized_keys``       who may do what here; may be edited while the daemon runs
``peers.json``            petnames, and the addresses that worked last
``invites/``              one file for each one-time invite that was spent
``daemon.json``           of the running daemon: process, boot, addresses
``daemon.lock``           held by the running daemon for as long as it lives
``daemon.log``            what ``mesh up --detach`` writes
``endpoint.sock``         where programs share the running daemon's endpoint process
========================  =========================================================
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from auth import (
    DEFAULT_SCOPES,
    AuthorizedKeys,
    Delegation,
    Invite,
    InviteBook,
    NodeId,
    SecretKey,
    SocketAddress,
    Ticket,
    load_key,
    load_or_create_key,
)
from mesh.errors import HomeError
from mesh.filelock import FileLock
from mesh.peerbook import PeerBook
from mesh.runfile import RunFile

__all__ = ["Home"]

ENVIRONMENT = "MESH_HOME"
"""Environment variable that names the state directory."""

KEY_ENVIRONMENT = "MESH_KEY_PASSPHRASE"
"""Environment variable with the passphrase of the machine's key, where that has one."""

INVITE_LIFETIME = 86400.0
"""Seconds for which an invite can be used unless said otherwise."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Home:
    """A state directory. Making the object touches nothing.

    Args:
        path: the directory; by default ``$MESH_HOME``, or else the platform's directory for the
            user's data, as in ``~/.local/share/quicmesh``.
        ask_passphrase: called with the key's path, once, when the key is protected and
            ``$MESH_KEY_PASSPHRASE`` is not set; returns None where there is nobody to ask.

    Raises:
        HomeError: `path` is an empty text, which would be the current directory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        ask_passphrase: Callable[[Path], str | None] | None = None,
    ) -> None:
        if path is not None and not os.fspath(path):
            raise HomeError(
                "state directory ''",
                why="its name is empty",
                fix="Name one with --home or $MESH_HOME; the current directory is '.'.",
            )
        self.path = _default() if path is None else Path(path).expanduser().absolute()
        self.peers = PeerBook(self.path / "peers.json")
        self.daemon_lock = FileLock(self.path / "daemon.lock")
        self._ask_passphrase = ask_passphrase
        self._passphrase: str | None = None

    def __repr__(self) -> str:
        return f"Home({str(self.path)!r})"

    @property
    def key_path(self) -> Path:
        """Where the machine's private key lies."""
        return self.path / "machine.key"

    @property
    def authorized_keys_path(self) -> Path:
        """Where it stands who may do what here."""
        return self.path / "authorized_keys"

    @property
    def log_path(self) -> Path:
        """Where a detached daemon writes."""
        return self.path / "daemon.log"

    @property
    def endpoint_path(self) -> Path:
        """Where programs come that share the endpoint process of the running daemon."""
        return self.path / "endpoint.sock"

    @property
    def run_path(self) -> Path:
        """Where the running daemon says how to reach it."""
        return self.path / "daemon.json"

    def exists(self) -> bool:
        """Say whether this home has a key, so whether this machine is a node."""
        return self.key_path.exists()

    def create(self, *, passphrase: str | None = None) -> SecretKey:
        """Make the directory (mode 0700) and the machine's key, where they are missing.

        A key made here is protected by `passphrase`, or by ``$MESH_KEY_PASSPHRASE`` if that is set.

        Raises:
            HomeError: the directory can't be made, or belongs to somebody else.
            KeyFileError: there is a key and it can't be used.
        """
        self._check_directory()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()
            self.path.chmod(0o700)
        except OSError as error:
            raise self._unusable(error) from error
        given = passphrase or os.environ.get(KEY_ENVIRONMENT)
        return load_or_create_key(self.key_path, passphrase=given or self._asked_passphrase)

    def key(self) -> SecretKey:
        """Return the machine's key.

        Raises:
            HomeError: there is none yet, or others may write into the directory.
            KeyFileError: it is readable by others, is not a key, or has another passphrase.
        """
        self._check_directory()
        if not self.exists():
            raise HomeError(
                f"this machine's key in {self.path}",
                why="there is none yet",
                fix="Make one with `mesh init`, or name another home with --home or $MESH_HOME.",
            )
        self._check_owner()
        given = os.environ.get(KEY_ENVIRONMENT)
        return load_key(self.key_path, passphrase=given or self._asked_passphrase)

    def key_environment(self) -> dict[str, str]:
        """Return what a child process needs in its environment so as not to ask once more."""
        return {} if self._passphrase is None else {KEY_ENVIRONMENT: self._passphrase}

    def authorized_keys(self, machine: NodeId) -> AuthorizedKeys:
        """Return this home's authorizer: the file of keys, and invites that `machine` issued."""
        return AuthorizedKeys(
            self.authorized_keys_path, machine=machine, invites=InviteBook(self.path / "invites")
        )

    def program(self, scopes: tuple[str, ...], lifetime: float) -> tuple[SecretKey, Delegation]:
        """Return a fresh key for a program, and the machine's word that it acts for it.

        Args:
            scopes: what the program may do at most, of what peers let this machine do.
            lifetime: seconds from now.

        Raises:
            HomeError, KeyFileError: as `key`.
        """
        key = SecretKey.generate()
        machine = self.key()
        return key, Delegation.issue(machine, key.node_id, scopes, lifetime, time.time())

    def renewed(self, delegation: Delegation) -> Delegation:
        """Return the machine's word once more: for the same program, and as long, from now on.

        Raises:
            HomeError, KeyFileError: as `key`.
        """
        lifetime = delegation.expires_at - delegation.issued_at
        return Delegation.issue(
            self.key(), delegation.program, delegation.scopes, lifetime, time.time()
        )

    def invite(
        self,
        addresses: tuple[SocketAddress, ...],
        *,
        petname: str | None = None,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        lifetime: float = INVITE_LIFETIME,
    ) -> Ticket:
        """Return a ticket that lets one machine or program in, once.

        Args:
            addresses: where this machine's daemon can be reached.
            petname: what to call the newcomer.
            scopes: what the newcomer may do.
            lifetime: seconds for which the invite can be used.

        Raises:
            HomeError, KeyFileError: as `key`.
            IdentityError: the petname can't be one, or the lifetime is longer than 30 days.
            TicketError: too many addresses for a ticket.
            ValueError: a scope is malformed.
        """
        key = self.key()
        invite = Invite.issue(key, scopes, lifetime, time.time(), petname)
        return Ticket(key.node_id, addresses, invite.encode())

    def running(self) -> RunFile | None:
        """Return what the daemon of this home says of itself, or None if none runs."""
        return RunFile.load(self.run_path) if self.daemon_lock.is_held() else None

    def _asked_passphrase(self) -> str | None:
        # Remembered: one command reads the key several times.
        if self._passphrase is None and self._ask_passphrase is not None:
            self._passphrase = self._ask_passphrase(self.key_path)
        return self._passphrase

    def _check_directory(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise HomeError(
                f"state directory {self.path}",
                why="it is not a directory",
                fix="Name one, or one that is to be made, with --home or $MESH_HOME.",
            )

    def _check_owner(self) -> None:
        if sys.platform == "win32":
            return  # There the directory lies in the user's profile, under its access list.
        status = self.path.stat()
        if status.st_uid != os.geteuid():
            raise HomeError(
                f"state directory {self.path}",
                why=f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}",
                fix="Name a directory of your own with --home or $MESH_HOME.",
            )
        if status.st_mode & _OTHERS_WRITE and self.exists():
            raise HomeError(
                f"state directory {self.path}",
                why=f"others may write into it (mode {stat.S_IMODE(status.st_mode):04o}) and so "
                "decide whom this machine trusts",
                fix=f"chmod 700 {self.path}",
            )

    def _unusable(self, error: OSError) -> HomeError:
        return HomeError(
            f"state directory {self.path}",
            why=error.strerror or str(error),
            fix="Name a directory that can be written with --home or $MESH_HOME.",
        )


def _default() -> Path:
    named = os.environ.get(ENVIRONMENT)
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs  # Only where it is needed: the command starts sooner.

    return Path(platformdirs.user_data_dir("quicmesh", appauthor=False))
