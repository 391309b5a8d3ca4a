"""Every algorithm, with threads as ranks, against a reference in one process."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mesh import collective
from mesh.collective import Operation, Reduction, Signature
from mesh.collective import allreduce as allreduce_module
from mesh.collective.host import reducing as reducing_module
from tests.mesh.collective.exchange_memory import MemoryNetwork, run_ranks

SIZES = [1, 2, 3, 4, 5]
BOX = 4096
"""The smallest box: several rounds for what is longer."""

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short tensors run through every path."""
    monkeypatch.setattr(allreduce_module, "WHOLE_BYTES", 256)
    monkeypatch.setattr(allreduce_module, "PIECE_BYTES", 128)
    monkeypatch.setattr(allreduce_module, "LEAST_PIECE_BYTES", 128)
    monkeypatch.setattr(reducing_module, "WHOLE_BYTES", 256)
    monkeypatch.setattr(reducing_module, "FOLD_ELEMENTS", 48)


@pytest.fixture(params=["eager", "rendezvous", "host", "hosts"])
def network_of(request: pytest.FixtureRequest) -> Iterator[Callable[[int], MemoryNetwork]]:
    networks: list[MemoryNetwork] = []

    def make(size: int) -> MemoryNetwork:
        box_bytes = BOX if request.param in ("host", "hosts") else None
        eager, hosts = request.param == "eager", 2 if request.param == "hosts" else 1
        made = MemoryNetwork(size, eager=eager, jitter=size, box_bytes=box_bytes, hosts=hosts)
        networks.append(made)
        return networks[-1]

    yield make
    for network in networks:
        network.close()


def operation(network: MemoryNetwork, rank: int, sequence: int = 0) -> Operation:
    signature = Signature("test", detail="of values")
    return Operation(network.ranks[rank], signature, sequence, time.monotonic() + 10)


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype is torch.bool:
        return torch.rand(numel, generator=generator) > 0.7
    drawn = torch.randn(numel, generator=generator, dtype=torch.float64) * 100
    return torch.complex(drawn, -drawn).to(dtype) if dtype.is_complex else drawn.to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of the ranks, 16-bit types rounded once."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        return torch.stack(parts).any(0)
    wide = [part.float() if dtype is torch.bfloat16 else part for part in parts]
    total = wide[0].clone()
    for part in wide[1:]:
        total = total + part
    return total.to(dtype)


def summed_by_host(parts: list[torch.Tensor], hosts: int) -> torch.Tensor:
    """Return the same for ranks that are on hosts in turn: the sum of the sums of each."""
    wide = [part.float() if part.dtype is torch.bfloat16 else part for part in parts]
    sums = [summed(wide[first::hosts]) for first in range(min(hosts, len(parts)))]
    return summed(sums).to(parts[0].dtype)


@pytest.mark.parametrize("numel", [0, 1, 61, 3001])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce(network_of, size, dtype, numel) -> None:
    network = network_of(size)
    inputs = [values(rank, numel, dtype) for rank in range(size)]

    def body(rank: int) -> torch.Tensor:
        mine = inputs[rank].clone()
        with operation(network, rank) as op:
            collective.all_reduce(op, mine, Reduction.SUM)
        return mine

    results = run_ranks(size, body)
    for result in results:
        assert torch.equal(result, summed_by_host(inputs, network.hosts))


FOLDS: dict[Reduction, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.AVG: torch.add,
    Reduction.PRODUCT: torch.mul,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.BAND: torch.bitwise_and,
    Reduction.BOR: torch.bitwise_or,
    Reduction.BXOR: torch.bitwise_xor,
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32], ids=str)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_reduction(network_of, size, dtype) -> None:
    network = network_of(size)
    ops = [op for op in FOLDS if not (dtype.is_floating_point and op.startswith("B"))]
    # Small integers, so that every order and type of accumulation gives the same.
    numel = 60 * size
    inputs = [torch.arange(numel, dtype=torch.float32).add(5 * r) % 7 - 3 for r in range(size)]

    def body(rank: int) -> list[list[torch.Tensor]]:
        found = []
        for at, kind in enumerate(ops):
            mine = [inputs[rank].to(dtype, copy=True) for _ in range(3)]
            part = torch.zeros(numel // size, dtype=dtype)
            with operation(network, rank, 3 * at) as op:
                collective.all_reduce(op, mine[0], kind)
            with operation(network, rank, 3 * at + 1) as op:
                collective.reduce(op, mine[1], 0, kind)
            with operation(network, rank, 3 * at + 2) as op:
                collective.reduce_scatter(op, part, mine[2].chunk(size), kind)
            found.append([mine[0], mine[1], part])
        return found

    for rank, found in enumerate(run_ranks(size, body)):
        for kind, (everywhere, at_root, part) in zip(ops, found, strict=True):
            wide = torch.int64 if dtype is torch.int8 else dtype
            total = functools.reduce(FOLDS[kind], [one.to(wide) for one in inputs])
            if kind is Reduction.AVG:
                total = total.div(size, rounding_mode="trunc" if wide is torch.int64 else None)
            assert torch.equal(everywhere, total.to(dtype))
            assert torch.equal(at_root, total.to(dtype) if rank == 0 else inputs[rank].to(dtype))
            assert torch.equal(part, total.to(dtype).chunk(size)[rank])


def test_both_ways_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [values(rank, 500, torch.float32) for rank in range(4)]

    def run() -> list[torch.Tensor]:
        network = MemoryNetwork(4, jitter=7)

        def body(rank: int) -> torch.Tensor:
            mine = inputs[rank].clone()
            with operation(network, rank) as op:
                collective.all_reduce(op, mine, Reduction.SUM)
            return mine

        return run_ranks(4, body)

    chunked = run()
    monkeypatch.setattr(allreduce_module, "WHOLE_BYTES", 1 << 20)
    whole = run()
    assert all(torch.equal(one, whole[0]) for one in (*chunked, *whole))


@pytest.mark.parametrize("size", [2, 3])
def test_a_piece_is_not_overwritten_before_it_is_sent(size: int) -> None:
    network = MemoryNetwork(size, slow=0)
    inputs = [values(rank, 30, torch.float32) for rank in range(size)]  # one piece

    def body(rank: int) -> torch.Tensor:
        mine = inputs[rank].clone()
        with operation(network, rank) as op:
            collective.all_reduce(op, mine, Reduction.SUM)
        return mine

    for result in run_ranks(size, body):
        assert torch.equal(result, summed(inputs))


def test_large_tensors_move_as_few_bytes_as_a_ring() -> None:
    network = MemoryNetwork(4)
    numel = 4096

    def body(rank: int) -> None:
        with operation(network, rank) as op:
            collective.all_reduce(op, torch.ones(numel), Reduction.SUM)

    run_ranks(4, body)
    assert network.nbytes == 4 * 2 * (3 / 4) * numel * 4


@pytest.mark.parametrize("numel", [0, 5, 300])
@pytest.mark.parametrize("size", SIZES)
def test_reduce(network_of, size, numel) -> None:
    network = network_of(size)
    inputs = [values(rank, numel, torch.bfloat16) for rank in range(size)]
    root = size - 1

    def body(rank: int) -> torch.Tensor:
        mine = inputs[rank].clone()
        with operation(network, rank) as op:
            collective.reduce(op, mine, root, Reduction.SUM)
        return mine

    results = run_ranks(size, body)
    assert torch.equal(results[root], summed(inputs))
    for rank in range(root):
        assert torch.equal(results[rank], inputs[rank])


@pytest.mark.parametrize("lengths", [[0] * 5, [40, 0, 133, 1, 2000], [64] * 5])
@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter(network_of, size, lengths) -> None:
    network = network_of(size)
    lengths = lengths[:size]
    chunks = [
        [values(10 * rank + peer, lengths[peer], torch.float32) for peer in range(size)]
        for rank in range(size)
    ]

    def body(rank: int) -> torch.Tensor:
        out = torch.full((lengths[rank],), float("nan"))
        with operation(network, rank) as op:
            collective.reduce_scatter(op, out, chunks[rank], Reduction.SUM)
        return out

    for rank, result in enumerate(run_ranks(size, body)):
        assert torch.equal(result, summed([chunks[peer][rank] for peer in range(size)]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2, torch.uint16], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_broadcast(network_of, size, dtype) -> None:
    network = network_of(size)
    root = size // 2
    source = torch.arange(37, dtype=torch.float32).to(dtype)

    def body(rank: int) -> torch.Tensor:
        mine = source.clone() if rank == root else torch.zeros(37).to(dtype)
        with operation(network, rank) as op:
            collective.broadcast(op, mine, root)
        return mine

    for result in run_ranks(size, body):
        assert torch.equal(result.view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize("lengths", [[3] * 5, [0, 3, 0, 5, 3000], [0] * 5])
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_and_gather_and_scatter(network_of, size, lengths) -> None:
    network = network_of(size)
    lengths = lengths[:size]
    inputs = [values(rank, lengths[rank], torch.float32) for rank in range(size)]
    root = size - 1

    def empty() -> list[torch.Tensor]:
        return [torch.full((length,), float("nan")) for length in lengths]

    def body(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, torch.Tensor]:
        everything, some = empty(), empty() if rank == root else None
        mine = torch.full((lengths[rank],), float("nan"))
        with operation(network, rank, 0) as op:
            collective.all_gather(op, everything, inputs[rank])
        with operation(network, rank, 1) as op:
            collective.gather(op, some, inputs[rank], root)
        with operation(network, rank, 2) as op:
            collective.scatter(op, mine, inputs if rank == root else None, root)
        return everything, some, mine

    for rank, (everything, some, mine) in enumerate(run_ranks(size, body)):
        assert all(map(torch.equal, everything, inputs))
        assert torch.equal(mine, inputs[rank])
        if rank == root:
            assert some is not None
            assert all(map(torch.equal, some, inputs))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(network_of, size) -> None:
    network = network_of(size)
    chunks = [
        [values(10 * rank + peer, (rank + 2 * peer) % 5, torch.int64) for peer in range(size)]
        for rank in range(size)
    ]

    def body(rank: int) -> list[torch.Tensor]:
        outs = [torch.zeros_like(chunks[peer][rank]) for peer in range(size)]
        with operation(network, rank) as op:
            collective.all_to_all(op, outs, chunks[rank])
        return outs

    for rank, outs in enumerate(run_ranks(size, body)):
        assert all(torch.equal(outs[peer], chunks[peer][rank]) for peer in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_barrier_waits_for_the_last(network_of, size) -> None:
    network = network_of(size)
    arrived: list[int] = []

    def body(rank: int) -> int:
        if rank == size - 1:
            time.sleep(0.1)
        arrived.append(rank)
        with operation(network, rank) as op:
            collective.barrier(op)
        return len(arrived)

    assert run_ranks(size, body) == [size] * size
