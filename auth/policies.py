"""Authorizers made of other authorizers, or of a function of the application's own."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from auth.authorizer import (
    AccessRequest,
    Authorizer,
    ConnectRequest,
    FetchRequest,
    MintRequest,
    ServiceRequest,
    ask,
)
from auth.grant import Denial, Grant
from auth.threads import run_in_thread

__all__ = ["Decision", "all_of", "by_alpn", "by_service", "callback"]

Decision = (
    Callable[[AccessRequest], Grant | Denial] | Callable[[AccessRequest], Awaitable[Grant | Denial]]
)
"""A function that decides: sync, and then run in a worker thread, or async."""

MESH_ALPN = "mesh/1"
"""The one protocol that has services, and so the later stages."""

_NO_POLICY = Denial("no-policy", "this node has no policy that admits anybody to that")


def callback(decision: Decision) -> Authorizer:
    """Let a function of the application's decide, at every stage.

    It is given the request, whose class says the stage, and for a `ConnectRequest` the credential
    that the peer was given. At the later stages ``request.grant`` is what it granted on connecting,
    and the natural answer if nothing has changed. What it raises, and an answer that takes longer
    than the endpoint's ``authorizer_timeout``, deny; a thread that hangs is left behind.
    """
    return _Callback(decision)


def all_of(*authorizers: Authorizer) -> Authorizer:
    """Grant what all of them grant: common scopes, soonest expiry, smallest quotas.

    They are asked in turn, at every stage, up to the first that denies: whatever costs something,
    such as the spending of an invite, goes last.

    Raises:
        ValueError: there is none to ask.
    """
    if not authorizers:
        raise ValueError("all_of needs an authorizer to ask")
    return _AllOf(authorizers)


def by_alpn(policies: Mapping[str, Authorizer], *, default: Authorizer | None = None) -> Authorizer:
    """Choose by the protocol that a peer wants to speak; what is not named is denied.

    Services, and so the stages after connecting, are those of ``mesh/1``.

    Args:
        policies: by ALPN.
        default: asked about every other protocol.
    """
    return _ByAlpn(dict(policies), default)


def by_service(
    policies: Mapping[str, Authorizer], *, default: Authorizer | None = None
) -> Authorizer:
    """Choose by the service that a peer opens; what is not named is denied.

    Whoever one of the policies admits may connect, with all that they grant together; each then
    decides about its own services alone. A mint is asked of the policy for ``tensor.mint``, a fetch
    of that for ``tensor.fetch``.

    Args:
        policies: by the name of a service, or of a family: ``tensor`` stands for ``tensor.put`` and
            ``collective`` for ``collective:my-job``. The longest name that fits counts.
        default: asked about every other service.
    """
    return _ByService(dict(policies), default)


@dataclass(frozen=True, slots=True)
class _Callback:
    decision: Decision

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        answer: Grant | Denial | Awaitable[Grant | Denial]
        if inspect.iscoroutinefunction(self.decision):
            answer = self.decision(request)
        else:
            # In a tuple: a function that returns an awaitable will do, and trio's threads refuse
            # to return one.
            (answer,) = await run_in_thread(lambda: (self.decision(request),))
        if inspect.isawaitable(answer):
            return await answer
        return answer


@dataclass(frozen=True, slots=True)
class _AllOf:
    authorizers: tuple[Authorizer, ...]

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        common: Grant | None = None
        for authorizer in self.authorizers:
            answer = await ask(authorizer, request)
            if isinstance(answer, Denial):
                return answer
            common = answer if common is None else common.meet(answer)
        assert common is not None
        return common


@dataclass(frozen=True, slots=True)
class _ByName:
    policies: dict[str, Authorizer]
    default: Authorizer | None

    @property
    def authorizers(self) -> tuple[Authorizer, ...]:
        """Each once, in the order given, the default last."""
        named = (*self.policies.values(), *(() if self.default is None else (self.default,)))
        return tuple({id(authorizer): authorizer for authorizer in named}.values())


class _ByAlpn(_ByName):
    __slots__ = ()

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        alpn = request.alpn if isinstance(request, ConnectRequest) else MESH_ALPN
        chosen = self.policies.get(alpn, self.default)
        return _NO_POLICY if chosen is None else await ask(chosen, request)


class _ByService(_ByName):
    __slots__ = ()

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        match request:
            case ConnectRequest():
                return await self._connect(request)
            case ServiceRequest(service=service):
                chosen = self._policy(service)
            case MintRequest():
                chosen = self._policy("tensor.mint")
            case FetchRequest():
                chosen = self._policy("tensor.fetch")
        return _NO_POLICY if chosen is None else await ask(chosen, request)

    async def _connect(self, request: ConnectRequest) -> Grant | Denial:
        granted: Grant | None = None
        denied = _NO_POLICY
        for authorizer in reversed(self.authorizers):
            answer = await ask(authorizer, request)
            if isinstance(answer, Denial):
                denied = answer
            else:
                granted = answer if granted is None else granted.join(answer)
        return denied if granted is None else granted

    def _policy(self, service: str) -> Authorizer | None:
        name = service
        while name:
            if name in self.policies:
                return self.policies[name]
            name = name[: max(name.rfind("."), name.rfind(":"), 0)]
        return self.default
