"""Who may do what: the question an endpoint asks, and the one way it takes the answer.

Deny by default. An endpoint has an authorizer and asks it, through :func:`decide`, at four stages:
when a peer connects, opens a service, has a capability minted, or orders a fetch. An authorizer
that raises, hangs or answers something else has denied; why stays in the local log. No answer at a
later stage can exceed what the peer was granted when it connected.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NoReturn, Protocol, TypeVar

import anyio

from auth.cancellation import is_cancelled
from auth.delegation import PeerIdentity
from auth.errors import AccessDenied, IdentityError
from auth.grant import EVERYTHING, Denial, Grant, permits
from auth.identity import NodeId
from auth.proof import Challenge

__all__ = [
    "AccessRequest",
    "Authorizer",
    "ConnectRequest",
    "Credential",
    "FetchRequest",
    "MintRequest",
    "ServiceRequest",
    "Stage",
    "allow_any",
    "any_of",
    "ask",
    "covered",
    "decide",
    "deny_all",
    "parts",
    "prompt_after_connect",
]

MAX_CREDENTIAL_BYTES = 4096
"""What a stranger may make us hold before it is known."""

SCOPE_MINT = "tensor:copy"
SCOPE_FETCH = "tensor:fetch"

_log = logging.getLogger("quicmesh.auth")

_Authorize = TypeVar("_Authorize", bound=Callable[..., Coroutine[Any, Any, Grant | Denial]])

_FAILED = Denial("authorizer-failed", "the authorizer of that node failed, which counts as a no")
_TIMED_OUT = Denial("authorizer-timeout", "the authorizer of that node gave no answer in time")
_EXPIRED = Denial("expired", "the grant has expired")


class Stage(StrEnum):
    """The four moments at which an authorizer is asked."""

    CONNECT = "connect"
    SERVICE = "service"
    MINT = "mint"
    FETCH = "fetch"


@dataclass(frozen=True, slots=True, eq=False)
class Credential:
    """What a peer presents when it connects, opaque to all but the authorizer; empty if nothing.

    Kept out of ``repr`` and logs, compared in constant time, not picklable.

    Raises:
        IdentityError: more than 4096 bytes.
    """

    secret: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) > MAX_CREDENTIAL_BYTES:
            raise IdentityError(
                "taking a credential",
                why=f"{len(self.secret)} bytes are more than the limit of {MAX_CREDENTIAL_BYTES}",
            )

    def __bool__(self) -> bool:
        return bool(self.secret)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Credential):
            return NotImplemented
        return hmac.compare_digest(self.secret, other.secret)

    def __hash__(self) -> int:
        return hash(self.secret)

    def __repr__(self) -> str:
        return f"Credential(<{len(self.secret)} bytes>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Credential can't be pickled or copied")


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """Asks whether ``peer`` may be connected, and what it may do here.

    Args:
        peer: the other end, its key proved by TLS, its delegation verified.
        alpn: the protocol it wants to speak.
        credential: what it presented.
        outbound: we dialled this peer by its id; the answer is what *it* may do at us, and a denial
            means only that it may open no stream to us.
        challenge: the way to have it prove a secret; None on a protocol that has none, and where
            this is asked apart from a connection.
    """

    stage: ClassVar[Stage] = Stage.CONNECT
    peer: PeerIdentity
    alpn: str
    credential: Credential = field(default_factory=Credential)
    outbound: bool = False
    challenge: Challenge | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """Asks whether ``peer``, granted ``grant``, may use ``service``, which needs ``scope``."""

    stage: ClassVar[Stage] = Stage.SERVICE
    peer: PeerIdentity
    service: str
    scope: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class MintRequest:
    """Asks whether ``peer`` may have us mint a capability.

    It would let ``audience`` do ``action`` with ``object_id``, and expose ``nbytes`` bytes.
    """

    stage: ClassVar[Stage] = Stage.MINT
    scope: ClassVar[str] = SCOPE_MINT
    peer: PeerIdentity
    grant: Grant
    action: str
    object_id: str
    nbytes: int
    audience: NodeId


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks whether ``peer`` may order us to fetch ``nbytes`` bytes from ``source``.

    Asked before ``source`` is dialled, so that it is often known by its node id alone.
    """

    stage: ClassVar[Stage] = Stage.FETCH
    scope: ClassVar[str] = SCOPE_FETCH
    peer: PeerIdentity
    grant: Grant
    source: PeerIdentity | NodeId
    nbytes: int


AccessRequest = ConnectRequest | ServiceRequest | MintRequest | FetchRequest


class Authorizer(Protocol):
    """Anything that answers an :data:`AccessRequest`.

    It may wait and do I/O. It must return a :class:`Grant` or a :class:`Denial`; all else is a
    denial. At the later stages the grant returned must cover the scope that was asked for.
    """

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        """Answer ``request``."""
        ...


async def decide(
    authorizer: Authorizer,
    request: AccessRequest,
    *,
    timeout: float = 5.0,
    clock: Callable[[], float] = time.time,
) -> Grant:
    """Ask ``authorizer`` and return its grant; for a program, as far as its delegation goes.

    Args:
        authorizer: who decides.
        request: what is asked.
        timeout: seconds it may take.
        clock: Unix time, against which grants expire.

    Raises:
        AccessDenied: it denied, raised, took too long, answered something else, or granted what
            does not cover the request. ``denial`` is what the peer is to be told.
    """
    if request.stage is not Stage.CONNECT and _is_prompt(authorizer):
        answer = await ask(authorizer, request, clock())
    else:
        answer = await _ask_in_time(authorizer, request, timeout, clock())
    if isinstance(answer, Grant):
        # Here, so that an authorizer which only looks at the machine can't forget it.
        return request.peer.narrow(answer)
    _log.info("denied (%s: %s): %r", answer.code, answer.reason, request)
    error = AccessDenied(
        "access",
        peer=request.peer,
        stage=request.stage.value,
        why=answer.reason,
        fix=answer.fix,
    )
    error.denial = answer
    raise error


def decide_now(
    authorizer: Authorizer, request: AccessRequest, *, clock: Callable[[], float] = time.time
) -> Grant | None:
    """Return what `decide` would of an authorizer that awaits nothing; None of any other.

    Raises:
        AccessDenied: as `decide`.
    """
    if request.stage is Stage.CONNECT or not _is_prompt(authorizer):
        return None
    deciding = decide(authorizer, request, clock=clock)
    try:
        deciding.send(None)
    except StopIteration as done:
        grant: Grant = done.value
        return grant
    finally:
        deciding.close()
    return None


def prompt_after_connect(method: _Authorize) -> _Authorize:
    """Mark an ``authorize`` that awaits nothing but at `Stage.CONNECT`.

    No time limit could end it anywhere else, and a peer's every request is spared one. Whoever
    overrides the method loses the mark.
    """
    method.is_prompt = True  # type: ignore[attr-defined]
    return method


def covered(answer: Grant, request: AccessRequest) -> Grant | Denial:
    """Return ``answer`` if it and the grant of the connection cover ``request``, else a denial."""
    if isinstance(request, ConnectRequest) or (
        request.grant.permits(request.scope) and answer.permits(request.scope)
    ):
        return answer
    scope, machine = request.scope[:64], request.peer.machine_id
    fix = f"Ask that node's owner for it, as by: mesh allow {machine} --scopes ...,{scope}"
    delegation = request.peer.delegation
    if delegation is not None and not permits(delegation.scopes, request.scope):
        fix = f"The program asked its machine for less: open its node with scopes=(..., {scope!r})"
    return Denial("scope", f"it is not granted the scope {scope!r}", fix)


def allow_any(scopes: Iterable[str] = (EVERYTHING,)) -> Authorizer:
    """Admit every peer that proves a key, with ``scopes``. For closed networks and tests.

    Raises:
        ValueError: a scope is malformed.
    """
    return _Fixed(Grant(frozenset(scopes)))


def deny_all() -> Authorizer:
    """Admit nobody: a node that only dials."""
    return _Fixed(Denial("not-authorized", "this node admits nobody"))


def any_of(*authorizers: Authorizer) -> Authorizer:
    """Ask each in turn, at every stage; the first grant wins, else the first denial counts.

    One that raises has denied, and the next is asked.

    Raises:
        ValueError: there is none to ask.
    """
    if not authorizers:
        raise ValueError("any_of needs an authorizer to ask")
    return _AnyOf(authorizers)


def parts(authorizer: Authorizer) -> Iterator[Authorizer]:
    """Yield ``authorizer`` and, where it combines others, all of those, each before its own."""
    yield authorizer
    for part in getattr(authorizer, "authorizers", ()):
        yield from parts(part)


@dataclass(frozen=True, slots=True)
class _Fixed:
    answer: Grant | Denial

    @prompt_after_connect
    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        return self.answer


@dataclass(frozen=True, slots=True)
class _AnyOf:
    authorizers: tuple[Authorizer, ...]

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        denials: list[Denial] = []
        for authorizer in self.authorizers:
            answer = await ask(authorizer, request)
            if isinstance(answer, Grant):
                return answer
            denials.append(answer)
        return denials[0]


def _is_prompt(authorizer: Authorizer) -> bool:
    return getattr(getattr(authorizer, "authorize", None), "is_prompt", False) is True


async def _ask_in_time(
    authorizer: Authorizer, request: AccessRequest, timeout: float, now: float
) -> Grant | Denial:
    answer: Grant | Denial = _TIMED_OUT
    with anyio.move_on_after(timeout) as scope:
        answer = await ask(authorizer, request, now)
    # Also for an authorizer that swallowed the cancellation: a late yes is not a yes.
    if scope.cancel_called:
        _log.error("authorizer gave no answer within %.1f s to %r", timeout, request)
        return _TIMED_OUT
    return answer


async def ask(
    authorizer: Authorizer, request: AccessRequest, now: float | None = None
) -> Grant | Denial:
    """Return the answer of one authorizer, which covers the request; a failure is a denial.

    Expiry is judged at Unix time ``now``, or where that is None by whoever asked first.
    """
    try:
        answer: object = await authorizer.authorize(request)
    except Exception:
        _log.exception("authorizer failed on %r", request)
        return _FAILED
    except anyio.get_cancelled_exc_class():
        if await is_cancelled():
            raise
        _log.exception("authorizer awaited what was cancelled, on %r", request)
        return _FAILED
    if isinstance(answer, Denial):
        return answer
    if not isinstance(answer, Grant):
        _log.error("authorizer answered a %s to %r", type(answer).__name__, request)
        return _FAILED
    if now is not None and (
        answer.expired(now)
        or (not isinstance(request, ConnectRequest) and request.grant.expired(now))
    ):
        return _EXPIRED
    return covered(answer, request)
