"""One-time invites: a machine's signed word that whoever presents it first may enter.

An invite is a bearer secret until it is spent. That it is spent once is kept by a file whose name
is the invite's nonce: creating a file that must not exist is atomic across threads and processes,
and survives a restart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from auth.encoding import CborItem, cbor_decode, cbor_encode, check_time
from auth.errors import IdentityError
from auth.files import create_file
from auth.grant import check_scopes
from auth.identity import NodeId, SecretKey, check_petname

__all__ = ["Invite", "InviteBook"]

MAX_LIFETIME = 30 * 86400.0
"""Longest life in seconds. A record of a spent one is kept until a day after that."""

MAX_BYTES = 1024
"""Longest encoded form: it travels inside a ticket of at most 2048 characters."""

NONCE_BYTES = 16

_VERSION = 1
_DOMAIN = b"quicmesh invite 1\0"

# Clocks are set now and then; a spent invite must not come to life again by that.
_DAY = 86400.0

# What does not look so is never pruned: a revocation, or a file that is still being written.
_RECORD = re.compile(r"spent by [a-z2-7]{52}, expires (?P<expires>[0-9]{1,12})\n")


@dataclass(frozen=True, slots=True)
class Invite:
    """``issuer`` lets one node in. Made by :meth:`issue` or :meth:`decode`.

    Args:
        issuer: the machine to enter, and who signed.
        nonce: 16 random bytes that make it this invite and no other.
        scopes: what the node that uses it is granted, sorted.
        expires_at: Unix time in seconds, by the issuer's clock.
        petname: what the issuer will call the node.
        signature: 64 bytes by ``issuer`` over all the rest.
    """

    issuer: NodeId
    nonce: bytes = field(repr=False)
    scopes: tuple[str, ...]
    expires_at: float
    petname: str | None
    signature: bytes = field(repr=False)

    @classmethod
    def issue(
        cls,
        machine_key: SecretKey,
        scopes: Iterable[str],
        lifetime: float,
        now: float,
        petname: str | None = None,
    ) -> Invite:
        """Sign an invite that can be used from ``now`` for ``lifetime`` seconds.

        Raises:
            IdentityError: the lifetime is not within 0 to 30 days, the petname can't be one, or the
                scopes are too long in all.
            ValueError: a scope is malformed, or there is none.
        """
        if not 0 < lifetime <= MAX_LIFETIME:
            raise IdentityError(
                "making an invite",
                why=f"a lifetime of {lifetime / _DAY:g} days is not within 0 and "
                f"{MAX_LIFETIME / _DAY:.0f} days",
            )
        chosen = check_scopes(scopes)
        if not chosen:
            raise ValueError("there is no scope: an invite to nothing lets nobody in")
        unsigned = cls(
            issuer=machine_key.node_id,
            nonce=secrets.token_bytes(NONCE_BYTES),
            scopes=chosen,
            expires_at=float(now + lifetime),
            petname=None if petname is None else check_petname(petname),
            signature=b"",
        )
        invite = dataclasses.replace(unsigned, signature=machine_key.sign(unsigned._message()))
        if len(invite.encode()) > MAX_BYTES:
            raise IdentityError("making an invite", why="its scopes are too long in all")
        return invite

    def encode(self) -> bytes:
        """Return the form for tickets and credentials: deterministic CBOR, at most 1024 bytes."""
        return cbor_encode([_VERSION, *self._fields(), self.signature])

    @classmethod
    def decode(cls, data: bytes) -> Invite:
        """Read what :meth:`encode` wrote. Checks the form, not the signature.

        Raises:
            IdentityError: it is not the one encoding of an invite; ``why`` says so.
        """
        try:
            invite = cls._from_fields(cbor_decode(data, max_bytes=MAX_BYTES))
            if invite.encode() != data:
                raise ValueError("it is not in the one form that may be signed")
        except ValueError as error:
            raise IdentityError("reading an invite", why=str(error)) from None
        return invite

    def verify(self, issuer: NodeId, now: float) -> None:
        """Return if ``issuer`` signed this and it holds at Unix time ``now``, spent or not.

        Raises:
            IdentityError: it is for another node, has expired, or was altered.
        """
        what = f"invite to {self.issuer.short}"
        if self.issuer != issuer:
            raise IdentityError(what, why=f"it was presented to {issuer.short}, another node")
        if not self.issuer.verify(self.signature, self._message()):
            raise IdentityError(what, why="its signature is wrong: it was altered or made up")
        if now >= self.expires_at:
            raise IdentityError(
                what, why=f"it expired {now - self.expires_at:.0f} s ago", fix="Ask for a new one."
            )

    def _fields(self) -> list[CborItem]:
        return [self.issuer.raw, self.nonce, list(self.scopes), self.expires_at, self.petname]

    def _message(self) -> bytes:
        return _DOMAIN + cbor_encode(self._fields())

    @classmethod
    def _from_fields(cls, item: CborItem) -> Invite:
        match item:
            case [
                int(version),
                bytes(issuer),
                bytes(nonce),
                [*scopes],
                float(expires_at),
                (str() | None) as petname,
                bytes(signature),
            ] if version == _VERSION and len(nonce) == NONCE_BYTES:
                return cls(
                    issuer=NodeId(issuer),
                    nonce=nonce,
                    scopes=check_scopes(scopes),
                    expires_at=check_time(expires_at),
                    petname=None if petname is None else check_petname(petname),
                    signature=signature,
                )
            case [int(version), *_] if version > _VERSION:
                raise ValueError(f"it is of version {version}; this program reads {_VERSION}")
            case _:
                raise ValueError("it is not an invite")


class InviteBook:
    """Which invites are spent: one file for each in ``directory``, made (0700) when needed.

    Several processes may use one directory at once.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = Path(directory)

    def spend(self, invite: Invite, by: NodeId, now: float) -> bool:
        """Spend ``invite``, if nobody has and it has not expired; True for exactly one caller ever.

        On disk when this returns. The caller has verified the invite.

        Raises:
            OSError: it can't be recorded, and is not spent by this call.
        """
        self._prune(now)
        if now >= invite.expires_at:
            return False
        return self._record(invite.nonce, f"spent by {by}, expires {invite.expires_at:.0f}\n")

    def revoke(self, nonce: bytes) -> bool:
        """Make the invite of ``nonce`` unusable for ever; False if it was spent or revoked already.

        Raises:
            ValueError: ``nonce`` is not 16 bytes.
            OSError: it can't be recorded.
        """
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        return self._record(nonce, "revoked\n")

    def _record(self, nonce: bytes, text: str) -> bool:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            create_file(self._path(nonce), text.encode("ascii"))
        except FileExistsError:
            return False
        return True

    def _path(self, nonce: bytes) -> Path:
        return self._directory / nonce.hex()

    def _prune(self, now: float) -> None:
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            # Another process may be pruning too.
            with contextlib.suppress(FileNotFoundError):
                record = _RECORD.fullmatch(path.read_text("ascii", errors="replace"))
                if record is not None and now > int(record["expires"]) + _DAY:
                    path.unlink()
