"""The frames with which every stream begins."""

from __future__ import annotations

import pytest

from transport.cbor import encode
from transport.errors import LimitExceeded, ProtocolError
from transport.frames import (
    LENGTH,
    MAX_FRAME,
    MAX_SERVICE_NAME,
    error_reply,
    frame,
    ok_reply,
    parse_reply,
    parse_request,
    request_frame,
)


def body_of(data: bytes) -> bytes:
    (length,) = LENGTH.unpack_from(data)
    assert length == len(data) - LENGTH.size
    return data[LENGTH.size :]


def test_a_length_goes_before_the_body_as_four_bytes_big_endian() -> None:
    assert frame(b"abc") == b"\0\0\0\3abc"
    assert frame(b"") == bytes(4)


def test_a_request_comes_back_as_it_was() -> None:
    body = body_of(request_frame("tensor.put", {"id": b"\1\2"}))
    assert parse_request(body) == ("tensor.put", {"id": b"\1\2"})
    assert parse_request(body_of(request_frame("s" * MAX_SERVICE_NAME, None))) == ("s" * 128, None)


@pytest.mark.parametrize(
    "value", [None, [], "tensor.put", {}, {"s": 1}, {"s": b"x"}, {"s": ""}, {"s": "s" * 129}]
)
def test_a_request_without_a_service_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="first frame of a stream"):
        parse_request(encode(value, max_size=MAX_FRAME))


def test_a_request_may_say_more_than_is_known_here() -> None:
    body = encode({"s": "svc", "v": 1, "later": True}, max_size=MAX_FRAME)
    assert parse_request(body) == ("svc", 1)


def test_a_result_comes_back_as_it_was_even_one_that_looks_like_an_error() -> None:
    for value in (None, 0, [1, "a"], {"err": {"code": "denied"}}, {"ok": 1}):
        assert parse_reply(body_of(ok_reply(value)), peer="them") == value


def test_an_error_comes_back_as_an_error() -> None:
    sent = LimitExceeded("upload", stage="reserve", why="too big", fix="Send less.")
    got = parse_reply(body_of(error_reply(sent)), peer="them")
    assert isinstance(got, LimitExceeded)
    assert str(got) == "upload with them at stage 'reserve': too big. Send less."


def test_the_longest_error_fits_a_frame() -> None:
    long = "\U0001f642" * 10_000
    sent = LimitExceeded(long, stage=long, why=long, fix=long)
    assert len(error_reply(sent)) < 16_384


@pytest.mark.parametrize("value", [None, 1, [], {}, {"no": 1}, "ok"])
def test_a_reply_that_is_neither_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="neither a result nor an error"):
        parse_reply(encode(value, max_size=MAX_FRAME), peer="them")


def test_a_value_too_big_for_a_frame_is_refused_here() -> None:
    for make in (ok_reply, lambda value: request_frame("svc", value)):
        assert len(make(bytes(MAX_FRAME - 40))) <= MAX_FRAME + LENGTH.size
        with pytest.raises(ProtocolError, match="at most"):
            make(bytes(MAX_FRAME))
