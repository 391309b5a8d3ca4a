"""What the ranks are told when an operation fails: who, what, when."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mesh import collective
from mesh.collective import (
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    Operation,
    RankFailed,
    RankLeft,
    RankLost,
    Reduction,
    Signature,
    Transfer,
)
from mesh.collective import allreduce as allreduce_module
from mesh.collective.errors import error_class
from mesh.collective.host import reducing as reducing_module
from tests.mesh.collective.exchange_memory import MemoryNetwork, outcomes


@pytest.fixture(params=["messages", "host"])
def network_of(request: pytest.FixtureRequest) -> Iterator[Callable[[int], MemoryNetwork]]:
    networks: list[MemoryNetwork] = []

    def make(size: int) -> MemoryNetwork:
        networks.append(MemoryNetwork(size, box_bytes=4096 if request.param == "host" else None))
        return networks[-1]

    yield make
    for network in networks:
        network.close()


def sum_of(numel: int) -> Signature:
    return Signature("all_reduce", "float32", numel, "SUM")


def start(
    network: MemoryNetwork,
    rank: int,
    signature: Signature,
    *,
    sequence: int = 3,
    timeout: float = 5,
) -> Operation:
    return Operation(network.ranks[rank], signature, sequence, time.monotonic() + timeout)


@pytest.mark.parametrize("whole", [True, False])
def test_timeout_names_the_sleeper_and_nobody_else(
    network_of, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(allreduce_module, "WHOLE_BYTES", 1 << 20 if whole else 0)
    monkeypatch.setattr(reducing_module, "WHOLE_BYTES", 1 << 20 if whole else 0)
    network = network_of(3)
    over = threading.Event()

    def body(rank: int) -> None:
        if rank == 2:
            over.wait(10)
            return
        try:
            with start(network, rank, sum_of(1000), timeout=0.3 + rank * 0.1) as op:
                collective.all_reduce(op, torch.ones(1000), Reduction.SUM)
        finally:
            if rank == 1:
                over.set()

    errors = outcomes(3, body)
    for rank in (0, 1):
        error = errors[rank]
        assert isinstance(error, CollectiveTimeout)
        assert error.ranks == (2,)
        # Each by its own clock, and the one may have begun later.
        assert re.match(
            rf"all_reduce #3 of group 'test' on rank {rank} after \d+\.\d s: ", str(error)
        )
        assert "rank 2 (node-2) is still awaited" in str(error)
        assert "node-0" not in str(error)
        assert "node-1" not in str(error)


def test_timeout_names_the_sleeper_when_another_rank_has_just_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = MemoryNetwork(3)

    def wait(transfer: Transfer, deadline: float) -> None:
        network.ranks[0].fail(CollectiveTimeout("the same on rank 1", ranks=(2,)))
        raise TimeoutError

    op = start(network, 0, sum_of(1))
    start(network, 1, sum_of(1)).send(0, memoryview(bytearray(4)))
    receipts = [op.receive(peer, memoryview(bytearray(4))) for peer in (1, 2)]
    assert receipts[0].done
    monkeypatch.setattr(Transfer, "wait", wait)
    with pytest.raises(CollectiveTimeout) as caught:
        op.wait(receipts[1:])
    assert receipts[1].done
    assert caught.value.ranks == (2,)
    assert "rank 2 (node-2) is still awaited" in str(caught.value)


def test_timeout_of_a_sender_names_who_does_not_receive() -> None:
    network = MemoryNetwork(3)

    def body(rank: int) -> None:
        if rank != 2:
            with start(network, rank, Signature("broadcast"), timeout=0.3) as op:
                collective.broadcast(op, torch.ones(1000), 0)

    errors = outcomes(3, body)
    assert isinstance(errors[0], CollectiveTimeout)
    assert errors[0].ranks == (2,)
    assert errors[1] is None


@pytest.mark.parametrize(
    ("signature", "sequence", "numel", "words"),
    [
        (Signature("broadcast", "float32", 4, "root 0"), 3, 4, "broadcast(float32, 4 elements, "),
        (Signature("all_reduce", "int64", 4, "SUM"), 3, 2, "all_reduce(int64, 4 elements, SUM)"),
        (Signature("all_reduce", "float32", 4, "MAX"), 3, 4, "all_reduce(float32, 4 elements, MA"),
        (sum_of(5), 3, 5, "all_reduce(float32, 5 elements, SUM)"),
        (sum_of(4), 4, 4, "all_reduce(float32, 4 elements, SUM) as #4"),
        (sum_of(4), 3, 6, "all_reduce(float32, 4 elements, SUM) with 24 bytes"),
    ],
)  # fmt: skip
def test_differing_calls_raise_at_once_and_name_both(
    network_of, signature, sequence, numel, words
) -> None:
    network = network_of(3)

    def body(rank: int) -> None:
        calls = (signature, sequence, numel) if rank == 1 else (sum_of(4), 3, 4)
        with start(network, rank, calls[0], sequence=calls[1], timeout=30) as op:
            collective.all_reduce(op, torch.ones(calls[2]), Reduction.SUM)

    began = time.monotonic()
    errors = outcomes(3, body)
    assert time.monotonic() - began < 3
    for error in errors:
        assert isinstance(error, CollectiveMismatch)
        assert 1 in error.ranks
        assert f"rank 1 (node-1) called {words}" in str(error)
        assert "all_reduce(float32, 4 elements, SUM)" in str(error)


def test_equal_calls_do_not(network_of) -> None:
    network = network_of(3)

    def body(rank: int) -> None:
        with start(network, rank, sum_of(4)) as op:
            collective.all_reduce(op, torch.ones(4), Reduction.SUM)

    assert outcomes(3, body) == [None, None, None]


def test_an_exception_inside_reaches_the_other_ranks(network_of) -> None:
    network = network_of(2)

    def body(rank: int) -> None:
        with start(network, rank, sum_of(4), timeout=30) as op:
            if rank == 1:
                raise MemoryError("no room")
            collective.all_reduce(op, torch.ones(4), Reduction.SUM)

    errors = outcomes(2, body)
    assert isinstance(errors[1], MemoryError)
    assert isinstance(errors[0], RankFailed)
    assert errors[0].ranks == (1,)
    assert "MemoryError: no room" in str(errors[0])
    assert "on rank 0" in str(errors[0])


def test_a_loss_ends_the_wait_for_others_too(network_of) -> None:
    network = network_of(3)
    lost = RankLost("connection", ranks=(2,), peer="rank 2 (node-2)", why="silent for 3 s")

    def body(rank: int) -> None:
        if rank == 2:
            time.sleep(0.1)
            network.ranks[0].fail(lost)
            return
        with start(network, rank, sum_of(4), timeout=30) as op:
            collective.all_reduce(op, torch.ones(4), Reduction.SUM)

    errors = outcomes(3, body)
    for rank in (0, 1):
        assert isinstance(errors[rank], RankLost)
        assert errors[rank] is not lost
        assert "rank 2 (node-2)" in str(errors[rank])
        assert f"on rank {rank}" in str(errors[rank])


def test_a_rank_that_left_is_not_waited_for(network_of) -> None:
    network = network_of(2)
    network.ranks[1].close(1)
    with pytest.raises(RankLeft), start(network, 0, sum_of(1), timeout=30) as op:
        collective.all_reduce(op, torch.ones(1), Reduction.SUM)


def test_errors_are_what_torch_programs_catch_and_keep_their_parts() -> None:
    error = RankLost("a", ranks=(1, 2), peer="p", stage="s", after=1.0, why="w", fix="F.")
    again = error.during("b", after=2.0)
    assert isinstance(again, RuntimeError)
    assert type(again) is RankLost
    assert again.ranks == (1, 2)
    assert str(again) == "b with p at stage 's' after 2.0 s: w. F."
    assert error_class("rank-lost") is RankLost
    assert error_class("nonsense") is RankFailed


def test_transfer_ends_once_and_tells_late_comers() -> None:
    transfer = Transfer(1)
    seen: list[CollectiveError | None] = []
    transfer.add_done_callback(lambda t: seen.append(t.error))
    with pytest.raises(TimeoutError):
        transfer.wait(time.monotonic() + 0.01)
    transfer.finish()
    transfer.finish(RankLost("late", ranks=(1,)))
    transfer.add_done_callback(lambda t: seen.append(t.error))
    transfer.wait(time.monotonic() - 1)
    assert transfer.done
    assert seen == [None, None]


def test_transfer_wakes_all_waiters() -> None:
    transfer = Transfer(1)

    def body(rank: int) -> None:
        if rank == 3:
            time.sleep(0.05)
            transfer.finish()
        else:
            transfer.wait(time.monotonic() + 5)

    assert outcomes(4, body) == [None] * 4
