"""What an authorizer answers: a grant (scopes, expiry, quotas) or a denial.

A scope is one or more words joined by colons, from wide to narrow: ``tensor``, ``tensor:put``,
``collective:my-job``. Granting a scope grants everything below it. ``*`` as the last word stands
for every word there: ``collective:*`` is any job, and ``*`` alone is everything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

__all__ = ["ADMIN", "DEFAULT_SCOPES", "Denial", "Grant", "Quotas", "check_scopes", "permits"]

DEFAULT_SCOPES = ("tensor", "collective", "node", "rpc:call")
"""What an authorized key may do unless its line says otherwise.

Of ``rpc`` only to call what programs expose: ``rpc:pickle`` would let it run any code.
"""

ADMIN = "admin"
"""Changing the node itself: stopping it, editing who may enter. Never among the defaults."""

EVERYTHING = "*"

# More are never needed, and each grant is walked on every stream.
MAX_SCOPES = 64
_MAX_SCOPE_CHARACTERS = 128
_WORD = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_SCOPE = re.compile(rf"(?:{_WORD}(?::{_WORD})*(?::\*)?|\*)", re.ASCII)

_Choice = Callable[[int | None, int | None], int | None]

_CODE = re.compile(r"[a-z][a-z0-9-]{0,31}", re.ASCII)
_MAX_REASON_CHARACTERS = 256


def check_scopes(scopes: Iterable[object]) -> tuple[str, ...]:
    """Return ``scopes``, sorted and without repetition, if each follows the grammar.

    Raises:
        ValueError: one does not (the text names it), or there are more than 64.
        TypeError: ``scopes`` is itself a text.
    """
    if isinstance(scopes, str):
        raise TypeError("scopes are several texts, not one")
    unique: set[str] = set()
    for scope in scopes:
        if not isinstance(scope, str):
            raise ValueError("a scope is text")  # noqa: TRY004 - bad data, not a bad call
        if len(scope) > _MAX_SCOPE_CHARACTERS or _SCOPE.fullmatch(scope) is None:
            raise ValueError(
                f"{scope[:_MAX_SCOPE_CHARACTERS]!r} is not a scope; "
                f"one looks like 'tensor', 'tensor:put' or 'collective:*'"
            )
        unique.add(scope)
        if len(unique) > MAX_SCOPES:
            raise ValueError(f"more than {MAX_SCOPES} scopes")
    return tuple(sorted(unique))


def permits(granted: Iterable[str], scope: str) -> bool:
    """Whether one of the ``granted`` scopes covers ``scope``."""
    return any(_covers(each, scope) for each in granted)


@dataclass(frozen=True, slots=True)
class Quotas:
    """How much a peer may hold at this node at once. None leaves it to the node's own limits.

    Args:
        max_bytes: bytes of all its objects together.
        max_objects: number of its objects.
        max_streams: number of its open streams.

    Raises:
        ValueError: one is negative.
    """

    max_bytes: int | None = None
    max_objects: int | None = None
    max_streams: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_objects", "max_streams"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, and is {value}")

    def combine(self, other: Quotas, choose: _Choice) -> Quotas:
        """Return quotas each of which is what ``choose`` makes of the two."""
        return Quotas(
            max_bytes=choose(self.max_bytes, other.max_bytes),
            max_objects=choose(self.max_objects, other.max_objects),
            max_streams=choose(self.max_streams, other.max_streams),
        )


@dataclass(frozen=True, slots=True)
class Grant:
    """What a peer may do here.

    Args:
        scopes: any iterable of scopes; kept as a frozenset.
        expires_at: Unix time in seconds from which nothing is granted any more; None for never.
        quotas: how much of it.

    Raises:
        ValueError: a scope is malformed.
    """

    scopes: frozenset[str]
    expires_at: float | None = None
    quotas: Quotas = field(default_factory=Quotas)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scopes", frozenset(check_scopes(self.scopes)))

    def permits(self, scope: str) -> bool:
        """Whether the scopes cover ``scope``. Expiry is asked for apart, by :meth:`expired`."""
        return permits(self.scopes, scope)

    def expired(self, now: float) -> bool:
        """Whether the grant has run out at Unix time ``now``."""
        return self.expires_at is not None and now >= self.expires_at

    def restrict(self, scopes: Iterable[str], *, expires_at: float | None = None) -> Grant:
        """Return what is left when only ``scopes`` are wanted, and only until ``expires_at``.

        Of two scopes where one covers the other the narrower stays, and of two times the sooner.
        """
        wanted = check_scopes(scopes)
        kept = {scope for scope in wanted if permits(self.scopes, scope)}
        kept |= {scope for scope in self.scopes if permits(wanted, scope)}
        times = [time for time in (self.expires_at, expires_at) if time is not None]
        return dataclasses.replace(
            self, scopes=frozenset(kept), expires_at=min(times, default=None)
        )

    def meet(self, other: Grant) -> Grant:
        """Return what both grant: common scopes, the sooner expiry, the smaller quotas."""
        narrowed = self.restrict(other.scopes, expires_at=other.expires_at)
        return dataclasses.replace(narrowed, quotas=self.quotas.combine(other.quotas, _smaller))

    def join(self, other: Grant) -> Grant:
        """Return what either grants: all scopes, the later expiry, the larger quotas."""
        times = (self.expires_at, other.expires_at)
        return Grant(
            self.scopes | other.scopes,
            None if None in times else max(time for time in times if time is not None),
            self.quotas.combine(other.quotas, _larger),
        )


@dataclass(frozen=True, slots=True)
class Denial:
    """A refusal as the peer is told it. What should stay here belongs in the log instead.

    Args:
        code: stable and for programs: lower-case words joined by ``-``.
        reason: for people; a phrase of at most 256 characters.
        fix: what the peer can do about it, in sentences of at most 256 characters; None if nothing.

    Raises:
        ValueError: a part is empty, too long or malformed.
    """

    code: str
    reason: str
    fix: str | None = None

    def __post_init__(self) -> None:
        if _CODE.fullmatch(self.code) is None:
            raise ValueError(f"{self.code[:32]!r} is not a code; one looks like 'not-authorized'")
        if not 0 < len(self.reason) <= _MAX_REASON_CHARACTERS:
            raise ValueError(f"a reason has 1 to {_MAX_REASON_CHARACTERS} characters")
        if self.fix is not None and not 0 < len(self.fix) <= _MAX_REASON_CHARACTERS:
            raise ValueError(f"a fix has 1 to {_MAX_REASON_CHARACTERS} characters")


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)


def _larger(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _covers(granted: str, scope: str) -> bool:
    if granted in (EVERYTHING, scope):
        return True
    # "tensor" covers "tensor:put" and "tensor:*"; "tensor:*" covers the first, but not "tensor".
    prefix = granted.removesuffix("*") if granted.endswith(":*") else f"{granted}:"
    return scope.startswith(prefix)
