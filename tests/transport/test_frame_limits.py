"""A peer that accepts shorter frames than we is sent no longer ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.transport.nodes import pair
from transport import Connection, Incoming
from transport.errors import ProtocolError, RemoteError
from transport.frames import MAX_FRAME, MIN_FRAME
from transport.protocol.hello import Hello, Welcome

pytestmark = pytest.mark.anyio

ENVELOPE = 64
"""More than a frame has beside the value that is called with or answered, in bytes."""


def accept_little(monkeypatch: pytest.MonkeyPatch, kind: type[Hello] | type[Welcome]) -> None:
    """Have whoever says `kind` accept as little as anybody may."""
    said = kind.to_value

    def to_value(self: Any) -> Any:
        return {**said(self), "max_frame": MIN_FRAME}

    monkeypatch.setattr(kind, "to_value", to_value)


async def answer(request: Incoming) -> bytes:
    return bytes(int(str(request.value)))


async def check_bounded(connection: Connection) -> None:
    """The peer of `connection` is sent frames of `MIN_FRAME` bytes, and none longer."""
    fits, too_long = bytes(MIN_FRAME - ENVELOPE), bytes(MIN_FRAME)
    assert await connection.call("echo", 1) == 1
    with pytest.raises(ProtocolError, match=f"at most {MIN_FRAME} may be sent"):
        await connection.call("echo", too_long)
    with pytest.raises(ProtocolError, match=f"at most {MIN_FRAME} may be sent"):
        await connection.open_stream("echo", too_long)
    async with await connection.open_stream("echo", 1) as stream:
        with pytest.raises(ProtocolError, match=f"at most {MIN_FRAME} may be sent"):
            await stream.send_message(too_long)
        await stream.send_message(fits)
    assert await connection.call("echo", fits) == fits


async def test_a_dialer_is_sent_what_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_little(monkeypatch, Hello)
    async with pair() as (_, listener, dialled):
        (accepted,) = listener.connections
        assert (dialled.max_frame, accepted.max_frame) == (MAX_FRAME, MIN_FRAME)
        await check_bounded(accepted)
        listener.register_call("answer", answer, scope="x")
        assert len(await dialled.call("answer", MIN_FRAME - ENVELOPE)) == MIN_FRAME - ENVELOPE
        with pytest.raises(RemoteError, match="its log says how"):
            await dialled.call("answer", MIN_FRAME)


async def test_a_listener_is_sent_what_it_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_little(monkeypatch, Welcome)
    async with pair() as (_, _, dialled):
        assert dialled.max_frame == MIN_FRAME
        await check_bounded(dialled)


async def test_who_claims_to_accept_more_is_sent_no_more_than_anybody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Welcome.to_value
    monkeypatch.setattr(Welcome, "to_value", lambda self: {**said(self), "max_frame": 1 << 60})
    async with pair() as (_, _, connection):
        with pytest.raises(ProtocolError, match=f"at most {MAX_FRAME} may be sent"):
            await connection.call("echo", bytes(MAX_FRAME))
