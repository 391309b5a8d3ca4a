"""A machine's statement that a program's key acts under it, and the identity of a connected peer.

Every program is its own node with a key that lives as long as it runs. Peers know the machine; a
delegation, signed by the machine's key, lets them admit its programs within the scopes it names. A
delegated key can't delegate: only the machine it names is looked up by those who admit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field

from auth.encoding import CborItem, cbor_decode, cbor_encode, check_time
from auth.errors import IdentityError
from auth.grant import Grant, check_scopes
from auth.identity import NodeId, SecretKey

__all__ = ["CLOCK_SKEW", "Delegation", "PeerIdentity"]

CLOCK_SKEW = 60.0
"""Seconds by which two machines' clocks may differ before a statement seems early or late."""

MAX_LIFETIME = 7 * 86400.0
"""Longest life in seconds. A stolen program key is worth nothing after it; long runs ask again."""

MAX_BYTES = 4096
"""Longest encoded form; 64 scopes of common length take half of it."""

_VERSION = 1
_DOMAIN = b"quicmesh delegation 1\0"


@dataclass(frozen=True, slots=True)
class Delegation:
    """``machine`` lets ``program`` act under it.

    Made by :meth:`issue` or :meth:`decode`; nothing in it is true until :meth:`verify` returned.

    Args:
        machine: who signs and answers for the program.
        program: who may act.
        scopes: the most that the program may be granted, sorted.
        issued_at: Unix time in seconds.
        expires_at: Unix time in seconds.
        signature: 64 bytes by ``machine`` over all the rest.
    """

    machine: NodeId
    program: NodeId
    scopes: tuple[str, ...]
    issued_at: float
    expires_at: float
    signature: bytes = field(repr=False)

    @classmethod
    def issue(
        cls,
        machine_key: SecretKey,
        program_id: NodeId,
        scopes: Iterable[str],
        lifetime: float,
        now: float,
    ) -> Delegation:
        """Sign a delegation that holds from ``now`` for ``lifetime`` seconds.

        Raises:
            IdentityError: the lifetime is not within 0 to 7 days, or the scopes are too long.
            ValueError: a scope is malformed.
        """
        if not 0 < lifetime <= MAX_LIFETIME:
            raise IdentityError(
                "signing a delegation",
                why=f"a lifetime of {lifetime} s is not within 0 and {MAX_LIFETIME:.0f} s",
            )
        unsigned = cls(
            machine=machine_key.node_id,
            program=program_id,
            scopes=check_scopes(scopes),
            issued_at=float(now),
            expires_at=float(now + lifetime),
            signature=b"",
        )
        delegation = dataclasses.replace(unsigned, signature=machine_key.sign(unsigned._message()))
        if len(delegation.encode()) > MAX_BYTES:
            raise IdentityError("signing a delegation", why="its scopes are too long in all")
        return delegation

    def encode(self) -> bytes:
        """Return the form for the wire: deterministic CBOR, at most 4096 bytes."""
        return cbor_encode([_VERSION, *self._fields(), self.signature])

    @classmethod
    def decode(cls, data: bytes) -> Delegation:
        """Read what :meth:`encode` wrote. Checks the form, not the signature.

        Raises:
            IdentityError: it is not the one encoding of a delegation; ``why`` says so.
        """
        try:
            delegation = cls._from_fields(cbor_decode(data, max_bytes=MAX_BYTES))
            if delegation.encode() != data:
                raise ValueError("it is not in the one form that may be signed")
        except ValueError as error:
            raise IdentityError("reading a delegation", why=str(error)) from None
        return delegation

    def verify(self, program: NodeId, now: float) -> None:
        """Return if ``machine`` really lets ``program`` act at Unix time ``now``.

        Clocks may differ by 60 s either way.

        Raises:
            IdentityError: it is for another key, not yet or no longer valid, valid for too long, or
                not signed by the machine.
        """
        what = f"delegation by {self.machine.short} to {self.program.short}"
        if self.program != program:
            raise IdentityError(what, why=f"it was presented by {program.short}, another key")
        if not 0 < self.expires_at - self.issued_at <= MAX_LIFETIME:
            raise IdentityError(what, why="its lifetime is not within 0 and 7 days")
        if now < self.issued_at - CLOCK_SKEW:
            raise IdentityError(
                what,
                why=f"it was issued {self.issued_at - now:.0f} s in the future",
                fix="Set the clocks of both machines.",
            )
        if now >= self.expires_at + CLOCK_SKEW:
            raise IdentityError(
                what,
                why=f"it expired {now - self.expires_at:.0f} s ago",
                fix="The program must ask its machine for a new one.",
            )
        if not self.machine.verify(self.signature, self._message()):
            raise IdentityError(what, why="the machine's signature is wrong")

    def _fields(self) -> list[CborItem]:
        times = (self.issued_at, self.expires_at)
        return [self.machine.raw, self.program.raw, list(self.scopes), *times]

    def _message(self) -> bytes:
        return _DOMAIN + cbor_encode(self._fields())

    @classmethod
    def _from_fields(cls, item: CborItem) -> Delegation:
        match item:
            case [
                int(version),
                bytes(machine),
                bytes(program),
                [*scopes],
                float(issued_at),
                float(expires_at),
                bytes(signature),
            ] if version == _VERSION:
                return cls(
                    machine=NodeId(machine),
                    program=NodeId(program),
                    scopes=check_scopes(scopes),
                    issued_at=check_time(issued_at),
                    expires_at=check_time(expires_at),
                    signature=signature,
                )
            case [int(version), *_] if version > _VERSION:
                raise ValueError(f"it is of version {version}; this program reads {_VERSION}")
            case _:
                raise ValueError("it is not a delegation")


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The other end of an authenticated connection.

    Args:
        node_id: the key it proved to hold.
        delegation: the machine it acts under, if it is a machine's program; verified by whoever
            made this.
        address: where it is, for messages to people only.
    """

    node_id: NodeId
    delegation: Delegation | None = None
    address: str = ""

    def narrow(self, grant: Grant) -> Grant:
        """Return what is left of ``grant``: for a program no more than its machine has said.

        Clocks may differ by 60 s, as in :meth:`Delegation.verify`.
        """
        if self.delegation is None:
            return grant
        until = self.delegation.expires_at + CLOCK_SKEW
        return grant.restrict(self.delegation.scopes, expires_at=until)

    @property
    def machine_id(self) -> NodeId:
        """The machine that answers for it: the delegating one, or the node itself."""
        return self.node_id if self.delegation is None else self.delegation.machine

    def __str__(self) -> str:
        return self.node_id.short
