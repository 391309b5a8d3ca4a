"""torch's Store and rendezvous on the mesh, with threads as ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist

import _quicmesh_autoload
from auth import AccessDenied, Ticket
from auth.authorizer import any_of, deny_all
from mesh.collective import CollectiveTimeout, UnsupportedCollective
from mesh.distributed import objects, use
from mesh.distributed.members import JobMembers
from mesh.distributed.options import Options
from mesh.distributed.rendezvous import keep_store, meet
from mesh.distributed.store import MeshStore
from mesh.errors import NodeError
from mesh.store import StoreClient
from tests.mesh.collective.exchange_memory import outcomes, run_ranks
from tests.mesh.distributed.nodes import LoopbackNode, loopback_node, process_group
from transport import PeerAddress


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[LoopbackNode]]:
    with ExitStack() as stack:
        made = [stack.enter_context(loopback_node()) for _ in range(3)]
        keep_store(Options(made[0], "any"))
        yield made


@pytest.fixture
def store(nodes: list[LoopbackNode], request: pytest.FixtureRequest) -> MeshStore:
    where = PeerAddress(nodes[0].endpoint.node_id, nodes[0].endpoint.addresses)
    job = f"job-{abs(hash(request.node.name))}"
    client = StoreClient(nodes[1].endpoint, where, job)
    return MeshStore(nodes[1], client, timedelta(seconds=5))


@pytest.mark.parametrize("prefixed", [False, True])
def test_every_method_of_a_store(store: MeshStore, prefixed: bool) -> None:
    """Through a prefix torch asks from C++, under names of its own."""
    used: Any = dist.PrefixStore("p", store) if prefixed else store
    used.set("a", "1")
    assert used.get("a") == b"1"
    assert (used.add("n", 3), used.add("n", -1)) == (3, 2)
    assert used.check(["a", "n"])
    assert not used.check(["a", "z"])
    used.wait(["a"])
    used.wait(["a"], timedelta(seconds=1))
    assert used.compare_set("c", "", "x") == b"x"
    assert used.compare_set("c", "y", "z") == b"x"
    assert used.compare_set("c", "x", "z") == b"z"
    used.append("a", "2")
    assert used.get("a") == b"12"
    used.multi_set(["m1", "m2"], ["u", "v"])
    assert used.multi_get(["m2", "m1"]) == [b"v", b"u"]
    assert used.num_keys() >= 5
    assert used.delete_key("m1")
    assert not used.delete_key("m1")
    assert used.has_extended_api()
    store.queue_push("q", "v")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q") == b"v"
    assert store.clone().get("p/a" if prefixed else "a") == b"12"
    assert any(key.endswith("m2") for key in store.list_keys())


def test_values_are_bytes_and_stay_so(store: MeshStore) -> None:
    for value in (b"\xff\x00", b"", b"\x80\x04\x95", bytes(300_000)):  # the third begins a pickle
        store.set("k", value)
        assert store.get("k") == value
    store.multi_set([str(i) for i in range(5)], [bytes(200_000)] * 5)  # more than a message holds
    assert len(store.get("4")) == 200_000
    with pytest.raises(dist.DistStoreError, match="at most"):
        store.set("k", bytes(2 << 20))


def test_a_get_waits_and_does_not_hold_up_other_threads(store: MeshStore) -> None:
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(store.get("later")))
    thread.start()
    store.set("other", "1")
    assert not found
    store.set("later", "2")
    thread.join(5)
    assert found == [b"2"]


def test_what_is_missing_is_said_in_time(store: MeshStore) -> None:
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=r"wait timeout: .*'nothing'"):
        store.wait(["nothing"], timedelta(seconds=0.1))
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError):
        store.get("nothing")
    with pytest.raises(dist.DistStoreError):
        dist.PrefixStore("p", store).get("nothing")
    with pytest.raises(dist.DistStoreError):
        store.queue_pop("nothing", block=False)
    assert time.monotonic() - began < 3
    assert store.timeout == timedelta(seconds=0.1)


def test_ranks_meet_by_ticket_and_form_a_group(nodes: list[LoopbackNode]) -> None:
    ticket = Ticket(nodes[0].endpoint.node_id, nodes[0].endpoint.addresses).encode()

    def body(rank: int) -> float:
        with use(nodes[rank], job="meet"):  # rank 0 keeps the store itself
            url = f"mesh://{ticket}?rank={rank}&world_size=3"
            store, found, size = next(meet(url, timeout=timedelta(seconds=10)))
        assert (found, size) == (rank, 3)
        group = process_group(nodes[rank], dist.PrefixStore("g", store), rank, 3, job="meet")
        tensor = torch.tensor([float(rank)])
        group.allreduce([tensor]).wait()
        group.shutdown()
        return tensor.item()

    assert run_ranks(3, body) == [3, 3, 3]


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("mesh://TICKET?rank=2&world_size=2", NodeError, "ranks are from 0 to 1"),
        ("mesh://TICKET?rank=0&world_size=1&port=1", UnsupportedCollective, "port"),
        ("mesh://TICKET?rank=0&world_size=1&job=other", UnsupportedCollective, "in use for"),
        ("mesh://mesh1x?rank=0&world_size=1", Exception, "ticket"),
    ],
)
def test_urls_that_cannot_be(nodes: list[LoopbackNode], url: str, kind: Any, words: str) -> None:
    ticket = Ticket(nodes[0].endpoint.node_id, nodes[0].endpoint.addresses).encode()
    with use(nodes[1], job="j"), pytest.raises(kind, match=words):
        next(meet(url.replace("TICKET", ticket)))


@pytest.mark.attack
def test_only_those_are_admitted_for_whom_the_tickets_node_vouches() -> None:
    """Machines that know the keeper alone: what it has seen proved admits them to each other."""
    with ExitStack() as stack:
        keeper = stack.enter_context(loopback_node())
        keep_store(Options(keeper, "any"))
        members = [JobMembers() for _ in range(3)]
        ranks = [
            stack.enter_context(loopback_node(authorizer=any_of(deny_all(), each)))
            for each in members
        ]
        ticket = Ticket(keeper.endpoint.node_id, keeper.endpoint.addresses).encode()

        def body(rank: int) -> dist.Store:
            with use(ranks[rank], job="vouched"):
                url = f"mesh://{ticket}?rank={rank}&world_size=2"
                return next(meet(url, timeout=timedelta(seconds=10)))[0]

        stores = run_ranks(2, body)

        def form(rank: int, name: str, limit: float) -> float:
            store = dist.PrefixStore(name, stores[rank])
            group = process_group(ranks[rank], store, rank, 2, job="vouched", timeout=limit)
            tensor = torch.ones(1)
            group.allreduce([tensor]).wait()
            group.shutdown()
            return tensor.item()

        found = outcomes(2, lambda rank: form(rank, "early", 0.5))
        assert isinstance(found[0], AccessDenied)  # which dials; the other is not come to
        assert isinstance(found[1], CollectiveTimeout)
        ids = [node.endpoint.node_id for node in ranks]
        for node, each in zip(ranks[:2], members, strict=False):
            node.portal.call(each.vouch, "vouched", ids[:2])
            for connection in node.portal.call(lambda node=node: node.endpoint.connections):
                if connection.peer.node_id != keeper.endpoint.node_id:
                    node.portal.call(connection.close)
        assert run_ranks(2, lambda rank: form(rank, "vouched", 5)) == [2, 2]  # positive control
        # A third that is no member, with a forged entry in rank 1's place.
        other: Any = dist.HashStore()
        found = outcomes(
            2, lambda at: process_group(ranks[(0, 2)[at]], other, at, 2, job="vouched", timeout=0.5)
        )
        assert isinstance(found[0], AccessDenied)


def test_object_collectives_can_be_refused() -> None:
    objects.refuse_objects()
    objects.refuse_objects()  # once is enough
    with loopback_node() as node:
        groups: list[Any] = []
        for allowed in (False, True):
            made = process_group(node, dist.HashStore(), 0, 1)
            made.options = Options(node, "test", objects=allowed)
            groups.append(made)
        sent = dist.distributed_c10d._object_to_tensor({"a": 1}, torch.device("cpu"), groups[1])
        back = dist.distributed_c10d._tensor_to_object(*sent, groups[1])
        assert back == {"a": 1}
        for call in (
            lambda: dist.distributed_c10d._object_to_tensor(1, torch.device("cpu"), groups[0]),
            lambda: dist.distributed_c10d._tensor_to_object(*sent, groups[0]),
        ):
            with pytest.raises(UnsupportedCollective, match="unpickle"):
                call()
        for made in groups:
            made.shutdown()


def test_the_launchers_url_stands_for_env(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setenv(_quicmesh_autoload.RENDEZVOUS, "mesh://t?job=j")
    monkeypatch.setattr(_quicmesh_autoload, "_meet", lambda url, **_: seen.append(url))
    _quicmesh_autoload._meet_by_environment("env://")
    _quicmesh_autoload._meet_by_environment("env://?rank=0&world_size=2")
    assert seen == ["mesh://t?job=j", "mesh://t?job=j&rank=0&world_size=2"]
    assert urlsplit(seen[1]).query == "job=j&rank=0&world_size=2"


def test_torch_stays_usable_whatever_fails_on_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_quicmesh_autoload, "register", lambda: 1 / 0)
    _quicmesh_autoload.load()
