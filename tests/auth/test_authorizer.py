from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import anyio
import pytest

from auth import (
    AccessDenied,
    AccessRequest,
    AuthorizedKeys,
    Authorizer,
    Challenge,
    ConnectRequest,
    Credential,
    Delegation,
    Denial,
    FetchRequest,
    Grant,
    IdentityError,
    MintRequest,
    PeerIdentity,
    SecretKey,
    ServiceRequest,
    SharedSecret,
    Stage,
    allow_any,
    any_of,
    decide,
    deny_all,
)
from auth.delegation import CLOCK_SKEW

pytestmark = pytest.mark.anyio

NODE = SecretKey.from_bytes(bytes(32)).node_id
OTHER = SecretKey.from_bytes(bytes([1]) * 32).node_id
PEER = PeerIdentity(NODE)
ALL = Grant(frozenset({"*"}))
TENSOR = Grant(frozenset({"tensor"}))
CONNECT = ConnectRequest(PEER, "mesh/1")
NOW = 1.8e9


def service(scope: str, grant: Grant = ALL) -> ServiceRequest:
    return ServiceRequest(PEER, "tensor", scope, grant)


class Answering:
    """An authorizer that answers or raises what it was told to, and remembers what it was asked."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[AccessRequest] = []

    async def authorize(self, request: AccessRequest) -> Grant | Denial:
        self.asked.append(request)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[return-value]


async def denial_of(
    authorizer: Authorizer, request: AccessRequest = CONNECT, *, timeout: float = 5.0
) -> Denial:
    with pytest.raises(AccessDenied) as caught:
        await decide(authorizer, request, timeout=timeout, clock=lambda: NOW)
    denial = caught.value.denial
    assert denial is not None
    assert caught.value.why == denial.reason
    assert caught.value.stage == request.stage.value
    assert caught.value.peer == NODE.short
    return denial


async def test_a_grant_is_returned() -> None:
    assert await decide(Answering(TENSOR), CONNECT) == TENSOR


async def test_a_denial_is_raised_with_its_code_and_reason() -> None:
    denial = Denial("closed", "this node is closed today")
    assert await denial_of(Answering(denial)) == denial


async def test_an_exception_is_a_denial_that_tells_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    denial = await denial_of(Answering(RuntimeError("the database is at 192.0.2.7")))
    assert denial.code == "authorizer-failed"
    assert "192.0.2.7" not in denial.reason
    assert "192.0.2.7" in caplog.text


@pytest.mark.parametrize("answer", [None, True, "yes", {"tensor"}, ALL.scopes])
async def test_any_other_answer_is_a_denial(answer: object) -> None:
    assert (await denial_of(Answering(answer))).code == "authorizer-failed"


async def test_no_answer_in_time_is_a_denial() -> None:
    class Hanging:
        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            await anyio.sleep_forever()
            return ALL

    with anyio.fail_after(5):
        assert (await denial_of(Hanging(), timeout=0.01)).code == "authorizer-timeout"


async def test_a_late_yes_is_a_denial() -> None:
    class Stubborn:
        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
            return ALL

    assert (await denial_of(Stubborn(), timeout=0.01)).code == "authorizer-timeout"


async def test_who_overrides_an_authorizer_that_answers_at_once_has_a_time_limit_again(
    tmp_path: Path,
) -> None:
    class Slow(AuthorizedKeys):
        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            await anyio.sleep_forever()
            return ALL

    with anyio.fail_after(3):
        denial = await denial_of(Slow(tmp_path / "authorized_keys"), service("x"), timeout=0.02)
    assert denial.code == "authorizer-timeout"


async def test_what_waits_when_somebody_connects_has_a_time_limit_there() -> None:
    async def silence() -> None:
        await anyio.sleep_forever()

    request = ConnectRequest(PEER, "mesh/1", challenge=Challenge(silence))
    with anyio.fail_after(3):
        denial = await denial_of(SharedSecret(bytes(range(32))), request, timeout=0.02)
    assert denial.code == "authorizer-timeout"


@pytest.mark.parametrize("stage", [Stage.SERVICE, Stage.MINT, Stage.FETCH])
async def test_who_is_said_to_answer_at_once_awaits_nothing(stage: Stage, tmp_path: Path) -> None:
    request = {
        Stage.SERVICE: service("tensor"),
        Stage.MINT: MintRequest(PEER, ALL, "read", "x", 1, OTHER),
        Stage.FETCH: FetchRequest(PEER, ALL, OTHER, 1),
    }[stage]
    keys = AuthorizedKeys(tmp_path / "authorized_keys")
    keys.add(NODE)
    for authorizer in (allow_any(), deny_all(), keys, SharedSecret(bytes(range(32)))):
        assert authorizer.authorize.is_prompt  # type: ignore[attr-defined]
        with pytest.raises(StopIteration):
            authorizer.authorize(request).send(None)  # type: ignore[attr-defined]


async def test_cancelling_the_asker_is_no_answer() -> None:
    entered = anyio.Event()

    class Hanging:
        async def authorize(self, request: AccessRequest) -> Grant | Denial:
            entered.set()
            await anyio.sleep_forever()
            return ALL

    answered = False

    async def ask() -> None:
        nonlocal answered
        try:
            await decide(Hanging(), CONNECT)
        except AccessDenied:
            answered = True

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await entered.wait()
            tasks.cancel_scope.cancel()
    assert not answered


@pytest.mark.parametrize("request_grant", [ALL, TENSOR])
async def test_a_later_stage_is_granted_within_both_grants(request_grant: Grant) -> None:
    answer = await decide(Answering(ALL), service("tensor:put", request_grant))
    assert answer == ALL
    assert await decide(Answering(TENSOR), service("tensor:put", request_grant)) == TENSOR


@pytest.mark.parametrize(
    "request_",
    [
        service("node:stop", TENSOR),
        service("admin", Grant(frozenset())),
        MintRequest(PEER, Grant(frozenset({"tensor:get"})), "read", "o", 1, OTHER),
        FetchRequest(PEER, Grant(frozenset({"tensor:copy"})), OTHER, 1),
    ],
    ids=lambda request: request.stage.value,
)
async def test_no_later_stage_exceeds_the_grant_of_the_connection(request_: AccessRequest) -> None:
    assert (await denial_of(allow_any(), request_)).code == "scope"


async def test_the_answer_must_cover_what_was_asked() -> None:
    assert (await denial_of(allow_any(["tensor"]), service("node"))).code == "scope"
    mint = MintRequest(PEER, ALL, "read", "object", 1, OTHER)
    assert (await denial_of(allow_any(["tensor:fetch"]), mint)).code == "scope"
    await decide(allow_any(["tensor:copy"]), mint)
    fetch = FetchRequest(PEER, ALL, PeerIdentity(OTHER), 1)
    assert (await denial_of(allow_any(["tensor:copy"]), fetch)).code == "scope"
    await decide(allow_any(["tensor:fetch"]), fetch)


async def test_an_expired_grant_grants_nothing() -> None:
    old, young = Grant(frozenset({"*"}), NOW), Grant(frozenset({"*"}), NOW + 1)
    assert await decide(Answering(young), service("a", young), clock=lambda: NOW) == young
    assert (await denial_of(Answering(old))).code == "expired"
    assert (await denial_of(Answering(young), service("a", old))).code == "expired"


async def test_allow_any_admits_at_every_stage() -> None:
    fetch = FetchRequest(PEER, ALL, OTHER, 1)
    mint = MintRequest(PEER, ALL, "read", "object", 1, OTHER)
    for request in (CONNECT, service("admin"), mint, fetch):
        assert (await decide(allow_any(), request)).scopes == {"*"}
    with pytest.raises(ValueError, match="not a scope"):
        allow_any(["a b"])


async def test_deny_all_admits_nobody() -> None:
    for request in (CONNECT, service("tensor")):
        assert (await denial_of(deny_all(), request)).code == "not-authorized"


class TestAnyOf:
    async def test_the_first_grant_wins(self) -> None:
        last = Answering(ALL)
        answer = await decide(any_of(deny_all(), Answering(TENSOR), last), CONNECT)
        assert answer == TENSOR
        assert last.asked == []

    async def test_if_all_deny_the_first_denial_counts(self) -> None:
        first = Denial("first", "because")
        assert await denial_of(any_of(Answering(first), deny_all())) == first

    async def test_one_that_fails_has_denied(self, caplog: pytest.LogCaptureFixture) -> None:
        broken = Answering(RuntimeError("broken"))
        assert await decide(any_of(broken, Answering(TENSOR)), CONNECT) == TENSOR
        assert (await denial_of(any_of(broken, deny_all()))).code == "authorizer-failed"
        assert "broken" in caplog.text

    async def test_one_that_does_not_cover_the_request_has_denied(self) -> None:
        answer = await decide(any_of(allow_any(["tensor"]), Answering(ALL)), service("node"))
        assert answer == ALL

    async def test_later_stages_ask_the_same(self) -> None:
        asked = Answering(ALL)
        await decide(any_of(asked), CONNECT)
        await decide(any_of(asked), service("tensor"))
        assert [request.stage for request in asked.asked] == [Stage.CONNECT, Stage.SERVICE]

    async def test_it_needs_somebody_to_ask(self) -> None:
        with pytest.raises(ValueError, match="authorizer"):
            any_of()


class TestCredential:
    secret = b"correct horse battery staple"

    async def test_it_is_bounded(self) -> None:
        Credential(bytes(4096))
        with pytest.raises(IdentityError, match="4097"):
            Credential(bytes(4097))

    async def test_it_is_empty_or_not(self) -> None:
        assert not Credential()
        assert Credential(b"x")

    async def test_it_compares_by_content(self) -> None:
        assert Credential(b"x") == Credential(b"x")
        assert hash(Credential(b"x")) == hash(Credential(b"x"))
        assert Credential(b"x") != Credential(b"y")
        assert Credential(b"x") != b"x"

    async def test_it_can_not_be_copied(self) -> None:
        for copies in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="can't be pickled or copied"):
                copies(Credential(self.secret))

    async def test_it_is_in_no_log_and_no_message(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        request = ConnectRequest(PEER, "mesh/1", Credential(self.secret))
        for authorizer in (deny_all(), Answering(RuntimeError("x")), Answering(None)):
            with pytest.raises(AccessDenied) as caught:
                await decide(authorizer, request)
            assert "horse" not in str(caught.value)
        assert "mesh/1" in caplog.text
        assert "horse" not in caplog.text
        assert "horse" not in repr(request)


async def test_the_error_survives_a_process_boundary() -> None:
    with pytest.raises(AccessDenied) as caught:
        await decide(deny_all(), CONNECT)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.denial == caught.value.denial


async def test_a_program_gets_no_more_than_its_delegation_says_whatever_the_authorizer_grants() -> (
    None
):
    machine, program = SecretKey.generate(), SecretKey.generate()
    delegation = Delegation.issue(machine, program.node_id, ["tensor:put"], 100.0, NOW)
    peer = PeerIdentity(program.node_id, delegation)
    grant = await decide(allow_any(), ConnectRequest(peer, "mesh/1"), clock=lambda: NOW)
    assert grant.permits("tensor:put")
    assert not grant.permits("tensor:read")
    assert grant.expires_at == NOW + 100.0 + CLOCK_SKEW
    whole = await decide(allow_any(), ConnectRequest(PeerIdentity(NODE), "mesh/1"))
    assert whole.permits("tensor:read")


async def test_a_program_that_asked_for_too_little_is_told_to_ask_for_more() -> None:
    machine, program = SecretKey.generate(), SecretKey.generate()
    delegation = Delegation.issue(machine, program.node_id, ("tensor",), 60.0, NOW)
    peer = PeerIdentity(program.node_id, delegation)
    with pytest.raises(AccessDenied) as caught:
        await decide(allow_any(), ServiceRequest(peer, "greet", "app", TENSOR))
    assert "scopes=(..., 'app')" in caught.value.fix
    assert "mesh allow" not in caught.value.fix
