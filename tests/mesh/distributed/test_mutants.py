"""The tests of values are tests: an operation that does nothing, or errs by one, fails them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mesh import collective
from mesh.collective import host, levels
from mesh.distributed import engine
from tensor_bridge.lanes.shared.host import unavailable
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

BOX = 4096
LANES: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "messages": (collective, {}, list(WRITTEN)),
    "host": (host, {"box_bytes": BOX}, list(WRITTEN)),
    "hosts": (levels, {"box_bytes": BOX, "hosts": 2}, ["all_reduce", "broadcast"]),
}
"""For each way that bytes take who has the operations, the network, and which operations."""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for group in made.groups:
        group.shutdown()


def check_through_groups(ranks: Ranks, kinds: dict[str, Any]) -> None:
    layout = groups.LAYOUTS["transposed"]

    def made(size: int) -> Any:
        return ranks(size, **kinds)

    groups.test_every_layout_through_every_collective(made, SIZE, torch.float32, layout)


@contextlib.contextmanager
def networks_of(kinds: dict[str, Any]) -> Iterator[Callable[[int], MemoryNetwork]]:
    with contextlib.ExitStack() as stack:

        def network_of(size: int) -> MemoryNetwork:
            made = MemoryNetwork(size, **kinds)
            stack.callback(made.close)
            return made

        yield network_of


def check_algorithm(name: str, kinds: dict[str, Any]) -> None:
    with networks_of(kinds) as network_of:
        check_values(name, network_of)


def check_values(name: str, network_of: Callable[[int], MemoryNetwork]) -> None:
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


def erring(
    real: Callable[..., None], written: Callable[..., Any], skipped: int = 0
) -> Callable[..., None]:
    """Do it, and add one to the last element.

    Args:
        real: what does it.
        written: returns what was written to, given its arguments.
        skipped: arguments before those.
    """
    count = written.__code__.co_argcount

    def wrong(*arguments: Any) -> None:
        real(*arguments)
        tensor = written(*arguments[skipped : skipped + count])
        if tensor is not None and tensor.numel():
            tensor[-1] += 1

    return wrong


@pytest.mark.parametrize("kind", ["right", "idle", "erring"])
@pytest.mark.parametrize(
    ("lane", "name"), [(lane, name) for lane, (_, _, names) in LANES.items() for name in names]
)
def test_operations(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, lane: str, name: str, kind: str
) -> None:
    module, kinds, _ = LANES[lane]
    if kinds and (why := unavailable()):
        pytest.skip(why)
    if kind == "right":  # the control
        check_through_groups(ranks, kinds)
        check_algorithm(name, kinds)
        return
    real = getattr(module, name)
    skipped = 0 if module is collective else 1  # the memory, or the hosts
    mutant = idle if kind == "idle" else erring(real, WRITTEN[name], skipped)
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError):
        check_through_groups(ranks, kinds)
    with pytest.raises(AssertionError):
        check_algorithm(name, kinds)


@pytest.mark.parametrize("kind", ["idle", "erring"])
def test_messages(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    written = erring(engine.scatter_back, lambda elements, tensor: tensor.view(-1))
    monkeypatch.setattr(engine, "scatter_back", idle if kind == "idle" else written)
    monkeypatch.setattr(engine, "blank", lambda tensor: torch.empty(tensor.numel()))
    with pytest.raises(AssertionError):
        groups.test_tags_match_in_any_order_and_number(ranks, False)


@pytest.mark.parametrize("lane", LANES)
def test_a_barrier_that_does_not_wait(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    module, kinds, _ = LANES[lane]
    if kinds and (why := unavailable()):
        pytest.skip(why)
    with networks_of(kinds) as network_of:
        algorithms.test_barrier_waits_for_the_last(network_of, SIZE)
        monkeypatch.setattr(module, "barrier", idle)
        with pytest.raises(AssertionError):
            algorithms.test_barrier_waits_for_the_last(network_of, SIZE)
