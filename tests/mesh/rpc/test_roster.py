"""Who takes part in a job, by what a store says."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from auth import SecretKey
from mesh.rpc import RpcError, RpcTimeout, WorkerInfo
from mesh.rpc.job.roster import Roster

NODE = SecretKey.generate().node_id
WHERE = (("127.0.0.1", 1),)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "must be non-empty"),
        ("a" * 128, "shorter than 128"),
        ("abc*", "Worker name must match"),
        (" ", "Worker name must match"),
    ],
)
def test_what_no_worker_is_called(name: str, text: str) -> None:
    with pytest.raises(RpcError, match=text):
        WorkerInfo(name, 0, NODE)
    with pytest.raises(RpcError, match=text):
        Roster(HashStore(), name, 0, 1)


def test_who_has_come_is_found_and_nobody_else_once_all_have() -> None:
    store = HashStore()
    a, b = Roster(store, "a", 0, 2), Roster(store, "b", 1, 2)
    a.publish(NODE, WHERE)
    with pytest.raises(RpcTimeout, match="1"):
        a.everybody(0.01)
    b.publish(NODE, WHERE)
    assert [info.name for info in a.everybody(5)] == ["a", "b"]
    assert a.find("b", 0) == a.find(1, 0) == WorkerInfo("b", 1, NODE)
    assert a.addresses(NODE) == WHERE
    for nobody in ("c", 2, -1):
        with pytest.raises(RpcError, match="could not find destination"):
            a.find(nobody, 60)


@pytest.mark.parametrize(("name", "rank"), [("a", 1), ("b", 0)])
def test_everybody_hears_of_a_name_or_rank_that_two_have(name: str, rank: int) -> None:
    store = HashStore()
    first, second = Roster(store, "a", 0, 2), Roster(store, name, rank, 2)
    first.publish(NODE, WHERE)
    with pytest.raises(RpcError, match="is not unique"):
        second.publish(NODE, WHERE)
    with pytest.raises(RpcError, match="is not unique"):
        first.everybody(60)


def test_a_job_has_a_fixed_size_or_none() -> None:
    store = HashStore()
    Roster(store, "a", 0, 2).publish(NODE, WHERE)
    with pytest.raises(RpcError, match="mixes statically and dynamically"):
        Roster(store, "b", 1, None).publish(NODE, WHERE)


def test_what_is_said_is_heard() -> None:
    store = HashStore()
    a, b = Roster(store, "a", 0, 2), Roster(store, "b", 1, 2)
    assert b.heard("wave-0", 0, 0.01) is None
    a.say("wave-0", "17")
    assert b.heard("wave-0", 0) == "17"
    assert b.heard("wave-1", 0, 0.01) is None
