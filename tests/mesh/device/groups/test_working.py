"""What members of a group compute, together and alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mesh.collective import UnsupportedCollective, refuse_unless_reducible
from mesh.device.groups.exchange import SocketExchange
from mesh.device.groups.working import REDUCTIONS, Call, Ranks, check_call, signature, work
from tests.mesh.device.groups.members import members, operation
from transport import ProtocolError

GROUPS = [
    ((0, 1, 2),),
    ((0,), (1,)),
    ((0, 2), (1,)),
    ((1,), (0, 3), (2,)),
]
"""Which member has which ranks."""


def inputs(count: int, dtype: torch.dtype, length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (length,), generator=generator).to(dtype) for _ in range(count)]


def together(
    groups: tuple[tuple[int, ...], ...], call: Call, tensors: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the result of each rank."""

    def one(index: int, exchange: SocketExchange | None) -> list[torch.Tensor]:
        ranks = Ranks(groups, index)
        parts = [tensors[rank].clone() for rank in ranks.own]
        if exchange is None:
            return list(work(call, ranks, None, parts))
        with operation(exchange, signature(call, parts[0])) as it:
            return list(work(call, ranks, it, parts))

    if len(groups) == 1:
        found = [one(0, None)]
    else:
        with members(len(groups)) as group:
            found = []
            for each in group.run(one):
                assert isinstance(each, list), each
                found.append(each)
    by_rank = {
        rank: result
        for ranks, results in zip(groups, found, strict=True)
        for rank, result in zip(ranks, results, strict=True)
    }
    return [by_rank[rank] for rank in sorted(by_rank)]


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions(op: str, groups: tuple[tuple[int, ...], ...]) -> None:
    count = sum(map(len, groups))
    for dtype, length in ((torch.float32, 120), (torch.int32, 0), (torch.bfloat16, 240)):
        tensors = inputs(count, dtype, length)
        stack = torch.stack(tensors).to(torch.float64)
        wanted = {
            "sum": stack.sum(0),
            "mean": (stack / count).sum(0),
            "min": stack.amin(0),
            "max": stack.amax(0),
        }[op]
        if op == "mean" and dtype is torch.int32:
            wanted = wanted.trunc()
        results = together(groups, Call("all_reduce", op), tensors)
        parts = together(groups, Call("reduce_scatter", op), tensors)
        for result in results:
            assert result.dtype is dtype
            torch.testing.assert_close(result, wanted.to(dtype))
            assert torch.equal(result, results[0])
        assert torch.equal(torch.cat(parts), results[0])
        places = {result.data_ptr() for result in results if length}
        assert len(places) == (count if length else 0), "each rank has its own"


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_movements(groups: tuple[tuple[int, ...], ...]) -> None:
    count = sum(map(len, groups))
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.float8_e4m3fn):
        tensors = inputs(count, torch.float32, 9)
        tensors = [tensor.to(dtype) for tensor in tensors]
        for result in together(groups, Call("all_gather"), tensors):
            pieces = [result[9 * rank : 9 * rank + 9] for rank in range(count)]
            for piece, tensor in zip(pieces, tensors, strict=True):
                assert torch.equal(piece.view(torch.uint8), tensor.view(torch.uint8))
        for root in range(count):
            for result in together(groups, Call("broadcast", root=root), tensors):
                assert torch.equal(result.view(torch.uint8), tensors[root].view(torch.uint8))


def test_a_large_one_is_moved_in_pieces() -> None:
    tensors = [torch.full((700_001,), float(rank)) for rank in range(3)]
    results = together(((0,), (1,), (2,)), Call("all_reduce", "sum"), tensors)
    assert all(torch.equal(result, torch.full((700_001,), 3.0)) for result in results)


def test_what_is_no_call() -> None:
    assert check_call("all_reduce", "mean", 0) == Call("all_reduce", "mean", 0)
    assert check_call("broadcast", "", 3) == Call("broadcast", "", 3)
    for strange in (
        *(("all_reduce", "", 0), ("all_reduce", "product", 0), ("broadcast", "sum", 0)),
        *(("barrier", "", 0), ("broadcast", "", -1), ("broadcast", "", True), (None, "", 0)),
    ):
        with pytest.raises(ProtocolError):
            check_call(*strange)
    with pytest.raises(UnsupportedCollective):
        refuse_unless_reducible(torch.bool, REDUCTIONS["mean"])


def test_ranks() -> None:
    ranks = Ranks(((0, 2), (1,)), 1)
    assert (ranks.own, ranks.count) == ((1,), 3)
    assert [ranks.member(rank) for rank in range(3)] == [0, 1, 0]
    assert list(pairwise(ranks.of)) == [((0, 2), (1,))]
