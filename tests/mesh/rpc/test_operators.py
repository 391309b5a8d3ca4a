"""Which operators peers may call, and how large their results may be."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from mesh.rpc.errors import NotExposed, RpcError
from mesh.rpc.names import operators
from mesh.rpc.names.operators import call_operator
from mesh.rpc.tensors.placement import Placement
from tensor_bridge import QuotaExceeded

A, B = torch.randn(3, 4), torch.randn(4, 5)


def nbytes(value: object) -> int:
    return sum(each.numel() * each.dtype.itemsize for each in operators._tensors(value))


def samples() -> list[tuple[str, tuple[object, ...]]]:
    """Arguments that those who broadcast, reduce and multiply take, as far as they are alike."""
    found: list[tuple[str, tuple[object, ...]]] = []
    choices: tuple[tuple[object, ...], ...] = (
        (torch.rand(3, 1),),
        (torch.rand(3, 1), torch.rand(1, 4)),
        (torch.rand(3, 1), torch.rand(1, 4), torch.rand(4)),
        (torch.ones(3, 1, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)),
        (torch.ones(3, 4, dtype=torch.bool), torch.ones(1, 4, dtype=torch.bool)),
        (torch.rand(3, 4), 1),
        (torch.rand(0, 7), 0),
        (torch.rand(7, 0), 1),
        ([torch.rand(3, 4), torch.rand(3, 4)],),
        (torch.rand(3, 4), 1, torch.zeros(3, 4, dtype=torch.int64)),
        (torch.rand(3, 4), 0, torch.zeros(3, dtype=torch.int64)),
        (A, B),
        (torch.rand(3, 5), A, B),
        (torch.rand(2, 3, 4), torch.rand(2, 4, 5)),
        (torch.rand(2, 3, 0), torch.rand(2, 0, 5)),
        (torch.rand(2, 3, 5), torch.rand(2, 3, 4), torch.rand(2, 4, 5)),
        (A, torch.rand(4)),
    )
    names = operators._BROADCASTING | operators._NO_LARGER | operators._EITHER | operators._PRODUCTS
    for name in sorted(names):
        for args in choices:
            try:
                operators._OPERATORS[name](*args)
            except (RuntimeError, TypeError, IndexError, ValueError, AttributeError):
                continue
            found.append((name, args))
    return found


@pytest.mark.filterwarnings("ignore")  # torch has deprecated some of these ways to call
def test_bounds_by_shape_hold() -> None:
    tried = samples()
    assert {name for name, _ in tried} >= operators._PRODUCTS | operators._EITHER
    assert len({name for name, _ in tried}) > 150
    for name, args in tried:
        result = operators._OPERATORS[name](*args)
        bound = operators._bound(name, args, {})
        assert nbytes(result) <= bound, (name, args)


def test_every_name_stands_for_an_operator() -> None:
    groups = operators._BROADCASTING, operators._NO_LARGER, operators._EITHER, operators._PRODUCTS
    assert frozenset().union(*groups) <= set(operators._OPERATORS)
    assert sum(map(len, groups)) == len(frozenset().union(*groups)), "one of them in one"
    assert not frozenset().union(*groups) & operators._SIZED


def test_a_size_that_is_plain_takes_no_compiler() -> None:
    program = """
import sys, torch
from mesh.rpc.names.operators import call_operator
one = torch.ones(1000, 1000)
for name, args in (("torch.add", (one, one)), ("torch.matmul", (one, one)), ("torch.sum", (one,))):
    call_operator(name, args, {}, max_bytes=1 << 30, place=torch.device)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_what_is_too_large_is_not_computed() -> None:
    with pytest.raises(QuotaExceeded):
        call_operator(
            "torch.add",
            (torch.ones(300, 1), torch.ones(1, 300)),
            {},
            max_bytes=300,
            place=torch.device,
        )
    with pytest.raises(QuotaExceeded):
        call_operator(
            "torch.sum", (torch.ones(1 << 40, 0), 1), {}, max_bytes=1 << 30, place=torch.device
        )


def test_what_takes_a_moment_is_little_in_and_little_out() -> None:
    assert operators.is_prompt("torch.sum", (torch.ones(8, 0), 1), {})
    assert not operators.is_prompt("torch.sum", (torch.ones(1 << 40, 0), 1), {})
    assert not operators.is_prompt("torch.add", (torch.ones(1 << 8), torch.ones(1 << 8, 1)), {})


def test_memory_that_was_not_written_to_is_nobodys() -> None:
    for name in ("empty", "empty_like", "empty_strided", "new_empty"):
        with pytest.raises(NotExposed):
            call_operator(
                f"torch.{name}", (torch.ones(2),), {}, max_bytes=1 << 30, place=torch.device
            )


def test_peers_say_neither_where_memory_is_taken_nor_that_it_is_pinned() -> None:
    placement = Placement()

    def zeros(**kwargs: object) -> object:
        return call_operator("torch.zeros", (3,), kwargs, max_bytes=1 << 30, place=placement.device)

    assert torch.equal(zeros(device="cpu"), torch.zeros(3))  # type: ignore[arg-type]
    assert torch.equal(zeros(device=None, pin_memory=False), torch.zeros(3))  # type: ignore[arg-type]
    for device in ("meta", torch.device("meta"), "cuda:99", "mesh:0", 99):
        with pytest.raises(RpcError, match="device"):
            zeros(device=device)
    with pytest.raises(NotExposed, match="pin"):
        zeros(pin_memory=True)


def test_shapes_are_broadcast_as_torch_does() -> None:
    rules = random.Random(7)
    for _ in range(500):
        shapes = [rules.choices([0, 1, 1, 2, 3], k=rules.randrange(4)) for _ in range(3)]
        try:
            expected = list(torch.broadcast_shapes(*map(tuple, shapes)))  # type: ignore[no-untyped-call]
        except RuntimeError:
            with pytest.raises(ValueError, match="together"):
                operators._broadcast(shapes)
        else:
            assert operators._broadcast(shapes) == expected
