"""Errors cross the wire with their class and parts, and nothing else of theirs."""

from __future__ import annotations

import anyio
import pytest

import transport.errors
from auth import AccessDenied, Denial, IdentityError, MeshError, TokenRefused
from transport.cbor import CborValue, decode, encode
from transport.codes import (
    MAX_TEXT,
    AppCode,
    code_of,
    decode_error,
    encode_error,
    error_of_code,
    plain_text,
)
from transport.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    IdentityInUse,
    LimitExceeded,
    PeerLost,
    ProtocolError,
    RemoteError,
    ServiceUnknown,
    StreamReset,
    Unreachable,
)

TREE = [getattr(transport.errors, name) for name in transport.errors.__all__]
TREE += [MeshError, AccessDenied, TokenRefused, IdentityError]


def across(error: BaseException) -> MeshError:
    data = encode(encode_error(error), max_size=1 << 20)
    return decode_error(decode(data, max_size=1 << 20), peer="k7f3-9q2m", after=1.5)


@pytest.mark.parametrize("kind", TREE)
def test_class_and_parts_of_every_error_survive(kind: type[MeshError]) -> None:
    sent = kind("move of tensor 'w'", peer="ignored", stage="claim", why="so", fix="Do this.")
    got = across(sent)
    assert type(got) is kind
    assert (got.what, got.stage, got.why, got.fix) == (
        "move of tensor 'w'",
        "claim",
        "so",
        "Do this.",
    )
    assert got.peer == "k7f3-9q2m"  # who told us, not who they were talking to
    assert got.after == 1.5
    assert str(got)
    for name in vars(kind).get("__annotations__", {}):
        getattr(got, name)  # what the class promises is there


def test_parts_left_out_stay_left_out() -> None:
    got = across(LimitExceeded("upload"))
    assert (got.stage, got.why, got.fix) == (None, None, None)
    assert str(got) == "upload with k7f3-9q2m after 1.5 s"


def test_a_denial_keeps_its_code() -> None:
    sent = AccessDenied("service 'x'", why="not for you")
    sent.denial = Denial("scope", "not for you")
    got = across(sent)
    assert isinstance(got, AccessDenied)
    assert got.denial == Denial("scope", "not for you")
    plain = across(AccessDenied("service 'x'", why="not for you"))
    assert isinstance(plain, AccessDenied)
    assert plain.denial is None


def test_an_error_defined_above_transport_finds_its_class() -> None:
    class HandlerOnFire(MeshError):
        code = "test-on-fire"

    assert type(across(HandlerOnFire("handler"))) is HandlerOnFire


def test_an_error_of_a_class_unknown_here_is_a_remote_error() -> None:
    value: CborValue = {"code": "from-the-future", "what": "warp", "why": "no dilithium"}
    got = decode_error(value, peer="them")
    assert type(got) is RemoteError
    assert str(got) == "warp with them: no dilithium"


def test_a_foreign_exception_tells_nothing_of_itself() -> None:
    got = across(ValueError("the secret is 42"))
    assert type(got) is RemoteError
    assert "42" not in str(got)
    assert "ValueError" not in str(got)


def test_texts_are_cut_and_made_plain_both_ways() -> None:
    long = "x" * 10_000
    got = across(LimitExceeded(long, stage=long, why=long, fix=long))
    assert {len(text or "") for text in (got.what, got.stage, got.why, got.fix)} == {MAX_TEXT}
    received = decode_error(
        {"code": "limit", "what": long, "why": "\x1b[31mred\nline\x00"}, peer=""
    )
    assert len(received.what) == MAX_TEXT
    assert received.why == "\ufffd[31mred line\ufffd"
    assert across(LimitExceeded("file \udcff\ud800", why="a\tb")).what == "file \ufffd\ufffd"


def test_plain_text_leaves_every_script_alone() -> None:
    for text in ("", "plain", "Zażółć gęślą jaźń", "日本語", "🙂 ok"):
        assert plain_text(text) == text
    assert plain_text("right\u202eleft") == "right\ufffdleft"


def test_an_error_reply_that_is_no_map_is_a_protocol_error() -> None:
    for value in (None, 1, "denied", [], b"x"):
        assert type(decode_error(value, peer="them")) is ProtocolError


# -- codes alone


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AccessDenied("x"), AppCode.DENIED),
        (TokenRefused("x"), AppCode.TOKEN_REFUSED),
        (ProtocolError("x"), AppCode.PROTOCOL),
        (DeadlineExceeded("x"), AppCode.DEADLINE),
        (LimitExceeded("x"), AppCode.LIMIT),
        (ServiceUnknown("x"), AppCode.SERVICE_UNKNOWN),
        (IdentityInUse("x"), AppCode.IDENTITY_IN_USE),
        (StreamReset("x"), AppCode.CANCELLED),
        (RemoteError("x"), AppCode.INTERNAL),
        (PeerLost("x"), AppCode.INTERNAL),
        (ValueError("x"), AppCode.INTERNAL),
        (KeyboardInterrupt(), AppCode.CANCELLED),
        (GeneratorExit(), AppCode.CANCELLED),
    ],
)
def test_every_error_has_a_code(error: BaseException, code: AppCode) -> None:
    assert code_of(error) is code


def test_a_class_derived_from_one_with_a_code_travels_as_that() -> None:
    class VeryDenied(AccessDenied):
        pass

    class NoSuchToken(TokenRefused):
        pass

    assert code_of(VeryDenied("x")) is AppCode.DENIED
    assert code_of(NoSuchToken("x")) is AppCode.TOKEN_REFUSED


@pytest.mark.anyio
async def test_a_cancelled_task_resets_with_the_code_of_cancellation() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        try:
            await anyio.sleep_forever()
        except BaseException as error:
            assert code_of(error) is AppCode.CANCELLED  # noqa: PT017
            raise


@pytest.mark.parametrize("code", AppCode)
def test_every_code_says_why(code: AppCode) -> None:
    error = error_of_code(code, "a stream", peer="them", stage="receive")
    assert error.why
    assert error.stage == "receive"
    assert type(error) in (ConnectionClosed, PeerLost) or code_of(error) is code


def test_a_code_unknown_here_is_a_reset_that_shows_it() -> None:
    error = error_of_code(0xBEEF, "a stream", peer="them")
    assert type(error) is StreamReset
    assert "0xbeef" in str(error)


def test_codes_are_what_they_were() -> None:
    """They are on the wire: a number once given keeps its meaning."""
    assert {code.name: code.value for code in AppCode} == {
        "NO_ERROR": 0,
        "CANCELLED": 1,
        "DENIED": 2,
        "TOKEN_REFUSED": 3,
        "PROTOCOL": 4,
        "DEADLINE": 5,
        "LIMIT": 6,
        "INTERNAL": 7,
        "SERVICE_UNKNOWN": 8,
        "LEFT": 9,
        "SUPERSEDED": 10,
        "IDENTITY_IN_USE": 11,
        "IDLE": 12,
        "GONE": 13,
    }


def test_the_attempts_of_a_remote_dial_are_empty_not_missing() -> None:
    got = across(Unreachable("connecting"))
    assert isinstance(got, Unreachable)
    assert dict(got.attempts) == {}
