"""Authorizers made of others, and of functions."""

from __future__ import annotations

import functools
import threading
import time

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auth import (
    AccessDenied,
    AccessRequest,
    Authorizer,
    ConnectRequest,
    Credential,
    Denial,
    FetchRequest,
    Grant,
    MintRequest,
    PeerIdentity,
    Quotas,
    SecretKey,
    ServiceRequest,
    all_of,
    allow_any,
    any_of,
    by_alpn,
    by_service,
    callback,
    decide,
    deny_all,
)
from auth import policies as module
from auth.authorizer import parts
from auth.threads import MAX_THREADS

pytestmark = pytest.mark.anyio

NODE = SecretKey.from_bytes(bytes(32)).node_id
OTHER = SecretKey.from_bytes(bytes([1]) * 32).node_id
PEER = PeerIdentity(NODE)
ALL = Grant(frozenset({"*"}))
CONNECT = ConnectRequest(PEER, "mesh/1", Credential(b"let me in"))
NOW = 1.8e9


def service(name: str, scope: str = "tensor:put", grant: Grant = ALL) -> ServiceRequest:
    return ServiceRequest(PEER, name, scope, grant)


class Answering:
    def __init__(self, answer: Grant | Denial | Exception) -> None:
        self.answer = answer
        self.asked: list[AccessRequest] = []

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        self.asked.append(request)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def granting(*scopes: str, expires_at: float | None = None, **quotas: int) -> Answering:
    return Answering(Grant(frozenset(scopes), expires_at, Quotas(**quotas)))


async def code_of(
    authorizer: Authorizer, request: AccessRequest = CONNECT, timeout: float = 5.0
) -> str:
    with pytest.raises(AccessDenied) as caught:
        await decide(authorizer, request, timeout=timeout, clock=lambda: NOW)
    assert caught.value.denial is not None
    return caught.value.denial.code


# -- grants


SCOPES = st.sets(
    st.sampled_from(["*", "a", "a:b", "a:*", "a:b:c", "b", "b:x", "c:*", "c"]), max_size=5
)
LIMIT = st.none() | st.integers(0, 5)
GRANTS = st.builds(
    Grant,
    SCOPES.map(frozenset),
    st.none() | st.floats(0, 100),
    st.builds(Quotas, LIMIT, LIMIT, LIMIT),
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(GRANTS, GRANTS, st.sampled_from(["a", "a:b", "a:b:c", "a:z", "b", "b:x", "c", "c:q", "z"]))
def test_meet_is_what_both_grant_and_join_what_either_does(
    one: Grant, other: Grant, scope: str
) -> None:
    meet, join = one.meet(other), one.join(other)
    assert meet.permits(scope) == (one.permits(scope) and other.permits(scope))
    assert join.permits(scope) == (one.permits(scope) or other.permits(scope))
    for now in (0.0, 10.0, 50.0, 100.0):
        assert meet.expired(now) == (one.expired(now) or other.expired(now))
        assert join.expired(now) == (one.expired(now) and other.expired(now))
    for name in ("max_bytes", "max_objects", "max_streams"):
        limits = [getattr(grant.quotas, name) for grant in (one, other)]
        numbers = [limit for limit in limits if limit is not None]
        assert getattr(meet.quotas, name) == min(numbers, default=None)
        assert getattr(join.quotas, name) == (None if None in limits else max(numbers))


# -- all_of


class TestAllOf:
    async def test_the_grant_is_what_all_grant(self) -> None:
        answer = await decide(
            all_of(
                granting("tensor", "node", expires_at=NOW + 9, max_bytes=7),
                granting("tensor:put", "node", expires_at=NOW + 5, max_objects=3),
                granting("*", max_bytes=9),
            ),
            CONNECT,
            clock=lambda: NOW,
        )
        assert answer == Grant(
            frozenset({"tensor:put", "node"}), NOW + 5, Quotas(max_bytes=7, max_objects=3)
        )

    async def test_the_first_denial_counts_and_ends_the_asking(self) -> None:
        last = granting("*")
        denial = Denial("second", "no")
        assert await code_of(all_of(granting("*"), Answering(denial), last)) == "second"
        assert last.asked == []

    async def test_one_that_fails_has_denied(self) -> None:
        broken = Answering(RuntimeError("broken"))
        assert await code_of(all_of(granting("*"), broken)) == "authorizer-failed"

    async def test_each_must_cover_a_later_request(self) -> None:
        both = all_of(granting("tensor"), granting("tensor:get"))
        assert await code_of(both, service("tensor.put")) == "scope"
        await decide(both, service("tensor.get", "tensor:get"))

    async def test_one_that_has_expired_makes_all_of_it_expired(self) -> None:
        assert await code_of(all_of(granting("*", expires_at=NOW), granting("*"))) == "expired"

    async def test_it_needs_somebody_to_ask(self) -> None:
        with pytest.raises(ValueError, match="authorizer"):
            all_of()


# -- by_alpn and by_service


class TestByAlpn:
    async def test_each_protocol_has_its_own(self) -> None:
        mesh, chat = granting("tensor"), granting("chat")
        policy = by_alpn({"mesh/1": mesh, "chat/1": chat})
        assert (await decide(policy, CONNECT)).scopes == {"tensor"}
        assert (await decide(policy, ConnectRequest(PEER, "chat/1"))).scopes == {"chat"}
        assert await code_of(policy, ConnectRequest(PEER, "other/1")) == "no-policy"

    async def test_services_are_those_of_the_mesh(self) -> None:
        policy = by_alpn({"mesh/1": granting("tensor"), "chat/1": deny_all()})
        await decide(policy, service("tensor.put"))
        await decide(policy, MintRequest(PEER, ALL, "read", "o", 1, OTHER))
        await decide(policy, FetchRequest(PEER, ALL, OTHER, 1))
        assert await code_of(by_alpn({"chat/1": allow_any()}), service("x")) == "no-policy"

    async def test_the_default_is_for_all_others(self) -> None:
        policy = by_alpn({"chat/1": deny_all()}, default=allow_any())
        await decide(policy, CONNECT)
        assert await code_of(policy, ConnectRequest(PEER, "chat/1")) == "not-authorized"

    async def test_the_name_of_the_mesh_is_the_transports(self) -> None:
        from transport import MESH_ALPN

        assert module.MESH_ALPN == MESH_ALPN


class TestByService:
    @pytest.mark.parametrize(
        ("name", "chosen"),
        [
            ("tensor.put", "put"),
            ("tensor.get", "tensor"),
            ("tensor", "tensor"),
            ("collective:job", "collective"),
            ("collective:job:x", "collective"),
            ("tensors", None),
            ("node.info", None),
            (".", None),
            ("", None),
        ],
    )
    async def test_the_longest_name_that_fits_counts(self, name: str, chosen: str | None) -> None:
        by_name = {"tensor": granting("*"), "tensor.put": granting("*")}
        by_name["collective"] = granting("*")
        policy = by_service(by_name)
        if chosen is None:
            assert await code_of(policy, service(name)) == "no-policy"
        else:
            await decide(policy, service(name))
            assert by_name["tensor.put" if chosen == "put" else chosen].asked

    async def test_the_default_is_for_all_others(self) -> None:
        policy = by_service({"tensor": deny_all()}, default=allow_any())
        await decide(policy, service("node.info", "node"))
        assert await code_of(policy, service("tensor.put")) == "not-authorized"

    async def test_mint_and_fetch_are_asked_of_their_service(self) -> None:
        mint = MintRequest(PEER, ALL, "read", "o", 1, OTHER)
        fetch = FetchRequest(PEER, ALL, OTHER, 1)
        policy = by_service({"tensor.mint": allow_any(), "tensor.fetch": deny_all()})
        await decide(policy, mint)
        assert await code_of(policy, fetch) == "not-authorized"
        assert await code_of(by_service({"tensor.put": allow_any()}), mint) == "no-policy"

    async def test_whoever_one_admits_may_connect_with_all_that_they_grant(self) -> None:
        policy = by_service({"tensor": granting("tensor", max_bytes=3), "node": granting("node")})
        answer = await decide(policy, CONNECT)
        assert answer == Grant(frozenset({"tensor", "node"}))
        policy = by_service({"tensor": granting("tensor"), "node": deny_all()})
        assert (await decide(policy, CONNECT)).scopes == {"tensor"}
        assert await code_of(policy, service("node.info", "node")) == "not-authorized"
        first = Answering(Denial("first", "no"))
        assert await code_of(by_service({"a": first, "b": deny_all()})) == "first"
        assert await code_of(by_service({})) == "no-policy"

    async def test_a_policy_for_several_services_is_asked_once_at_connect(self) -> None:
        one = granting("*")
        await decide(by_service({"a": one, "b": one}, default=one), CONNECT)
        assert len(one.asked) == 1


def test_what_a_policy_is_made_of_can_be_listed() -> None:
    a, b, c = allow_any(), deny_all(), allow_any(["x"])
    whole = all_of(by_alpn({"x": a}, default=any_of(b)), by_service({"y": c, "z": c}))
    assert [part for part in parts(whole) if part in (a, b, c)] == [a, b, c]
    assert next(parts(whole)) is whole


# -- callback


class TestCallback:
    async def test_a_sync_function_decides_in_a_thread(self) -> None:
        seen: list[tuple[int, AccessRequest]] = []

        def decision(request: AccessRequest) -> Grant | Denial:
            seen.append((threading.get_ident(), request))
            return ALL

        assert await decide(callback(decision), CONNECT) == ALL
        ((thread, request),) = seen
        assert thread != threading.get_ident()
        assert request is CONNECT

    async def test_an_async_function_decides_in_the_loop(self) -> None:
        async def decision(request: AccessRequest) -> Grant | Denial:
            await anyio.lowlevel.checkpoint()
            assert threading.get_ident() == here
            return Denial("closed", "come back tomorrow")

        here = threading.get_ident()
        assert await code_of(callback(decision)) == "closed"

    async def test_an_object_or_a_wrapped_function_will_do(self) -> None:
        class Decider:
            async def __call__(self, request: AccessRequest) -> Grant | Denial:
                return ALL

        async def decision(who: str, request: AccessRequest) -> Grant | Denial:
            return ALL

        assert await decide(callback(Decider()), CONNECT) == ALL
        assert await decide(callback(functools.partial(decision, "x")), CONNECT) == ALL
        assert await decide(callback(lambda request: decision("x", request)), CONNECT) == ALL

    async def test_it_sees_the_credential_and_every_stage(self) -> None:
        def decision(request: AccessRequest) -> Grant | Denial:
            if isinstance(request, ConnectRequest):
                good = request.credential == Credential(b"let me in")
                return Grant(frozenset({"tensor"})) if good else Denial("password", "wrong")
            return request.grant

        await decide(callback(decision), CONNECT)
        assert await code_of(callback(decision), ConnectRequest(PEER, "mesh/1")) == "password"
        mint = MintRequest(PEER, ALL, "read", "o", 1, OTHER)
        for request in (service("tensor.put"), mint, FetchRequest(PEER, ALL, OTHER, 1)):
            assert await decide(callback(decision), request) == ALL

    @pytest.mark.parametrize("answer", [None, True, "yes"])
    async def test_any_other_answer_denies(self, answer: object) -> None:
        assert await code_of(callback(lambda _: answer)) == "authorizer-failed"  # type: ignore[arg-type,return-value]

    async def test_an_exception_denies_and_tells_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def decision(request: AccessRequest) -> Grant | Denial:
            raise OSError("the database is at 192.0.2.7")

        with pytest.raises(AccessDenied) as caught:
            await decide(callback(decision), CONNECT)
        assert "192.0.2.7" not in str(caught.value)
        assert "192.0.2.7" in caplog.text
        assert "let me in" not in caplog.text

    async def test_threads_that_hang_deny_and_are_bounded(self) -> None:
        release = threading.Event()
        running = 0

        def decision(request: AccessRequest) -> Grant | Denial:
            nonlocal running
            running += 1
            release.wait(20)
            return ALL

        policy = callback(decision)
        codes: list[str] = []

        async def ask() -> None:
            codes.append(await code_of(policy, timeout=0.2))

        try:
            began = time.monotonic()
            async with anyio.create_task_group() as tasks:
                for _ in range(MAX_THREADS + 5):
                    tasks.start_soon(ask)
            assert time.monotonic() - began < 5
            assert codes == ["authorizer-timeout"] * (MAX_THREADS + 5)
            assert running <= MAX_THREADS
            # The threads of everybody else are left alone.
            with anyio.fail_after(5):
                assert await anyio.to_thread.run_sync(lambda: 5) == 5
        finally:
            release.set()
        with anyio.fail_after(10):
            while True:  # once they are back, it answers again
                try:
                    await decide(policy, CONNECT, timeout=1)
                    break
                except AccessDenied:
                    pass
