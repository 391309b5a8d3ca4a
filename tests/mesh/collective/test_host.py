"""The shared memory itself: where things lie, what other ranks may write there, and who is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mesh import collective
from mesh.collective import (
    CollectiveTimeout,
    GroupAborted,
    Operation,
    RankFailed,
    RankLost,
    Reduction,
    Signature,
)
from mesh.collective.host import Layout
from mesh.collective.host.header import (
    CALL_BYTES,
    decode_call,
    decode_rest,
    encode,
    header_bytes,
)
from tensor_bridge.lanes.shared.host import unavailable
from tests.mesh.collective.exchange_memory import MemoryNetwork, make_boards, outcomes

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

BOX = 4096
SUM = Signature("all_reduce", "float32", 4, "SUM")
LARGE = Signature("all_reduce", "float32", 2 * BOX, "SUM")


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    made = MemoryNetwork(3, box_bytes=BOX)
    yield made
    made.close()


def add(network: MemoryNetwork, rank: int, *, sequence: int = 0, timeout: float = 10) -> None:
    exchange = network.ranks[rank]
    with Operation(exchange, SUM, sequence, time.monotonic() + timeout) as operation:
        collective.all_reduce(operation, torch.ones(4), Reduction.SUM)


def when(condition: object, act: object) -> threading.Thread:
    def run() -> None:
        while not condition():  # type: ignore[operator]
            time.sleep(0.001)
        act()  # type: ignore[operator]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def sleeps(network: MemoryNetwork, rank: int) -> bool:
    board = network.ranks[rank].board
    assert board is not None
    return bool(board.words[board.layout.flag(rank)])


@pytest.mark.parametrize("size", [2, 3, 24, 256])
def test_nothing_overlaps(size: int) -> None:
    layout = Layout.of(size)
    spans = [
        (8 * at(place), 8 * at(place) + width)
        for place in range(size)
        for at, width in ((layout.counter, 16), (layout.flag, 8))
    ]
    for place in range(size):
        for parity in (0, 1):
            header, box = layout.header(place, parity), layout.box(place, parity)
            spans += [(header, header + layout.header_bytes), (box, box + layout.box_bytes)]
            assert header % 64 == 0
            assert box % 4096 == 0
    spans.sort()
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert spans[-1][1] == layout.nbytes <= 80 << 20
    assert layout.header_bytes >= header_bytes(size)
    assert 0 < layout.lane_bytes() * size <= layout.box_bytes
    assert layout.lane_bytes() % 64 == 0


def test_headers() -> None:
    for signature in (SUM, Signature("barrier"), Signature("x" * 600)):
        data = (7).to_bytes(8, "little") + encode(signature, 3, (1, 2))
        assert len(data) == header_bytes(2)
        if len(signature.name) < 400:
            assert decode_call(data[:CALL_BYTES]) == (signature, 7)
        assert decode_rest(data[CALL_BYTES:]) == (3, 1, 2)


@pytest.mark.attack
@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 8 + b"\xff" * 4 + b"\0" * 4,  # longer than there is room for
        b"\0" * 8 + b"\x01\0\0\0" + b"\0" * 4 + b"a",
        b"\0" * 8 + b"\x04\0\0\0" + b"\0" * 4 + b"\xff\x1f\x1f\x1f",
        b"\0" * 8 + b"\x06\0\0\0" + b"\0" * 4 + b"a\nb\x1f\x1f\x1f",
        b"\0" * 8 + b"\x04\0\0\0" + b"\0" * 4 + b"\x1f\x1fx\x1f",
    ],
)
def test_malformed_calls(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode_call(data.ljust(CALL_BYTES, b"\0"))


@pytest.mark.attack
@pytest.mark.parametrize("counter", [2, 3, (1 << 64) - 1])
def test_a_counter_that_is_none_is_told_of(network: MemoryNetwork, counter: int) -> None:
    board = network.ranks[1].board
    assert board is not None
    board.words[board.layout.counter(1)] = counter
    errors = outcomes(3, lambda rank: None if rank == 1 else add(network, rank))
    assert isinstance(errors[0], RankFailed)
    assert errors[0].ranks == (1,)
    assert "rank 1 (node-1) breaks the protocol of shared memory" in str(errors[0])


@pytest.mark.attack
def test_a_header_that_is_none_is_told_of(network: MemoryNetwork) -> None:
    board = network.ranks[1].board
    assert board is not None
    start = board.layout.header(1, 1)
    board.bytes[start : start + CALL_BYTES] = b"\xff" * CALL_BYTES
    board.show()
    errors = outcomes(3, lambda rank: None if rank == 1 else add(network, rank))
    for rank in (0, 2):
        assert isinstance(errors[rank], RankFailed)
        assert errors[rank].ranks == (1,)
        assert "its call is none" in str(errors[rank])


@pytest.mark.attack
def test_more_rounds_than_anybody_needs_end_with_the_deadline(network: MemoryNetwork) -> None:
    board = network.ranks[1].board
    assert board is not None
    start = board.layout.header(1, 1)
    header = bytes(8) + encode(SUM, 1 << 60, (16, 16, 16))
    board.bytes[start : start + len(header)] = header
    board.show()
    # A sum of so few takes one round, whatever others say.
    assert outcomes(3, lambda rank: None if rank == 1 else add(network, rank)) == [None] * 3


def test_an_abort_wakes_who_waits(network: MemoryNetwork) -> None:
    aborted = GroupAborted("group", ranks=(2,), why="rank 2 aborted it")
    when(lambda: sleeps(network, 0), lambda: network.ranks[2].fail(aborted))
    began = time.monotonic()
    errors = outcomes(3, lambda rank: add(network, rank, timeout=60) if rank < 2 else None)
    assert time.monotonic() - began < 2
    for rank in (0, 1):
        assert isinstance(errors[rank], GroupAborted)
        assert "rank 2 aborted it" in str(errors[rank])
    with pytest.raises(GroupAborted):  # and whatever is called later
        add(network, 0, sequence=1)


def test_leaving_wakes_who_waits_here(network: MemoryNetwork) -> None:
    board = network.ranks[0].board
    assert board is not None
    when(lambda: sleeps(network, 0), board.close)
    with pytest.raises(GroupAborted, match="this rank has left the group"):
        add(network, 0, timeout=60)
    with pytest.raises(GroupAborted, match="this rank has left the group"):
        add(network, 0)


def test_a_rank_that_leaves_a_broken_group_lets_the_reason_come(network: MemoryNetwork) -> None:
    boards = [exchange.board for exchange in network.ranks]
    assert boards[2] is not None
    boards[2].close(is_broken=True)
    reason = RankFailed("all_reduce", ranks=(2,), why="MemoryError")
    when(lambda: sleeps(network, 0), lambda: network.ranks[1].fail(reason))
    with pytest.raises(RankFailed, match="MemoryError"):
        add(network, 0)


@contextlib.contextmanager
def processes(count: int) -> Iterator[list[int]]:
    made = []
    for _ in range(count):
        process = os.fork()
        if process == 0:
            signal.pause()
            os._exit(0)
        made.append(process)
    try:
        yield made
    finally:
        for process in made:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def watching(network: MemoryNetwork, pids: list[int]) -> None:
    """Let rank 0 watch processes in place of those of ranks 1 and so on."""
    pidfds = [os.pidfd_open(pid) for pid in (os.getpid(), *pids)]
    network.close()
    boards = network.boards = make_boards(network.size, BOX, pidfds)
    for exchange, board in zip(network.ranks, boards, strict=True):
        exchange.board = board
    for pidfd in pidfds:
        os.close(pidfd)


def test_all_who_are_killed_are_named(network: MemoryNetwork) -> None:
    with processes(2) as pids:
        watching(network, pids)

        def kill() -> None:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)

        when(lambda: sleeps(network, 0), kill)
        began = time.monotonic()
        with pytest.raises(RankLost) as caught:
            add(network, 0, timeout=60)
        assert time.monotonic() - began < 2
        assert caught.value.ranks == (1, 2)
        assert "all_reduce #0 of group 'test' on rank 0" in str(caught.value)
        assert "rank 1 (node-1), rank 2 (node-2) are lost" in str(caught.value)


def test_who_is_stopped_is_named_with_who_is_lost(network: MemoryNetwork) -> None:
    with processes(2) as pids:
        watching(network, pids)
        os.kill(pids[0], signal.SIGSTOP)
        os.waitid(os.P_PID, pids[0], os.WSTOPPED | os.WNOWAIT)  # a signal takes its time
        lost = RankLost("connection", ranks=(2,), why="rank 2 (node-2) is silent")
        when(lambda: sleeps(network, 0), lambda: network.ranks[1].fail(lost))
        with pytest.raises(RankLost) as caught:
            add(network, 0, timeout=60)
        assert caught.value.ranks == (1, 2)


def test_who_is_slow_is_not_lost(network: MemoryNetwork) -> None:
    with processes(2) as pids:
        watching(network, pids)
        with pytest.raises(CollectiveTimeout) as caught:
            add(network, 0, timeout=0.05)
        assert caught.value.ranks == (1, 2)


def test_nothing_is_left_of_a_group() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("zero")
        return len(os.listdir("/proc/self/fd")), maps  # noqa: PTH208

    before = held()
    network = MemoryNetwork(3, box_bytes=BOX)
    assert held()[0] == before[0] + 9
    assert outcomes(3, lambda rank: add(network, rank)) == [None] * 3
    network.close()
    network.close()
    assert held() == before


def test_a_child_leaves_the_memory_alone(network: MemoryNetwork) -> None:
    board = network.ranks[0].board
    assert board is not None
    child = os.fork()
    if child == 0:
        board.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert outcomes(3, lambda rank: add(network, rank)) == [None] * 3


def test_what_is_done_in_inference_mode_hinders_nothing_outside(network: MemoryNetwork) -> None:
    def body(rank: int) -> list[list[float]]:
        found = []
        for sequence, is_inference in enumerate([True, False, True]):
            with torch.inference_mode(is_inference):
                elements = torch.full((2 * BOX,), float(sequence))
                deadline = time.monotonic() + 10
                operation = Operation(network.ranks[rank], LARGE, sequence, deadline)
                with torch.no_grad(), operation:
                    collective.all_reduce(operation, elements, Reduction.SUM)
                found.append(elements[::BOX].tolist())
        return found

    assert outcomes(3, body) == [[[0.0, 0.0], [3.0, 3.0], [6.0, 6.0]]] * 3


def test_who_is_killed_but_not_gone_counts_as_lost(network: MemoryNetwork) -> None:
    with processes(2) as pids:
        watching(network, pids)
        board = network.ranks[0].board
        assert board is not None
        assert board.lost() == ()
        os.kill(pids[1], signal.SIGSTOP)
        end = time.monotonic() + 5
        while board.lost() != (2,):
            assert time.monotonic() < end
        os.kill(pids[1], signal.SIGKILL)  # whatever of it is still to be seen
        assert board.lost() == (2,)
        assert board.lost() == (2,)
