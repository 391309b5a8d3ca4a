"""The tests of values are tests: an operation that does nothing, or errs by one, fails them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mesh import collective
from mesh.distributed import engine
from tests.mesh.collective import test_algorithms as algorithms
from tests.mesh.collective.exchange_memory import MemoryNetwork
from tests.mesh.distributed import test_group as groups
from tests.mesh.distributed.test_group import Ranks

SIZE = 3

WRITTEN: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda operation, elements, op: elements,
    "reduce": lambda operation, elements, root, op: elements if operation.rank == root else None,
    "reduce_scatter": lambda operation, out, chunks, op: out,
    "broadcast": lambda operation, elements, root: elements,
    "all_gather": lambda operation, outs, own: outs[-1],
    "gather": lambda operation, outs, own, root: outs[-1] if outs else None,
    "scatter": lambda operation, out, chunks, root: out,
    "all_to_all": lambda operation, outs, chunks: outs[-1],
}
"""For each operation what it writes to, given its arguments; of several the last."""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for group in made.groups:
        group.shutdown()


def check_through_groups(ranks: Ranks) -> None:
    layout = groups.LAYOUTS["transposed"]
    groups.test_every_layout_through_every_collective(ranks, SIZE, torch.float32, layout)


def check_algorithm(name: str) -> None:
    networks: list[MemoryNetwork] = []

    def network_of(size: int) -> MemoryNetwork:
        networks.append(MemoryNetwork(size))
        return networks[-1]

    if name in ("all_reduce", "reduce"):
        arguments = (torch.float32, 61) if name == "all_reduce" else (61,)
        getattr(algorithms, f"test_{name}")(network_of, SIZE, *arguments)
    elif name == "reduce_scatter":
        algorithms.test_reduce_scatter(network_of, SIZE, [40, 0, 133])
    elif name == "broadcast":
        algorithms.test_broadcast(network_of, SIZE, torch.float32)
    elif name == "all_to_all":
        algorithms.test_all_to_all(network_of, SIZE)
    else:
        algorithms.test_all_gather_and_gather_and_scatter(network_of, SIZE, [3, 4, 5])


def idle(*arguments: object) -> None:
    """Do nothing."""


def erring(real: Callable[..., None], written: Callable[..., Any]) -> Callable[..., None]:
    """Do it, and add one to the last element."""

    def wrong(*arguments: Any) -> None:
        real(*arguments)
        tensor = written(*arguments)
        if tensor is not None and tensor.numel():
            tensor[-1] += 1

    return wrong


@pytest.mark.parametrize("kind", ["right", "idle", "erring"])
@pytest.mark.parametrize("name", WRITTEN)
def test_operations(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    if kind == "right":  # the control
        check_through_groups(ranks)
        check_algorithm(name)
        return
    real = getattr(collective, name)
    mutant = idle if kind == "idle" else erring(real, WRITTEN[name])
    monkeypatch.setattr(collective, name, mutant)
    with pytest.raises(AssertionError):
        check_through_groups(ranks)
    with pytest.raises(AssertionError):
        check_algorithm(name)


@pytest.mark.parametrize("kind", ["idle", "erring"])
def test_messages(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    written = erring(engine.scatter_back, lambda elements, tensor: tensor.view(-1))
    monkeypatch.setattr(engine, "scatter_back", idle if kind == "idle" else written)
    monkeypatch.setattr(engine, "blank", lambda tensor: torch.empty(tensor.numel()))
    with pytest.raises(AssertionError):
        groups.test_tags_match_in_any_order_and_number(ranks, False)


def test_a_barrier_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithms.test_barrier_waits_for_the_last(MemoryNetwork, SIZE)
    monkeypatch.setattr(collective, "barrier", idle)
    with pytest.raises(AssertionError):
        algorithms.test_barrier_waits_for_the_last(MemoryNetwork, SIZE)
