"""How members of a group hear of each other's end, and of what they do wrong."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest
import torch

from mesh import collective
from mesh.collective import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    RankFailed,
    RankLeft,
    RankLost,
    Reduction,
    Signature,
)
from mesh.device.groups.exchange import SocketExchange
from tests.mesh.device.groups.members import members, operation
from transport import cbor


def reduce(exchange: SocketExchange, length: int = 8, seconds: float = 5.0) -> torch.Tensor:
    tensor = torch.ones(length)
    signature = Signature("all_reduce", "float32", length, "sum")
    with operation(exchange, signature, seconds=seconds) as it:
        collective.all_reduce(it, tensor, Reduction.SUM)
    return tensor


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 3
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("length", [8, 3_000_000])
def test_all_that_are_gone_are_named_to_all_that_are_left(length: int) -> None:
    with members(4) as group:

        def work(index: int, exchange: SocketExchange) -> torch.Tensor | None:
            if index in (1, 3):
                return None
            return reduce(exchange, length)

        timer = threading.Timer(0.05, lambda: (group.kill(1), group.kill(3)))
        timer.start()
        began = time.monotonic()
        found = group.run(work)
        assert time.monotonic() - began < 3
        for index in (0, 2):
            error = found[index]
            assert isinstance(error, RankLost)
            assert error.ranks == (1, 3)
            assert "peer 1, peer 3 are lost" in str(error)
        eventually(lambda: group.broken[0] and group.broken[2])
        assert [type(each) for each in (*group.broken[0], *group.broken[2])] == [RankLost] * 2


def test_an_idle_member_hears_of_it_too() -> None:
    with members(2) as group:
        group.kill(1)
        eventually(lambda: group.broken[0])
        with pytest.raises(RankLost):
            reduce(group.exchanges[0])


def test_who_calls_something_else_is_named_to_both() -> None:
    with members(2) as group:
        found = group.run(lambda index, exchange: reduce(exchange, 8 + index))
        for error in found:
            assert isinstance(error, CollectiveMismatch)
            assert "8 elements" in str(error)
            assert "9 elements" in str(error)
            assert error.ranks in ((0, 1), (1, 0))


def test_who_does_not_come_is_named() -> None:
    with members(3) as group:
        found = group.run(
            lambda index, exchange: None if index == 2 else reduce(exchange, seconds=0.2)
        )
        for error in found[:2]:
            assert isinstance(error, CollectiveTimeout)
            assert error.ranks == (2,)


def test_a_failure_is_told_to_the_others() -> None:
    with members(3) as group:
        error = RankFailed("x", ranks=(1,), why="it has nothing to contribute")
        threading.Timer(0.05, lambda: group.exchanges[1].fail(error)).start()
        found = group.run(lambda index, exchange: None if index == 1 else reduce(exchange))
        for each in (found[0], found[2]):
            assert isinstance(each, RankFailed)
            assert "nothing to contribute" in str(each)


def test_who_leaves_ends_what_needs_it_and_nothing_else() -> None:
    with members(2) as group:
        group.run(lambda index, exchange: reduce(exchange))
        group.exchanges[1].close(1.0)
        time.sleep(0.05)
        assert not group.broken[0]
        assert group.exchanges[0].failure is None
        with pytest.raises(RankLeft):
            reduce(group.exchanges[0])


def test_what_was_posted_is_written_before_a_member_leaves() -> None:
    with members(2) as group:
        payload = torch.arange(2_000_000.0)

        def work(index: int, exchange: SocketExchange) -> torch.Tensor:
            tensor = payload.clone() if index == 0 else torch.zeros(2_000_000)
            with operation(exchange, Signature("broadcast")) as it:
                collective.broadcast(it, tensor, 0)
            exchange.close(2.0)
            return tensor

        for found in group.run(work):
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, payload)


def header(value: object) -> bytes:
    body = cbor.encode(value, max_size=4096)  # type: ignore[arg-type]
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "bytes_",
    [
        struct.pack(">I", 1 << 20),
        header([1, 2]),
        header("nonsense"),
        struct.pack(">I", 3) + b"\xff\xff\xff",
        header([-1, False, 0, 0, 1 << 40, "all_reduce", "float32", 8, "sum"]),
        header({"code": "rank-lost", "ranks": [7, "x"], "why": "\x1b[31m"}),
    ],
    ids=["long", "short", "text", "garbage", "huge", "report"],
)
def test_a_hostile_member_breaks_the_group_and_no_more(bytes_: bytes) -> None:
    ours, theirs = socket.socketpair()
    broken: list[CollectiveError] = []
    exchange = SocketExchange("g", 0, ["peer 0", "peer 1"], {1: ours}, broken.append)
    try:
        theirs.sendall(bytes_)
        with pytest.raises(CollectiveError) as raised:
            reduce(exchange)
        assert str(raised.value).isprintable()
        eventually(lambda: broken)
        assert len(broken) == 1
    finally:
        theirs.close()
        exchange.close(1.0)


def test_closing_is_bounded_though_nobody_reads() -> None:
    ours, theirs = socket.socketpair()
    exchange = SocketExchange("g", 0, ["peer 0", "peer 1"], {1: ours}, lambda error: None)
    with pytest.raises(CollectiveTimeout):
        reduce(exchange, 2_000_000, seconds=0.1)
    began = time.monotonic()
    exchange.close(0.2)
    assert time.monotonic() - began < 2
    assert exchange.failure is not None
    theirs.close()
