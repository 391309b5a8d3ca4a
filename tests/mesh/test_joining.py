"""A list of peers to join by: one that is there is enough, and each that is not is named."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from auth import AccessDenied, SecretKey, Ticket, TicketError, deny_all
from mesh import Node
from mesh.errors import ConnectTimeout, UnknownPeer, Unreachable
from tests.mesh.nodes import LOOPBACK, node

pytestmark = pytest.mark.anyio

CONFIG = dataclasses.replace(LOOPBACK, connect_timeout=1.0)


@contextlib.contextmanager
def silent() -> Iterator[Ticket]:
    """Nobody, at an address where something listens and never answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield Ticket(SecretKey.generate().node_id, (sock.getsockname(),))


def gone() -> Ticket:
    """Nobody, at an address where nothing listens."""
    return Ticket(SecretKey.generate().node_id, (("127.0.0.1", 9),))


async def test_d02_one_that_is_there_is_enough_and_the_others_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "quicmesh.node")
    with silent() as mute:
        async with node() as there:
            dead = gone()
            client = Node.client(dead, mute, there.ticket(), home=tmp_path, config=CONFIG)
            async with client as here:
                assert await (await here.connect(there.node_id)).ping() > 0
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    for ticket, reason in ((dead, "nothing listens"), (mute, "no answer")):
        (told,) = [each for each in warnings if ticket.node_id.short in each]
        assert reason in told


async def test_d02_where_nobody_is_each_is_named_with_its_reason(tmp_path: Path) -> None:
    with silent() as one, silent() as two:
        async with node(deny_all()) as closed:
            asked = (gone(), one, two, closed.ticket())
            began = time.monotonic()
            with pytest.raises(Unreachable, match="any of 4 peers") as caught:
                async with Node.client(*asked, home=tmp_path, config=CONFIG):
                    pytest.fail("entered")
    assert time.monotonic() - began < 1.9, "they are tried at once"
    told = str(caught.value)
    for ticket in asked:
        assert ticket.node_id.short in told
    for reason in ("nothing listens", "no answer", "admits nobody"):
        assert reason in told


async def test_one_alone_fails_with_its_own_error(tmp_path: Path) -> None:
    async with node(deny_all()) as closed:
        with silent() as mute:
            for ticket, kind in (
                (closed.ticket(), AccessDenied),
                (mute, ConnectTimeout),
                ("nobody", UnknownPeer),
            ):
                with pytest.raises(kind):
                    async with Node.client(ticket, home=tmp_path, config=CONFIG):
                        pytest.fail("entered")


async def test_what_can_not_be_used_as_written_is_no_matter_of_who_is_there(
    tmp_path: Path,
) -> None:
    async with node() as there:
        with pytest.raises(TicketError):
            async with Node.client(there.ticket(), "mesh1nonsense", home=tmp_path, config=CONFIG):
                pytest.fail("entered")
